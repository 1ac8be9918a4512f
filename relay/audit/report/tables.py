"""Rows of a run's tables for its report, and their values as text: both bounded.

A file is read batch by batch, and what is kept of it is a number of rows that is known before: the
first, the largest, the first of each group, or sums by a few columns. Values are shown as a person
reads them, thousands divided and times in UTC; the template escapes the text.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from relay.audit.summary import is_byte_count
from relay.base.text import format_size

BATCH_ROWS = 32_768

Row = dict[str, Any]


class Table:
    """One table of a run: a folder of Parquet files, as Spark wrote it."""

    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self._files = ds.dataset(os.path.join(folder, name), format="parquet")
        self.columns: list[str] = self._files.schema.names
        self.count: int = self._files.count_rows()

    def has(self, *columns: str) -> bool:
        """Return True when it has all of these columns."""
        return set(columns) <= set(self.columns)

    def head(self, most: int) -> list[Row]:
        """Read the first rows."""
        rows: list[Row] = self._files.head(most, batch_size=BATCH_ROWS).to_pylist()
        return rows

    def largest(self, by: str, most: int) -> list[Row]:
        """Read the rows with the largest values of a column, largest first, NULL last."""
        kept: pa.Table | None = None
        for batch in self._batches():
            together = batch if kept is None else pa.concat_tables([kept, batch])
            order = [(by, "descending")]
            kept = together.take(pc.sort_indices(together, sort_keys=order)[:most])
        return [] if kept is None else kept.to_pylist()

    def first_of_each(self, column: str, most: int) -> dict[str, list[Row]]:
        """Read up to ``most`` rows of each value of a column that has few values."""
        found: dict[str, list[Row]] = {}
        for batch in self._batches():
            for value in pc.unique(batch[column]).to_pylist():
                rows = found.setdefault(str(value), [])
                if len(rows) < most:
                    some = batch.filter(pc.equal(batch[column], value)).slice(0, most - len(rows))
                    rows.extend(some.to_pylist())
        return found

    def _batches(self) -> Iterator[pa.Table]:
        for batch in self._files.to_batches(batch_size=BATCH_ROWS):
            if batch.num_rows:
                yield pa.Table.from_batches([batch])


def tables_in(folder: str, names: Iterable[str]) -> dict[str, Table]:
    """Open those of the tables that exist."""
    return {
        name: Table(folder, name) for name in names if os.path.isdir(os.path.join(folder, name))
    }


def findings_of(folder: str, job: str, most: int) -> dict[str, list[Row]]:
    """Read up to ``most`` findings of each check of a job."""
    path = os.path.join(folder, "findings")
    if not os.path.isdir(os.path.join(path, f"job={job}")):
        return {}
    return Table(path, f"job={job}").first_of_each("check", most)


MOST_TEXT = 160  # characters of a cell
MOST_PAIRS = 600  # characters of the details together
NOTHING = "–"
# A column's unit, by the end of its name.
UNITS = (("_ms", "ms"), ("_ns", "ns"), ("_s", "s"), ("_percent", "%"))
_TO_MS = {"ms": 1.0, "ns": 1e-6, "s": 1e3}
# unit, its milliseconds, and from where on the next is used
_DURATIONS = (("ms", 1.0, 1e3), ("s", 1e3, 6e4), ("min", 6e4, 3.6e6), ("h", 3.6e6, 8.64e7))
_OTHER = re.compile(r"[^A-Za-z0-9_.-]")


def cell(value: object, name: str = "") -> str:
    """Show a value as text of bounded length, durations and bytes by the column's name."""
    measured = _measured(value, name)
    if measured:
        return measured
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) < 1e15 else f"{value:.3g}"
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return shortened(value[:MOST_TEXT].hex())
    if isinstance(value, Mapping):
        return shortened("; ".join(f"{name}: {of}" for name, of in value.items()), MOST_PAIRS)
    if isinstance(value, list | tuple):
        return shortened(_pairs(value), MOST_PAIRS)
    return shortened(str(value))


def moment(value: datetime) -> str:
    """``2026-01-31 09:30:00Z``, with what there is below a second."""
    text = value.replace(tzinfo=None).isoformat(sep=" ")
    return (text.rstrip("0") if "." in text else text) + "Z"


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """Put the text on one line, shortened in its middle; the page escapes what cannot be seen.

    The end stays: a path's file and offset stand there.
    """
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]}…{line[-(most // 2 - 1) :]}"


def _measured(value: object, name: str) -> str:
    """Show a duration or a number of bytes, "" for anything else. Details have both as text."""
    unit = unit_of(name)
    if (unit not in _TO_MS and unit != "bytes") or isinstance(value, bool):
        return ""
    try:
        number = float(str(value))
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return format_size(number) if unit == "bytes" else duration_ms(number * _TO_MS[unit])


def duration_ms(value: float) -> str:
    """``0.5 ms``, ``850 ms``, ``1.2 s``, ``3 min``, ``2 h``, ``10 d``."""
    unit, length = next(
        ((unit, length) for unit, length, most in _DURATIONS if abs(value) < most), ("d", 8.64e7)
    )
    digits = f"{value / length:,.1f}" if abs(value / length) < 100 else f"{value / length:,.0f}"
    return f"{digits.removesuffix('.0')} {unit}" if abs(value) >= 0.1 else f"{value:.2g} ms"


def unit_of(column: str) -> str:
    """Return the unit in a column's name, or ""; bytes may be in its middle: ``bytes_per_day``."""
    if is_byte_count(column):
        return "bytes"
    return next((unit for ending, unit in UNITS if column.endswith(ending)), "")


def anchor_id(*parts: str) -> str:
    """Make the id of an anchor."""
    return "-".join(_OTHER.sub("_", part) for part in parts)


def is_number(value: object) -> bool:
    """Return True for values that are aligned to the right."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pairs(value: Iterable[object]) -> str:
    """Show a list, or a map, which Arrow gives as a list of pairs."""
    shown = [
        f"{str(part[0]).replace('_', ' ')}: {cell(part[1], str(part[0]))}"
        if isinstance(part, tuple) and len(part) == 2
        else str(part)
        for part in value
    ]
    return "; ".join(shown)
