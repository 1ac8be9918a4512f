"""Jobs in SQL: the statements behind the header of a job's file, and Spark to run them.

    -- view: stages       what statements below it read: computed once, where that is more than once
    -- table: latency     a table of the job
    -- findings: slow     rows that are findings; other columns are its detail
    -- findings: class    the same of several classes: the column `class` has them

A statement reads the views above it, those of `shared.sql`, and the tables of a lake by their
names, as `ledger_messages`. `checks` has name and severity of the job's classes, and TABLE_before
the rows of its table in an earlier run. One of findings reads the job's tables as written.
Names with a colon, as `:recent_since_us`, are times of the run, `:lost` is how many parts of store
and journal could not be read. `:snapshot_us` is for asking whether something was before it, and for
its day; `:now_us`, the same time, for ages of rows (kept_results.py). The same files run in another
engine: tests compare the two.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import resources
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from relay.audit.header import WARNING
from relay.audit.inputs import Inputs
from relay.audit.jobs.job import Tables, Written, count_by, severities
from relay.audit.lake_columns import TABLES
from relay.audit.schemas import results
from relay.audit.schemas.formats import in_spark
from relay.audit.snapshot import HomeSnapshot

VIEW, TABLE, FINDINGS = "view", "table", "findings"
SHARED = "shared"  # the file of views that several jobs read
CHECKS, BEFORE, LOST = "checks", "_before", "lost"
_FROM = re.compile(r"\b(?:FROM|JOIN)\s+(\w+)")
_COMMENT = re.compile(r"--.*")
_PART = re.compile(r"^-- (view|table|findings): (\w+)$", re.MULTILINE)
_NAMED = ("message_id", "agent", "route", "path")  # what every finding has besides
_US_PER_S = 1_000_000
_OF_CLASS = re.compile(r"FROM (\w+) WHERE (?:\w+ AND )?class (?:= |IN \()('[^)]*?')(?:\)| |\n|$)")
_WORD = re.compile(r"\w+")
_COLON = re.compile(r":(grace_us|observed_until_us|recent_since_us|snapshot_us|now_us|lost)\b")
_CLASS = "class"  # which one, where a statement finds several
_NS_PER_US = 1000

views_lock = threading.Lock()  # jobs of a run have one session, and its views


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


def all_statements(job: str) -> list[Statement]:
    """The statements of a job's file, and those of shared.sql that they read."""
    own = statements(job)
    read = {name for statement in own for name in statement.reads}
    return [*own, *(statement for statement in statements(SHARED) if statement.name in read)]


def has_word(sql: str, word: str) -> bool:
    """True when SQL names a column."""
    return re.search(rf"\b{word}\b", sql) is not None


def reads_kept(job: str) -> bool:
    """True when a job reads store or journal, where rows may be missing."""
    read = {table for statement in all_statements(job) for table in statement.reads}
    return any(table.startswith(("store_", "journal_")) for table in read & TABLES.keys())


def times(snapshot: HomeSnapshot) -> dict[str, int]:
    """The times of a run that statements name: Unix microseconds, and one duration."""
    return {
        "grace_us": snapshot.grace_ns // _NS_PER_US,
        "observed_until_us": snapshot.observed_until_ns // _NS_PER_US,
        "recent_since_us": (snapshot.observed_until_ns - snapshot.recent_ns) // _NS_PER_US,
        "snapshot_us": snapshot.ledger.taken_ns // _NS_PER_US,
        "now_us": snapshot.ledger.taken_ns // _NS_PER_US,
    }


def make(job: str, inputs: Inputs) -> Tables:
    """Make the tables of a job."""
    made: dict[str, DataFrame] = {}
    for statement in statements(job):
        if statement.kind != FINDINGS:
            made[statement.name] = _view(job, statement, inputs, made)
    return {name: made[name] for name in results.TABLES[job]}


def shared(name: str, inputs: Inputs) -> DataFrame:
    """A view that several jobs read, computed once in a run."""
    (statement,) = (shared for shared in statements(SHARED) if shared.name == name)
    return _view(SHARED, statement, inputs, {})


def _view(
    job: str, statement: Statement, inputs: Inputs, made: Mapping[str, DataFrame]
) -> DataFrame:
    schemas = results.TABLES.get(job, {})

    def run() -> DataFrame:
        read = {name: frame for name, frame in made.items() if name in statement.reads}
        if job != SHARED:
            several = {shared.name for shared in statements(SHARED)} & statement.reads.keys()
            read |= {name: shared(name, inputs) for name in several}
        if CHECKS in statement.reads:
            read[CHECKS] = _checks(job, inputs.spark)
        for table, schema in schemas.items():
            if (name := f"{table}{BEFORE}") in statement.reads:
                read[name] = inputs.previous_run(table, schema)
        for table in sorted(statement.reads.keys() & TABLES.keys()):
            inputs.add_view(table)
        known = {**times(inputs.snapshot), LOST: len(inputs.lost)}
        sql = _COLON.sub(lambda match: f"({known[match[1]]})", statement.sql)
        if statement.kind == TABLE:
            sql = _cast(sql, schemas[statement.name])
        return _query(inputs.spark, sql, read)

    if job == SHARED or sum(reader.reads[statement.name] for reader in statements(job)) > 1:
        return inputs.cached(f"{job} {statement.name}", run)
    return run()


def _cast(sql: str, columns: pa.Schema) -> str:
    """Give a SELECT exactly these columns, in their order and of their types."""
    cast = [
        f"CAST(`{column.name}` AS {column.dataType.simpleString()}) AS `{column.name}`"
        for column in in_spark(columns)
    ]
    return f"SELECT {', '.join(cast)} FROM (\n{sql}\n)"


def _checks(job: str, spark: SparkSession) -> DataFrame:
    rows = ", ".join(f"('{name}', '{severity}')" for name, severity in severities(job).items())
    return spark.sql(f"SELECT * FROM VALUES {rows} AS checks(name, severity)").coalesce(1)


def _query(spark: SparkSession, sql: str, read: Mapping[str, DataFrame]) -> DataFrame:
    """Analyse a SELECT over the views that it names; they are needed until then."""
    with views_lock:
        try:
            for name, frame in read.items():
                frame.createOrReplaceTempView(name)
            return spark.sql(sql)
        finally:
            for name in read:
                spark.catalog.dropTempView(name)


def found_in(job: str) -> frozenset[str]:
    """The tables that a job's findings are read from."""
    read = {
        name
        for statement in statements(job)
        if statement.kind == FINDINGS
        for name in statement.reads
    }
    return frozenset(read & results.TABLES[job].keys())


def may_find(job: str, tables: Written) -> bool:
    """False when no row can be a finding: to plan what finds nothing takes as long as the rest.

    None of the tables has a row, or none of a class that the statements of findings name.
    """
    for statement in (statement for statement in statements(job) if statement.kind == FINDINGS):
        read = statement.reads.keys() & tables.keys()
        is_of_class = _OF_CLASS.search(statement.sql) if len(read) == 1 else None
        if CHECKS in statement.reads:
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
    """Return the function that makes the findings of a job from its tables: results.FINDING."""

    def make(tables: Tables, observed_at: datetime) -> DataFrame:
        spark = next(iter(tables.values())).sparkSession
        found: dict[str, DataFrame] = {}
        for at, statement in enumerate(
            statement for statement in statements(job) if statement.kind == FINDINGS
        ):
            read = {name: frame for name, frame in tables.items() if name in statement.reads}
            if CHECKS in statement.reads:
                read[CHECKS] = _checks(job, spark)
            rows = _query(spark, statement.sql, read)
            selected = _as_findings(job, statement, rows.columns, observed_at)
            found[f"{selected} FROM found_{at}"] = rows
        views = {text.rpartition(" ")[2]: rows for text, rows in found.items()}
        return _query(spark, _cast(" UNION ALL ".join(found), results.FINDING), views)

    return make


def _as_findings(
    job: str, statement: Statement, columns: Sequence[str], observed_at: datetime
) -> str:
    """Select a finding of each row; columns that have no place are its detail."""
    several = statement.name == _CLASS
    check = f"`{_CLASS}`" if several else f"'{statement.name}'"
    known = " ".join(f"WHEN '{name}' THEN '{said}'" for name, said in severities(job).items())
    skipped = (*_NAMED, *([_CLASS] if several else []))
    facts = ", ".join(f"'{x}', CAST(`{x}` AS STRING)" for x in columns if x not in skipped)
    observed_us = int(observed_at.timestamp() * _US_PER_S)
    named = ", ".join(f"{x if x in columns else 'NULL'} AS {x}" for x in _NAMED)
    # A class that the header lacks is a newer relay's.
    return f"""SELECT '{job}.' || {check} AS check, CASE {check} {known} ELSE '{WARNING}' END
        AS severity, {named}, timestamp_micros({observed_us}) AS observed_at,
        map_filter(CAST(map({facts}) AS map<string,string>), (name, value) -> value IS NOT NULL)
        AS detail"""
