"""Order of messages by discovery and by arrival, and clocks that are wrong.

Order is order of discovery: of two messages from one sender to one recipient the one discovered
first is written first. Deliveries that were held or retried, or whose message was deferred, are
left out: others go by while they wait.

| class | means | found |
|---|---|---|
| inversion | a pair has deliveries written before earlier ones, no clock explains it | warning |
| clock_back | a message was discovered a second or more before its predecessor | warning |
| future_id | its id names a time after its discovery: the sender's clock is ahead | warning |
| future_mtime | its file was written after it was discovered | warning |
| negative | staged, written, read or acked before the step that precedes it | warning |
"""

from __future__ import annotations

from datetime import datetime

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.deliveries import sent
from relay.audit.jobs.job import (
    ASCENDING,
    DESCENDING,
    WARNING,
    AuditJob,
    Rows,
    Tables,
    Written,
    count_by,
    first_rows,
    make_findings,
    sums,
)
from relay.audit.schemas import conform, results
from relay.base.names import ORCHESTRATOR

NAME = "ordering"
CLOCK = "ordering_clock"
SHOWN = 20  # pairs with the most inversions
SKEW_S = 1  # the relay, too, logs a clock that is set back from here on
AHEAD_S = 2  # of the future: rounding to whole seconds, and a clock's own error
ROWS = 10_000  # neighbours are compared in runs of so many, each in one task
_US_PER_MS = 1000.0
_MOST_STEPS = 10_000  # of the clock, that inversions are compared with


def make(inputs: Inputs) -> Tables:
    """Make a row a pair of sender and recipient, and one for each wrong clock."""
    messages = inputs.ledger(
        "messages",
        "id",
        "message_id",
        "agent_name",
        "file_mtime_ns",
        "discovered_at",
    ).where(F.col("agent_name") != ORCHESTRATOR)  # ids of its answers are hashes
    kept_from = inputs.ledger("orchestrator_state", "key", "value")
    steps = clock_steps(messages)
    is_first = (F.col("attempt") == 1) & F.col("written_at").isNotNull()
    written = sent(inputs).where(is_first & (F.col("sender") != ORCHESTRATOR))
    clock = steps.where(F.col("by_ms") >= SKEW_S * 1000).select(*results.CLOCK.names)
    clock = clock.unionByName(ahead(messages)).unionByName(negative(written))
    return {
        NAME: ordering(written, inputs.delivery_changes(), kept_from, steps),
        CLOCK: conform(clock, results.CLOCK),
    }


def ordering(written: DataFrame, moves: DataFrame, state: DataFrame, steps: DataFrame) -> DataFrame:
    """Count inversions by sender and recipient: results.ORDERED.

    ``written``: first attempts with their messages. What is older than audit_log goes back is
    not judged: it is unknown whether it was held.
    """
    timed = _with_previous(_judged(written, moves, state))
    early = _early(timed)
    explained = _explained_by_clock(steps, early).select("sender", "recipient", "message_id")
    by_clock = explained.groupBy("sender", "recipient").agg(F.count("*").alias("by_clock"))
    real = early.join(
        explained.select("message_id", "recipient"), ["message_id", "recipient"], "left_anti"
    )
    pairs = timed.groupBy("sender", "recipient").agg(
        F.count("*").alias("deliveries"),
        F.count_if("is_created_before").alias("created_inversions"),
    )
    both = pairs.join(by_clock, ["sender", "recipient"], "left").join(
        _worst(real), ["sender", "recipient"], "left"
    )
    zero = F.lit(0)
    return conform(
        both.withColumn("by_clock", F.coalesce("by_clock", zero)).withColumn(
            "inversions", F.coalesce("real", zero) + F.col("by_clock")
        ),
        results.ORDERED,
    )


def _judged(written: DataFrame, moves: DataFrame, state: DataFrame) -> DataFrame:
    """Choose deliveries without a hold, as far back as audit_log shows it."""
    late = moves.where((F.col("old_status") == "held") | (F.col("new_status") == "held"))
    kept_from = state.where(F.col("key") == "audit_kept_from").agg(
        F.timestamp_micros(F.floor(F.max(F.col("value").try_cast("bigint")) / 1000)).alias("from")
    )
    return (
        written.where(F.col("retry_count") == 0)
        .join(late.select("message_id", "recipient"), ["message_id", "recipient"], "left_anti")
        .crossJoin(F.broadcast(kept_from))
        .where(F.coalesce(F.col("discovered_at") >= F.col("from"), F.lit(True)))
    )


def _with_previous(judged: DataFrame) -> DataFrame:
    """Join each delivery with the latest earlier one of its pair."""
    before = (
        Window.partitionBy("sender", "recipient")
        .orderBy("ledger_id")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    return judged.select(
        "sender",
        "recipient",
        "message_id",
        "written_at",
        F.max("written_at").over(before).alias("last_written"),
        (_created_us() < F.max(_created_us()).over(before)).alias("is_created_before"),
    )


def _early(timed: DataFrame) -> DataFrame:
    """Find deliveries that were written before an earlier one of the pair."""
    # A row that was rebuilt from the journal has whole seconds.
    is_whole = F.unix_micros("written_at") % 1_000_000 == 0
    latest = F.when(is_whole, F.timestamp_micros(F.unix_micros("written_at") + 1_000_000))
    return timed.where(F.coalesce(latest, F.col("written_at")) < F.col("last_written"))


def _explained_by_clock(steps: DataFrame, early: DataFrame) -> DataFrame:
    """Choose those that a step of the clock explains.

    After a step from before_at to at the clock went through the time between them twice; a
    message written just then may be discovered a little earlier.
    """
    written_us, second = F.unix_micros("written_at"), 1_000_000
    return early.join(
        F.broadcast(steps.limit(_MOST_STEPS).select("before_at", "at")),
        on=(F.col("written_at") <= F.col("before_at"))
        & (written_us >= F.unix_micros("at") - second)
        & (F.col("last_written") >= F.col("at")),
        how="left_semi",
    )


def _worst(real: DataFrame) -> DataFrame:
    by_ms = (F.unix_micros("last_written") - F.unix_micros("written_at")) / _US_PER_MS
    return real.groupBy("sender", "recipient").agg(
        F.count("*").alias("real"),
        F.max(by_ms).alias("worst_ms"),
        F.max_by("message_id", by_ms).alias("message_id"),
    )


def clock_steps(messages: DataFrame) -> DataFrame:
    """Find messages that were discovered before their predecessor: the clock was set back.

    Neighbours are compared in runs of ids, and the ends of the runs with each other: an order
    over everything would be the work of one task.
    """
    run = F.floor(F.col("id") / ROWS)
    near = Window.partitionBy(run).orderBy("id")
    stepped = messages.select(
        "message_id",
        "agent_name",
        F.col("discovered_at").alias("at"),
        F.lag("discovered_at").over(near).alias("before_at"),
    )
    ends = messages.groupBy(run.alias("run")).agg(
        F.min_by("message_id", "id").alias("message_id"),
        F.min_by("agent_name", "id").alias("agent_name"),
        F.min_by("discovered_at", "id").alias("at"),
        F.max_by("discovered_at", "id").alias("last_at"),
    )
    # a row for each run: few enough for one task
    seams = ends.select(
        "message_id",
        "agent_name",
        "at",
        F.lag("last_at").over(Window.orderBy("run")).alias("before_at"),
    )
    both = stepped.unionByName(seams).where(F.col("at") < F.col("before_at"))
    return both.select(
        F.lit("clock_back").alias("class"),
        "message_id",
        F.col("agent_name").alias("agent"),
        F.lit(None).cast("string").alias("recipient"),
        "at",
        ((F.unix_micros("before_at") - F.unix_micros("at")) / _US_PER_MS).alias("by_ms"),
        "before_at",
    )


def ahead(messages: DataFrame) -> DataFrame:
    """Find messages whose id or file has a time after their discovery."""
    seen_us = F.unix_micros("discovered_at")
    by_id, by_file = _created_us() - seen_us, F.col("file_mtime_ns") / 1000 - seen_us
    limit = AHEAD_S * 1_000_000
    faults = F.array(
        F.when(by_id > limit, F.struct(F.lit("future_id").alias("class"), by_id.alias("us"))),
        F.when(
            by_file > limit, F.struct(F.lit("future_mtime").alias("class"), by_file.alias("us"))
        ),
    )
    wrong = messages.where((by_id > limit) | (by_file > limit))
    each = wrong.select("message_id", "agent_name", "discovered_at", F.explode(faults).alias("one"))
    return each.where(F.col("one").isNotNull()).select(
        F.col("one.class").alias("class"),
        "message_id",
        F.col("agent_name").alias("agent"),
        F.lit(None).cast("string").alias("recipient"),
        F.col("discovered_at").alias("at"),
        (F.col("one.us") / _US_PER_MS).alias("by_ms"),
    )


def negative(written: DataFrame) -> DataFrame:
    """Find first attempts whose times are not in order."""
    gaps = [
        F.unix_micros(later) - F.unix_micros(earlier)
        for earlier, later in (
            ("discovered_at", "staged_at"),
            ("discovered_at", "written_at"),
            ("staged_at", "written_at"),
            ("written_at", "read_at"),
            ("written_at", "acked_at"),
        )
    ]
    least = F.least(*gaps)
    return written.where(least < -AHEAD_S * 1_000_000).select(
        F.lit("negative").alias("class"),
        "message_id",
        F.col("sender").alias("agent"),
        "recipient",
        F.col("written_at").alias("at"),
        (-least / _US_PER_MS).alias("by_ms"),
    )


def _created_us() -> Column:
    """Return the time in the id, Unix microseconds; NULL where it has none.

    Nanoseconds, as the SDK and ``date +%s%N`` write it; a shell without %N gives seconds.
    """
    digits = F.substring_index("message_id", "-", 1)
    number = digits.try_cast("bigint")
    return (
        F.when(F.length(digits) == 19, F.floor(number / 1000))
        .when(F.length(digits) == 16, number)
        .when(F.length(digits) == 13, number * 1000)
        .when(F.length(digits) == 10, number * 1_000_000)
    )


def counts(tables: Written) -> dict[str, int]:
    """Count pairs, deliveries, inversions, and clocks by class."""
    totals = sums(tables[NAME], "deliveries", "inversions", "created_inversions")
    return {"pairs": tables[NAME].count_rows(), **totals, **count_by(tables[CLOCK])}


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find pairs with inversions, and wrong clocks: results.FINDING."""
    pairs = make_findings(
        tables[NAME].where(F.col("inversions") > F.col("by_clock")),
        f"{NAME}.inversion",
        WARNING,
        observed_at,
        message_id="message_id",
        agent="sender",
        route="recipient",
        detail=("recipient", "inversions", "by_clock", "worst_ms"),
    )
    clocks = make_findings(
        tables[CLOCK],
        F.concat(F.lit(f"{NAME}."), F.col("class")),
        WARNING,
        observed_at,
        message_id="message_id",
        agent="agent",
        detail=("recipient", "at", "by_ms"),
    )
    return pairs.unionByName(clocks)


def shown(tables: Written) -> Rows:
    """Choose the pairs to print."""
    order = {"inversions": DESCENDING, "sender": ASCENDING, "recipient": ASCENDING}
    return first_rows(tables[NAME].filter(pc.field("inversions") > 0), order, limit=SHOWN)


JOB = AuditJob(
    name=NAME,
    description="inversions by sender and recipient, clocks that are wrong",
    tables={NAME: results.ORDERED, CLOCK: results.CLOCK},
    make=make,
    counts=counts,
    findings=findings,
    checks=("inversion", "clock_back", "future_id", "future_mtime", "negative"),
    shown=shown,
)
