"""The bytes of the manifest: its chunks, records and snapshots. No I/O.

The rules of ``format`` hold here, too. A new type of record takes the next free id, and nothing
else changes: readers skip what they do not know.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from struct import Struct
from typing import NamedTuple

from relay.base.errors import FormatError, IntegrityError
from relay.journal.format import crc64, decode_head

CHUNK_MAGIC = 0x414F46324D4C4F47
CHUNK_VERSION = 1
CHUNK_HEADER = Struct("<QIIQQQQQQ")
MANIFEST_RECORD = Struct("<HHIQQQQ")
assert (CHUNK_HEADER.size, MANIFEST_RECORD.size) == (64, 40)
CHUNK_CAPACITY = 256 << 10

SNAPSHOT_MAGIC = 0x414F4632534E4150
SNAPSHOT_VERSION = 3
SNAPSHOT_HEADER = Struct("<QIIQQ")
SNAPSHOT_ENTRY = Struct("<7QBBHIHHI184s64s")
CHECKSUM = Struct("<Q")
assert (SNAPSHOT_HEADER.size, SNAPSHOT_ENTRY.size) == (32, 320)
MAX_KEY_BYTES = 184  # what a snapshot's entry has room for
MAX_ETAG_BYTES = 64


class ChunkFlag(IntFlag):
    """The state of a manifest chunk."""

    SEALED = 1
    UPLOADED = 2  # to Tier 2


class ChunkHeader(NamedTuple):
    """The first 64 bytes of a manifest chunk."""

    chunk_index: int
    base_record: int  # ordinal of the first record in the chunk
    tail_offset: int  # first unwritten byte, from the start of the file
    committed_len: int  # bytes synced and safe to replay, from the start of the file
    chunk_crc64: int  # over [64, committed_len)
    flags: int

    def encode(self) -> bytes:
        """64 bytes."""
        return CHUNK_HEADER.pack(CHUNK_MAGIC, CHUNK_VERSION, CHUNK_HEADER.size, *self)


def decode_chunk_header(data: bytes, path: str) -> ChunkHeader:
    """The header at the start of ``data``. Errors: FormatError, VersionError."""
    fields = decode_head(data, path, CHUNK_HEADER, CHUNK_MAGIC, CHUNK_VERSION)
    if fields[2] != CHUNK_HEADER.size:
        raise FormatError(path, 12, f"header_len {CHUNK_HEADER.size}", fields[2])
    return ChunkHeader(*fields[3:])


class ManifestType(IntEnum):
    """The type of a manifest record; the ids are those of docs/formats/aof2.md."""

    SegmentOpened = 0
    SealSegment = 1
    CompressionStarted = 2
    CompressionDone = 3
    CompressionFailed = 4
    UploadStarted = 5
    UploadDone = 6
    UploadFailed = 7
    Tier2DeleteQueued = 8
    Tier2Deleted = 9
    HydrationStarted = 10
    HydrationDone = 11
    HydrationFailed = 12
    LocalEvicted = 13
    SnapshotMarker = 14
    CustomEvent = 15


class Reason(IntEnum):
    """The reason of a failed compression, upload or hydration; see docs/formats/aof2.md."""

    TRANSIENT = 0  # eligible for automatic retry
    CODEC = 1  # permanent: a corrupt segment
    AUTHENTICATION = 2  # requires operator action
    UNAVAILABLE = 3  # bucket or network
    MISSING = 4  # the Tier 2 object is missing: repair


REASONS = {
    Reason.TRANSIENT: "transient: retried",
    Reason.CODEC: "permanent: the segment is corrupt",
    Reason.AUTHENTICATION: "authentication: the operator must act",
    Reason.UNAVAILABLE: "bucket or network unavailable",
    Reason.MISSING: "the Tier 2 object is missing",
}
CHECKPOINT_WRITTEN = 1  # schemas of CustomEvent, each a msgpack map
ARCHIVE_ROLLED = 2
# Fields of each payload in disk order; key, etag and blob follow their lengths.
_PAYLOADS: dict[ManifestType, tuple[Struct, tuple[str, ...]]] = {
    ManifestType.SegmentOpened: (Struct("<QI"), ("base_offset", "epoch")),
    ManifestType.SealSegment: (
        Struct("<QQQQB"),
        ("durable_bytes", "segment_crc64", "ext_id", "coordinator_watermark", "flush_failure"),
    ),
    ManifestType.CompressionStarted: (Struct("<I"), ("job_id",)),
    ManifestType.CompressionDone: (Struct("<QI"), ("compressed_bytes", "dictionary_id")),
    ManifestType.CompressionFailed: (Struct("<I"), ("reason_code",)),
    ManifestType.UploadStarted: (Struct("<H"), ("key_len",)),
    ManifestType.UploadDone: (Struct("<HH"), ("key_len", "etag_len")),
    ManifestType.UploadFailed: (Struct("<HI"), ("key_len", "reason_code")),
    ManifestType.Tier2DeleteQueued: (Struct("<H"), ("key_len",)),
    ManifestType.Tier2Deleted: (Struct("<H"), ("key_len",)),
    ManifestType.HydrationStarted: (Struct("<Q"), ("source_tier",)),
    ManifestType.HydrationDone: (Struct("<Q"), ("resident_bytes",)),
    ManifestType.HydrationFailed: (Struct("<I"), ("reason_code",)),
    ManifestType.LocalEvicted: (Struct("<Q"), ("reclaimed_bytes",)),
    ManifestType.SnapshotMarker: (
        Struct("<QQQ"),
        ("chunk_index", "chunk_offset", "snapshot_id"),
    ),
    ManifestType.CustomEvent: (Struct("<IH"), ("schema_id", "blob_len")),
}
_TEXTS = {"key_len": "key", "etag_len": "etag"}
Field = int | str | bytes


class ManifestRecord(NamedTuple):
    """One record of the manifest. ``type``: the number, for an unknown type, too."""

    type: int
    segment_id: int
    logical_offset: int  # base for SegmentOpened, end for SealSegment, else the segment's base
    timestamp_ms: int
    fields: dict[str, Field]  # of its payload, by the names in docs/formats/aof2.md
    flags: int = 0

    @property
    def name(self) -> str:
        """``SealSegment``; the number for an unknown type."""
        return ManifestType(self.type).name if self.is_known else str(self.type)

    @property
    def is_known(self) -> bool:
        """False for a type of a later version, which is skipped and counted."""
        return self.type in _PAYLOADS

    def encode(self) -> bytes:
        """Header and payload."""
        payload = encode_payload(self.type, self.fields)
        head = (self.type, self.flags, len(payload), self.segment_id, self.logical_offset)
        return MANIFEST_RECORD.pack(*head, self.timestamp_ms, crc64(payload)) + payload


def encode_payload(kind: int, fields: dict[str, Field]) -> bytes:
    """The payload of a manifest record. Errors: KeyError for a missing field."""
    if kind not in _PAYLOADS:
        return bytes(fields["payload"])  # type: ignore[arg-type] # as it was read
    layout, names = _PAYLOADS[ManifestType(kind)]
    tail: list[bytes] = []
    numbers: list[int] = []
    for name in names:
        if name in _TEXTS:
            tail.append(str(fields[_TEXTS[name]]).encode())
            numbers.append(len(tail[-1]))
        elif name == "blob_len":
            tail.append(bytes(fields["blob"]))  # type: ignore[arg-type]
            numbers.append(len(tail[-1]))
        else:
            numbers.append(int(fields[name]))
    return layout.pack(*numbers) + b"".join(tail)


def decode_manifest_record(data: bytes, at: int, end: int, path: str) -> tuple[ManifestRecord, int]:
    """The record at ``at``, and the position after it, ``end`` at most.

    Errors: FormatError for an incomplete record, IntegrityError for a wrong checksum.
    """
    if end - at < MANIFEST_RECORD.size:
        raise FormatError(path, at, f"{MANIFEST_RECORD.size} bytes of header", f"{end - at} bytes")
    head = MANIFEST_RECORD.unpack_from(data, at)
    kind, flags, length, segment_id, logical_offset, timestamp_ms, crc = head
    begin = at + MANIFEST_RECORD.size
    if length > end - begin:
        raise FormatError(path, at, f"{length} bytes of payload", f"{end - begin} bytes")
    payload = data[begin : begin + length]
    found = crc64(payload)
    if found != crc:
        raise IntegrityError(path, begin, f"crc64 {crc:016x}", f"{found:016x}")
    fields = _decode_payload(kind, payload, path, begin)
    record = ManifestRecord(kind, segment_id, logical_offset, timestamp_ms, fields, flags)
    return record, begin + length


def _decode_payload(kind: int, payload: bytes, path: str, at: int) -> dict[str, Field]:
    if kind not in _PAYLOADS:
        return {"payload": payload}
    layout, names = _PAYLOADS[ManifestType(kind)]
    if len(payload) < layout.size:
        raise FormatError(path, at, f"{layout.size} bytes and more", f"{len(payload)} bytes")
    fields: dict[str, Field] = {}
    rest = layout.size
    for name, number in zip(names, layout.unpack_from(payload), strict=True):
        if name not in _TEXTS and name != "blob_len":
            fields[name] = number
            continue
        piece = payload[rest : rest + number]
        if len(piece) < number:
            raise FormatError(path, at + rest, f"{number} bytes", f"{len(piece)} bytes")
        rest += number
        if name == "blob_len":
            fields["blob"] = piece
        else:
            fields[_TEXTS[name]] = piece.decode(errors="replace")
    if rest != len(payload):
        raise FormatError(path, at, f"{rest} bytes of payload", f"{len(payload)} bytes")
    return fields
