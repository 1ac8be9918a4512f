"""The formats `acomm`, `aof2` and `relay_ledger` of Spark: files of a home as tables.

A schema given to ``read.schema`` chooses columns, and only those are built. What can be listed is
when a query is planned; workers read. Options of all three:
- ``path``: ``load`` takes several, and globs.
- ``mode`` of `acomm` and `aof2`: failfast (the default): damage fails the job with the file's name;
  or permissive: what can be read is.

**acomm**: store files; small ones share a partition. A path is a file, a folder (every ``*.acomm``
below it) or a glob; ``s3://bucket/key`` names an object, or a prefix or glob of objects, in the
same way. ``section``: messages (the default), dead_letters, archive, channels, subscriptions or
deliveries; the first three may be read together, divided by commas. Every file is read whole and
its checksum verified: it gives all of its rows, or none. Who filters often makes a lake.

**aof2**: the records of a journal, a partition a segment, in whatever tier that is. A path is a
stream, a journal or a home. ``key_file``: of an encrypted store; without it failfast fails,
permissive gives rows ``Sealed``. ``objects``: the object store of Tier 2; by default the one in the
home's config.json. ``until``: JSON, stream -> logical offset: nothing behind it is read. What
permissive cannot read is a row ``Gap`` with the reason.

**relay_ledger**: a table of a ledger, a backup or a snapshot, in one task. ``table``: messages (the
default), deliveries, rejections, ... A ledger in use is never read in pieces: two partitions would
see two states, and a second copy of SQLite in one process breaks the locks of the first. It is read
from a snapshot, made once for a Spark application, a ledger and the word of the option
``snapshot``, so all tables that a query joins are of the same instant. It is in Spark's own folder,
and removed with it; workers on other machines need one on a file system that they share:
``take_snapshot``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit import lake_columns
from relay.audit.lake_columns import ACOMM, AOF2, TABLES
from relay.audit.lake_tables import in_spark
from relay.audit.sources import journal_files
from relay.audit.sources.bucket_files import find_files
from relay.audit.sources.journal_files import (
    JournalDamage,
    ReadSettings,
    SegmentPart,
    gap_rows,
    read_segment,
)
from relay.audit.sources.ledger_rows import read_rows, take_snapshot
from relay.audit.sources.store_files import MESSAGE_SECTIONS, batches
from relay.base import crypto
from relay.base.clock import Clock
from relay.base.errors import FormatError, LedgerError, ObjectError, RelayError

MODES = ("failfast", "permissive")
PARTITION_BYTES = 32 << 20  # some 100,000 messages
LEAST_PARTITIONS = 16  # of as many files: each core has some
FILE_COST = 64 << 10  # in bytes: to open one takes as long as to read these
_MAGIC = b"SQLite format 3\0"
# Bytes 18 and 19 of the file: how it is written and read, 2 with a write-ahead log.
_WAL = b"\2\2"
_SPARK_FOLDERS = "SPARK_LOCAL_DIRS"  # of the application alone; Spark removes them at its end

STORED_MESSAGE = in_spark(pa.schema([*TABLES["store_messages"], *ACOMM]), "bucket")
JOURNAL = in_spark(AOF2)
# The tables of the format `relay_ledger`: those of schema.sql, with its columns and its order.
LEDGER = {table: in_spark(columns) for table, columns in lake_columns.LEDGER.items()}
SECTIONS: dict[str, StructType] = {
    **dict.fromkeys(MESSAGE_SECTIONS, STORED_MESSAGE),
    **{
        section: in_spark(TABLES[f"store_{section}"], "bucket")
        for section in ("channels", "subscriptions", "deliveries")
    },
}


def register(spark: SparkSession) -> None:
    """Register the formats in a session; idempotent.

    Where the session has workers on other machines, agent-relay must be installed there.
    """
    for source in (AcommSource, Aof2Source, LedgerSource):
        spark.dataSource.register(source)


def paths_of(options: Mapping[str, str], expected: str) -> list[str]:
    """Return the paths given to ``load``. Errors: RelayError without any."""
    # Spark gives one path as it is, and several as a JSON list.
    if "paths" in options:
        return list(json.loads(options["paths"]))
    if "path" in options:
        return [options["path"]]
    raise RelayError(f"load() needs a path: {expected}")


def is_permissive(options: Mapping[str, str]) -> bool:
    """Read the option ``mode``. Errors: RelayError for another word."""
    mode = options.get("mode", MODES[0]).lower()
    if mode not in MODES:
        raise RelayError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    return mode == MODES[1]


def subset(schema: StructType, names: Iterable[str], what: str) -> StructType:
    """Choose columns of a schema, in this order. Errors: RelayError for an unknown name."""
    known = {field.name: field for field in schema}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise RelayError(f"unknown column {name} of {what}: expected one of {', '.join(known)}")
    return StructType([known[name] for name in wanted])


def in_arrow(schema: StructType) -> pa.Schema:
    """Convert a requested schema."""
    return to_arrow_schema(schema, timezone="UTC")


def check_columns(asked: StructType, known: StructType, what: str) -> None:
    """Check that a requested schema has known columns of the right types. Errors: RelayError."""
    for field, ours in zip(asked, subset(known, asked.names, what), strict=True):
        if field.dataType.simpleString() != ours.dataType.simpleString():
            raise RelayError(
                f"column {field.name} of {what}: expected {ours.dataType.simpleString()}, "
                f"got {field.dataType.simpleString()}"
            )


class PartsReader(DataSourceReader):  # type: ignore[misc]
    """Reads parts, one a task, with a function that workers have, too."""

    def __init__(
        self, parts: Sequence[Any], read: Callable[[Any], Iterator[pa.RecordBatch]]
    ) -> None:
        self._parts = parts
        self._read = read

    def partitions(self) -> list[InputPartition]:
        """One a part."""
        return [InputPartition(part) for part in self._parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part. Errors: RelayError that names a file."""
        # Without parts Spark asks for one nevertheless.
        yield from self._read(partition.value) if partition.value is not None else ()


# -- acomm ----------------------------------------------------------------------------------


def sections_of(text: str) -> tuple[str, ...]:
    """Parse the sections of an option, divided by commas; all must have the same columns.

    Errors: RelayError for an unknown name, and for a mixture.
    """
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in SECTIONS:
            raise RelayError(f"section: expected one of {', '.join(SECTIONS)}, got {name!r}")
    if len({id(SECTIONS[name]) for name in names}) > 1:
        raise RelayError(f"sections {text} have different columns: read them one by one")
    return names


class AcommSource(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return "acomm"

    def schema(self) -> StructType:
        """Every column of the section."""
        return SECTIONS[self._sections()[0]]

    def reader(self, schema: StructType) -> PartsReader:
        """A reader of the columns of ``schema``. Errors: RelayError for unknown columns."""
        sections = self._sections()
        check_columns(schema, self.schema(), f"section {sections[0]}")
        files = find_files(paths_of(self.options, "a file, a folder or a glob"))
        permissive = is_permissive(self.options)
        read = partial(_read_files, sections=sections, schema=schema, permissive=permissive)
        return PartsReader(_gathered(files), read)

    def _sections(self) -> tuple[str, ...]:
        return sections_of(self.options.get("section", MESSAGE_SECTIONS[0]))


def _gathered(files: Mapping[str, int]) -> list[list[str]]:
    """Gather files, in order, to parts of as many bytes: a task costs some 10 ms."""
    sizes = {path: max(size, FILE_COST) for path, size in files.items()}
    most = min(PARTITION_BYTES, sum(sizes.values()) // LEAST_PARTITIONS)
    parts: list[list[str]] = []
    room = 0
    for path, size in sizes.items():
        room -= size
        if room < 0:
            parts.append([])
            room = most - size
        parts[-1].append(path)
    return parts


def _read_files(
    paths: Sequence[str], sections: tuple[str, ...], schema: StructType, permissive: bool
) -> Iterator[pa.RecordBatch]:
    """The files' rows; none of a damaged one when that is permitted."""
    columns = in_arrow(schema)
    for path in paths:
        try:
            yield from batches(path, sections, columns)
        except ObjectError:
            raise  # the object store is at fault: nothing is known of the file
        except (OSError, RelayError) as exc:
            if not permissive:
                raise _with_name(path, exc) from exc


def _with_name(path: str, exc: OSError | RelayError) -> Exception:
    """Give an error the file's name where it lacks it: a fault inside of a section knows none."""
    if isinstance(exc, OSError):
        return RelayError(f"{path}: {exc.strerror}")
    is_inside = isinstance(exc, FormatError) and exc.path != path
    return RelayError(f"{path}: {exc}") if is_inside else exc


# -- aof2 -----------------------------------------------------------------------------------


class Aof2Source(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return "aof2"

    def schema(self) -> StructType:
        """Every column of a record."""
        return JOURNAL

    def reader(self, schema: StructType) -> PartsReader:
        """Make a reader of the columns of ``schema``. Errors: RelayError for a wrong option."""
        check_columns(schema, self.schema(), "the journal")
        streams = journal_files.find_streams(
            paths_of(self.options, "a stream, a journal or a home")
        )
        try:
            until = msgspec.json.decode(self.options.get("until", "{}"), type=dict[str, int])
        except msgspec.DecodeError as exc:
            raise RelayError(f"until: expected JSON of stream -> offset: {exc}") from exc
        permissive, key_file = is_permissive(self.options), self.options.get("key_file", "")
        if key_file:
            crypto.load_key(key_file)  # so that an error comes now, and once
        segments: list[JournalPart] = []
        damage: list[JournalDamage] = []
        for stream in streams:
            plan = journal_files.plan(stream, end=until.get(stream), strict=not permissive)
            home = os.path.dirname(os.path.dirname(stream))
            objects = self.options.get("objects") or journal_files.home_settings(home).objects
            settings = ReadSettings(objects, key_file, permissive)
            segments += [(segment, settings) for segment in plan.segments]
            damage += plan.damage
        parts = [*segments, damage] if damage else segments
        return PartsReader(parts, partial(_read_journal, schema=schema))


# Of a segment, or what could not be read when the query was planned.
JournalPart = tuple[SegmentPart, ReadSettings] | list[JournalDamage]


def _read_journal(part: JournalPart, schema: StructType) -> Iterator[pa.RecordBatch]:
    columns = in_arrow(schema)
    if isinstance(part, list):
        yield from gap_rows(part, columns)
    else:
        segment, settings = part
        yield from read_segment(segment, columns, settings)


# -- relay_ledger ---------------------------------------------------------------------------


class LedgerSource(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return "relay_ledger"

    def schema(self) -> StructType:
        """Every column of the table. Errors: RelayError for an unknown table."""
        table = self._table()
        if table not in LEDGER:
            raise RelayError(f"table: expected one of {', '.join(LEDGER)}, got {table!r}")
        return LEDGER[table]

    def reader(self, schema: StructType) -> PartsReader:
        """A reader of the columns of ``schema``. Errors: RelayError for unknown columns."""
        table = self._table()
        check_columns(schema, self.schema(), f"table {table}")
        path, *others = paths_of(self.options, "a ledger, or a snapshot of one")
        if others:
            raise RelayError(f"expected one ledger, got {1 + len(others)}: {path}, {others[0]} …")
        frozen = frozen_copy(os.path.expanduser(path), self.options.get("snapshot", ""))
        # In one task: who wants more makes a lake.
        return PartsReader([frozen], partial(read_rows, table=table, columns=in_arrow(schema)))

    def _table(self) -> str:
        return str(self.options.get("table", "messages"))


def frozen_copy(path: str, word: str) -> str:
    """Return a file that does not change: ``path`` itself, or a snapshot of a ledger in use.

    Runs in the process that plans, whose environment names the application's folder.
    Errors: LedgerError when ``path`` is not a SQLite file, or a snapshot cannot be made.
    """
    if not _may_be_in_use(path):
        return path
    local = os.environ.get(_SPARK_FOLDERS, "").split(",")[0] or tempfile.gettempdir()
    status = os.stat(path)
    which = f"{os.path.realpath(path)} {status.st_dev} {status.st_ino} {word}"
    folder = os.path.join(local, "relay-ledgers")
    target = os.path.join(folder, hashlib.sha256(which.encode()).hexdigest()[:20] + ".db")
    if os.path.exists(target):
        return target
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fresh = f"{target}.{os.getpid()}"
    try:
        take_snapshot(path, fresh, Clock())
        with contextlib.suppress(FileExistsError):  # another query was planned meanwhile
            os.link(fresh, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
    return target


def _may_be_in_use(path: str) -> bool:
    """Return True for a file with a write-ahead log, unlike a snapshot. Errors: LedgerError."""
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError as exc:
        raise LedgerError(f"{path}: {exc.strerror}") from exc
    if not head.startswith(_MAGIC):
        raise LedgerError(f"{path} is not a SQLite file")
    return head[18:20] == _WAL
