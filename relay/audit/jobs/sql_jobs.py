"""The jobs in SQL: Spark to run their files, what a run counts of each, and what it prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame

from relay.audit.jobs.job import (
    ASCENDING,
    DESCENDING,
    AuditJob,
    Rows,
    Tables,
    Written,
    count_by,
    first_rows,
    sums,
)
from relay.audit.jobs.sql_files import (
    BEFORE,
    FINDINGS,
    LOST,
    SEVERITIES,
    SHARED,
    TABLE,
    WARNING,
    Statement,
    job_header,
    reads_kept,
    severities,
    statements,
    tables_of,
    times,
    with_values,
)
from relay.audit.lake_columns import FINDING, TABLES
from relay.audit.lake_tables import Inputs, in_spark

SHOWN = 20  # rows that are printed
INBOX = "inbox"  # the stage of a delivery that the relay answers for
SOUND = ("sound", "warned", "unreferenced")  # classes of files
PAIR = ("sender", "recipient")
EVERY, INVERTED = pc.scalar(True), pc.field("inversions") > 0
THREAD = ("thread", "messages", "participants", "turns", "duration_s")
FINE = ("present", "away")  # classes of agents
_NAMED = ("message_id", "agent", "route", "path")  # what every finding has besides
_CLASS = "class"  # which one, where a statement finds several
_OF_CLASS = re.compile(r"FROM (\w+) WHERE (?:\w+ AND )?class (?:= |IN \()('[^)]*?')(?:\)| |\n|$)")
_WORD = re.compile(r"\w+")


# -- running a file -----------------------------------------------------------------------------


def make(job: str, inputs: Inputs) -> Tables:
    """Make the tables of a job."""
    own = [statement for statement in statements(job) if statement.kind != FINDINGS]
    made = {statement.name: _rows(job, statement, inputs) for statement in own}
    return {name: made[name] for name in tables_of(job)}


def _rows(job: str, statement: Statement, inputs: Inputs) -> DataFrame:
    """The rows of a statement, a view for others; computed once where it is read twice."""
    schemas = tables_of(job)
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


def may_find(job: str, statement: Statement, written: Written) -> bool:
    """False when no row can be a finding: to plan what finds nothing takes as long as the rest.

    None of the tables has a row, or none of a class that the statement names.
    """
    read = statement.reads.keys() & written.keys()
    is_of_class = _OF_CLASS.search(statement.sql) if len(read) == 1 else None
    if SEVERITIES in statement.sql:
        table, names = job, set(severities(job))
    elif is_of_class and " OR " not in statement.sql:
        table, names = is_of_class[1], set(_WORD.findall(is_of_class[2]))
    else:
        return any(written[name].count_rows() for name in read)
    return bool(names & count_by(written[table]).keys())


def _findings(job: str, inputs: Inputs) -> DataFrame | None:
    """The findings of a job, from its tables as they were written; None where there are none."""
    tables = tables_of(job)
    written = {name: inputs.written(name) for name in tables}
    some = [one for one in statements(job) if one.kind == FINDINGS and may_find(job, one, written)]
    for name in tables.keys() & {name for one in some for name in one.reads}:
        inputs.result(name, tables[name]).createOrReplaceTempView(name)
    found = " UNION ALL ".join(_as_findings(job, one, inputs) for one in some)
    return inputs.spark.sql(_cast(found, FINDING)) if some else None


def _as_findings(job: str, statement: Statement, inputs: Inputs) -> str:
    """Select a finding of each row; columns that have no place are its detail."""
    sql = with_values(job, statement.sql, {})
    columns = inputs.spark.sql(sql).columns
    several = statement.name == _CLASS
    check = f"`{_CLASS}`" if several else f"'{statement.name}'"
    skipped = (*_NAMED, *([_CLASS] if several else []))
    facts = ", ".join(f"'{x}', CAST(`{x}` AS STRING)" for x in columns if x not in skipped)
    named = ", ".join(f"{x if x in columns else 'NULL'} AS {x}" for x in _NAMED)
    # A class that the header lacks is a newer relay's.
    select = f"""SELECT '{job}.' || {check} AS check,
        coalesce(CASE {check} :{SEVERITIES} END, '{WARNING}') AS severity,
        {named}, timestamp_micros(:snapshot_us) AS observed_at,
        map_filter(CAST(map({facts}) AS map<string,string>), (name, value) -> value IS NOT NULL)
        AS detail"""
    return f"{with_values(job, select, times(inputs.snapshot))} FROM (\n{sql}\n)"


# -- counts, and rows to print ------------------------------------------------------------------


def _reconcile(tables: Written) -> dict[str, int]:
    """Count messages of each class, and deliveries that are wrong."""
    found = Counter(count_by(tables["reconcile"]))
    for check in job_header("reconcile").checks:
        name = check.removeprefix("delivery_")
        if name != check and (
            count := tables["reconcile_deliveries"].count_rows(filter=pc.field("class") == name)
        ):
            found[check] = count
    is_behind = pc.field("class") == "ledger_behind"
    found.update(count_by(tables["reconcile_journal"], where=is_behind))
    return dict(sorted(found.items()))


def _dead_letters_shown(tables: Written) -> Rows:
    """Choose the reasons, the most frequent first."""
    names = ["recipient", "reason_kind", "letters", "waiting"]
    grouped = tables["dead_letters_reasons"].to_table(columns=names).group_by(names[:2])
    summed = grouped.aggregate([("letters", "sum"), ("waiting", "sum")])
    named = summed.rename_columns({"letters_sum": "letters", "waiting_sum": "waiting"})
    order = [("letters", DESCENDING), ("recipient", ASCENDING)]
    first: Rows = named.sort_by(order).slice(0, SHOWN).to_pylist()
    return first


def _acks(tables: Written) -> dict[str, int]:
    """Acknowledged, owed, late, overdue, given up, unrequested answers."""
    totals = sums(tables["acks"], "acked", "failed", "owed", "late", "overdue")
    others = ("given_up", "unrequested")
    owed = tables["acks_owed"]
    return totals | {name: owed.count_rows(filter=pc.field("class") == name) for name in others}


def _ordering(tables: Written) -> dict[str, int]:
    """Count pairs, deliveries, inversions, and clocks by class."""
    pairs = tables["ordering"]
    totals = sums(pairs, "deliveries", "inversions", "created_inversions")
    return {"pairs": pairs.count_rows(), **totals, **count_by(tables["ordering_clock"])}


def _latency(tables: Written) -> dict[str, int]:
    """Count timed deliveries, slow ones, and negative intervals."""
    rows = tables["latency"].filter(pc.field("stage") == INBOX)
    return {**sums(rows, "deliveries"), **sums(tables["latency"], "slow", "negative")}


def _latency_shown(tables: Written) -> Rows:
    """Choose the hours of the last day with messages."""
    columns = ("hour", "stage", "deliveries", "p50_ms", "p99_ms", "max_ms")
    rows = first_rows(tables["latency"], {"hour": ASCENDING}, columns)
    begin = rows[-1]["hour"] - timedelta(hours=24) if rows else None
    return [row for row in rows if row["stage"] == INBOX and row["hour"] > begin]


def _traffic(tables: Written) -> dict[str, int]:
    """Count pairs, messages and bytes."""
    return {"pairs": tables["traffic"].count_rows(), **sums(tables["traffic"], "messages", "bytes")}


def _threads(tables: Written) -> dict[str, int]:
    """Count threads, their messages, and queries of each class."""
    threads = {"threads": tables["threads"].count_rows(), **sums(tables["threads"], "messages")}
    return {**threads, **count_by(tables["threads_queries"])}


def _agents(tables: Written) -> dict[str, int]:
    """Count agents of each class, and refused requests."""
    is_refused = (pc.field("kind") == "spawn") & (pc.field("outcome") == "refused")
    refused = tables["agents_spawns"].count_rows(filter=is_refused)
    return dict(sorted({**count_by(tables["agents"]), "spawn_refused": refused}.items()))


def _agents_shown(tables: Written) -> Rows:
    """Choose the agents with findings, then the busiest."""
    columns = ("agent", "class", "status", "process", "messages", "received", "unread", "silent_s")
    ordered = first_rows(tables["agents"], {"messages": DESCENDING, "agent": ASCENDING}, columns)
    return sorted(ordered, key=lambda row: row["class"] in FINE)[:SHOWN]


def _security(tables: Written) -> dict[str, int]:
    """Count each kind; an event in two sources counts in each."""
    rows = tables["security"].to_table(columns=["source", "kind", "events"])
    summed = rows.group_by(["source", "kind"]).aggregate([("events", "sum")]).to_pylist()
    return dict(sorted((f"{row['source']}.{row['kind']}", row["events_sum"]) for row in summed))


def _security_shown(tables: Written) -> Rows:
    """Choose agents and kinds: errors, then warnings, then the rest."""
    keys = ["severity", "source", "kind", "agent"]
    grouped = tables["security"].to_table(columns=[*keys, "events"]).group_by(keys)
    summed = grouped.aggregate([("events", "sum")]).rename_columns({"events_sum": "events"})
    order = [("severity", ASCENDING), ("events", DESCENDING), ("kind", ASCENDING)]
    first: Rows = summed.sort_by(order).slice(0, SHOWN).to_pylist()  # NULL comes last
    return first


def _integrity(tables: Written) -> dict[str, int]:
    """Count files of each kind and class, and days that are wrong."""
    rows = tables["integrity"].to_table(columns=["kind", "class"]).group_by(["kind", "class"])
    found = Counter[str]()
    for row in rows.aggregate([([], "count_all")]).to_pylist():
        name = f"{row['kind']}s" if row["class"] in SOUND else row["class"]
        found[name] += row["count_all"]
    wrong = count_by(tables["integrity_days"], where=pc.field("class").isin(["changed", "shrunk"]))
    found.update({f"days_{name}": count for name, count in wrong.items()})
    return dict(sorted(found.items()))


def _largest(
    table: str,
    *by: str,
    among: tuple[str, ...] = PAIR,
    columns: tuple[str, ...] = (),
    where: pc.Expression = EVERY,
) -> Callable[[Written], Rows]:
    """Choose the rows with the largest values of the columns ``by``, then in order of ``among``."""
    order = {**dict.fromkeys(by, DESCENDING), **dict.fromkeys(among, ASCENDING)}
    return lambda tables: first_rows(tables[table].filter(where), order, columns, SHOWN)


def _job(
    name: str,
    counts: Callable[[Written], dict[str, int]] | None = None,
    shown: Callable[[Written], Rows] | None = None,
) -> AuditJob:
    """The job of a file; ``counts``: rows of each class, unless told otherwise."""
    header = job_header(name)
    return AuditJob(
        name=name,
        header=header,
        tables=tables_of(name),
        make=partial(make, name),
        counts=counts or (lambda tables: count_by(tables[name])),
        findings=partial(_findings, name) if header.checks else None,
        shown=shown,
        reads_kept=reads_kept(name),
    )


# In the order of a report: losses, then the course of deliveries, then agents, then files.
SQL_JOBS = (
    _job("reconcile", _reconcile),
    _job("duplicates"),
    _job("dead_letters", shown=_dead_letters_shown),
    _job("acks", _acks, _largest("acks", "owed", "p99_ms")),
    _job("ordering", _ordering, _largest("ordering", "inversions", where=INVERTED)),
    _job("latency", _latency, _latency_shown),
    _job("traffic", _traffic, _largest("traffic", "messages")),
    _job("threads", _threads, _largest("threads", "messages", among=("thread",), columns=THREAD)),
    _job("agents", _agents, _agents_shown),
    _job("security", _security, _security_shown),
    _job("integrity", _integrity),
)
