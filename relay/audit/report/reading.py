"""Tables of a run, read for its report: bounded, whatever a year of messages has made of them.

A file is read batch by batch, and what is kept of it is a number of rows that is known before: the
first, the largest, the first of each group, or sums by a few columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

MOST_GROUPS = 200_000  # of one aggregation; what comes behind them is left out, and said so
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
        """True when it has all of these columns."""
        return set(columns) <= set(self.columns)

    def numbers(self, *endings: str) -> list[str]:
        """Columns of numbers whose names end so."""
        return [
            field.name
            for field in self._files.schema
            if field.name.endswith(endings) and _is_number(field.type)
        ]

    def head(self, most: int) -> list[Row]:
        """The first rows."""
        rows: list[Row] = self._files.head(most, batch_size=BATCH_ROWS).to_pylist()
        return rows

    def largest(self, by: str, most: int) -> list[Row]:
        """The rows with the largest values of a column, NULL last, the largest first."""
        kept: pa.Table | None = None
        for batch in self._batches(None):
            together = batch if kept is None else pa.concat_tables([kept, batch])
            order = [(by, "descending")]
            kept = together.take(pc.sort_indices(together, sort_keys=order)[:most])
        return [] if kept is None else kept.to_pylist()

    def first_of_each(self, column: str, most: int) -> dict[str, list[Row]]:
        """Up to ``most`` rows of each value of a column that has few."""
        found: dict[str, list[Row]] = {}
        for batch in self._batches(None):
            for value in pc.unique(batch[column]).to_pylist():
                rows = found.setdefault(str(value), [])
                if len(rows) < most:
                    some = batch.filter(pc.equal(batch[column], value)).slice(0, most - len(rows))
                    rows.extend(some.to_pylist())
        return found

    def sums(self, by: Sequence[str], columns: Sequence[str]) -> list[Row]:
        """The columns summed by groups, in the order of the groups."""
        wanted = [(column, "sum") for column in columns]
        names = [*by, *columns]
        kept: pa.Table | None = None
        for batch in self._batches(names):
            together = batch if kept is None else pa.concat_tables([kept, batch])
            made = together.group_by(list(by)).aggregate(wanted)
            made = made.select([*by, *[f"{column}_sum" for column in columns]])
            kept = made.rename_columns(names).slice(0, MOST_GROUPS).cast(batch.schema)
        if kept is None:
            return []
        rows: list[Row] = kept.sort_by([(name, "ascending") for name in by]).to_pylist()
        return rows

    def _batches(self, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        chosen = list(columns) if columns is not None else None
        for batch in self._files.to_batches(columns=chosen, batch_size=BATCH_ROWS):
            if batch.num_rows:
                yield pa.Table.from_batches([batch])


def tables_in(folder: str, names: Sequence[str]) -> dict[str, Table]:
    """Those of the tables that are there."""
    return {
        name: Table(folder, name) for name in names if os.path.isdir(os.path.join(folder, name))
    }


def findings_of(folder: str, job: str, most: int) -> dict[str, list[Row]]:
    """Up to ``most`` findings of each check of a job."""
    path = os.path.join(folder, "findings")
    if not os.path.isdir(os.path.join(path, f"job={job}")):
        return {}
    return Table(path, f"job={job}").first_of_each("check", most)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
