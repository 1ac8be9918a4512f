"""The Spark format ``acomm``: store files as tables, one partition a file.

    spark.read.format("acomm").option("section", "messages").load("store/relay.acomm")

Options:
- ``path``: a file, a folder (every ``*.acomm`` below it) or a glob; ``load`` takes several.
  ``s3://bucket/key`` is an object's (paths.py), and stands for the same.
- ``section``: messages (the default), dead_letters, archive, channels, subscriptions or
  deliveries. The first three may be read together, divided by commas. ``damaged`` gives the
  files that cannot be read, and why.
- ``mode``: failfast (the default), or permissive: of a damaged file nothing is read, and the
  rest is.
- ``since`` and ``until`` (ISO 8601; UTC without a zone; from, and before), ``sender``,
  ``channel``, ``status`` (several divided by commas): these messages alone.

A file's checksum is verified before anything is taken from it; a damaged one fails the job with
its name. A schema given to ``read.schema`` chooses columns, and only those are built. Options and
pushed filters on ``created_at``, ``sender``, ``channel`` and ``status`` spare the files without
such messages, and the rows that are not wanted.
"""

from __future__ import annotations

import gc
import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit import paths as places
from relay.audit import reading, schemas
from relay.audit.acomm_columns import MESSAGE_SECTIONS, SECTIONS, sections_of
from relay.audit.acomm_filters import OPTIONS, of_filter, of_options
from relay.audit.acomm_read import BATCH_ROWS, Wanted, batches, damage
from relay.base.errors import FormatError, ObjectError, RelayError

FORMAT = "acomm"
SUFFIX = ".acomm"
DEFAULT_SECTION = "messages"
DAMAGED = "damaged"
MODES = ("failfast", "permissive")

__all__ = ["BATCH_ROWS", "FORMAT", "AcommSource", "find_files", "load"]


def load(
    spark: SparkSession,
    paths: Sequence[str],
    section: str,
    columns: Iterable[str],
    *,
    permissive: bool = False,
    keep: reading.Keep | None = None,
) -> DataFrame:
    """These columns of a section of these files; no files give no rows.

    Errors: RelayError for a section or column that there is none of. A file that is damaged
    or missing fails the job that reads it; where it is ``permissive``, it has no rows.
    """
    schema = schemas.subset(SECTIONS[sections_of(section)[0]], columns, f"section {section}")
    named = json.dumps([glob.escape(path) for path in paths])
    options = {"section": section, "paths": named, "mode": MODES[permissive]}
    return reading.read(spark, AcommSource, schema, options, keep)


class AcommSource(DataSource):  # type: ignore[misc]
    """Made by Spark, once a plan."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of the section."""
        return schema_of(self._sections()[0])

    def reader(self, schema: StructType) -> AcommReader:
        """A reader of the columns of ``schema``. Errors: RelayError when they are not ours."""
        sections = self._sections()
        check_columns(schema, schema_of(sections[0]), f"section {sections[0]}")
        mode = self.options.get("mode", MODES[0])
        if mode.lower() not in MODES:
            raise RelayError(f"mode {mode!r} is none of {', '.join(MODES)}")
        given = [name for name in OPTIONS if name in self.options]
        if given and sections[0] not in MESSAGE_SECTIONS:
            raise RelayError(f"option {given[0]} is for messages, not for section {sections[0]}")
        wanted = Wanted(sections, of_options(self.options))
        permissive = mode.lower() == MODES[1]
        return AcommReader(find_files(self._paths()), wanted, schema, permissive=permissive)

    def _sections(self) -> tuple[str, ...]:
        asked = self.options.get("section", DEFAULT_SECTION)
        return (DAMAGED,) if asked.strip() == DAMAGED else sections_of(asked)

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

    def __init__(
        self, files: list[str], wanted: Wanted, schema: StructType, *, permissive: bool
    ) -> None:
        self._files = files
        self._wanted = wanted
        self._schema = schema
        self._permissive = permissive

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Note what can be decided here; Spark decides all of it once more."""
        if self._wanted.sections[0] in MESSAGE_SECTIONS:
            pushed = tuple(filter(None, map(of_filter, filters)))
            self._wanted = Wanted(self._wanted.sections, self._wanted.conditions + pushed)
        return filters

    def partitions(self) -> list[FilePartition]:
        """One a file."""
        return [FilePartition(path) for path in self._files]

    def read(self, partition: FilePartition) -> Iterator[pa.RecordBatch]:
        """The file's rows; none of a damaged one when that is permitted.

        Errors: RelayError that names the file.
        """
        if not isinstance(partition, FilePartition):
            return  # no files at all: Spark asks for one partition nevertheless
        _spare_the_collector()
        path = partition.path
        schema = to_arrow_schema(self._schema, timezone="UTC")
        if self._wanted.sections == (DAMAGED,):
            yield from _damaged(path, schema)
            return
        try:
            yield from batches(path, self._wanted, schema)
        except OSError as exc:
            if not self._permissive:
                raise RelayError(f"{path}: {exc.strerror}") from exc
        except FormatError as exc:
            if self._permissive:
                return
            if exc.path != path:  # a fault inside a section, which knows no file
                raise RelayError(f"{path}: {exc}") from exc
            raise
        except ObjectError:
            raise  # the object store is at fault: nothing is known of the file
        except RelayError:
            if not self._permissive:
                raise


def _damaged(path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    found = damage(path)
    if found is not None:
        row = {"file": path, **found._asdict()}
        yield pa.RecordBatch.from_pylist([row], schema=schema)


def _spare_the_collector() -> None:
    """Let a worker's collector pass over what is there already, once.

    Spark's daemon collects after every task: 26 ms, for modules that never go.
    """
    global _spared
    if not _spared and TaskContext.get() is not None:
        _spared = True
        gc.freeze()


_spared = False


def schema_of(section: str) -> StructType:
    """The columns of a section, the damaged files among them."""
    return schemas.DAMAGED_FILE if section == DAMAGED else SECTIONS[section]


def find_files(paths: Iterable[str]) -> list[str]:
    """The store files that the paths stand for, each once, in order.

    A folder stands for every ``*.acomm`` below it. Errors: RelayError for a path or glob that
    matches nothing; an empty folder is no fault.
    """
    found: list[str] = []
    for path in paths:
        if places.is_remote(path):
            found.extend(places.list_files(path, SUFFIX))
            continue
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
