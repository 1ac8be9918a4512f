"""The Spark format ``aof2``: the records of a journal, a partition a segment.

    spark.read.format("aof2").load("~/.agent-relay/journal")

Options:
- ``path``: a stream, a journal, a home, or a glob of them; ``load`` takes several.
- ``mode``: failfast (the default: damage fails the job with the file's name) or permissive: what
  can be read is, the rest is a row ``Gap`` with the reason.
- ``key_file``: of an encrypted store. Without it failfast fails, permissive gives rows ``Sealed``.
- ``objects``: the object store of Tier 2, a directory or ``s3://bucket/prefix``; by default the
  one that the home's config.json names. Credentials come from the environment alone.
- ``until``: JSON, stream -> logical offset: nothing behind it is read.

Segments are read in whatever tier they are; nothing is written or hydrated. The end of the
journal is where it is when the query is planned. A schema given to ``read.schema`` chooses
columns, and only those are decoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit.schemas import formats
from relay.audit.schemas.formats import check_columns
from relay.audit.sources import is_permissive, journal_files, paths_of
from relay.audit.sources.journal_files import (
    JournalDamage,
    ReadSettings,
    SegmentPart,
    gap_rows,
    read_segment,
)
from relay.base import crypto
from relay.base.errors import RelayError

FORMAT = "aof2"


class SegmentPartition(InputPartition):  # type: ignore[misc]
    """A part of a segment."""

    def __init__(self, segment: SegmentPart) -> None:
        self.segment = segment


class DamagePartition(InputPartition):  # type: ignore[misc]
    """Parts that could not be read when the query was planned."""

    def __init__(self, damage: list[JournalDamage]) -> None:
        self.damage = damage


class Aof2Source(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of a record."""
        return formats.JOURNAL

    def reader(self, schema: StructType) -> Aof2Reader:
        """Make a reader of the columns of ``schema``. Errors: RelayError for a wrong option."""
        check_columns(schema, self.schema(), "the journal")
        streams = journal_files.find_streams(
            paths_of(self.options, "a stream, a journal or a home")
        )
        try:
            until = msgspec.json.decode(self.options.get("until", "{}"), type=dict[str, int])
        except msgspec.DecodeError as exc:
            raise RelayError(f"until: expected JSON of stream -> offset: {exc}") from exc
        return Aof2Reader(streams, until, settings_of(self.options, streams), schema)


class Aof2Reader(DataSourceReader):  # type: ignore[misc]
    """Reads segments in workers."""

    def __init__(
        self, streams: list[str], until: dict[str, int], settings: ReadSettings, schema: StructType
    ) -> None:
        self._settings = settings
        self._schema = schema
        strict = not settings.permissive
        plans = [
            journal_files.plan(stream, end=until.get(stream), strict=strict) for stream in streams
        ]
        self._segments = [segment for plan in plans for segment in plan.segments]
        self._damage = [damage for plan in plans for damage in plan.damage]

    def partitions(self) -> list[InputPartition]:
        """One a segment, and one of what the plan could not read."""
        segments = [SegmentPartition(segment) for segment in self._segments]
        return [*segments, DamagePartition(self._damage)] if self._damage else segments

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The records of a segment. Errors: RelayError that names its file."""
        schema = to_arrow_schema(self._schema, timezone="UTC")
        if isinstance(partition, SegmentPartition):
            yield from read_segment(partition.segment, schema, self._settings)
        elif isinstance(partition, DamagePartition):
            yield from gap_rows(partition.damage, schema)


def settings_of(options: Mapping[str, str], streams: Iterable[str]) -> ReadSettings:
    """Make settings of the options. Errors: RelayError, KeyFileError, ConfigError."""
    key_file = options.get("key_file")
    if key_file:
        crypto.load_key(key_file)  # so that an error comes now, and once
    objects = {
        stream: options.get("objects")
        or journal_files.home_settings(os.path.dirname(os.path.dirname(stream))).objects
        for stream in streams
    }
    return ReadSettings(objects, key_file, is_permissive(options))
