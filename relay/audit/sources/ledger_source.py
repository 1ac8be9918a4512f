"""The Spark format ``relay_ledger``: tables of a ledger, in ranges of rows.

    spark.read.format("relay_ledger").option("table", "deliveries").load("~/.agent-relay/ledger.db")

Options:
- ``path``: a ledger, in use or not, a backup, or a snapshot.
- ``table``: messages (the default), deliveries, rejections, agents, ...
- ``rows``: row ids a partition, 250000 by default; of deliveries and offers, messages.
- ``snapshot``: any word. What is read of one ledger with the same word is of one instant.

A ledger in use is never read in pieces: two partitions would see two states, and a second copy
of SQLite in one process breaks the locks of the first. ``VACUUM INTO`` gives one consistent
state, made by a reader that blocks no writer. It is made once for a Spark application, a ledger
and a word, when the first query is planned, so all tables that a job joins are of the same
instant; another word takes another one. It is in Spark's own folder, and removed with it. Workers
on other machines need one on a file system that they share: ``take_snapshot``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from relay.audit.schemas import check_columns, formats, subset
from relay.audit.sources import parquet_cache
from relay.base.clock import Clock
from relay.base.errors import LedgerDamaged, LedgerError, RelayError, VersionError
from relay.ledger.file import open_readonly
from relay.ledger.schema import SCHEMA_VERSION

FORMAT = "relay_ledger"
DEFAULT_TABLE = "messages"
PARTITION_ROWS = 250_000
BATCH_ROWS = 20_000
_MAGIC = b"SQLite format 3\0"
# Bytes 18 and 19 of the file: how it is written and read, 2 with a write-ahead log.
_WAL = b"\2\2"
_SPARK_FOLDERS = "SPARK_LOCAL_DIRS"  # of the application alone; Spark removes them at its end


class LedgerSnapshot(NamedTuple):
    """A consistent copy of a ledger that does not change."""

    path: str
    taken_ns: int  # Unix; everything committed before is in it


def take_snapshot(ledger: str, target: str, clock: Clock) -> LedgerSnapshot:
    """Copy a ledger, as it is at one instant, into the new file ``target``.

    The relay may continue writing. Errors: LedgerError when there is none, it is damaged or of an
    earlier schema, or ``target`` cannot be written; VersionError when a newer relay wrote it.
    """
    taken_ns = clock.now_ns()  # before it begins: what is committed meanwhile may be in it
    with contextlib.closing(open_readonly(ledger)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise VersionError(ledger, 60, f"user_version <= {SCHEMA_VERSION}", version)
        if 0 < version < SCHEMA_VERSION:
            raise _older(ledger, version)
        # The copy is not needed after a power cut, and a sync would make a relay wait.
        connection.execute("PRAGMA synchronous = OFF")
        try:
            connection.execute("VACUUM INTO ?", (target,))
        except LedgerDamaged:
            raise
        except LedgerError as exc:
            raise _snapshot_error(ledger, target, exc) from exc
    os.chmod(target, 0o600)
    return LedgerSnapshot(target, taken_ns)


def _older(ledger: str, version: int) -> LedgerError:
    return LedgerError(
        f"{ledger} is of an earlier agent-relay: its user_version is {version}, "
        f"expected {SCHEMA_VERSION}",
        hint="the next `relay up` brings it there, and keeps a copy of it as it is",
    )


def _snapshot_error(ledger: str, target: str, exc: LedgerError) -> RelayError:
    """Explain why; the disk of the copy may be full."""
    why = exc.__cause__
    if getattr(why, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return RelayError(
            f"cannot make a snapshot of {ledger} in {os.path.dirname(target)}: {why}",
            hint="free space there, or set TMPDIR to a folder with as much as the ledger takes",
        )
    return LedgerError(f"cannot make a snapshot of {ledger}: {why}")


def load(
    spark: SparkSession,
    snapshot: str,
    table: str,
    columns: Iterable[str],
    *,
    only: Mapping[str, Sequence[str]] | None = None,
    cache: parquet_cache.ParquetCache | None = None,
) -> DataFrame:
    """Read columns of a table; ``only`` rows with one of these words, by column.

    Errors: RelayError for an unknown table or column.
    """
    schema = subset(schema_of(table), columns, f"table {table}")
    options = {"table": table, "path": snapshot, "only": json.dumps(only or {})}
    return parquet_cache.read(spark, LedgerSource, schema, options, cache)


def schema_of(table: str) -> StructType:
    """Return the schema of a table. Errors: RelayError for an unknown table."""
    if table not in formats.LEDGER:
        raise RelayError(f"table: expected one of {', '.join(formats.LEDGER)}, got {table!r}")
    return formats.LEDGER[table]


class LedgerSource(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of the table."""
        return schema_of(self._table())

    def reader(self, schema: StructType) -> LedgerReader:
        """A reader of the columns of ``schema``. Errors: RelayError for unknown columns."""
        table, path = self._table(), self.options.get("path")
        if not path:
            raise RelayError(f"format {FORMAT} needs a path: a ledger, or a snapshot of one")
        check_columns(schema, schema_of(table), f"table {table}")
        frozen = frozen_copy(os.path.expanduser(path), self.options.get("snapshot", ""))
        only = json.loads(self.options.get("only", "{}"))
        subset(schema_of(table), only, f"table {table}")
        return LedgerReader(frozen, table, self._rows(), schema, only)

    def _table(self) -> str:
        return str(self.options.get("table", DEFAULT_TABLE))

    def _rows(self) -> int:
        given = str(self.options.get("rows", PARTITION_ROWS))
        if not given.isdecimal() or int(given) == 0:
            raise RelayError(f"rows: expected a number above 0, got {given!r}")
        return int(given)


class KeyRange(InputPartition):  # type: ignore[misc]
    """Rows with first <= key < end; ``None`` is the table's own beginning or end."""

    def __init__(self, key: str, first: int | str | None, end: int | str | None) -> None:
        self.key = key  # a column, or rowid
        self.first = first
        self.end = end


class LedgerReader(DataSourceReader):  # type: ignore[misc]
    """Reads a snapshot in workers."""

    def __init__(
        self,
        path: str,
        table: str,
        rows: int,
        schema: StructType,
        only: Mapping[str, Sequence[str]],
    ) -> None:
        self._path = path
        self._only = only
        self._table = table
        self._rows = rows
        self._schema = schema

    def partitions(self) -> list[KeyRange]:
        """Return ranges of row ids, or of the ids that the primary key begins with."""
        with contextlib.closing(sqlite3.connect(snapshot_uri(self._path), uri=True)) as db:
            if self._table not in formats.LEDGER_WITHOUT_ROWID:
                bounds: list[int | str] = list(self._row_ids(db, self._table))
                return _ranges("rowid", bounds)
            key = "SELECT name FROM pragma_table_info(?) WHERE pk = 1"
            (first,) = db.execute(key, (self._table,)).fetchone()
            return _ranges(first, self._message_ids(db) if first == "message_id" else [])

    def _row_ids(self, db: sqlite3.Connection, table: str) -> range:
        """Return the first row id of each partition but the first."""
        first, last = db.execute(f"SELECT min(rowid), max(rowid) FROM {table}").fetchone()
        return range(0) if first is None else range(first + self._rows, last + 1, self._rows)

    def _message_ids(self, db: sqlite3.Connection) -> list[int | str]:
        """Return ids that divide the messages, and so what is kept of each message."""
        next_one = "SELECT message_id FROM messages WHERE rowid >= ? ORDER BY rowid LIMIT 1"
        ids = (db.execute(next_one, (at,)).fetchone()[0] for at in self._row_ids(db, "messages"))
        return sorted(set(ids))

    def read(self, partition: KeyRange) -> Iterator[pa.RecordBatch]:
        """Read the rows of a range. Errors: LedgerError that names file and table."""
        # The driver alone, when it only plans, does not load it.
        from adbc_driver_sqlite import dbapi

        schema = to_arrow_schema(self._schema, timezone="UTC")
        try:
            with (
                dbapi.connect(snapshot_uri(self._path)) as connection,
                connection.cursor() as cursor,
            ):
                cursor.adbc_statement.set_options(
                    **{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)}
                )
                cursor.execute(query(self._table, self._schema, partition, self._only))
                yield from _without_first_row(cursor.fetch_record_batch(), schema)
        except (dbapi.Error, OSError, pa.ArrowInvalid) as exc:
            raise LedgerError(f"{self._path}, table {self._table}: {exc}") from exc


def _ranges(key: str, bounds: list[int | str]) -> list[KeyRange]:
    return [KeyRange(key, *pair) for pair in pairwise([None, *bounds, None])]


def query(table: str, schema: StructType, rows: KeyRange, only: Mapping[str, Sequence[str]]) -> str:
    """Return the SQL for a range: a row of typed values first, then the rows.

    ADBC guesses a column's type from the first rows, and takes one that is NULL in all of them
    for a number. The first row fixes the types; it is dropped afterwards.
    """
    typed = ", ".join(f"{_typed(field)} AS {_quoted(field.name)}" for field in schema)
    wanted = ", ".join(_value(field) for field in schema)
    bounds = ((">=", rows.first), ("<", rows.end))
    terms = [f"{rows.key} {sign} {_literal(at)}" for sign, at in bounds if at is not None]
    terms += [f"{_quoted(name)} IN ({_words(words)})" for name, words in only.items()]
    where = f" WHERE {' AND '.join(terms)}" if terms else ""
    return f"SELECT {typed} UNION ALL SELECT {wanted} FROM {_quoted(table)}{where}"


def snapshot_uri(path: str) -> str:
    """Return the URI that opens a snapshot without locks: it does not change."""
    return f"file:{quote(path)}?immutable=1&mode=ro"


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


def _typed(field: StructField) -> str:
    return "''" if isinstance(field.dataType, StringType) else "0"


def _value(field: StructField) -> str:
    name = _quoted(field.name)
    return f"{name} / 1000" if isinstance(field.dataType, TimestampType) else name


def _words(words: Iterable[str]) -> str:
    return ", ".join(map(_literal, words))


def _literal(value: int | str) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _without_first_row(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    skip = 1
    for batch in batches:
        rows = batch.slice(skip)
        skip = 0
        arrays = [rows.column(i).cast(field.type) for i, field in enumerate(schema)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
