"""`relay audit` in this process, and the tables that it writes, read without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from click.testing import CliRunner, Result

from relay.cli import audit as command


def relay_audit(*arguments: str, home: str | None = None) -> Result:
    """The command group, as the root group calls it; ``home`` is the root's option."""
    result = CliRunner().invoke(command.audit, list(arguments), obj={"home": home})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def parquet(folder: Path) -> list[dict[str, Any]]:
    """Rows of a table, read without Spark."""
    return ds.dataset(folder, format="parquet", partitioning="hive").to_table().to_pylist()
