"""Spark data sources: store files, journal, ledger, originals and files of a home."""

from __future__ import annotations

from pyspark.sql import SparkSession

from relay.audit.sources.acomm_source import AcommSource
from relay.audit.sources.files_source import FilesSource
from relay.audit.sources.journal_source import Aof2Source
from relay.audit.sources.ledger_source import LedgerSource
from relay.audit.sources.originals_source import OriginalsSource


def register(spark: SparkSession) -> None:
    """Register the formats ``acomm``, ``aof2`` and ``relay_ledger`` in a session; idempotent.

    Where the session has workers on other machines, agent-relay must be installed there.
    """
    spark.dataSource.register(AcommSource)
    spark.dataSource.register(Aof2Source)
    spark.dataSource.register(LedgerSource)
    spark.dataSource.register(OriginalsSource)
    spark.dataSource.register(FilesSource)
