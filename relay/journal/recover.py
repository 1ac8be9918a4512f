"""Recovery of the segments that are not known as sealed, when a journal is opened.

The file decides, and the manifest is brought up to it. Nothing is removed: bytes that are not a
good record are kept in a file beside it.

    file exists, SegmentOpened or SealSegment missing   the record is added
    SegmentOpened exists, file empty or missing         the file is created
    footer written, not truncated or not recorded       the seal is completed
    manifest lost                                       the catalog is rebuilt from the files

Four things can follow the last good record of a segment:

    all zeros                          the segment continues
    a footer that fits                 the seal is completed
    bytes, and no commit after them    a torn tail: copied to NAME.torn, then cleared
    a commit after them, or the        damage: every good record is salvaged at its old offset, the
    stream is covered beyond them      file is kept as NAME.bad, and the segment sealed (PARTIAL)

Good records after a gap may belong to the commit that was cut short: a disk writes the sectors of
one sync in any order. None of it was acknowledged, so only a record that begins a commit proves
that the bytes before it were once durable. A crash during recovery leaves one of these four again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

from relay.base import fsio
from relay.base.clock import NS_PER_MS
from relay.base.errors import FormatError, VersionError
from relay.journal.catalog import SegmentEntry
from relay.journal.format import (
    FOOTER,
    RECORD,
    SEGMENT_HEADER,
    Footer,
    HeaderCrcs,
    RecordFlag,
    SegmentFlag,
    SegmentHeader,
    begins_commit,
    claimed_length,
    crc64,
    decode_records,
    decode_segment_header,
    describe_fault,
    encode_record,
    find_any_record,
    find_record,
    length_without_zeros,
    scan,
)
from relay.journal.manifest_format import ManifestRecord
from relay.journal.segment import (
    FIRST_RECORD,
    UNSYNCED,
    ActiveSegment,
    Stream,
    is_footer,
    opened_record,
    rewrite,
    seal_record,
    segment_ids,
    segment_path,
)

_PIECE_BYTES = 1 << 19  # half of a second-level cache: data is checked while it is cached


class TailKind(Enum):
    """The kind of bytes after the last good record."""

    CLEAN = "clean"  # zeros, or nothing
    FOOTER = "footer"  # of these records
    TORN = "torn"  # an interrupted write
    DAMAGE = "damage"  # committed records are lost


class Walk(NamedTuple):
    """The extent of the good records from the start of a segment."""

    position: int  # in the file, after the last of them
    records: int
    crc64: int  # of the file up to there
    first_ms: int  # time of the first record; 0 when there is none


class Tail(NamedTuple):
    """The good records, and the bytes after them."""

    walk: Walk
    kind: TailKind
    why: str = ""  # expected and found, where the good records end
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


def inspect_tail(fd: int, base: int, head: bytes, covered: int) -> Tail:
    """Walk a segment file and classify the bytes after its last good record. Changes nothing.

    ``covered``: known length of the stream; if less is left, it is damage.
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
    """True if the file has only zeros from ``at`` on; read in pieces, as there may be many."""
    while piece := os.pread(fd, _PIECE_BYTES, at):
        if length_without_zeros(piece):
            return False
        at += len(piece)
    return True


def _footer(rest: bytes, found: Walk) -> Footer | None:
    """The footer of these records, whatever its checksum."""
    if not is_footer(rest, found.position):
        return None
    footer = Footer(*FOOTER.unpack_from(rest))
    return footer if footer.record_count == found.records else None


def set_aside_torn(fd: int, path: str, position: int) -> str:
    """Copy the bytes after ``position`` to ``NAME.torn``, then clear them; returns that name.

    Both are durable when this returns; after a crash between them the torn tail is found again.
    """
    rest = _read(fd, position)
    kept = fsio.free_name(path + ".torn")
    fsio.write_atomic(kept, rest.rstrip(b"\0"))
    fsio.write_at(fd, bytes(len(rest)), position, path)
    fsio.sync_data(fd, path)
    return kept


def salvage(
    fd: int, path: str, header: SegmentHeader, base: int, ext_id: int, covered: int
) -> tuple[Footer, list[tuple[int, int]], str]:
    """Write the good records of a damaged segment to a new file, at their old offsets; seal it.

    Returns its footer, the gaps (logical offsets, from and to), and the damaged file's new name.
    Lost records are replaced by one of RecordFlag.GAP of the same length with the damaged bytes,
    so the file is a normal segment. The damaged one is kept as ``NAME.bad``; at any instant one of
    the two has the segment's name. If the last commit is torn, too, records after its gap do not
    count; ``covered`` as for ``inspect_tail``.
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
    return footer, gaps, kept


def _without_torn(data: bytes, shift: int, covered: int) -> list[tuple[int, int, int]]:
    """The runs of good records of a segment, without those after the gap of a torn commit."""
    runs = list(_good_runs(data, FIRST_RECORD, shift))
    while runs:
        gap_at = runs[-2][1] if len(runs) > 1 else FIRST_RECORD
        is_behind_gap = runs[-1][0] > gap_at and gap_at + shift >= covered
        if not is_behind_gap or begins_commit(data, *runs[-1][:2]):
            break
        runs.pop()
    return runs


def _good_runs(data: bytes, start: int, shift: int) -> Iterator[tuple[int, int, int]]:
    """Runs of good records: (from, to, count). A gap between them has at least a header's size."""
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
    """The header of a segment file, and its problem, if any.

    A damaged header is replaced by ``expected``: only its time is not known. An intact header of
    another stream or segment is an error. Errors: VersionError, FormatError.
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
    """The bytes of the file from ``at`` on."""
    end = os.fstat(fd).st_size
    pieces = []
    while piece := os.pread(fd, max(end - at, 0), at):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


_LAST = 2**63 - 1  # of ids and offsets; later ones have to fit as well


class Recovery:
    """One recovery of the unsealed segments of a stream, oldest first."""

    def __init__(self, stream: Stream, covered: int, warn: Callable[[str], object]) -> None:
        self._stream = stream
        self._dir = stream.folder
        self._manifest = stream.manifest
        self._covered = covered
        self._warn = warn
        self._ext_id = 0
        self._rebuilt: list[ManifestRecord] = []  # records to rebuild a damaged manifest with

    def run(self) -> tuple[ActiveSegment | None, int]:
        """Recover every unsealed segment.

        Returns the one that continues, None if a new one is needed, and the logical offset after
        the last good record. Errors: FormatError for a file of another stream.
        """
        known = dict(self._manifest.catalog.entries)
        for entry in known.values():
            self._check(entry)
        newest = max(known, default=-1)
        open_ones = {entry.segment_id for entry in known.values() if not entry.sealed}
        # An intact manifest without an entry for an older file has dropped that segment.
        on_disk = {
            number
            for number in segment_ids(self._dir)
            if number not in known and (number > newest or self._manifest.damaged)
        }
        todo = sorted(open_ones | on_disk)
        sealed = [entry for entry in known.values() if entry.sealed]
        self._ext_id = max((entry.ext_id for entry in sealed), default=0)
        end = max((e.end_offset for e in sealed if not todo or e.segment_id < todo[0]), default=0)
        active = None
        for number in todo:
            following = known.get(number + 1)
            is_last = number == todo[-1] and number >= newest
            covered = self._covered if is_last else following.base_offset if following else 0
            active, end = self._recover(number, known.get(number), end, covered, is_last)
            if active is not None and not is_last:
                self._seal(active)
                active = None
        if self._manifest.damaged:
            self._manifest.rebuild(self._rebuilt)
            end = max([end, *(entry.end_offset for entry in self._manifest.entries())])
        return active, end

    def _check(self, entry: SegmentEntry) -> None:
        """Errors: FormatError for numbers after which a stream could not continue."""
        for name in ("segment_id", "end_offset", "creation_ts_ms", "ext_id"):
            if (found := getattr(entry, name)) > _LAST:
                where = os.path.join(self._dir, "manifest")
                expected = f"{name} of segment {entry.segment_id} to be {_LAST} at most"
                raise FormatError(where, 0, expected, found)

    def _recover(
        self, number: int, entry: SegmentEntry | None, end: int, covered: int, is_last: bool
    ) -> tuple[ActiveSegment | None, int]:
        """Recover one segment: (the active one, or None if it is sealed; the offset after it)."""
        path = segment_path(self._dir, number)
        created_ms = entry.creation_ts_ms if entry else self._stream.clock.now_ns() // NS_PER_MS
        expected = SegmentHeader(self._stream.stream_id, number, created_ms)
        try:
            fd = fsio.open_rw(path)
        except FileNotFoundError:
            assert entry is not None  # all others were found by their files
            return self._missing(path, expected, entry.base_offset, is_last), entry.base_offset
        try:
            header, wrong = check_header(fd, path, expected)
            base = entry.base_offset if entry else self._base(fd, path, end)
            if entry is None:
                self._record(opened_record(header, base, self._stream.epoch))
            if wrong and is_zero(fd, FIRST_RECORD):  # created and never written
                fsio.write_at(fd, header.encode(), 0, path)
                wrong = ""
            return self._recover_tail(fd, path, header, base, covered, wrong)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise

    def _missing(
        self, path: str, expected: SegmentHeader, base: int, is_last: bool
    ) -> ActiveSegment | None:
        """Handle a segment without a file: the last one is created, an older one is a gap."""
        self._warn(f"{path}: this segment is in the manifest, but its file is missing")
        if self._manifest.damaged or not is_last:
            return None
        return ActiveSegment.create(self._dir, expected, base, FIRST_RECORD)

    def _recover_tail(
        self, fd: int, path: str, header: SegmentHeader, base: int, covered: int, wrong: str
    ) -> tuple[ActiveSegment | None, int]:
        found = inspect_tail(fd, base, header.encode(), covered)
        if found.kind is TailKind.DAMAGE or wrong:
            end = self._salvage(fd, path, header, base, covered, wrong or self._at(path, found))
            os.close(fd)
            return None, end
        end = base + found.walk.position - FIRST_RECORD
        if found.footer is not None:
            self._finish(fd, path, header, found, base)
            os.close(fd)
            return None, end
        if found.kind is TailKind.TORN:
            kept = set_aside_torn(fd, path, found.walk.position)
            self._warn(f"{self._at(path, found)}: a torn tail, kept in {kept} and cleared")
        return self._resume(fd, path, header, base, found.walk), end

    def _resume(
        self, fd: int, path: str, header: SegmentHeader, base: int, walk: Walk
    ) -> ActiveSegment:
        """Continue a segment. Its records are durable when this returns: a killed process may have
        written them without a sync, or its sync may have failed."""
        active = ActiveSegment(path, fd, header, base)
        active.position, active.count, active.crc, active.first_ms = walk
        active.zeroed = max(os.fstat(fd).st_size, walk.position)
        active.ext_id = self._ext_id  # records do not contain it; ids only grow
        slice_bytes = self._stream.policy.slice_bytes
        if active.zeroed > walk.position + 2 * slice_bytes:  # left by a burst, or by a full disk
            active.cut(walk.position + slice_bytes)
        unknown = self._unsynced(path)
        active.flush_failure = unknown is not None
        active.rewrite_from(
            min(self._uncovered(base), walk.position if unknown is None else unknown)
        )
        active.sync()
        return active

    def _uncovered(self, base: int) -> int:
        """The position in the file from which no checkpoint covers the segment.

        Its writer may have been killed after a failed sync that it could not record on that disk.
        So these bytes are written again before they are synced and trusted.
        """
        return FIRST_RECORD + max(0, self._covered - base)

    def _unsynced(self, path: str) -> int | None:
        """The position from which a failed sync left the segment uncertain; None: no such sync."""
        try:
            fd = fsio.open_read(path + UNSYNCED)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            text = file.read(32)
        return int(text) if text.isdigit() else FIRST_RECORD

    def _finish(self, fd: int, path: str, header: SegmentHeader, found: Tail, base: int) -> None:
        """Complete a seal: truncate the file after the footer, and record the seal."""
        assert found.footer is not None
        if found.why:
            self._warn(f"{self._at(path, found)}: every record is good; left unchanged")
        size = found.walk.position + FOOTER.size
        if os.fstat(fd).st_size > size:
            fsio.truncate(fd, size, path)
        rewrite(fd, path, self._uncovered(base), size)
        fsio.sync_data(fd, path)
        end = base + found.walk.position - FIRST_RECORD
        footer = found.footer._replace(segment_crc64=found.walk.crc64)
        self._sealed(header.segment_id, end, footer)

    def _salvage(
        self, fd: int, path: str, header: SegmentHeader, base: int, covered: int, why: str
    ) -> int:
        footer, gaps, kept = salvage(fd, path, header, base, self._ext_id, covered)
        lost = ", ".join(f"[{begin}, {end})" for begin, end in gaps) or "none inside"
        self._warn(
            f"{why}: damage; {footer.record_count - len(gaps)} records salvaged,"
            f" lost offsets: {lost}; the damaged file is {kept}"
        )
        end = base + footer.durable_bytes - FIRST_RECORD
        self._sealed(header.segment_id, end, footer)
        return end

    def _seal(self, active: ActiveSegment) -> None:
        """Seal a segment that has a successor."""
        end, failed = active.end, active.flush_failure
        self._sealed(active.header.segment_id, end, active.seal(), failed=failed)

    def _base(self, fd: int, path: str, end: int) -> int:
        """The offset of the first record of a segment that is not in the manifest."""
        claimed = claimed_length(
            first := os.pread(fd, RECORD.size, FIRST_RECORD), offset := _offset_in(first)
        )
        piece = os.pread(fd, claimed, FIRST_RECORD)
        if not decode_records(piece, offset, HeaderCrcs()):
            rest = os.pread(fd, os.fstat(fd).st_size, FIRST_RECORD)
            if (placed := find_any_record(rest, end, HeaderCrcs())) is None:
                return end
            offset = placed[1] - placed[0]
        if offset < end:
            raise FormatError(path, FIRST_RECORD + 8, f"logical_offset {end} or more", offset)
        if offset > end:
            self._warn(f"{path} begins at offset {offset}, but the previous segment ends at {end}")
        return offset

    def _at(self, path: str, found: Tail) -> str:
        return f"{path} at {found.walk.position}: {found.why}"

    def _sealed(self, segment_id: int, end: int, footer: Footer, *, failed: bool = False) -> None:
        at_ms = self._stream.clock.now_ns() // NS_PER_MS
        self._record(seal_record(segment_id, end, at_ms, footer, self._covered, failed))

    def _record(self, record: ManifestRecord) -> None:
        """Append to the manifest; for a damaged one, collect the records until the end."""
        if self._manifest.damaged:
            self._rebuilt.append(record)
        else:
            self._manifest.append(record)


def _offset_in(head: bytes) -> int:
    """The offset in a record's header; 0 if it is incomplete."""
    return int(RECORD.unpack(head)[2]) if len(head) == RECORD.size else 0
