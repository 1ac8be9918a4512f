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
| not_checked | not in the store, but a damaged file was skipped, which may have it | |
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
| conflict | store or journal contradict the ledger's state, number of attempts or status | error |
| | of the acknowledgment; or the ledger lacks the time of its state | |
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
from relay.audit.jobs.deliveries import (
    by_recipient,
    delivery_class,
    differences,
    is_known_to_engine,
)
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
from relay.audit.jobs.message_class import HEADERS, message_class, other_values
from relay.audit.jobs.messages import (
    WAITING,
    MessageSources,
    first_judged_day,
    is_filed,
    journal_begin,
    last_archive_report,
    other_headers,
    side_by_side,
)
from relay.audit.schemas import conform, results

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
# Findings about a file of the archive, which is then their path.
OF_ORIGINALS = ("original_differs", "original_missing", "path_differs", "unknown_file")
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
    "ack_status",
    "answer_id",
)
_CHANGE = ("end", "at", "event", "relay_id", "state", "deliveries", "said", "answer_id")
_SAID = ("relay_id", "checksum", "sender", "to", "kind", "created_ns", "created_at")
_STORED = (*_SAID, "priority", "ttl_s", "topic", "correlation_id", "file")
_SENT = (*_SAID, "end", "at", "event")
_HEADERS = ("target", "message_type", "priority", "ttl_s", "topic", "thread")
# Columns in the detail of a finding, of a message and of a delivery.
_CHECKSUMS = ("ledger_checksum", "store_checksum", "journal_checksum", "original_checksum")
_DETAIL = (
    *("headers", "differs", "status", "waiting_for", "last_error"),
    *(*_CHECKSUMS, "store_file", "original"),
)
_DELIVERY_DETAIL = (
    *("recipient", "differs", "ledger_state", "stored_state", "journal_state"),
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
    changes = inputs.journal(*_CHANGE)
    judged = horizon(inputs)
    followed = untold(inputs, position(inputs), judged)
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
    classed = joined.withColumn("class", message_class(judged, grace_ns))
    return conform(
        classed.withColumn("differs", other_values()).select(*_shown()),
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
        "differs",
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
    told = joined.withColumn("differs", differences(reaches))
    # An idle relay leaves records of deliveries, which the ledger has, behind its position.
    untold_from = F.when(F.col("untold_records") > 0, F.coalesce("follows", F.lit(0)))
    state_class = delivery_class(names, judged.since, untold_from, young, F.col("differs"))
    return conform(
        told.withColumn("class", state_class).select(
            "message_id",
            "recipient",
            "class",
            F.when(F.col("class") == "conflict", F.col("differs")).alias("differs"),
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
    shown = {name: F.when(is_other, F.col(name)) for name in _CHECKSUMS}
    of_file = F.col("class").isin(*OF_ORIGINALS)
    shown["path"] = F.when(of_file, F.col("original"))
    shown["original"] = F.when(~of_file, F.col("original"))
    wrong = make_findings(
        _without_doubles(tables).where(F.col("class").isin(*SEVERITY)).withColumns(shown),
        F.concat(F.lit(f"{NAME}."), F.col("class")),
        lookup(SEVERITY, F.col("class")),
        observed_at,
        message_id="message_id",
        agent="agent",
        route="route",
        path="path",
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


def _without_doubles(tables: Tables) -> DataFrame:
    """Leave out a message that waits for one recipient alone, whose delivery is found itself."""
    wrong = tables[DELIVERIES].where(
        F.col("class").isin(*DELIVERY_CHECKS) & F.col("ledger_state").isin(*WAITING)
    )
    found = wrong.select(F.col("message_id").alias("found_id"), "recipient")
    is_same = (F.col("message_id") == F.col("found_id")) & (
        F.col("waiting_for") == F.col("recipient")
    )
    is_waiting = F.col("class") == "undelivered"
    return tables[NAME].join(F.broadcast(found), on=is_same & is_waiting, how="left_anti")


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
