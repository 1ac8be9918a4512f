"""The jobs in SQL: what a run counts of each, and the rows that it prints.

What a job is for, what it finds and how are said in its file, ``NAME.sql``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pyarrow.compute as pc

from relay.audit import result_columns
from relay.audit.header import job_header
from relay.audit.jobs import statements
from relay.audit.jobs.job import (
    ASCENDING,
    DESCENDING,
    AuditJob,
    Rows,
    Written,
    count_by,
    first_rows,
    sums,
)

SHOWN = 20  # rows that are printed
INBOX = "inbox"  # the stage of a delivery that the relay answers for
SOUND = ("sound", "warned", "unreferenced")  # classes of files
FINE = ("present", "away")  # classes of agents


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


def _acks_shown(tables: Written) -> Rows:
    """Choose the pairs that owe most, then the slowest."""
    order = {"owed": DESCENDING, "p99_ms": DESCENDING, "sender": ASCENDING, "recipient": ASCENDING}
    return first_rows(tables["acks"], order, limit=SHOWN)


def _ordering(tables: Written) -> dict[str, int]:
    """Count pairs, deliveries, inversions, and clocks by class."""
    pairs = tables["ordering"]
    totals = sums(pairs, "deliveries", "inversions", "created_inversions")
    return {"pairs": pairs.count_rows(), **totals, **count_by(tables["ordering_clock"])}


def _ordering_shown(tables: Written) -> Rows:
    """Choose the pairs with the most inversions."""
    order = {"inversions": DESCENDING, "sender": ASCENDING, "recipient": ASCENDING}
    return first_rows(tables["ordering"].filter(pc.field("inversions") > 0), order, limit=SHOWN)


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


def _traffic_shown(tables: Written) -> Rows:
    """Choose the pairs, the busiest first."""
    order = {"messages": DESCENDING, "sender": ASCENDING, "recipient": ASCENDING}
    return first_rows(tables["traffic"], order, limit=SHOWN)


def _threads(tables: Written) -> dict[str, int]:
    """Count threads, their messages, and queries of each class."""
    threads = {"threads": tables["threads"].count_rows(), **sums(tables["threads"], "messages")}
    return {**threads, **count_by(tables["threads_queries"])}


def _threads_shown(tables: Written) -> Rows:
    """Choose the longest threads."""
    columns = ("thread", "messages", "participants", "turns", "duration_s")
    order = {"messages": DESCENDING, "thread": ASCENDING}
    return first_rows(tables["threads"], order, columns, SHOWN)


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
        tables=result_columns.TABLES[name],
        make=partial(statements.make, name),
        counts=counts or (lambda tables: count_by(tables[name])),
        findings=statements.findings(name) if header.checks else None,
        found_in=statements.found_in(name),
        may_find=partial(statements.may_find, name),
        shown=shown,
        reads_kept=statements.reads_kept(name),
    )


# In the order of a report: losses, then the course of deliveries, then agents, then files.
SQL_JOBS = (
    _job("reconcile", _reconcile),
    _job("duplicates"),
    _job("dead_letters", shown=_dead_letters_shown),
    _job("acks", _acks, _acks_shown),
    _job("ordering", _ordering, _ordering_shown),
    _job("latency", _latency, _latency_shown),
    _job("traffic", _traffic, _traffic_shown),
    _job("threads", _threads, _threads_shown),
    _job("agents", _agents, _agents_shown),
    _job("security", _security, _security_shown),
    _job("integrity", _integrity),
)
