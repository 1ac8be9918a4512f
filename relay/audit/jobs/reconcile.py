"""Every ledger message against the store, by the metadata ``relay_id``.

| class | means | found |
|---|---|---|
| delivered | in the store with the ledger's checksum, and no delivery waits | |
| unverified | the same, but a checksum is missing or sealed | |
| returned | of its deliveries one expired, bounced or is dead; none waits | |
| undelivered | completed, but a delivery is still held or staged | warning |
| checksum_differs | the store holds another content than the ledger saw | error |
| missing | completed or archived in the ledger, and not in the store | error |
| in_flight | pending or processing: not at its end yet | |
| failed | refused, and the sender has its nack; not expected in the store | |
| extra | in the store, older than the snapshot by the grace, no ledger row | error |
| recent | the same, but too young to be judged | |

Each message has one class: the worst that is true of it.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.audit import schemas
from relay.audit.evidence import Evidence
from relay.audit.jobs.job import ERROR, WARNING, Job, Tables, found

NAME = "reconcile"
SEVERITY = {
    "missing": ERROR,
    "checksum_differs": ERROR,
    "extra": ERROR,
    "undelivered": WARNING,
}
WAITING = ("held", "staged")
ENDED = ("expired", "bounced", "dead")
STORE_SECTIONS = "messages,dead_letters,archive"
_NS_PER_US = 1000


def make(evidence: Evidence) -> Tables:
    """One row a message of ledger or store: schemas.RECONCILED."""
    messages = evidence.ledger(
        "messages",
        "message_id",
        "agent_name",
        "target",
        "status",
        "checksum",
        "discovered_at",
        "processed_at",
        "last_error",
    )
    deliveries = evidence.ledger("deliveries", "message_id", "recipient", "state")
    stored = evidence.store(
        STORE_SECTIONS, "relay_id", "checksum", "sender", "to", "created_ns", "created_at", "file"
    )
    ns = (evidence.snapshot_ns, evidence.grace_ns)
    return {NAME: reconcile(messages, deliveries, stored, *ns)}


def reconcile(
    messages: DataFrame, deliveries: DataFrame, stored: DataFrame, snapshot_ns: int, grace_ns: int
) -> DataFrame:
    """Compare the ledger's rows with what the store holds: schemas.RECONCILED.

    ``snapshot_ns`` is when the ledger was read; the store was read after it.
    """
    known = messages.join(by_message(deliveries), on="message_id", how="left")
    joined = known.join(
        by_relay_id(stored), on=F.col("message_id") == F.col("relay_id"), how="full_outer"
    )
    judged_before = F.timestamp_micros(F.lit((snapshot_ns - grace_ns) // _NS_PER_US))
    return schemas.conform(
        joined.select(
            F.coalesce("message_id", "relay_id").alias("message_id"),
            _class(judged_before).alias("class"),
            F.coalesce("agent_name", "sender").alias("agent"),
            F.coalesce("target", "to").alias("route"),
            "status",
            "discovered_at",
            "processed_at",
            "last_error",
            F.col("checksum").alias("ledger_checksum"),
            _store_checksum().alias("store_checksum"),
            F.coalesce("copies", F.lit(0)).alias("copies"),
            "store_file",
            "stored_at",
            F.coalesce("deliveries", F.lit(0)).alias("deliveries"),
            "waiting_for",
            "ended_for",
        ),
        schemas.RECONCILED,
    )


def by_message(deliveries: DataFrame) -> DataFrame:
    """One row a message: how many deliveries, and whose wait or have ended unwritten.

    Names are collected of these few alone: a list for every message is ten times the work.
    """
    counted = deliveries.groupBy("message_id").agg(F.count("recipient").alias("deliveries"))
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


def counts(tables: Tables) -> DataFrame:
    """How many messages of each class: schemas.COUNT."""
    by_class = tables[NAME].groupBy(F.col("class").alias("name"))
    return schemas.conform(by_class.agg(F.count("*").alias("count")), schemas.COUNT).orderBy("name")


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """The messages of a class that is wrong: schemas.FINDING."""
    severity = F.create_map(*[F.lit(word) for pair in SEVERITY.items() for word in pair])
    return found(
        tables[NAME].where(F.col("class").isin(*SEVERITY)),
        F.concat(F.lit(f"{NAME}."), F.col("class")),
        F.element_at(severity, F.col("class")),
        observed_at,
        message_id="message_id",
        agent="agent",
        route="route",
        detail=(
            "status",
            "waiting_for",
            "last_error",
            "ledger_checksum",
            "store_checksum",
            "store_file",
        ),
    )


def _class(judged_before: Column) -> Column:
    """The first that is true, worst first."""
    status = F.col("status")
    young = F.greatest("dated", "stored_at") >= judged_before
    differs = F.col("checksum").isNotNull() & (_differing("lowest") | _differing("highest"))
    unknown = F.col("checksum").isNull() | (F.col("checksums") < F.col("copies"))
    return (
        F.when(status.isNull() & F.coalesce(young, F.lit(False)), "recent")
        .when(status.isNull(), "extra")
        .when(status.isin("pending", "processing"), "in_flight")
        .when(status == "failed", "failed")
        .when(F.col("copies").isNull(), "missing")
        .when(F.coalesce(differs, F.lit(False)), "checksum_differs")
        .when(F.col("waiting_for").isNotNull(), "undelivered")
        .when(F.col("ended_for").isNotNull(), "returned")
        .when(unknown, "unverified")
        .otherwise("delivered")
    )


def _differing(which: str) -> Column:
    return F.col(f"{which}_checksum") != F.col("checksum")


def _store_checksum() -> Column:
    """One that differs from the ledger's, if any copy's does."""
    return F.when(_differing("lowest"), F.col("lowest_checksum")).otherwise(
        F.col("highest_checksum")
    )


def _recipients(where: Column) -> Column:
    """Those recipients, in order, divided by commas; NULL when there are none."""
    names = F.sort_array(F.collect_list(F.when(where, F.col("recipient"))))
    return F.nullif(F.array_join(names, ", "), F.lit(""))


JOB = Job(
    name=NAME,
    explains="ledger against store: missing, extra, different, undelivered",
    tables={NAME: schemas.RECONCILED},
    make=make,
    counts=counts,
    findings=findings,
)
