"""How a source's rows become a table: read by Spark when it is used, or first kept as Parquet.

Spark plans a source of Python's by three processes, a second or two for each of some twenty tables,
and turns its rows into the JVM's own one by one. A table that a run keeps is written by Arrow, in
the workers, and read by Spark's own reader of Parquet: a third of the work. The little that a small
home holds is written by the process that plans; of a large one, and on a cluster, no row passes
through it.
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
    """Where a table is kept, and who reads it."""

    folder: str  # empty, and private to the run; seen by all workers
    on_driver: bool  # this process, for there is little


def batch_of(
    rows: Sequence[tuple[Any, ...]], names: Sequence[str], schema: pa.Schema
) -> pa.RecordBatch:
    """The columns of ``schema``, of rows whose values have these names."""
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
    """These columns of a source: read at once and kept, or whenever the table is used.

    Errors: of the source, at once where it is kept; RelayError for a file that cannot be read,
    NoRoom for one that cannot be kept.
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
    return spark.read.schema(schema).parquet(cache.folder)


def _write(
    reader: DataSourceReader, schema: pa.Schema, folder: str, part: tuple[int, InputPartition]
) -> None:
    """Write one partition's rows. A file that is not whole has a name that Spark passes over."""
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
        with contextlib.suppress(FileNotFoundError):  # half a table is room for others
            os.unlink(unfinished)
