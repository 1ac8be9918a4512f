"""Traffic between agents: messages, bytes, and the time from discovery to the inbox.

A message to several recipients is counted once for each. Deliveries that were not written do not
count. It has no findings: a burst is a row of `traffic_bursts`.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.deliveries import sent
from relay.audit.jobs.job import (
    ASCENDING,
    DESCENDING,
    AuditJob,
    Rows,
    Tables,
    Written,
    elapsed_ms,
    first_rows,
    hour_of,
    sums,
)
from relay.audit.schemas import conform, results

NAME = "traffic"
AGENTS, HOURS, BURSTS = f"{NAME}_agents", f"{NAME}_hours", f"{NAME}_bursts"
SHOWN = 20  # pairs, the busiest first
BURST_TIMES_MEDIAN = 10  # of the minutes with any message
BURST_LEAST = 600  # messages in a minute: ten a second, too fast for a person
ENDED = ("dead", "expired", "bounced")


def make(inputs: Inputs) -> Tables:
    """Make pairs, agents, hours and bursts; pairs are counted once for two of them."""
    deliveries = sent(inputs)
    pairs = inputs.cached("traffic pairs", lambda: traffic(deliveries))
    messages = inputs.ledger("messages", "agent_name", "file_size", "discovered_at")
    minutes = inputs.cached("traffic minutes", lambda: by_minute(messages))
    return {
        NAME: pairs,
        AGENTS: by_agent(pairs),
        HOURS: by_hour(minutes, deliveries),
        BURSTS: bursts(minutes),
    }


def traffic(deliveries: DataFrame) -> DataFrame:
    """Count what was written, by sender and recipient: results.TRAFFIC.

    Percentiles are values that occurred, exact up to 10,000 different ones a pair. A latency
    is negative when the clock was set back in between.
    """
    written = deliveries.where(F.col("written_at").isNotNull())
    latency = elapsed_ms("discovered_at", "written_at").alias("latency_ms")
    pairs = (
        written.select("sender", "recipient", "file_size", latency)
        .groupBy("sender", "recipient")
        .agg(
            F.count("*").alias("messages"),
            F.sum("file_size").alias("bytes"),
            F.percentile_approx("latency_ms", [0.5, 0.99]).alias("ms"),
            F.max("latency_ms").alias("max_ms"),
        )
    )
    named = pairs.select("*", F.col("ms")[0].alias("p50_ms"), F.col("ms")[1].alias("p99_ms"))
    return conform(named, results.TRAFFIC)


def by_agent(pairs: DataFrame) -> DataFrame:
    """Sum the pairs by agent: recipients, senders, messages and bytes.

    results.TRAFFIC_AGENTS.
    """
    nothing = F.lit(0)
    ends = pairs.select(
        F.col("sender").alias("agent"),
        F.lit(1).alias("recipients"),
        nothing.alias("senders"),
        F.col("messages").alias("sent"),
        nothing.alias("received"),
        F.col("bytes").alias("bytes_sent"),
        nothing.alias("bytes_received"),
    ).unionByName(
        pairs.select(
            F.col("recipient").alias("agent"),
            nothing.alias("recipients"),
            F.lit(1).alias("senders"),
            nothing.alias("sent"),
            F.col("messages").alias("received"),
            nothing.alias("bytes_sent"),
            F.col("bytes").alias("bytes_received"),
        )
    )
    names = [name for name in results.TRAFFIC_AGENTS.names if name != "agent"]
    totals = ends.groupBy("agent").agg(*[F.sum(name).alias(name) for name in names])
    return conform(totals, results.TRAFFIC_AGENTS)


def by_minute(messages: DataFrame) -> DataFrame:
    """Count messages and bytes a minute of discovery, and find the busiest sender.

    By sender first: few rows are left to compare.
    """
    minute = F.date_trunc("minute", "discovered_at").alias("minute")
    by_sender = messages.groupBy(minute, "agent_name").agg(
        F.count("*").alias("messages"), F.sum("file_size").alias("bytes")
    )
    return by_sender.groupBy("minute").agg(
        F.max(F.struct("messages", "agent_name")).alias("most"),
        F.sum("messages").alias("messages"),
        F.sum("bytes").alias("bytes"),
    )


def by_hour(minutes: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Count messages and deliveries of each hour: results.TRAFFIC_HOURS."""
    nothing = F.lit(0)
    discovered = minutes.select(
        hour_of("minute").alias("hour"),
        "messages",
        "bytes",
        nothing.alias("deliveries"),
        nothing.alias("dead"),
    )
    ended = F.col("state").isin(*ENDED)
    accepted_at = F.coalesce("staged_at", "discovered_at")
    carried = (
        deliveries.where(F.col("written_at").isNotNull() | ended)
        .groupBy(hour_of(F.when(ended, accepted_at).otherwise(F.col("written_at"))).alias("hour"))
        .agg(F.count_if(~ended).alias("deliveries"), F.count_if(ended).alias("dead"))
        .select("hour", nothing.alias("messages"), nothing.alias("bytes"), "deliveries", "dead")
    )
    names = ("messages", "bytes", "deliveries", "dead")
    both = discovered.unionByName(carried).groupBy("hour")
    return conform(both.agg(*[F.sum(n).alias(n) for n in names]), results.TRAFFIC_HOURS)


def bursts(minutes: DataFrame) -> DataFrame:
    """Find minutes far above the median one, the largest first: results.TRAFFIC_BURSTS."""
    usual = minutes.agg(F.median("messages").alias("median"))
    times = F.col("messages") / F.col("median")
    large = (F.col("messages") >= BURST_LEAST) & (F.col("times_median") >= BURST_TIMES_MEDIAN)
    rows = minutes.crossJoin(F.broadcast(usual)).withColumn("times_median", times).where(large)
    named = rows.select(
        "minute",
        "messages",
        "bytes",
        "times_median",
        F.col("most.agent_name").alias("busiest"),
        F.col("most.messages").alias("busiest_messages"),
    )
    return conform(named.orderBy(F.desc("messages")), results.TRAFFIC_BURSTS)


def counts(tables: Written) -> dict[str, int]:
    """Count pairs, messages and bytes."""
    return {"pairs": tables[NAME].count_rows(), **sums(tables[NAME], "messages", "bytes")}


def shown(tables: Written) -> Rows:
    """Choose the pairs to print, the busiest first."""
    order = {"messages": DESCENDING, "sender": ASCENDING, "recipient": ASCENDING}
    return first_rows(tables[NAME], order, limit=SHOWN)


JOB = AuditJob(
    name=NAME,
    description="pairs of agents: messages, bytes, milliseconds to the inbox",
    tables={
        NAME: results.TRAFFIC,
        AGENTS: results.TRAFFIC_AGENTS,
        HOURS: results.TRAFFIC_HOURS,
        BURSTS: results.TRAFFIC_BURSTS,
    },
    make=make,
    counts=counts,
    shown=shown,
)
