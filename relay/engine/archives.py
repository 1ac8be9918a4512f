"""Archives: immutable `.acomm` files of final messages; writing, querying, and rolling into them.

    {folder}/2026-01-31/000001.acomm    section 2: the messages, with their final states
                                        section 256: recipients and relay ids
                                        section 257: the same messages as columns, for audits

A store lists its archives (``ArchiveInfo``); a file that is not listed does not count. That list
and each file's indexes decide which files a query reads; a file is verified before it is used.

``Roller`` moves final messages into a new archive, a slice at a time:

    scan             a few thousand messages a step: which are final, and old enough?
    write            the archive, in another thread
    Rolled           the event: the archive counts, its messages are being evicted
    MessagesEvicted  a few thousand of them a step

A message is final when every delivery is: written, where no acknowledgment is expected; else
acknowledged, expired or bounced. Messages with dead letters stay until those are settled. After a
crash before the event is committed the file is a stray, and the messages are where they were.
Source: DESIGN, "Bounded whatever the history".
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from struct import pack, unpack
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState, StoreSnapshot
from relay.acomm.indexes import Indexes
from relay.acomm.model import (
    ArchiveInfo,
    Delivery,
    Message,
    MessageFilter,
    MessageStatus,
    Priority,
    SortField,
    SortOrder,
    StoreFile,
)
from relay.acomm.store_file import decrypt, encrypt
from relay.base import fsio
from relay.base.checksums import sha256_hex
from relay.base.clock import NS_PER_S, Clock, iso_date
from relay.base.errors import FormatError, RelayError
from relay.engine import events
from relay.engine.query import (
    QueryResult,
    Rank,
    find,
    in_time_range,
    index_lookups,
    is_index_query,
    is_outside,
    is_within,
    page,
)
from relay.engine.state import State

RELAY_IDS = 9  # block of section 256
STRAY = ".stray"
_FILES_KEPT = 2  # decoded ones: a page of history asks for the same file again and again
_INDEXES_KEPT = 64

T = TypeVar("T")


class ArchiveIndexes(NamedTuple):
    """The indexes of an archive, which tell whether its messages are needed."""

    indexes: Indexes
    hashes: Sequence[int]  # of the relay ids, ascending
    numbers: Sequence[int]  # the message of each


class Archived(NamedTuple):
    """One message of an archive, and what became of its deliveries."""

    message: Message
    deliveries: dict[str, Delivery]


class Archives:
    """Reads and writes the archives below one folder. Not thread-safe, but for ``write``."""

    def __init__(self, folder: str, key: bytes | None = None) -> None:
        self._folder = folder
        self._key = key
        self._files: OrderedDict[str, StoreFile] = OrderedDict()
        self._indexes: OrderedDict[str, ArchiveIndexes] = OrderedDict()

    def write(self, name: str, snapshot: StoreSnapshot) -> int:
        """Write an archive, whole, and give its size in bytes.

        It counts once the store lists it; one of that name that a crash left is replaced.
        Errors: OSError, and then nothing of it is left: it would bear another day's name next
        time, and nobody would know it for a stray.
        """
        path = os.path.join(self._folder, name)
        for folder in (self._folder, os.path.dirname(path)):
            fsio.ensure_dir(folder)
        file = snapshot.file()
        blocks = file.engine_state | {RELAY_IDS: _encode_relay_ids(file.messages)}
        file = msgspec.structs.replace(file, engine_state=blocks)
        try:
            store_file.write(path, encrypt(file, self._key), columns=True)
            fsio.sync_dir(self._folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return os.path.getsize(path)

    def rename_strays(self, notes: Iterable[ArchiveInfo], next_number: int) -> list[str]:
        """Rename what the store does not list: a crash came before the event that counts it.

        Only numbers from ``next_number`` on: an older one is another store's business.
        """
        known = {note.name for note in notes}
        aside = []
        for folder in sorted(os.listdir(self._folder)) if os.path.isdir(self._folder) else ():
            for name in sorted(os.listdir(os.path.join(self._folder, folder))):
                number, _, suffix = name.partition(".")
                is_archive = suffix == "acomm" and number.isascii() and number.isdigit()
                if is_archive and int(number) >= next_number and f"{folder}/{name}" not in known:
                    path = os.path.join(self._folder, folder, name)
                    os.rename(path, path + STRAY)
                    aside.append(path + STRAY)
        return aside

    def count(self, note: ArchiveInfo, wanted: MessageFilter) -> int | None:
        """The number of matching messages in an archive, if its indexes alone can tell."""
        if not is_index_query(wanted) or (note.archived and not wanted.include_archived):
            return None
        ids = self._ids(note, wanted)
        return note.messages if ids is None else len(ids)

    def messages(self, note: ArchiveInfo, wanted: MessageFilter) -> Iterator[Message]:
        """Those of an archive among which every match is; none when its indexes say so.

        Errors: FormatError for a damaged archive, OSError for one that is gone.
        """
        ids = self._ids(note, wanted)
        if ids is None:
            yield from self._load(note).messages
        elif ids:
            yield from (m for m in self._load(note).messages if m.id in ids)

    def select(
        self,
        notes: Iterable[ArchiveInfo],
        here: Iterable[Message],
        wanted: MessageFilter,
        leaving: ArchiveInfo | None,
        still_here: Container[int],
        rank: Rank | None = None,
    ) -> QueryResult:
        """The page of what the store has (``here``) and its archives that a filter asks for.

        By time, an archive whose messages cannot be on the page is counted by its indexes alone.
        ``leaving``: the archive of which some messages are ``still_here``. ``rank``: of ``page``.
        Errors: as ``query.find``, and as ``messages``.
        """
        found = find(here, wanted)
        total = len(found)
        last_first = wanted.order[1] is SortOrder.DESCENDING
        for note in sorted(notes, key=lambda note: note.last_at, reverse=last_first):
            if note is not leaving and _is_full(found, note, wanted, rank):
                count = self.count(note, wanted)
                if count is not None:
                    total += count
                    continue
            rolled = (
                message
                for message in self.messages(note, wanted)
                if note is not leaving or message.id not in still_here
            )
            more = find(rolled, wanted)
            found += more
            total += len(more)
        return page(found, wanted, total, rank)

    def thread(self, notes: Iterable[ArchiveInfo], correlation_id: str) -> list[Message]:
        """Every archived message of a thread. Errors: as ``messages``."""
        wanted = MessageFilter(correlation_id=correlation_id)
        return [m for note in notes for m in self.messages(note, wanted)]

    def find(self, notes: Sequence[ArchiveInfo], relay_id: str) -> Archived | None:
        """The message that came through the relay under this id. Errors: as ``messages``."""
        wanted = _hash(relay_id)
        for note in reversed(notes):
            aids = self._cached(self._indexes, note.name, self._read_indexes, _INDEXES_KEPT)
            at = bisect_left(aids.hashes, wanted)
            while at < len(aids.hashes) and aids.hashes[at] == wanted:
                found = self._find_message(note, aids.numbers[at])
                if found is not None and found.message.relay_id == relay_id:
                    return found
                at += 1
        return None

    def get(self, notes: Iterable[ArchiveInfo], number: int) -> Archived | None:
        """The message of that number. Errors: as ``messages``."""
        for note in notes:
            if note.first_id <= number <= note.last_id and (
                found := self._find_message(note, number)
            ):
                return found
        return None

    def _find_message(self, note: ArchiveInfo, number: int) -> Archived | None:
        file = self._load(note)
        for message in file.messages:
            if message.id == number:
                deliveries = EngineState.decode(file.engine_state).deliveries
                return Archived(message, deliveries.get(number, {}))
        return None

    def _ids(self, note: ArchiveInfo, wanted: MessageFilter) -> set[int] | None:
        """The ids that every index allows; None when no criterion is one of theirs."""
        if is_outside(note, wanted):
            return set()
        lists = list(index_lookups(wanted))
        within = is_within(note, wanted)
        if not lists and within:
            return None
        indexes = self._cached(self._indexes, note.name, self._read_indexes, _INDEXES_KEPT).indexes
        found: set[int] | None = None
        for ids_of in lists:
            ids = ids_of(indexes)
            if ids is None:  # the file lacks that index
                return None
            found = set(ids) if found is None else found & set(ids)
        if not within:
            if indexes.timestamp is None:
                return None
            timed = {number for at, number in indexes.timestamp if in_time_range(at, wanted)}
            found = timed if found is None else found & timed
        return found

    def _load(self, note: ArchiveInfo) -> StoreFile:
        return self._cached(self._files, note.name, self._read, _FILES_KEPT)

    def _cached(
        self, cache: OrderedDict[str, T], name: str, read: Callable[[str], T], most: int
    ) -> T:
        """From the cache, or read now; the least recently used goes."""
        if name not in cache:
            cache[name] = read(os.path.join(self._folder, name))
        cache.move_to_end(name)
        while len(cache) > most:
            cache.popitem(last=False)
        return cache[name]

    def _read(self, path: str) -> StoreFile:
        return decrypt(store_file.read(path), self._key, path)

    def _read_indexes(self, path: str) -> ArchiveIndexes:
        indexes, blocks = store_file.read_indexes(path)
        block = blocks.get(RELAY_IDS, b"")
        count = (len(block) - 8) // 16
        if len(block) % 16 != 8 or int.from_bytes(block[:8], "little") != count:
            raise FormatError(path, 0, "a table of relay ids in section 256", f"{len(block)} bytes")
        table = unpack(f"<{2 * count}Q", block[8:])
        return ArchiveIndexes(indexes, table[:count], table[count:])


def _is_full(
    found: list[Message], note: ArchiveInfo, wanted: MessageFilter, rank: Rank | None
) -> bool:
    """True when the page is full of messages that come before all of an archive's."""
    field, order = wanted.order
    if field is not SortField.CREATED_AT:
        return False
    last_first = order is SortOrder.DESCENDING
    before = sum(
        message.created_at > note.last_at if last_first else message.created_at < note.first_at
        for message in found
        if rank is None or rank(message) == Priority.CRITICAL  # none is grouped before it
    )
    return before >= wanted.offset + wanted.limit


def _encode_relay_ids(messages: Iterable[Message]) -> bytes:
    pairs = sorted(
        (_hash(str(relay_id)), message.id)
        for message in messages
        if (relay_id := (message.metadata or {}).get("relay_id")) is not None
    )
    hashes, numbers = [h for h, _ in pairs], [number for _, number in pairs]
    return pack(f"<Q{2 * len(pairs)}Q", len(pairs), *hashes, *numbers)


def _hash(relay_id: str) -> int:
    return int(sha256_hex(relay_id.encode())[:16], 16)


SCAN_BATCH = 2_000  # messages in one step: about 2 ms
EVICT_BATCH = 2_000
PAUSE_S = 60  # between one look at everything and the next
RECORD_BYTES = 128  # of a message, beside its content
DAY_S = 86_400


class RollPolicy(NamedTuple):
    """When messages are rolled, and how many into one archive."""

    after_s: int = 3_600  # since they were sent: most answers have come by then
    messages: int = 10_000  # fewer wait, up to a day: small archives are many files
    most_messages: int = 100_000
    most_bytes: int = 64 << 20  # of content and records, uncompressed
    live_messages: int = 50_000  # above this what is final goes, however young


class _WrittenArchive(NamedTuple):
    note: ArchiveInfo
    ids: tuple[int, ...]  # of the messages in it


class RolledStore(Protocol):
    """The store whose messages are rolled."""

    state: State

    def apply(self, event: events.Event) -> None:
        """Change the store as the event says."""

    def retain(self) -> int:
        """Archive what is past the retention of its channel."""

    def is_final(self, message: Message) -> bool:
        """True when no delivery of the message is open."""


class Roller:
    """Rolls one store. Called from its owner's thread; the writing is the executor's."""

    def __init__(
        self,
        store: RolledStore,
        archives: Archives,
        policy: RollPolicy,
        clock: Clock,
        executor: Executor,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._archives = archives
        self._policy = policy
        self._clock = clock
        self._executor = executor
        self._wake = wake
        self._unscanned: list[int] = []  # message ids still to be looked at, the next one last
        self._final: list[int] = []
        self._bytes = 0
        self._pressed = False
        self._writing: Future[_WrittenArchive] | None = None
        self._next_scan_ns = 0  # monotonic
        self.error = ""  # why the last archive could not be written; empty when it could

    def due_ns(self) -> int | None:
        """When there is something to do next (monotonic); None while an archive is written."""
        if self._store.state.evicting or self._unscanned:
            return 0
        if self._writing is not None:
            return None  # its end wakes the owner
        return self._next_scan_ns

    def step(self) -> None:
        """One slice of what is to be done. Takes a few milliseconds at most."""
        state = self._store.state
        if state.evicting:
            count = min(EVICT_BATCH, len(state.evicting))
            self._store.apply(events.MessagesEvicted(count, self._clock.now_ns() // NS_PER_S))
        elif self._writing is not None:
            self._collect(self._writing)
        elif self._unscanned:
            self._scan()
        elif self._clock.monotonic_ns() >= self._next_scan_ns or self._is_pressed():
            self._start_scan()

    def _is_pressed(self) -> bool:
        pressed = len(self._store.state.messages) > self._policy.live_messages
        return pressed and not self._pressed  # once a pause: what is not final stays

    def _start_scan(self) -> None:
        self._pressed = self._is_pressed()
        self._next_scan_ns = self._clock.monotonic_ns() + PAUSE_S * NS_PER_S
        self._store.retain()  # what nobody sends to grows old, too
        state = self._store.state
        self._unscanned = [*reversed(state.messages), *reversed(state.archive)]
        self._final, self._bytes = [], 0

    def _scan(self) -> None:
        state = self._store.state
        limit_s = self._clock.now_ns() // NS_PER_S - (0 if self._pressed else self._policy.after_s)
        for _ in range(min(SCAN_BATCH, len(self._unscanned))):
            number = self._unscanned.pop()
            message = state.messages.get(number)
            if message is None:
                message = state.archive.get(number)
            elif message.created_at > limit_s:
                self._unscanned = []  # those behind it are younger still
                break
            if message is None or not self._store.is_final(message):
                continue
            self._final.append(message.id)
            self._bytes += len(message.content) + RECORD_BYTES
            if (
                len(self._final) >= self._policy.most_messages
                or self._bytes >= self._policy.most_bytes
            ):
                self._unscanned = []
                break
        if not self._unscanned and self._is_enough():
            self._write()

    def _is_enough(self) -> bool:
        first = next(self._messages(self._final), None)
        if first is None:
            return False
        is_old = first.created_at <= self._clock.now_ns() // NS_PER_S - DAY_S
        return self._pressed or is_old or len(self._final) >= self._policy.messages

    def _messages(self, numbers: Iterable[int]) -> Iterator[Message]:
        """The messages found final, without those that were removed meanwhile."""
        state = self._store.state
        for number in numbers:
            message = state.messages.get(number) or state.archive.get(number)
            if message is not None:
                yield message

    def _write(self) -> None:
        now_ns, state = self._clock.now_ns(), self._store.state
        name = f"{iso_date(now_ns)}/{state.next_archive:06d}.acomm"
        self._writing = self._executor.submit(self._make, name, tuple(self._final), now_ns)
        self._writing.add_done_callback(lambda _: self._wake())

    def _make(self, name: str, numbers: tuple[int, ...], now_ns: int) -> _WrittenArchive:
        """Write the archive. Beside the owner: what is final changes no more, it only goes."""
        messages = sorted(self._messages(numbers), key=lambda m: (m.created_at, m.id))
        ids = tuple(message.id for message in messages)
        size = self._archives.write(name, self._snapshot(messages, now_ns // NS_PER_S))
        note = ArchiveInfo(
            name,
            len(messages),
            min(ids),
            max(ids),
            messages[0].created_at,
            messages[-1].created_at,
            sum(message.status is MessageStatus.ARCHIVED for message in messages),
            size,
        )
        return _WrittenArchive(note, ids)

    def _snapshot(self, messages: Sequence[Message], now_s: int) -> StoreSnapshot:
        """The content of the archive: the messages, their channels and recipients."""
        state = self._store.state
        counts = Counter(message.channel_id for message in messages)
        channels = tuple(
            msgspec.structs.replace(state.channels[number], message_count=count)
            for number, count in sorted(counts.items())
        )
        deliveries = {m.id: state.deliveries.get(m.id, {}) for m in messages}
        return StoreSnapshot(
            StoreFile(messages[0].created_at, now_s, channels, tuple(messages)),
            EngineState(deliveries=deliveries),
        )

    def _collect(self, writing: Future[_WrittenArchive]) -> None:
        if not writing.done():
            return
        self._writing = None
        error = writing.exception()
        if isinstance(error, OSError | RelayError):
            self.error = str(error)  # they stay, and are rolled later
            return
        rolled = writing.result()
        self.error = ""
        self._pressed = False  # there may be more of it
        now_s = self._clock.now_ns() // NS_PER_S
        self._store.apply(events.Rolled(rolled.note, rolled.ids, now_s))
