"""Jobs in SQL: the statements behind the header of a job's file, and Spark to run them.

    -- view: stages       what statements below it read: computed once, where that is more than once
    -- table: latency     a table of the job
    -- findings: slow     rows that are findings; other columns are its detail
    -- findings: class    the same of several classes: the column `class` has them

A statement reads the views above it, those of `shared.sql`, and the tables of a lake by their
names, as `ledger_messages`. `checks` has name and severity of the job's classes, and TABLE_before
the rows of its table in an earlier run. One of findings reads the job's tables as written.
Names with a colon, as `:recent_since_us`, are times of the run, `:lost` is how many parts of store
and journal could not be read. The same files run in another engine: tests compare the two.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache, reduce
from importlib import resources
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from relay.audit.header import WARNING
from relay.audit.inputs import Inputs
from relay.audit.jobs.job import Tables, severities
from relay.audit.lake_columns import TABLES
from relay.audit.schemas import TEXT, always, arrow_table, conform, results
from relay.audit.snapshot import HomeSnapshot

VIEW, TABLE, FINDINGS = "view", "table", "findings"
SHARED = "shared"  # the file of views that several jobs read
CHECKS, BEFORE, LOST = "checks", "_before", "lost"
CHECK = StructType([always("name", TEXT, "class"), always("severity", TEXT, "error or warning")])
_FROM = re.compile(r"\b(?:FROM|JOIN)\s+(\w+)")
_COMMENT = re.compile(r"--.*")
_PART = re.compile(r"^-- (view|table|findings): (\w+)$", re.MULTILINE)
_NAMED = ("message_id", "agent", "route", "path")  # what every finding has besides
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

    def names(self, column: str) -> bool:
        """True when it has that word."""
        return re.search(rf"\b{column}\b", self.sql) is not None


@cache
def statements(job: str) -> tuple[Statement, ...]:
    """The statements of a job's file, in order."""
    text = resources.files("relay.audit.jobs").joinpath(f"{job}.sql").read_text()
    _, *parts = _PART.split(text)
    each = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return tuple(Statement(kind, name, sql.strip()) for kind, name, sql in each)


def reads_kept(job: str) -> bool:
    """True when a job reads store or journal, where rows may be missing."""
    read = {table for one in statements(job) for table in one.reads}
    return any(table.startswith(("store_", "journal_")) for table in read & TABLES.keys())


def times(snapshot: HomeSnapshot) -> dict[str, int]:
    """The times of a run that statements name: Unix microseconds, and one duration."""
    return {
        "grace_us": snapshot.grace_ns // _NS_PER_US,
        "observed_until_us": snapshot.observed_until_ns // _NS_PER_US,
        "recent_since_us": (snapshot.observed_until_ns - snapshot.recent_ns) // _NS_PER_US,
        "snapshot_us": snapshot.ledger.taken_ns // _NS_PER_US,
    }


def make(job: str, inputs: Inputs) -> Tables:
    """Make the tables of a job."""
    made: dict[str, DataFrame] = {}
    for statement in statements(job):
        if statement.kind != FINDINGS:
            made[statement.name] = _view(job, statement, inputs, made)
    schemas = results.TABLES[job]
    return {name: conform(made[name], schema) for name, schema in schemas.items()}


def shared(name: str, inputs: Inputs) -> DataFrame:
    """A view that several jobs read, computed once in a run."""
    (statement,) = (one for one in statements(SHARED) if one.name == name)
    return _view(SHARED, statement, inputs, {})


def _view(
    job: str, statement: Statement, inputs: Inputs, made: Mapping[str, DataFrame]
) -> DataFrame:
    def run() -> DataFrame:
        read = {name: frame for name, frame in made.items() if name in statement.reads}
        if job != SHARED:
            several = {one.name for one in statements(SHARED)} & statement.reads.keys()
            read |= {name: shared(name, inputs) for name in several}
        if CHECKS in statement.reads:
            read[CHECKS] = _checks(job, inputs.spark)
        for table, schema in results.TABLES.get(job, {}).items():
            if (name := f"{table}{BEFORE}") in statement.reads:
                read[name] = inputs.previous_run(table, schema)
        known = {**times(inputs.snapshot), LOST: len(inputs.lost)}
        return _query(statement, read | of_lake(statement, inputs), known)

    if job == SHARED or sum(one.reads[statement.name] for one in statements(job)) > 1:
        return inputs.cached(f"{job} {statement.name}", run)
    return run()


def of_lake(statement: Statement, inputs: Inputs) -> dict[str, DataFrame]:
    """Read the columns that a statement names of the tables of the lake."""
    return {
        name: inputs.table(name, *filter(statement.names, TABLES[name].names))
        for name in sorted(statement.reads.keys() & TABLES.keys())
    }


def _checks(job: str, spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(arrow_table(severities(job).items(), CHECK)).coalesce(1)


def _query(
    statement: Statement, read: Mapping[str, DataFrame], known: Mapping[str, int]
) -> DataFrame:
    """Analyse a statement over the views that it names; they are needed until then."""
    (spark,) = {frame.sparkSession for frame in read.values()}
    args = {name: value for name, value in known.items() if f":{name}" in statement.sql}
    with views_lock:
        try:
            for name, frame in read.items():
                frame.createOrReplaceTempView(name)
            return spark.sql(statement.sql, args)
        finally:
            for name in read:
                spark.catalog.dropTempView(name)


def findings(job: str) -> Callable[[Tables, datetime], DataFrame]:
    """Return the function that makes the findings of a job from its tables: results.FINDING."""

    def make(tables: Tables, observed_at: datetime) -> DataFrame:
        found = [_found(one, tables) for one in statements(job) if one.kind == FINDINGS]
        rows = reduce(DataFrame.unionByName, found)
        return conform(rows.withColumn("observed_at", F.lit(observed_at)), results.FINDING)

    def _found(statement: Statement, tables: Tables) -> DataFrame:
        read = {name: frame for name, frame in tables.items() if name in statement.reads}
        if CHECKS in statement.reads:
            read[CHECKS] = _checks(job, next(iter(read.values())).sparkSession)
        return _as_findings(job, statement, _query(statement, read, {}))

    return make


def _as_findings(job: str, statement: Statement, rows: DataFrame) -> DataFrame:
    """Make a finding of each row, without its time; columns that have no place are its detail."""
    several = statement.name == _CLASS
    check = F.col(_CLASS) if several else F.lit(statement.name)
    words = [F.lit(part) for pair in severities(job).items() for part in pair]
    skipped = (*_NAMED, *([_CLASS] if several else []))
    facts = [name for name in rows.columns if name not in skipped]
    entries = [part for name in facts for part in (F.lit(name), F.col(name).cast("string"))]
    return rows.select(
        F.concat(F.lit(f"{job}."), check).alias("check"),
        # A class that the header lacks is a newer relay's.
        F.coalesce(F.create_map(*words)[check], F.lit(WARNING)).alias("severity"),
        *[F.col(name) if name in rows.columns else F.lit(None).alias(name) for name in _NAMED],
        F.map_filter(
            F.create_map(*entries).cast("map<string,string>"), lambda _, value: value.isNotNull()
        ).alias("detail"),
    )
