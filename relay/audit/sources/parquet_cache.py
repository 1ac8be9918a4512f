"""Tables of Python sources, cached as Parquet, or read by Spark directly.

Spark plans a Python source with three processes, a second or two for each of some twenty tables,
and converts its rows one by one. A cached table is written by Arrow, in the workers, and read by
Spark's own reader of Parquet: a third of the work. The driver writes the tables of a small home
itself; of a large one, and on a cluster, no row passes through it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.base.errors import NoRoom, RelayError

# Ledger and store files of a home that is small: 30,000 messages or so.
SMALL_BYTES = 32 << 20
GROUP_BYTES = 16 << 20  # of a row group: what a worker holds beside its batch
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UnitsPartition(InputPartition):  # type: ignore[misc]
    """Some of the units that a source's ``plan`` lists."""

    def __init__(self, units: list[Any]) -> None:
        self.units = units


class ParquetCache(NamedTuple):
    """The folder of a cached table, and the process that writes it."""

    folder: str  # empty, and private to the run; seen by all workers
    on_driver: bool  # the driver, since there is little


def batch_of(
    rows: Sequence[tuple[Any, ...]], names: Sequence[str], schema: pa.Schema
) -> pa.RecordBatch:
    """Make a batch of the columns of ``schema``; ``names`` are those of the rows' values."""
    wanted = [(names.index(field.name), field.type) for field in schema]
    arrays = [pa.array([row[at] for row in rows], kind) for at, kind in wanted]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def read(
    spark: SparkSession,
    source: type[DataSource],
    schema: StructType,
    options: Mapping[str, str],
    cache: ParquetCache | None = None,
) -> DataFrame:
    """Read columns of a source: at once into the cache, or whenever the table is used.

    Errors: of the source, at once with a cache; RelayError for a file that cannot be read,
    NoRoom for one that cannot be written.
    """
    if cache is None:
        return spark.read.format(source.name()).schema(schema).options(**options).load()
    reader = source(dict(options)).reader(schema)
    write = functools.partial(_write, reader, to_arrow_schema(schema, timezone="UTC"), cache.folder)
    parts = list(enumerate(reader.partitions()))
    if cache.on_driver:
        for part in parts:
            write(part)
    elif parts:
        spark.sparkContext.parallelize(parts, len(parts)).foreach(write)
    frame = spark.read.schema(schema).parquet(cache.folder)
    return frame.coalesce(1) if cache.on_driver else frame  # so little is joined in one task


def _write(
    reader: DataSourceReader, schema: pa.Schema, folder: str, part: tuple[int, InputPartition]
) -> None:
    """Write one partition's rows. An unfinished file has a name that Spark ignores."""
    number, partition = part
    path = os.path.join(folder, f"part-{number:05}.parquet")
    unfinished = os.path.join(folder, f"_{os.getpid()}-{number:05}")
    held: list[pa.RecordBatch] = []
    try:
        with pq.ParquetWriter(unfinished, schema, compression="snappy") as file:
            for batch in reader.read(partition):
                held.append(batch)
                if sum(one.nbytes for one in held) >= GROUP_BYTES:
                    file.write_table(pa.Table.from_batches(held, schema))
                    held = []
            file.write_table(pa.Table.from_batches(held, schema))
        os.replace(unfinished, path)
    except OSError as exc:
        name = exc.filename or path  # Arrow names no file when the disk is full
        if exc.errno in _FULL:
            raise NoRoom(f"{name} cannot be written: {os.strerror(exc.errno)}") from exc
        raise RelayError(f"{name}: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(FileNotFoundError):  # leave the room to others
            os.unlink(unfinished)
