"""Columns as Spark has them: of its formats `acomm`, `aof2` and `relay_ledger`, and of results.

Times are UTC with microseconds, or have their unit in the name. Enums are stored by name. Ids,
sizes and durations that a format stores as u64 are ``decimal(20,0)``: a bigint ends at 2^63-1. A
time after the year 9999 is NULL. Each column has a comment, which ``DESCRIBE`` shows.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from relay.audit import lake_columns
from relay.audit.lake_columns import BYTES, TEXTS, always, comment_of, maybe
from relay.base.errors import RelayError


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


STORED_MESSAGE = StructType(
    [
        *in_spark(lake_columns.STORE_MESSAGES, "bucket"),
        *in_spark(
            pa.schema(
                [
                    always("content", BYTES, "UTF-8, or ciphertext when sealed"),
                    maybe("metadata", TEXTS, "values other than text are written as JSON"),
                    maybe("signature", BYTES, "Ed25519"),
                ]
            )
        ),
    ]
)
STORED_DELIVERY = in_spark(lake_columns.STORE_DELIVERIES, "bucket")
STORED_CHANNEL = in_spark(lake_columns.STORE_CHANNELS)
STORED_SUBSCRIPTION = in_spark(lake_columns.STORE_SUBSCRIPTIONS)
JOURNAL = in_spark(lake_columns.JOURNAL)
# The tables of the format `relay_ledger`: those of schema.sql, with its columns and its order.
LEDGER = {table: in_spark(columns) for table, columns in lake_columns.LEDGER.items()}


def subset(schema: StructType, names: Iterable[str], what: str) -> StructType:
    """Choose columns of a schema, in this order. Errors: RelayError for an unknown name."""
    known = {field.name: field for field in schema}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise RelayError(f"unknown column {name} of {what}: expected one of {', '.join(known)}")
    return StructType([known[name] for name in wanted])


def conform(frame: DataFrame, columns: pa.Schema) -> DataFrame:
    """Give a frame exactly these columns, in their order and of their types."""
    return frame.select(*[F.col(field.name).cast(field.dataType) for field in in_spark(columns)])


def check_columns(asked: StructType, known: StructType, what: str) -> None:
    """Check that a requested schema has known columns of the right types. Errors: RelayError."""
    for field, ours in zip(asked, subset(known, asked.names, what), strict=True):
        if field.dataType.simpleString() != ours.dataType.simpleString():
            raise RelayError(
                f"column {field.name} of {what}: expected {ours.dataType.simpleString()}, "
                f"got {field.dataType.simpleString()}"
            )
