"""Snapshots of the catalog: what the manifest says up to one position, in one file.

A snapshot is written by temp, fsync, rename, so one that is there is whole; it is an aid all the
same: a damaged one costs a longer replay. Bytes: docs/formats/aof2.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from relay.base import fsio
from relay.base.errors import FormatError, IntegrityError, VersionError
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.format import (
    CHECKSUM,
    MAX_ETAG_BYTES,
    MAX_KEY_BYTES,
    SNAPSHOT_ENTRY,
    SNAPSHOT_HEADER,
    SNAPSHOT_MAGIC,
    SNAPSHOT_VERSION,
    crc64,
)

SNAPSHOTS = "snapshot"
_NAME = re.compile(r"(0[0-9]{19})\.snap")
_ALL_TIERS = int(Residency.TIER0 | Residency.TIER1 | Residency.TIER2)
_MAX_BYTES = 1 << 30  # three million segments


class CatalogSnapshot(NamedTuple):
    """The catalog's entries as of a position of the manifest."""

    snapshot_id: int
    chunk_index: int  # of the first record that it does not cover
    chunk_offset: int
    entries: tuple[SegmentEntry, ...]  # by segment id


def snapshot_path(stream_dir: str, snapshot_id: int) -> str:
    """Where the snapshot of that id is."""
    return os.path.join(stream_dir, SNAPSHOTS, f"{snapshot_id:020d}.snap")


def snapshot_ids(stream_dir: str) -> list[int]:
    """The ids of the snapshots that are there, ascending; good or not."""
    try:
        names = os.listdir(os.path.join(stream_dir, SNAPSHOTS))
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def encode_snapshot(chunk_index: int, chunk_offset: int, entries: Iterable[SegmentEntry]) -> bytes:
    """The file's bytes. Errors: ValueError for a key or etag longer than its field."""
    packed = [_encode_entry(entry) for entry in sorted(entries, key=lambda e: e.segment_id)]
    head = (SNAPSHOT_MAGIC, SNAPSHOT_VERSION, len(packed), chunk_index, chunk_offset)
    data = SNAPSHOT_HEADER.pack(*head) + b"".join(packed)
    return data + CHECKSUM.pack(crc64(data))


def _encode_entry(entry: SegmentEntry) -> bytes:
    key, etag = entry.key.encode(), entry.etag.encode()
    if len(key) > MAX_KEY_BYTES or len(etag) > MAX_ETAG_BYTES:
        raise ValueError(f"segment {entry.segment_id}: key or etag is too long for a snapshot")
    return SNAPSHOT_ENTRY.pack(
        entry.segment_id,
        entry.base_offset,
        entry.durable_bytes,
        entry.segment_crc64,
        entry.ext_id,
        entry.creation_ts_ms,
        entry.compressed_bytes,
        entry.residency,
        entry.sealed,
        0,
        entry.dictionary_id,
        len(key),
        len(etag),
        0,
        key,
        etag,
    )


def decode_snapshot(data: bytes, path: str, snapshot_id: int) -> CatalogSnapshot:
    """What the bytes of a snapshot say: magic, version, length, checksum, and then the entries.

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
    for number, (one, other) in enumerate(pairwise(entries), 1):
        if one.segment_id >= other.segment_id:
            at = SNAPSHOT_HEADER.size + number * SNAPSHOT_ENTRY.size
            raise FormatError(path, at, f"a segment after {one.segment_id}", other.segment_id)
    return CatalogSnapshot(snapshot_id, chunk_index, chunk_offset, entries)


def _decode_entry(data: bytes, at: int, path: str) -> SegmentEntry:
    segment_id, base, durable, crc, ext_id, created, compressed, *fields = (
        SNAPSHOT_ENTRY.unpack_from(data, at)
    )
    tiers, sealed, zero, dictionary_id, key_len, etag_len, more_zero, key, etag = fields
    if tiers > _ALL_TIERS or sealed > 1 or zero or more_zero:
        expected = f"residency to {_ALL_TIERS}, sealed to 1, zeros"
        raise FormatError(path, at + 56, expected, (tiers, sealed, zero, more_zero))
    if key_len > MAX_KEY_BYTES or etag_len > MAX_ETAG_BYTES:
        expected = f"key_len to {MAX_KEY_BYTES}, etag_len to {MAX_ETAG_BYTES}"
        raise FormatError(path, at + 64, expected, (key_len, etag_len))
    return SegmentEntry(
        segment_id,
        base,
        durable,
        crc,
        ext_id,
        created,
        compressed,
        Residency(tiers),
        bool(sealed),
        dictionary_id,
        key[:key_len].decode(errors="replace"),
        etag[:etag_len].decode(errors="replace"),
    )


def read_snapshot(stream_dir: str, snapshot_id: int) -> CatalogSnapshot:
    """The snapshot of that id, verified. Errors: OSError, UnsafePath, FormatError and its kind."""
    path = snapshot_path(stream_dir, snapshot_id)
    data, _ = fsio.read_regular(path, None, _MAX_BYTES, shared=True)
    return decode_snapshot(data, path, snapshot_id)


def write_snapshot(stream_dir: str, snapshot: CatalogSnapshot) -> None:
    """Put a snapshot in its place; it is there, whole, when this returns. Errors: OSError."""
    data = encode_snapshot(snapshot.chunk_index, snapshot.chunk_offset, snapshot.entries)
    fsio.write_atomic(snapshot_path(stream_dir, snapshot.snapshot_id), data)
