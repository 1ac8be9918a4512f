"""Each delivery beside its message: one join for all the jobs and tables that need both.

``waited`` tells what was held up for a reason of its own, so that its time is not the relay's: its
inbox could not be written, the channel was full, it was delivered again, it is the copy that
somebody who joined later is owed, or the disk put its message off.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.audit.evidence import Evidence

_COLUMNS = (
    "ledger_id",
    "message_id",
    "sender",
    "target",
    "recipient",
    "kind",
    "file_size",
    "retry_count",
    "state",
    "attempt",
    "ack_status",
    "discovered_at",
    "staged_at",
    "written_at",
    "read_at",
    "acked_at",
    "obligation",
    "owed_until",
    "waited",
)


def sent(evidence: Evidence) -> DataFrame:
    """One row a delivery of the ledger, computed once in a run."""

    def make() -> DataFrame:
        messages = evidence.ledger(
            "messages",
            "id",
            "message_id",
            "agent_name",
            "target",
            "message_type",
            "file_size",
            "discovered_at",
            "processed_at",
            "retry_count",
        )
        deliveries = evidence.ledger(
            "deliveries",
            "message_id",
            "recipient",
            "state",
            "attempt",
            "ack_status",
            "staged_at",
            "written_at",
            "read_at",
            "acked_at",
            "obligation",
            "due_at",
        )
        return with_messages(deliveries, messages)

    return evidence.once("sent", make)


def with_messages(deliveries: DataFrame, messages: DataFrame) -> DataFrame:
    """Deliveries with sender, TO, kind, size, order and discovery of their messages."""
    names = {"id": "ledger_id", "agent_name": "sender", "message_type": "kind"}
    facts = messages.withColumnsRenamed(names)
    until = F.when(F.col("obligation") == "open", F.col("due_at"))
    joined = deliveries.withColumn("owed_until", until).join(facts, on="message_id", how="inner")
    return joined.withColumn("waited", _waited()).select(*_COLUMNS)


def _waited() -> Column:
    # What is accepted at once is committed before its message is completed.
    later = F.coalesce(F.col("staged_at") > F.col("processed_at"), F.lit(False))
    put_off = F.coalesce(F.col("retry_count") > 0, F.lit(False))
    return later | put_off | (F.col("attempt") > 1)
