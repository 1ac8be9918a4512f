"""Latency of each stage, by hour and by route, and the slowest messages.

| stage | from | to |
|---|---|---|
| accepted | discovered in the outbox | committed to the journal |
| written | committed | renamed into the inbox |
| inbox | discovered | renamed into the inbox: what the relay promises |
| read | renamed into the inbox | it left the inbox: the reader's time |
| acked | it left the inbox | its ack was discovered: the reader's time |

Deliveries that waited for a reason outside the relay (``sent`` in jobs/deliveries.py), and the
orchestrator's own messages, have no stage before `written`; a repeated delivery has no `read`.
Times that a start rebuilt from the journal are whole seconds, the engine's, and are left out. An
interval below zero is counted apart.

| class | means | found |
|---|---|---|
| slow | an hour with a message that took more than 5 s to its inbox | warning |
| slow_hour | an hour whose p99 to the inbox is ten times that of the median hour | warning |
"""

from __future__ import annotations

from datetime import datetime, timedelta

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.deliveries import sent
from relay.audit.jobs.job import (
    ASCENDING,
    WARNING,
    AuditJob,
    Rows,
    Tables,
    Written,
    elapsed_ms,
    first_rows,
    hour_of,
    instant,
    make_findings,
    sums,
)
from relay.audit.schemas import conform, results
from relay.base.names import ORCHESTRATOR

NAME = "latency"
ROUTES, SLOWEST = f"{NAME}_routes", f"{NAME}_slowest"
STAGES = ("accepted", "written", "inbox", "read", "acked")
INBOX = "inbox"

SLOW_MS = 5_000  # a thousand times the usual
SLOWEST_ROWS = 100  # as many as a person looks into
TIMES_MEDIAN = 10  # the load of a day changes p99 by two or three
HOUR_LEAST = 100  # deliveries in an hour: its p99 is the slowest of them
HOURS_LEAST = 4  # with fewer, one hour is most of the median
HOUR_FLOOR_MS = 100.0  # ten times a tiny median is still fast
ACCURACY = 1_000  # a percentile's rank is right to a thousandth: 98.9 may pass for 99
_US_PER_S = 1_000_000


def make(inputs: Inputs) -> Tables:
    """Make stages by hour, stages by route, and the slowest: three tables of one join."""
    timed = inputs.cached("latency stages", lambda: stages(sent(inputs)))
    return {
        NAME: by_hour(timed, inputs.recent_since_ns),
        ROUTES: by_route(timed),
        SLOWEST: slowest(timed),
    }


def stages(deliveries: DataFrame) -> DataFrame:
    """Compute the milliseconds of each stage of each delivery; NULL where it has not ended."""
    at_once = ~F.col("waited") & (F.col("sender") != ORCHESTRATOR)
    first = F.col("attempt") == 1
    staged, written = _measured("staged_at"), _measured("written_at")
    read, acked = _measured("read_at"), _measured("acked_at")
    taken = {
        "accepted": F.when(at_once, elapsed_ms("discovered_at", staged)),
        "written": elapsed_ms(staged, written),
        "inbox": F.when(at_once, elapsed_ms("discovered_at", written)),
        "read": F.when(first, elapsed_ms(written, read)),
        "acked": elapsed_ms(read, acked),
    }
    return deliveries.select(
        "message_id",
        "sender",
        "recipient",
        "discovered_at",
        "staged_at",
        "written_at",
        *[column.alias(stage) for stage, column in taken.items()],
    )


def by_hour(timed: DataFrame, recent_since_ns: int) -> DataFrame:
    """Compute percentiles of each stage in each hour of discovery: results.LATENCY."""
    hours = _percentiles(timed.withColumn("hour", hour_of("discovered_at")), "hour")
    last = F.col("hour") + F.expr("INTERVAL 1 HOUR")
    judged = hours.withColumn("recent", last > instant(recent_since_ns))
    return conform(judged, results.LATENCY)


def by_route(timed: DataFrame) -> DataFrame:
    """Compute percentiles of each stage between two agents: results.LATENCY_ROUTES."""
    return conform(_percentiles(timed, "sender", "recipient"), results.LATENCY_ROUTES)


def slowest(timed: DataFrame) -> DataFrame:
    """List the messages that took longest to their inboxes: results.LATENCY_SLOWEST."""
    named = timed.where(F.col(INBOX) >= 0).withColumnRenamed(INBOX, "inbox_ms")
    ordered = named.orderBy(F.desc("inbox_ms"), "message_id", "recipient").limit(SLOWEST_ROWS)
    return conform(ordered, results.LATENCY_SLOWEST)


def counts(tables: Written) -> dict[str, int]:
    """Count timed deliveries, slow ones, and negative intervals."""
    rows = tables[NAME].filter(pc.field("stage") == INBOX)
    return {**sums(rows, "deliveries"), **sums(tables[NAME], "slow", "negative")}


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find hours in which the relay itself was slow: results.FINDING."""
    hours = tables[NAME].where(F.col("stage") == INBOX)
    return slow(hours, tables[SLOWEST], observed_at).unionByName(slow_hours(hours, observed_at))


def slow(hours: DataFrame, slowest: DataFrame, observed_at: datetime) -> DataFrame:
    """Find hours with messages above SLOW_MS, each with its slowest message if that is known."""
    worst = slowest.groupBy(hour_of("discovered_at").alias("hour")).agg(
        F.max_by(F.struct("message_id", "sender", "recipient"), "inbox_ms").alias("worst")
    )
    rows = hours.where(F.col("recent") & (F.col("slow") > 0)).join(worst, on="hour", how="left")
    return make_findings(
        rows.select("*", "worst.*"),
        f"{NAME}.slow",
        WARNING,
        observed_at,
        message_id="message_id",
        agent="sender",
        route="recipient",
        detail=("hour", "deliveries", "slow", "max_ms"),
    )


def slow_hours(hours: DataFrame, observed_at: datetime) -> DataFrame:
    """Find hours whose p99 is far above that of the median hour, given enough hours."""
    busy = hours.where(F.col("deliveries") >= HOUR_LEAST)
    usual = busy.agg(
        F.median("p99_ms").alias("median_p99_ms"), F.count("*").alias("hours_compared")
    )
    most = F.greatest(F.col("median_p99_ms") * TIMES_MEDIAN, F.lit(HOUR_FLOOR_MS))
    far = (F.col("hours_compared") >= HOURS_LEAST) & (F.col("p99_ms") >= most)
    return make_findings(
        busy.crossJoin(F.broadcast(usual)).where(F.col("recent") & far),
        f"{NAME}.slow_hour",
        WARNING,
        observed_at,
        detail=("hour", "deliveries", "p99_ms", "median_p99_ms"),
    )


def shown(tables: Written) -> Rows:
    """Choose the hours of the last day with messages, to print."""
    columns = ("hour", "stage", "deliveries", "p50_ms", "p99_ms", "max_ms")
    rows = first_rows(tables[NAME], {"hour": ASCENDING}, columns)
    begin = rows[-1]["hour"] - timedelta(hours=24) if rows else None
    return [row for row in rows if row["stage"] == INBOX and row["hour"] > begin]


def _measured(at: str) -> Column:
    """Return the time; NULL for whole seconds, which are almost always rounded, not measured."""
    return F.when(F.unix_micros(at) % _US_PER_S != 0, F.col(at))


def _percentiles(timed: DataFrame, *keys: str) -> DataFrame:
    """Make one row a stage and key. Stages are columns until then: one pass, few rows to turn."""
    grouped = timed.groupBy(*keys).agg(*[_of_stage(stage).alias(stage) for stage in STAGES])
    stacked = F.array(*[F.struct(F.lit(stage).alias("stage"), f"{stage}.*") for stage in STAGES])
    rows = grouped.select(*keys, F.explode(stacked).alias("row")).select(*keys, "row.*")
    return rows.where((F.col("deliveries") > 0) | (F.col("negative") > 0)).select(
        *keys,
        "stage",
        "deliveries",
        *[F.col("ms")[i].alias(f"p{rank}_ms") for i, rank in enumerate((50, 90, 99))],
        "max_ms",
        "slow",
        "negative",
    )


def _of_stage(stage: str) -> Column:
    taken = F.when(F.col(stage) >= 0, F.col(stage))
    is_slow = F.col(stage) > SLOW_MS if stage == INBOX else F.lit(False)
    return F.struct(
        F.count(taken).alias("deliveries"),
        F.percentile_approx(taken, [0.5, 0.9, 0.99], ACCURACY).alias("ms"),
        F.max(taken).alias("max_ms"),
        F.count_if(is_slow).alias("slow"),
        F.count_if(F.col(stage) < 0).alias("negative"),
    )


JOB = AuditJob(
    name=NAME,
    description="milliseconds of each stage by hour and route; slow hours, slowest",
    tables={
        NAME: results.LATENCY,
        ROUTES: results.LATENCY_ROUTES,
        SLOWEST: results.LATENCY_SLOWEST,
    },
    make=make,
    counts=counts,
    findings=findings,
    checks=("slow", "slow_hour"),
    shown=shown,
)
