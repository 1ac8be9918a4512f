"""Open the relay's store and its journal: load, replay, rebuild.

    store/relay.acomm        a checkpoint: everything before an offset of the journal
    store/relay.acomm.prev   the previous checkpoint
    store/base.acomm         the checkpoint that replaces the pruned beginning of the journal
    journal/{stream}/        every event

The newest readable checkpoint is loaded, and the journal after its offset is applied. Without a
checkpoint the store is rebuilt from the journal alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from relay.acomm import store_file
from relay.acomm.container import VERSION, VERSION_AT, Flag
from relay.acomm.engine_state import JournalPosition
from relay.acomm.store_file import PREVIOUS, lost_on_rewrite, peek_header
from relay.base import crypto, disk, fsio
from relay.base.clock import NS_PER_S, Clock, boot_id
from relay.base.config import Config
from relay.base.errors import (
    FormatError,
    JournalPruned,
    RelayError,
    SealedStore,
    UnsafePath,
    VersionError,
)
from relay.base.home import ARCHIVES, BASE, JOURNAL, STORE, TOP_DIRS, Home
from relay.daemon.home_journal import note_covered, open_journal, stream_dir
from relay.delivery.eventlog import STREAM_ID, EventLog, replay
from relay.engine.archive_files import ArchiveFiles
from relay.engine.engine import Engine, load_state
from relay.engine.events import Event, EventCodec, EventRecord
from relay.engine.rules import DEFAULT_LIMITS
from relay.engine.state import DeliveryRules, State
from relay.journal.format import Record
from relay.journal.journal import Journal, JournalReader
from relay.journal.manifest_reader import checkpoint_offsets, read_manifest
from relay.journal.tiers import Tiers

if TYPE_CHECKING:
    from relay.delivery.projection import Projection

Warn = Callable[[str], object]
# Writes the rows of a piece, which ends at an offset of the journal, into the ledger.
WritePiece = Callable[[Engine, "Projection", int], None]


class OpenedStore(NamedTuple):
    """A store opened for writing, and what its replay found."""

    store: Engine
    events: EventLog  # of the store: its journal
    tiers: Tiers
    key: bytes | None  # of the store's file
    projection: Projection  # of the events after the ledger's position
    may_lack_unsynced: bool  # another boot of the machine, or another mount, since


def store_key(home: Home, config: Config, *, make: bool) -> bytes | None:
    """The key of the store's file, or None when ``store.encrypt`` is off.

    With ``make`` a first start creates one, unless an encrypted store or journal needs its own.
    Errors: KeyFileError; FormatError for a store file that has no header.
    """
    if not config.store.encrypt:
        return None
    path = home.path(config.store.key_file)
    files = (home.path(STORE), home.path(STORE) + PREVIOUS)
    if not os.path.lexists(path) and not any(map(_is_encrypted, files)) and opens(home, None):
        return crypto.create_key(path) if make else None
    return crypto.load_key(path)


def _is_encrypted(path: str) -> bool:
    return os.path.exists(path) and bool(peek_header(path).flags & Flag.ENCRYPTED)


def opens(home: Home, key: bytes | None) -> bool:
    """False if the journal's newest event is encrypted with another key.

    Only the newest one is checked: encryption applies from the moment it is configured. Damaged
    events are not judged.
    """
    folder, newest = stream_dir(home), None
    if not os.path.isdir(folder):
        return True
    try:
        entries = list(read_manifest(folder, _ignore).catalog.entries.values())
        begin = entries[-1].base_offset if entries else 0
        for record in JournalReader(folder, warn=_ignore).read(begin):
            newest = record
    except (RelayError, OSError):
        pass  # check what can be read
    try:
        if newest is not None:
            EventCodec(key, folder).decode(newest.payload, newest.offset)
    except SealedStore:
        return False
    except FormatError:
        return True
    return True


def _ignore(_: str) -> None:
    """Drop warnings: the caller that opens the journal gets them."""


def open_store_readonly(
    home: Home,
    clock: Clock,
    config: Config,
    key: bytes | None = None,
    on_event: Callable[[Event, int], object] = lambda *_: None,
) -> Engine:
    """Load the store as it is now, read-only, while a daemon may be running.

    ``on_event`` gets every event after the newest checkpoint, and when it happened (Unix
    nanoseconds; 0: see the event).

    Errors: FormatError when neither checkpoint nor journal can be read, JournalPruned, SealedStore
    for an encrypted one that is not this key's.
    """
    store = _load(home, clock, config, key, None)
    records = JournalReader(stream_dir(home), warn=store.warn).read(_covered_offset(store.state))

    def on_record(frame: EventRecord, _: int) -> None:
        if frame.event is not None:
            on_event(frame.event, frame.at_ns)

    replay(records, EventCodec(key, stream_dir(home)), store, on_record, store.warn)
    return store


def open_store(
    home: Home,
    config: Config,
    clock: Clock,
    warn: Warn,
    *,
    make_key: bool = True,
    epoch: int = 0,
    ledger_position: int = 0,
    boot: str = "",
    write_piece: WritePiece | None = None,
) -> OpenedStore:
    """Open the store for the daemon; damaged files are set aside, and ``warn`` is called.

    ``ledger_position``: offset up to which the ledger follows the journal; ``write_piece`` brings
    it further. ``boot``: in place of ``_run_id``. Errors: FormatError when neither checkpoint nor
    journal can be read, VersionError when a checkpoint would lose content of the store file,
    JournalPruned when records that the store lacks were pruned, SealedStore (all of these change
    nothing in the store); those of ``store_key``; OSError.
    """
    key = store_key(home, config, make=make_key)
    boot = boot or _run_id(home)
    store = _load(home, clock, config, key, warn)
    if os.path.lexists(home.path(STORE)) and (lost := lost_on_rewrite(home.path(STORE))):
        expected = f"a store file of version {VERSION} (a flush would lose {lost})"
        raise VersionError(home.path(STORE), VERSION_AT, expected, lost)
    for folder in (os.path.dirname(home.path(STORE)), home.path(JOURNAL), stream_dir(home)):
        fsio.ensure_dir(folder)
    if ledger_position > _covered_offset(store.state) and _has_no_files(stream_dir(home)):
        _continue_after_lost_stream(
            home, store, JournalPosition(STREAM_ID, ledger_position, boot), config, key
        )
    covered, codec = _covered_offset(store.state), EventCodec(key, stream_dir(home))
    with contextlib.ExitStack() as held:
        journal, tiers = open_journal(
            held, home, config, clock, warn, epoch=epoch, known=ledger_position, covered=covered
        )
        _check_not_pruned(home, store.state, journal.first, changed=True)
        past = JournalReplay(store, ledger_position, write_piece)
        past.replay(journal, tiers, codec, boot, warn)
        state = store.state
        journal.raise_ext_id(state.next_message - 1)
        for name in store.archives.rename_strays():
            warn(f"An archive that the store does not list was set aside: {name}")
        log = EventLog(journal, codec, store, boot, partial(note_covered, home, tiers))
        past.projection.start(clock.now_ns())
        log.begin(epoch, past.boot)
        held.pop_all()  # the caller owns it from now on
    return OpenedStore(store, log, tiers, key, past.projection, past.may_lack_unsynced)


def _has_no_files(folder: str) -> bool:
    """True when a stream has no files: it was removed, or never existed.

    Errors: OSError when the folder cannot be read.
    """

    def fail(exc: OSError) -> None:
        raise exc

    return not any(files for _, _, files in os.walk(folder, onerror=fail))


def _continue_after_lost_stream(
    home: Home, store: Engine, position: JournalPosition, config: Config, key: bytes | None
) -> None:
    """Continue after a stream was lost that the ledger followed further than any store file.

    The events in between are lost; the journal reports that when it is opened. A checkpoint of the
    rest covers the gap, so that the next start does not search for it. Errors: OSError.
    """
    store.state.journal = position
    snapshot = store.snapshot()
    snapshot = snapshot._replace(state=snapshot.state._replace(journal=position))
    store_file.save(home.path(STORE), snapshot, config.store.compress, key)
    store.archives.loaded_from(home.path(STORE))


def load_checkpoint(
    home: Home, clock: Clock, config: Config, key: bytes | None
) -> tuple[State, ArchiveFiles]:
    """The store's newest checkpoint without the later events, read-only, and its archives.

    Errors: as ``open_store_readonly``.
    """
    return _load(home, clock, config, key, None).state, ArchiveFiles(home.path(ARCHIVES), key)


class JournalReplay:
    """Replays the journal into the store and the ledger's projection."""

    def __init__(self, store: Engine, ledger_position: int, write_piece: WritePiece | None) -> None:
        from relay.delivery.projection import Projection  # who only reads needs none

        self.projection = Projection()
        self._write_piece = write_piece
        self.boot = store.state.journal.boot_id if store.state.journal else ""
        self.may_lack_unsynced = False
        self._store = store
        self._covered = _covered_offset(store.state)
        self._ledger_position = ledger_position

    def replay(
        self, journal: Journal, tiers: Tiers, codec: EventCodec, boot: str, warn: Warn
    ) -> None:
        """Bring the store to the journal's end; ``boot`` is the present boot id."""
        if self._ledger_position < journal.first:
            warn(
                f"the ledger follows the journal up to {self._ledger_position}, and what came"
                f" before {journal.first} was pruned: rows of that time are not restored"
            )
        begin = min(self._covered, self._ledger_position)
        replay(journal.read(begin, tiers.fetch), codec, self._store, self._on_record, warn)
        self.may_lack_unsynced = self.boot not in ("", boot)
        if self.may_lack_unsynced:  # inboxes are then compared with everything delivered since
            begin = min(self._covered, self._ledger_position)
            self._replay_all(journal.read(begin, tiers.fetch), codec)

    def _on_record(self, frame: EventRecord, offset: int) -> None:
        if frame.start is not None:
            self.boot = frame.start.boot_id
            self.projection.start(frame.start.at)
        if frame.event is not None and offset >= self._ledger_position:
            if self._write_piece is not None and self.projection.is_piece(frame.event):
                self._write_piece(self._store, self.projection, offset)
                self.projection, self._ledger_position = self.projection.next_piece(), offset
            is_recent = offset >= self._covered
            self.projection.apply(frame.event, frame.at_ns, is_recent=is_recent)

    def _replay_all(self, records: Iterable[Record], codec: EventCodec) -> None:
        """Apply all records since the checkpoint to the projection, whatever the ledger has.

        They are not written piece by piece: the ledger may know a read that the journal lost.
        """
        from relay.delivery.projection import Projection

        names, self.projection = self.projection.relay_ids, Projection()
        self.projection.relay_ids = names
        self._ledger_position, self._write_piece = 0, None
        for record in records:
            self._on_record(codec.decode(record.payload, record.offset), record.offset)


def _run_id(home: Home) -> str:
    """The boot of the machine and the mounts of the home: with another one of them, what was not
    synced before may be lost, as by a power cut or by a disk that was gone for a while."""
    mounts = set[int]()
    for name in ("", *TOP_DIRS):
        with contextlib.suppress(OSError):
            fd = fsio.open_dir(home.path(name) if name else home.root)
            mounts.add(disk.mount_id(fd))
            os.close(fd)
    return " ".join((boot_id(), *(str(number) for number in sorted(mounts) if number)))


def _covered_offset(state: State) -> int:
    return state.journal.offset if state.journal else 0


def _load(home: Home, clock: Clock, config: Config, key: bytes | None, warn: Warn | None) -> Engine:
    """The newest checkpoint, set up for a relay; an empty store if there is none."""
    path = home.path(STORE)
    if os.path.islink(path):
        raise UnsafePath(f"{path} is a link")
    limits = DEFAULT_LIMITS._replace(active_messages=config.store.active_messages)
    has_journal = fsio.exists(stream_dir(home))
    first = JournalReader(stream_dir(home)).first()

    def accept(state: State) -> None:
        _check_not_pruned(home, state, first)

    fault: FormatError | None = None
    try:
        state = load_state(
            path,
            key,
            warn,
            read_only=warn is None,
            accept=accept,
            outcome="the journal has the later events"
            if has_journal
            else store_file.LATER_EVENTS_LOST,
        )
    except FormatError as exc:
        if isinstance(exc, VersionError) or not has_journal:
            raise
        state, fault = None, exc
    if state is None:
        path = home.path(BASE)
        state = _base_or_empty(home, clock, key, warn)
        accept(state)  # before anything is touched
        if warn is not None and (fault or (has_journal and _had_file(home, first))):
            _warn_of_rebuild(home.path(STORE), fault, warn)
    rules = DeliveryRules(
        True,
        config.delivery.ack_timeout_s,
        config.delivery.command_timeout_s,
        config.delivery.give_up_after_s,
    )
    files = ArchiveFiles(home.path(ARCHIVES), key)
    store = Engine(clock, state, limits, rules, archive_files=files, warn=warn, keeps_events=True)
    store.archives.loaded_from(path)
    return store


def _had_file(home: Home, first: int) -> bool:
    """False for a new home: no checkpoint was written yet, and the journal is complete."""
    return first > 0 or bool(checkpoint_offsets(stream_dir(home)))


def _base_or_empty(home: Home, clock: Clock, key: bytes | None, warn: Warn | None) -> State:
    """The state before the journal's first record: empty, or the base if it was pruned."""
    try:
        base = load_state(home.path(BASE), key, warn, read_only=True)
    except FormatError as exc:
        if isinstance(exc, VersionError):
            raise
        base = None  # the check below reports what is missing
    return base or State(clock.now_ns() // NS_PER_S)


def _check_not_pruned(home: Home, state: State, first: int, *, changed: bool = False) -> None:
    """Errors: JournalPruned when the journal does not reach back to the store's offset."""
    begin = _covered_offset(state)
    if begin < first:
        found = f"covers the journal before {begin}" if begin else "can be read"
        raise JournalPruned(
            f"{home.path(STORE)}: the journal's records before offset {first} were pruned, and no"
            f" store file from there on {'is left: the best one ' if begin else ''}{found}",
            hint=f"restore {STORE}, {STORE}{PREVIOUS} or {BASE} from a backup made since"
            f" the journal was pruned{'' if changed else '; nothing was changed'}",
        )


def _warn_of_rebuild(path: str, fault: FormatError | None, warn: Warn) -> None:
    """Set damaged files aside, and warn about what the store is rebuilt from."""
    if fault is None:
        warn(f"{path} is missing: the store is rebuilt from the journal")
        return
    aside = [store_file.set_aside(name) for name in (path, path + PREVIOUS)]
    names = ", ".join(name for name in aside if name)
    warn(f"{fault}; the store is rebuilt from the journal, the damaged file is now {names}")
