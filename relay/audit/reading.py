"""How a source's rows become a table: read by Spark's workers, or here, where there is little.

To plan a table that Python reads, Spark starts three Python processes, however few its rows: a
second or two of a run, for each of some twenty tables. Of a small home all rows fit into the
process that plans; of a large one, and on a cluster, no row passes through it.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.errors import RelayError

# Ledger and store files of a home that is small: 30,000 messages or so.
SMALL_BYTES = 32 << 20


def read(
    spark: SparkSession,
    source: type[DataSource],
    schema: StructType,
    options: Mapping[str, str],
    *,
    here: bool = False,
) -> DataFrame:
    """These columns of a source, by workers when the table is used, or ``here`` and now.

    Errors: of the source, at once where it reads here; RelayError for a file that cannot be read.
    """
    if not here:
        return spark.read.format(source.name()).schema(schema).options(**options).load()
    reader = source(dict(options)).reader(schema)
    arrow = to_arrow_schema(schema, timezone="UTC")
    try:
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    except OSError as exc:
        raise RelayError(f"{exc.filename}: {exc.strerror}") from exc
    # Spark takes no table of no batch at all.
    batches = batches or [pa.RecordBatch.from_pylist([], schema=arrow)]
    return spark.createDataFrame(pa.Table.from_batches(batches, arrow))
