"""What is found at open behind the last good record of a segment, and what is done about it.

    all zeros                          the segment goes on
    a footer that fits                 a seal to be finished
    bytes, and no commit behind them   a torn tail: kept aside as NAME.torn, then cleared
    a commit behind them, or the       damage: every good record is salvaged to its old offset, the
    stream is covered beyond them      file kept as NAME.bad, and the segment is done (PARTIAL)

Good records behind a gap may be of the very commit that was cut short: a disk writes the sectors
of one sync in any order. Nothing of it was promised, and what is behind the gap may speak of what
was in it; so only a record that begins a commit proves that what is before it was there once.
A crash in the middle of any of them leaves one of these four again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from relay.base import fsio
from relay.base.errors import FormatError, VersionError
from relay.journal.format import (
    FOOTER,
    RECORD,
    SEGMENT_HEADER,
    Footer,
    RecordFlag,
    SegmentFlag,
    SegmentHeader,
    crc64,
    decode_segment_header,
    encode_record,
)
from relay.journal.records import (
    HeaderCrcs,
    begins_commit,
    claimed_length,
    describe_fault,
    find_record,
    length_without_zeros,
    scan,
)
from relay.journal.segment import FIRST_RECORD

_PIECE_BYTES = 1 << 19  # half of a second-level cache: what is read is checked while it is warm


class TailKind(Enum):
    """What stands behind the last good record."""

    CLEAN = "clean"  # zeros, or nothing
    FOOTER = "footer"  # of these very records
    TORN = "torn"  # a write that was cut short
    DAMAGE = "damage"  # something that was there is lost


class Walk(NamedTuple):
    """The good records from the start of a segment."""

    position: int  # in the file, behind the last of them
    records: int
    crc64: int  # of the file up to there
    first_ms: int  # time of the first record; 0 when there is none


class Tail(NamedTuple):
    """A walk, and what stands behind it."""

    walk: Walk
    kind: TailKind
    why: str = ""  # expected and found, of what ended the walk
    footer: Footer | None = None


def walk(fd: int, base: int, head: bytes) -> Walk:
    """Walk the records of a segment file; ``head``: its header. Reads the file once, in pieces."""
    buffer = bytearray(_PIECE_BYTES)
    view, starts = memoryview(buffer), HeaderCrcs()
    position, count, crc = FIRST_RECORD, 0, crc64(head)
    first_ms = 0
    while True:
        shift = base + position - FIRST_RECORD
        filled = os.preadv(fd, [buffer], position)
        at, more = scan(buffer, filled, shift, starts)
        if not at:
            claimed = claimed_length(bytes(view[: min(filled, RECORD.size)]), shift)
            if claimed <= len(buffer) or claimed > os.fstat(fd).st_size - position:
                return Walk(position, count, crc, first_ms)
            view.release()
            buffer = bytearray(claimed)  # one record that is longer than a piece
            view = memoryview(buffer)
            continue
        if not count:
            first_ms = RECORD.unpack_from(buffer)[3]
        crc = crc64(view[:at], crc)
        position += at
        count += more


def inspect_tail(fd: int, path: str, base: int, head: bytes, covered: int) -> Tail:
    """Walk a segment file and say what stands behind its last good record. Changes nothing.

    ``covered``: the stream was there up to this offset once; less than that is damage.
    """
    found = walk(fd, base, head)
    is_short = base + found.position - FIRST_RECORD < covered
    if (footer := _footer(os.pread(fd, FOOTER.size, found.position), found)) is not None:
        wrong = footer.segment_crc64 != found.crc64
        why = f"expected segment_crc64 {footer.segment_crc64:016x}, found {found.crc64:016x}"
        return Tail(found, TailKind.FOOTER, why if wrong else "", footer)
    if is_zero(fd, found.position):
        return Tail(found, TailKind.CLEAN)
    rest = _read(fd, found.position)
    shift = base + found.position - FIRST_RECORD
    expected, seen = describe_fault(rest, shift, HeaderCrcs())
    why = f"expected {expected}, found {seen}"
    if is_short or any(begins_commit(rest, at, to) for at, to, _ in _good_runs(rest, 0, shift)):
        return Tail(found, TailKind.DAMAGE, why)
    return Tail(found, TailKind.TORN, why)


def is_zero(fd: int, at: int) -> bool:
    """True when nothing but zeros stands from ``at`` on; read in pieces, for there may be many."""
    while piece := os.pread(fd, _PIECE_BYTES, at):
        if length_without_zeros(piece):
            return False
        at += len(piece)
    return True


def _footer(rest: bytes, found: Walk) -> Footer | None:
    """The footer of these very records, whatever its checksum says."""
    if len(rest) < FOOTER.size:
        return None
    footer = Footer(*FOOTER.unpack_from(rest))
    fits = footer.durable_bytes == found.position and footer.record_count == found.records
    return footer if fits and footer.flags & SegmentFlag.SEALED else None


def set_aside_torn(fd: int, path: str, position: int) -> str:
    """Keep what stands behind ``position`` in ``NAME.torn``, then clear it; returns that name.

    Both are durable when this returns; a crash between them leaves the torn tail where it was.
    """
    rest = _read(fd, position)
    kept = fsio.free_name(path + ".torn")
    fsio.write_atomic(kept, rest.rstrip(b"\0"))
    fsio.write_at(fd, bytes(len(rest)), position, path)
    fsio.sync_data(fd, path)
    return kept


class Salvaged(NamedTuple):
    """What a damaged segment became."""

    footer: Footer
    end: int  # logical offset behind its last record
    gaps: list[tuple[int, int]]  # logical offsets, from and to
    kept: str  # the damaged file's new name


def salvage(
    fd: int, path: str, header: SegmentHeader, base: int, ext_id: int, covered: int
) -> Salvaged:
    """Write every good record of a damaged segment anew, at its old offset, and seal that.

    Where records are lost stands one of RecordFlag.GAP that is as long as they were and holds the
    damaged bytes; so the file is a segment like any other. The damaged one keeps its bytes under
    ``NAME.bad``. At any instant one of the two has the segment's name. Where the last commit is
    torn as well, nothing behind its gap counts; ``covered`` as for ``inspect``.
    """
    data = _read(fd, 0)
    pieces = [header.encode()]
    gaps = []
    count, end = 0, FIRST_RECORD
    for at, after, records in _without_torn(data, base - FIRST_RECORD, covered):
        if at > end:
            gap_at = base + end - FIRST_RECORD
            mark = RecordFlag.CONTROL | RecordFlag.GAP
            pieces.append(
                encode_record(gap_at, header.creation_ts_ms, mark, data[end + RECORD.size : at])
            )
            gaps.append((gap_at, base + at - FIRST_RECORD))
            count += 1
        pieces.append(data[at:after])
        count += records
        end = after
    body = b"".join(pieces)
    flags = SegmentFlag.SEALED | SegmentFlag.PARTIAL
    footer = Footer(count, len(body), crc64(body), ext_id, flags)
    kept = fsio.free_name(path + ".bad")
    fsio.write_atomic(path, body + footer.encode(), keep=kept)
    return Salvaged(footer, base + end - FIRST_RECORD, gaps, kept)


def _without_torn(data: bytes, shift: int, covered: int) -> list[tuple[int, int, int]]:
    """The runs of good records of a segment, but for those behind the gap of a torn commit."""
    runs = list(_good_runs(data, FIRST_RECORD, shift))
    while runs:
        gap_at = runs[-2][1] if len(runs) > 1 else FIRST_RECORD
        is_behind_gap = runs[-1][0] > gap_at and gap_at + shift >= covered
        if not is_behind_gap or begins_commit(data, *runs[-1][:2]):
            break
        runs.pop()
    return runs


def _good_runs(data: bytes, start: int, shift: int) -> Iterator[tuple[int, int, int]]:
    """Runs of good records: from, to, how many. A gap between them holds a header at least."""
    starts, view = HeaderCrcs(), memoryview(data)
    last = length_without_zeros(data)
    end = at = start
    while True:
        piece = view[at:]
        length, records = scan(piece, len(piece), at + shift, starts)
        if length:
            yield at, at + length, records
            end = at = at + length
        at = find_record(data, max(at + 1, end + RECORD.size), shift, starts, last)
        if at < 0:
            return


def check_header(fd: int, path: str, expected: SegmentHeader) -> tuple[SegmentHeader, str]:
    """The header of a segment file, and what is wrong with it.

    A damaged one is made again from ``expected``: its fields are known, but for the time. One
    that is whole, and another stream's or segment's, is an error: the file is not ours.

    Errors: VersionError, FormatError.
    """
    head = os.pread(fd, SEGMENT_HEADER.size, 0)
    try:
        header = decode_segment_header(head, path)
    except VersionError:
        raise
    except FormatError as exc:
        return expected, str(exc)
    if header[:2] != expected[:2]:
        raise FormatError(path, 12, f"stream and segment {expected[:2]}", header[:2])
    return header, ""


def _read(fd: int, at: int) -> bytes:
    """The file from ``at`` to its end."""
    length = os.fstat(fd).st_size - at
    pieces = []
    while length > 0:
        piece = os.pread(fd, length, at)
        if not piece:
            break
        pieces.append(piece)
        at += len(piece)
        length -= len(piece)
    return b"".join(pieces)
