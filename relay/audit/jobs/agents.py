"""Agents: lifetime, activity, unread mail, and the process of each.

| class | means | found |
|---|---|---|
| stuck | its process owes a read or an answer for longer than `spawn.stuck_after_s` | warning |
| failed | its process could not be started, or was given up, within the days judged | warning |
| flapping | its process was started again three times in one window, and still runs | warning |
| silent | active, with mail unread for a day, and neither wrote nor read for a day | warning |
| away | inactive, terminated or retired | |
| present | anything else | |

Each agent has one class, the first that is true. The operator, a person, is never silent. Ages
end at the snapshot while a relay runs, else at its last activity.

`agents_spawns` has every request for a process. A refused one is counted and is not a finding:
the requester was sent the reason, and most often the name is running already.
"""

from __future__ import annotations

from datetime import datetime

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.deliveries import refusals
from relay.audit.jobs.job import (
    ASCENDING,
    DAY_S,
    DESCENDING,
    HOUR_S,
    WARNING,
    AuditJob,
    Rows,
    Tables,
    Written,
    count_by,
    elapsed_s,
    first_rows,
    hour_of,
    instant,
    make_findings,
)
from relay.audit.schemas import conform, results
from relay.base.names import OPERATOR, ORCHESTRATOR

NAME = "agents"
SPAWNS = f"{NAME}_spawns"
SILENT_S = DAY_S  # a night is normal, a day is worth a look
FLAPPING_RESTARTS = 3  # in spawn.restart_window_s; five are given up by default
RUNS = ("starting", "ready", "working", "idle", "stuck")
AWAY = ("inactive", "terminated", "retired")
FINE = ("present", "away")
FOUND = ("stuck", "failed", "flapping", "silent")
REQUESTS = ("spawn", "release")
SHOWN = 20


def make(inputs: Inputs) -> Tables:
    """Make one row an agent, and one a request for a process."""
    messages = inputs.ledger(
        "messages",
        "message_id",
        "agent_name",
        "target",
        "message_type",
        "status",
        "discovered_at",
        "last_error",
    )
    deliveries = inputs.ledger(
        "deliveries", "message_id", "recipient", "state", "written_at", "read_at"
    )
    registered = inputs.ledger(
        "agents", "name", "status", "reason", "registered_at", "last_seen_at", "changed_at"
    )
    processes = inputs.ledger(
        "processes",
        "name",
        "state",
        "cli",
        "restart",
        "request_id",
        "restarts",
        "restarted_at",
        "started_at",
        "changed_at",
        "ended_at",
        "exit_code",
        "last_error",
    )
    done = activity(messages, deliveries)
    return {
        NAME: agent_lives(
            registered, processes, done, inputs.observed_until_ns, inputs.recent_since_ns
        ),
        SPAWNS: spawns(messages, deliveries, processes),
    }


def activity(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Summarise the ledger's messages, one row an agent.

    Silence is the longest gap between two activities of an agent, by hours, of which there are few.
    """
    nothing, never = F.lit(0), F.lit(None).cast("timestamp")
    wrote = messages.groupBy(F.col("agent_name").alias("agent"), _hour("discovered_at")).agg(
        F.count("*").alias("messages"),
        F.count_if(F.col("message_type") == "continuity").alias("saves"),
        nothing.alias("received"),
        nothing.alias("unread"),
        never.alias("unread_since"),
        F.min("discovered_at").alias("first_at"),
        F.max("discovered_at").alias("last_at"),
    )
    unread = F.col("state") == "written"
    read = deliveries.groupBy(F.col("recipient").alias("agent"), _hour("read_at")).agg(
        nothing.alias("messages"),
        nothing.alias("saves"),
        F.count("written_at").alias("received"),
        F.count_if(unread).alias("unread"),
        F.min(F.when(unread, F.col("written_at"))).alias("unread_since"),
        F.min("read_at").alias("first_at"),
        F.max("read_at").alias("last_at"),
    )
    hours = wrote.unionByName(read)
    totals = hours.groupBy("agent").agg(
        *[F.sum(name).alias(name) for name in ("messages", "saves", "received", "unread")],
        F.min("unread_since").alias("unread_since"),
        F.max("last_at").alias("last_at"),
    )
    return totals.join(_silences(hours), on="agent", how="left")


def _silences(hours: DataFrame) -> DataFrame:
    signs = hours.where(F.col("first_at").isNotNull()).groupBy("agent", "hour")
    merged = signs.agg(F.min("first_at").alias("first_at"), F.max("last_at").alias("last_at"))
    before = F.lag("last_at").over(Window.partitionBy("agent").orderBy("hour"))
    gaps = merged.select("agent", elapsed_s(before, "first_at").alias("gap_s"))
    longest = gaps.groupBy("agent").agg(F.max("gap_s").alias("gap_s"))
    is_long = F.col("gap_s") >= HOUR_S  # a shorter one may lie within an hour, where none looks
    return longest.select("agent", F.when(is_long, F.col("gap_s")).alias("longest_silence_s"))


def agent_lives(
    registered: DataFrame,
    processes: DataFrame,
    done: DataFrame,
    observed_until_ns: int,
    recent_since_ns: int,
) -> DataFrame:
    """One row an agent that was ever registered, or whose process was: results.AGENT_LIFE."""
    until = instant(observed_until_ns)
    known = registered.withColumnRenamed("name", "agent").join(
        _processes(processes, until), on="agent", how="full_outer"
    )
    counted = known.join(done, on="agent", how="left").fillna(
        0, ["messages", "saves", "received", "unread", "restarts", "recent_restarts"]
    )
    gone = F.col("status").isin("terminated", "retired")
    lived_to = F.when(gone, F.coalesce("changed_at", until)).otherwise(until)
    seen_at = F.greatest("registered_at", "last_seen_at", "last_at")
    timed = counted.withColumns(
        {
            "lifetime_s": F.greatest(elapsed_s("registered_at", lived_to), F.lit(0)),
            "silent_s": F.greatest(elapsed_s(seen_at, until), F.lit(0)),
        }
    )
    judged = timed.withColumn("class", _class(until, instant(recent_since_ns)))
    return conform(judged, results.AGENT_LIFE)


def _processes(processes: DataFrame, until: Column) -> DataFrame:
    stuck = F.when(F.col("state") == "stuck", elapsed_s("changed_at", until))
    return processes.select(
        F.col("name").alias("agent"),
        F.col("state").alias("process"),
        "cli",
        "restart",
        "restarts",
        F.coalesce(F.json_array_length("restarted_at"), F.lit(0)).alias("recent_restarts"),
        "started_at",
        "ended_at",
        F.col("changed_at").alias("process_changed_at"),
        "exit_code",
        F.greatest(stuck, F.lit(0)).alias("stuck_s"),
        "last_error",
    ).withColumn("stuck_s", F.when(F.col("process") == "stuck", F.col("stuck_s")))


def _class(until: Column, recent_since: Column) -> Column:
    """Return the class: the first that is true, worst first."""
    recent = F.col("process_changed_at") >= recent_since
    flaps = F.col("process").isin(*RUNS) & (F.col("recent_restarts") >= FLAPPING_RESTARTS)
    overdue = elapsed_s("unread_since", until) >= SILENT_S
    silent = (F.col("status") == "active") & (F.col("silent_s") >= SILENT_S) & overdue
    return (
        F.when(F.col("process") == "stuck", "stuck")
        .when((F.col("process") == "failed") & recent, "failed")
        .when(flaps & (F.col("started_at") >= recent_since), "flapping")
        .when(silent & (F.col("agent") != OPERATOR), "silent")
        .when(F.col("status").isin(*AWAY), "away")
        .otherwise("present")
    )


def spawns(messages: DataFrame, deliveries: DataFrame, processes: DataFrame) -> DataFrame:
    """List every request for a process, and its outcome: results.AGENT_SPAWN."""
    asked = messages.where(F.col("message_type").isin(*REQUESTS))
    refused = refusals(asked, messages)
    obeyed = deliveries.where(F.col("recipient") == ORCHESTRATOR).select(
        "message_id", F.lit(True).alias("obeyed")
    )
    began = processes.select(
        F.col("request_id").alias("message_id"), F.col("name").alias("process")
    )
    joined = (
        asked.join(refused, on="message_id", how="left")
        .join(obeyed, on="message_id", how="left")
        .join(began, on="message_id", how="left")
    )
    failed = F.col("status") == "failed"
    outcome = (
        F.when(failed | F.col("answer_id").isNotNull(), "refused")
        .when(F.col("obeyed"), "done")
        .otherwise("open")
    )
    return conform(
        joined.select(
            "message_id",
            F.col("agent_name").alias("agent"),
            F.col("message_type").alias("kind"),
            F.col("discovered_at").alias("asked_at"),
            outcome.alias("outcome"),
            "answer_id",
            F.when(failed, F.col("last_error")).alias("reason"),
            "process",
        ),
        results.AGENT_SPAWN,
    )


def counts(tables: Written) -> dict[str, int]:
    """Count agents of each class, and refused requests."""
    is_refused = (pc.field("kind") == "spawn") & (pc.field("outcome") == "refused")
    refused = tables[SPAWNS].count_rows(filter=is_refused)
    return dict(sorted({**count_by(tables[NAME]), "spawn_refused": refused}.items()))


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find agents that need attention: results.FINDING."""
    return make_findings(
        tables[NAME].where(F.col("class").isin(*FOUND)),
        F.concat(F.lit(f"{NAME}."), F.col("class")),
        WARNING,
        observed_at,
        agent="agent",
        detail=(
            "process",
            "stuck_s",
            "restarts",
            "recent_restarts",
            "exit_code",
            "last_error",
            "unread",
            "unread_since",
            "silent_s",
        ),
    )


def shown(tables: Written) -> Rows:
    """Choose the agents to print: those with findings, then the busiest."""
    columns = ("agent", "class", "status", "process", "messages", "received", "unread", "silent_s")
    ordered = first_rows(tables[NAME], {"messages": DESCENDING, "agent": ASCENDING}, columns)
    return sorted(ordered, key=lambda row: row["class"] in FINE)[:SHOWN]


def _hour(at: str) -> Column:
    return hour_of(at).alias("hour")


JOB = AuditJob(
    name=NAME,
    description="lifetimes, processes, restarts; who is stuck, failed or silent",
    tables={NAME: results.AGENT_LIFE, SPAWNS: results.AGENT_SPAWN},
    make=make,
    counts=counts,
    findings=findings,
    checks=FOUND,
    shown=shown,
)
