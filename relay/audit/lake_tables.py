"""The tables of a lake as DataFrames: of a run, and at a prompt."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable

import pyarrow as pa
from pyarrow.dataset import Dataset, dataset
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from relay.audit import lake_columns
from relay.audit.cluster import is_local
from relay.audit.lake import Lake, LakeManifest, home_id, homes_of, open_lake, read_manifest
from relay.audit.lake_columns import comment_of
from relay.audit.snapshot import HomeSnapshot
from relay.audit.sources.bucket_files import is_remote
from relay.audit.temp_folders import private_folder
from relay.base.errors import FormatError, RelayError

# By the beginning of a table's name the kinds of files that its rows are of.
SOURCES = {"store": ("store", "archive"), "journal": ("segment", "journal")}
_GLOB = re.compile(r"[\\*?{}\[\]]")  # Hadoop's


def in_spark(columns: pa.Schema, *without: str) -> StructType:
    """Return columns as Spark has them, but for ``without``."""
    return StructType(
        [
            StructField(
                column.name,
                from_arrow_type(column.type, prefer_timestamp_ntz=False),
                column.nullable,
                {"comment": comment_of(column)},
            )
            for column in columns
            if column.name not in without
        ]
    )


def conform(frame: DataFrame, columns: pa.Schema) -> DataFrame:
    """Give a frame exactly these columns, in their order and of their types."""
    return frame.select(*[F.col(field.name).cast(field.dataType) for field in in_spark(columns)])


def read_parquet(
    spark: SparkSession, columns: pa.Schema, *paths: str, base: str | None = None
) -> DataFrame:
    """Read these files or folders, each named as it is: Spark would take the names as globs.

    ``base``: the folder of a table, whose partitions the paths name.
    """
    reader = spark.read.schema(in_spark(columns))
    if base is not None:
        reader = reader.option("basePath", base)
    return reader.parquet(*[_GLOB.sub(r"\\\g<0>", path) for path in paths])


def tables(spark: SparkSession, lake: str, *names: str) -> dict[str, DataFrame]:
    """Make a DataFrame and a temporary view of each table; ``names``: of these homes alone.

    They have the files that the manifests name now: an extract that ends later is not seen, and
    removes what it has replaced. Those of an object store are copied, until the process ends.
    Errors: RelayError without a lake, or with no such home.
    """
    opened = open_lake(lake)
    wanted = {home_id(name): name for name in names} or {ident: ident for ident in homes_of(opened)}
    if not wanted:
        raise RelayError(f"{lake}: no lake", hint="`relay audit extract --lake DIR` makes one")
    copies = private_folder("lake") if is_remote(lake) else ""
    paths: dict[str, list[str]] = defaultdict(list)
    for home, name in wanted.items():
        manifest = read_manifest(opened, home)
        if manifest is None:
            raise RelayError(f"{lake} has no home {name}")
        for file in manifest.files():
            paths[file.table].append(opened.fetch(file.path, copies))
    found = {}
    for table, columns in lake_columns.TABLES.items():
        base = paths[table][0].rsplit("/", 2)[0]
        found[table] = read_parquet(
            spark, columns.append(lake_columns.HOME), *paths[table], base=base
        )
        found[table].createOrReplaceTempView(table)
    return found


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
        self.strict = strict
        self._previous_tables = earlier
        self._is_small = snapshot.is_small and is_local(spark.sparkContext.master)
        self._views: dict[str, DataFrame] = {}
        self._lock = threading.Lock()  # jobs of one run ask at once
        self._locks: dict[str, threading.Lock] = {}  # of the views, one each

    def previous_run(self, table: str, columns: pa.Schema) -> DataFrame:
        """Read a table of the previous run; it is empty without ``--compare``."""
        if self._previous_tables is None:
            return self.spark.createDataFrame([], in_spark(columns))
        return read_parquet(self.spark, columns, os.path.join(self._previous_tables, table))

    def written(self, table: str) -> Dataset:
        """A table that a job of this run has written, without Spark."""
        return dataset(os.path.join(self.results, table), format="parquet")

    def result(self, table: str, columns: pa.Schema) -> DataFrame:
        """The same as a frame."""
        return read_parquet(self.spark, columns, os.path.join(self.results, table))

    def table(self, name: str) -> DataFrame:
        """Read a table of the lake; paths as in the home.

        Errors: RelayError where rows of store or journal could not be read, when ``strict``.
        """
        if kinds := SOURCES.get(name.partition("_")[0]):
            self.require_whole(*kinds)
        copies = os.path.join(self.snapshot.folder, "copies")
        files = [file for file in self._made.files() if file.table == name]
        paths = [self._lake.fetch(file.path, copies) for file in files]
        frame = read_parquet(self.spark, lake_columns.TABLES[name], *paths)
        return frame.coalesce(1) if self._is_small else frame  # so little is joined in one task

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

    def require_whole(self, *kinds: str) -> None:
        """Errors: RelayError where rows of such sources could not be read, when ``strict``."""
        if self.strict and (lost := self._made.lost(self.snapshot.home, *kinds)):
            raise RelayError(lost[0], hint=FormatError.hint)
