"""The inputs of the jobs: DataFrames over the lake that a run has extracted, and frozen files."""

from __future__ import annotations

import glob
import json
import os
import threading
from collections.abc import Callable

import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F

from relay.audit import formats, lake_columns
from relay.audit.formats import MODES, register, subset
from relay.audit.lake import Lake, LakeManifest
from relay.audit.lake_tables import in_spark, read_parquet
from relay.audit.snapshot import HomeSnapshot
from relay.audit.sources.store_files import MESSAGE_SECTIONS
from relay.base.errors import FormatError, RelayError

NOT_IN_LAKE = frozenset(("content", "metadata", "signature"))  # bytes that few queries read
# Ledger and store files of a home that is small: 30,000 messages or so.
SMALL_BYTES = 32 << 20
# By the beginning of a table's name the kinds of files that its rows are of.
_SOURCES = {"store": ("store", "archive"), "journal": ("segment", "journal")}


class Inputs:
    """DataFrames over the frozen files, for all jobs of a run.

    ``made``: what of the lake has the rows of the snapshot; content, metadata and signatures are
    not in it. What is damaged of store and journal is passed over, and ``lost`` says so; when
    ``strict``, it is an error. ``results``: folder of the tables that jobs of this run have
    written. ``earlier``: that of the run to compare with.
    """

    def __init__(
        self,
        spark: SparkSession,
        snapshot: HomeSnapshot,
        lake: Lake,
        made: LakeManifest,
        *,
        earlier: str | None = None,
        strict: bool = False,
        results: str = "",
    ) -> None:
        self.spark = spark
        self.snapshot = snapshot
        self.results = results
        self.lost = made.lost(snapshot.home)
        self._lake = lake
        self._made = made
        self._strict = strict
        self._previous_tables = earlier
        is_local = spark.sparkContext.master.startswith("local")
        self._here = is_local and snapshot.size <= SMALL_BYTES
        self._views: dict[str, DataFrame] = {}
        self._lock = threading.Lock()  # jobs of one run ask at once
        self._locks: dict[str, threading.Lock] = {}  # of the views, one each

    def previous_run(self, table: str, columns: pa.Schema) -> DataFrame:
        """Read a table of the previous run; it is empty without ``--compare``."""
        if self._previous_tables is None:
            return self.spark.createDataFrame([], in_spark(columns))
        return read_parquet(self.spark, columns, os.path.join(self._previous_tables, table))

    def table(self, name: str) -> DataFrame:
        """Read a table of the lake; paths as in the home.

        Errors: RelayError where rows of store or journal could not be read, when ``strict``.
        """
        if kinds := _SOURCES.get(name.partition("_")[0]):
            self._require_whole(*kinds)
        copies = os.path.join(self.snapshot.folder, "copies")
        files = [file for file in self._made.files() if file.table == name]
        paths = [self._lake.fetch(file.path, copies) for file in files]
        frame = read_parquet(self.spark, lake_columns.TABLES[name], *paths)
        return frame.coalesce(1) if self._here else frame  # so little is joined in one task

    def view(self, name: str, make: Callable[[], DataFrame]) -> DataFrame:
        """Make a frame once, and a view of it until ``drop_views``.

        Callers that ask meanwhile wait for that name alone. To drop a view Spark compares its plan
        with all that is cached: so once a run.
        """
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._views:
                frame = make()
                frame.createOrReplaceTempView(name)
                self._views[name] = frame
            return self._views[name]

    def drop_views(self) -> None:
        """Drop the views of ``view``."""
        for name in self._views:
            self.spark.catalog.dropTempView(name)
        self._views = {}

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
        frame = self._reader("acomm").schema(schema).options(**options).load()
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
        frame = self._reader("aof2").schema(schema).options(**options).load()
        return self._below(frame, "stream", self.snapshot.home)

    def _reader(self, name: str) -> DataFrameReader:
        """A reader of one of the audits' formats; a run that needs none does not register them."""
        register(self.spark)
        return self.spark.read.format(name)

    def _require_whole(self, *kinds: str) -> None:
        """Errors: RelayError where rows of such sources could not be read, when strict."""
        if self._strict and (lost := self._made.lost(self.snapshot.home, *kinds)):
            raise RelayError(lost[0], hint=FormatError.hint)

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
