"""Reading the manifest: its chunks, and the catalog that they give. Writes nothing.

A chunk is a file of at most 256 KiB whose header says how much of it is committed. Replay starts
at the newest good snapshot whose position exists, and continues through the chunks after it, each
verified before any of it is applied. At a damaged chunk it stops after the last good record and
reports the damage: records after it are kept apart, and the rest is rebuilt from the segments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from relay.base import fsio
from relay.base.errors import FormatError, IntegrityError, RelayError
from relay.journal.catalog import (
    Catalog,
    CatalogSnapshot,
    read_snapshot,
    snapshot_ids,
    snapshot_path,
)
from relay.journal.files import numbered_files
from relay.journal.format import crc64
from relay.journal.manifest_format import (
    CHECKPOINT_WRITTEN,
    CHUNK_CAPACITY,
    CHUNK_HEADER,
    MANIFEST_RECORD,
    ChunkHeader,
    ManifestRecord,
    ManifestType,
    decode_chunk_header,
    decode_manifest_record,
)

MANIFEST = "manifest"
FIRST_MANIFEST_RECORD = CHUNK_HEADER.size
ROOM = CHUNK_CAPACITY - FIRST_MANIFEST_RECORD
_MAX_BYTES = 64 << 20  # other writers may write larger chunks


class ManifestChunk(NamedTuple):
    """A chunk as it was read and verified."""

    header: ChunkHeader
    records: list[ManifestRecord]
    ends: list[int]  # where each record ends, from the start of the file
    torn_bytes: int  # after committed_len, not all zero: an interrupted append


def chunk_path(stream_dir: str, index: int) -> str:
    """The path of a chunk."""
    return os.path.join(stream_dir, MANIFEST, f"{index:020d}.mlog")


def chunk_indexes(stream_dir: str) -> list[int]:
    """The indexes of the chunk files, ascending; damaged ones included."""
    return numbered_files(os.path.join(stream_dir, MANIFEST), ".mlog")


def load_chunk(path: str) -> bytes:
    """A chunk's bytes. Errors: OSError, UnsafePath."""
    return fsio.read_regular(path, None, _MAX_BYTES, shared=True)[0]


def decode_chunk(
    data: bytes, path: str, index: int, base_record: int | None = None
) -> ManifestChunk:
    """Verify and decode a chunk: header, index, base_record, chunk crc, and then each record.

    ``index``: that of its name; ``base_record``: the expected one, None for any. Errors:
    FormatError, VersionError, IntegrityError; then only ``salvage_chunk`` may be used.
    """
    header = decode_chunk_header(data, path)
    if header.chunk_index != index:
        raise FormatError(path, 16, f"chunk_index {index}", header.chunk_index)
    if base_record is not None and header.base_record != base_record:
        raise FormatError(path, 24, f"base_record {base_record}", header.base_record)
    end = header.committed_len
    if not FIRST_MANIFEST_RECORD <= end <= len(data):
        raise FormatError(
            path, 40, f"committed_len from {FIRST_MANIFEST_RECORD} to {len(data)}", end
        )
    if header.tail_offset < end:
        raise FormatError(path, 32, f"tail_offset of {end} and more", header.tail_offset)
    found = crc64(memoryview(data)[FIRST_MANIFEST_RECORD:end])
    if found != header.chunk_crc64:
        raise IntegrityError(path, 48, f"chunk crc64 {header.chunk_crc64:016x}", f"{found:016x}")
    records, ends, fault = _walk(data, end, path)
    if fault is not None:
        raise fault
    torn = len(data) - end if any(memoryview(data)[end:]) else 0
    return ManifestChunk(header, records, ends, torn)


def salvage_chunk(data: bytes, path: str) -> tuple[list[ManifestRecord], list[int]]:
    """The good records before the fault of a damaged chunk, and where each ends.

    A record's crc covers its payload; only the chunk's crc covers its header. So if no record is
    bad by itself, the fault is in an unknown header, and no record counts.
    """
    try:
        end = decode_chunk_header(data, path).committed_len
    except FormatError:
        return [], []
    end = end if FIRST_MANIFEST_RECORD <= end <= len(data) else len(data)
    records, ends, fault = _walk(data, end, path)
    return (records, ends) if fault is not None else ([], [])


def _walk(
    data: bytes, end: int, path: str
) -> tuple[list[ManifestRecord], list[int], FormatError | None]:
    """The records up to ``end`` or to the first fault."""
    records: list[ManifestRecord] = []
    ends: list[int] = []
    at = FIRST_MANIFEST_RECORD
    try:
        while at < end:
            record, at = decode_manifest_record(data, at, end, path)
            records.append(record)
            ends.append(at)
    except FormatError as exc:
        return records, ends, exc
    return records, ends, None


assert ROOM > MANIFEST_RECORD.size + 2 * 0xFFFF + 4  # the largest record fits an empty chunk


Warn = Callable[[str], object]

_SEGMENTS = "segments"
_TRIES = 5  # of a reader whose files change meanwhile


def _start(stream_dir: str, find: Warn) -> tuple[CatalogSnapshot | None, int]:
    """The snapshot to start with, and the first chunk.

    If no snapshot's position exists and chunk 0 is gone, too, it is the newest good snapshot, and
    its chunk will be found missing.
    """
    ids = snapshot_ids(stream_dir)  # listed first: a snapshot is written after its chunk
    there = chunk_indexes(stream_dir)
    best: CatalogSnapshot | None = None
    for snapshot_id in reversed(ids):
        try:
            snapshot = read_snapshot(stream_dir, snapshot_id)
        except FileNotFoundError:
            continue  # removed meanwhile: there is a newer one
        except RelayError as exc:
            find(f"{exc}: this snapshot is not used")
            continue
        best = best or snapshot
        if _position_exists(stream_dir, snapshot, there):
            return snapshot, snapshot.chunk_index
        path = snapshot_path(stream_dir, snapshot_id)
        position = f"chunk {snapshot.chunk_index} at {snapshot.chunk_offset}"
        find(f"{path}: {position} is not the end of a record: it is not used")
    if 0 in there or best is None:
        return None, 0
    return best, best.chunk_index


def _position_exists(stream_dir: str, snapshot: CatalogSnapshot, there: list[int]) -> bool:
    """True if the snapshot's position is the start of a chunk or the end of a record."""
    if snapshot.chunk_index not in there:
        return False
    if snapshot.chunk_offset == FIRST_MANIFEST_RECORD:
        return True
    path = chunk_path(stream_dir, snapshot.chunk_index)
    data = load_chunk(path)
    try:
        return snapshot.chunk_offset in decode_chunk(data, path, snapshot.chunk_index).ends
    except FormatError:  # the snapshot is good, and covers records of the damaged chunk
        return snapshot.chunk_offset <= len(data)


class Replay:
    """A manifest as it was read. Damage does not raise: it is a finding."""

    def __init__(self, stream_dir: str, warn: Warn) -> None:
        self.catalog = Catalog()
        self.records: list[ManifestRecord] = []  # those that were applied
        self.last: ManifestChunk | None = None  # a writer continues here, unless it is damaged
        self.next_record = 0  # ordinal of the next record
        self.damaged_from: int | None = None  # index of the chunk where replay stopped
        self.after_damage: list[ManifestRecord] = []  # good records after the damage, not applied
        self.findings: list[str] = []
        self.torn: list[str] = []  # writes in progress, or interrupted by a crash
        self.snapshot: CatalogSnapshot | None = None  # the one that replay started with
        self._stream_dir = stream_dir
        self._warn = warn

    @property
    def damaged(self) -> bool:
        """True if the catalog lacks records because of damage."""
        return self.damaged_from is not None

    def run(self) -> Replay:
        """Read the manifest, with a warning for each finding. Errors: OSError, UnsafePath."""
        self.snapshot, first = _start(self._stream_dir, self._find)
        self.catalog = Catalog(self.snapshot.entries if self.snapshot else ())
        there = [index for index in chunk_indexes(self._stream_dir) if index >= first]
        if there[:1] != [first]:
            self._missing(first, bool(there))
        for expected, index in enumerate(there, first):
            if self.damaged_from is None and index != expected:
                self._missing(expected, True)
            if self.damaged_from is None:
                self._chunk(index, index == there[-1])
            else:
                self._read_after_damage(index)
        if unknown := self.catalog.unknown:
            skipped = {f"type {r.type} flags {r.flags}" for r in self.records if not r.is_known}
            folder = os.path.join(self._stream_dir, MANIFEST)
            kinds = ", ".join(sorted(skipped))
            self._find(f"{folder}: {unknown} records of unknown types skipped: {kinds}")
        return self

    def _find(self, line: str) -> None:
        self.findings.append(line)
        self._warn(line)

    def _missing(self, index: int, others: bool) -> None:
        """Handle a missing chunk: damage, unless the stream is new."""
        if self.damaged_from is not None:
            return
        if not others and self.snapshot is None and not self._has_segments():
            return
        self.damaged_from = index
        path = chunk_path(self._stream_dir, index)
        self._find(f"{path}: this chunk is missing; replay stops before it")

    def _has_segments(self) -> bool:
        try:
            names = os.listdir(os.path.join(self._stream_dir, _SEGMENTS))
        except FileNotFoundError:
            return False
        return any(name.endswith(".seg") for name in names)

    def _chunk(self, index: int, newest: bool) -> None:
        """Verify a chunk, then apply it."""
        path = chunk_path(self._stream_dir, index)
        base = self.next_record if self.last is not None or index == 0 else None
        data = load_chunk(path)
        if not data and newest:
            self._find(f"{path}: created and never written; it is started again")
            return
        try:
            chunk = decode_chunk(data, path, index, base)
        except FormatError as exc:
            self._damage(index, data, path, exc)
            return
        self.next_record = chunk.header.base_record + len(chunk.records)
        self._apply(index, chunk.header.base_record, chunk.records, chunk.ends)
        self.last = chunk
        if chunk.torn_bytes:
            at = chunk.header.committed_len
            self.torn.append(f"{path} at {at}: torn tail of {chunk.torn_bytes} bytes dropped")

    def _damage(self, index: int, data: bytes, path: str, fault: FormatError) -> None:
        """Stop here: the good records before the fault count, the rest is kept apart."""
        self.damaged_from = index
        records, ends = salvage_chunk(data, path)
        if fault.offset in (16, 24):  # a chunk with another index or base: none of it counts
            records, ends = [], []
        base = max(self.next_record, _base_record(data, path))
        used = self._apply(index, base, records, ends)
        self.next_record = base + len(records)
        self._find(f"{fault}; replay stops there, {used} records of this chunk used")

    def _apply(self, index: int, base: int, records: list[ManifestRecord], ends: list[int]) -> int:
        """Apply the records that the snapshot does not cover; their number."""
        skip = 0
        if self.snapshot is not None and index == self.snapshot.chunk_index:
            skip = sum(end <= self.snapshot.chunk_offset for end in ends)
            # Only the manifest counts jobs. Each has a record, so this is high enough.
            self.catalog = Catalog(self.snapshot.entries, jobs=base + skip)
        for record in records[skip:]:
            self.catalog.apply(record)
        self.records += records[skip:]
        return len(records) - skip

    def _read_after_damage(self, index: int) -> None:
        """Read a chunk after the damage: its good records may help to rebuild the manifest."""
        path = chunk_path(self._stream_dir, index)
        try:
            chunk = decode_chunk(load_chunk(path), path, index)
        except FormatError as exc:
            self._find(f"{exc}; it is after the damage")
            return
        self.next_record = max(self.next_record, chunk.header.base_record + len(chunk.records))
        self.after_damage += chunk.records


def _base_record(data: bytes, path: str) -> int:
    """The base_record of a damaged chunk; 0 if its header is damaged."""
    try:
        return decode_chunk_header(data, path).base_record
    except FormatError:
        return 0


def read_manifest(stream_dir: str, warn: Warn) -> Replay:
    """Read the catalog of a stream while its writer runs.

    A fault that a second reading does not find was a write in progress. Errors: OSError,
    UnsafePath.
    """
    before: list[str] | None = None
    for last in [False] * _TRIES + [True]:
        try:
            seen = Replay(stream_dir, lambda _: None).run()
        except FileNotFoundError:  # a chunk was removed between listing and reading
            if last:
                raise
            continue
        if not seen.damaged or seen.findings == before:
            break
        before = seen.findings
    for line in seen.findings:
        warn(line)
    return seen


def checkpoint_offsets(stream_dir: str) -> list[int]:
    """The offsets that the two newest checkpoints cover, by the manifest, newest first.

    Two checkpoints cover the stream below the second. Reads chunks from the newest back, and skips
    damaged ones: the result is then smaller, never larger.
    """
    found: list[int] = []
    for index in reversed(chunk_indexes(stream_dir)):
        path = chunk_path(stream_dir, index)
        try:
            records = decode_chunk(load_chunk(path), path, index).records
        except (FormatError, FileNotFoundError):
            continue
        for record in reversed(records):
            if record.type == ManifestType.CustomEvent and len(found) < 2:
                found += _checkpoint_offset(record.fields)
        if len(found) >= 2:
            break
    return found


def _checkpoint_offset(fields: dict[str, int | str | bytes]) -> list[int]:
    if fields["schema_id"] != CHECKPOINT_WRITTEN:
        return []
    try:
        return [int(msgspec.msgpack.decode(fields["blob"], type=dict[str, int])["offset"])]  # type: ignore[arg-type]
    except (msgspec.DecodeError, KeyError):
        return []
