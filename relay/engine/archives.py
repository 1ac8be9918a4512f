"""Archives: immutable `.acomm` files of final messages, and what queries find in them.

    {folder}/2026-01-31/000001.acomm    section 2: the messages, with their end states
                                        section 256: who received each, and their relay ids
                                        section 257: the same messages as columns, for audits

A store lists its archives (``ArchiveNote``); a file that is not in its list does not count. That
list and each file's indexes decide which files a query needs; every file that is used has been
verified. Source: DESIGN, "Bounded whatever the history".
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from struct import pack, unpack
from typing import NamedTuple, TypeVar

import msgspec

from relay.acomm import codec
from relay.acomm.encryption import seal, unseal
from relay.acomm.engine_state import EngineState, Snapshot
from relay.acomm.indexes import Ids, Indexes
from relay.acomm.model import (
    ArchiveNote,
    Delivery,
    Message,
    MessageFilter,
    Priority,
    SortField,
    SortOrder,
    StoreFile,
)
from relay.base import fsio
from relay.base.checksums import sha256_hex
from relay.base.errors import FormatError
from relay.engine import topics
from relay.engine.query import REGEX_LIMIT_S, QueryResult, Rank, find, page

RELAY_IDS = 9  # block of section 256
STRAY = ".stray"
_FILES_KEPT = 2  # decoded ones: a page of history asks for the same file again and again
_AIDS_KEPT = 64

T = TypeVar("T")


class _Aids(NamedTuple):
    """What is kept of an archive to know whether it is needed."""

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
        self._aids: OrderedDict[str, _Aids] = OrderedDict()

    def write(self, name: str, snapshot: Snapshot) -> int:
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
            codec.write(path, seal(file, self._key), columns=True)
            fsio.sync_dir(self._folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return os.path.getsize(path)

    def set_strays_aside(self, notes: Iterable[ArchiveNote], next_number: int) -> list[str]:
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

    def count(self, note: ArchiveNote, wanted: MessageFilter) -> int | None:
        """How many messages of an archive match, where its indexes alone can tell."""
        if not _is_served(wanted) or (note.archived and not wanted.include_archived):
            return None
        ids = self._ids(note, wanted)
        return note.messages if ids is None else len(ids)

    def messages(self, note: ArchiveNote, wanted: MessageFilter) -> Iterator[Message]:
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
        notes: Iterable[ArchiveNote],
        here: Iterable[Message],
        wanted: MessageFilter,
        leaving: ArchiveNote | None,
        still_here: Container[int],
        rank: Rank | None = None,
    ) -> QueryResult:
        """The page of what the store has (``here``) and its archives that a filter asks for.

        By time, an archive whose messages cannot be on the page is counted by its indexes alone.
        ``leaving``: the archive of which some messages are ``still_here``. ``rank``: of ``page``.
        Errors: as ``query.find``, and as ``messages``.
        """
        began = time.monotonic()
        found = find(here, wanted)
        total = len(found)
        last_first = wanted.order[1] is SortOrder.DESCENDING
        for note in sorted(notes, key=lambda note: note.last_at, reverse=last_first):
            if note is not leaving and _is_full(found, note, wanted, rank):
                count = self.count(note, wanted)
                if count is not None:
                    total += count
                    continue
            left_s = max(0.001, REGEX_LIMIT_S - (time.monotonic() - began))
            rolled = (
                message
                for message in self.messages(note, wanted)
                if note is not leaving or message.id not in still_here
            )
            more = find(rolled, wanted, left_s)
            found += more
            total += len(more)
        return page(found, wanted, total, rank)

    def thread(self, notes: Iterable[ArchiveNote], correlation_id: str) -> list[Message]:
        """Every archived message of a thread. Errors: as ``messages``."""
        wanted = MessageFilter(correlation_id=correlation_id)
        return [m for note in notes for m in self.messages(note, wanted)]

    def find(self, notes: Sequence[ArchiveNote], relay_id: str) -> Archived | None:
        """The message that came through the relay under this id. Errors: as ``messages``."""
        wanted = _hash(relay_id)
        for note in reversed(notes):
            aids = self._kept(self._aids, note.name, self._read_aids, _AIDS_KEPT)
            at = bisect_left(aids.hashes, wanted)
            while at < len(aids.hashes) and aids.hashes[at] == wanted:
                found = self._one(note, aids.numbers[at])
                if found is not None and found.message.relay_id == relay_id:
                    return found
                at += 1
        return None

    def get(self, notes: Iterable[ArchiveNote], number: int) -> Archived | None:
        """The message of that number. Errors: as ``messages``."""
        for note in notes:
            if note.first_id <= number <= note.last_id and (found := self._one(note, number)):
                return found
        return None

    def _one(self, note: ArchiveNote, number: int) -> Archived | None:
        file = self._load(note)
        for message in file.messages:
            if message.id == number:
                deliveries = EngineState.decode(file.engine_state).deliveries
                return Archived(message, deliveries.get(number, {}))
        return None

    def _ids(self, note: ArchiveNote, wanted: MessageFilter) -> set[int] | None:
        """The ids that every index allows; None when no criterion is one of theirs."""
        if _outside(note, wanted):
            return set()
        lists = list(_index_lists(wanted))
        within = _covers(note, wanted)
        if not lists and within:
            return None
        indexes = self._kept(self._aids, note.name, self._read_aids, _AIDS_KEPT).indexes
        found: set[int] | None = None
        for ids_of in lists:
            ids = ids_of(indexes)
            if ids is None:  # the file lacks that index
                return None
            found = set(ids) if found is None else found & set(ids)
        if not within:
            if indexes.timestamp is None:
                return None
            timed = {number for at, number in indexes.timestamp if _in_time(at, wanted)}
            found = timed if found is None else found & timed
        return found

    def _load(self, note: ArchiveNote) -> StoreFile:
        return self._kept(self._files, note.name, self._read, _FILES_KEPT)

    def _kept(
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
        return unseal(codec.read(path), self._key, path)

    def _read_aids(self, path: str) -> _Aids:
        indexes, blocks = codec.read_aids(path)
        block = blocks.get(RELAY_IDS, b"")
        count = (len(block) - 8) // 16
        if len(block) % 16 != 8 or int.from_bytes(block[:8], "little") != count:
            raise FormatError(path, 0, "a table of relay ids in section 256", f"{len(block)} bytes")
        table = unpack(f"<{2 * count}Q", block[8:])
        return _Aids(indexes, table[:count], table[count:])


def _is_full(
    found: list[Message], note: ArchiveNote, wanted: MessageFilter, rank: Rank | None
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


def _is_served(wanted: MessageFilter) -> bool:
    """True when the indexes alone can tell what matches."""
    return (
        wanted.message_types is None
        and wanted.status is None
        and wanted.priority is None
        and wanted.content_pattern is None
    )


def _index_lists(
    wanted: MessageFilter,
) -> Iterator[Callable[[Indexes], Iterable[int] | None]]:
    """For each criterion that an index serves: its ids, None when the file lacks the index."""

    def keyed(index: dict[str, Ids] | None, key: str) -> Iterable[int] | None:
        return None if index is None else index.get(key, ())

    if wanted.channel_ids is not None:
        channels = wanted.channel_ids
        yield (
            lambda one: (
                None
                if one.channel is None
                else [i for c in channels for i in one.channel.get(c, ())]
            )
        )
    if (sender := wanted.sender) is not None:
        yield lambda one: keyed(one.sender, sender)
    if (thread := wanted.correlation_id) is not None:
        yield lambda one: keyed(one.correlation, thread)
    if (pattern := wanted.topic_pattern) is not None:
        yield (
            lambda one: (
                None
                if one.topic is None
                else [i for t, ids in one.topic.items() if topics.matches(t, pattern) for i in ids]
            )
        )


def _in_time(at: int, wanted: MessageFilter) -> bool:
    return (wanted.after is None or at > wanted.after) and (
        wanted.before is None or at < wanted.before
    )


def _outside(note: ArchiveNote, wanted: MessageFilter) -> bool:
    """True when the whole archive is before or behind what is asked for."""
    return (wanted.after is not None and note.last_at <= wanted.after) or (
        wanted.before is not None and note.first_at >= wanted.before
    )


def _covers(note: ArchiveNote, wanted: MessageFilter) -> bool:
    """True when no message of the archive is outside the time asked for."""
    return _in_time(note.first_at, wanted) and _in_time(note.last_at, wanted)
