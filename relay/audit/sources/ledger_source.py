"""The Spark format ``relay_ledger``: the tables of a ledger, a partition each.

    spark.read.format("relay_ledger").option("table", "deliveries").load("~/.agent-relay/ledger.db")

Options:
- ``path``: a ledger, in use or not, a backup, or a snapshot.
- ``table``: messages (the default), deliveries, rejections, agents, ...
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
import os
import tempfile
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit.schemas import formats
from relay.audit.schemas.formats import check_columns
from relay.audit.sources import paths_of
from relay.audit.sources.ledger_rows import read_rows, take_snapshot
from relay.base.clock import Clock
from relay.base.errors import LedgerError, RelayError

FORMAT = "relay_ledger"
_MAGIC = b"SQLite format 3\0"
# Bytes 18 and 19 of the file: how it is written and read, 2 with a write-ahead log.
_WAL = b"\2\2"
_SPARK_FOLDERS = "SPARK_LOCAL_DIRS"  # of the application alone; Spark removes them at its end


class LedgerSource(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of the table. Errors: RelayError for an unknown table."""
        table = self._table()
        if table not in formats.LEDGER:
            raise RelayError(f"table: expected one of {', '.join(formats.LEDGER)}, got {table!r}")
        return formats.LEDGER[table]

    def reader(self, schema: StructType) -> LedgerReader:
        """A reader of the columns of ``schema``. Errors: RelayError for unknown columns."""
        table = self._table()
        check_columns(schema, self.schema(), f"table {table}")
        path, *others = paths_of(self.options, "a ledger, or a snapshot of one")
        if others:
            raise RelayError(f"expected one ledger, got {1 + len(others)}: {path}, {others[0]} …")
        frozen = frozen_copy(os.path.expanduser(path), self.options.get("snapshot", ""))
        return LedgerReader(frozen, table, schema)

    def _table(self) -> str:
        return str(self.options.get("table", "messages"))


class LedgerReader(DataSourceReader):  # type: ignore[misc]
    """Reads a table of a snapshot, in one task: who wants more makes a lake."""

    def __init__(self, path: str, table: str, schema: StructType) -> None:
        self._path = path
        self._table = table
        self._schema = schema

    def read(self, partition: object) -> Iterator[pa.RecordBatch]:
        """Read the rows. Errors: LedgerError that names file and table."""
        yield from read_rows(self._path, self._table, to_arrow_schema(self._schema, timezone="UTC"))


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
