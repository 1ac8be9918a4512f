"""Threads: messages of one correlation id, queries without an answer, and runaway pairs.

A message that expects an answer has a correlation id of its own, unless its sender names a THREAD;
a text without one is in no thread.

| class of a query | means | found |
|---|---|---|
| answered | a Response of a recipient came later in its thread | |
| closed | without a Response, but a recipient acknowledged it as completed or failed | |
| ended | every delivery of it expired, bounced or is dead: its sender was notified | |
| waiting | none of these, for an hour at most | |
| unanswered | none of these, for longer | warning |

`threads.runaway`, a warning: more than 30 messages within 60 s between the same two, of KIND
message, by turns. Commands and queries with their answers go by turns as well, and do not count.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.deliveries import sent
from relay.audit.jobs.job import (
    ASCENDING,
    DESCENDING,
    HOUR_S,
    WARNING,
    AuditJob,
    Rows,
    Tables,
    Written,
    count_by,
    elapsed_ms,
    elapsed_s,
    first_rows,
    instant,
    make_findings,
    sums,
)
from relay.audit.jobs.reconcile import STORE_SECTIONS
from relay.audit.schemas import conform, results
from relay.base.names import ORCHESTRATOR

NAME = "threads"
QUERIES, RUNAWAYS = f"{NAME}_queries", f"{NAME}_runaways"
UNANSWERED_S = HOUR_S  # a model thinks for minutes, and an answer may take a build
RUNAWAY_MESSAGES = 30  # in a minute: one every other second, too fast for a reader
RUNAWAY_WITHIN_US = 60_000_000
RUNAWAY_TURNS = 0.8  # share of alternating turns: two independent senders have half
RUNAWAY_SHARE = 0.3  # of a busy minute each of the two wrote at least
ENDED = ("expired", "bounced", "dead")
CLOSES = ("completed", "failed")  # a response to an agent that has gone leaves only this
SHOWN = 20
_NS_PER_US = 1000


def make(inputs: Inputs) -> Tables:
    """Make one row a thread, one a query, one a minute of a runaway."""
    stored = inputs.store(
        STORE_SECTIONS,
        "id",
        "relay_id",
        "correlation_id",
        "message_type",
        "sender",
        "to",
        "created_ns",
        "created_at",
    )
    messages = threaded(stored)
    deliveries = sent(inputs)
    times = (inputs.observed_until_ns, inputs.recent_since_ns)
    return {
        NAME: threads(messages),
        QUERIES: queries(messages, deliveries, *times),
        RUNAWAYS: runaways(deliveries, inputs.recent_since_ns),
    }


def threaded(stored: DataFrame) -> DataFrame:
    """Choose messages in a thread, each once: one may be in two files for a while."""
    dated = F.timestamp_micros(F.floor(F.col("created_ns") / _NS_PER_US).cast("bigint"))
    return (
        stored.where(F.col("correlation_id").isNotNull())
        .withColumn("at", F.coalesce(dated, F.col("created_at")))
        .dropDuplicates(["correlation_id", "id"])
    )


def threads(messages: DataFrame) -> DataFrame:
    """Measure length, participants and depth of each thread: results.THREAD."""
    in_order = Window.partitionBy("correlation_id").orderBy("at", "id")
    before = F.lag("sender").over(in_order)
    begins = F.row_number().over(Window.partitionBy("correlation_id", "sender").orderBy("at", "id"))
    marked = messages.withColumns(
        {
            "is_turn": before.isNull() | (before != F.col("sender")),
            "is_first_word": begins == 1,
        }
    )
    counted = marked.groupBy(F.col("correlation_id").alias("thread")).agg(
        F.count("*").alias("messages"),
        F.count_if("is_first_word").alias("participants"),
        F.count_if("is_turn").alias("turns"),
        F.count_if(F.col("message_type") == "Query").alias("queries"),
        F.count_if(F.col("message_type") == "Response").alias("responses"),
        F.min("at").alias("first_at"),
        F.max("at").alias("last_at"),
    )
    timed = counted.withColumn("duration_s", elapsed_ms("first_at", "last_at") / 1000)
    return conform(timed, results.THREAD)


def queries(
    messages: DataFrame, deliveries: DataFrame, observed_until_ns: int, recent_since_ns: int
) -> DataFrame:
    """Classify every query: results.THREAD_QUERY.

    Queries to the orchestrator are left out: they are refused at once.
    """
    until = instant(observed_until_ns)
    by_query = (
        _by_recipient(messages, deliveries)
        .groupBy("message_id")
        .agg(
            *[F.first(name).alias(name) for name in ("correlation_id", "asker", "to")],
            F.first("discovered_at").alias("asked_at"),
            F.count("*").alias("recipients"),
            F.count("responded_at").alias("answered"),
            F.min("responded_at").alias("answered_at"),
            F.count_if(F.col("ack_status").isin(*CLOSES)).alias("closed"),
            F.count_if(F.col("state").isin(*ENDED)).alias("ended"),
        )
    )
    judged = by_query.select(
        "message_id",
        F.col("correlation_id").alias("thread"),
        F.col("asker").alias("agent"),
        F.col("to").alias("route"),
        "asked_at",
        _class(elapsed_s("asked_at", until)).alias("class"),
        "recipients",
        "answered",
        "answered_at",
        F.greatest(elapsed_s("asked_at", until), F.lit(0)).alias("age_s"),
        (F.col("asked_at") >= instant(recent_since_ns)).alias("recent"),
    )
    return conform(judged, results.THREAD_QUERY)


def _by_recipient(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """List each recipient of each query, with the time of its first response."""
    asked = messages.where((F.col("message_type") == "Query") & F.col("relay_id").isNotNull())
    named = asked.select("relay_id", "correlation_id", "to", "id", F.col("sender").alias("asker"))
    posed = deliveries.where((F.col("kind") == "query") & (F.col("recipient") != ORCHESTRATOR))
    pairs = posed.join(named, on=F.col("message_id") == F.col("relay_id"), how="inner")
    answers = messages.where(F.col("message_type") == "Response").select(
        F.col("correlation_id").alias("answered_thread"),
        F.col("sender").alias("answerer"),
        F.col("id").alias("response"),
        F.col("at").alias("responded_at"),
    )
    # The engine's numbers have the order, whatever the clock did.
    is_its_answer = (
        (F.col("answered_thread") == F.col("correlation_id"))
        & (F.col("answerer") == F.col("recipient"))
        & (F.col("response") > F.col("id"))
    )
    answered = pairs.join(answers, on=is_its_answer, how="left")
    return answered.groupBy("message_id", "recipient").agg(
        *[F.first(name).alias(name) for name in ("correlation_id", "asker", "to")],
        *[F.first(name).alias(name) for name in ("discovered_at", "state", "ack_status")],
        F.min("responded_at").alias("responded_at"),
    )


def _class(age_s: Column) -> Column:
    return (
        F.when(F.col("answered") > 0, "answered")
        .when(F.col("closed") > 0, "closed")
        .when(F.col("ended") == F.col("recipients"), "ended")
        .when(age_s <= UNANSWERED_S, "waiting")
        .otherwise("unanswered")
    )


def runaways(deliveries: DataFrame, recent_since_ns: int) -> DataFrame:
    """Find agents that write to each other endlessly, a row a minute: results.THREAD_RUNAWAY.

    Of more than N within 60 s, one minute of the clock has at least half: that count finds the few
    candidates, and these alone are sorted.
    """
    own = (F.col("sender") != ORCHESTRATOR) & (F.col("recipient") != ORCHESTRATOR)
    texts = deliveries.where((F.col("kind") == "message") & own).select(
        "message_id",
        "sender",
        F.least("sender", "recipient").alias("first"),
        F.greatest("sender", "recipient").alias("second"),
        F.date_trunc("minute", "discovered_at").alias("minute"),
        F.unix_micros("discovered_at").alias("at_us"),
        "written_at",
    )
    candidates = texts.join(
        F.broadcast(_busy_minutes(texts)), on=["first", "second", "minute"], how="left_semi"
    )
    pair = Window.partitionBy("first", "second")
    before = F.lag("sender").over(pair.orderBy("at_us", "written_at", "message_id"))
    within = pair.orderBy("at_us").rangeBetween(-RUNAWAY_WITHIN_US, 0)
    turned = candidates.withColumn("turn", F.coalesce(before != F.col("sender"), F.lit(False)))
    judged = turned.withColumns(
        {"n": F.count("*").over(within), "n_turns": F.count_if("turn").over(within)}
    )
    enough = F.col("n_turns") >= F.col("n") * RUNAWAY_TURNS
    fast = judged.where((F.col("n") > RUNAWAY_MESSAGES) & enough)
    minutes = fast.groupBy("first", "second", "minute").agg(
        F.max("n").alias("messages"),
        F.max("n_turns").alias("turns"),
        F.max_by("message_id", "at_us").alias("last_message_id"),
    )
    recent = (F.col("minute") >= instant(recent_since_ns)).alias("recent")
    return conform(minutes.select("*", recent), results.THREAD_RUNAWAY)


def _busy_minutes(texts: DataFrame) -> DataFrame:
    """Choose minutes of pairs that may be part of a runaway, and those beside them."""
    there = F.count_if(F.col("sender") == F.col("first"))
    counted = texts.groupBy("first", "second", "minute").agg(
        F.count("*").alias("messages"), there.alias("there")
    )
    rarer = F.least(F.col("there"), F.col("messages") - F.col("there"))
    many = (F.col("messages") * 2 > RUNAWAY_MESSAGES) & (rarer >= F.col("messages") * RUNAWAY_SHARE)
    beside = [F.col("minute") + F.expr(f"INTERVAL {n} MINUTE") for n in (-1, 0, 1)]
    return (
        counted.where(many)
        .select("first", "second", F.explode(F.array(*beside)).alias("minute"))
        .distinct()
    )


def counts(tables: Written) -> dict[str, int]:
    """Count threads, their messages, and queries of each class."""
    threads = {"threads": tables[NAME].count_rows(), **sums(tables[NAME], "messages")}
    return {**threads, **count_by(tables[QUERIES])}


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find unanswered queries and runaway pairs: results.FINDING."""
    unanswered = tables[QUERIES].where(F.col("recent") & (F.col("class") == "unanswered"))
    asked = make_findings(
        unanswered,
        f"{NAME}.unanswered",
        WARNING,
        observed_at,
        message_id="message_id",
        agent="agent",
        route="route",
        detail=("thread", "asked_at", "age_s", "recipients"),
    )
    pairs = (
        tables[RUNAWAYS]
        .where("recent")
        .groupBy("first", "second")
        .agg(
            F.count("*").alias("minutes"),
            F.sum("messages").alias("messages"),
            F.min("minute").alias("since"),
            F.max_by("last_message_id", "minute").alias("last_message_id"),
        )
    )
    running = make_findings(
        pairs,
        f"{NAME}.runaway",
        WARNING,
        observed_at,
        message_id="last_message_id",
        agent="first",
        route="second",
        detail=("minutes", "messages", "since"),
    )
    return asked.unionByName(running)


def shown(tables: Written) -> Rows:
    """Choose the longest threads, to print."""
    columns = ("thread", "messages", "participants", "turns", "duration_s")
    return first_rows(tables[NAME], {"messages": DESCENDING, "thread": ASCENDING}, columns, SHOWN)


JOB = AuditJob(
    name=NAME,
    description="threads: length, depth, time; unanswered queries, runaway pairs",
    tables={
        NAME: results.THREAD,
        QUERIES: results.THREAD_QUERY,
        RUNAWAYS: results.THREAD_RUNAWAY,
    },
    make=make,
    counts=counts,
    findings=findings,
    checks=("unanswered", "runaway"),
    shown=shown,
)
