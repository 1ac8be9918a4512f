"""The catalog of segments: location, size and failures of each, and snapshots of it.

``Catalog.apply`` is the only thing that changes it: the same records in the same order give the
same catalog, in the writer, in a reader and after a crash.

A segment opens in Tier 0 (``segments/``), may be compressed into Tier 1 (``warm/``) and uploaded
to Tier 2 (the object store). A record of its own says that it left a tier; an entry that is in no
tier is removed. A snapshot is a file with all entries as of one position of the manifest; a
damaged one costs a longer replay, nothing more. Bytes: docs/formats/aof2.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import IntFlag
from itertools import pairwise
from typing import NamedTuple

import msgspec

from relay.base import fsio
from relay.base.errors import FormatError, IntegrityError, VersionError
from relay.journal.files import numbered_files
from relay.journal.format import FOOTER, SEGMENT_HEADER, crc64
from relay.journal.manifest_format import (
    CHECKSUM,
    MAX_ETAG_BYTES,
    MAX_KEY_BYTES,
    SNAPSHOT_ENTRY,
    SNAPSHOT_HEADER,
    SNAPSHOT_MAGIC,
    SNAPSHOT_VERSION,
    ManifestRecord,
    ManifestType,
)


class Residency(IntFlag):
    """The tiers that have a whole copy of a segment."""

    TIER0 = 1  # segments/, as it was written
    TIER1 = 2  # warm/, compressed
    TIER2 = 4  # the object store


class SegmentEntry(msgspec.Struct, frozen=True):
    """The entry of one segment; its fields are those of a snapshot's entry."""

    segment_id: int
    base_offset: int  # stream offset of its first record
    durable_bytes: int = 0  # header and records; 0 while it is active
    segment_crc64: int = 0
    ext_id: int = 0  # highest message id in it
    creation_ts_ms: int = 0
    compressed_bytes: int = 0  # of the Tier 1 file and the Tier 2 object; 0: never compressed
    residency: Residency = Residency.TIER0
    sealed: bool = False
    dictionary_id: int = 0  # 0: none
    key: str = ""  # of the Tier 2 object
    etag: str = ""

    @property
    def end_offset(self) -> int:
        """The stream offset after its last record; for an active segment, its base."""
        return self.base_offset + max(self.durable_bytes - SEGMENT_HEADER.size, 0)

    @property
    def file_bytes(self) -> int:
        """The size of the sealed Tier 0 file, footer included."""
        return self.durable_bytes + FOOTER.size


class Failure(NamedTuple):
    """The last failure of a kind of job on a segment, and how many in a row."""

    reason: int  # of format.Reason
    at_ms: int
    times: int


# A success clears the failures of its own kind.
_CLEARS = {
    ManifestType.CompressionDone: ManifestType.CompressionFailed,
    ManifestType.UploadDone: ManifestType.UploadFailed,
    ManifestType.HydrationDone: ManifestType.HydrationFailed,
}
_FAILURES = frozenset(_CLEARS.values())


class Catalog:
    """Entries by segment id, ascending. Owned by a manifest, and changed under its lock."""

    def __init__(self, entries: Iterable[SegmentEntry] = (), *, jobs: int = 0) -> None:
        self.entries: dict[int, SegmentEntry] = {entry.segment_id: entry for entry in entries}
        # By segment and kind, for status and retries. Not in snapshots.
        self.failures: dict[tuple[int, ManifestType], Failure] = {}
        self.deleting: dict[int, str] = {}  # segment -> key: queued for deletion in Tier 2
        self.unknown = 0  # number of records of unknown types
        self._last_job = jobs
        self._last_segment = max(self.entries, default=-1)

    @property
    def next_segment_id(self) -> int:
        """One more than the highest id of any segment so far."""
        return self._last_segment + 1

    @property
    def next_job_id(self) -> int:
        """One more than the highest id of any compression job so far, modulo 2^32."""
        return (self._last_job + 1) % 2**32

    def apply(self, record: ManifestRecord) -> None:
        """Apply one record. Never raises: unknown types are counted, and records of removed
        segments change nothing."""
        if not record.is_known:
            self.unknown += 1
            return
        kind = ManifestType(record.type)
        self._update_jobs(kind, record)
        change = _CHANGES.get(kind)
        if change is None:
            return
        before = self.entries.get(record.segment_id)
        after = change(before, record)
        if after is None:
            self.entries.pop(record.segment_id, None)
        elif before is None:
            self._insert(after)
        else:
            self.entries[after.segment_id] = after

    def _insert(self, entry: SegmentEntry) -> None:
        late = entry.segment_id < self._last_segment
        self.entries[entry.segment_id] = entry
        self._last_segment = max(self._last_segment, entry.segment_id)
        if late:  # after damage only: entries are ordered by id
            self.entries = dict(sorted(self.entries.items()))

    def _update_jobs(self, kind: ManifestType, record: ManifestRecord) -> None:
        """Update failures, jobs and deletions."""
        segment = record.segment_id
        if kind in _FAILURES:
            times = self.failures[segment, kind].times if (segment, kind) in self.failures else 0
            reason = _number(record, "reason_code")
            self.failures[segment, kind] = Failure(reason, record.timestamp_ms, times + 1)
        elif kind in _CLEARS:
            self.failures.pop((segment, _CLEARS[kind]), None)
        elif kind is ManifestType.CompressionStarted:
            self._last_job = max(self._last_job, _number(record, "job_id"))
        elif kind is ManifestType.Tier2DeleteQueued:
            self.deleting[segment] = str(record.fields["key"])
        elif kind is ManifestType.Tier2Deleted:
            self.deleting.pop(segment, None)


_Change = Callable[[SegmentEntry | None, ManifestRecord], SegmentEntry | None]


def _opened(entry: SegmentEntry | None, record: ManifestRecord) -> SegmentEntry:
    base = _number(record, "base_offset")
    if entry is not None and entry.sealed and entry.base_offset == base:
        return entry  # repeated by a recovery: it stays sealed
    return SegmentEntry(record.segment_id, base, creation_ts_ms=record.timestamp_ms)


def _sealed(entry: SegmentEntry | None, record: ManifestRecord) -> SegmentEntry:
    durable = _number(record, "durable_bytes")
    if entry is None:  # its SegmentOpened was lost; this record has the segment's end
        base = max(record.logical_offset - (durable - SEGMENT_HEADER.size), 0)
        entry = SegmentEntry(record.segment_id, base, creation_ts_ms=record.timestamp_ms)
    return msgspec.structs.replace(
        entry,
        durable_bytes=durable,
        segment_crc64=_number(record, "segment_crc64"),
        ext_id=_number(record, "ext_id"),
        sealed=True,
    )


def _compressed(entry: SegmentEntry | None, record: ManifestRecord) -> SegmentEntry | None:
    return entry and msgspec.structs.replace(
        entry,
        compressed_bytes=_number(record, "compressed_bytes"),
        dictionary_id=_number(record, "dictionary_id"),
        residency=entry.residency | Residency.TIER1,
    )


def _uploaded(entry: SegmentEntry | None, record: ManifestRecord) -> SegmentEntry | None:
    return entry and msgspec.structs.replace(
        entry,
        key=str(record.fields["key"]),
        etag=str(record.fields["etag"]),
        residency=entry.residency | Residency.TIER2,
    )


def _hydrated(entry: SegmentEntry | None, record: ManifestRecord) -> SegmentEntry | None:
    return entry and msgspec.structs.replace(entry, residency=entry.residency | Residency.TIER0)


def _evicted(entry: SegmentEntry | None, record: ManifestRecord) -> SegmentEntry | None:
    return entry and _without(entry, evicted_tier(entry, _number(record, "reclaimed_bytes")))


def _deleted(entry: SegmentEntry | None, record: ManifestRecord) -> SegmentEntry | None:
    return entry and _without(msgspec.structs.replace(entry, key="", etag=""), Residency.TIER2)


def evicted_tier(entry: SegmentEntry, reclaimed_bytes: int) -> Residency:
    """The tier that a LocalEvicted is about: the record has no field for it, only the size.

    Tier 1 if it is the size of the Tier 1 file, else Tier 0. So a record that is repeated after a
    crash changes nothing. If both files have the same size: Tier 0 first.
    """
    if reclaimed_bytes != entry.compressed_bytes or not entry.compressed_bytes:
        return Residency.TIER0
    if reclaimed_bytes != entry.file_bytes or not entry.residency & Residency.TIER0:
        return Residency.TIER1
    return Residency.TIER0


def _without(entry: SegmentEntry, tier: Residency) -> SegmentEntry | None:
    """The entry without a tier; None if that was the last one."""
    left = entry.residency & ~tier
    return msgspec.structs.replace(entry, residency=left) if left else None


def _number(record: ManifestRecord, field: str) -> int:
    return int(record.fields[field])


_CHANGES: dict[ManifestType, _Change] = {
    ManifestType.SegmentOpened: _opened,
    ManifestType.SealSegment: _sealed,
    ManifestType.CompressionDone: _compressed,
    ManifestType.UploadDone: _uploaded,
    ManifestType.HydrationDone: _hydrated,
    ManifestType.LocalEvicted: _evicted,
    ManifestType.Tier2Deleted: _deleted,
}


SNAPSHOTS = "snapshot"
_ALL_TIERS = int(Residency.TIER0 | Residency.TIER1 | Residency.TIER2)
_MAX_BYTES = 1 << 30  # three million segments


class CatalogSnapshot(NamedTuple):
    """The catalog's entries as of a position of the manifest."""

    snapshot_id: int
    chunk_index: int  # position of the first record that it does not cover
    chunk_offset: int
    entries: tuple[SegmentEntry, ...]  # by segment id


def snapshot_path(stream_dir: str, snapshot_id: int) -> str:
    """The path of a snapshot."""
    return os.path.join(stream_dir, SNAPSHOTS, f"{snapshot_id:020d}.snap")


def snapshot_ids(stream_dir: str) -> list[int]:
    """The ids of the snapshot files, ascending; damaged ones included."""
    return numbered_files(os.path.join(stream_dir, SNAPSHOTS), ".snap")


def encode_snapshot(chunk_index: int, chunk_offset: int, entries: Iterable[SegmentEntry]) -> bytes:
    """The file's bytes. Errors: ValueError for a key or etag longer than its field."""
    packed = [_encode_entry(entry) for entry in sorted(entries, key=lambda e: e.segment_id)]
    head = (SNAPSHOT_MAGIC, SNAPSHOT_VERSION, len(packed), chunk_index, chunk_offset)
    data = SNAPSHOT_HEADER.pack(*head) + b"".join(packed)
    return data + CHECKSUM.pack(crc64(data))


def _encode_entry(entry: SegmentEntry) -> bytes:
    *fields, dictionary_id, key, etag = msgspec.structs.astuple(entry)
    key, etag = key.encode(), etag.encode()
    if len(key) > MAX_KEY_BYTES or len(etag) > MAX_ETAG_BYTES:
        raise ValueError(f"segment {entry.segment_id}: key or etag is too long for a snapshot")
    return SNAPSHOT_ENTRY.pack(*fields, 0, dictionary_id, len(key), len(etag), 0, key, etag)


def decode_snapshot(data: bytes, path: str, snapshot_id: int) -> CatalogSnapshot:
    """Verify and decode a snapshot: magic, version, length, checksum, and then the entries.

    Errors: FormatError, VersionError, IntegrityError.
    """
    if len(data) < SNAPSHOT_HEADER.size + CHECKSUM.size:
        least = SNAPSHOT_HEADER.size + CHECKSUM.size
        raise FormatError(path, 0, f"{least} bytes and more", f"{len(data)} bytes")
    magic, version, count, chunk_index, chunk_offset = SNAPSHOT_HEADER.unpack_from(data)
    if magic != SNAPSHOT_MAGIC:
        raise FormatError(path, 0, f"magic {SNAPSHOT_MAGIC:016x}", f"{magic:016x}")
    if version != SNAPSHOT_VERSION:
        raise VersionError(path, 8, f"version {SNAPSHOT_VERSION}", version)
    end = SNAPSHOT_HEADER.size + count * SNAPSHOT_ENTRY.size
    if len(data) != end + CHECKSUM.size:
        raise FormatError(
            path, 12, f"{end + CHECKSUM.size} bytes for {count} entries", f"{len(data)} bytes"
        )
    (expected,) = CHECKSUM.unpack_from(data, end)
    found = crc64(memoryview(data)[:end])
    if found != expected:
        raise IntegrityError(path, end, f"crc64 {expected:016x}", f"{found:016x}")
    entries = tuple(
        _decode_entry(data, at, path)
        for at in range(SNAPSHOT_HEADER.size, end, SNAPSHOT_ENTRY.size)
    )
    for number, (entry, other) in enumerate(pairwise(entries), 1):
        if entry.segment_id >= other.segment_id:
            at = SNAPSHOT_HEADER.size + number * SNAPSHOT_ENTRY.size
            raise FormatError(path, at, f"a segment after {entry.segment_id}", other.segment_id)
    return CatalogSnapshot(snapshot_id, chunk_index, chunk_offset, entries)


def _decode_entry(data: bytes, at: int, path: str) -> SegmentEntry:
    *numbers, tiers, sealed, zero, dictionary_id, key_len, etag_len, more_zero, key, etag = (
        SNAPSHOT_ENTRY.unpack_from(data, at)
    )
    if tiers > _ALL_TIERS or sealed > 1 or zero or more_zero:
        expected = f"residency to {_ALL_TIERS}, sealed to 1, zeros"
        raise FormatError(path, at + 56, expected, (tiers, sealed, zero, more_zero))
    if key_len > MAX_KEY_BYTES or etag_len > MAX_ETAG_BYTES:
        expected = f"key_len to {MAX_KEY_BYTES}, etag_len to {MAX_ETAG_BYTES}"
        raise FormatError(path, at + 64, expected, (key_len, etag_len))
    texts = (text.decode(errors="replace") for text in (key[:key_len], etag[:etag_len]))
    return SegmentEntry(*(*numbers, Residency(tiers), bool(sealed), dictionary_id, *texts))


def load_snapshot(path: str, snapshot_id: int = 0) -> CatalogSnapshot:
    """A snapshot file by its path. Errors: FormatError and subclasses, OSError, UnsafePath."""
    data, _ = fsio.read_regular(path, None, _MAX_BYTES, shared=True)
    return decode_snapshot(data, path, snapshot_id)


def read_snapshot(stream_dir: str, snapshot_id: int) -> CatalogSnapshot:
    """Read and verify a snapshot. Errors: as ``load_snapshot``."""
    return load_snapshot(snapshot_path(stream_dir, snapshot_id), snapshot_id)


def write_snapshot(stream_dir: str, snapshot: CatalogSnapshot) -> None:
    """Write a snapshot atomically and durably. Errors: OSError."""
    data = encode_snapshot(snapshot.chunk_index, snapshot.chunk_offset, snapshot.entries)
    fsio.write_atomic(snapshot_path(stream_dir, snapshot.snapshot_id), data)
