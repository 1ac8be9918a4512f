"""Jobs in SQL: the statements behind the header of a job's file, and Spark to run them.

    -- view: stages       what statements below it read: computed once, where that is more than once
    -- table: latency     a table of the job
    -- findings: slow     rows that are findings; other columns are its detail
    -- findings: class    the same of several classes: the column `class` has them

A statement reads the views above it, those of `shared.sql`, and the tables of a lake by their
names, as `ledger_messages`; TABLE_before has the rows of its table in an earlier run. No two files
give a view the same name. One of findings reads the job's tables as written. Names with a colon, as
`:recent_since_us`, are times of the run, `:lost` is how many parts of store and journal could not
be read, and `CASE class :severities END` has the severity of a class. The same files run in another
engine: tests compare the two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from importlib import resources
from typing import NamedTuple

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame

from relay.audit import result_columns
from relay.audit.header import WARNING
from relay.audit.inputs import Inputs
from relay.audit.jobs.job import Tables, Written, count_by, severities
from relay.audit.lake_columns import TABLES
from relay.audit.lake_tables import in_spark
from relay.audit.snapshot import HomeSnapshot

VIEW, TABLE, FINDINGS = "view", "table", "findings"
SHARED = "shared"  # the file of views that several jobs read
BEFORE, LOST, SEVERITIES = "_before", "lost", "severities"
_FROM = re.compile(r"\b(?:FROM|JOIN)\s+(\w+)")
_COMMENT = re.compile(r"--.*")
_PART = re.compile(r"^-- (view|table|findings): (\w+)$", re.MULTILINE)
_NAMED = ("message_id", "agent", "route", "path")  # what every finding has besides
_US_PER_S = 1_000_000
_OF_CLASS = re.compile(r"FROM (\w+) WHERE (?:\w+ AND )?class (?:= |IN \()('[^)]*?')(?:\)| |\n|$)")
_WORD = re.compile(r"\w+")
_COLON = re.compile(r":([a-z_]+)")
_CLASS = "class"  # which one, where a statement finds several
_NS_PER_US = 1000


class Statement(NamedTuple):
    """A SELECT of a job's file."""

    kind: str  # VIEW, TABLE, FINDINGS
    name: str
    sql: str

    @property
    def reads(self) -> Counter[str]:
        """The views and tables that it reads, and how often."""
        return Counter(_FROM.findall(_COMMENT.sub("", self.sql)))


@cache
def statements(job: str) -> tuple[Statement, ...]:
    """The statements of a job's file, in order."""
    text = resources.files("relay.audit.jobs").joinpath(f"{job}.sql").read_text()
    _, *parts = _PART.split(text)
    each = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return tuple(Statement(kind, name, sql.strip()) for kind, name, sql in each)


def reads_kept(job: str) -> bool:
    """True when a job reads store or journal, where rows may be missing; shared.sql does not."""
    read = {table for statement in statements(job) for table in statement.reads}
    return any(table.startswith(("store_", "journal_")) for table in read & TABLES.keys())


def times(snapshot: HomeSnapshot) -> dict[str, int]:
    """The times of a run that statements name: Unix microseconds, and one duration."""
    return {
        "grace_us": snapshot.grace_ns // _NS_PER_US,
        "observed_until_us": snapshot.observed_until_ns // _NS_PER_US,
        "recent_since_us": (snapshot.observed_until_ns - snapshot.recent_ns) // _NS_PER_US,
        "snapshot_us": snapshot.ledger.taken_ns // _NS_PER_US,
    }


def with_values(job: str, sql: str, values: Mapping[str, object]) -> str:
    """Put values in the place of names with a colon."""
    whens = [f"WHEN '{name}' THEN '{said}'" for name, said in severities(job).items()]
    known = {name: f"({value})" for name, value in values.items()}
    known[SEVERITIES] = " ".join(whens)
    return _COLON.sub(lambda match: known[match[1]], sql)


def make(job: str, inputs: Inputs) -> Tables:
    """Make the tables of a job."""
    own = [statement for statement in statements(job) if statement.kind != FINDINGS]
    made = {statement.name: _rows(job, statement, inputs) for statement in own}
    return {name: made[name] for name in result_columns.TABLES[job]}


def _rows(job: str, statement: Statement, inputs: Inputs) -> DataFrame:
    """The rows of a statement, a view for others; computed once where it is read twice."""
    schemas = result_columns.TABLES.get(job, {})
    readers = sum(reader.reads[statement.name] for reader in statements(job))

    def run() -> DataFrame:
        reads = statement.reads.keys()
        for one in statements(SHARED) if job != SHARED else ():
            if one.name in reads:
                _rows(SHARED, one, inputs)
        for table, schema in schemas.items():
            if (name := f"{table}{BEFORE}") in reads:
                inputs.view(name, partial(inputs.previous_run, table, schema))
        for table in sorted(reads & TABLES.keys()):
            inputs.view(table, partial(inputs.table, table))
        values = {**times(inputs.snapshot), LOST: len(inputs.lost)}
        sql = with_values(job, statement.sql, values)
        if statement.kind == TABLE:
            sql = _cast(sql, schemas[statement.name])
        rows = inputs.spark.sql(sql)
        is_shared = job == SHARED or readers > 1
        return rows.persist(StorageLevel.MEMORY_AND_DISK) if is_shared else rows

    return inputs.view(statement.name, run)


def _cast(sql: str, columns: pa.Schema) -> str:
    """Give a SELECT exactly these columns, in their order and of their types."""
    cast = [
        f"CAST(`{column.name}` AS {column.dataType.simpleString()}) AS `{column.name}`"
        for column in in_spark(columns)
    ]
    return f"SELECT {', '.join(cast)} FROM (\n{sql}\n)"


def found_in(job: str) -> frozenset[str]:
    """The tables that a job's findings are read from."""
    read = {
        name
        for statement in statements(job)
        if statement.kind == FINDINGS
        for name in statement.reads
    }
    return frozenset(read & result_columns.TABLES[job].keys())


def may_find(job: str, tables: Written) -> bool:
    """False when no row can be a finding: to plan what finds nothing takes as long as the rest.

    None of the tables has a row, or none of a class that the statements of findings name.
    """
    for statement in (statement for statement in statements(job) if statement.kind == FINDINGS):
        read = statement.reads.keys() & tables.keys()
        is_of_class = _OF_CLASS.search(statement.sql) if len(read) == 1 else None
        if SEVERITIES in statement.sql:
            table, names = job, set(severities(job))
        elif is_of_class and " OR " not in statement.sql:
            table, names = is_of_class[1], set(_WORD.findall(is_of_class[2]))
        else:
            if any(tables[name].count_rows() for name in read):
                return True
            continue
        if names & count_by(tables[table]).keys():
            return True
    return False


def findings(job: str) -> Callable[[Tables, datetime], DataFrame]:
    """Return the function that makes the findings of a job from its tables."""

    def make(tables: Tables, observed_at: datetime) -> DataFrame:
        spark = next(iter(tables.values())).sparkSession
        found = []
        try:
            for name, frame in tables.items():
                frame.createOrReplaceTempView(name)
            for statement in (one for one in statements(job) if one.kind == FINDINGS):
                sql = with_values(job, statement.sql, {})
                columns = spark.sql(sql).columns
                found.append(_as_findings(job, statement.name, sql, columns, observed_at))
            return spark.sql(_cast(" UNION ALL ".join(found), result_columns.FINDING))
        finally:
            for name in tables:
                spark.catalog.dropTempView(name)

    return make


def _as_findings(
    job: str, name: str, sql: str, columns: Sequence[str], observed_at: datetime
) -> str:
    """Select a finding of each row; columns that have no place are its detail."""
    several = name == _CLASS
    check = f"`{_CLASS}`" if several else f"'{name}'"
    known = with_values(job, f"CASE {check} :{SEVERITIES} END", {})
    skipped = (*_NAMED, *([_CLASS] if several else []))
    facts = ", ".join(f"'{x}', CAST(`{x}` AS STRING)" for x in columns if x not in skipped)
    observed_us = int(observed_at.timestamp() * _US_PER_S)
    named = ", ".join(f"{x if x in columns else 'NULL'} AS {x}" for x in _NAMED)
    # A class that the header lacks is a newer relay's.
    return f"""SELECT '{job}.' || {check} AS check, coalesce({known}, '{WARNING}') AS severity,
        {named}, timestamp_micros({observed_us}) AS observed_at,
        map_filter(CAST(map({facts}) AS map<string,string>), (name, value) -> value IS NOT NULL)
        AS detail
        FROM (\n{sql}\n)"""
