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

As a stream (``spark.readStream``) it follows the journal; see aof2_stream.py:
- ``start``: first (the default: from the first record that is left) or end.
- ``max_records``: in one batch at most.

Segments are read in whatever tier they lie; nothing is written or hydrated. The end of the
journal is where it is when the query is planned. A schema given to ``read.schema`` chooses
columns, and only those are decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit import journal_files, reading, schemas
from relay.audit.acomm_source import check_columns
from relay.audit.aof2_stream import Aof2StreamReader, SegmentPartition, check_start
from relay.audit.journal_files import Damage
from relay.audit.journal_rows import Settings, read_segment
from relay.base import keyfile
from relay.base.errors import RelayError

FORMAT = "aof2"
TABLES = {"records": schemas.JOURNAL, "damaged": schemas.JOURNAL_DAMAGE}
MODES = ("failfast", "permissive")


def load(
    spark: SparkSession,
    streams: Iterable[str],
    columns: Iterable[str],
    *,
    permissive: bool = False,
    keep: reading.Keep | None = None,
    **options: str,
) -> DataFrame:
    """These columns of the records of these streams; no streams give no rows.

    Errors: RelayError for a column that there is none of. A segment that is damaged or gone
    fails the job that reads it; where it is ``permissive``, it is a row ``Gap``.
    """
    schema = schemas.subset(schemas.JOURNAL, columns, "the journal")
    options |= {"paths": json.dumps(list(streams)), "mode": MODES[permissive]}
    return reading.read(spark, Aof2Source, schema, options, keep)


class Aof2Source(DataSource):  # type: ignore[misc]
    """Made by Spark, once a plan."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of the table."""
        return TABLES[_one_of(self.options, "table", TABLES)]

    def reader(self, schema: StructType) -> Aof2Reader:
        """A reader of the columns of ``schema``. Errors: RelayError for a wrong option."""
        check_columns(schema, self.schema(), "the journal")
        streams = journal_files.find_streams(paths_of(self.options))
        settings, until = settings_of(self.options, streams), until_of(self.options)
        is_damage = self.schema() is schemas.JOURNAL_DAMAGE
        kind = DamageReader if is_damage else Aof2Reader
        return kind(streams, until, settings, schema)

    def streamReader(self, schema: StructType) -> Aof2StreamReader:
        """A reader that follows the journal. Errors: RelayError for a wrong option."""
        check_columns(schema, schemas.JOURNAL, "the journal")
        if self.schema() is not schemas.JOURNAL:
            raise RelayError("the table damaged is no stream: read it in a batch")
        paths = paths_of(self.options)
        settings = settings_of(self.options, journal_files.find_streams(paths))
        most = self.options.get("max_records", "0")
        if not most.isdecimal():
            raise RelayError(f"max_records {most!r} is no number of records")
        start = check_start(self.options.get("start", "first"))
        return Aof2StreamReader(paths, start, int(most), settings, schema)


class DamagePartition(InputPartition):  # type: ignore[misc]
    """Damage that was seen when the query was planned."""

    def __init__(self, damage: list[Damage]) -> None:
        self.damage = damage


class Aof2Reader(DataSourceReader):  # type: ignore[misc]
    """Reads segments in workers."""

    def __init__(
        self, streams: list[str], until: dict[str, int], settings: Settings, schema: StructType
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
    """Reads the same, and gives what could not be read of it."""

    def partitions(self) -> list[InputPartition]:
        """One a segment, and one of what the plan found."""
        return [*super().partitions(), DamagePartition(self._damage)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """What is damaged in a segment."""
        found: list[Damage] = []
        if isinstance(partition, DamagePartition):
            found = partition.damage
        elif isinstance(partition, SegmentPartition):
            schema = to_arrow_schema(schemas.subset(schemas.JOURNAL, ["offset"], "the journal"))
            lenient = self._settings._replace(permissive=True)
            for _ in read_segment(partition.segment, schema, lenient, found.append):
                pass
        yield _damage_batch(found, to_arrow_schema(self._schema, timezone="UTC"))


def paths_of(options: Mapping[str, str]) -> list[str]:
    """What ``load`` was given. Errors: RelayError for nothing."""
    # Spark gives one path as it is, and several as a JSON list.
    if "paths" in options:
        return list(json.loads(options["paths"]))
    if "path" in options:
        return [options["path"]]
    raise RelayError(f"format {FORMAT} needs a path: a stream, a journal or a home")


def settings_of(options: Mapping[str, str], streams: Iterable[str]) -> Settings:
    """What the options say. Errors: RelayError, KeyFileError, ConfigError."""
    key_file = options.get("key_file")
    if key_file:
        keyfile.load(key_file)  # so that it is said now, and once
    objects = {
        one: options.get("objects")
        or journal_files.home_settings(journal_files.home_of(one)).objects
        for one in streams
    }
    return Settings(objects, key_file, _one_of(options, "mode", MODES) == "permissive")


def until_of(options: Mapping[str, str]) -> dict[str, int]:
    """Where reading ends, by stream. Errors: RelayError."""
    try:
        return msgspec.json.decode(options.get("until", "{}"), type=dict[str, int])
    except msgspec.DecodeError as exc:
        raise RelayError(f"until is no JSON of stream -> offset: {exc}") from exc


def _damage_batch(found: list[Damage], schema: pa.Schema) -> pa.RecordBatch:
    names = dict(zip(schemas.JOURNAL_DAMAGE.names, Damage._fields, strict=True))
    rows = [one._asdict() for one in found]
    arrays = [pa.array([row[names[field.name]] for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _one_of(options: Mapping[str, str], name: str, known: Iterable[str]) -> str:
    names = list(known)
    given = options.get(name, names[0])
    if given not in names:
        raise RelayError(f"{name} {given!r} is none of {', '.join(names)}")
    return given
