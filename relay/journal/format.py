"""The bytes of a segment: header, records, footer; and finding records after damage. No I/O.

All little-endian and packed. The magics are the source's integers, so a hex dump shows them
reversed (``MGES2FOA``). Table: docs/formats/aof2.md.
A new field anywhere in these structures is a new version of that file; the reader of the old one
stays under its number (``decode_header_v2``).

A record is good if its logical offset fits its position and its crc is right; both are checked for
each record, so any flipped bit is found. Functions work on a piece of a segment: ``shift`` is the
difference between a logical offset and its position in the piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntFlag
from struct import Struct
from typing import NamedTuple

from isal.isal_zlib import crc32

from relay.base.errors import FormatError, VersionError

SEGMENT_MAGIC = 0x414F46325345474D
SEGMENT_VERSION = 2
SEGMENT_HEADER = Struct("<QIQQQ2Q")
RECORD = Struct("<IIQQI")
FOOTER = Struct("<5Q")
assert (SEGMENT_HEADER.size, RECORD.size, FOOTER.size) == (52, 28, 40)

_CRC_AT = 4  # of record_crc32 in the record's header


class RecordFlag(IntFlag):
    """The special kinds of records."""

    SNAPSHOT_BOUNDARY = 1  # a checkpoint covers everything before it
    CONTROL = 2  # about the stream itself, such as a start of its writer
    GAP = 4  # in place of lost records, of the same length; only in PARTIAL segments
    JOINED = 8  # in the same commit as the previous one, without a sync between them


class SegmentFlag(IntFlag):
    """The state of a segment, in its footer."""

    SEALED = 1
    COMPACTED = 2  # rewritten by retention
    PARTIAL = 4  # salvaged from a damaged one


class SegmentHeader(NamedTuple):
    """The first 52 bytes of a segment."""

    stream_id: int
    segment_id: int
    creation_ts_ms: int

    def encode(self) -> bytes:
        """52 bytes."""
        return SEGMENT_HEADER.pack(SEGMENT_MAGIC, SEGMENT_VERSION, *self, 0, 0)


class Footer(NamedTuple):
    """The last 40 bytes of a sealed segment."""

    record_count: int
    durable_bytes: int  # header and records: the footer's own position
    segment_crc64: int  # over the bytes before the footer
    ext_id: int  # highest message id in the segment
    flags: int

    def encode(self) -> bytes:
        """40 bytes."""
        return FOOTER.pack(*self)


def crc64(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-64/NVME; ``before`` is the crc of the preceding bytes."""
    from awscrt.checksums import crc64nvme  # 40 ms, which most commands do not need

    return int(crc64nvme(data, before))


def decode_segment_header(data: bytes, path: str) -> SegmentHeader:
    """The header at the start of ``data``. Errors: FormatError, VersionError."""
    fields = decode_head(data, path, SEGMENT_HEADER, SEGMENT_MAGIC, SEGMENT_VERSION)
    stream_id, segment_id, created, *reserved = fields[2:]
    if reserved != [0, 0]:
        raise FormatError(path, 36, "reserved fields 0", reserved)
    return SegmentHeader(stream_id, segment_id, created)


def decode_head(
    data: bytes, path: str, layout: Struct, magic: int, version: int
) -> tuple[int, ...]:
    """The fields of a header, after checking magic and version."""
    if len(data) < layout.size:
        raise FormatError(path, 0, f"{layout.size} bytes of header", f"{len(data)} bytes")
    fields = layout.unpack_from(data)
    if fields[0] != magic:
        raise FormatError(path, 0, f"magic {magic:016x}", f"{fields[0]:016x}")
    if fields[1] != version:
        raise VersionError(path, 8, f"version {version}", fields[1])
    return fields


def encode_record(offset: int, at_ms: int, flags: int, payload: bytes) -> bytes:
    """Header and payload of a record; the crc covers both, with the crc field zero."""
    head = RECORD.pack(len(payload), 0, offset, at_ms, flags)
    crc = crc32(payload, crc32(head))
    return head[:_CRC_AT] + crc.to_bytes(4, "little") + head[_CRC_AT + 4 :] + payload


_HEAD = Struct("<IIQ")  # payload_len, record_crc32, logical_offset
_START = Struct("<II")  # the same header in two parts, around the crc
_REST = Struct("<QQI")
assert _START.size + _REST.size == RECORD.size
_CRC_FROM = 8  # the crc covers payload_len, four zeros, and everything from here on
_JOINED = int(RecordFlag.JOINED)
_NOT_ZERO = re.compile(rb"[^\0]")
_ZEROS = bytes(1 << 16)
_BLOCK_BITS = 16
_NO_OFFSET = 2**64 - (1 << _BLOCK_BITS)  # longer than any stream
_FILLED_LENGTHS = 4096  # a limit for streams with many different lengths


class Record(NamedTuple):
    """One record as it was appended."""

    offset: int  # logical, of its first byte
    at_ms: int
    flags: int
    payload: bytes

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self.offset + RECORD.size + len(self.payload)


class HeaderCrcs(dict[int, int]):
    """The crc of a record's first eight bytes (the crc field zero), by payload length.

    Many records have the same length: the cache saves one of two checksums each.
    """

    def __missing__(self, length: int) -> int:
        if len(self) >= _FILLED_LENGTHS:
            self.clear()
        crc = self[length] = int(crc32(length.to_bytes(8, "little")))
        return crc


def encode_records(
    batch: Iterable[tuple[bytes, int, int]],
    offset: int,
    at_ms: int,
    starts: HeaderCrcs,
    *,
    is_joined: bool = False,
) -> tuple[list[bytes], list[int], int]:
    """Encode records of (payload, flags, any value), the first at ``offset``, as ``encode_record``.

    Returns pieces to be joined, three for each record; the offset of each record; and the end of
    the last. All records are JOINED except the first, which is if ``is_joined``.
    """
    joined = _JOINED if is_joined else 0
    pieces: list[bytes] = []
    offsets: list[int] = []
    add, pack_start, pack_rest, head_bytes = pieces.append, _START.pack, _REST.pack, RECORD.size
    for payload, flags, _ in batch:
        length = len(payload)
        rest = pack_rest(offset, at_ms, flags | joined)
        joined = _JOINED
        add(pack_start(length, crc32(payload, crc32(rest, starts[length]))))
        add(rest)
        add(payload)
        offsets.append(offset)
        offset += head_bytes + length
    return pieces, offsets, offset


def scan(
    piece: bytes | bytearray | memoryview, end: int, shift: int, starts: HeaderCrcs
) -> tuple[int, int]:
    """Scan the good records from the start of ``piece``: the position after them, and their count.

    Records are not decoded: opening a journal scans the segment, so this takes three calls each.
    """
    unpack, head_bytes, size = _HEAD.unpack_from, RECORD.size, RECORD.size
    view = memoryview(piece)
    at = count = 0
    last = end - size
    while at <= last:
        length, crc, offset = unpack(piece, at)
        after = at + head_bytes + length
        if after > end or offset != at + shift:
            break
        if crc32(view[at + _CRC_FROM : after], starts[length]) != crc:
            break
        at = after
        count += 1
    return at, count


def decode_records(piece: bytes, shift: int, starts: HeaderCrcs) -> list[Record]:
    """The good records from the start of ``piece``; a list, as a start reads very many."""
    records: list[Record] = []
    add, unpack, head_bytes, end = records.append, RECORD.unpack_from, RECORD.size, len(piece)
    view = memoryview(piece)
    at, last = 0, end - head_bytes
    while at <= last:
        length, crc, offset, at_ms, flags = unpack(piece, at)
        after = at + head_bytes + length
        if after > end or offset != at + shift:
            break
        if crc32(view[at + _CRC_FROM : after], starts[length]) != crc:
            break
        add(Record(offset, at_ms, flags, piece[at + head_bytes : after]))
        at = after
    return records


def claimed_length(piece: bytes, shift: int) -> int:
    """The length in the header at the start of ``piece``; 0 if it is not a record."""
    if len(piece) < RECORD.size:
        return 0
    length, _, offset = _HEAD.unpack_from(piece)
    return RECORD.size + int(length) if offset == shift else 0


def describe_fault(piece: bytes, shift: int, starts: HeaderCrcs) -> tuple[str, str]:
    """Expected and found, for bytes at the start of ``piece`` that are not a good record."""
    if len(piece) < RECORD.size:
        return f"{RECORD.size} bytes of record header", f"{len(piece)} bytes"
    length, crc, offset = _HEAD.unpack_from(piece)
    if offset != shift:
        return f"logical_offset {shift}", f"{offset}"
    if RECORD.size + length > len(piece):
        return f"{length} bytes of payload", f"{len(piece) - RECORD.size} bytes"
    right = crc32(piece[_CRC_FROM : RECORD.size + length], starts[length])
    return f"crc32 {crc:08x}", f"{right:08x}"


def begins_commit(data: bytes, at: int, after: int) -> bool:
    """True if one of the good records of [at, after) begins a commit."""
    while at < after:
        length, _, _, _, flags = RECORD.unpack_from(data, at)
        if not flags & _JOINED:
            return True
        at += RECORD.size + length
    return False


def length_without_zeros(data: bytes) -> int:
    """The length without trailing zeros; fast for megabytes of them, too."""
    end = len(data)
    while data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    return len(data[:end].rstrip(b"\0"))


def find_record(data: bytes, start: int, shift: int, starts: HeaderCrcs, end: int = -1) -> int:
    """The position of the first good record from ``start`` on; -1 if there is none.

    ``end``: only zeros follow, if known. A record may begin at any position. The upper bytes of
    its expected offset are the same for 64 KiB, so they are searched for, and the rest is compared
    where they occur.
    """
    if end < 0:
        end = length_without_zeros(data)  # the crc or the offset of a record is not zero
    at = start
    end = min(end, _NO_OFFSET - shift)
    while at < end:
        block = (at + shift) >> _BLOCK_BITS
        until = min(end, ((block + 1) << _BLOCK_BITS) - shift)
        at = _find_in_block(data, at, until, shift, block, starts)
        if at < until:
            return at
    return -1


def find_any_record(data: bytes, least: int, starts: HeaderCrcs) -> tuple[int, int] | None:
    """Position and offset of the first good record with any offset from ``least`` on, for a
    segment that is not in the manifest. Slow: it tries each position."""
    view = memoryview(data)
    for at in range(length_without_zeros(data) - RECORD.size + 1):
        length, crc, offset = _HEAD.unpack_from(data, at)
        after = at + RECORD.size + length
        if after > len(data) or offset < least + at:
            continue
        if crc32(view[at + _CRC_FROM : after], starts[length]) == crc:
            return at, offset
    return None


def _find_in_block(
    data: bytes, at: int, until: int, shift: int, block: int, starts: HeaderCrcs
) -> int:
    """The first good record in [at, until); ``until`` if there is none."""
    upper = block.to_bytes(6, "little")
    while True:
        hit = data.find(upper, at + 10, until + 16)
        at = hit - 10
        if hit < 0 or at >= until:
            return until
        if _is_record(data, at, shift, starts):
            return at
        at = _after_zeros(data, at) if block == 0 else at + 1


def _after_zeros(data: bytes, at: int) -> int:
    """The next position whose eight bytes of offset are not all zero."""
    something = _NOT_ZERO.search(data, at + _CRC_FROM + 1)
    return max(at + 1, something.start() - 15) if something else len(data)


def _is_record(data: bytes, at: int, shift: int, starts: HeaderCrcs) -> bool:
    if len(data) - at < RECORD.size:
        return False
    length, crc, offset = _HEAD.unpack_from(data, at)
    after = at + RECORD.size + length
    if offset != at + shift or after > len(data):
        return False
    return bool(crc32(memoryview(data)[at + _CRC_FROM : after], starts[length]) == crc)
