"""Archive files: immutable `.acomm` files of final messages, written and queried.

    {folder}/2026-01-31/000001.acomm    section 2: the messages, with their final states
                                        section 256: recipients and relay ids
                                        section 257: the same messages as columns, for audits

A store lists its archives (``ArchiveInfo``); a file that is not listed does not count. The times in
that list, and for a thread the files' indexes, decide which files are read. A file is verified
before its messages are used; only the table of its relay ids is asked without that.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    StoreFile,
)
from relay.acomm.store_file import decrypt, encrypt
from relay.base import fsio
from relay.base.errors import FormatError
from relay.base.names import sha256_hex
from relay.engine.query import is_outside

RELAY_IDS = 9  # block of section 256
STRAY = ".stray"
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

    def messages(self, note: ArchiveInfo, wanted: MessageFilter) -> Iterator[Message]:
        """The messages of an archive, if its times do not exclude a match; of a thread its own.

        Errors: FormatError for a damaged archive, OSError for a missing one.
        """
        if is_outside(note, wanted):
            return
        ids = None if wanted.correlation_id is None else self._thread(note, wanted.correlation_id)
        if ids is None or ids:
            file = self._read(os.path.join(self._folder, note.name))
            yield from (m for m in file.messages if ids is None or m.id in ids)

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

    def _thread(self, note: ArchiveInfo, correlation_id: str) -> Collection[int] | None:
        """The ids of a thread, by the archive's index; None if it has no such index."""
        path = os.path.join(self._folder, note.name)
        indexes = _cached(
            self._indexes, note.name, lambda: store_file.read_indexes(path)[0], _INDEXES_KEPT
        )
        threads = indexes.get(IndexType.CORRELATION)
        return None if threads is None else frozenset(threads.get(correlation_id, ()))

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
