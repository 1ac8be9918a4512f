"""The parts of a job: its tables, counts and findings, and helpers that jobs share.

A job's functions are pure, DataFrame in and DataFrame out; time comes in as an argument. Its
tables are written once, and findings are computed from the written tables. Counts and the rows to
print are read from the files, without Spark. A job that is ``plain`` needs no Spark at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.dataset import Dataset
from pyspark.sql import DataFrame

from relay.audit.jobs.sql_files import Header
from relay.audit.lake_tables import Inputs
from relay.audit.snapshot import HomeSnapshot

Tables = Mapping[str, DataFrame]
Written = Mapping[str, Dataset]  # the same tables, as they were written
Plain = Mapping[str, pa.Table]  # the same made without Spark, and the findings
Rows = list[dict[str, Any]]
FINDINGS = "findings"
ASCENDING, DESCENDING = "ascending", "descending"
DAY_S = 86_400


@dataclass(frozen=True)
class AuditJob:
    """One audit. Its first table has its name; others begin with it, as ``latency_slowest``."""

    name: str  # on the command line, and the folder of its first table
    header: Header  # of its SQL file: what it is for, and the classes that are findings
    tables: Mapping[str, pa.Schema]  # folder -> schema
    counts: Callable[[Written], dict[str, int]]
    make: Callable[[Inputs], Tables] | None = None  # None: it is plain
    plain: Callable[[HomeSnapshot], Plain] | None = None
    # From its tables as written, with the columns FINDING; None: there are none.
    findings: Callable[[Inputs], DataFrame | None] | None = None
    shown: Callable[[Written], Rows] | None = None  # the rows to print
    source: str = ""  # the file of an own check
    reads_kept: bool = False  # it reads store or journal, where rows may be missing


def count_by(
    rows: Dataset, column: str = "class", where: pc.Expression | None = None
) -> dict[str, int]:
    """Count the rows of each value of the column, sorted by value."""
    values = rows.to_table(columns=[column], filter=where)[column].value_counts()
    return dict(sorted((str(pair["values"]), pair["counts"].as_py()) for pair in values))


def sums(rows: Dataset, *names: str) -> dict[str, int]:
    """Sum these columns; 0 for no rows."""
    table = rows.to_table(columns=list(names))
    return {name: pc.sum(table[name], min_count=0).as_py() for name in names}


def first_rows(
    rows: Dataset, order: dict[str, str], columns: Iterable[str] = (), limit: int | None = None
) -> Rows:
    """Return the first rows, these columns or all; ``order``: column -> ASCENDING or DESCENDING."""
    keys = rows.to_table(columns=list(order))
    indices = pc.sort_indices(keys, sort_keys=list(order.items()))[:limit]
    first: Rows = rows.take(indices, columns=list(columns) or None).to_pylist()
    return first
