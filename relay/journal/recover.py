"""What opening a journal does with the segments that are not known as sealed.

Each step is made good as it stands in the file: the file decides, the manifest is brought up to
it. Nothing is removed; what is no good record is kept aside (tail.py).

    file there, SegmentOpened or SealSegment missing   the record is written
    SegmentOpened there, file empty or missing         the file is made
    footer written, not cut or not recorded            the seal is finished
    manifest lost                                      the catalog is made anew from the files
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

from relay.base import fsio
from relay.base.clock import NS_PER_MS
from relay.base.errors import FormatError
from relay.journal import tail
from relay.journal.catalog import SegmentEntry
from relay.journal.format import FOOTER, RECORD, Footer, ManifestRecord, SegmentHeader
from relay.journal.records import HeaderCrcs, claimed_length, decode_records, find_any_record
from relay.journal.segment import (
    FIRST_RECORD,
    UNSYNCED,
    ActiveSegment,
    rewrite,
    segment_ids,
    segment_path,
)
from relay.journal.segments import Stream, opened_record, seal_record

_LAST = 2**63 - 1  # of ids and offsets; what comes behind it has to fit as well


class Recovered(NamedTuple):
    """How the stream stands after recovery."""

    active: ActiveSegment | None  # goes on; None: the next one is to be made
    end: int  # logical offset behind the last good record


class Recovery:
    """One run over the unsealed segments of a stream, oldest first."""

    def __init__(self, stream: Stream, covered: int, warn: Callable[[str], object]) -> None:
        self._stream = stream
        self._dir = stream.folder
        self._manifest = stream.manifest
        self._covered = covered
        self._warn = warn
        self._ext_id = 0
        self._rebuilt: list[ManifestRecord] = []  # what a damaged manifest has to be told

    def run(self) -> Recovered:
        """Make every unsealed segment good. Errors: FormatError of a file that is not ours."""
        known = dict(self._manifest.catalog.entries)
        for entry in known.values():
            self._check(entry)
        newest = max(known, default=-1)
        open_ones = {entry.segment_id for entry in known.values() if not entry.sealed}
        # A file below the newest entry that a whole manifest does not know was given up by it.
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
        return Recovered(active, end)

    def _check(self, entry: SegmentEntry) -> None:
        """Errors: FormatError for numbers behind which a stream could not go on."""
        for name in ("segment_id", "end_offset", "creation_ts_ms", "ext_id"):
            if (found := getattr(entry, name)) > _LAST:
                where = os.path.join(self._dir, "manifest")
                expected = f"{name} of segment {entry.segment_id} to be {_LAST} at most"
                raise FormatError(where, 0, expected, found)

    def _recover(
        self, number: int, entry: SegmentEntry | None, end: int, covered: int, is_last: bool
    ) -> tuple[ActiveSegment | None, int]:
        """One segment: it goes on, or it is sealed; and where it ends."""
        path = segment_path(self._dir, number)
        created_ms = entry.creation_ts_ms if entry else self._stream.clock.now_ns() // NS_PER_MS
        expected = SegmentHeader(self._stream.stream_id, number, created_ms)
        try:
            fd = fsio.open_rw(path)
        except FileNotFoundError:
            assert entry is not None  # the others were found by their files
            return self._missing(path, expected, entry.base_offset, is_last), entry.base_offset
        try:
            header, wrong = tail.check_header(fd, path, expected)
            base = entry.base_offset if entry else self._base(fd, path, end)
            if entry is None:
                self._record(opened_record(header, base, self._stream.epoch))
            if wrong and self._is_blank(fd):  # made, and never written: its creation is finished
                fsio.write_at(fd, header.encode(), 0, path)
                wrong = ""
            return self._by_its_tail(fd, path, header, base, covered, wrong)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise

    def _missing(
        self, path: str, expected: SegmentHeader, base: int, is_last: bool
    ) -> ActiveSegment | None:
        """A segment that only the manifest has: the last one is made, an older one is a gap."""
        self._warn(f"{path}: the manifest has this segment, the directory has not")
        if self._manifest.damaged or not is_last:
            return None
        return ActiveSegment.create(self._dir, expected, base, FIRST_RECORD)

    def _by_its_tail(
        self, fd: int, path: str, header: SegmentHeader, base: int, covered: int, wrong: str
    ) -> tuple[ActiveSegment | None, int]:
        found = tail.inspect_tail(fd, path, base, header.encode(), covered)
        if found.kind is tail.TailKind.DAMAGE or wrong:
            end = self._salvage(fd, path, header, base, covered, wrong or self._at(path, found))
            os.close(fd)
            return None, end
        end = base + found.walk.position - FIRST_RECORD
        if found.footer is not None:
            self._finish(fd, path, header, found, base)
            os.close(fd)
            return None, end
        if found.kind is tail.TailKind.TORN:
            kept = tail.set_aside_torn(fd, path, found.walk.position)
            self._warn(f"{self._at(path, found)}: a torn tail, kept in {kept} and cleared")
        return self._resume(fd, path, header, base, found.walk), end

    def _resume(
        self, fd: int, path: str, header: SegmentHeader, base: int, walk: tail.Walk
    ) -> ActiveSegment:
        """The segment goes on. What was found in it is durable when this returns: a process that
        was killed may have written it without syncing, or its sync may have failed."""
        active = ActiveSegment(path, fd, header, base)
        active.position, active.count, active.crc, active.first_ms = walk
        active.zeroed = max(os.fstat(fd).st_size, walk.position)
        active.ext_id = self._ext_id  # a record does not say; ids only grow
        slice_bytes = self._stream.policy.slice_bytes
        if active.zeroed > walk.position + 2 * slice_bytes:  # of a burst, or of a full disk
            active.cut(walk.position + slice_bytes)
        unknown = self._unsynced(path)
        active.flush_failure = unknown is not None
        active.rewrite_from(
            min(self._uncovered(base), walk.position if unknown is None else unknown)
        )
        active.sync()
        return active

    def _uncovered(self, base: int) -> int:
        """The position from which on no checkpoint covers a segment: nothing, after a clean end.

        Whoever wrote it may have met a failed sync, been killed, and left no word of it: the disk
        took that no more, either. So it is written once more before it is synced and trusted.
        """
        return FIRST_RECORD + max(0, self._covered - base)

    def _unsynced(self, path: str) -> int | None:
        """The position from which on a failed sync left the segment unknown; None: none did."""
        try:
            fd = fsio.open_read(path + UNSYNCED)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            text = file.read(32)
        return int(text) if text.isdigit() else FIRST_RECORD

    def _finish(
        self, fd: int, path: str, header: SegmentHeader, found: tail.Tail, base: int
    ) -> None:
        """A footer is there: cut the file behind it, and let the manifest know."""
        assert found.footer is not None
        if found.why:
            self._warn(f"{self._at(path, found)}: every record is good; left as it is")
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
        done = tail.salvage(fd, path, header, base, self._ext_id, covered)
        gaps = ", ".join(f"[{begin}, {end})" for begin, end in done.gaps) or "none inside"
        self._warn(
            f"{why}: damage; {done.footer.record_count - len(done.gaps)} records salvaged,"
            f" lost offsets: {gaps}; the damaged file is {done.kept}"
        )
        self._sealed(header.segment_id, done.end, done.footer)
        return done.end

    def _seal(self, active: ActiveSegment) -> None:
        """A segment that has a successor gets its footer."""
        end = active.end
        failed = active.flush_failure
        self._sealed(active.header.segment_id, end, active.seal(), failed=failed)

    def _base(self, fd: int, path: str, end: int) -> int:
        """The offset of a segment's first record, of which the manifest knows nothing."""
        claimed = claimed_length(
            first := os.pread(fd, RECORD.size, FIRST_RECORD), offset := _offset_in(first)
        )
        piece = os.pread(fd, claimed, FIRST_RECORD)
        if next(decode_records(piece, offset, HeaderCrcs()), None) is None:
            rest = os.pread(fd, os.fstat(fd).st_size, FIRST_RECORD)
            if (placed := find_any_record(rest, end, HeaderCrcs())) is None:
                return end
            offset = placed[1] - placed[0]
        if offset < end:
            raise FormatError(path, FIRST_RECORD + 8, f"logical_offset {end} or more", offset)
        if offset > end:
            self._warn(f"{path} begins at offset {offset}, and the one before it ends at {end}")
        return offset

    def _is_blank(self, fd: int) -> bool:
        """Nothing was ever written behind the header."""
        return tail.is_zero(fd, FIRST_RECORD)

    def _at(self, path: str, found: tail.Tail) -> str:
        return f"{path} at {found.walk.position}: {found.why}"

    def _sealed(self, segment_id: int, end: int, footer: Footer, *, failed: bool = False) -> None:
        at_ms = self._stream.clock.now_ns() // NS_PER_MS
        self._record(seal_record(segment_id, end, at_ms, footer, self._covered, failed))

    def _record(self, record: ManifestRecord) -> None:
        """Let the manifest know; a damaged one is told everything at the end, at once."""
        if self._manifest.damaged:
            self._rebuilt.append(record)
        else:
            self._manifest.append(record)


def _offset_in(head: bytes) -> int:
    """What a record's header claims to be its offset."""
    return int(RECORD.unpack(head)[2]) if len(head) == RECORD.size else 0
