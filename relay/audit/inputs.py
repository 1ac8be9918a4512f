"""The inputs of the jobs: DataFrames over the frozen files of one run.

On first use the home is extracted into a lake, in the run's folder or a kept one: see extract.py.
"""

from __future__ import annotations

import glob
import json
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from relay.audit import lake_columns
from relay.audit.extract import update
from relay.audit.lake import Lake, LakeManifest, default_name, home_id, open_lake
from relay.audit.lake_tables import read_parquet
from relay.audit.schemas import formats
from relay.audit.schemas.formats import in_spark, subset
from relay.audit.snapshot import HomeSnapshot
from relay.audit.sources import MODES
from relay.audit.sources.store_files import MESSAGE_SECTIONS
from relay.base.errors import FormatError, RelayError

T = TypeVar("T")
NOT_IN_LAKE = frozenset(("content", "metadata", "signature"))  # bytes that few queries read
# Ledger and store files of a home that is small: 30,000 messages or so.
SMALL_BYTES = 32 << 20
# By the beginning of a table's name the kinds of files that its rows are of.
_SOURCES = {"store": ("store", "archive"), "journal": ("segment", "journal")}


def extracted(snapshot: HomeSnapshot, url: str | None) -> tuple[Lake, LakeManifest]:
    """Bring a lake, or one in the run's folder, up to date with a snapshot. Errors: RelayError."""
    lake = open_lake(url or os.path.join(snapshot.folder, "lake"))
    name = default_name(snapshot.home)
    with lake.locked(home_id(name)):
        return lake, update(lake, name, snapshot)[0]


class Inputs:
    """DataFrames over the frozen files, for all jobs of a run.

    They are extracted into a lake on first use: ``lake``, or one in the run's folder. Content,
    metadata and signatures are not in it. What is damaged of store and journal is passed over, and
    ``lost`` says so; when ``strict``, it is an error. ``results``: folder of the tables that jobs
    of this run have written. ``extracted``: the lake, where it has the rows of this snapshot.
    """

    _viewed: ClassVar[Inputs | None] = None  # whose tables the views show

    def __init__(
        self,
        spark: SparkSession,
        snapshot: HomeSnapshot,
        *,
        lake: str | None = None,
        earlier: str | None = None,
        strict: bool = False,
        results: str = "",
        extracted: tuple[Lake, LakeManifest] | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.results = results
        self._strict = strict
        self._previous_tables = earlier  # --out of the previous run
        self._spark = spark
        self._lake_url = lake
        is_local = spark.sparkContext.master.startswith("local")
        self._here = is_local and snapshot.size <= SMALL_BYTES
        self._tables: dict[str, Any] = {} if extracted is None else {"lake": extracted}
        self._views: set[str] = set()
        self._lock = threading.Lock()  # jobs of one run ask at once
        self._locks: dict[str, threading.Lock] = {}  # of what is kept, one each

    @property
    def spark(self) -> SparkSession:
        """The session of the run."""
        return self._spark

    @property
    def is_extracted(self) -> bool:
        """True once a job has read the lake."""
        return "lake" in self._tables

    @property
    def lost(self) -> list[str]:
        """List what of store and journal could not be read, a line each. Errors: RelayError."""
        home = os.path.join(self.snapshot.home, "")
        lines = [line for part in self._extracted()[1].parts for line in part.lost]
        return [line if home in line else f"{home}{line}" for line in lines]

    @property
    def snapshot_ns(self) -> int:
        """Time of the ledger's snapshot. Unix nanoseconds."""
        return self.snapshot.ledger.taken_ns

    def previous_run(self, table: str, columns: pa.Schema) -> DataFrame:
        """Read a small table of the previous run; it is empty without ``--compare``.

        It is read at once: this run may write to the same place.
        """
        rows: list[Row] = []
        if self._previous_tables is not None:
            path = os.path.join(self._previous_tables, table)
            rows = read_parquet(self._spark, columns, path).collect()
        return self._spark.createDataFrame(rows, in_spark(columns))

    def table(self, name: str) -> DataFrame:
        """Read a table of the lake; paths as in the home.

        Errors: RelayError where rows of store or journal could not be read, when ``strict``.
        """
        self._require_whole(*_SOURCES.get(name.partition("_")[0], ()))
        return self._table(name)

    def add_view(self, name: str) -> None:
        """Make a view of a table of the lake, until ``drop_views``. Errors: as ``table``.

        To drop a view Spark compares its plan with all that is cached: so once a run.
        """
        frame = self.table(name)
        with self._lock:
            if Inputs._viewed is not self:  # views are the session's
                Inputs._viewed, self._views = self, set()
            if name not in self._views:
                frame.createOrReplaceTempView(name)
                self._views.add(name)

    def drop_views(self) -> None:
        """Drop the views of ``add_view``."""
        for name in self._views:
            self._spark.catalog.dropTempView(name)
        self._views = set()

    def messages(self, *columns: str) -> DataFrame:
        """Read columns of the store's messages, from its files if the lake lacks one of them.

        Errors: RelayError for a damaged file when ``strict``.
        """
        rows = self.table("store_messages")
        if NOT_IN_LAKE.isdisjoint(columns):
            return rows.select(*columns)
        schema = subset(formats.STORED_MESSAGE, columns, "the store")
        named = json.dumps([glob.escape(path) for path in self.snapshot.store_files])
        options = {"section": ",".join(MESSAGE_SECTIONS), "paths": named}
        options["mode"] = MODES[not self._strict]
        frame = self._spark.read.format("acomm").schema(schema).options(**options).load()
        return self._below(frame, "file", self.snapshot.folder, self.snapshot.home)

    def journal(self, *columns: str) -> DataFrame:
        """Read columns of the format ``aof2``, from the segments; ``stream`` as in the home.

        Errors: RelayError for an unknown column.
        """
        journal = self.snapshot.journal
        named = json.dumps([glob.escape(stream) for stream in journal.until])
        options = {"until": json.dumps(journal.until), "paths": named}
        options |= {"objects": journal.objects} if journal.objects else {}
        options |= {"key_file": journal.key_file} if journal.key_file else {}
        options["mode"] = MODES[not self._strict]
        schema = subset(formats.JOURNAL, columns, "the journal")
        self._require_whole(*_SOURCES["journal"])
        frame = self._spark.read.format("aof2").schema(schema).options(**options).load()
        return self._below(frame, "stream", self.snapshot.home)

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

    def _extracted(self) -> tuple[Lake, LakeManifest]:
        """The lake, with the rows of this snapshot. Errors: RelayError."""

        return self._cached("lake", lambda: extracted(self.snapshot, self._lake_url))

    def _table(self, table: str) -> DataFrame:
        """Read a table of the lake."""

        def load() -> DataFrame:
            lake, made = self._extracted()
            paths = [f"{lake.url}/{one.path}" for one in made.files() if one.table == table]
            frame = read_parquet(self._spark, lake_columns.TABLES[table], *paths)
            return frame.coalesce(1) if self._here else frame  # so little is joined in one task

        return self._cached(table, load)

    def _require_whole(self, *kinds: str) -> None:
        """Errors: RelayError where rows of such sources could not be read, when strict."""
        parts = self._extracted()[1].parts  # also where the rows are read from the files
        lost = [line for part in parts if part.kind in kinds for line in part.lost]
        if lost and self._strict:
            line, home = lost[0], os.path.join(self.snapshot.home, "")
            raise RelayError(line if home in line else f"{home}{line}", hint=FormatError.hint)

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
