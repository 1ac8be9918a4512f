"""Audits: Spark jobs over what a relay has kept, its ledger and its store files.

Nothing here changes a home, and no reader holds the daemon up. Only modules below this one
import pyspark and pyarrow, which come with the extra ``agent-relay[audit]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make the formats ``acomm`` and ``relay_ledger`` known to a session; again is harmless.

    Where the session has workers on other machines, agent-relay must be installed there.
    """
    from relay.audit.acomm_source import AcommSource
    from relay.audit.ledger_source import LedgerSource

    spark.dataSource.register(AcommSource)
    spark.dataSource.register(LedgerSource)
