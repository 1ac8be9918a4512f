"""Acknowledgments: owed, overdue and unrequested ones, and the time that they take.

A command or query is owed an answer as long as its ``obligation`` is open in the ledger, also
after an acknowledgment that does not close it; a message of an at-least-once channel is owed an
acknowledgment. Ledger and journal have the time when it is overdue; where neither does, the kind
of the message and its channel decide.

| class | means | found |
|---|---|---|
| owed | delivered, and not answered; its time has not come | |
| late | the same, reminded or delivered more than once already | |
| overdue | its time passed while the relay was at work, and nothing was done | warning |
| given_up | a command or query that nobody answered; recent | warning |
| unrequested | acknowledged without expecting it; or an answer to nothing | warning |
| offered_not_in_context | shown to a session an hour ago, and neither seen nor returned | warning |

A relay that is not running does nothing: overdue is judged by its last activity. A delivery that
was given up for lack of an answer is not owed one any longer.
"""

from __future__ import annotations

from datetime import datetime

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
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
    first_rows,
    instant,
    make_findings,
    sums,
)
from relay.audit.jobs.reconcile import STORE_SECTIONS
from relay.audit.schemas import conform, results
from relay.base.clock import NS_PER_S
from relay.base.names import ORCHESTRATOR

NAME = "acks"
OWED = "acks_owed"
SHOWN = 20  # pairs that owe most
CHECKS = ("given_up", "overdue", "unrequested", "offered_not_in_context")
ASKING = ("Command", "Query")
LOST, SHOWN_NS = "offered_not_in_context", 3600 * NS_PER_S
ANSWERS = ("Acknowledgment", "Response")
_US_PER_MS = 1000.0


def make(inputs: Inputs) -> Tables:
    """Make a row a pair of sender and recipient, and one for each that is owed or unrequested."""
    stored = inputs.store(
        STORE_SECTIONS,
        "id",
        "relay_id",
        "message_type",
        "sender",
        "to",
        "channel_id",
        "correlation_id",
    )
    channels = inputs.store("channels", "id", "delivery", "ack_timeout_s", "modified_at")
    journal = inputs.journal("end", "at", "event", "state", "due_at", "deliveries")
    state = inputs.ledger("orchestrator_state", "updated_at")
    asked = requests_of(stored, channels, inputs.config.delivery.ack_timeout_s)
    judged = judge(sent(inputs), asked, journal, state, inputs.grace_ns)
    kept = judged.where(F.col("class").isNotNull())
    offers = inputs.ledger("offers", "message_id", "recipient", "offer", "state", "offered_at")
    lost = not_in_context(offers, sent(inputs), inputs.observed_until_ns)
    over = given_up(sent(inputs), inputs.recent_since_ns)
    owed = conform(kept, results.OWED).unionByName(unrequested(stored)).unionByName(lost)
    return {NAME: by_pair(judged), OWED: owed.unionByName(over)}


def requests_of(stored: DataFrame, channels: DataFrame, default_timeout_s: int) -> DataFrame:
    """Make a row a message of the store: ``asks`` is true when its kind or channel wants an ack."""
    by_channel = channels.groupBy(F.col("id").alias("channel_id")).agg(
        F.max_by("delivery", "modified_at").alias("delivery"),
        F.max_by("ack_timeout_s", "modified_at").alias("ack_timeout_s"),
        F.max("modified_at").alias("modified_at"),
    )
    # a message that is leaving the store is in an archive, too
    once = (
        stored.where(F.col("relay_id").isNotNull())
        .groupBy("relay_id")
        .agg(
            F.max(F.col("id").try_cast("bigint")).alias("number"),
            F.max(F.col("channel_id")).alias("channel_id"),
            F.bool_or(F.col("message_type").isin(*ASKING)).alias("is_asking"),
            F.bool_or(F.col("message_type") == "Acknowledgment").alias("is_answer"),
        )
    )
    joined = once.join(F.broadcast(by_channel), on="channel_id", how="left")
    by_mode = F.coalesce(F.col("delivery") != "AtMostOnce", F.lit(False))
    timeout = F.coalesce(F.col("ack_timeout_s").cast("bigint"), F.lit(default_timeout_s))
    return joined.select(
        "relay_id",
        "number",
        ((F.col("is_asking") | by_mode) & ~F.col("is_answer")).alias("asks"),
        timeout.alias("timeout_s"),
        "modified_at",
    )


def judge(
    deliveries: DataFrame,
    asked: DataFrame,
    journal: DataFrame,
    state: DataFrame,
    grace_ns: int,
) -> DataFrame:
    """Classify deliveries that owe an acknowledgment, or have one; ``class`` NULL: all is well."""
    joined = _with_requests(deliveries, asked, journal, state)
    is_told = F.coalesce(F.col("written_at") >= F.col("journal_from"), F.lit(False))
    by_kind = F.coalesce("asks", F.lit(False))
    is_open = F.col("obligation") == "open"
    owes = (
        F.when(F.col("obligation").isNotNull(), is_open)
        .when(is_told, F.col("due_at").isNotNull())
        .otherwise(by_kind)
    )
    after_us = F.unix_micros("written_at") + F.col("timeout_s") * 1_000_000
    due_at = F.coalesce("owed_until", "due_at", F.when(by_kind, F.timestamp_micros(after_us)))
    past_s = (F.unix_micros("alive_at") - F.unix_micros(due_at)) / 1_000_000
    is_acked = F.col("acked_at").isNotNull() & ~F.coalesce(is_open, F.lit(False))
    changed = F.coalesce(F.col("modified_at") >= F.col("written_at"), F.lit(False))
    is_unrequested = is_told & F.col("due_at").isNull() & ~by_kind & ~changed
    known = F.col("number").isNotNull()
    is_again = (F.col("attempt") > 1) | (F.col("reminders") > 0)
    is_late = is_again | F.coalesce(F.col("acked_at") > due_at, F.lit(False))
    return joined.where(is_acked | owes).select(
        F.when(is_acked & is_unrequested & known, "unrequested")
        .when(~is_acked & (past_s > grace_ns / 10**9), "overdue")
        .when(~is_acked & is_again, "late")
        .when(~is_acked, "owed")
        .alias("class"),
        "message_id",
        F.col("sender").alias("agent"),
        F.col("target").alias("route"),
        "recipient",
        "state",
        "attempt",
        "written_at",
        due_at.alias("due_at"),
        F.when(~is_acked, past_s).alias("overdue_s"),
        "acked_at",
        "ack_status",
        is_late.alias("is_late"),
    )


def _with_requests(
    deliveries: DataFrame,
    asked: DataFrame,
    journal: DataFrame,
    state: DataFrame,
) -> DataFrame:
    """Join deliveries to agents with everything that may request their acknowledgment."""
    by_agents = deliveries.where(F.col("recipient") != ORCHESTRATOR).where(
        F.col("acked_at").isNotNull() | F.col("state").isin("written", "read")
    )
    facts = journal.agg(F.min("at").alias("journal_from")).crossJoin(
        state.agg(F.max("updated_at").alias("alive_at"))
    )
    return (
        by_agents.join(asked, on=F.col("message_id") == F.col("relay_id"), how="left")
        .join(_dues(journal), on=["number", "recipient"], how="left")
        .crossJoin(F.broadcast(facts))
    )


def _dues(journal: DataFrame) -> DataFrame:
    """Read the last due time of each delivery from the journal, for those that owe."""
    timed = journal.where(F.col("due_at").isNotNull() & F.col("deliveries").isNotNull())
    each = timed.select("due_at", F.explode("deliveries").alias("one"))
    return each.groupBy(
        F.col("one.number").try_cast("bigint").alias("number"),
        F.col("one.recipient").alias("recipient"),
    ).agg(F.max("due_at").alias("due_at"))


def unrequested(stored: DataFrame) -> DataFrame:
    """Find answers of agents in threads without a question: results.OWED."""
    threads = stored.where(F.col("correlation_id").isNotNull()).groupBy("correlation_id")
    is_answer = F.col("message_type").isin(*ANSWERS)
    by_agent = is_answer & (F.col("sender") != ORCHESTRATOR)
    summed = threads.agg(
        F.count_if(~is_answer).alias("asked"),
        F.min(F.when(by_agent, F.struct("relay_id", "sender", "to"))).alias("one"),
    )
    wrong = summed.where((F.col("asked") == 0) & F.col("one.relay_id").isNotNull())
    named = wrong.select(
        F.lit("unrequested").alias("class"),
        F.col("one.relay_id").alias("message_id"),
        F.col("one.sender").alias("agent"),
        F.col("one.to").alias("route"),
        F.col("one.sender").alias("recipient"),
    )
    return _conform(named)


def not_in_context(offers: DataFrame, deliveries: DataFrame, until_ns: int) -> DataFrame:
    """Find messages that a hook showed, of which nothing was heard since: results.OWED."""
    last = offers.groupBy("message_id", "recipient").agg(
        F.max_by(F.struct("state", "offered_at"), "offer").alias("last")
    )
    before = instant(until_ns - SHOWN_NS)
    lost = last.where((F.col("last.state") == "offered") & (F.col("last.offered_at") < before))
    named = lost.join(deliveries, on=["message_id", "recipient"], how="inner").select(
        F.lit(LOST).alias("class"),
        "message_id",
        F.col("sender").alias("agent"),
        F.col("target").alias("route"),
        "recipient",
        F.col("state").alias("state"),
        "attempt",
        "written_at",
    )
    return _conform(named.where(F.col("state") == "written"))


def given_up(deliveries: DataFrame, since_ns: int) -> DataFrame:
    """Find commands and queries that came to an agent and were never answered: results.OWED."""
    since = F.coalesce("written_at", "discovered_at") >= instant(since_ns)
    is_over = (F.col("obligation") == "given_up") & F.col("state").isin("written", "read", "dead")
    over = deliveries.where(is_over & since & (F.col("recipient") != ORCHESTRATOR))
    return _conform(
        over.select(
            F.lit("given_up").alias("class"),
            "message_id",
            F.col("sender").alias("agent"),
            F.col("target").alias("route"),
            "recipient",
            "state",
            "attempt",
            "written_at",
        )
    )


def _conform(named: DataFrame) -> DataFrame:
    """Complete rows with the columns that they lack: results.OWED."""
    rest = [field for field in results.OWED if field.name not in named.columns]
    nothing = {field.name: F.lit(None).cast(field.dataType) for field in rest}
    return conform(named.withColumns(nothing), results.OWED)


def by_pair(judged: DataFrame) -> DataFrame:
    """Count, and time, by sender and recipient: results.ACKS."""
    is_acked = F.col("acked_at").isNotNull() & F.coalesce(
        F.col("class") == "unrequested", F.lit(True)
    )
    took = (F.unix_micros("acked_at") - F.unix_micros("written_at")) / _US_PER_MS
    took_ms = F.when(is_acked, took)
    pairs = judged.groupBy(F.col("agent").alias("sender"), "recipient").agg(
        F.count_if(is_acked).alias("acked"),
        F.count_if(is_acked & (F.col("ack_status") == "failed")).alias("failed"),
        F.count_if(~is_acked).alias("owed"),
        F.count_if((F.col("class") == "late") | (is_acked & F.col("is_late"))).alias("late"),
        F.count_if(F.col("class") == "overdue").alias("overdue"),
        F.percentile_approx(took_ms, [0.5, 0.9, 0.99]).alias("ms"),
        F.max(took_ms).alias("max_ms"),
    )
    ranks = {f"p{rank}_ms": F.col("ms")[i] for i, rank in enumerate((50, 90, 99))}
    return conform(pairs.withColumns(ranks), results.ACKS)


def counts(tables: Written) -> dict[str, int]:
    """Acknowledged, owed, late, overdue, given up, unrequested answers."""
    totals = sums(tables[NAME], "acked", "failed", "owed", "late", "overdue")
    others = ("given_up", "unrequested")
    return totals | {
        name: tables[OWED].count_rows(filter=pc.field("class") == name) for name in others
    }


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find answers given up, overdue and unrequested: results.FINDING."""
    return make_findings(
        tables[OWED].where(F.col("class").isin(*CHECKS)),
        F.concat(F.lit(f"{NAME}."), F.col("class")),
        WARNING,
        observed_at,
        message_id="message_id",
        agent="agent",
        route="route",
        detail=("recipient", "state", "attempt", "written_at", "due_at", "overdue_s"),
    )


def shown(tables: Written) -> Rows:
    """Choose the pairs to print: those that owe most, then the slowest."""
    order = {"owed": DESCENDING, "p99_ms": DESCENDING, "sender": ASCENDING, "recipient": ASCENDING}
    return first_rows(tables[NAME], order, limit=SHOWN)


def _is(name: str) -> Column:
    return F.col("class") == name


JOB = AuditJob(
    name=NAME,
    description="answers owed, overdue, given up, unrequested; time to each",
    tables={NAME: results.ACKS, OWED: results.OWED},
    make=make,
    counts=counts,
    findings=findings,
    checks=CHECKS,
    shown=shown,
)
