"""The manifest: one record for each event of a segment's life, and the catalog made of them.

A record is committed when ``append`` returns: written, synced, and counted by the chunk's header.
Only then is it applied to the catalog. An append syncs twice, the records first: the header's 64
bytes are one sector, and if they reached the disk alone, their crc would invalidate the records
that were committed before. Acknowledgments do not wait for the manifest.

Damage never stops a stream: replay ends at the last good record, ``damaged`` is True, new records
go to a chunk after all existing ones, and the journal adds the rest by ``rebuild``. Once that is
durable the damaged chunk and those after it are renamed to ``NAME.bad``; a crash before that finds
the same damage again.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable

from relay.base import fsio
from relay.base.clock import NS_PER_MS, Clock
from relay.base.errors import FormatError, RelayError
from relay.journal.catalog import (
    SNAPSHOTS,
    Catalog,
    CatalogSnapshot,
    SegmentEntry,
    read_snapshot,
    snapshot_ids,
    snapshot_path,
    write_snapshot,
)
from relay.journal.files import remove
from relay.journal.format import crc64
from relay.journal.manifest_format import (
    CHUNK_CAPACITY,
    MAX_ETAG_BYTES,
    MAX_KEY_BYTES,
    ChunkFlag,
    ChunkHeader,
    Field,
    ManifestRecord,
    ManifestType,
)
from relay.journal.manifest_reader import (
    FIRST_MANIFEST_RECORD,
    MANIFEST,
    ManifestChunk,
    Replay,
    Warn,
    chunk_indexes,
    chunk_path,
    decode_chunk,
    load_chunk,
)


class ChunkFile:
    """The chunk that is being written. One owner; not thread-safe.

    ``broken`` after a failed sync or a failed write of the header: the content of the file is
    uncertain until it is read again.
    """

    def __init__(self, path: str, header: ChunkHeader, records: int) -> None:
        self.path = path
        self.header = header
        self.next_record = header.base_record + records  # ordinal of the next
        self.broken = False
        self._fd = fsio.open_rw(path)

    @classmethod
    def create(cls, stream_dir: str, index: int, base_record: int) -> ChunkFile:
        """Create an empty chunk, durably."""
        path = chunk_path(stream_dir, index)
        header = ChunkHeader(
            index, base_record, FIRST_MANIFEST_RECORD, FIRST_MANIFEST_RECORD, crc64(b""), 0
        )
        fsio.write_atomic(path, header.encode())
        return cls(path, header, 0)

    @classmethod
    def resume(cls, stream_dir: str, chunk: ManifestChunk) -> ChunkFile:
        """Continue a chunk that was read. A torn tail after committed_len is removed, since its
        append never returned. Records follow committed_len, whatever tail_offset says."""
        path = chunk_path(stream_dir, chunk.header.chunk_index)
        header = chunk.header._replace(tail_offset=chunk.header.committed_len)
        file = cls(path, header, len(chunk.records))
        if chunk.torn_bytes:
            fsio.truncate(file._fd, chunk.header.committed_len, path)
        return file

    @property
    def tail(self) -> int:
        """The first unwritten byte, from the start of the file."""
        return self.header.tail_offset

    @property
    def room(self) -> int:
        """The free bytes in the chunk."""
        return 0 if self.header.flags & ChunkFlag.SEALED else CHUNK_CAPACITY - self.tail

    def append(self, data: bytes, records: int) -> None:
        """Commit ``records`` encoded records; durable on return.

        Errors: OSError; if writing the records failed, the chunk is unchanged.
        """
        assert not self.broken and len(data) <= self.room
        fsio.write_at(self._fd, data, self.tail, self.path)
        end = self.tail + len(data)
        crc = crc64(data, self.header.chunk_crc64)
        self.broken = True
        fsio.sync_data(self._fd, self.path)
        self._write_header(
            self.header._replace(tail_offset=end, committed_len=end, chunk_crc64=crc)
        )
        self.next_record += records

    def seal(self) -> None:
        """Seal the chunk: no record follows. Errors: OSError, and then it is broken."""
        self._write_header(self.header._replace(flags=self.header.flags | ChunkFlag.SEALED))

    def _write_header(self, header: ChunkHeader) -> None:
        self.broken = True
        fsio.write_at(self._fd, header.encode(), 0, self.path)
        fsio.sync_data(self._fd, self.path)
        self.header = header
        self.broken = False

    def close(self) -> None:
        """Close the file. All appended records are durable already."""
        os.close(self._fd)


SNAPSHOT_EVERY = 1_000  # records: replaying them takes about 10 ms
_DIGITS = re.compile("0[0-9]{19}")
_KEEP_SNAPSHOTS = 2  # the newest good ones, in case one is damaged later


class Manifest:
    """The writer of one stream's manifest. Thread-safe: the loop seals and opens segments, a worker
    records the jobs of the tiers; an append holds the lock for its two syncs only."""

    def __init__(
        self, stream_dir: str, clock: Clock, warn: Warn, seen: Replay, file: ChunkFile
    ) -> None:
        self.stream_dir = stream_dir
        self.catalog: Catalog = seen.catalog  # changed under the lock: see entries()
        self.damaged = seen.damaged
        self._clock = clock
        self._warn = warn
        self._beyond = seen.after_damage
        self._aside = range(seen.damaged_from or 0, file.header.chunk_index)
        self._lock = threading.RLock()
        self._snapshot_lock = threading.Lock()  # taken before _lock, never after
        self._file: ChunkFile | None = file
        self._since_snapshot = len(seen.records)
        self._rolled = False

    @classmethod
    def open(cls, stream_dir: str, stream_id: int, clock: Clock, warn: Warn) -> Manifest:
        """Replay the manifest and continue it; a new stream gets its first chunk.

        Warns of every finding. Changes nothing except a torn tail, and after damage.
        Errors: OSError, UnsafePath; RelayError when the folder is of another stream.
        """
        name = os.path.basename(os.path.normpath(stream_dir))
        if name.isdigit() and int(name) != stream_id:
            raise RelayError(f"{stream_dir}: expected stream {stream_id}, found {int(name)}")
        _make_folders(stream_dir)
        seen = Replay(stream_dir, warn).run()
        for line in seen.torn:
            warn(line)
        if seen.damaged:
            file = _behind_damage(stream_dir, seen)
        elif seen.last is not None:
            file = ChunkFile.resume(stream_dir, seen.last)
            if file.room == 0:  # sealed before a crash, and the next one is missing
                file = _next_chunk(stream_dir, file)
        else:
            file = ChunkFile.create(
                stream_dir, seen.snapshot.chunk_index if seen.snapshot else 0, 0
            )
        return cls(stream_dir, clock, warn, seen, file)

    def entries(self) -> list[SegmentEntry]:
        """The catalog's entries by id, as of now; from any thread."""
        with self._lock:
            return list(self.catalog.entries.values())

    def record(
        self, kind: ManifestType, segment_id: int, logical_offset: int, **fields: Field
    ) -> None:
        """Append one record with the clock's time. Errors: as ``append``."""
        at_ms = self._clock.now_ns() // NS_PER_MS
        self.append(ManifestRecord(kind, segment_id, logical_offset, at_ms, fields))

    def append(self, *records: ManifestRecord) -> None:
        """Commit records in order: make them durable, then apply them to the catalog.

        Errors: ValueError for a key or etag too long for a snapshot, and nothing is written;
        OSError: some of them may be committed. After a failed sync RelayError, until the manifest
        is opened again, because the content of the file is uncertain.
        """
        pieces = [_encode(record) for record in records]
        with self._lock:
            begin = 0
            while begin < len(records):
                begin = self._commit(records, pieces, begin)
            self._since_snapshot += len(records)
            due = self._due()
        if due and not self.damaged:
            try:
                self.snapshot()
            except (OSError, ValueError) as exc:  # the records are committed anyway
                self._warn(f"{self.stream_dir}: cannot write a snapshot of the manifest: {exc}")

    def _due(self) -> bool:
        """True if a snapshot is due."""
        return self._rolled or self._since_snapshot >= SNAPSHOT_EVERY

    def _commit(self, records: tuple[ManifestRecord, ...], pieces: list[bytes], begin: int) -> int:
        """Append as many records as the chunk has room for, in a new one if it has none."""
        file = self._usable()
        if len(pieces[begin]) > file.room:
            self._file = file = _next_chunk(self.stream_dir, file)
            self._rolled = True
        end, size = begin, 0
        while end < len(pieces) and size + len(pieces[end]) <= file.room:
            size += len(pieces[end])
            end += 1
        file.append(b"".join(pieces[begin:end]), end - begin)
        for record in records[begin:end]:
            self.catalog.apply(record)
        return end

    def _usable(self) -> ChunkFile:
        if self._file is None:
            raise RelayError(f"{self.stream_dir}: the manifest is closed", hint="open it again")
        if self._file.broken:
            raise RelayError(
                f"{self._file.path}: a sync failed; the content on the disk is uncertain",
                hint="open the stream again: until then the manifest is read-only",
            )
        return self._file

    def snapshot(self) -> int:
        """Write a snapshot of the catalog, and record it; the snapshot's id.

        The entries are encoded and written without the lock: appends are possible meanwhile.
        Errors: OSError; the snapshot may exist or not. RelayError while the manifest is damaged:
        a snapshot would hide the damage from ``rebuild``.
        """
        if self.damaged:
            raise RelayError(f"{self.stream_dir}: the manifest is damaged; rebuild it first")
        with self._snapshot_lock:
            with self._lock:
                file = self._usable()
                existing = snapshot_ids(self.stream_dir)
                made = CatalogSnapshot(
                    existing[-1] + 1 if existing else 1,
                    file.header.chunk_index,
                    file.tail,
                    tuple(self.catalog.entries.values()),
                )
                self._since_snapshot = 0
                self._rolled = False
            write_snapshot(self.stream_dir, made)
            with self._lock:
                self._mark(made)
            _drop_snapshots(self.stream_dir)
            return made.snapshot_id

    def _mark(self, made: CatalogSnapshot) -> None:
        """Append the SnapshotMarker, which does not count for the next snapshot."""
        fields: dict[str, Field] = {
            "chunk_index": made.chunk_index,
            "chunk_offset": made.chunk_offset,
            "snapshot_id": made.snapshot_id,
        }
        at_ms = self._clock.now_ns() // NS_PER_MS
        marker = ManifestRecord(ManifestType.SnapshotMarker, 0, 0, at_ms, fields)
        self._commit((marker,), [marker.encode()], 0)

    def rebuild(self, records: Iterable[ManifestRecord]) -> None:
        """Rebuild a damaged manifest from the segments' records; resets ``damaged``.

        Good records from after the damage come first: only they may know the copies in Tier 2.
        Then ``records``, which correct them by the files. Errors: as ``append``.
        """
        self.append(*self._beyond, *records)
        self._beyond = []
        self.damaged = False
        self.snapshot()
        self._set_aside()

    def _set_aside(self) -> None:
        """Rename the damaged chunk and those after it, which the snapshot replaces."""
        folder = fsio.open_dir(os.path.join(self.stream_dir, MANIFEST))
        try:
            for index in chunk_indexes(self.stream_dir):
                if index in self._aside:
                    name = os.path.basename(chunk_path(self.stream_dir, index))
                    fsio.rename(name, folder, name + ".bad", folder)
                    self._warn(f"{self.stream_dir}: damaged manifest chunk renamed to {name}.bad")
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the files; idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None


def _make_folders(stream_dir: str) -> None:
    """Create the stream's directories, durably."""
    parent = os.path.dirname(os.path.normpath(stream_dir)) or "."
    for path in (parent, stream_dir):
        if not os.path.isdir(path):
            fsio.ensure_dir(path)
            fsio.sync_dir(os.path.dirname(os.path.normpath(path)) or ".")
    fsio.ensure_dir(os.path.join(stream_dir, MANIFEST))
    fsio.ensure_dir(os.path.join(stream_dir, SNAPSHOTS))
    fsio.sync_dir(stream_dir)


def _encode(record: ManifestRecord) -> bytes:
    for name, most in (("key", MAX_KEY_BYTES), ("etag", MAX_ETAG_BYTES)):
        length = len(str(record.fields.get(name, "")).encode())
        if length > most:
            raise ValueError(f"{record.name}: {name} of {length} bytes, {most} at most")
    return record.encode()


def _next_chunk(stream_dir: str, file: ChunkFile) -> ChunkFile:
    """Seal a chunk and start the next; after a crash in between the last one is sealed."""
    if not file.header.flags & ChunkFlag.SEALED:
        file.seal()
    made = ChunkFile.create(stream_dir, file.header.chunk_index + 1, file.next_record)
    file.close()
    return made


def _behind_damage(stream_dir: str, seen: Replay) -> ChunkFile:
    """A chunk after all existing ones; continues one that an earlier rebuild started."""
    there = chunk_indexes(stream_dir)
    damaged = seen.damaged_from or 0
    newest = max([damaged, *there])
    if newest > damaged:
        path = chunk_path(stream_dir, newest)
        with contextlib.suppress(FormatError):
            chunk = decode_chunk(load_chunk(path), path, newest)
            if not chunk.header.flags & ChunkFlag.SEALED:
                return ChunkFile.resume(stream_dir, chunk)
    index = max(newest, _last_set_aside(stream_dir)) + 1
    return ChunkFile.create(stream_dir, index, seen.next_record)


def _last_set_aside(stream_dir: str) -> int:
    """The highest index of a renamed damaged chunk; the index is not used again."""
    names = os.listdir(os.path.join(stream_dir, MANIFEST))
    aside = [name[:20] for name in names if name.endswith(".mlog.bad")]
    return max([int(digits) for digits in aside if _DIGITS.fullmatch(digits)], default=-1)


def _drop_snapshots(stream_dir: str) -> None:
    """Remove the snapshots older than the _KEEP_SNAPSHOTS newest good ones."""
    ids = snapshot_ids(stream_dir)
    good = 0
    for snapshot_id in reversed(ids):
        if good == _KEEP_SNAPSHOTS:
            remove(snapshot_path(stream_dir, snapshot_id))
            continue
        with contextlib.suppress(FormatError):
            read_snapshot(stream_dir, snapshot_id)
            good += 1
