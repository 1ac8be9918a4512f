"""Columns of the sources: store files, journal, ledger, and the files of a home's folders."""

from __future__ import annotations

import re

from pyspark.sql.types import ArrayType, StructField, StructType

from relay.audit.schemas import (
    BYTES,
    FLAG,
    FLOAT,
    NUMBER,
    TEXT,
    TEXTS,
    TIME,
    U64,
    WORDS,
    always,
    maybe,
)
from relay.ledger.schema import schema_sql

_FILE = always("file", TEXT, "path of the store file")

STORED_MESSAGE = StructType(
    [
        _FILE,
        always("section", TEXT, "messages, dead_letters or archive"),
        always("id", U64, "the engine's number, unique in one store"),
        always("message_type", TEXT, "Text, Command, Query, ..."),
        always("sender", TEXT, "agent"),
        always("channel_id", U64, "number of the channel"),
        maybe("channel", TEXT, "name of the channel; NULL when this file does not hold it"),
        always("content", BYTES, "UTF-8, or ciphertext when sealed"),
        always("content_size", NUMBER, "bytes of the content, before it was sealed"),
        maybe("checksum", TEXT, "SHA-256 of the content, 64 hex; NULL when sealed"),
        always("sealed", FLAG, "the content is encrypted"),
        maybe("topic", TEXT, "topic of a PubSub message"),
        maybe("correlation_id", TEXT, "UUID v4 of the thread"),
        always("priority", TEXT, "Critical, High, Normal, Low, Background"),
        maybe("metadata", TEXTS, "values other than text are written as JSON"),
        maybe("relay_id", TEXT, "metadata relay_id: message_id of the ledger"),
        maybe("to", TEXT, "metadata to: the TO header"),
        maybe("kind", TEXT, "the KIND header: metadata kind, or the one of message_type"),
        maybe("created_ns", NUMBER, "metadata created_ns: discovery, Unix nanoseconds"),
        maybe("created_at", TIME, "the engine's clock, whole seconds"),
        maybe("delivered_at", TIME, "written for every recipient, whole seconds"),
        maybe("acknowledged_at", TIME, "acked by all that owe an ack, whole seconds"),
        maybe("ttl_s", U64, "time to live, seconds"),
        always("status", TEXT, "Created, Sent, Delivered, Acknowledged, Failed, ..."),
        always("retry_count", NUMBER, "deliveries tried again"),
        maybe("signature", BYTES, "Ed25519"),
    ]
)

DAMAGED_FILE = StructType(
    [
        _FILE,
        always("reason", TEXT, "what was expected, and what was found"),
        maybe("offset", NUMBER, "bytes, where the fault is; NULL when the system refused"),
        maybe("size", NUMBER, "bytes of the file; NULL when it could not be opened"),
    ]
)

STORED_DELIVERY = StructType(
    [
        _FILE,
        always("id", U64, "the engine's number of the message"),
        maybe("relay_id", TEXT, "metadata relay_id of that message"),
        always("recipient", TEXT, "agent"),
        always("state", TEXT, "Sent, Delivered, Acknowledged, Bounced"),
    ]
)

STORED_CHANNEL = StructType(
    [
        _FILE,
        always("id", U64, "number of the channel"),
        always("name", TEXT, "dm/a/b for two agents"),
        always("channel_type", TEXT, "Direct, Group, Broadcast, PubSub"),
        always("owner", TEXT, "agent"),
        always("participants", WORDS, "agents, in the order of joining"),
        always("delivery", TEXT, "AtMostOnce, AtLeastOnce, ExactlyOnce"),
        maybe("ack_timeout_s", U64, "seconds until an ack is overdue"),
        always("max_retries", NUMBER, "deliveries tried again at most"),
        always("state", TEXT, "Active, Paused, Draining, Closed"),
        maybe("created_at", TIME, "whole seconds"),
        maybe("modified_at", TIME, "whole seconds"),
        always("message_count", U64, "messages that it has had"),
        maybe("description", TEXT, "for people"),
        always("tags", WORDS, "for people"),
    ]
)

STORED_SUBSCRIPTION = StructType(
    [
        _FILE,
        always("id", U64, "number of the subscription"),
        always("channel_id", U64, "number of a PubSub channel"),
        always("subscriber", TEXT, "agent"),
        always("topic_pattern", TEXT, "* one segment, # all that follow"),
        always("match_mode", TEXT, "Exact, Wildcard, MultiLevel"),
        maybe("created_at", TIME, "whole seconds"),
        always("active", FLAG, "it counts"),
    ]
)


_DELIVERIES = ArrayType(
    StructType(
        [
            maybe("number", U64, "the engine's number of the message"),
            maybe("recipient", TEXT, "agent"),
            maybe("attempt", NUMBER, "1 for the first; NULL: as it was"),
        ]
    )
)

JOURNAL = StructType(
    [
        always("stream", TEXT, "folder of the journal's stream"),
        always("segment", NUMBER, "id of the segment"),
        always("offset", NUMBER, "logical, of the record in its stream: bytes"),
        always("end", NUMBER, "logical offset behind the record"),
        always("at", TIME, "the record's own time, milliseconds"),
        always("event", TEXT, "MessageSent, DeliveriesMoved, ...; Start, Checkpoint, Gap, Sealed"),
        maybe("sequence", NUMBER, "events of the store before this one; NULL: no event"),
        maybe("number", U64, "the engine's number of the one message that it is about"),
        maybe("numbers", NUMBER, "how many messages it is about; NULL: none"),
        maybe("relay_id", TEXT, "message_id of the ledger: MessageSent, FileRefused, OfferChanged"),
        maybe("message_type", TEXT, "MessageSent: Text, Command, ..."),
        maybe("kind", TEXT, "MessageSent: the KIND header"),
        maybe("sender", TEXT, "agent: MessageSent, FileRefused"),
        maybe("to", TEXT, "the TO header: MessageSent, FileRefused"),
        maybe("recipients", WORDS, "agents whose deliveries it is about, each once"),
        maybe("checksum", TEXT, "MessageSent: SHA-256 of the content, 64 hex"),
        maybe("content_size", NUMBER, "MessageSent: bytes"),
        maybe("correlation_id", TEXT, "MessageSent: UUID v4 of the thread"),
        maybe("created_ns", NUMBER, "MessageSent, FileRefused: discovery, Unix nanoseconds"),
        maybe("created_at", TIME, "MessageSent: the engine's clock, whole seconds"),
        maybe("state", TEXT, "of the deliveries from now on: Sent, Delivered, Acknowledged, ..."),
        maybe("attempt", NUMBER, "of a delivery that was made again"),
        maybe("said", TEXT, "the status that an acknowledgment gives"),
        maybe("reason", TEXT, "reason of a refusal or dead letter"),
        maybe("answer_id", TEXT, "FileRefused: message_id of the nack"),
        maybe("message_numbers", ArrayType(U64), "the engine's numbers of what it is about"),
        maybe("deliveries", _DELIVERIES, "each delivery that it is about"),
        maybe("due_at", TIME, "when the acknowledgment is overdue, or the next attempt due"),
        maybe("held", FLAG, "MessageSent: max_pending was reached, it waits for others"),
        maybe("channel_id", U64, "of a channel's event, and of a message"),
        maybe("file_path", TEXT, "MessageSent, FileRefused: of the file, below the home"),
        maybe("file_checksum", TEXT, "the checksum that the ledger has of the file, 64 hex"),
        maybe("archive", TEXT, "Rolled: name of the archive file, below store/archive"),
        maybe("epoch", NUMBER, "Start: how often the daemon was started"),
        maybe("boot_id", TEXT, "Start: of the machine"),
        maybe("covers", NUMBER, "Checkpoint: offset up to which a store file covers the stream"),
    ]
)

JOURNAL_DAMAGE = StructType(
    [
        always("stream", TEXT, "folder of the journal's stream"),
        maybe("segment", NUMBER, "id of the segment; NULL: the manifest"),
        maybe("offset", NUMBER, "logical, of what is lost; NULL: all of the segment"),
        maybe("end", NUMBER, "logical offset behind what is lost"),
        always("reason", TEXT, "file, where in it, what was expected and what was found"),
    ]
)


ORIGINAL = StructType(
    [
        always("path", TEXT, "below the home, as the ledger's file_path; in a pack, too"),
        maybe("message_id", TEXT, "stem of the file's name"),
        always("kind", TEXT, "original, rejected, duplicate; pack: a pack that cannot be read"),
        always("day", TEXT, "2026-01-31, of the archive's folder"),
        maybe("agent", TEXT, "sender"),
        maybe("pack", TEXT, "the pack that it was read from; NULL: a file of its own"),
        maybe("size", NUMBER, "bytes, header and body"),
        maybe("checksum", TEXT, "SHA-256 of the content, 64 hex, as the ledger's"),
        maybe("sha256", TEXT, "of the whole file, 64 hex"),
        maybe("target", TEXT, "the TO header; empty: the header is not valid"),
        maybe("message_type", TEXT, "the KIND header; likewise"),
        maybe("priority", TEXT, "Critical, High, Normal, Low, Background; likewise"),
        maybe("ttl_s", NUMBER, "the TTL header; NULL: none"),
        maybe("topic", TEXT, "the TOPIC header; NULL: none"),
        maybe("thread", TEXT, "the THREAD header, as the UUID v4 of its thread; NULL: none"),
        maybe("changed_at", TIME, "of the inode: when it came here; NULL in a pack"),
        maybe("problem", TEXT, "reason why it could not be read"),
    ]
)

KEPT_FILE = StructType(
    [
        always("path", TEXT, "below the home; of Tier 2, the object's key"),
        always("kind", TEXT, "store, archive, journal, segment, object, attachment"),
        maybe("day", TEXT, "2026-01-31, of a file that never changes; NULL: it may"),
        maybe("item", TEXT, "its name, the same in every tier"),
        maybe("size", NUMBER, "bytes"),
        maybe("sha256", TEXT, "of the file; of a segment size and crc64 of its records"),
        always("problems", WORDS, "faults, a line each"),
        always("warnings", WORDS, "notes, a line each"),
    ]
)


# Comments of ledger columns that have none in schema.sql.
_LEDGER_COMMENTS = {
    "acked_at": "the ack was discovered",
    "agent": "owner of the directory",
    "at": "when it was seen or done",
    "completed_at": "done or rolled back",
    "created_at": "when it was meant",
    "cwd": "its working directory",
    "detail": "for people",
    "discovered_at": "seen in the outbox",
    "ended_at": "seen to have ended",
    "file_inode": "NULL for the orchestrator's own",
    "file_mtime_ns": "Unix nanoseconds",
    "file_name": "as it stood in the outbox",
    "id": "order of creation",
    "inode": "of the file",
    "key": "epoch, writer, boot_id",
    "last_error": "why it failed or waits",
    "message_id": "stem of the file's name",
    "mtime_ns": "Unix nanoseconds",
    "name": "of the agent",
    "new_status": "of message or delivery",
    "offered_at": "printed by the hook",
    "path": "relative to the home",
    "pid": "process id",
    "reason": "text that the sender was sent",
    "recipient": "agent",
    "registered_at": "first seen",
    "restarts": "how often it was started again",
    "retry_count": "failures: times put back to pending, and the last",
    "rss_bytes": "resident memory",
    "sha256": "of the attachment, 64 hex",
    "state": "see docs/states.md",
    "updated_at": "when it was set",
    "value": "as text",
}
_TABLE = re.compile(r"^CREATE TABLE (\w+) \(\n(.*?)^\)( WITHOUT ROWID)?;", re.MULTILINE | re.DOTALL)
_COLUMN = re.compile(r"^ {4}(\w+) (TEXT|INTEGER|REAL)\b([^\n]*?)(?:-- ([^\n]*))?$", re.MULTILINE)
_TYPES = {"TEXT": TEXT, "INTEGER": NUMBER, "REAL": FLOAT}


def _ledger_column(name: str, kind: str, constraints: str, comment: str | None) -> StructField:
    is_time = kind == "INTEGER" and (name == "at" or name.endswith("_at"))
    is_rowid = kind == "INTEGER" and "PRIMARY KEY" in constraints
    make = always if is_rowid or "NOT NULL" in constraints else maybe
    return make(name, TIME if is_time else _TYPES[kind], comment or _LEDGER_COMMENTS[name])


_LEDGER_TABLES = _TABLE.findall(schema_sql())
# The tables of the format `relay_ledger`: those of schema.sql, with its columns and its order.
LEDGER = {
    table: StructType([_ledger_column(*column) for column in _COLUMN.findall(columns)])
    for table, columns, _ in _LEDGER_TABLES
}
# They have no rowid to read them by.
LEDGER_WITHOUT_ROWID = frozenset(table for table, _, without in _LEDGER_TABLES if without)
