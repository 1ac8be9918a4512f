"""Reading a stream: through its segments, wherever they lie, and along the tail of the active one.

A reader in another process needs no lock and disturbs nobody: it takes whole records only, ends at
the first that is not whole, and is called again from the last end. It may see a batch that is
written and not synced yet, never more than that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator

from relay.base.errors import IntegrityError, SegmentAway
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.format import FOOTER, RECORD, Footer, RecordFlag, SegmentFlag
from relay.journal.manifest import read_manifest
from relay.journal.records import Record
from relay.journal.segment import (
    FIRST_RECORD,
    FileSource,
    OnGap,
    SegmentSource,
    read_records,
    segment_ids,
    segment_path,
)

Fetch = Callable[[SegmentEntry], SegmentSource]


def open_segment(stream_dir: str, entry: SegmentEntry, fetch: Fetch | None) -> SegmentSource:
    """The bytes of a segment: from Tier 0, or what ``fetch`` gives. Errors: SegmentAway."""
    path = segment_path(stream_dir, entry.segment_id)
    if entry.residency & Residency.TIER0:
        try:
            return FileSource(path)
        except FileNotFoundError:
            if fetch is None:
                raise SegmentAway(
                    f"segment {entry.segment_id}: {path} is missing",
                    hint="`relay aof check` says what the stream has",
                ) from None
    if fetch is None:
        tiers = entry.residency & ~Residency.TIER0
        raise SegmentAway(f"segment {entry.segment_id} is in {tiers.name or 'no tier'} alone")
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


class JournalReader:
    """One stream, read only, in any process, while its writer goes on or not.

    ``warn`` is told once of each gap: offsets whose records damage took. A record that is damaged
    in a sealed segment ends the reading with IntegrityError. Not safe for threads.
    """

    def __init__(
        self,
        stream_dir: str,
        *,
        warn: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._dir = stream_dir
        self._warn = warn
        self._reported_gaps: set[int] = set()  # where the gaps begin that were told of
        self._entries: list[SegmentEntry] = []

    def read(self, start: int = 0) -> Iterator[Record]:
        """The records from offset ``start`` on, up to the first that is not whole; where the
        stream begins behind ``start``, the rest was pruned.

        Following: read again from the last record's ``end``. Errors: IntegrityError, SegmentAway.
        """
        if not self._is_at_tail(start):
            self._load()
        begins = (entry.base_offset for entry in self._entries)
        at, last = max(start, min(begins, default=0)), -1
        for entry in self._entries:
            if not entry.sealed:
                break
            last = entry.segment_id
            if entry.end_offset > at:
                at = self._skip_gap(at, entry.base_offset)
                found = read_sealed(self._dir, entry, at, None, None)
                yield from self._without_gaps(found)
                at = entry.end_offset
        yield from self._read_unsealed(last, at)

    def first(self) -> int:
        """The offset of the first record that is left; 0 for an empty stream, and where a damaged
        manifest cannot say: its writer finds out at the next open. Errors: OSError, UnsafePath."""
        view = read_manifest(self._dir, self._warn)
        begins = (entry.base_offset for entry in view.catalog.entries.values())
        return 0 if view.damaged else min(begins, default=0)

    def _load(self) -> None:
        self._entries = list(read_manifest(self._dir, self._warn).catalog.entries.values())

    def _is_at_tail(self, start: int) -> bool:
        """The catalog that was read before will do: ``start`` is behind what it has as sealed, and
        the segment after that is still there. So following costs no look at the manifest."""
        sealed = [entry for entry in self._entries if entry.sealed]
        if not sealed or start < sealed[-1].end_offset:
            return False
        return os.path.exists(segment_path(self._dir, sealed[-1].segment_id + 1))

    def _read_unsealed(self, last: int, at: int) -> Iterator[Record]:
        """The segments that the manifest has not as sealed, as their files say."""
        for number in segment_ids(self._dir):
            if number <= last:
                continue
            if number > last + 1 and self._were_evicted(last, number):
                return  # the next call finds them
            try:
                source = FileSource(segment_path(self._dir, number))
            except FileNotFoundError:
                return
            try:
                at = yield from self._read_open(source, at)
            finally:
                source.close()
            if at < 0:
                return
            last = number

    def _were_evicted(self, last: int, number: int) -> bool:
        """Segments between these two are no longer files, for they were sealed and evicted."""
        self._load()
        return any(last < entry.segment_id < number and entry.sealed for entry in self._entries)

    def _read_open(self, source: FileSource, at: int) -> Generator[Record, None, int]:
        """One segment that may be written just now; where the next begins, -1: here is the end."""
        while True:
            footer = _footer(source)  # before reading: one that comes meanwhile is seen next time
            first = source.read_at(FIRST_RECORD, RECORD.size)
            if len(first) < RECORD.size or not first.strip(b"\0"):
                return -1
            if footer is not None and not footer.record_count:
                return at
            base = int(RECORD.unpack(first)[2])
            size = footer.durable_bytes if footer else source.size()
            before = at
            try:
                for record in read_records(source, base, max(at, base), base + size - FIRST_RECORD):
                    at = self._skip_gap(at, record.offset)
                    yield from self._without_gaps((record,))
                    at = record.end
            except IntegrityError:
                if footer is not None:
                    raise
            if footer is not None:
                return max(at, base + size - FIRST_RECORD)
            if at == before:
                return -1

    def _skip_gap(self, at: int, to: int) -> int:
        """The stream goes on at ``to``: what is missing before it is told."""
        if at < to:
            self._report_gap(at, to)
        return max(at, to)

    def _without_gaps(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            if record.flags & RecordFlag.GAP:
                self._report_gap(record.offset, record.end)
            else:
                yield record

    def _report_gap(self, begin: int, end: int) -> None:
        if begin not in self._reported_gaps:
            self._reported_gaps.add(begin)
            self._warn(f"{self._dir}: the records of offsets [{begin}, {end}) are lost")


def _footer(source: FileSource) -> Footer | None:
    """The footer of a segment that is sealed and cut."""
    position = source.size() - FOOTER.size
    data = source.read_at(position, FOOTER.size) if position >= FIRST_RECORD else b""
    if len(data) < FOOTER.size:
        return None
    footer = Footer(*FOOTER.unpack(data))
    is_sealed = footer.flags & SegmentFlag.SEALED and footer.durable_bytes == position
    return footer if is_sealed else None
