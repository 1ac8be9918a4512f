"""What each source says of a message, one row a message: the sides that reconcile compares.

Every function is DataFrame to DataFrame, groups once by the message's id, and keeps narrow
columns alone: the joins behind them then move each row once.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.names import ORCHESTRATOR

WAITING = ("held", "staged")
ENDED = ("expired", "bounced", "dead")
ARCHIVED = "archived"
_NS_PER_US = 1000


def by_message(deliveries: DataFrame) -> DataFrame:
    """One row a message: how many deliveries, and whose wait or have ended unwritten.

    Names are collected of these few alone: a list for every message is ten times the work.
    """
    counted = deliveries.groupBy("message_id").agg(
        F.count("recipient").alias("deliveries"),
        F.count_if(F.col("state") == "dead").alias("dead"),
    )
    waiting, ended = F.col("state").isin(*WAITING), F.col("state").isin(*ENDED)
    named = (
        deliveries.where(waiting | ended)
        .groupBy("message_id")
        .agg(
            _recipients(waiting).alias("waiting_for"),
            _recipients(ended).alias("ended_for"),
        )
    )
    return counted.join(named, on="message_id", how="left")


def by_relay_id(stored: DataFrame) -> DataFrame:
    """One row a message of the store, whatever the number of files that hold it.

    Messages without a relay id were sent through the engine alone: the ledger knows nothing
    of them. Its age is the younger of discovery and the engine's own time, since an answer to
    a file is dated back to that file.
    """
    relayed = stored.where(F.col("relay_id").isNotNull())
    return relayed.groupBy("relay_id").agg(
        F.count("file").alias("copies"),
        F.count("checksum").alias("checksums"),
        F.min("checksum").alias("lowest_checksum"),
        F.max("checksum").alias("highest_checksum"),
        F.min("sender").alias("sender"),
        F.min("to").alias("to"),
        F.min("file").alias("store_file"),
        F.max("created_at").alias("stored_at"),
        F.max(F.timestamp_micros(F.floor(F.col("created_ns") / _NS_PER_US))).alias("dated"),
    )


def by_sent(journal: DataFrame) -> DataFrame:
    """One row a message that the journal accepted, by the ledger's id."""
    sent = journal.where((F.col("event") == "MessageSent") & F.col("relay_id").isNotNull())
    return sent.groupBy(F.col("relay_id").alias("journal_id")).agg(
        F.count("end").alias("records"),
        F.min("end").alias("journal_end"),
        F.max("at").alias("journaled_at"),
        F.min("checksum").alias("lowest_journaled"),
        F.max("checksum").alias("journal_checksum"),
        F.min("sender").alias("journal_sender"),
        F.min("to").alias("journal_to"),
    )


def by_original(originals: DataFrame) -> DataFrame:
    """One row a message whose original lies in the archive: not refused, no second file."""
    kept = originals.where((F.col("kind") == "original") & F.col("message_id").isNotNull())
    return kept.groupBy(F.col("message_id").alias("original_id")).agg(
        F.min("path").alias("original_path"),
        F.min("agent").alias("original_agent"),
        F.min("checksum").alias("lowest_original"),
        F.max("checksum").alias("original_checksum"),
        F.max("problem").alias("original_problem"),
        F.max("changed_at").alias("original_at"),
    )


def reach(journal: DataFrame, state: DataFrame) -> DataFrame:
    """One row: from when on the journal tells everything, and up to where the ledger follows it.

    ``journal_from`` NULL: there is no journal; ``follows`` NULL: the ledger says nothing of it.
    """
    begins = journal.agg(F.min("at").alias("journal_from"))
    follows = state.where(F.col("key") == "journal").agg(
        F.max(F.col("value").try_cast("bigint")).alias("follows")
    )
    return begins.crossJoin(follows)


def originals_from(
    messages: DataFrame, originals: DataFrame, snapshot_ns: int, days: int, mib: int
) -> DataFrame:
    """One row, ``originals_from``: the first day of which no original may be missing.

    Retention, of ``days`` and ``mib`` where they are not 0, takes whole days, the oldest first,
    and nothing of today. So a day is judged when an older one is still there. The oldest itself
    may be half removed just now, unless neither its age nor the size of all are a reason to.
    """
    day = F.substring("file_path", len("archive/") + 1, len("2026-01-31"))
    rows = messages.where(is_filed()).groupBy(day.alias("day"))
    there = originals.where(F.col("kind") == "original").groupBy("day")
    kept = (
        rows.agg(F.count("*").alias("rows"), F.sum("file_size").alias("bytes"))
        .join(there.agg(F.count("*").alias("files")), on="day", how="left")
        .where(2 * F.coalesce("files", F.lit(0)) >= F.col("rows"))
        .agg(F.min("day").alias("first"), F.sum("bytes").alias("bytes"))
    )
    today = F.to_date(F.timestamp_micros(F.lit(snapshot_ns // _NS_PER_US)))
    is_whole = F.lit(True)
    if days:
        is_whole &= F.col("first") > F.date_add(today, -days).cast("string")
    if mib:
        is_whole &= F.col("bytes") <= mib << 20
    behind = F.date_add(F.to_date("first"), 1).cast("string")
    first = F.when(is_whole, F.col("first")).otherwise(behind)
    if not days and not mib:
        return kept.select(F.lit("").alias("originals_from"))
    return kept.select(F.least(first, today.cast("string")).alias("originals_from"))


def is_filed() -> Column:
    """True for a row of the ledger whose original was moved into the archive."""
    return (
        (F.col("status") == ARCHIVED)
        & (F.col("agent_name") != ORCHESTRATOR)
        & F.col("file_path").startswith("archive/")
    )


def _recipients(where: Column) -> Column:
    """Those recipients, in order, divided by commas; NULL when there are none."""
    names = F.sort_array(F.collect_list(F.when(where, F.col("recipient"))))
    return F.nullif(F.array_join(names, ", "), F.lit(""))
