"""Columns of the results: findings and counts, which all jobs write, and the tables of each job.

``recent`` is true of what happened within the days that a run judges (``--recent``).
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from relay.audit.lake_columns import (
    FLAG,
    FLOAT,
    NUMBER,
    TEXT,
    TEXTS,
    TIME,
    WORDS,
    always,
    batch_of,
    maybe,
)

FINDING = pa.schema(
    [
        always("check", TEXT, "job.class, as reconcile.missing"),
        always("severity", TEXT, "error or warning"),
        maybe("message_id", TEXT, "of the ledger"),
        maybe("agent", TEXT, "sender"),
        maybe("route", TEXT, "the TO header"),
        maybe("path", TEXT, "of a file, below the home"),
        always("observed_at", TIME, "time of the ledger's snapshot"),
        always("detail", TEXTS, "further facts, where known"),
    ]
)

RECONCILED = pa.schema(
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
        maybe("journal_checksum", TEXT, "SHA-256, 64 hex: of the accepted content"),
        maybe("original_checksum", TEXT, "SHA-256, 64 hex: of the archived file's content"),
        maybe("headers", TEXT, "headers that differ between the sources, with their values"),
        maybe("differs", TEXT, "status, size or path where its class is about it, with the values"),
        always("copies", NUMBER, "in store and archives"),
        always("records", NUMBER, "of the journal that accept it"),
        maybe("store_file", TEXT, "one of the files with a copy"),
        maybe("stored_at", TIME, "the engine's clock, whole seconds"),
        maybe("original", TEXT, "path of the archived file, or its expected path"),
        always("deliveries", NUMBER, "recipients in the ledger"),
        maybe("waiting_for", TEXT, "recipients whose delivery is held or staged"),
        maybe("ended_for", TEXT, "recipients whose delivery expired, bounced or is dead"),
    ]
)

RECONCILED_DELIVERY = pa.schema(
    [
        always("message_id", TEXT, "of the ledger, relay_id of the store"),
        always("recipient", TEXT, "agent"),
        always("class", TEXT, "see docs/audit.md"),
        maybe("differs", TEXT, "of a conflict: fields that differ, with their values"),
        maybe("agent", TEXT, "sender"),
        maybe("route", TEXT, "the TO header"),
        maybe("ledger_state", TEXT, "of the ledger's row; NULL: there is none"),
        maybe("stored_state", TEXT, "in the store, or the archive that has the message"),
        maybe("journal_state", TEXT, "by the last record about it"),
        maybe("attempt", NUMBER, "of the ledger's row"),
        maybe("journal_attempt", NUMBER, "the highest that the journal has begun"),
        always("inbox_writes", NUMBER, "records of the journal that put it into the inbox"),
        maybe("journal_changed_at", TIME, "of the last record about it"),
    ]
)

RECONCILED_JOURNAL = pa.schema(
    [
        always("class", TEXT, "followed, ledger_behind"),
        maybe("follows", NUMBER, "the ledger's position in the journal; NULL: it has none"),
        maybe("ends", NUMBER, "where the journal ends; NULL: there is none"),
        always("untold_records", NUMBER, "of messages behind that position, older than the grace"),
        maybe("untold_since", TIME, "of the oldest of them"),
    ]
)

TRAFFIC = pa.schema(
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


_ID = maybe("message_id", TEXT, "of the ledger, relay_id of the store")
_AGENT = maybe("agent", TEXT, "sender")
_ROUTE = maybe("route", TEXT, "the TO header")

DUPLICATE = pa.schema(
    [
        always("class", TEXT, "see docs/audit.md"),
        _ID,
        _AGENT,
        _ROUTE,
        maybe("recipient", TEXT, "of the delivery that was made twice"),
        always("times", NUMBER, "how often it is there, or was done"),
        maybe("what", TEXT, "the numbers, files, or the message before, divided by commas"),
        maybe("interval_ms", NUMBER, "resent: since the same was sent before"),
    ]
)

ORDERED = pa.schema(
    [
        always("sender", TEXT, "agent"),
        always("recipient", TEXT, "agent"),
        always("deliveries", NUMBER, "first attempts that were neither held nor deferred"),
        always("inversions", NUMBER, "written before one that was discovered earlier"),
        always("by_clock", NUMBER, "of these, while the clock was set back"),
        maybe("worst_ms", FLOAT, "by how much at most, those by the clock left out"),
        maybe("message_id", TEXT, "of that one"),
        always("created_inversions", NUMBER, "ids older than that of one discovered before"),
    ]
)

CLOCK = pa.schema(
    [
        always("class", TEXT, "see docs/audit.md"),
        _ID,
        _AGENT,
        maybe("recipient", TEXT, "of the delivery, where it is about one"),
        maybe("at", TIME, "what the clock said"),
        always("by_ms", FLOAT, "how far it is off"),
    ]
)

ACKS = pa.schema(
    [
        always("sender", TEXT, "agent that is owed the acknowledgment"),
        always("recipient", TEXT, "agent that owes it"),
        always("acked", NUMBER, "deliveries that were acknowledged"),
        always("failed", NUMBER, "of these, with the status failed"),
        always("owed", NUMBER, "delivered, and not acknowledged yet"),
        always("late", NUMBER, "of these and of those acknowledged: after a reminder, or its time"),
        always("overdue", NUMBER, "of those owed: past their time, without a further attempt"),
        maybe("p50_ms", FLOAT, "written to acknowledged, half are at most this"),
        maybe("p90_ms", FLOAT, "written to acknowledged, 9 of 10 are at most this"),
        maybe("p99_ms", FLOAT, "written to acknowledged, 99 of 100 are at most this"),
        maybe("max_ms", FLOAT, "written to acknowledged, the longest"),
    ]
)

OWED = pa.schema(
    [
        always("class", TEXT, "owed, late, overdue, given_up, unrequested, offered_not_in_context"),
        _ID,
        _AGENT,
        _ROUTE,
        maybe("recipient", TEXT, "agent that owes it, or has sent it"),
        maybe("state", TEXT, "of the delivery in the ledger"),
        maybe("attempt", NUMBER, "1 for the first"),
        maybe("written_at", TIME, "renamed into the inbox, the last time"),
        maybe("due_at", TIME, "when it is overdue"),
        maybe("overdue_s", FLOAT, "at the relay's last activity; negative: not yet"),
    ]
)

DEAD_LETTER = pa.schema(
    [
        always("message_id", TEXT, "of the ledger"),
        always("recipient", TEXT, "agent"),
        _AGENT,
        _ROUTE,
        always("class", TEXT, "waiting, discarded or replayed: see docs/audit.md"),
        always("state", TEXT, "of the delivery in the ledger, now"),
        maybe("reason", TEXT, "why it was given up"),
        maybe("reason_kind", TEXT, "the same, with … for its numbers"),
        maybe("attempt", NUMBER, "the last that was made"),
        always("times", NUMBER, "how often it died, as far back as audit_log goes"),
        maybe("died_at", TIME, "the last time"),
        maybe("day", TEXT, "2026-01-31, of that time"),
        maybe("age_s", FLOAT, "at the snapshot"),
    ]
)

DEAD_REASON = pa.schema(
    [
        maybe("day", TEXT, "2026-01-31"),
        maybe("reason_kind", TEXT, "why, with … for numbers"),
        always("recipient", TEXT, "agent"),
        always("letters", NUMBER, "that died for this reason"),
        always("waiting", NUMBER, "of these, neither replayed nor discarded"),
    ]
)

VERIFIED = pa.schema(
    [
        always("path", TEXT, "below the home; of Tier 2, the object's key"),
        always(
            "kind", TEXT, "store, archive, journal, ledger, segment, object, attachment, original"
        ),
        always("class", TEXT, "see docs/audit.md"),
        maybe("day", TEXT, "2026-01-31, of a file that never changes"),
        maybe("item", TEXT, "its name, the same in every tier or pack"),
        maybe("size", NUMBER, "bytes"),
        maybe("sha256", TEXT, "of the file; of a segment size and crc64 of its records"),
        always("problems", WORDS, "faults, a line each"),
        always("warnings", WORDS, "notes, a line each"),
    ]
)

INTEGRITY_DAY = pa.schema(
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


DAY = pa.date32()

_PERCENTILES = (
    always("deliveries", NUMBER, "whose stage has ended"),
    maybe("p50_ms", FLOAT, "half took at most this"),
    maybe("p90_ms", FLOAT, "90 of 100 took at most this"),
    maybe("p99_ms", FLOAT, "99 of 100 took at most this"),
    maybe("max_ms", FLOAT, "the longest"),
    always("slow", NUMBER, "inbox: of them, above 5 s; 0 for other stages"),
    always("negative", NUMBER, "ended before they began: the clock was set back; not in the rest"),
)

LATENCY = pa.schema(
    [
        always("stage", TEXT, "accepted, written, inbox, read, acked"),
        always("hour", TIME, "of the discovery, UTC"),
        always("recent", FLAG, "within the days that are judged"),
        *_PERCENTILES,
    ]
)

LATENCY_ROUTES = pa.schema(
    [
        always("sender", TEXT, "agent"),
        always("recipient", TEXT, "agent"),
        always("stage", TEXT, "accepted, written, inbox, read, acked"),
        *_PERCENTILES,
    ]
)

LATENCY_SLOWEST = pa.schema(
    [
        always("message_id", TEXT, "for `relay trace`"),
        always("sender", TEXT, "agent"),
        always("recipient", TEXT, "agent"),
        always("discovered_at", TIME, "seen in the outbox"),
        maybe("staged_at", TIME, "the commit that accepted it"),
        always("written_at", TIME, "renamed into the inbox"),
        always("inbox_ms", FLOAT, "discovered to written"),
    ]
)

TRAFFIC_AGENTS = pa.schema(
    [
        always("agent", TEXT, "sender or recipient"),
        always("recipients", NUMBER, "agents that it wrote to"),
        always("senders", NUMBER, "agents that wrote to it"),
        always("sent", NUMBER, "deliveries of its messages"),
        always("received", NUMBER, "written into its inbox"),
        always("bytes_sent", NUMBER, "of the files sent, header and body"),
        always("bytes_received", NUMBER, "of the files written into its inbox"),
    ]
)

TRAFFIC_HOURS = pa.schema(
    [
        always("hour", TIME, "UTC"),
        always("messages", NUMBER, "discovered in it"),
        always("bytes", NUMBER, "of their files, header and body"),
        always("deliveries", NUMBER, "written in it"),
        always("dead", NUMBER, "accepted in it, and dead, expired or bounced since"),
    ]
)

TRAFFIC_BURSTS = pa.schema(
    [
        always("minute", TIME, "UTC"),
        always("messages", NUMBER, "discovered in it"),
        always("bytes", NUMBER, "of their files, header and body"),
        always("times_median", FLOAT, "messages, by those of the median minute that has any"),
        always("busiest", TEXT, "the agent that sent most of them"),
        always("busiest_messages", NUMBER, "sent by that agent"),
    ]
)

AGENT_LIFE = pa.schema(
    [
        always("agent", TEXT, "its name"),
        always("class", TEXT, "see docs/audit.md"),
        maybe("status", TEXT, "of its row in agents; NULL: a process without one"),
        maybe("reason", TEXT, "why it is not active"),
        maybe("registered_at", TIME, "first seen"),
        maybe("last_seen_at", TIME, "wrote or read"),
        maybe("changed_at", TIME, "of the status"),
        maybe("lifetime_s", NUMBER, "from its registration until it was terminated or retired"),
        always("messages", NUMBER, "files that it sent"),
        always("received", NUMBER, "written into its inbox"),
        always("unread", NUMBER, "files in its inbox"),
        maybe("unread_since", TIME, "when the oldest of those was written"),
        always("saves", NUMBER, "continuity messages that it sent"),
        maybe("silent_s", NUMBER, "since it last wrote or read"),
        maybe("longest_silence_s", NUMBER, "between two of its activities; of an hour and more"),
        maybe("process", TEXT, "state of the process that the relay started"),
        maybe("cli", TEXT, "its name in spawn.clis"),
        maybe("restart", TEXT, "never, on-failure, always"),
        always("restarts", NUMBER, "how often it was started again"),
        always("recent_restarts", NUMBER, "of those, in the window of the last one"),
        maybe("started_at", TIME, "of the process that ran last"),
        maybe("ended_at", TIME, "of the process that ran last"),
        maybe("exit_code", NUMBER, "negative: the signal; NULL: not known"),
        maybe("stuck_s", NUMBER, "since it has been stuck"),
        maybe("last_error", TEXT, "of the process: why it failed"),
    ]
)

AGENT_SPAWN = pa.schema(
    [
        always("message_id", TEXT, "of the request"),
        always("agent", TEXT, "agent that asked"),
        always("kind", TEXT, "spawn or release"),
        always("asked_at", TIME, "discovered"),
        always("outcome", TEXT, "done, refused, open"),
        maybe("answer_id", TEXT, "of the nack, which has the reason: for `relay trace`"),
        maybe("reason", TEXT, "of a file that was refused"),
        maybe("process", TEXT, "that it started"),
    ]
)

THREAD = pa.schema(
    [
        always("thread", TEXT, "correlation id, UUID"),
        always("messages", NUMBER, "in it"),
        always("participants", NUMBER, "agents that wrote in it"),
        always("turns", NUMBER, "changes of the writer, and 1: its depth"),
        always("queries", NUMBER, "of type Query"),
        always("responses", NUMBER, "of type Response"),
        maybe("first_at", TIME, "its first message, discovered"),
        maybe("last_at", TIME, "its last message, discovered"),
        maybe("duration_s", FLOAT, "between these"),
    ]
)

THREAD_QUERY = pa.schema(
    [
        always("message_id", TEXT, "of the query"),
        always("thread", TEXT, "correlation id, UUID"),
        always("agent", TEXT, "agent that asked"),
        maybe("route", TEXT, "the TO header"),
        always("asked_at", TIME, "discovered"),
        always("class", TEXT, "answered, closed, ended, waiting, unanswered"),
        always("recipients", NUMBER, "agents that were asked"),
        always("answered", NUMBER, "of them, answered with a Response"),
        maybe("answered_at", TIME, "the first Response, discovered"),
        always("age_s", NUMBER, "since it was asked"),
        always("recent", FLAG, "within the days that are judged"),
    ]
)

THREAD_RUNAWAY = pa.schema(
    [
        always("first", TEXT, "agent"),
        always("second", TEXT, "agent"),
        always("minute", TIME, "UTC"),
        always("messages", NUMBER, "of kind message between the two, in the 60 s before one of it"),
        always("turns", NUMBER, "of them, changes of the writer"),
        always("last_message_id", TEXT, "for `relay trace`"),
        always("recent", FLAG, "within the days that are judged"),
    ]
)

SECURITY = pa.schema(
    [
        maybe("agent", TEXT, "owner of the outbox or directory; NULL: of the home's own"),
        always("hour", TIME, "UTC"),
        always("source", TEXT, "event, rejection, failed, request"),
        always("kind", TEXT, "see docs/audit.md"),
        maybe("severity", TEXT, "error or warning; NULL: counted alone"),
        always("events", NUMBER, "in this hour"),
        always("first_at", TIME, "the first of them"),
        always("last_at", TIME, "the last of them"),
        maybe("message_id", TEXT, "of one of them, where it is a message's"),
        maybe("path", TEXT, "of one of them, relative to the home"),
        maybe("detail", TEXT, "of one of them, for people"),
        always("recent", FLAG, "within the days that are judged"),
    ]
)

CAPACITY = pa.schema(
    [
        always("day", DAY, "UTC"),
        always("messages", NUMBER, "discovered in it"),
        always("message_bytes", NUMBER, "of their files, header and body"),
        always("ledger_bytes", NUMBER, "of the ledger's file, shared out by messages"),
        always("journal_bytes", NUMBER, "segments begun in it, every copy that is here"),
        always("store_bytes", NUMBER, "store/archive of that date"),
        always("archive_bytes", NUMBER, "archive of that date, folder and pack"),
        always("inbox_bytes", NUMBER, "files in inboxes and .read, by their mtime"),
        always("attachment_bytes", NUMBER, "by their mtime"),
        always("total_bytes", NUMBER, "on the disk, of all these"),
    ]
)

CAPACITY_PART = pa.schema(
    [
        always("part", TEXT, "ledger, journal, store, archive, inbox, attachment, other"),
        always("files", NUMBER, "now"),
        always("bytes", NUMBER, "on the disk, now"),
        maybe("bytes_per_day", FLOAT, "over seven whole days at most; NULL: there is none"),
        maybe("limit_bytes", NUMBER, "retention keeps it below; NULL: nothing does"),
    ]
)

CAPACITY_FORECAST = pa.schema(
    [
        always("disk_bytes", NUMBER, "size of the disk"),
        always("free_bytes", NUMBER, "that the relay may still write"),
        always("floor_bytes", NUMBER, "the relay accepts nothing below it"),
        always("home_bytes", NUMBER, "of the home, on the disk"),
        maybe("bytes_per_day", FLOAT, "of the home, likewise"),
        maybe("full_in_days", NUMBER, "until the floor, if nothing is removed; NULL: ten years on"),
        maybe("full_in_days_kept", NUMBER, "the same, with what retention removes"),
        always("warm_raw_bytes", NUMBER, "of journal segments that are compressed, before"),
        always("warm_bytes", NUMBER, "the same, compressed"),
        always("evicted_bytes", NUMBER, "of segments that left this disk for the object store"),
        always("packed_raw_bytes", NUMBER, "of messages of archive days that are packed"),
        always("packed_bytes", NUMBER, "of their packs"),
    ]
)

TABLES: dict[str, dict[str, pa.Schema]] = {
    "acks": {"acks": ACKS, "acks_owed": OWED},
    "agents": {"agents": AGENT_LIFE, "agents_spawns": AGENT_SPAWN},
    "dead_letters": {"dead_letters": DEAD_LETTER, "dead_letters_reasons": DEAD_REASON},
    "duplicates": {"duplicates": DUPLICATE},
    "integrity": {"integrity": VERIFIED, "integrity_days": INTEGRITY_DAY},
    "latency": {
        "latency": LATENCY,
        "latency_routes": LATENCY_ROUTES,
        "latency_slowest": LATENCY_SLOWEST,
    },
    "ordering": {"ordering": ORDERED, "ordering_clock": CLOCK},
    "reconcile": {
        "reconcile": RECONCILED,
        "reconcile_deliveries": RECONCILED_DELIVERY,
        "reconcile_journal": RECONCILED_JOURNAL,
    },
    "security": {"security": SECURITY},
    "threads": {
        "threads": THREAD,
        "threads_queries": THREAD_QUERY,
        "threads_runaways": THREAD_RUNAWAY,
    },
    "traffic": {
        "traffic": TRAFFIC,
        "traffic_agents": TRAFFIC_AGENTS,
        "traffic_hours": TRAFFIC_HOURS,
        "traffic_bursts": TRAFFIC_BURSTS,
    },
}


def arrow_table(rows: Iterable[tuple[object, ...]], columns: pa.Schema) -> pa.Table:
    """Make a table of rows; times in microseconds, or with a time zone."""
    plain = pa.schema([column.remove_metadata() for column in columns])  # a file needs no comments
    return pa.Table.from_batches([batch_of(list(rows), plain)])
