"""The Spark format ``acomm``: store files as tables; small files share a partition.

    spark.read.format("acomm").option("section", "messages").load("store/relay.acomm")

Options:
- ``path``: a file, a folder (every ``*.acomm`` below it) or a glob; ``load`` takes several.
  ``s3://bucket/key`` names an object, or a prefix or glob of objects, in the same way.
- ``section``: messages (the default), dead_letters, archive, channels, subscriptions or
  deliveries. The first three may be read together, divided by commas. ``damaged`` gives the
  files that cannot be read, and why.
- ``mode``: failfast (the default), or permissive: of a damaged file nothing is read, and the
  rest is.
- ``since`` and ``until`` (ISO 8601; UTC without a zone; from, and before), ``sender``,
  ``channel``, ``status`` (several divided by commas): these messages alone.

A schema given to ``read.schema`` chooses columns, and only those are built. The last five options
spare the files without such messages, and the rows that are not wanted. Conditions of a query do
not: Spark 4 keeps the filters that it passes down for a ``load``, not for each use of it, so that
two uses with different filters gave wrong rows.

Order, for each file: the bytes and their SHA-256; the columns of section 257, or the indexes of
section 4, tell whether any message is wanted; then the requested columns, of these messages. All
that can fail is done before the first batch: a file gives all of its rows, or none, and a damaged
one fails the job with its name.
"""

from __future__ import annotations

import gc
import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.acomm import container, indexes, store_file
from relay.acomm.columns import Columns
from relay.acomm.container import MAX_FILE_BYTES, FileHeader, Flag, SectionType
from relay.acomm.engine_state import EngineState
from relay.acomm.fields import U64, Reader
from relay.acomm.model import StoreFile
from relay.acomm.records import read_channel
from relay.audit.schemas import check_columns, subset
from relay.audit.sources import parquet_cache
from relay.audit.sources.acomm_messages import FROM_RECORDS, MessageTable, decoded_table
from relay.audit.sources.acomm_query import (
    DAMAGED,
    MESSAGE_SECTIONS,
    OPTIONS,
    SECTIONS,
    Condition,
    SectionRows,
    find_files,
    is_remote,
    matching_rows,
    may_match,
    option_conditions,
    read_object,
    schema_of,
    section_rows,
    sections_of,
)
from relay.base.errors import FormatError, ObjectError, RelayError

FORMAT = "acomm"
DEFAULT_SECTION = "messages"
MODES = ("failfast", "permissive")
PARTITION_BYTES = 32 << 20  # some 100,000 messages
LEAST_PARTITIONS = 16  # of as many files: each core has some
FILE_COST = 64 << 10  # in bytes: to open one takes as long as to read these
BATCH_ROWS = 20_000  # from 10,000 to 50,000 it makes no difference


def load(
    spark: SparkSession,
    paths: Sequence[str],
    section: str,
    columns: Iterable[str],
    *,
    permissive: bool = False,
    cache: parquet_cache.ParquetCache | None = None,
) -> DataFrame:
    """Read columns of a section of these files; no files give no rows.

    Errors: RelayError for an unknown section or column. A file that is damaged or missing
    fails the job that reads it; when ``permissive``, it has no rows.
    """
    schema = subset(SECTIONS[sections_of(section)[0]], columns, f"section {section}")
    named = json.dumps([glob.escape(path) for path in paths])
    options = {"section": section, "paths": named, "mode": MODES[permissive]}
    return parquet_cache.read(spark, AcommSource, schema, options, cache)


class AcommSource(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of the section."""
        return schema_of(self._sections()[0])

    def reader(self, schema: StructType) -> AcommReader:
        """A reader of the columns of ``schema``. Errors: RelayError for unknown columns."""
        sections = self._sections()
        check_columns(schema, schema_of(sections[0]), f"section {sections[0]}")
        mode = self.options.get("mode", MODES[0])
        if mode.lower() not in MODES:
            raise RelayError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        given = [name for name in OPTIONS if name in self.options]
        if given and sections[0] not in MESSAGE_SECTIONS:
            raise RelayError(f"option {given[0]} is for messages, not for section {sections[0]}")
        wanted = FileQuery(sections, option_conditions(self.options))
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


class FilesPartition(InputPartition):  # type: ignore[misc]
    """A large file, or small ones."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths


class AcommReader(DataSourceReader):  # type: ignore[misc]
    """Reads files in workers. The list of files is made when the query is planned."""

    def __init__(
        self, files: dict[str, int], wanted: FileQuery, schema: StructType, *, permissive: bool
    ) -> None:
        self._files = files
        self._wanted = wanted
        self._schema = schema
        self._permissive = permissive

    def partitions(self) -> list[FilesPartition]:
        """Gather files, in order, to partitions of as many bytes: a task costs some 10 ms."""
        sizes = {path: max(size, FILE_COST) for path, size in self._files.items()}
        most = min(PARTITION_BYTES, sum(sizes.values()) // LEAST_PARTITIONS)
        parts: list[list[str]] = []
        room = 0
        for path, size in sizes.items():
            room -= size
            if room < 0:
                parts.append([])
                room = most - size
            parts[-1].append(path)
        return [FilesPartition(paths) for paths in parts]

    def read(self, partition: FilesPartition) -> Iterator[pa.RecordBatch]:
        """The files' rows; none of a damaged one when that is permitted.

        Errors: RelayError that names the file.
        """
        if not isinstance(partition, FilesPartition):
            return  # without files Spark asks for one partition nevertheless
        _freeze_gc()
        for path in partition.paths:
            yield from self._rows(path)

    def _rows(self, path: str) -> Iterator[pa.RecordBatch]:
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


def _freeze_gc() -> None:
    """Exclude existing objects from garbage collection in a worker, once.

    Spark's daemon collects after every task: 26 ms, for modules that stay.
    """
    global _frozen
    if not _frozen and TaskContext.get() is not None:
        _frozen = True
        gc.freeze()


_frozen = False


class FileQuery(NamedTuple):
    """The sections and conditions that are requested."""

    sections: tuple[str, ...]
    conditions: tuple[Condition, ...]


class FileDamage(NamedTuple):
    """The reason why a file could not be read."""

    reason: str
    offset: int | None  # of the fault; None: unknown
    size: int | None  # of the file


def batches(path: str, wanted: FileQuery, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read the rows of a file. Errors: FormatError, RelayError, OSError, before the first row."""
    if wanted.sections[0] not in MESSAGE_SECTIONS:
        store = store_file.decode(read_bytes(path), path)
        yield from to_batches(section_rows(store, wanted.sections[0], path), schema)
        return
    file = _OpenFile(path)
    try:
        ready = [one for name in wanted.sections for one in file.select(name, wanted, schema)]
    except FormatError as exc:
        if exc.path:
            raise container.as_version_error(file.header, exc) from None
        raise FormatError(path, exc.offset, exc.expected, exc.found) from None
    except pa.ArrowException as exc:
        raise FormatError(path, 0, "columns in section 257 that hold together", exc) from None
    for one in ready:
        yield from one.batches(schema)


def damage(path: str) -> FileDamage | None:
    """Return the fault of a file that cannot be read, or None.

    This checks more than a scan needs: every record, and the state of the deliveries.
    """
    size = None
    try:
        data = read_bytes(path)
        size = len(data)
        EngineState.decode(store_file.decode(data, path, warn=lambda _: None).engine_state)
    except FormatError as exc:
        return FileDamage(f"expected {exc.expected}, found {exc.found}", exc.offset, size)
    except OSError as exc:
        return FileDamage(exc.strerror or str(exc), None, size)
    except ObjectError:
        raise  # the object store is at fault, not the file
    except RelayError as exc:
        return FileDamage(str(exc), None, size)
    return None


def read_bytes(path: str) -> bytes:
    """Read a file, here or in an object store. Errors: ``store_file.read_bytes``'s."""
    if is_remote(path):
        return read_object(path, MAX_FILE_BYTES)
    return store_file.read_bytes(path)


def to_batches(section: SectionRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows of values as Arrow batches, a column at a time."""
    for start in range(0, len(section.values), BATCH_ROWS):
        chunk = section.values[start : start + BATCH_ROWS]
        arrays = []
        for field in schema:
            value_of = section.columns[field.name]
            arrays.append(pa.array([value_of(row) for row in chunk], field.type))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Selection(NamedTuple):
    """The selected messages of one section, and their columns but for FROM_RECORDS."""

    table: MessageTable
    numbers: Sequence[int]
    arrays: dict[str, pa.Array]

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        cut = [field.name for field in schema if field.name in FROM_RECORDS]
        for start in range(0, len(self.numbers), BATCH_ROWS):
            numbers = self.numbers[start : start + BATCH_ROWS]
            found = self.table.from_records(cut, numbers)
            for name, array in self.arrays.items():
                found[name] = array.slice(start, len(numbers))
            arrays = [found[field.name] for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class _OpenFile:
    """A file whose checksum was verified; sections are unpacked on demand."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data = read_bytes(path)
        self.header, entries = container.open_frame(self._data, path)
        self._entries = {entry.kind: entry for entry in entries if entry.length}
        self._store: StoreFile | None = None

    def select(self, section: str, wanted: FileQuery, schema: pa.Schema) -> Iterator[_Selection]:
        """Select the section's messages by the conditions; nothing when none meet them."""
        table = self._table(section, wanted.conditions)
        if table is None or not table.count:
            return
        found = matching_rows(table, wanted.conditions)
        if found is not None and not len(found):
            return
        arrays = {}
        for field in schema:
            if field.name not in FROM_RECORDS:
                array = table.column(field.name)
                array = array if found is None else array.take(found)
                arrays[field.name] = array if array.type == field.type else array.cast(field.type)
        numbers = range(table.count) if found is None else found.to_pylist()
        if any(field.name in FROM_RECORDS for field in schema):
            table.from_records(["content", "signature"], ())  # so that their faults show now
        yield _Selection(table, numbers, arrays)

    def _table(self, section: str, conditions: Iterable[Condition]) -> MessageTable | None:
        sealed = bool(self.header.flags & Flag.ENCRYPTED)
        if section == "messages" and SectionType.COLUMNS in self._entries:
            source = Columns.open(self._plain(SectionType.COLUMNS))
            self._compare_count(source.count)
            cutter = _ContentReader(self)
            return MessageTable(
                self._path, section, source, sealed, cutter.contents, cutter.signatures
            )
        if section == "messages" and not self._may_match(list(conditions)):
            return None
        if self._store is None:
            self._store = store_file.decode(self._data, self._path)
        return decoded_table(
            self._path, section, getattr(self._store, section), self._store.channels, sealed
        )

    def raw(self, kind: SectionType) -> bytes:
        """Unpack a section of messages."""
        reader = self._plain(kind)
        if self.header.flags & Flag.COMPRESSED:
            return container.unpack_envelope(reader, f"section {kind}").data
        return self._data[reader.pos : reader.end]

    def _plain(self, kind: SectionType) -> Reader:
        entry = self._entries[kind]
        return Reader(self._data, self._path, entry.offset, entry.offset + entry.length)

    def _compare_count(self, count: int) -> None:
        """Check that columns and header have the same number of messages."""
        if SectionType.ARCHIVE in self._entries:
            count += int(U64.unpack_from(self.raw(SectionType.ARCHIVE))[0])
        _same(self._path, "messages in section 257 as the header counts", self.header, count)

    def _may_match(self, conditions: Sequence[Condition]) -> bool:
        """Check the conditions against the indexes; channels have their names in section 1."""
        if not conditions or SectionType.INDEXES not in self._entries:
            return True
        try:
            found = indexes.decode(self._plain(SectionType.INDEXES))
        except FormatError:  # damaged indexes do not keep the messages from being read
            return True
        channels = []
        if SectionType.CHANNELS in self._entries:
            reader = self._plain(SectionType.CHANNELS)
            channels = [read_channel(reader) for _ in range(reader.count("channels", 1, wide=True))]
        return may_match(found, channels, conditions)


def _same(path: str, what: str, header: FileHeader, count: int) -> None:
    if header.message_count != count:
        raise FormatError(path, 24, f"{header.message_count} {what}", count)


class _ContentReader:
    """Reads contents and signatures from the records of section 2, which is unpacked on demand."""

    def __init__(self, file: _OpenFile) -> None:
        self._file = file
        self._raw = b""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._record_ends: list[int] = []
        self._signature_sizes: list[int] = []

    def contents(self, table: MessageTable, numbers: Sequence[int]) -> list[bytes]:
        """Of the messages with these numbers."""
        self._open(table)
        raw, starts, ends = self._raw, self._starts, self._ends
        if isinstance(numbers, range):
            part = slice(numbers.start, numbers.stop)
            return [raw[a:b] for a, b in zip(starts[part], ends[part], strict=True)]
        return [raw[starts[number] : ends[number]] for number in numbers]

    def signatures(self, table: MessageTable, numbers: Sequence[int]) -> list[bytes | None]:
        """Of the messages with these numbers; a signature is what a record ends with."""
        self._open(table)
        if not self._signature_sizes:
            return [None] * len(numbers)
        sizes, ends, raw = self._signature_sizes, self._record_ends, self._raw
        return [
            raw[ends[n] + 1 - sizes[n] : ends[n]] if sizes[n] else None  # the size is one too many
            for n in numbers
        ]

    def _open(self, table: MessageTable) -> None:
        if self._raw:
            return
        raw = self._file.raw(SectionType.MESSAGES)
        starts, ends, record_ends = (places.to_pylist() for places in table.content_positions())
        count = int(U64.unpack_from(raw)[0]) if len(raw) >= U64.size else 0
        if count != table.count or record_ends[-1:] != [len(raw)]:
            expected = f"records of {len(raw)} bytes, as section 2 holds, in section 257"
            raise FormatError("", 0, expected, record_ends[-1:])
        if self._file.header.flags & Flag.HAS_SIGNATURES:
            self._signature_sizes = table.signature_sizes().to_pylist()
        self._raw, self._starts, self._ends, self._record_ends = raw, starts, ends, record_ends
