"""Records of a segment: encoding, scanning, decoding, and finding them after damage. No files.

A record is good if its logical offset fits its position and its crc is right; both are checked for
each record, so any flipped bit is found. Functions work on a piece of a segment: ``shift`` is the
difference between a logical offset and its position in the piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple

from isal.isal_zlib import crc32

from relay.journal.format import RECORD, RecordFlag

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


def decode_records(piece: bytes, shift: int, starts: HeaderCrcs) -> Iterator[Record]:
    """The good records from the start of ``piece``."""
    view = memoryview(piece)
    at, last = 0, len(piece) - RECORD.size
    while at <= last:
        length, crc, offset, at_ms, flags = RECORD.unpack_from(piece, at)
        after = at + RECORD.size + length
        if after > len(piece) or offset != at + shift:
            return
        if crc32(view[at + _CRC_FROM : after], starts[length]) != crc:
            return
        yield Record(offset, at_ms, flags, piece[at + RECORD.size : after])
        at = after


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
