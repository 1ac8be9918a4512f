"""Archive files: immutable `.acomm` files of final messages, written and queried.

    {folder}/2026-01-31/000001.acomm    section 2: the messages, with their final states
                                        section 256: recipients and relay ids
                                        section 257: the same messages as columns, for audits

A store lists its archives (``ArchiveInfo``); a file that is not listed does not count. That list
and each file's indexes decide which files a query reads. A file is verified before its messages are
used; only the table of its relay ids is asked without that.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from struct import pack
from typing import NamedTuple, TypeVar

import msgspec

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState, StoreSnapshot, deliveries_of
from relay.acomm.indexes import Indexes, IndexType
from relay.acomm.model import (
    ArchiveInfo,
    Delivery,
    Message,
    MessageFilter,
    Priority,
    SortField,
    SortOrder,
    StoreFile,
)
from relay.acomm.store_file import decrypt, encrypt
from relay.base import fsio
from relay.base.errors import FormatError
from relay.base.names import sha256_hex
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

RELAY_IDS = 9  # block of section 256
STRAY = ".stray"
_FILES_KEPT = 2  # decoded ones: a page of history reads the same file repeatedly
_INDEXES_KEPT = 64
_MESSAGES_KEPT = 16

K = TypeVar("K")
T = TypeVar("T")


class Archived(NamedTuple):
    """One message of an archive, and the outcome of its deliveries."""

    message: Message
    deliveries: dict[str, Delivery]


class ArchiveFiles:
    """Reads and writes the archives below one folder. Not thread-safe, but for ``write``."""

    def __init__(self, folder: str, key: bytes | None = None) -> None:
        self._folder = folder
        self._key = key
        self._files: OrderedDict[str, StoreFile] = OrderedDict()
        self._indexes: OrderedDict[str, Indexes] = OrderedDict()
        self._found: OrderedDict[tuple[str, int], Archived | None] = OrderedDict()

    def write(self, name: str, snapshot: StoreSnapshot) -> int:
        """Write an archive and return its size in bytes.

        It counts once the store lists it; a file of that name left by a crash is replaced.
        What was delivered is durable first: after a power cut a relay compares the inboxes with
        the messages that are still in its store.
        Errors: OSError; the incomplete file is then removed, because the next attempt may use
        another day's name and would not recognize it as a stray.
        """
        path = os.path.join(self._folder, name)
        for folder in (self._folder, os.path.dirname(path)):
            fsio.ensure_dir(folder)
        fsio.sync_filesystem(self._folder)
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

    def remove(self, name: str) -> None:
        """Remove an archive that the store does not list. Errors are ignored: it is replaced, or
        set aside by the next start."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))

    def rename_strays(self, notes: Iterable[ArchiveInfo], next_number: int) -> list[str]:
        """Rename files that the store does not list, left by a crash before the Rolled event.

        Only numbers from ``next_number`` on: older ones may belong to another store.
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
        """Candidates for a match in an archive; none when its indexes exclude all.

        Errors: FormatError for a damaged archive, OSError for a missing one.
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
        """The page a filter selects from the live messages (``here``) and the archives.

        When sorting by time, an archive whose messages cannot be on the page is only counted, by
        its indexes. ``leaving``: the archive whose messages are partly ``still_here``. ``rank``:
        as for ``page``.
        Errors: as ``query.find``, and as ``messages``.
        """
        found = list(find(here, wanted))
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
            more = list(find(rolled, wanted))
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
            for number in _look_up(os.path.join(self._folder, note.name), wanted):
                found = self._find_message(note, number)
                if found is not None and found.message.relay_id == relay_id:
                    return found
        return None

    def get(self, notes: Iterable[ArchiveInfo], number: int) -> Archived | None:
        """The message of that number. Errors: as ``messages``."""
        for note in notes:
            if note.first_id <= number <= note.last_id and (
                found := self._find_message(note, number)
            ):
                return found
        return None

    def all_of(self, note: ArchiveInfo) -> Iterator[Archived]:
        """Every message of an archive, with its deliveries; nothing is cached.

        Errors: as ``messages``.
        """
        file = self._read(os.path.join(self._folder, note.name))
        deliveries = EngineState.decode(file.engine_state).deliveries
        return (Archived(message, deliveries.get(message.id, {})) for message in file.messages)

    def _find_message(self, note: ArchiveInfo, number: int) -> Archived | None:
        """One message; the last few are kept, as an answer asks for its original several times."""
        path = os.path.join(self._folder, note.name)

        def read() -> Archived | None:
            file = store_file.read_one(path, number)
            if file is None:  # written before archives had columns
                file = store_file.read(path)
            kept = tuple(message for message in file.messages if message.id == number)
            if not kept:
                return None
            file = decrypt(msgspec.structs.replace(file, messages=kept), self._key, path)
            return Archived(file.messages[0], deliveries_of(file.engine_state, number))

        return _cached(self._found, (note.name, number), read, _MESSAGES_KEPT)

    def _ids(self, note: ArchiveInfo, wanted: MessageFilter) -> set[int] | None:
        """The ids that all indexes allow; None when no criterion has an index."""
        if is_outside(note, wanted):
            return set()
        lists = list(index_lookups(wanted))
        within = is_within(note, wanted)
        if not lists and within:
            return None
        path = os.path.join(self._folder, note.name)
        indexes = _cached(
            self._indexes, note.name, lambda: store_file.read_indexes(path)[0], _INDEXES_KEPT
        )
        found: set[int] | None = None
        kinds = {kind for kind, _ in lists} | (set() if within else {IndexType.TIMESTAMP})
        if not kinds <= indexes.keys():  # the file lacks one
            return None
        for kind, ids_of in lists:
            ids = set(ids_of(indexes[kind]))
            found = ids if found is None else found & ids
        if not within:
            times = indexes[IndexType.TIMESTAMP]
            timed = {number for at, number in times if in_time_range(at, wanted)}
            found = timed if found is None else found & timed
        return found

    def _load(self, note: ArchiveInfo) -> StoreFile:
        path = os.path.join(self._folder, note.name)
        return _cached(self._files, note.name, lambda: self._read(path), _FILES_KEPT)

    def _read(self, path: str) -> StoreFile:
        return decrypt(store_file.read(path), self._key, path)


def _cached(cache: OrderedDict[K, T], key: K, read: Callable[[], T], most: int) -> T:
    """From the cache, or read now; evicts the least recently used."""
    if key not in cache:
        cache[key] = read()
    cache.move_to_end(key)
    while len(cache) > most:
        cache.popitem(last=False)
    return cache[key]


def _look_up(path: str, wanted: int) -> Iterator[int]:
    """The messages of a file whose relay ids have this hash, by a binary search on the disk.

    Nothing else of the file is read: thousands of archives may be asked for one id.
    """
    with store_file.open_block(path, RELAY_IDS) as (fd, begin, length):

        def value(at: int) -> int:
            return int.from_bytes(os.pread(fd, 8, begin + 8 * at), "little")

        count = (length - 8) // 16
        if length % 16 != 8 or value(0) != count:
            raise FormatError(path, 0, "a table of relay ids in section 256", f"{length} bytes")
        at = bisect_left(range(1, count + 1), wanted, key=value) + 1
        found = []
        while at <= count and value(at) == wanted:
            found.append(value(count + at))
            at += 1
    yield from found


def _is_full(
    found: list[Message], note: ArchiveInfo, wanted: MessageFilter, rank: Rank | None
) -> bool:
    """True when the page is full of messages that sort before every message of the archive."""
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
