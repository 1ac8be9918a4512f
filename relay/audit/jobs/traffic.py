"""Who writes to whom, how much, and how long it takes from discovery to the inbox.

A message to several is counted once for each of them. What was not written does not count.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.audit import schemas
from relay.audit.evidence import Evidence
from relay.audit.jobs.job import Job, Tables

NAME = "traffic"
SHOWN = 20  # pairs, the busiest first
_US_PER_MS = 1000.0


def make(evidence: Evidence) -> Tables:
    """One row a pair of sender and recipient: schemas.TRAFFIC."""
    messages = evidence.ledger("messages", "message_id", "agent_name", "file_size", "discovered_at")
    deliveries = evidence.ledger("deliveries", "message_id", "recipient", "written_at")
    return {NAME: traffic(messages, deliveries)}


def traffic(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Count what was written, by sender and recipient: schemas.TRAFFIC.

    Percentiles are values that occurred, exact up to 10,000 different ones a pair. A latency
    is negative when the clock was put back in between.
    """
    written = deliveries.where(F.col("written_at").isNotNull())
    pairs = (
        written.join(messages, on="message_id", how="inner")
        .select(F.col("agent_name").alias("sender"), "recipient", "file_size", _latency_ms())
        .groupBy("sender", "recipient")
        .agg(
            F.count("*").alias("messages"),
            F.sum("file_size").alias("bytes"),
            F.percentile_approx("latency_ms", 0.5).alias("p50_ms"),
            F.percentile_approx("latency_ms", 0.99).alias("p99_ms"),
            F.max("latency_ms").alias("max_ms"),
        )
    )
    return schemas.conform(pairs, schemas.TRAFFIC)


def counts(tables: Tables) -> DataFrame:
    """Pairs, messages and bytes in all: schemas.COUNT."""
    totals = tables[NAME].agg(
        F.count("*").alias("pairs"),
        F.coalesce(F.sum("messages"), F.lit(0)).alias("messages"),
        F.coalesce(F.sum("bytes"), F.lit(0)).alias("bytes"),
    )
    return schemas.conform(
        totals.unpivot([], ["pairs", "messages", "bytes"], "name", "count"), schemas.COUNT
    )


def busiest(tables: Tables) -> DataFrame:
    """The pairs to print."""
    ordered = tables[NAME].orderBy(F.desc("messages"), "sender", "recipient")
    return schemas.conform(ordered, schemas.TRAFFIC).limit(SHOWN)


def _latency_ms() -> Column:
    elapsed = F.unix_micros("written_at") - F.unix_micros("discovered_at")
    return (elapsed / _US_PER_MS).alias("latency_ms")


JOB = Job(
    name=NAME,
    explains="who writes to whom: messages, bytes, milliseconds to the inbox",
    tables={NAME: schemas.TRAFFIC},
    make=make,
    counts=counts,
    shown=busiest,
)
