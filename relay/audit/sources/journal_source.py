"""The Spark format ``aof2``: the records of a journal, a partition a segment.

    spark.read.format("aof2").load("~/.agent-relay/journal")

Options:
- ``path``: a stream, a journal, a home, or a glob of them; ``load`` takes several.
- ``table``: records (the default) or damaged.
- ``mode``: failfast (the default: damage fails the job with the file's name) or permissive: what
  can be read is, the rest is a row ``Gap`` with the reason, and one of the table ``damaged``.
- ``key_file``: of an encrypted store. Without it failfast fails, permissive gives rows ``Sealed``.
- ``objects``: the object store of Tier 2, a directory or ``s3://bucket/prefix``; by default the
  one that the home's config.json names. Credentials come from the environment alone.
- ``until``: JSON, stream -> logical offset: nothing behind it is read.

As a stream (``spark.readStream``) it follows the journal:
- ``start``: first (the default: from the first record that is left) or end.
- ``max_records``: in one batch at most.

Segments are read in whatever tier they are; nothing is written or hydrated. The end of the
journal is where it is when the query is planned. A schema given to ``read.schema`` chooses
columns, and only those are decoded.

As a stream its offset is a map: stream -> logical offset behind the last record that was read. It
is of whole records that are durable: before an end is reported, what the reader saw up to there is
synced, so a power cut takes nothing back that was counted. Rolls and tiers make no difference. A
checkpoint that the journal no longer goes back to is an error, and so is one that is ahead of the
journal.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from relay.audit.schemas import check_columns, formats, subset
from relay.audit.sources import journal_files, parquet_cache
from relay.audit.sources.journal_files import (
    JournalDamage,
    ReadSettings,
    SegmentPart,
    StreamPlan,
    read_segment,
)
from relay.base import crypto, fsio
from relay.base.errors import JournalError, JournalPruned, RelayError
from relay.journal.segment import read_records, segment_path

Offsets = dict[str, int]  # stream -> logical offset
STARTS = ("first", "end")
NEW_CHECKPOINT = "begin with a new checkpoint: it starts at the first remaining record"


def check_start(start: str) -> str:
    """One of STARTS. Errors: RelayError."""
    if start not in STARTS:
        raise RelayError(f"start: expected one of {', '.join(STARTS)}, got {start!r}")
    return start


class SegmentPartition(InputPartition):  # type: ignore[misc]
    """A part of a segment."""

    def __init__(self, segment: SegmentPart) -> None:
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
        settings: ReadSettings,
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
        """Return the start of a query without a checkpoint."""
        if self._start == "first":
            return {one: self._plan(one).first for one in self._streams()}
        return {one: self._durable_end(self._plan(one)) for one in self._streams()}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Limit the records of a batch to the option ``max_records``."""
        return ReadMaxRows(self._max_records) if self._max_records else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query at the current end."""
        self._target = {one: self._durable_end(self._plan(one)) for one in self._streams()}

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Return the offsets behind the last durable records, or the last that the limit allows.

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
                raise _checkpoint_ahead(stream, until, plan.end)
            found += [SegmentPartition(segment) for segment in plan.segments]
        return found

    def read(self, partition: SegmentPartition) -> Iterator[pa.RecordBatch]:
        """The records of a part of a segment. Errors: RelayError that names its file."""
        schema = to_arrow_schema(self._schema, timezone="UTC")
        yield from read_segment(partition.segment, schema, self._settings)

    def _streams(self) -> list[str]:
        return journal_files.find_streams(self._paths)

    def _plan(self, stream: str, start: int | None = None, end: int | None = None) -> StreamPlan:
        strict = not self._settings.permissive
        plan = journal_files.plan(stream, start or 0, end, strict=strict)
        if start is not None and start < plan.first:
            raise JournalPruned(
                f"{stream}: the records from offset {start} to {plan.first} were pruned before"
                f" they were read; {NEW_CHECKPOINT}"
            )
        return plan

    def _check_known(self, stream: str, start: int) -> None:
        """Check, once, that the journal reaches the offset from which a query continues.

        Errors: JournalError.
        """
        if start and (stream, start) not in self._known:
            end = self._plan(stream).end
            if start > end:
                raise _checkpoint_ahead(stream, start, end)

    def _durable_end(self, plan: StreamPlan) -> int:
        """Return the end of the plan, once everything before is on the disk."""
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

    def _limited(self, plan: StreamPlan, end: int, left: int) -> tuple[int, int]:
        """Return an end so that at most ``left`` records are read, and the number that remains."""
        for segment in plan.segments:
            objects = self._settings.objects.get(segment.folder, "")
            if segment.start >= end:
                break
            with journal_files.open_segment(segment, objects) as source:
                span = (segment.base, segment.start, min(segment.end, end))
                for record in read_records(source, *span, _pass_over):
                    if left <= 0:
                        return record.offset, 0
                    left -= 1
        return end, left


def _pass_over(*_: object) -> None:
    """Ignore damage: it is reported when the records are read."""


def _checkpoint_ahead(stream: str, start: int, end: int) -> JournalError:
    return JournalError(
        f"{stream}: the checkpoint is at offset {start}, but the journal ends at {end}: it is"
        f" another one, or was restored; {NEW_CHECKPOINT}"
    )


FORMAT = "aof2"
TABLES = {"records": formats.JOURNAL, "damaged": formats.JOURNAL_DAMAGE}
MODES = ("failfast", "permissive")


def load(
    spark: SparkSession,
    streams: Iterable[str],
    columns: Iterable[str],
    *,
    permissive: bool = False,
    cache: parquet_cache.ParquetCache | None = None,
    **options: str,
) -> DataFrame:
    """Read columns of the records of these streams; no streams give no rows.

    Errors: RelayError for an unknown column. A segment that is damaged or gone fails the job
    that reads it; when ``permissive``, it is a row ``Gap``.
    """
    schema = subset(formats.JOURNAL, columns, "the journal")
    options |= {"paths": json.dumps(list(streams)), "mode": MODES[permissive]}
    return parquet_cache.read(spark, Aof2Source, schema, options, cache)


class Aof2Source(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of the table."""
        return TABLES[_one_of(self.options, "table", TABLES)]

    def reader(self, schema: StructType) -> Aof2Reader:
        """Make a reader of the columns of ``schema``. Errors: RelayError for a wrong option."""
        check_columns(schema, self.schema(), "the journal")
        streams = journal_files.find_streams(paths_of(self.options))
        settings, until = settings_of(self.options, streams), until_of(self.options)
        is_damage = self.schema() is formats.JOURNAL_DAMAGE
        kind = DamageReader if is_damage else Aof2Reader
        return kind(streams, until, settings, schema)

    def streamReader(self, schema: StructType) -> Aof2StreamReader:
        """A reader that follows the journal. Errors: RelayError for a wrong option."""
        check_columns(schema, formats.JOURNAL, "the journal")
        if self.schema() is not formats.JOURNAL:
            raise RelayError("the table damaged cannot be streamed: read it in a batch")
        paths = paths_of(self.options)
        settings = settings_of(self.options, journal_files.find_streams(paths))
        most = self.options.get("max_records", "0")
        if not most.isdecimal():
            raise RelayError(f"max_records: expected a number, got {most!r}")
        start = check_start(self.options.get("start", "first"))
        return Aof2StreamReader(paths, start, int(most), settings, schema)


class DamagePartition(InputPartition):  # type: ignore[misc]
    """JournalDamage that was seen when the query was planned."""

    def __init__(self, damage: list[JournalDamage]) -> None:
        self.damage = damage


class Aof2Reader(DataSourceReader):  # type: ignore[misc]
    """Reads segments in workers."""

    def __init__(
        self, streams: list[str], until: dict[str, int], settings: ReadSettings, schema: StructType
    ) -> None:
        self._settings = settings
        self._schema = schema
        strict = not settings.permissive
        plans = [journal_files.plan(one, end=until.get(one), strict=strict) for one in streams]
        self._segments = [segment for plan in plans for segment in plan.segments]
        self._damage = [damage for plan in plans for damage in plan.damage]

    def partitions(self) -> list[InputPartition]:
        """One a segment."""
        return [SegmentPartition(segment) for segment in self._segments]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The records of a segment. Errors: RelayError that names its file."""
        if isinstance(partition, SegmentPartition):
            schema = to_arrow_schema(self._schema, timezone="UTC")
            yield from read_segment(partition.segment, schema, self._settings)


class DamageReader(Aof2Reader):
    """Reads segments, and returns the damage in them."""

    def partitions(self) -> list[InputPartition]:
        """One a segment, and one of what the plan found."""
        return [*super().partitions(), DamagePartition(self._damage)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Find the damage in a segment."""
        found: list[JournalDamage] = []
        if isinstance(partition, DamagePartition):
            found = partition.damage
        elif isinstance(partition, SegmentPartition):
            schema = to_arrow_schema(subset(formats.JOURNAL, ["offset"], "the journal"))
            lenient = self._settings._replace(permissive=True)
            for _ in read_segment(partition.segment, schema, lenient, found.append):
                pass
        yield _damage_batch(found, to_arrow_schema(self._schema, timezone="UTC"))


def paths_of(options: Mapping[str, str]) -> list[str]:
    """Return the paths given to ``load``. Errors: RelayError without any."""
    # Spark gives one path as it is, and several as a JSON list.
    if "paths" in options:
        return list(json.loads(options["paths"]))
    if "path" in options:
        return [options["path"]]
    raise RelayError(f"format {FORMAT} needs a path: a stream, a journal or a home")


def settings_of(options: Mapping[str, str], streams: Iterable[str]) -> ReadSettings:
    """Make settings of the options. Errors: RelayError, KeyFileError, ConfigError."""
    key_file = options.get("key_file")
    if key_file:
        crypto.load_key(key_file)  # so that an error comes now, and once
    objects = {
        one: options.get("objects")
        or journal_files.home_settings(journal_files.home_of(one)).objects
        for one in streams
    }
    return ReadSettings(objects, key_file, _one_of(options, "mode", MODES) == "permissive")


def until_of(options: Mapping[str, str]) -> dict[str, int]:
    """Return the end of reading, by stream. Errors: RelayError."""
    try:
        return msgspec.json.decode(options.get("until", "{}"), type=dict[str, int])
    except msgspec.DecodeError as exc:
        raise RelayError(f"until: expected JSON of stream -> offset: {exc}") from exc


def _damage_batch(found: list[JournalDamage], schema: pa.Schema) -> pa.RecordBatch:
    names = dict(zip(formats.JOURNAL_DAMAGE.names, JournalDamage._fields, strict=True))
    rows = [one._asdict() for one in found]
    arrays = [pa.array([row[names[field.name]] for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _one_of(options: Mapping[str, str], name: str, known: Iterable[str]) -> str:
    names = list(known)
    given = options.get(name, names[0])
    if given not in names:
        raise RelayError(f"{name}: expected one of {', '.join(names)}, got {given!r}")
    return given
