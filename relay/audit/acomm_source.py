"""The Spark format ``acomm``: store files as tables, one partition a file.

    spark.read.format("acomm").option("section", "messages").load("store/relay.acomm")

Options:
- ``path``: a file, a folder (every ``*.acomm`` below it) or a glob; ``load`` takes several.
- ``section``: messages (the default), dead_letters, archive, channels, subscriptions or
  deliveries. The first three may be read together, divided by commas.

A file is read whole and verified, or the job fails with its name: nothing is taken from a
damaged one. A schema given to ``read.schema`` chooses columns, and only those are built.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit import schemas
from relay.audit.acomm_columns import SECTIONS, Rows, rows, sections_of
from relay.comm import acomm
from relay.errors import FormatError, RelayError

FORMAT = "acomm"
SUFFIX = ".acomm"
DEFAULT_SECTION = "messages"
BATCH_ROWS = 20_000  # from 10,000 to 50,000 it makes no difference


def load(
    spark: SparkSession, paths: Sequence[str], section: str, columns: Iterable[str]
) -> DataFrame:
    """These columns of a section of these files; no files give no rows.

    Errors: RelayError for a section or column that there is none of. A file that is damaged
    or missing fails the job that reads it.
    """
    schema = schemas.subset(SECTIONS[sections_of(section)[0]], columns, f"section {section}")
    reader = spark.read.format(FORMAT).schema(schema).option("section", section)
    return reader.option("paths", json.dumps([glob.escape(path) for path in paths])).load()


class AcommSource(DataSource):  # type: ignore[misc]
    """Made by Spark, once a plan."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of the section."""
        return SECTIONS[self._sections()[0]]

    def reader(self, schema: StructType) -> AcommReader:
        """A reader of the columns of ``schema``. Errors: RelayError when they are not ours."""
        sections = self._sections()
        check_columns(schema, SECTIONS[sections[0]], f"section {sections[0]}")
        return AcommReader(find_files(self._paths()), sections, schema)

    def _sections(self) -> tuple[str, ...]:
        return sections_of(self.options.get("section", DEFAULT_SECTION))

    def _paths(self) -> list[str]:
        # Spark gives one path as it is, and several as a JSON list.
        if "paths" in self.options:
            return list(json.loads(self.options["paths"]))
        if "path" in self.options:
            return [self.options["path"]]
        raise RelayError(f"format {FORMAT} needs a path: a file, a folder or a glob")


class FilePartition(InputPartition):  # type: ignore[misc]
    """One file."""

    def __init__(self, path: str) -> None:
        self.path = path


class AcommReader(DataSourceReader):  # type: ignore[misc]
    """Reads files in workers. The list of files is made when the query is planned."""

    def __init__(self, files: list[str], sections: tuple[str, ...], schema: StructType) -> None:
        self._files = files
        self._sections = sections
        self._schema = schema

    def partitions(self) -> list[FilePartition]:
        """One a file."""
        return [FilePartition(path) for path in self._files]

    def read(self, partition: FilePartition) -> Iterator[pa.RecordBatch]:
        """The file's rows. Errors: RelayError that names the file."""
        if not isinstance(partition, FilePartition):
            return  # no files at all: Spark asks for one partition nevertheless
        try:
            store = acomm.read(partition.path)
            sections = [rows(store, section, partition.path) for section in self._sections]
        except OSError as exc:
            raise RelayError(f"{partition.path}: {exc.strerror}") from exc
        except FormatError as exc:
            if exc.path != partition.path:  # a fault inside a section, which knows no file
                raise RelayError(f"{partition.path}: {exc}") from exc
            raise
        schema = to_arrow_schema(self._schema, timezone="UTC")
        for section_rows in sections:
            yield from to_batches(section_rows, schema)


def to_batches(section: Rows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow batches of at most BATCH_ROWS, a column at a time."""
    for start in range(0, len(section.values), BATCH_ROWS):
        chunk = section.values[start : start + BATCH_ROWS]
        arrays = []
        for field in schema:
            value_of = section.columns[field.name]
            arrays.append(pa.array([value_of(row) for row in chunk], field.type))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def find_files(paths: Iterable[str]) -> list[str]:
    """The store files that the paths stand for, each once, in order.

    A folder stands for every ``*.acomm`` below it. Errors: RelayError for a path or glob that
    matches nothing; an empty folder is no fault.
    """
    found: list[str] = []
    for path in paths:
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise RelayError(f"there is no file {path}")
        for match in matches:
            found.extend(_below(match) if os.path.isdir(match) else [match])
    return list(dict.fromkeys(found))


def _below(folder: str) -> list[str]:
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.endswith(SUFFIX)
    )


def check_columns(asked: StructType, known: StructType, what: str) -> None:
    """Errors: RelayError for a column that is not there, or is there with another type."""
    for field, ours in zip(asked, schemas.subset(known, asked.names, what), strict=True):
        if field.dataType.simpleString() != ours.dataType.simpleString():
            raise RelayError(
                f"column {field.name} of {what} is {ours.dataType.simpleString()}, "
                f"not {field.dataType.simpleString()}"
            )
