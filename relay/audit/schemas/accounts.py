"""What the jobs write that account for messages: duplicates, order, acks, dead letters, files."""

from __future__ import annotations

from pyspark.sql.types import StructType

from relay.audit.schemas.fields import FLAG, FLOAT, NUMBER, TEXT, TIME, WORDS, always, maybe

_ID = maybe("message_id", TEXT, "of the ledger, relay_id of the store")
_AGENT = maybe("agent", TEXT, "sender")
_ROUTE = maybe("route", TEXT, "the TO header")

DUPLICATE = StructType(
    [
        always("class", TEXT, "see docs/audit.md"),
        _ID,
        _AGENT,
        _ROUTE,
        maybe("recipient", TEXT, "of the delivery that was made twice"),
        always("times", NUMBER, "how often it is there, or was done"),
        maybe("what", TEXT, "the numbers, files, or the message before, divided by commas"),
        maybe("apart_ms", NUMBER, "resent: since the same was sent before"),
    ]
)

ORDERED = StructType(
    [
        always("sender", TEXT, "agent"),
        always("recipient", TEXT, "agent"),
        always("deliveries", NUMBER, "first attempts that were neither held nor put off"),
        always("inversions", NUMBER, "written before one that was discovered earlier"),
        always("by_clock", NUMBER, "of these, while the clock was put back"),
        maybe("worst_ms", FLOAT, "by how much at most, those by the clock left out"),
        maybe("message_id", TEXT, "of that one"),
        always("created_inversions", NUMBER, "ids older than that of one discovered before"),
    ]
)

CLOCK = StructType(
    [
        always("class", TEXT, "see docs/audit.md"),
        _ID,
        _AGENT,
        maybe("recipient", TEXT, "of the delivery, where it is about one"),
        maybe("at", TIME, "what the clock said"),
        always("by_ms", FLOAT, "how far it is off"),
    ]
)

ACKS = StructType(
    [
        always("sender", TEXT, "who is owed the acknowledgment"),
        always("recipient", TEXT, "who owes it"),
        always("acked", NUMBER, "deliveries that were acknowledged"),
        always("failed", NUMBER, "of these, with the status failed"),
        always("owed", NUMBER, "delivered, and not acknowledged yet"),
        always("late", NUMBER, "of these, delivered more than once already"),
        always("overdue", NUMBER, "of these, past their time, and nothing was done"),
        maybe("p50_ms", FLOAT, "written to acknowledged, half are at most this"),
        maybe("p90_ms", FLOAT, "written to acknowledged, 9 of 10 are at most this"),
        maybe("p99_ms", FLOAT, "written to acknowledged, 99 of 100 are at most this"),
        maybe("max_ms", FLOAT, "written to acknowledged, the longest"),
    ]
)

OWED = StructType(
    [
        always("class", TEXT, "owed, late or overdue; orphan: never asked for"),
        _ID,
        _AGENT,
        _ROUTE,
        maybe("recipient", TEXT, "who owes it, or has sent it"),
        maybe("state", TEXT, "of the delivery in the ledger"),
        maybe("attempt", NUMBER, "1 for the first"),
        maybe("written_at", TIME, "renamed into the inbox, the last time"),
        maybe("due_at", TIME, "when it is overdue"),
        maybe("overdue_s", FLOAT, "when the relay was last seen at work; negative: not yet"),
    ]
)

DEAD_LETTER = StructType(
    [
        always("message_id", TEXT, "of the ledger"),
        always("recipient", TEXT, "for whom it is dead, or was"),
        _AGENT,
        _ROUTE,
        always("class", TEXT, "waiting, discarded or replayed: see docs/audit.md"),
        always("state", TEXT, "of the delivery in the ledger, now"),
        maybe("reason", TEXT, "why it was given up"),
        maybe("reason_kind", TEXT, "the same, with # for its numbers"),
        maybe("attempt", NUMBER, "the last that was made"),
        always("times", NUMBER, "how often it died, as far as audit_log goes back"),
        maybe("died_at", TIME, "the last time"),
        maybe("day", TEXT, "2026-01-31, of that time"),
        maybe("age_s", FLOAT, "at the snapshot"),
    ]
)

DEAD_REASON = StructType(
    [
        maybe("day", TEXT, "2026-01-31"),
        maybe("reason_kind", TEXT, "why, with # for numbers"),
        always("recipient", TEXT, "agent"),
        always("letters", NUMBER, "that died for this reason"),
        always("waiting", NUMBER, "of these, neither replayed nor let go"),
    ]
)

VERIFIED = StructType(
    [
        always("path", TEXT, "below the home; of Tier 2, the object's key"),
        always(
            "kind", TEXT, "store, archive, journal, ledger, segment, object, attachment, original"
        ),
        always("class", TEXT, "see docs/audit.md"),
        maybe("day", TEXT, "2026-01-31, of what never changes again"),
        maybe("item", TEXT, "what it is called in whatever tier or pack it lies"),
        maybe("size", NUMBER, "bytes"),
        maybe("sha256", TEXT, "of the file; of a segment size and crc64 of its records"),
        always("problems", WORDS, "what is wrong with it, a line each"),
        always("warnings", WORDS, "what is only worth knowing"),
    ]
)

INTEGRITY_DAY = StructType(
    [
        always("day", TEXT, "2026-01-31"),
        always("kind", TEXT, "archive, segment, original"),
        always("files", NUMBER, "of that day"),
        always("bytes", NUMBER, "of all of them"),
        always("hash", TEXT, "SHA-256 over names and checksums, 64 hex"),
        always("class", TEXT, "new, same, grown, pruned; changed, shrunk"),
        maybe("files_before", NUMBER, "in the run compared with"),
        maybe("hash_before", TEXT, "likewise"),
        always("is_partial", FLAG, "a file of it could not be read"),
    ]
)
