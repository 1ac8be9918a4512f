"""Columns of the sources: store files, journal, ledger, and the files of a home's folders."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructType

from relay.audit import lake_columns
from relay.audit.schemas import BYTES, TEXTS, always, maybe


def of_lake(columns: pa.Schema, *without: str) -> StructType:
    """Return the columns of a table of the lake but for ``without``, which only the lake has."""
    return StructType(
        [
            (maybe if column.nullable else always)(
                column.name,
                from_arrow_type(column.type, prefer_timestamp_ntz=False),
                lake_columns.comment_of(column),
            )
            for column in columns
            if column.name not in without
        ]
    )


STORED_MESSAGE = StructType(
    [
        *of_lake(lake_columns.STORE_MESSAGES, "bucket"),
        always("content", BYTES, "UTF-8, or ciphertext when sealed"),
        maybe("metadata", TEXTS, "values other than text are written as JSON"),
        maybe("signature", BYTES, "Ed25519"),
    ]
)

STORED_DELIVERY = of_lake(lake_columns.STORE_DELIVERIES, "bucket")
STORED_CHANNEL = of_lake(lake_columns.STORE_CHANNELS)
STORED_SUBSCRIPTION = of_lake(lake_columns.STORE_SUBSCRIPTIONS)

JOURNAL = of_lake(lake_columns.JOURNAL)
ORIGINAL = of_lake(lake_columns.ORIGINALS, "bucket")
KEPT_FILE = of_lake(lake_columns.FILES, "read_at")

# The tables of the format `relay_ledger`: those of schema.sql, with its columns and its order.
LEDGER = {table: of_lake(columns) for table, columns in lake_columns.LEDGER.items()}
