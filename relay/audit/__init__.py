"""Audits: Spark jobs over what a relay has kept, its ledger and its store files.

Nothing here changes a home, and no reader holds the daemon up. Only this package imports
pyspark and pyarrow, which come with the extra ``audit``; ``digest`` needs neither.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register(spark: Any) -> None:
    """Register the formats of the audits in a Spark session; idempotent."""
    from relay.audit import sources  # only here: the digest starts without Spark

    sources.register(spark)
