"""Every message against ledger, store, journal and archive, and each of its deliveries.

A message has one class, the worst that is true of it:

| class | means | found |
|---|---|---|
| delivered | in the store with the ledger's checksum, and no delivery waits | |
| unverified | the same, but a checksum is missing or sealed | |
| returned | of its deliveries one expired, bounced or is dead; none waits | |
| discarded | dead for a recipient, and not in the store: its dead letter was discarded | |
| undelivered | completed, but a delivery is still held or staged | warning |
| checksum_differs | the content in the store is not the ledger's, or the ledger lost it | error |
| missing | completed or archived in the ledger, and not in the store | error |
| not_checked | the same, but a damaged file was skipped, which may have it | |
| journal_differs | the content in the journal is not the ledger's | error |
| headers_differ | store, journal or archive say another sender, TO, kind, time, | error |
| | priority, TTL, topic or thread; or processed later than the snapshot | |
| unjournaled | completed, and not in the journal, which goes back that far | error |
| original_differs | the archived file has another content or size than was accepted | error |
| original_missing | archived by the ledger, and not in the archive, nor pruned | error |
| path_differs | archived by the ledger, but its original has another path there | error |
| status_differs | pending or refused, for the ledger; accepted, for store or journal: or | error |
| | completed, although its original was archived long ago, | |
| | or audit_log has it archived | |
| in_flight | pending or processing: not finished yet | |
| failed | refused, and the sender has its nack; not expected in the store | |
| orphan | in store or journal, old enough to be judged, no ledger row | error |
| unknown_file | a file in the archive without a ledger row | warning |
| behind | in the journal behind the ledger's position, without a ledger row: see below | |
| recent | an orphan or unknown file that is too young to be judged | |

A delivery, of one message to one recipient, has one as well:

| class | means | found |
|---|---|---|
| held, staged, written, read, acked, expired, bounced, dead | the ledger's state | |
| missing | store or journal have accepted it, the ledger does not have it | error |
| orphan | in the ledger; store and journal have the message, but not this recipient | error |
| conflict | store or journal contradict the ledger's state or number of attempts; or | error |
| | the ledger lacks the time of its state | |
| not_checked | orphan or conflict, but a damaged file was skipped | |
| duplicate | put into the inbox more often than there were attempts | error |
| undeliverable_reply | a reply of the relay itself to an agent that no longer exists | |
| in_flight, failed, recent | as its message | |
| unknown | its message has no ledger row, which is a finding of the message | |

The home has one class, in ``reconcile_journal``:

| class | means | found |
|---|---|---|
| followed | the ledger has what the journal had before the grace | |
| ledger_behind | it does not: an older copy, a changed position, or the relay was | error |
| | killed and has not been started since | |
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.deliveries import by_recipient, delivery_class, is_known_to_engine
from relay.audit.jobs.horizon import Horizon, horizon, position, untold
from relay.audit.jobs.job import (
    ERROR,
    WARNING,
    AuditJob,
    Tables,
    Written,
    count_by,
    lookup,
    make_findings,
)
from relay.audit.jobs.messages import (
    MessageSources,
    archived_without_ack,
    first_judged_day,
    has_other_path,
    has_other_size,
    impossible_time,
    is_filed,
    journal_begin,
    last_archive_report,
    other_headers,
    side_by_side,
)
from relay.audit.schemas import conform, results
from relay.base.clock import NS_PER_S

NAME = "reconcile"
DELIVERIES = "reconcile_deliveries"
JOURNAL = "reconcile_journal"
BEHIND = "ledger_behind"
SEVERITY = {
    "missing": ERROR,
    "checksum_differs": ERROR,
    "journal_differs": ERROR,
    "headers_differ": ERROR,
    "status_differs": ERROR,
    "unjournaled": ERROR,
    "original_differs": ERROR,
    "original_missing": ERROR,
    "path_differs": ERROR,
    "orphan": ERROR,
    "unknown_file": WARNING,
    "undelivered": WARNING,
}
DELIVERY_CHECKS = {
    "missing": "delivery_missing",
    "orphan": "delivery_orphan",
    "conflict": "delivery_conflict",
    "duplicate": "delivery_duplicate",
}
OPEN = ("pending", "processing")
STATUS, HEADERS = "status_differs", "headers_differ"
STORE_SECTIONS = "messages,dead_letters,archive"
_MESSAGE = (
    "message_id",
    "agent_name",
    "target",
    "message_type",
    "status",
    "checksum",
    "file_path",
    "file_size",
    "file_inode",
    "discovered_at",
    "processed_at",
    "last_error",
)
_DELIVERY = (
    "message_id",
    "recipient",
    "state",
    "attempt",
    "written_at",
    "read_at",
    "acked_at",
)
_SAID = ("relay_id", "checksum", "sender", "to", "kind", "created_ns", "created_at")
_STORED = (*_SAID, "priority", "ttl_s", "topic", "correlation_id", "file")
_SENT = (*_SAID, "end", "at", "event")
_HEADERS = ("target", "message_type", "priority", "ttl_s", "topic", "thread")
# Columns in the detail of a finding, of a message and of a delivery.
_CHECKSUMS = ("ledger_checksum", "store_checksum", "journal_checksum", "original_checksum")
_DETAIL = ("headers", "status", "waiting_for", "last_error", *_CHECKSUMS, "store_file", "original")
_DELIVERY_DETAIL = (
    *("recipient", "ledger_state", "stored_state", "journal_state"),
    *("attempt", "journal_attempt", "inbox_writes"),
)
_FILE = ("path", "message_id", "kind", "day", "agent", "size", "checksum", "changed_at", "problem")


def make(inputs: Inputs) -> Tables:
    """Make a row a message of whatever source, and a row a message and recipient."""
    sides = MessageSources(
        inputs.ledger("messages", *_MESSAGE),
        inputs.ledger("deliveries", *_DELIVERY),
        inputs.store(STORE_SECTIONS, *_STORED),
        inputs.journal(*_SENT),
        inputs.originals(*_FILE, *_HEADERS),
    )
    stored = inputs.store("deliveries", "file", "id", "relay_id", "recipient", "state")
    changes = inputs.journal("end", "at", "event", "relay_id", "state", "deliveries")
    followed, judged = untold(inputs, position(inputs)), horizon(inputs)
    reach = _reach(inputs, sides, followed, judged)
    reverted = inputs.reverted_archives()
    return {
        NAME: reconcile(sides, reach, reverted, judged, inputs.grace_ns),
        DELIVERIES: reconcile_deliveries(
            sides.messages, sides.deliveries, stored, changes, reach, judged
        ),
        JOURNAL: reconcile_journal(followed),
    }


def _reach(
    inputs: Inputs, sides: MessageSources, followed: DataFrame, judged: Horizon
) -> DataFrame:
    """Make one row for all messages: the range of each source, and whether all of it was read."""
    retention = inputs.config.retention
    first_day = first_judged_day(
        sides.messages,
        sides.originals,
        inputs.snapshot_ns,
        retention.archive_days,
        retention.archive_mib,
    )
    reach = journal_begin(inputs.journal("end", "at", "event")).crossJoin(followed)
    reach = reach.crossJoin(first_day).crossJoin(last_archive_report(sides.messages, judged.until))
    return reach.crossJoin(inputs.coverage())


def reconcile_journal(followed: DataFrame) -> DataFrame:
    """Say whether the ledger has what the journal has: one row, results.RECONCILED_JOURNAL."""
    is_behind = F.col("untold_records") > 0
    return conform(
        followed.withColumn("class", F.when(is_behind, BEHIND).otherwise("followed")),
        results.RECONCILED_JOURNAL,
    )


def reconcile(
    sides: MessageSources,
    reach: DataFrame,
    reverted: DataFrame,
    judged: Horizon,
    grace_ns: int,
) -> DataFrame:
    """Compare the ledger's rows with the other sources: results.RECONCILED.

    ``reach``: how far back each of them goes. ``reverted``: Inputs.reverted_archives.
    """
    day = F.substring("file_path", len("archive/") + 1, len("2026-01-31"))
    joined = (
        side_by_side(sides)
        .withColumn("day", day)
        .join(F.broadcast(_broken_days(sides.originals)), on="day", how="left")
        .join(F.broadcast(reverted), on="message_id", how="left")
        .crossJoin(F.broadcast(reach))
        .withColumn("headers", other_headers(judged))
    )
    return conform(
        joined.withColumn("class", _class(judged, grace_ns)).select(*_shown()),
        results.RECONCILED,
    )


def _shown() -> list[Column | str]:
    """List the columns of results.RECONCILED, of a joined row."""
    filed = F.when(is_filed(), F.col("file_path"))
    return [
        "message_id",
        "class",
        F.coalesce("agent_name", "sender", "journal_sender", "original_agent").alias("agent"),
        F.coalesce("target", "to", "journal_to").alias("route"),
        "status",
        "discovered_at",
        "processed_at",
        "last_error",
        F.col("checksum").alias("ledger_checksum"),
        _store_checksum().alias("store_checksum"),
        "journal_checksum",
        "original_checksum",
        "headers",
        F.coalesce("copies", F.lit(0)).alias("copies"),
        F.coalesce("records", F.lit(0)).alias("records"),
        "store_file",
        "stored_at",
        F.coalesce("original_path", filed).alias("original"),
        "deliveries",
        "waiting_for",
        "ended_for",
    ]


def _broken_days(originals: DataFrame) -> DataFrame:
    """List days whose pack or folder cannot be read: originals may be missing there."""
    unread = originals.where(F.col("problem").isNotNull() & F.col("message_id").isNull())
    return unread.select("day", F.lit(True).alias("is_broken")).distinct()


def reconcile_deliveries(
    messages: DataFrame,
    deliveries: DataFrame,
    stored: DataFrame,
    journal: DataFrame,
    reach: DataFrame,
    judged: Horizon,
) -> DataFrame:
    """Compare every delivery in ledger, store and journal: results.RECONCILED_DELIVERY."""
    merged = by_recipient(deliveries, stored, journal)
    of_message = Window.partitionBy("message_id")
    known = merged.withColumn("is_known", F.max(is_known_to_engine()).over(of_message))
    rows = messages.select(
        "message_id", "agent_name", "target", "status", "discovered_at", "processed_at"
    )
    joined = known.join(rows, on="message_id", how="left").crossJoin(F.broadcast(reach))
    young = judged.is_young("discovered_at", "processed_at")
    names = {"status": F.col("status"), "agent": F.col("agent_name")}
    reaches = F.coalesce(F.col("discovered_at") >= F.col("journal_from"), F.lit(False))
    state_class = delivery_class(names, judged.since, F.col("follows"), young, reaches)
    return conform(
        joined.select(
            "message_id",
            "recipient",
            state_class.alias("class"),
            F.col("agent_name").alias("agent"),
            F.col("target").alias("route"),
            "ledger_state",
            "stored_state",
            "journal_state",
            "attempt",
            F.col("attempts").alias("journal_attempt"),
            F.coalesce("made", F.lit(0)).alias("inbox_writes"),
            F.col("moved_at").alias("journal_changed_at"),
        ),
        results.RECONCILED_DELIVERY,
    )


def counts(tables: Written) -> dict[str, int]:
    """Count messages of each class, and deliveries that are wrong."""
    found = Counter(count_by(tables[NAME]))
    wrong = count_by(tables[DELIVERIES], where=pc.field("class").isin(list(DELIVERY_CHECKS)))
    found.update({DELIVERY_CHECKS[name]: count for name, count in wrong.items()})
    found.update(count_by(tables[JOURNAL], where=pc.field("class") == BEHIND))
    return dict(sorted(found.items()))


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find messages and deliveries of a class that is wrong: results.FINDING."""
    # Where the checksums are equal, only what differs is shown.
    is_other = F.col("class") != HEADERS
    checksums = {name: F.when(is_other, F.col(name)) for name in _CHECKSUMS}
    wrong = make_findings(
        tables[NAME].where(F.col("class").isin(*SEVERITY)).withColumns(checksums),
        F.concat(F.lit(f"{NAME}."), F.col("class")),
        lookup(SEVERITY, F.col("class")),
        observed_at,
        message_id="message_id",
        agent="agent",
        route="route",
        detail=_DETAIL,
    )
    deliveries = make_findings(
        tables[DELIVERIES].where(F.col("class").isin(*DELIVERY_CHECKS)),
        F.concat(F.lit(f"{NAME}."), lookup(DELIVERY_CHECKS, F.col("class"))),
        ERROR,
        observed_at,
        message_id="message_id",
        agent="agent",
        route="route",
        detail=_DELIVERY_DETAIL,
    )
    return wrong.unionByName(deliveries).unionByName(_of_ledger(tables[JOURNAL], observed_at))


def _of_ledger(followed: DataFrame, observed_at: datetime) -> DataFrame:
    """Make one finding of a ledger that is behind the journal."""
    problem = F.format_string(
        "the ledger follows the journal up to %d, it ends at %d: "
        "%d records of messages are not in it, the oldest of %s",
        F.coalesce("follows", F.lit(0)),
        "ends",
        "untold_records",
        F.date_format("untold_since", "yyyy-MM-dd HH:mm:ss'Z'"),
    )
    return make_findings(
        followed.where(F.col("class") == BEHIND).withColumn("problem", problem),
        f"{NAME}.{BEHIND}",
        ERROR,
        observed_at,
        detail=("problem",),
    )


def _interval(ns: int) -> Column:
    return F.make_dt_interval(secs=F.lit(ns / NS_PER_S))


def _class(judged: Horizon, grace_ns: int) -> Column:
    """Return the class: the first that is true, worst first."""
    status = F.col("status")
    unknown = F.col("checksum").isNull() | (F.col("checksums") < F.col("copies"))
    return (
        F.when(status.isNull(), _class_without_row(judged))
        .when((status.isin(*OPEN) | (status == "failed")) & _is_accepted(judged), STATUS)
        .when(status.isin(*OPEN, "failed") & impossible_time(judged).isNotNull(), HEADERS)
        .when(status.isin(*OPEN), "in_flight")
        .when(status == "failed", "failed")
        .when(F.col("copies").isNull() & (F.col("dead") > 0), "discarded")
        .when(
            F.col("copies").isNull(), F.when(F.col("is_whole"), "missing").otherwise("not_checked")
        )
        .when(_differs("lowest_checksum", "highest_checksum"), "checksum_differs")
        .when(_lacks_checksum(), "checksum_differs")
        .when(_differs("lowest_journaled", "journal_checksum"), "journal_differs")
        .when(F.col("headers").isNotNull(), HEADERS)
        .when(archived_without_ack(judged, _interval(grace_ns)), STATUS)
        .when(_is_unjournaled(), "unjournaled")
        .when(_differs("lowest_original", "original_checksum"), "original_differs")
        .when(has_other_size(), "original_differs")
        .when(_lacks_original(), "original_missing")
        .when(has_other_path(), "path_differs")
        .when(F.col("waiting_for").isNotNull(), "undelivered")
        .when(F.col("ended_for").isNotNull(), "returned")
        .when(unknown, "unverified")
        .otherwise("delivered")
    )


def _class_without_row(judged: Horizon) -> Column:
    """Classify a message without a ledger row. The journal may be ahead of the ledger."""
    is_unknown_file = F.coalesce("copies", "records").isNull()
    filed_now = F.coalesce(F.col("original_at") >= judged.since, F.lit(False))
    return (
        F.when(_is_recent(judged) | filed_now, "recent")
        .when(is_unknown_file, "unknown_file")
        .when(_is_behind(), "behind")
        .otherwise("orphan")
    )


def _is_recent(judged: Horizon) -> Column:
    """True for a message that is too young, or that the ledger is just being told of."""
    told_now = F.coalesce(_is_ahead() & (F.col("journaled_at") >= judged.since), F.lit(False))
    return judged.is_young("dated", "stored_at", "journaled_at") | told_now


def _is_ahead() -> Column:
    """True where its record is behind the ledger's position in the journal."""
    return F.col("journal_end") > F.coalesce("follows", F.lit(0))


def _is_behind() -> Column:
    """True where the ledger was not told of it; so ``untold_records`` are a finding of the home.

    So is a message from before the first record that there still is, where the ledger has not
    come as far.
    """
    is_pruned = (F.col("untold_records") > 0) & (
        F.col("journal_begin") > F.coalesce("follows", F.lit(0))
    )
    is_older = F.greatest("dated", "stored_at") < F.col("journal_from")
    return F.coalesce(_is_ahead(), is_pruned & is_older, F.lit(False))


def _is_accepted(judged: Horizon) -> Column:
    """True where store or journal have it, before the ledger's position in the journal."""
    is_there = F.coalesce("copies", "records").isNotNull()
    is_judged = ~_is_recent(judged) & ~_is_behind()
    return is_there & F.col("follows").isNotNull() & is_judged


def _differs(*names: str) -> Column:
    """True when one of these checksums differs from the ledger's."""
    differs = [F.col(name) != F.col("checksum") for name in names]
    return F.coalesce(differs[0] | differs[1], F.lit(False))


def _lacks_checksum() -> Column:
    """True where the ledger lacks the checksum, and another source has it."""
    sides = F.coalesce("highest_checksum", "journal_checksum", "original_checksum")
    return F.col("checksum").isNull() & sides.isNotNull()


def _is_unjournaled() -> Column:
    """True where the journal goes back to its discovery, but does not have it."""
    reaches = F.col("discovered_at") >= F.col("journal_from")
    return F.col("is_whole") & F.col("records").isNull() & F.coalesce(reaches, F.lit(False))


def _lacks_original() -> Column:
    is_judged = F.coalesce(F.col("day") >= F.col("originals_from"), F.lit(False))
    is_read = F.col("is_broken").isNull()
    return is_filed() & F.col("original_path").isNull() & is_judged & is_read


def _store_checksum() -> Column:
    """Return a checksum that differs from the ledger's, if any copy's does."""
    is_lowest = F.col("lowest_checksum") != F.col("checksum")
    return F.when(is_lowest, F.col("lowest_checksum")).otherwise(F.col("highest_checksum"))


JOB = AuditJob(
    name=NAME,
    description="every message and delivery: ledger, store, journal, originals",
    tables={
        NAME: results.RECONCILED,
        DELIVERIES: results.RECONCILED_DELIVERY,
        JOURNAL: results.RECONCILED_JOURNAL,
    },
    make=make,
    counts=counts,
    findings=findings,
    checks=(*SEVERITY, *DELIVERY_CHECKS.values(), BEHIND),
)
