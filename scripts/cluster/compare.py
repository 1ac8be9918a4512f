"""Compare the tables of two runs row by row, in any order.

Percentiles are approximate in Spark, and depend on how rows were divided: numbers with a point
may differ by one in a hundred. How full the disk is, each run saw at a time of its own. Everything
else is equal, or it is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds

CLOSE = 0.01
SHOWN = 3
# What a run measures on the disk while others write there, and what it reckons from that.
OF_THE_MOMENT = frozenset(("free_bytes", "full_in_days", "full_in_days_kept"))


class Compared(NamedTuple):
    """Comparison of one table."""

    table: str
    rows: int
    differences: list[str]  # the first few, a line each


def tables(out: Path) -> list[str]:
    """Tables of a run, by their folders."""
    return sorted({str(p.parent.relative_to(out)) for p in out.rglob("*.parquet")})


def compare(ours: Path, theirs: Path) -> Iterator[Compared]:
    """Compare every table that either run has."""
    for name in sorted({*tables(ours), *tables(theirs)}):
        first, second = (_rows(out / name) for out in (ours, theirs))
        yield Compared(name, len(first), list(_differences(first, second)))


def _rows(folder: Path) -> list[tuple[object, ...]]:
    """Rows of a table, in an order that does not depend on floating-point numbers."""
    if not folder.is_dir():
        return []
    table = ds.dataset(folder, format="parquet").to_table()
    asked = set(table.column_names) - OF_THE_MOMENT
    names = sorted(asked, key=lambda n: (pa.types.is_floating(table[n].type), n))
    return sorted(zip(*[table[name].to_pylist() for name in names], strict=True), key=repr)


def _differences(
    first: list[tuple[object, ...]], second: list[tuple[object, ...]]
) -> Iterator[str]:
    if len(first) != len(second):
        yield f"{len(first)} rows and {len(second)}"
        return
    wrong = ((a, b) for a, b in zip(first, second, strict=True) if not _same(a, b))
    for number, (a, b) in enumerate(wrong):
        if number == SHOWN:
            yield "and more"
            return
        yield f"{a!r:.300} and {b!r:.300}"


def _same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= CLOSE * max(abs(a), abs(b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
