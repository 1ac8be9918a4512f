"""The parts of a job: its tables, counts and findings, and helpers that jobs share.

A job's functions are pure, DataFrame in and DataFrame out; time comes in as an argument. Its
tables are written once, and findings are computed from the written tables. Counts and the rows to
print are read from the files, without Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow.compute as pc
from pyarrow.dataset import Dataset
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from relay.audit.inputs import Inputs
from relay.audit.schemas import conform, results

ERROR, WARNING = "error", "warning"
Tables = Mapping[str, DataFrame]
Written = Mapping[str, Dataset]  # the same tables, as they were written
Rows = list[dict[str, Any]]
ASCENDING, DESCENDING = "ascending", "descending"


@dataclass(frozen=True)
class AuditJob:
    """One audit. Its first table has its name; others begin with it, as ``latency_slowest``."""

    name: str  # on the command line, and the folder of its first table
    description: str  # its purpose, one line
    tables: Mapping[str, StructType]  # folder -> schema
    make: Callable[[Inputs], Tables]
    counts: Callable[[Written], dict[str, int]]
    findings: Callable[[Tables, datetime], DataFrame] | None = None  # -> results.FINDING
    checks: tuple[str, ...] = ()  # the findings it can have, without its name before them
    shown: Callable[[Written], Rows] | None = None  # the rows to print
    source: str = ""  # the file of an own check
    advice: str = ""  # of an own check


def make_findings(
    rows: DataFrame,
    check: str | Column,
    severity: str | Column,
    observed_at: datetime,
    *,
    message_id: str | None = None,
    agent: str | None = None,
    route: str | None = None,
    path: str | None = None,
    detail: Iterable[str] = (),
) -> DataFrame:
    """Make a finding of each of these rows: results.FINDING.

    ``check`` is ``job.class``, ``severity`` ERROR or WARNING; ``message_id``, ``agent``, ``route``
    and ``path`` name columns of ``rows``, and so does ``detail``, where NULLs are left out.
    """
    named = {"message_id": message_id, "agent": agent, "route": route, "path": path}
    return conform(
        rows.select(
            _value(check).alias("check"),
            _value(severity).alias("severity"),
            *[
                (F.lit(None) if name is None else F.col(name)).alias(to)
                for to, name in named.items()
            ],
            F.lit(observed_at).alias("observed_at"),
            _detail(*detail).alias("detail"),
        ),
        results.FINDING,
    )


def count_by(
    rows: Dataset, column: str = "class", where: pc.Expression | None = None
) -> dict[str, int]:
    """Count the rows of each value of the column, sorted by value."""
    values = rows.to_table(columns=[column], filter=where)[column].value_counts()
    return dict(sorted((str(one["values"]), one["counts"].as_py()) for one in values))


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


def lookup(words: Mapping[str, str | None], key: Column) -> Column:
    """Map ``key`` to a word; NULL for an unknown key."""
    return F.create_map(*[F.lit(part) for pair in words.items() for part in pair])[key]


def named_values(field: str, **of: str | Column) -> Column:
    """Name a field with its values by source: ``size: ledger 100, original 101``.

    ``of``: source -> column, or its name; one that is NULL is left out.
    """
    columns = {
        source: F.col(value) if isinstance(value, str) else value for source, value in of.items()
    }
    each = [F.concat(F.lit(f"{name} "), value.cast("string")) for name, value in columns.items()]
    return F.concat(F.lit(f"{field}: "), F.concat_ws(", ", *each))


def _value(given: str | Column) -> Column:
    return F.lit(given) if isinstance(given, str) else given


def _detail(*names: str) -> Column:
    """Make a map of the columns that are not NULL."""
    if not names:
        return F.create_map().cast("map<string,string>")
    entries = [part for name in names for part in (F.lit(name), F.col(name).cast("string"))]
    return F.map_filter(F.create_map(*entries), lambda _, value: value.isNotNull())


DAY_S = 86_400
HOUR_S = 3_600
_NS_PER_US = 1000
_US_PER_MS = 1000.0
_US_PER_S = 1_000_000


def instant(at_ns: int) -> Column:
    """Make a timestamp of Unix nanoseconds; it has microseconds."""
    return F.timestamp_micros(F.lit(at_ns // _NS_PER_US))


def elapsed_ms(begin: str | Column, end: str | Column) -> Column:
    """Milliseconds between; negative when the clock was set back, NULL where an end is NULL."""
    return (F.unix_micros(end) - F.unix_micros(begin)) / _US_PER_MS


def elapsed_s(begin: str | Column, end: str | Column) -> Column:
    """Whole seconds between, rounded down; NULL where an end is NULL."""
    return F.floor((F.unix_micros(end) - F.unix_micros(begin)) / _US_PER_S)


def hour_of(at: str | Column) -> Column:
    """Truncate to the hour, UTC."""
    return F.date_trunc("hour", at)
