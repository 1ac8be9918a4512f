"""Rows of a data source, planned and read as Spark asks it to, without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from relay.audit.formats import subset


def rows_of(
    source: type[DataSource], path: str | None, columns: Iterable[str] = (), **options: str
) -> list[dict[str, Any]]:
    """The rows of all partitions, in their order; all columns, or these."""
    made = source(options if path is None else {"path": path, **options})
    schema = made.schema()
    assert isinstance(schema, StructType)
    reader = made.reader(subset(schema, columns, "the source") if columns else schema)
    batches: list[pa.RecordBatch] = []
    for partition in reader.partitions():
        batches += reader.read(partition)
    return [row for batch in batches for row in batch.to_pylist()]
