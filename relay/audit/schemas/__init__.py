"""Schemas of the Spark formats and of the tables that the jobs write, and their column types.

    formats.py   the formats `acomm`, `aof2`, `relay_ledger`; originals and files
    results.py   findings, counts and the tables of the jobs

Times are UTC with microseconds, or have their unit in the name. Enums are stored by name. Ids,
sizes and durations that a format stores as u64 are ``decimal(20,0)``: a bigint ends at 2^63-1. A
time after the year 9999 is NULL. Each column has a comment, which ``DESCRIBE`` shows.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from relay.base.errors import RelayError

TEXT, NUMBER, TIME, FLAG = StringType(), LongType(), TimestampType(), BooleanType()
U64, BYTES, FLOAT = DecimalType(20, 0), BinaryType(), DoubleType()
TEXTS, WORDS = MapType(StringType(), StringType()), ArrayType(StringType())


def always(name: str, kind: DataType, comment: str) -> StructField:
    """A column that is never NULL; the comment has unit and source."""
    return StructField(name, kind, False, {"comment": comment})


def maybe(name: str, kind: DataType, comment: str) -> StructField:
    """A column that may be NULL."""
    return StructField(name, kind, True, {"comment": comment})


def subset(schema: StructType, names: Iterable[str], what: str) -> StructType:
    """Choose columns of a schema, in this order. Errors: RelayError for an unknown name."""
    known = {field.name: field for field in schema}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise RelayError(f"unknown column {name} of {what}: expected one of {', '.join(known)}")
    return StructType([known[name] for name in wanted])


def arrow_table(rows: Iterable[tuple[object, ...]], schema: StructType) -> pa.Table:
    """Make a table of rows; times in microseconds, or with a time zone."""
    arrow = to_arrow_schema(schema, timezone="UTC")
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(values, f.type) for values, f in zip(columns, arrow, strict=True)]
    return pa.Table.from_arrays(arrays, schema=arrow)


def conform(frame: DataFrame, schema: StructType) -> DataFrame:
    """Give a frame exactly the columns of ``schema``, in its order and of its types."""
    return frame.select(*[F.col(field.name).cast(field.dataType) for field in schema])


def check_columns(asked: StructType, known: StructType, what: str) -> None:
    """Check that a requested schema has known columns of the right types. Errors: RelayError."""
    for field, ours in zip(asked, subset(known, asked.names, what), strict=True):
        if field.dataType.simpleString() != ours.dataType.simpleString():
            raise RelayError(
                f"column {field.name} of {what}: expected {ours.dataType.simpleString()}, "
                f"got {field.dataType.simpleString()}"
            )
