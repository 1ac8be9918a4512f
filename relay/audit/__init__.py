"""Audits: Spark jobs over what a relay has kept, its ledger and its store files.

Nothing here changes a home, and no reader holds the daemon up. Only this package imports
pyspark and pyarrow, which come with the extra ``audit``.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

__all__ = ["lower_priority", "register", "tables"]

NICE_VARIABLE = "AGENT_RELAY_AUDIT_NICE"
NICE = 19  # of 19: a relay that delivers comes first, and the audit has the rest


def register(spark: Any) -> None:
    """Register the formats of the audits in a Spark session; idempotent."""
    from relay.audit import formats  # only here: who extracts does not load Spark

    formats.register(spark)


def tables(spark: Any, lake: str, *names: str) -> dict[str, Any]:
    """The tables of a lake as DataFrames and views; see lake_tables.py."""
    from relay.audit import lake_tables

    return lake_tables.tables(spark, lake, *names)


def lower_priority() -> None:
    """Let everything else on the machine go before this process, its JVM and its workers.

    For commands: the priority is not raised again.
    """
    wanted = os.environ.get(NICE_VARIABLE, "")
    nice = int(wanted) if wanted.isdecimal() else NICE
    with contextlib.suppress(OSError):
        os.nice(max(0, nice - os.nice(0)))
