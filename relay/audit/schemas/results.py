"""What jobs write: findings and counts, which all have, and a table a job."""

from __future__ import annotations

from pyspark.sql.types import StructType

from relay.audit.schemas.fields import (
    FLOAT,
    NUMBER,
    TEXT,
    TEXTS,
    TIME,
    always,
    maybe,
)

FINDING = StructType(
    [
        always("check", TEXT, "job.class, as reconcile.missing"),
        always("severity", TEXT, "error or warning"),
        maybe("message_id", TEXT, "of the ledger"),
        maybe("agent", TEXT, "sender"),
        maybe("route", TEXT, "the TO header"),
        always("observed_at", TIME, "of the evidence: the ledger's snapshot"),
        always("detail", TEXTS, "what else there is to know; only what is known"),
    ]
)

COUNT = StructType(
    [
        always("name", TEXT, "what is counted"),
        always("count", NUMBER, "how many"),
    ]
)

RECONCILED = StructType(
    [
        always("message_id", TEXT, "of the ledger, relay_id of the store"),
        always("class", TEXT, "see docs/audit.md"),
        maybe("agent", TEXT, "sender"),
        maybe("route", TEXT, "the TO header"),
        maybe("status", TEXT, "of the ledger's row; NULL: there is none"),
        maybe("discovered_at", TIME, "seen in the outbox"),
        maybe("processed_at", TIME, "completed or failed"),
        maybe("last_error", TEXT, "of the ledger's row"),
        maybe("ledger_checksum", TEXT, "SHA-256, 64 hex"),
        maybe("store_checksum", TEXT, "SHA-256, 64 hex: one that differs, if any does"),
        maybe("journal_checksum", TEXT, "SHA-256, 64 hex: of what was accepted"),
        maybe("original_checksum", TEXT, "SHA-256, 64 hex: of what the archived file says"),
        always("copies", NUMBER, "in store and archives"),
        always("records", NUMBER, "of the journal that accept it"),
        maybe("store_file", TEXT, "one of the files with a copy"),
        maybe("stored_at", TIME, "the engine's clock, whole seconds"),
        maybe("original", TEXT, "where the archived file is, or should be, below the home"),
        always("deliveries", NUMBER, "recipients in the ledger"),
        maybe("waiting_for", TEXT, "recipients whose delivery is held or staged"),
        maybe("ended_for", TEXT, "recipients whose delivery expired, bounced or is dead"),
    ]
)

RECONCILED_DELIVERY = StructType(
    [
        always("message_id", TEXT, "of the ledger, relay_id of the store"),
        always("recipient", TEXT, "agent"),
        always("class", TEXT, "see docs/audit.md"),
        maybe("agent", TEXT, "sender"),
        maybe("route", TEXT, "the TO header"),
        maybe("ledger_state", TEXT, "of the ledger's row; NULL: there is none"),
        maybe("stored_state", TEXT, "in the store, or the archive that has the message"),
        maybe("journal_state", TEXT, "by the last record about it"),
        maybe("attempt", NUMBER, "of the ledger's row"),
        maybe("journal_attempt", NUMBER, "the highest that the journal has begun"),
        always("made", NUMBER, "records of the journal that put it into the inbox"),
        maybe("moved_at", TIME, "of the last record about it"),
    ]
)

TRAFFIC = StructType(
    [
        always("sender", TEXT, "agent"),
        always("recipient", TEXT, "agent"),
        always("messages", NUMBER, "written into the recipient's inbox"),
        always("bytes", NUMBER, "of the files sent, header and body"),
        maybe("p50_ms", FLOAT, "discovered to written, half are at most this"),
        maybe("p99_ms", FLOAT, "discovered to written, 99 of 100 are at most this"),
        maybe("max_ms", FLOAT, "discovered to written, the longest"),
    ]
)
