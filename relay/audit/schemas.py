"""Every schema of the audits, once: what the sources give and what the jobs write.

Times are UTC with microseconds, or say their unit in the name. Enums have their names, not
numbers. Ids, sizes and durations that the format keeps as u64 are ``decimal(20,0)``: a bigint
ends at 2^63-1. A time behind the year 9999 is NULL. Each column carries its comment, which
``DESCRIBE`` shows.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from relay.errors import RelayError

_TEXT, _NUMBER, _TIME, _FLAG = StringType(), LongType(), TimestampType(), BooleanType()
_U64, _BYTES, _FLOAT = DecimalType(20, 0), BinaryType(), DoubleType()
_TEXTS, _WORDS = MapType(StringType(), StringType()), ArrayType(StringType())


def _always(name: str, kind: DataType, comment: str) -> StructField:
    return StructField(name, kind, False, {"comment": comment})


def _maybe(name: str, kind: DataType, comment: str) -> StructField:
    return StructField(name, kind, True, {"comment": comment})


# -- the format `acomm` --------------------------------------------------------------------

_FILE = _always("file", _TEXT, "path of the store file")

STORED_MESSAGE = StructType(
    [
        _FILE,
        _always("section", _TEXT, "messages, dead_letters or archive"),
        _always("id", _U64, "the engine's number, unique in one store"),
        _always("message_type", _TEXT, "Text, Command, Query, ..."),
        _always("sender", _TEXT, "agent"),
        _always("channel_id", _U64, "number of the channel"),
        _maybe("channel", _TEXT, "name of the channel; NULL when this file does not hold it"),
        _always("content", _BYTES, "UTF-8, or ciphertext when sealed"),
        _always("content_size", _NUMBER, "bytes of the content, before it was sealed"),
        _maybe("checksum", _TEXT, "SHA-256 of the content, 64 hex; NULL when sealed"),
        _always("sealed", _FLAG, "the content is encrypted"),
        _maybe("topic", _TEXT, "topic of a PubSub message"),
        _maybe("correlation_id", _TEXT, "UUID v4 of the thread"),
        _always("priority", _TEXT, "Critical, High, Normal, Low, Background"),
        _maybe("metadata", _TEXTS, "values that are no text are written as JSON"),
        _maybe("relay_id", _TEXT, "metadata relay_id: message_id of the ledger"),
        _maybe("to", _TEXT, "metadata to: the TO header"),
        _maybe("created_ns", _NUMBER, "metadata created_ns: discovery, Unix nanoseconds"),
        _maybe("created_at", _TIME, "the engine's clock, whole seconds"),
        _maybe("delivered_at", _TIME, "written for every recipient, whole seconds"),
        _maybe("acknowledged_at", _TIME, "acked by all that owe it, whole seconds"),
        _maybe("ttl_s", _U64, "seconds that it is worth delivering"),
        _always("status", _TEXT, "Created, Sent, Delivered, Acknowledged, Failed, ..."),
        _always("retry_count", _NUMBER, "deliveries tried again"),
        _maybe("signature", _BYTES, "Ed25519"),
    ]
)

STORED_DELIVERY = StructType(
    [
        _FILE,
        _always("id", _U64, "the engine's number of the message"),
        _maybe("relay_id", _TEXT, "metadata relay_id of that message"),
        _always("recipient", _TEXT, "agent"),
        _always("state", _TEXT, "Sent, Delivered, Acknowledged, Bounced"),
    ]
)

STORED_CHANNEL = StructType(
    [
        _FILE,
        _always("id", _U64, "number of the channel"),
        _always("name", _TEXT, "dm/a/b for two agents"),
        _always("channel_type", _TEXT, "Direct, Group, Broadcast, PubSub"),
        _always("owner", _TEXT, "agent"),
        _always("participants", _WORDS, "agents, in the order of joining"),
        _always("delivery", _TEXT, "AtMostOnce, AtLeastOnce, ExactlyOnce"),
        _maybe("ack_timeout_s", _U64, "seconds until an ack is overdue"),
        _always("max_retries", _NUMBER, "deliveries tried again at most"),
        _always("state", _TEXT, "Active, Paused, Draining, Closed"),
        _maybe("created_at", _TIME, "whole seconds"),
        _maybe("modified_at", _TIME, "whole seconds"),
        _always("message_count", _U64, "messages that it has had"),
        _maybe("description", _TEXT, "for people"),
        _always("tags", _WORDS, "for people"),
    ]
)

STORED_SUBSCRIPTION = StructType(
    [
        _FILE,
        _always("id", _U64, "number of the subscription"),
        _always("channel_id", _U64, "number of a PubSub channel"),
        _always("subscriber", _TEXT, "agent"),
        _always("topic_pattern", _TEXT, "* one segment, # all that follow"),
        _always("match_mode", _TEXT, "Exact, Wildcard, MultiLevel"),
        _maybe("created_at", _TIME, "whole seconds"),
        _always("active", _FLAG, "it counts"),
    ]
)

# -- the format `relay_ledger`: tables and columns of schema.sql, in its order -------------

LEDGER = {
    "messages": StructType(
        [
            _always("id", _NUMBER, "order of discovery"),
            _always("message_id", _TEXT, "stem of the file's name"),
            _always("agent_name", _TEXT, "sender"),
            _always("direction", _TEXT, "outbox"),
            _always("file_path", _TEXT, "where the file is, relative to the home"),
            _always("file_size", _NUMBER, "bytes, header and body"),
            _always("file_mtime_ns", _NUMBER, "Unix nanoseconds"),
            _maybe("file_inode", _NUMBER, "NULL for the orchestrator's own"),
            _maybe("checksum", _TEXT, "SHA-256 of the content, 64 hex"),
            _always("status", _TEXT, "pending, processing, completed, failed, archived"),
            _maybe("message_type", _TEXT, "the KIND header"),
            _maybe("target", _TEXT, "the TO header"),
            _always("discovered_at", _TIME, "seen in the outbox"),
            _maybe("processed_at", _TIME, "completed or failed"),
            _maybe("retry_count", _NUMBER, "times put back to pending"),
            _maybe("last_error", _TEXT, "why it failed or waits"),
        ]
    ),
    "deliveries": StructType(
        [
            _always("message_id", _TEXT, "stem of the file's name"),
            _always("recipient", _TEXT, "agent"),
            _always("state", _TEXT, "held, staged, written, read, acked, expired, bounced, dead"),
            _always("attempt", _NUMBER, "1 for the first"),
            _maybe("staged_at", _TIME, "the commit that accepted it"),
            _maybe("written_at", _TIME, "renamed into the inbox"),
            _maybe("read_at", _TIME, "the file left the inbox"),
            _maybe("acked_at", _TIME, "the ack was discovered"),
            _maybe("ack_status", _TEXT, "received, in_progress, completed, failed"),
            _maybe("due_at", _TIME, "when it is tried again"),
            _maybe("last_error", _TEXT, "why it is held"),
        ]
    ),
    "rejections": StructType(
        [
            _always("agent", _TEXT, "owner of the outbox"),
            _always("file_name", _TEXT, "as it stood in the outbox"),
            _always("inode", _NUMBER, "of the file"),
            _always("mtime_ns", _NUMBER, "Unix nanoseconds"),
            _always("reason", _TEXT, "what the sender was told"),
            _always("nack_id", _TEXT, "message_id of the answer"),
            _always("at", _TIME, "when it was refused"),
        ]
    ),
    "agents": StructType(
        [
            _maybe("name", _TEXT, "of the agent"),
            _always("registered_at", _TIME, "first seen"),
            _maybe("last_seen_at", _TIME, "last file written or read"),
            _maybe("pid", _NUMBER, "process id"),
            _maybe("status", _TEXT, "active, inactive, terminated, retired"),
            _maybe("note", _TEXT, "what it last said of itself"),
            _maybe("reason", _TEXT, "why it is not active"),
            _maybe("changed_at", _TIME, "when the status last changed"),
            _maybe("public_key", _TEXT, "Ed25519, 64 hex"),
        ]
    ),
    "processes": StructType(
        [
            _maybe("name", _TEXT, "of the agent"),
            _always("state", _TEXT, "starting ... released"),
            _maybe("pid", _NUMBER, "process id; NULL: none runs"),
            _maybe("pid_start", _TEXT, "tells it from a later process of that pid"),
            _always("cli", _TEXT, "its name in spawn.clis"),
            _always("cwd", _TEXT, "its working directory"),
            _always("restart", _TEXT, "never, on-failure, always"),
            _always("requested_by", _TEXT, "agent"),
            _always("request_id", _TEXT, "message_id of the spawn"),
            _always("restarts", _NUMBER, "how often it was started again"),
            _always("restarted_at", _TEXT, "JSON: when, as far as it counts"),
            _maybe("started_at", _TIME, "of the process that ran last"),
            _always("changed_at", _TIME, "of the state"),
            _maybe("ended_at", _TIME, "seen to have ended"),
            _maybe("exit_code", _NUMBER, "negative: the signal; NULL: not known"),
            _maybe("cpu_percent", _FLOAT, "since the look before"),
            _maybe("rss_bytes", _NUMBER, "resident memory"),
            _maybe("idle_s", _NUMBER, "since it last did anything, seconds"),
            _maybe("last_error", _TEXT, "why it failed"),
        ]
    ),
    "orchestrator_state": StructType(
        [
            _maybe("key", _TEXT, "epoch, writer, boot_id"),
            _maybe("value", _TEXT, "as text"),
            _maybe("updated_at", _TIME, "when it was set"),
        ]
    ),
    "pending_operations": StructType(
        [
            _always("id", _NUMBER, "order of creation"),
            _always("operation_type", _TEXT, "spawn, release, deliver"),
            _always("payload", _TEXT, "JSON"),
            _always("created_at", _TIME, "when it was meant"),
            _maybe("completed_at", _TIME, "done or rolled back"),
        ]
    ),
    "attachment_refs": StructType(
        [
            _always("sha256", _TEXT, "of the attachment, 64 hex"),
            _always("message_id", _TEXT, "that names it"),
            _always("at", _TIME, "when it was accepted"),
        ]
    ),
    "audit_log": StructType(
        [
            _always("id", _NUMBER, "order of the changes"),
            _always("at", _TIME, "SQLite's clock, milliseconds"),
            _always("what", _TEXT, "a message id, or 'message id > recipient'"),
            _maybe("old_status", _TEXT, "NULL: it is new"),
            _always("new_status", _TEXT, "of message or delivery"),
            _maybe("who", _TEXT, "pid and epoch of the daemon"),
            _maybe("attempt", _NUMBER, "of a delivery"),
            _maybe("staged_at", _TIME, "of the attempt before a new one"),
            _maybe("written_at", _TIME, "likewise"),
        ]
    ),
    "security_events": StructType(
        [
            _always("id", _NUMBER, "order of the events"),
            _always("at", _TIME, "when it was seen"),
            _always("kind", _TEXT, "not_a_regular_file, ..."),
            _maybe("agent", _TEXT, "owner of the directory"),
            _maybe("path", _TEXT, "relative to the home"),
            _maybe("detail", _TEXT, "for people"),
        ]
    ),
}
# They have no rowid to read them by.
LEDGER_WITHOUT_ROWID = frozenset(("deliveries", "rejections", "attachment_refs"))

# -- what jobs write -----------------------------------------------------------------------

FINDING = StructType(
    [
        _always("check", _TEXT, "job.class, as reconcile.missing"),
        _always("severity", _TEXT, "error or warning"),
        _maybe("message_id", _TEXT, "of the ledger"),
        _maybe("agent", _TEXT, "sender"),
        _maybe("route", _TEXT, "the TO header"),
        _always("observed_at", _TIME, "of the evidence: the ledger's snapshot"),
        _always("detail", _TEXTS, "what else there is to know; only what is known"),
    ]
)

COUNT = StructType(
    [
        _always("name", _TEXT, "what is counted"),
        _always("count", _NUMBER, "how many"),
    ]
)

RECONCILED = StructType(
    [
        _always("message_id", _TEXT, "of the ledger, relay_id of the store"),
        _always("class", _TEXT, "see docs/audit.md"),
        _maybe("agent", _TEXT, "sender"),
        _maybe("route", _TEXT, "the TO header"),
        _maybe("status", _TEXT, "of the ledger's row; NULL: there is none"),
        _maybe("discovered_at", _TIME, "seen in the outbox"),
        _maybe("processed_at", _TIME, "completed or failed"),
        _maybe("last_error", _TEXT, "of the ledger's row"),
        _maybe("ledger_checksum", _TEXT, "SHA-256, 64 hex"),
        _maybe("store_checksum", _TEXT, "SHA-256, 64 hex: one that differs, if any does"),
        _always("copies", _NUMBER, "in store and archives"),
        _maybe("store_file", _TEXT, "one of the files with a copy"),
        _maybe("stored_at", _TIME, "the engine's clock, whole seconds"),
        _always("deliveries", _NUMBER, "recipients in the ledger"),
        _maybe("waiting_for", _TEXT, "recipients whose delivery is held or staged"),
        _maybe("ended_for", _TEXT, "recipients whose delivery expired, bounced or is dead"),
    ]
)

TRAFFIC = StructType(
    [
        _always("sender", _TEXT, "agent"),
        _always("recipient", _TEXT, "agent"),
        _always("messages", _NUMBER, "written into the recipient's inbox"),
        _always("bytes", _NUMBER, "of the files sent, header and body"),
        _maybe("p50_ms", _FLOAT, "discovered to written, half are at most this"),
        _maybe("p99_ms", _FLOAT, "discovered to written, 99 of 100 are at most this"),
        _maybe("max_ms", _FLOAT, "discovered to written, the longest"),
    ]
)


def subset(schema: StructType, names: Iterable[str], what: str) -> StructType:
    """These columns of a schema, in the order asked for. Errors: RelayError for another name."""
    known = {field.name: field for field in schema}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise RelayError(f"{what} has no column {name}: it has {', '.join(known)}")
    return StructType([known[name] for name in wanted])


def conform(frame: DataFrame, schema: StructType) -> DataFrame:
    """The columns of ``schema`` and no others, in its order and of its types."""
    return frame.select(*[F.col(field.name).cast(field.dataType) for field in schema])
