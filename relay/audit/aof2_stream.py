"""The format ``aof2`` as a stream: a journal is followed, from one logical offset to the next.

The offset of a query is a map: stream -> logical offset behind the last record that was read. It
is of whole records that are durable: before an end is told, what the reader saw up to there is
synced, so a power cut takes nothing back that somebody has counted. Rolls and tiers make no
difference to it. A checkpoint that the journal no longer goes back to is an error, and so is one
that is ahead of the journal: neither is passed over in silence.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from relay.audit import journal_files
from relay.audit.journal_files import Plan, Segment
from relay.audit.journal_rows import Settings, read_segment
from relay.base import fsio
from relay.base.errors import JournalError, JournalPruned, RelayError
from relay.journal.segment import read_records, segment_path

Offsets = dict[str, int]  # stream -> logical offset
STARTS = ("first", "end")
BEGIN_ANEW = "begin with a new checkpoint: it starts at the first record that is left"


def check_start(start: str) -> str:
    """One of STARTS. Errors: RelayError."""
    if start not in STARTS:
        raise RelayError(f"start {start!r} is none of {', '.join(STARTS)}")
    return start


class SegmentPartition(InputPartition):  # type: ignore[misc]
    """A part of a segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment


class Aof2StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Plans on the driver, one a query; ``read`` runs in workers.

    A stream that is made later, of a home whose relay starts for the first time, is followed from
    its first record.
    """

    def __init__(
        self,
        paths: list[str],
        start: str,
        max_records: int,
        settings: Settings,
        schema: StructType,
    ) -> None:
        self._paths = paths
        self._start = start
        self._max_records = max_records  # 0: no limit
        self._settings = settings
        self._schema = schema
        self._target: Offsets | None = None  # of Trigger.AvailableNow
        self._known: set[tuple[str, int]] = set()  # offsets that records were seen to end at

    def initialOffset(self) -> Offsets:
        """Where a query without a checkpoint starts."""
        if self._start == "first":
            return {one: self._plan(one).first for one in self._streams()}
        return {one: self._durable_end(self._plan(one)) for one in self._streams()}

    def getDefaultReadLimit(self) -> ReadLimit:
        """As many records a batch as the option ``max_records`` says."""
        return ReadMaxRows(self._max_records) if self._max_records else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """What comes from now on is not of this query."""
        self._target = {one: self._durable_end(self._plan(one)) for one in self._streams()}

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Behind the last durable record of each stream, or the last that the limit allows.

        Errors: JournalPruned, JournalError, as the module says; FormatError for damage.
        """
        left = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        found = dict(start)
        streams = self._streams() if self._target is None else self._target
        for stream in streams:
            self._check_known(stream, start.get(stream, 0))
            plan = self._plan(stream, start.get(stream))
            end = self._durable_end(plan)
            if self._target is not None:
                end = min(end, self._target[stream])
            if left is not None:
                end, left = self._limited(plan, end, left)
            found[stream] = max(end, start.get(stream, end))
            self._known.add((stream, found[stream]))
        return found

    def partitions(self, start: Offsets, end: Offsets) -> list[SegmentPartition]:
        """The parts of segments between two offsets. Errors: as ``latestOffset``."""
        found = []
        for stream, until in end.items():
            if start.get(stream) == until:
                continue
            plan = self._plan(stream, start.get(stream), until)
            if plan.end < until:
                raise _ahead(stream, until, plan.end)
            found += [SegmentPartition(segment) for segment in plan.segments]
        return found

    def read(self, partition: SegmentPartition) -> Iterator[pa.RecordBatch]:
        """The records of a part of a segment. Errors: RelayError that names its file."""
        schema = to_arrow_schema(self._schema, timezone="UTC")
        yield from read_segment(partition.segment, schema, self._settings)

    def _streams(self) -> list[str]:
        return journal_files.find_streams(self._paths)

    def _plan(self, stream: str, start: int | None = None, end: int | None = None) -> Plan:
        strict = not self._settings.permissive
        plan = journal_files.plan(stream, start or 0, end, strict=strict)
        if start is not None and start < plan.first:
            raise JournalPruned(
                f"{stream}: the records from offset {start} to {plan.first} were pruned before"
                f" they were read; {BEGIN_ANEW}"
            )
        return plan

    def _check_known(self, stream: str, start: int) -> None:
        """The journal goes as far as that; looked at once, when a query goes on from there.

        Errors: JournalError.
        """
        if start and (stream, start) not in self._known:
            end = self._plan(stream).end
            if start > end:
                raise _ahead(stream, start, end)

    def _durable_end(self, plan: Plan) -> int:
        """Where the plan ends, once everything before is on the disk."""
        if plan.segments:
            last = plan.segments[-1]
            # One that has left Tier 0 was sealed, and synced with that.
            with contextlib.suppress(FileNotFoundError):
                path = segment_path(last.folder, last.segment_id)
                fd = fsio.open_read(path)
                try:
                    fsio.sync_data(fd, path)
                finally:
                    os.close(fd)
        return plan.end

    def _limited(self, plan: Plan, end: int, left: int) -> tuple[int, int]:
        """Where to end so that no more than ``left`` records are read, and how many then are."""
        for segment in plan.segments:
            objects = self._settings.objects.get(segment.folder, "")
            if segment.start >= end:
                break
            with journal_files.open_at(segment, objects) as source:
                span = (segment.base, segment.start, min(segment.end, end))
                for record in read_records(source, *span, _pass_over):
                    if left <= 0:
                        return record.offset, 0
                    left -= 1
        return end, left


def _pass_over(*_: object) -> None:
    """Damage is told when the records are read."""


def _ahead(stream: str, start: int, end: int) -> JournalError:
    return JournalError(
        f"{stream}: the checkpoint stands at offset {start}, and the journal ends at {end}: it is"
        f" another one, or was restored; {BEGIN_ANEW}"
    )
