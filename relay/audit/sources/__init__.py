"""The files of a home as Arrow batches, and the Spark formats over them.

ledger_rows, store_files, journal_files, originals, home_files   read; they need no Spark
*_source                                                         Spark's data sources
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from relay.base.errors import RelayError

MODES = ("failfast", "permissive")


def register(spark: Any) -> None:
    """Register the formats ``acomm``, ``aof2`` and ``relay_ledger`` in a session; idempotent.

    Where the session has workers on other machines, agent-relay must be installed there.
    """
    # Only here: who reads without Spark does not import it.
    from relay.audit.sources.acomm_source import AcommSource
    from relay.audit.sources.journal_source import Aof2Source
    from relay.audit.sources.ledger_source import LedgerSource

    for source in (AcommSource, Aof2Source, LedgerSource):
        spark.dataSource.register(source)


def paths_of(options: Mapping[str, str], expected: str) -> list[str]:
    """Return the paths given to ``load``. Errors: RelayError without any."""
    # Spark gives one path as it is, and several as a JSON list.
    if "paths" in options:
        return list(json.loads(options["paths"]))
    if "path" in options:
        return [options["path"]]
    raise RelayError(f"load() needs a path: {expected}")


def is_permissive(options: Mapping[str, str]) -> bool:
    """Read the option ``mode``. Errors: RelayError for another word."""
    mode = options.get("mode", MODES[0]).lower()
    if mode not in MODES:
        raise RelayError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    return mode == MODES[1]
