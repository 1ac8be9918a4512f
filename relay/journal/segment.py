"""Segment files: writing the active one, reading any, and starting and sealing them.

    | header 52 | record | record | ...      | zeros ahead ...   active
    | header 52 | record | record | ... | footer 40 |             sealed

An active segment is filled with zeros ahead, so that a commit is one ``pwrite`` and one
``fdatasync`` of bytes that are already allocated. The crc64 of a segment is updated while it is
written: sealing reads nothing. Files are changed before the manifest, so that after a crash a file
may be ahead of the manifest and never behind it; recover.py handles that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from relay.base import fsio
from relay.base.clock import NS_PER_MS, Clock
from relay.base.errors import IntegrityError, SegmentAway
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.files import numbered_files
from relay.journal.format import (
    FOOTER,
    RECORD,
    SEGMENT_HEADER,
    Footer,
    HeaderCrcs,
    Record,
    SegmentFlag,
    SegmentHeader,
    claimed_length,
    crc64,
    decode_records,
    describe_fault,
    find_record,
)
from relay.journal.manifest import Manifest
from relay.journal.manifest_format import Field, ManifestRecord, ManifestType
from relay.journal.manifest_reader import read_manifest

SEGMENTS = "segments"
SEGMENT_SUFFIX = ".seg"
WARM = "warm"
WARM_SUFFIX = ".seg.zst"
UNSYNCED = ".unsynced"  # suffix: a file with the position from which bytes are uncertain
FIRST_RECORD = SEGMENT_HEADER.size  # position of the first record
_PIECE_BYTES = 1 << 20  # read at once; more for a longer record
_FIRST_PIECE = 1 << 16  # followers of the tail mostly find a few records

OnGap = Callable[[int, int, IntegrityError], object]  # from, to (logical offsets), why


def segment_path(stream_dir: str, segment_id: int) -> str:
    """The path of a segment in Tier 0."""
    return os.path.join(stream_dir, SEGMENTS, f"{segment_id:020d}{SEGMENT_SUFFIX}")


def warm_name(segment_id: int) -> str:
    """``00000000000000000007.seg.zst``."""
    return f"{segment_id:020d}{WARM_SUFFIX}"


def warm_path(stream_dir: str, segment_id: int) -> str:
    """The path of a segment in Tier 1."""
    return os.path.join(stream_dir, WARM, warm_name(segment_id))


def segment_ids(stream_dir: str) -> list[int]:
    """The ids of the segments in Tier 0, ascending; from the directory listing alone."""
    return numbered_files(os.path.join(stream_dir, SEGMENTS), SEGMENT_SUFFIX)


class SegmentSource(Protocol):
    """The bytes of a segment in any tier."""

    path: str  # for messages

    def read_at(self, at: int, length: int) -> bytes:
        """Up to ``length`` bytes of the segment file; fewer only at its end."""

    def close(self) -> None:
        """Release its resources."""


class FileSource:
    """A segment in Tier 0. Errors of opening: FileNotFoundError, UnsafePath."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = fsio.open_read(path)

    def read_at(self, at: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file."""
        length = min(length, self.size() - at)  # pread allocates the whole length
        if length <= 0:
            return b""
        data = os.pread(self._fd, length, at)
        while len(data) < length:
            more = os.pread(self._fd, length - len(data), at + len(data))
            if not more:
                break
            data += more
        return data

    def size(self) -> int:
        """The current size of the file."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_footer(source: SegmentSource, size: int) -> Footer | None:
    """The footer at the end of a sealed and truncated file of ``size`` bytes."""
    position = size - FOOTER.size
    data = source.read_at(position, FOOTER.size) if position >= FIRST_RECORD else b""
    return Footer(*FOOTER.unpack(data)) if is_footer(data, position) else None


def is_footer(data: bytes, position: int) -> bool:
    """True if ``data``, read at ``position``, begins with a footer of the records before it."""
    if len(data) < FOOTER.size:
        return False
    footer = Footer(*FOOTER.unpack_from(data))
    return footer.durable_bytes == position and bool(footer.flags & SegmentFlag.SEALED)


def read_records(
    source: SegmentSource, base: int, start: int, end: int, gap: OnGap | None = None
) -> Iterator[Record]:
    """The records of [start, end) of the stream; ``base``: the offset of the segment's first.

    A damaged record raises IntegrityError; with ``gap``, that is called with the lost range and
    the error, and reading continues at the next good record.
    """
    starts = HeaderCrcs()
    at, length = start, _FIRST_PIECE
    while at < end:
        piece = source.read_at(FIRST_RECORD + at - base, min(length, end - at))
        records = decode_records(piece, at, starts)
        if records:
            yield from records
            at = records[-1].end
            length = min(4 * length, _PIECE_BYTES)
        elif length < (claimed := min(claimed_length(piece, at), end - at)):
            length = claimed
        else:
            at = _skip_damage(source, base, at, end, gap, starts)


def _skip_damage(
    source: SegmentSource, base: int, at: int, end: int, gap: OnGap | None, starts: HeaderCrcs
) -> int:
    """The offset of the next good record, or ``end``; reports the gap."""
    position, length = FIRST_RECORD + at - base, end - at
    if gap is None:  # a reader of the tail meets megabytes of zeros ahead each time
        head = source.read_at(position, RECORD.size)
        length = min(length, max(RECORD.size, claimed_length(head, at)))
    data = source.read_at(position, length)
    why = IntegrityError(source.path, position, *describe_fault(data, at, starts))
    if gap is None:
        raise why
    found = find_record(data, 0, at, starts)
    if found == 0:
        return at  # it was being written
    behind = end if found < 0 else at + found
    gap(at, behind, why)
    return behind


def rewrite(fd: int, path: str, position: int, end: int) -> None:
    """Write the bytes of a file from ``position`` to ``end`` again; durable after a sync.

    After a failed sync the kernel may treat pages as clean that are not on the disk.
    """
    while position < end and (piece := os.pread(fd, min(_PIECE_BYTES, end - position), position)):
        fsio.write_at(fd, piece, position, path)
        position += len(piece)


class ActiveSegment:
    """The segment that records are appended to. One writer, one thread.

    After an OSError of ``write``, ``sync`` or ``seal`` the content of the file is uncertain until
    the journal is opened again.
    """

    def __init__(self, path: str, fd: int, header: SegmentHeader, base: int) -> None:
        self.path = path
        self.header = header
        self.base = base
        self.position = FIRST_RECORD  # after the last record written
        self.count = 0
        self.crc = crc64(header.encode())
        self.ext_id = 0
        self.first_ms = 0  # time of the first record: the start of its age
        self.zeroed = FIRST_RECORD  # the file is allocated, with zeros or records, up to here
        self.flush_failure = False  # a sync failed while it was active
        self._fd = fd

    @classmethod
    def create(cls, stream_dir: str, header: SegmentHeader, base: int, ahead: int) -> ActiveSegment:
        """Create a file with its header and zeros up to ``ahead``, durably.

        On a full disk the file is removed again. Errors: OSError, FileExistsError.
        """
        path = segment_path(stream_dir, header.segment_id)
        fd = fsio.open_rw(path, new=True)
        segment = cls(path, fd, header, base)
        try:
            fsio.write_at(fd, header.encode(), 0, path)
            segment.extend(ahead)
            fsio.sync_data(fd, path)
            fsio.sync_dir(os.path.dirname(path))
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)  # it has no records yet
            raise
        return segment

    @property
    def end(self) -> int:
        """The logical offset after the last record written."""
        return self.base + self.position - FIRST_RECORD

    def extend(self, upto: int) -> None:
        """Fill with zeros up to a position; not synced. Errors: OSError, harmless: a retry writes
        the same zeros."""
        while self.zeroed < upto:
            piece = bytes(min(upto - self.zeroed, _PIECE_BYTES))
            fsio.write_at(self._fd, piece, self.zeroed, self.path)
            self.zeroed += len(piece)

    def cut(self, upto: int) -> None:
        """Truncate zeros after a position. Errors: OSError, harmless."""
        if upto >= self.position:
            fsio.truncate(self._fd, upto, self.path)
            self.zeroed = upto

    def write(self, data: bytes, count: int) -> None:
        """Append ``count`` encoded records; durable after ``sync``."""
        fsio.write_at(self._fd, data, self.position, self.path)
        self.position += len(data)
        self.zeroed = max(self.zeroed, self.position)
        self.crc = crc64(data, self.crc)
        self.count += count

    def sync(self) -> None:
        """Make everything written durable."""
        fsio.sync_data(self._fd, self.path)

    def mark_unsynced(self, position: int) -> None:
        """Record that the bytes from ``position`` on may not be on the disk, though they can be
        read. Errors are ignored: the disk has just failed."""
        self.flush_failure = True
        with contextlib.suppress(OSError):
            fsio.write_atomic(self.path + UNSYNCED, str(position).encode())

    def rewrite_from(self, position: int) -> None:
        """Write the bytes from ``position`` on again; durable after ``sync``."""
        rewrite(self._fd, self.path, position, self.position)

    def seal(self, flags: SegmentFlag = SegmentFlag.SEALED) -> Footer:
        """Write the footer after the last record, truncate the zeros, sync, and close."""
        footer = Footer(self.count, self.position, self.crc, self.ext_id, flags)
        fsio.write_at(self._fd, footer.encode(), self.position, self.path)
        fsio.truncate(self._fd, self.position + FOOTER.size, self.path)
        fsio.sync_data(self._fd, self.path)
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path + UNSYNCED)  # the sync above succeeded
        return footer

    def close(self) -> None:
        """Close the file; a power cut may lose unsynced bytes, the end of the process does not."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class SegmentPolicy(NamedTuple):
    """The size and age at which segments roll, and how far zeros are written ahead."""

    # Header and footer included; a longer record gets a segment of its own.
    segment_bytes: int = 64 << 20
    segment_age_s: float = 86_400  # since its first record, so that quiet days reach the tiers, too
    slice_bytes: int = 1 << 20  # zeros at a time: some ms of writing
    ahead_bytes: int = 64 << 20  # limit of the zeros ahead


class Stream(NamedTuple):
    """Shared parameters of one stream, and its manifest."""

    folder: str
    stream_id: int
    clock: Clock
    policy: SegmentPolicy
    manifest: Manifest
    epoch: int  # number of the daemon's starts


def start_segment(stream: Stream, base: int) -> ActiveSegment:
    """Create the next segment, durably, and record it. Errors: OSError, RelayError."""
    number = stream.manifest.catalog.next_segment_id
    header = SegmentHeader(stream.stream_id, number, stream.clock.now_ns() // NS_PER_MS)
    ahead = min(FIRST_RECORD + stream.policy.slice_bytes, stream.policy.segment_bytes)
    active = ActiveSegment.create(stream.folder, header, base, ahead)
    try:
        stream.manifest.append(opened_record(header, base, stream.epoch))
    except BaseException:
        active.close()
        raise
    return active


def seal_segment(stream: Stream, active: ActiveSegment, covered: int) -> None:
    """Seal a segment, and record it. Errors: OSError, RelayError."""
    end = active.end
    footer = active.seal()
    at_ms = stream.clock.now_ns() // NS_PER_MS
    number = active.header.segment_id
    stream.manifest.append(seal_record(number, end, at_ms, footer, covered, active.flush_failure))


def opened_record(header: SegmentHeader, base: int, epoch: int) -> ManifestRecord:
    """The manifest record of a new segment."""
    fields: dict[str, Field] = {"base_offset": base, "epoch": epoch}
    kind = ManifestType.SegmentOpened
    return ManifestRecord(kind, header.segment_id, base, header.creation_ts_ms, fields)


def seal_record(
    segment_id: int, end: int, at_ms: int, footer: Footer, covered: int, failed: bool
) -> ManifestRecord:
    """The manifest record of a seal. ``end``: the logical offset after the segment; ``failed``: a
    sync failed while it was active."""
    fields: dict[str, Field] = {
        "durable_bytes": footer.durable_bytes,
        "segment_crc64": footer.segment_crc64,
        "ext_id": footer.ext_id,
        "coordinator_watermark": covered,
        "flush_failure": int(failed),
    }
    return ManifestRecord(ManifestType.SealSegment, segment_id, end, at_ms, fields)


Fetch = Callable[[SegmentEntry], SegmentSource]


def open_segment(stream_dir: str, entry: SegmentEntry, fetch: Fetch | None) -> SegmentSource:
    """Open a segment: in Tier 0, or by ``fetch``. Errors: SegmentAway."""
    path = segment_path(stream_dir, entry.segment_id)
    if entry.residency & Residency.TIER0:
        try:
            return FileSource(path)
        except FileNotFoundError:
            if fetch is None:
                raise SegmentAway(
                    f"segment {entry.segment_id}: {path} is missing",
                    hint="`relay check` lists what is missing",
                ) from None
    if fetch is None:
        tiers = entry.residency & ~Residency.TIER0
        raise SegmentAway(f"segment {entry.segment_id} is only in {tiers.name or 'no tier'}")
    return fetch(entry)


def read_sealed(
    stream_dir: str, entry: SegmentEntry, start: int, fetch: Fetch | None, gap: OnGap | None
) -> Iterator[Record]:
    """The records of a sealed segment from ``start`` on."""
    source = open_segment(stream_dir, entry, fetch)
    try:
        yield from read_records(source, entry.base_offset, start, entry.end_offset, gap)
    finally:
        source.close()


def segment_files(stream_dir: str) -> dict[int, tuple[str, SegmentEntry | None]]:
    """All segments with a file or an entry, by id: the path of the local copy and the entry.

    The file of Tier 0 comes before that of Tier 1; no path: no local copy; no entry: the manifest
    has none.
    """
    warm_ids = numbered_files(os.path.join(stream_dir, WARM), WARM_SUFFIX)
    found = {number: warm_path(stream_dir, number) for number in warm_ids}
    found |= {number: segment_path(stream_dir, number) for number in segment_ids(stream_dir)}
    entries = read_manifest(stream_dir, lambda line: None).catalog.entries
    return {
        number: (found.get(number, ""), entries.get(number))
        for number in sorted(found.keys() | entries.keys())
    }
