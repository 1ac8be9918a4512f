"""Parquet files as Spark DataFrames, and the tables of a lake as views."""

from __future__ import annotations

import re
from collections import defaultdict

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from relay.audit import lake_columns
from relay.audit.lake import home_id, homes_of, open_lake, read_manifest
from relay.audit.lake_columns import TEXT, always, comment_of
from relay.audit.sources.bucket_files import is_remote
from relay.audit.temp_folders import private_folder
from relay.base.errors import RelayError

HOME = always("home", TEXT, "16 hex: the home that the row is of")
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
        found[table] = read_parquet(spark, columns.append(HOME), *paths[table], base=base)
        found[table].createOrReplaceTempView(table)
    return found
