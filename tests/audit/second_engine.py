"""Jobs in SQL run by another engine: DuckDB needs a hundredth of the time of Spark.

``test_second_engine`` shows that both say the same. What a job decides is shown by this one.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import sqlglot
from pyarrow.dataset import dataset

from relay.audit import lake_columns
from relay.audit.extract import update
from relay.audit.jobs import JOBS, sql_files
from relay.audit.jobs.sql_files import (
    BEFORE,
    FINDINGS,
    LOST,
    SHARED,
    WARNING,
    Statement,
    job_header,
)
from relay.audit.jobs.sql_jobs import SQL_JOBS, may_find
from relay.audit.lake import open_lake
from relay.audit.lake_columns import arrow_table
from relay.audit.snapshot import HomeSnapshot

Rows = list[dict[str, Any]]
SQL_NAMES = [job.name for job in SQL_JOBS]
# What a group of so few values is exact in; and a name that the translation leaves.
SAME = {"APPROX_QUANTILE": "QUANTILE_DISC", "TIMESTAMP_MICROS": "MAKE_TIMESTAMP"}
NAMED = ("message_id", "agent", "route", "path")
TIMES = ("grace_us", "observed_until_us", "recent_since_us", "snapshot_us")


class Said(NamedTuple):
    """What a job says."""

    tables: dict[str, Rows]
    findings: Rows  # check, severity, message_id, agent, route, path, detail
    counts: dict[str, int]
    shown: Rows  # of its tables, those that are printed

    @property
    def found(self) -> list[tuple[str, str, str | None, str | None]]:
        """(check, severity, message id, agent) of each finding, in order."""
        rows = [(r["check"], r["severity"], r["message_id"], r["agent"]) for r in self.findings]
        return sorted(rows, key=str)

    @property
    def checks(self) -> dict[str, set[str]]:
        """Check, without its job -> message ids; of files and days, names."""
        found: dict[str, set[str]] = {}
        for row in self.findings:
            name = row["message_id"] or row["path"] or row["detail"].get("day")
            found.setdefault(row["check"].partition(".")[2], set()).add(name)
        return found


class SecondEngine:
    """The lake of a home, extracted into ``folder``, and the jobs that read it."""

    def __init__(self, snapshot: HomeSnapshot, folder: Path, *, full: bool = False) -> None:
        self._db = duckdb.connect()
        lake = open_lake(str(folder))
        self.made, _ = made, _ = update(lake, "home", snapshot, full=full)
        lost = sum(len(part.lost) for part in made.parts)
        self._times = {**sql_files.times(snapshot), LOST: lost}
        for table, columns in lake_columns.TABLES.items():
            files = [folder / one.path for one in made.files() if one.table == table]
            rows = [pq.ParquetFile(file).read().cast(columns) for file in files]
            self._add(table, pa.concat_tables(rows) if rows else columns.empty_table())
        for statement in sql_files.statements(SHARED):
            self._make(SHARED, statement)

    def close(self) -> None:
        """Give back its memory."""
        self._db.close()

    def run(self, job: str, before: Said | None = None) -> Said:
        """Make the tables and the findings of a job; ``before``: an earlier run."""
        parts = sql_files.statements(job)
        for name, schema in JOBS[job].tables.items():
            earlier = before.tables[name] if before is not None else []
            former = arrow_table([tuple(row.values()) for row in earlier], schema)
            self._add(f"{name}{BEFORE}", former)
        for statement in parts:
            if statement.kind != FINDINGS:
                self._make(job, statement)
        made = {name: self._table(name, schema) for name, schema in JOBS[job].tables.items()}
        tables = {name: in_utc(table.to_pylist()) for name, table in made.items()}
        written = {name: dataset(table) for name, table in made.items()}
        found: Rows = []
        for statement in (one for one in parts if one.kind == FINDINGS):
            rows = list(self._found(job, statement))
            assert not rows or may_find(job, statement, written)
            found += rows
        shown = JOBS[job].shown
        return Said(tables, found, JOBS[job].counts(written), shown(written) if shown else [])

    def _table(self, name: str, schema: pa.Schema) -> pa.Table:
        columns = ", ".join(f'"{one}"' for one in schema.names)
        rows = self._db.sql(f"SELECT {columns} FROM {name}").to_arrow_table()
        return rows.cast(schema)

    def _found(self, job: str, statement: Statement) -> Iterator[dict[str, Any]]:
        checks = job_header(job).checks
        for row in in_utc(self._make(job, statement._replace(name="found"))):
            name = statement.name
            if name == "class":
                name = row.pop("class")
            severity = checks[name].severity if name in checks else WARNING
            facts = {one: row.pop(one, None) for one in NAMED}
            detail = {key: value for key, value in row.items() if value is not None}
            yield {"check": f"{job}.{name}", "severity": severity, **facts, "detail": detail}

    def _make(self, job: str, statement: Statement) -> Rows:
        """Run a statement; what comes out can be read by those below it."""
        sql = translated(job, statement.sql)
        named = {name: value for name, value in self._times.items() if f"${name}" in sql}
        self._db.execute(f"CREATE OR REPLACE TABLE {statement.name} AS {sql}", named)
        rows = self._db.execute(f"SELECT * FROM {statement.name}")
        names = [column[0] for column in rows.description]
        return [dict(zip(names, row, strict=True)) for row in rows.fetchall()]

    def _add(self, name: str, rows: pa.Table) -> None:
        """Make a table; times are without a zone."""
        fields = [
            pa.field(one.name, pa.timestamp("us") if pa.types.is_timestamp(one.type) else one.type)
            for one in rows.schema
        ]
        self._db.register("given", rows.cast(pa.schema(fields)))
        self._db.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM given")
        self._db.unregister("given")


def says(job: str, snapshot: HomeSnapshot, before: Said | None = None) -> Said:
    """What a job says of a home, compared with an earlier run."""
    made = SecondEngine(snapshot, Path(snapshot.folder) / "lake")
    with contextlib.closing(made) as engine:
        return engine.run(job, before)


@functools.cache
def translated(job: str, sql: str) -> str:
    """A statement of Spark's in the other engine's words; the values are parameters."""
    named = {name: f":{name}" for name in (*TIMES, LOST)}
    (found,) = sqlglot.transpile(
        sql_files.with_values(job, sql, named),
        read="spark",
        write="duckdb",
        unsupported_level=sqlglot.ErrorLevel.IGNORE,
    )
    return re.sub("|".join(SAME), lambda match: SAME[match[0]], found)


def in_utc(rows: Rows) -> Rows:
    """Rows with their times in UTC."""
    return [
        {k: v.replace(tzinfo=UTC) if isinstance(v, datetime) else v for k, v in row.items()}
        for row in rows
    ]
