"""The tables of the format `relay_ledger`: tables and columns of schema.sql, in its order."""

from __future__ import annotations

from pyspark.sql.types import StructType

from relay.audit.schemas.fields import (
    FLOAT,
    NUMBER,
    TEXT,
    TIME,
    always,
    maybe,
)

LEDGER = {
    "messages": StructType(
        [
            always("id", NUMBER, "order of discovery"),
            always("message_id", TEXT, "stem of the file's name"),
            always("agent_name", TEXT, "sender"),
            always("direction", TEXT, "outbox"),
            always("file_path", TEXT, "where the file is, relative to the home"),
            always("file_size", NUMBER, "bytes, header and body"),
            always("file_mtime_ns", NUMBER, "Unix nanoseconds"),
            maybe("file_inode", NUMBER, "NULL for the orchestrator's own"),
            maybe("checksum", TEXT, "SHA-256 of the content, 64 hex"),
            always("status", TEXT, "pending, processing, completed, failed, archived"),
            maybe("message_type", TEXT, "the KIND header"),
            maybe("target", TEXT, "the TO header"),
            always("discovered_at", TIME, "seen in the outbox"),
            maybe("processed_at", TIME, "completed or failed"),
            maybe("retry_count", NUMBER, "failures: times put back to pending, and the last"),
            maybe("last_error", TEXT, "why it failed or waits"),
        ]
    ),
    "deliveries": StructType(
        [
            always("message_id", TEXT, "stem of the file's name"),
            always("recipient", TEXT, "agent"),
            always("state", TEXT, "held, staged, written, read, acked, expired, bounced, dead"),
            always("attempt", NUMBER, "1 for the first"),
            maybe("staged_at", TIME, "the commit that accepted it"),
            maybe("written_at", TIME, "renamed into the inbox"),
            maybe("read_at", TIME, "the file left the inbox"),
            maybe("acked_at", TIME, "the ack was discovered"),
            maybe("ack_status", TEXT, "received, in_progress, completed, failed"),
            maybe("due_at", TIME, "held: when it is tried again; open: overdue"),
            maybe("last_error", TEXT, "why it is held"),
            maybe("read_how", TEXT, "taken, removed"),
            maybe("answer_id", TEXT, "message_id of the last ack, nack or response"),
            maybe("answer_text", TEXT, "first line of the answer"),
            maybe("obligation", TEXT, "open, answered, given_up; NULL: none"),
            always("reminders", NUMBER, "how often the recipient was reminded"),
        ]
    ),
    "rejections": StructType(
        [
            always("agent", TEXT, "owner of the outbox"),
            always("file_name", TEXT, "as it stood in the outbox"),
            always("inode", NUMBER, "of the file"),
            always("mtime_ns", NUMBER, "Unix nanoseconds"),
            always("reason", TEXT, "what the sender was told"),
            always("nack_id", TEXT, "message_id of the answer"),
            always("at", TIME, "when it was refused"),
        ]
    ),
    "agents": StructType(
        [
            maybe("name", TEXT, "of the agent"),
            always("registered_at", TIME, "first seen"),
            maybe("last_seen_at", TIME, "last file written or read"),
            maybe("pid", NUMBER, "process id"),
            maybe("status", TEXT, "active, inactive, terminated, retired"),
            maybe("note", TEXT, "what it last said of itself"),
            maybe("reason", TEXT, "why it is not active"),
            maybe("changed_at", TIME, "when the status last changed"),
            maybe("public_key", TEXT, "Ed25519, 64 hex"),
            maybe("mailbox", TEXT, "inode and birth of its inbox"),
        ]
    ),
    "processes": StructType(
        [
            maybe("name", TEXT, "of the agent"),
            always("state", TEXT, "starting ... released"),
            maybe("pid", NUMBER, "process id; NULL: none runs"),
            maybe("pid_start", TEXT, "tells it from a later process of that pid"),
            always("cli", TEXT, "its name in spawn.clis"),
            always("cwd", TEXT, "its working directory"),
            always("restart", TEXT, "never, on-failure, always"),
            always("requested_by", TEXT, "agent"),
            always("request_id", TEXT, "message_id of the spawn"),
            always("restarts", NUMBER, "how often it was started again"),
            always("restarted_at", TEXT, "JSON: when, as far as it counts"),
            maybe("started_at", TIME, "of the process that ran last"),
            always("changed_at", TIME, "of the state"),
            maybe("ended_at", TIME, "seen to have ended"),
            maybe("exit_code", NUMBER, "negative: the signal; NULL: not known"),
            maybe("cpu_percent", FLOAT, "since the look before"),
            maybe("rss_bytes", NUMBER, "resident memory"),
            maybe("idle_s", NUMBER, "since it last did anything, seconds"),
            maybe("last_error", TEXT, "why it failed"),
        ]
    ),
    "orchestrator_state": StructType(
        [
            maybe("key", TEXT, "epoch, writer, boot_id"),
            maybe("value", TEXT, "as text"),
            maybe("updated_at", TIME, "when it was set"),
        ]
    ),
    "pending_operations": StructType(
        [
            always("id", NUMBER, "order of creation"),
            always("operation_type", TEXT, "spawn, release, deliver"),
            always("payload", TEXT, "JSON"),
            always("created_at", TIME, "when it was meant"),
            maybe("completed_at", TIME, "done or rolled back"),
        ]
    ),
    "attachment_refs": StructType(
        [
            always("sha256", TEXT, "of the attachment, 64 hex"),
            always("message_id", TEXT, "that names it"),
            always("at", TIME, "when it was accepted"),
        ]
    ),
    "audit_log": StructType(
        [
            always("id", NUMBER, "order of the changes"),
            always("at", TIME, "SQLite's clock, milliseconds"),
            always("what", TEXT, "a message id, or 'message id > recipient'"),
            maybe("old_status", TEXT, "NULL: it is new"),
            always("new_status", TEXT, "of message or delivery"),
            maybe("who", TEXT, "pid and epoch of the daemon"),
            maybe("attempt", NUMBER, "of a delivery"),
            maybe("staged_at", TIME, "of the attempt before a new one"),
            maybe("written_at", TIME, "likewise"),
        ]
    ),
    "security_events": StructType(
        [
            always("id", NUMBER, "order of the events"),
            always("at", TIME, "when it was seen"),
            always("kind", TEXT, "not_a_regular_file, ..."),
            maybe("agent", TEXT, "owner of the directory"),
            maybe("path", TEXT, "relative to the home"),
            maybe("detail", TEXT, "for people"),
        ]
    ),
}
# They have no rowid to read them by.
LEDGER_WITHOUT_ROWID = frozenset(("deliveries", "rejections", "attachment_refs"))
