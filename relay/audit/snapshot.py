"""The files of one run, frozen: the ledger at one instant, then the store as it was after.

The order matters. A row of the ledger is completed only once the journal holds its message, so
every completed row of the ledger's snapshot must be found in a store that is read later: the
checkpoint, and the journal behind it. What is younger than the snapshot is in the store and not in
the ledger: such a message is an orphan only when it is older than the snapshot by the grace.

Ages are reckoned up to the time until which a relay was observing the home. Later inactivity is
not evidence about agents: an agent is not silent for the months that a copy lay about.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from typing import NamedTuple

from relay.acomm import store_file
from relay.acomm.store_file import encrypt
from relay.audit.sources import journal_files
from relay.audit.sources.journal_files import ReadSettings
from relay.audit.sources.ledger_rows import LedgerSnapshot, take_snapshot
from relay.base import fsio
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import load
from relay.base.discovery import CONFIG, has_config
from relay.base.errors import (
    FormatError,
    HomeMissing,
    KeyFileError,
    RelayError,
    SealedStore,
)
from relay.base.home import JOURNAL, LEDGER, LOCK, STORE, Home
from relay.daemon.opening import open_store_readonly, store_key
from relay.ledger.file import connect_readonly

ARCHIVES = "store/archive/**/*.acomm"
SMALL_BYTES = 32 << 20  # of ledger and store
DAY_NS = 86_400 * NS_PER_S
DEFAULT_GRACE_S = 30.0  # a batch is recorded within a second of its discovery
DEFAULT_RECENT_DAYS = 7.0  # covers a long weekend; repaired findings soon drop out
_LAST_ACTIVITY = (
    "SELECT discovered_at FROM messages ORDER BY id DESC LIMIT 1",
    "SELECT at FROM audit_log ORDER BY id DESC LIMIT 1",
    "SELECT at FROM security_events ORDER BY id DESC LIMIT 1",
    "SELECT max(last_seen_at) FROM agents",
    "SELECT max(changed_at) FROM processes",
    "SELECT max(updated_at) FROM orchestrator_state",
)


class FrozenJournal(NamedTuple):
    """The journal up to its end at that time; later records are not read."""

    until: dict[str, int]  # stream -> logical offset; empty without a journal
    settings: ReadSettings = ReadSettings()


class HomeSnapshot(NamedTuple):
    """The files of one run: they do not change any more."""

    home: str
    folder: str  # private to the run: holds the copies
    ledger: LedgerSnapshot
    store_files: tuple[str, ...]  # the live store as it stood, and the archives in their places
    grace_ns: int
    observed_until_ns: int  # the snapshot, or the last activity of a relay that runs no more
    recent_ns: int  # how long before that something may have happened and still be judged
    journal: FrozenJournal = FrozenJournal({})

    @property
    def is_small(self) -> bool:
        """True for ledger and store of some ten thousand messages."""
        return self.size <= SMALL_BYTES

    @property
    def size(self) -> int:
        """Bytes of ledger and store files."""
        files = (self.ledger.path, *self.store_files)
        # A file that retention took meanwhile is reported by the job that reads it.
        return sum(os.path.getsize(path) for path in files if os.path.exists(path))

    def original_paths(self, text: str) -> str:
        """Replace the paths of copies in ``text`` by those of their originals."""
        for copy in (LEDGER, STORE):  # what else is in the folder is the run's own
            text = text.replace(os.path.join(self.folder, copy), os.path.join(self.home, copy))
        return text


def snapshot_home(
    home: str,
    folder: str,
    clock: Clock,
    grace_s: float = DEFAULT_GRACE_S,
    recent_days: float = DEFAULT_RECENT_DAYS,
) -> HomeSnapshot:
    """Take the ledger's snapshot, the live store, the list of archives, the journal's end.

    The store before the archives: a message that moves to an archive meanwhile is seen twice,
    never not at all. The journal has whatever the others have, so it is last. A store that was
    never written is an empty one.
    Errors: HomeMissing; LedgerError; RelayError when the store is missing or cannot be copied.
    """
    if not os.path.isdir(home):
        raise HomeMissing(f"there is no relay home at {home}")
    _require_readable(home)
    if not (has_config(home) or os.path.exists(os.path.join(home, LEDGER))):
        text = f"{home} is not a relay home: it has neither {CONFIG} nor {LEDGER}"
        raise HomeMissing(text, hint="name a relay home")
    ledger = take_snapshot(os.path.join(home, LEDGER), os.path.join(folder, LEDGER), clock)
    files = _take_store(home, folder, clock)
    pattern = os.path.join(glob.escape(home), ARCHIVES)
    files += sorted(glob.glob(pattern, recursive=True))
    journal = _freeze_journal(home)
    until, recent = observed_until(home, ledger), int(recent_days * DAY_NS)
    grace = int(grace_s * NS_PER_S)
    return HomeSnapshot(home, folder, ledger, tuple(files), grace, until, recent, journal)


def _require_readable(home: str) -> None:
    """Check that this user may read the ledger. Errors: RelayError."""
    path = os.path.join(home, LEDGER)
    hint = "run this as the user whose relay it is, or over a copy of the home"
    try:
        os.scandir(home).close()
        if os.path.exists(path):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise RelayError(f"{exc.filename} cannot be read: {exc.strerror}", hint=hint) from exc
    # A reader of a ledger in WAL mode maps ledger.db-shm, and makes it where it is not there.
    if not os.access(home, os.W_OK) and not os.path.exists(f"{path}-shm"):
        raise RelayError(f"{path} cannot be read: its folder cannot be written", hint=hint)


def _freeze_journal(home: str) -> FrozenJournal:
    """Note where the journal ends now. Damage in it is reported by the jobs that read it."""
    if not os.path.isdir(os.path.join(home, JOURNAL)):
        return FrozenJournal({})
    until = {}
    for stream in journal_files.find_streams([os.path.join(glob.escape(home), JOURNAL)]):
        until[stream] = journal_files.plan(stream, strict=False).end
    return FrozenJournal(until, journal_files.home_settings(home))


def _take_store(home: str, folder: str, clock: Clock) -> list[str]:
    """Write the live store in its present state; if that fails, copy its file for the jobs."""
    if not os.path.isdir(os.path.join(home, JOURNAL)) or not os.path.exists(
        os.path.join(home, CONFIG)
    ):
        return _copy_store(home, folder)
    target = os.path.join(folder, STORE)
    try:
        with Home(home) as opened:
            config = load(opened)
            key = store_key(opened, config, make=False)
            file = open_store_readonly(opened, clock, config, key).snapshot().file()
        os.makedirs(os.path.dirname(target), mode=0o700)
        with open(target, "wb") as copy:  # not synced: it is this run's alone
            copy.write(store_file.encode(encrypt(file, key)))
    except (FormatError, KeyFileError, SealedStore):
        return _copy_store(home, folder)
    return [target]


def _copy_store(home: str, folder: str) -> list[str]:
    source, target = os.path.join(home, STORE), os.path.join(folder, STORE)
    if not os.path.isdir(os.path.dirname(source)):
        raise RelayError(f"{home} has no store", hint="`relay init` completes a home; see --home")
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        # The file is replaced by rename: the one that is open stays whole.
        shutil.copyfile(source, target)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise RelayError(f"{source} cannot be copied: {exc}") from exc
    return [target]


def observed_until(home: str, ledger: LedgerSnapshot) -> int:
    """Return the time until which a relay was observing the home, in Unix nanoseconds.

    While a relay runs that is the snapshot's time, else the last activity in the ledger, and never
    later than the snapshot. Errors: LedgerError when the snapshot cannot be read.
    """
    if _has_relay(home):
        return ledger.taken_ns
    with contextlib.closing(connect_readonly(ledger.path)) as db:
        rows = [db.execute(query).fetchone() for query in _LAST_ACTIVITY]
    times = [row[0] for row in rows if row and row[0] is not None]
    return min(max(times, default=ledger.taken_ns), ledger.taken_ns)


def _has_relay(home: str) -> bool:
    try:
        return fsio.lock_owner(os.path.join(home, LOCK)) is not None
    except OSError:
        return False
