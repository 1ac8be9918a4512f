"""The inputs of the jobs: DataFrames over the frozen files of one run.

A table is read from its files when it is first asked for, and kept as Parquet in the run's folder.
"""

from __future__ import annotations

import glob
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit.disk_usage import DiskUsage, measure
from relay.audit.schemas import formats
from relay.audit.snapshot import HomeSnapshot
from relay.audit.sources import (
    acomm_source,
    files_source,
    journal_source,
    ledger_source,
    originals_source,
)
from relay.audit.sources.acomm_query import SECTIONS, sections_of
from relay.audit.sources.parquet_cache import SMALL_BYTES, ParquetCache
from relay.base.config import Config, read_file
from relay.base.errors import RelayError
from relay.base.home import CONFIG

T = TypeVar("T")
NOT_CACHED = frozenset(("content", "metadata", "signature"))  # bytes that one job or none reads
# Of the journal's columns, those that jobs read more than once.
JOURNAL_CACHED = (
    "end",
    "at",
    "event",
    "number",
    "relay_id",
    "kind",
    "sender",
    "to",
    "checksum",
    "created_ns",
    "created_at",
    "state",
    "due_at",
    "deliveries",
)
_PASSED_OVER = ("store", "archive", "journal", "segment", "object")  # kinds of files


class Inputs:
    """What jobs read: DataFrames over the same frozen files.

    A table is read from its files when it is first asked for, and kept as Parquet in the run's
    folder. ``shared``: several jobs read, so of each table all columns are kept at once. Content,
    metadata and signatures are not among what is kept. ``permissive``: of store and journal what
    is damaged is passed over.
    """

    def __init__(
        self,
        spark: SparkSession,
        snapshot: HomeSnapshot,
        *,
        shared: bool = False,
        earlier: str | None = None,
        permissive: bool = False,
    ) -> None:
        self.snapshot = snapshot
        self._permissive = permissive
        self._previous_tables = earlier  # what --out was of a run to compare with
        self._spark = spark
        self._shared = shared
        is_local = spark.sparkContext.master.startswith("local")
        self._here = is_local and snapshot.size <= SMALL_BYTES
        self._tables: dict[str, Any] = {}
        self._lock = threading.Lock()  # jobs of one run ask at once
        self._locks: dict[str, threading.Lock] = {}  # of what is kept, one each

    @property
    def snapshot_ns(self) -> int:
        """When the ledger's snapshot was taken: Unix nanoseconds."""
        return self.snapshot.ledger.taken_ns

    @property
    def grace_ns(self) -> int:
        """How much older than the snapshot a message must be to be judged by it."""
        return self.snapshot.grace_ns

    @property
    def observed_until_ns(self) -> int:
        """Up to when a relay saw what happened: ages are reckoned from here. Unix nanoseconds."""
        return self.snapshot.observed_until_ns

    @property
    def recent_since_ns(self) -> int:
        """What happened before is in the tables, and no finding any more. Unix nanoseconds."""
        return self.snapshot.observed_until_ns - self.snapshot.recent_ns

    @property
    def disk_usage(self) -> DiskUsage:
        """What home and disk measure, looked at once, when it is first asked for.

        Errors: ConfigError; RelayError for a disk that cannot be asked.
        """
        snapshot = self.snapshot
        return self._cached("sizes", lambda: measure(snapshot.home, snapshot.observed_until_ns))

    def local_table(self, rows: Iterable[tuple[object, ...]], schema: StructType) -> DataFrame:
        """These rows, which the driver knows, as a table of one partition."""
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrow = to_arrow_schema(schema, timezone="UTC")
        arrays = [pa.array(values, f.type) for values, f in zip(columns, arrow, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=arrow)
        return self._spark.createDataFrame(table).coalesce(1)

    @property
    def config(self) -> Config:
        """The home's configuration; the defaults where it has none. Errors: ConfigError."""
        return read_file(os.path.join(self.snapshot.home, CONFIG))

    def previous_run(self, table: str, schema: StructType) -> DataFrame:
        """A small table of the run to compare with; no rows where there is none to compare with.

        It is read at once: this run may write to the same place. Errors: RelayError when that
        run has no such table.
        """
        rows: list[Row] = []
        if self._previous_tables is not None:
            path = os.path.join(self._previous_tables, table)
            if not os.path.isdir(path):
                raise RelayError(
                    f"there is no {path} to compare with",
                    hint="--compare takes what --out was of a run with the job integrity",
                )
            rows = self._spark.read.parquet(path).select(*schema.names).collect()
        return self._spark.createDataFrame(rows, schema)

    def ledger(self, table: str, *columns: str) -> DataFrame:
        """These columns of a table. Errors: RelayError for one that is not there."""
        path = self.snapshot.ledger.path
        every = ledger_source.schema_of(table).names

        def load(names: Sequence[str]) -> DataFrame:
            return ledger_source.load(self._spark, path, table, names, cache=self._new_cache())

        return self._columns(f"ledger {table}", load, every, columns)

    def store(self, section: str, *columns: str) -> DataFrame:
        """These columns of a section of live store and archives; ``file`` as in the home.

        Errors: RelayError for one that is not there.
        """
        every = [name for name in store_columns(section) if name not in NOT_CACHED]
        return self._columns(
            f"store {section}", lambda names: self._store(section, names), every, columns
        )

    def delivery_changes(self) -> DataFrame:
        """Deliveries that were written, held or given up after their first row: few of audit_log.

        Columns: at, message_id, recipient, old_status, new_status, attempt, is_again (with a
        new attempt).
        """

        def few() -> DataFrame:
            log = ledger_source.load(
                self._spark,
                self.snapshot.ledger.path,
                "audit_log",
                ("at", "what", "old_status", "new_status", "attempt", "staged_at", "written_at"),
                only={"new_status": ("written", "held", "dead")},
                cache=self._new_cache(),
            )
            return log.select(
                "at",
                F.substring_index("what", " > ", 1).alias("message_id"),
                F.substring_index("what", " > ", -1).alias("recipient"),
                "old_status",
                "new_status",
                "attempt",
                F.coalesce("staged_at", "written_at").isNotNull().alias("is_again"),
            )

        return self._cached("moves", few)

    def reverted_archives(self) -> DataFrame:
        """Messages that were archived once, and then were not, by audit_log: no relay does that.

        Columns: message_id, was_archived (true), a row each.
        """

        def none() -> DataFrame:
            log = ledger_source.load(
                self._spark,
                self.snapshot.ledger.path,
                "audit_log",
                ("what",),
                only={"old_status": ("archived",)},
                cache=self._new_cache(),
            )
            return log.select(
                F.col("what").alias("message_id"), F.lit(True).alias("was_archived")
            ).distinct()

        return self._cached("undone", none)

    def originals(self, *columns: str) -> DataFrame:
        """These columns of the files that agents sent, archived since or before the snapshot.

        The folders are listed once, when they are first asked for. Errors: RelayError.
        """
        home = self.snapshot.home
        planned = self._cached("plan of originals", lambda: originals_source.plan(home))
        return self._columns(
            "originals",
            lambda names: originals_source.load(
                self._spark, home, planned, names, cache=self._new_cache()
            ),
            formats.ORIGINAL.names,
            columns,
        )

    def journal(self, *columns: str) -> DataFrame:
        """These columns of the journal's records; ``stream`` as in the home.

        Errors: RelayError for one that is not there.
        """
        return self._columns("journal", self._journal, JOURNAL_CACHED, columns)

    def coverage(self) -> DataFrame:
        """One row, ``is_whole``: False where something of store or journal was passed over."""
        if not self._permissive:
            return self._spark.range(1).select(F.lit(True).alias("is_whole"))
        files = self.files("kind", "problems").where(F.col("kind").isin(*_PASSED_OVER))
        return files.agg((F.count_if(F.size("problems") > 0) == 0).alias("is_whole"))

    def cached(self, key: str, make: Callable[[], DataFrame]) -> DataFrame:
        """The frame that ``make`` gives, computed once whatever is made of it."""
        return self._cached(key, lambda: make().persist(StorageLevel.MEMORY_AND_DISK))

    def _cached(self, key: str, make: Callable[[], T]) -> T:
        """What ``make`` gives the first who asks; others who ask meanwhile wait for it alone."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._tables:
                self._tables[key] = make()
            kept: T = self._tables[key]
            return kept

    def _new_cache(self) -> ParquetCache:
        """A place for one more table. Files that are asked for stay: the run's folder goes."""
        return ParquetCache(tempfile.mkdtemp(prefix="table-", dir=self.snapshot.folder), self._here)

    def files(self, *columns: str) -> DataFrame:
        """These columns of everything that keeps something, verified: formats.KEPT_FILE."""
        snapshot = self.snapshot
        given = (snapshot.home, snapshot.store_files, snapshot.folder, snapshot.journal.objects)
        units = self._cached("plan of files", lambda: files_source.plan(*given))
        return self._columns(
            "files",
            lambda names: files_source.load(
                self._spark, snapshot.home, units, names, cache=self._new_cache()
            ),
            formats.KEPT_FILE.names,
            columns,
        )

    def _columns(
        self,
        key: str,
        load: Callable[[Sequence[str]], DataFrame],
        every: Sequence[str],
        columns: Sequence[str],
    ) -> DataFrame:
        """From what is kept, where it is to be; else read for this one plan."""
        if not self._shared or not set(columns) <= set(every):
            return self._cached(f"{key} {columns}", lambda: load(columns))
        return self._cached(key, lambda: load(every)).select(*columns)

    def _store(self, section: str, columns: Sequence[str]) -> DataFrame:
        files = self.snapshot.store_files
        frame = acomm_source.load(
            self._spark,
            files,
            section,
            columns,
            permissive=self._permissive,
            cache=self._new_cache(),
        )
        return self._below(frame, "file", self.snapshot.folder, self.snapshot.home)

    def _journal(self, columns: Sequence[str]) -> DataFrame:
        journal = self.snapshot.journal
        options = {"until": json.dumps(journal.until)}
        options |= {"objects": journal.objects} if journal.objects else {}
        options |= {"key_file": journal.key_file} if journal.key_file else {}
        streams = [glob.escape(stream) for stream in journal.until]
        frame = journal_source.load(
            self._spark,
            streams,
            columns,
            permissive=self._permissive,
            cache=self._new_cache(),
            **options,
        )
        return self._below(frame, "stream", self.snapshot.home)

    def _below(self, frame: DataFrame, column: str, *folders: str) -> DataFrame:
        """The frame with paths of that column, if it has it, relative to the folders."""
        for folder in folders if column in frame.columns else ():
            prefix = F.lit(os.path.join(folder, ""))
            frame = frame.withColumn(
                column,
                F.when(
                    F.col(column).startswith(prefix), F.substr(column, F.length(prefix) + F.lit(1))
                ).otherwise(F.col(column)),
            )
        return frame


def store_columns(section: str) -> list[str]:
    """The columns that a section has. Errors: RelayError for one that there is none of."""
    return list(SECTIONS[sections_of(section)[0]].names)
