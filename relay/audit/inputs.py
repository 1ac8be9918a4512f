"""The inputs of the jobs: DataFrames over the frozen files of one run.

A table is read from its files on first use, and kept as Parquet in the run's folder.
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

from relay.audit.disk_usage import HomeUsage, measure
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
from relay.base.discovery import CONFIG
from relay.base.errors import RelayError

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
    "said",
    "answer_id",
)
_PASSED_OVER = ("store", "archive", "journal", "segment", "object")  # kinds of files


class Inputs:
    """DataFrames over the frozen files, for all jobs of a run.

    A table is read from its files on first use, and kept as Parquet in the run's
    folder. ``shared``: several jobs read, so of each table all columns are kept at once. Content,
    metadata and signatures are not among what is kept. ``permissive``: of store and journal what
    is damaged is passed over. ``results``: folder of the tables that jobs of this run have written.
    """

    def __init__(
        self,
        spark: SparkSession,
        snapshot: HomeSnapshot,
        *,
        shared: bool = False,
        earlier: str | None = None,
        permissive: bool = False,
        results: str = "",
    ) -> None:
        self.snapshot = snapshot
        self.results = results
        self._permissive = permissive
        self._previous_tables = earlier  # --out of the previous run
        self._spark = spark
        self._shared = shared
        is_local = spark.sparkContext.master.startswith("local")
        self._here = is_local and snapshot.size <= SMALL_BYTES
        self._tables: dict[str, Any] = {}
        self._lock = threading.Lock()  # jobs of one run ask at once
        self._locks: dict[str, threading.Lock] = {}  # of what is kept, one each

    @property
    def spark(self) -> SparkSession:
        """The session of the run."""
        return self._spark

    @property
    def snapshot_ns(self) -> int:
        """Time of the ledger's snapshot. Unix nanoseconds."""
        return self.snapshot.ledger.taken_ns

    @property
    def grace_ns(self) -> int:
        """Age before the snapshot from which a message is judged. Nanoseconds."""
        return self.snapshot.grace_ns

    @property
    def observed_until_ns(self) -> int:
        """Time until which a relay observed the home: ages end here. Unix nanoseconds."""
        return self.snapshot.observed_until_ns

    @property
    def recent_since_ns(self) -> int:
        """Time since which events become findings. Unix nanoseconds."""
        return self.snapshot.observed_until_ns - self.snapshot.recent_ns

    @property
    def disk_usage(self) -> HomeUsage:
        """Disk usage, measured once, on first use.

        Errors: ConfigError; RelayError when the disk cannot be queried.
        """
        home, until_ns = self.snapshot.home, self.snapshot.observed_until_ns
        return self._cached("disk usage", lambda: measure(home, until_ns))

    def local_table(self, rows: Iterable[tuple[object, ...]], schema: StructType) -> DataFrame:
        """Make a table of one partition from rows of the driver."""
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrow = to_arrow_schema(schema, timezone="UTC")
        arrays = [pa.array(values, f.type) for values, f in zip(columns, arrow, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=arrow)
        return self._spark.createDataFrame(table).coalesce(1)

    @property
    def config(self) -> Config:
        """The home's configuration, or the defaults. Errors: ConfigError."""
        return read_file(os.path.join(self.snapshot.home, CONFIG))

    def previous_run(self, table: str, schema: StructType) -> DataFrame:
        """Read a small table of the previous run; it is empty without ``--compare``.

        It is read at once: this run may write to the same place. Errors: RelayError when that
        run has no such table.
        """
        rows: list[Row] = []
        if self._previous_tables is not None:
            path = os.path.join(self._previous_tables, table)
            if not os.path.isdir(path):
                raise RelayError(
                    f"there is no {path} to compare with",
                    hint="--compare expects the --out folder of a run with the job integrity",
                )
            rows = self._spark.read.parquet(path).select(*schema.names).collect()
        return self._spark.createDataFrame(rows, schema)

    def ledger(self, table: str, *columns: str) -> DataFrame:
        """Read columns of a ledger table. Errors: RelayError for an unknown column."""
        path = self.snapshot.ledger.path
        every = ledger_source.schema_of(table).names

        def load(names: Sequence[str]) -> DataFrame:
            return ledger_source.load(self._spark, path, table, names, cache=self._new_cache())

        return self._columns(f"ledger {table}", load, every, columns)

    def store(self, section: str, *columns: str) -> DataFrame:
        """Read columns of a section of live store and archives; ``file`` as in the home.

        Errors: RelayError for an unknown column.
        """
        every = [name for name in store_columns(section) if name not in NOT_CACHED]
        return self._columns(
            f"store {section}", lambda names: self._store(section, names), every, columns
        )

    def delivery_changes(self) -> DataFrame:
        """Read the changes of deliveries to written, held or dead: a few rows of audit_log.

        Columns: at, message_id, recipient, old_status, new_status, attempt, is_again (with a
        new attempt).
        """

        def few() -> DataFrame:
            log = ledger_source.load(
                self._spark,
                self.snapshot.ledger.path,
                "audit_log",
                (
                    *("at", "message_id", "recipient", "old_status", "new_status"),
                    *("attempt", "staged_at", "written_at"),
                ),
                only={"new_status": ("written", "held", "dead")},
                cache=self._new_cache(),
            )
            return log.select(
                "at",
                "message_id",
                "recipient",
                "old_status",
                "new_status",
                "attempt",
                F.coalesce("staged_at", "written_at").isNotNull().alias("is_again"),
            )

        return self._cached("delivery changes", few)

    def reverted_archives(self) -> DataFrame:
        """List messages that were archived and then were not, by audit_log.

        Columns: message_id, was_archived (true), a row each.
        """

        def none() -> DataFrame:
            log = ledger_source.load(
                self._spark,
                self.snapshot.ledger.path,
                "audit_log",
                ("message_id",),
                only={"old_status": ("archived",)},
                cache=self._new_cache(),
            )
            return log.select("message_id", F.lit(True).alias("was_archived")).distinct()

        return self._cached("reverted archives", none)

    def originals(self, *columns: str) -> DataFrame:
        """Read columns of the archived originals.

        The folders are listed once, on first use. Errors: RelayError.
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
        """Read columns of the journal's records; ``stream`` as in the home.

        Errors: RelayError for an unknown column.
        """
        return self._columns("journal", self._journal, JOURNAL_CACHED, columns)

    def coverage(self) -> DataFrame:
        """One row, ``is_whole``: False where damaged parts of store or journal were skipped."""
        if not self._permissive:
            return self._spark.range(1).select(F.lit(True).alias("is_whole"))
        files = self.files("kind", "problems").where(F.col("kind").isin(*_PASSED_OVER))
        return files.agg((F.count_if(F.size("problems") > 0) == 0).alias("is_whole"))

    def cached(self, key: str, make: Callable[[], DataFrame]) -> DataFrame:
        """Persist the frame that ``make`` returns, under a key."""
        return self._cached(key, lambda: make().persist(StorageLevel.MEMORY_AND_DISK))

    def _cached(self, key: str, make: Callable[[], T]) -> T:
        """Call ``make`` once; callers that ask meanwhile wait for that key alone."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._tables:
                self._tables[key] = make()
            kept: T = self._tables[key]
            return kept

    def _new_cache(self) -> ParquetCache:
        """Make a folder for one more table; it goes with the run's folder."""
        return ParquetCache(tempfile.mkdtemp(prefix="table-", dir=self.snapshot.folder), self._here)

    def files(self, *columns: str) -> DataFrame:
        """Read columns of all files of the home, verified: formats.KEPT_FILE."""
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
        """Choose columns of a cached table; a job that runs alone reads just these."""
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
        """Make the paths of a column relative to the folders, if the frame has it."""
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
    """List the columns of a section. Errors: RelayError for an unknown section."""
    return list(SECTIONS[sections_of(section)[0]].names)
