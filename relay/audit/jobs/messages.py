"""Every message as ledger, store, journal and archive have it, side by side, for `reconcile`.

Every function is DataFrame to DataFrame. All sources are put into one table and grouped once by
the message's id: as joins, each of them would be shuffled and sorted by itself.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.acomm.model import Priority
from relay.audit.jobs.horizon import Horizon
from relay.audit.jobs.job import lookup, named_values
from relay.base.message import ANSWERS
from relay.base.names import ORCHESTRATOR

WAITING = ("held", "staged")
ENDED = ("expired", "bounced", "dead")
ARCHIVED = "archived"
_NS_PER_US = 1000
_PRIORITIES = {one.label[0]: one.label for one in Priority}


class MessageSources(NamedTuple):
    """The sources that are compared."""

    messages: DataFrame  # the ledger's, and so are its deliveries
    deliveries: DataFrame
    stored: DataFrame
    journal: DataFrame
    originals: DataFrame


def side_by_side(given: MessageSources) -> DataFrame:
    """Make one row a message of whichever source: its ledger row, and the data of the others.

    ``copies``, ``records`` and ``original_path`` are NULL where store, journal or archive do not
    have it, the ledger's columns where it has no row. Its age in the store is the younger of
    discovery and the engine's own time.
    """
    row_columns = given.messages.columns[1:]
    sides = [
        given.messages.select("message_id", F.struct(*row_columns).alias("row")),
        given.deliveries.select("message_id", F.struct("state").alias("delivery")),
        _in_store(given.stored),
        _in_journal(given.journal),
        _in_archive(given.originals),
    ]
    every = sides[0]
    for side in sides[1:]:
        every = every.unionByName(side, allowMissingColumns=True)
    # Strings are aggregated in order: ordered once, where each row is moved once.
    grouped = every.repartition("message_id").groupBy("message_id")
    summed = grouped.agg(
        F.max("row").alias("row"),
        F.count("delivery").alias("deliveries"),
        F.count_if(F.col("delivery.state") == "dead").alias("dead"),
        *_of_store(),
        *_of_journal(),
        *_of_archive(),
    )
    there = F.coalesce("row.status", "store_file", "original_path").isNotNull()
    known = summed.where(there | F.col("records").isNotNull())
    return known.join(_ends(given.deliveries), on="message_id", how="left").select(
        "*", *[f"row.{name}" for name in row_columns]
    )


def _ends(deliveries: DataFrame) -> DataFrame:
    """Make one row a message with deliveries that wait, or have ended unwritten, with recipients.

    Names are collected of these few alone: a list for every message is ten times the work.
    """
    waiting, ended = F.col("state").isin(*WAITING), F.col("state").isin(*ENDED)
    few = deliveries.where(waiting | ended).groupBy("message_id")
    return few.agg(_recipients(waiting).alias("waiting_for"), _recipients(ended).alias("ended_for"))


def _in_store(stored: DataFrame) -> DataFrame:
    """Choose messages with a relay id; others were sent through the engine alone."""
    names = ("file", "checksum", "sender", "to", "kind", "created_at")
    more = (_dated().alias("dated"), _rank().alias("rank"), *_marks("to", "correlation_id"))
    return stored.where(F.col("relay_id").isNotNull()).select(
        F.col("relay_id").alias("message_id"), F.struct(*names, *more).alias("copy")
    )


def _of_store() -> list[Column]:
    return [
        F.nullif(F.count("copy"), F.lit(0)).alias("copies"),
        F.count("copy.checksum").alias("checksums"),
        F.min("copy.checksum").alias("lowest_checksum"),
        F.max("copy.checksum").alias("highest_checksum"),
        F.min("copy.sender").alias("sender"),
        F.min("copy.to").alias("to"),
        F.min("copy.kind").alias("kind"),
        F.min("copy.file").alias("store_file"),
        F.max("copy.created_at").alias("stored_at"),
        F.max("copy.dated").alias("dated"),
        F.min("copy.dated").alias("first_dated"),
        F.min("copy.created_at").alias("first_stored_at"),
        F.max("copy.rank").alias("rank"),
        F.max("copy.ttl").alias("ttl"),
        F.max("copy.topic_mark").alias("topic_mark"),
        F.max("copy.thread_mark").alias("thread_mark"),
    ]


def _in_journal(journal: DataFrame) -> DataFrame:
    sent = journal.where((F.col("event") == "MessageSent") & F.col("relay_id").isNotNull())
    names = ("end", "at", "checksum", "sender", "to", "kind", "created_at")
    record = F.struct(*names, _dated().alias("dated")).alias("record")
    return sent.select(F.col("relay_id").alias("message_id"), record)


def _dated() -> Column:
    """Return the discovery, in the microseconds of the ledger; a float has too few digits."""
    return F.timestamp_micros(F.expr(f"created_ns div {_NS_PER_US}"))


def _rank() -> Column:
    """Return the priority as a number, by its first letter, which is unique; 0 for none."""
    return F.ascii("priority")


def _seconds(ttl: str) -> Column:
    return F.when(F.col(ttl) >= 0, F.col(ttl).cast("string")).otherwise("none")


def _marks(to: str, thread: str) -> tuple[Column, Column, Column]:
    """Make numbers of TTL (-1: none), TOPIC and thread: texts take longer to aggregate.

    NULL without a TO, since the header was not read, or without a thread.
    """
    is_read = F.col(to).isNotNull()
    ttl = F.coalesce(F.col("ttl_s").cast("decimal(20,0)"), F.lit(-1))
    return (
        F.when(is_read, ttl).alias("ttl"),
        F.when(is_read, F.xxhash64("topic")).alias("topic_mark"),
        F.when(F.col(thread).isNotNull(), F.xxhash64(thread)).alias("thread_mark"),
    )


def _of_journal() -> list[Column]:
    return [
        F.nullif(F.count("record"), F.lit(0)).alias("records"),
        F.min("record.end").alias("journal_end"),
        F.max("record.at").alias("journaled_at"),
        F.min("record.checksum").alias("lowest_journaled"),
        F.max("record.checksum").alias("journal_checksum"),
        F.min("record.sender").alias("journal_sender"),
        F.min("record.to").alias("journal_to"),
        F.min("record.kind").alias("journal_kind"),
        F.max("record.dated").alias("journal_dated"),
        F.max("record.created_at").alias("created_at"),
    ]


def _in_archive(originals: DataFrame) -> DataFrame:
    """Choose accepted originals: neither rejected nor duplicates."""
    kept = originals.where((F.col("kind") == "original") & F.col("message_id").isNotNull())
    names = ("path", "agent", "size", "checksum", "changed_at", "target", "message_type")
    more = (_rank().alias("rank"), *_marks("target", "thread"))
    original = F.struct(*names, *more).alias("original")
    return kept.select("message_id", original)


def _of_archive() -> list[Column]:
    return [
        F.count("original").alias("originals"),
        F.min("original.target").alias("original_to"),
        F.min("original.message_type").alias("original_kind"),
        F.max("original.rank").alias("original_rank"),
        F.max("original.ttl").alias("original_ttl"),
        F.max("original.topic_mark").alias("original_topic_mark"),
        F.max("original.thread_mark").alias("original_thread_mark"),
        F.min("original.size").alias("least_size"),
        F.max("original.size").alias("most_size"),
        F.min("original.path").alias("original_path"),
        F.min("original.agent").alias("original_agent"),
        F.min("original.checksum").alias("lowest_original"),
        F.max("original.checksum").alias("original_checksum"),
        F.max("original.changed_at").alias("original_at"),
    ]


def journal_begin(journal: DataFrame) -> DataFrame:
    """Make one row: the time since which the journal is complete, and where its first record ends.

    ``journal_from`` NULL: the journal is missing.
    """
    return journal.agg(F.min("at").alias("journal_from"), F.min("end").alias("journal_begin"))


def first_judged_day(
    messages: DataFrame, originals: DataFrame, snapshot_ns: int, days: int, mib: int
) -> DataFrame:
    """Make one row, ``originals_from``: the first day whose originals must all be there.

    Retention, of ``days`` and ``mib`` where they are not 0, removes whole days, the oldest first,
    and nothing of today. So a day is judged when an older one is still there. The oldest itself
    may be half removed just now, unless neither its age nor the total size call for that.
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
    """True for a row whose original was moved into the archive."""
    return (
        (F.col("status") == ARCHIVED)
        & (F.col("agent_name") != ORCHESTRATOR)
        & F.col("file_path").startswith("archive/")
    )


def last_archive_report(messages: DataFrame, until: Column) -> DataFrame:
    """Make one row, ``noted_at``: the last time when the ledger recorded archived originals.

    The transaction that completes a batch also records the archived files of the batch before; a
    start does so for every archived file that it finds. Times after ``until`` do not count.
    """
    is_finished = F.col("status").isin("completed", ARCHIVED)
    finished = messages.where(is_finished & (F.col("processed_at") <= until))
    return finished.agg(F.max("processed_at").alias("noted_at"))


def other_headers(judged: Horizon) -> Column:
    """Name each header that differs between the sources, with both values; NULL: none does.

    A time that cannot be is among them. Of TOPIC and thread only hashes are here, so their values
    are not named.
    """
    said = [
        _other_values(
            "sender", "ledger", "agent_name", "sender", "journal_sender", "original_agent"
        ),
        _other_values("TO", "ledger", "target", "to", "journal_to", "original_to"),
        _other_values("kind", "ledger", "message_type", "kind", "journal_kind", "original_kind"),
        _other_values("time", "ledger", "discovered_at", "dated", "first_dated", "journal_dated"),
        _other_values("stored at", "journal", "created_at", "stored_at", "first_stored_at"),
        F.when(
            F.col("rank") != F.col("original_rank"),
            named_values(
                "priority",
                store=lookup(_PRIORITIES, F.chr("rank")),
                original=lookup(_PRIORITIES, F.chr("original_rank")),
            ),
        ),
        F.when(
            F.col("ttl") != F.col("original_ttl"),
            named_values("TTL", store=_seconds("ttl"), original=_seconds("original_ttl")),
        ),
        F.when(
            F.col("topic_mark") != F.col("original_topic_mark"),
            F.lit("TOPIC: not the same in store and original"),
        ),
        F.when(_is_of_another_thread(), F.lit("thread: not the same in store and original")),
        impossible_time(judged),
    ]
    return F.nullif(F.concat_ws("; ", *said), F.lit(""))


def impossible_time(judged: Horizon) -> Column:
    """Name a ``processed_at`` after the horizon, with the time of the snapshot; else NULL.

    Where the clock was set back, the message's other times are after the snapshot as well.
    """
    others = F.greatest("discovered_at", "dated", "stored_at", "journaled_at")
    is_late = (F.col("processed_at") > judged.until) & ~(others >= judged.since)
    values = named_values("processed_at", ledger="processed_at", snapshot=judged.snapshot)
    return F.when(is_late, values)


def _other_values(header: str, source: str, mine: str, *others: str) -> Column:
    """Name the value that ``source`` has in ``mine``, and those of ``others`` that differ."""
    differ = [
        F.when(
            F.col(name) != F.col(mine),
            F.concat(F.lit(f"{_source_of(name)} "), F.col(name).cast("string")),
        )
        for name in others
    ]
    first = F.concat(F.lit(f"{header}: {source} "), F.col(mine).cast("string"))
    listed = F.array_join(F.array_distinct(F.array(*differ)), ", ")
    return F.when(F.coalesce(*differ).isNotNull(), F.concat_ws(", ", first, listed))


def _source_of(column: str) -> str:
    """Return the source of a column of ``side_by_side``; those without a prefix are the store's."""
    prefix = column.partition("_")[0]
    return prefix if prefix in ("journal", "original") else "store"


def _is_of_another_thread() -> Column:
    """True where an original names a thread, and the store has it in another or in none.

    An answer is always in the thread of its question.
    """
    is_other = ~F.col("thread_mark").eqNullSafe(F.col("original_thread_mark"))
    names_one = F.col("copies").isNotNull() & F.col("original_thread_mark").isNotNull()
    return F.coalesce(is_other & names_one & ~F.col("message_type").isin(*ANSWERS), F.lit(False))


def _recipients(where: Column) -> Column:
    """List these recipients, in order, divided by commas; NULL without any."""
    names = F.sort_array(F.collect_list(F.when(where, F.col("recipient"))))
    return F.nullif(F.array_join(names, ", "), F.lit(""))
