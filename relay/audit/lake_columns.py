"""The tables of an audit lake and their columns, as data: name, type and comment.

    store_messages, store_deliveries, ...   the store: archives, and the live file
    journal_sent, journal_moves, ...        the records of the journal
    originals, files, usage, limits         the folders of the home
    ledger_messages, ledger_deliveries, ... the tables of schema.sql
    home                                    one row: what the checks need to know besides

Each table has the column ``home`` besides, from the names of its folders. ``bucket`` depends on
the id of a message alone: all rows about a message are in one bucket, in whatever table. Times are
UTC with microseconds, or have their unit in the name. Ids, sizes and durations that a format
stores as u64 are ``decimal(20,0)``. Needs neither Spark nor a home.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from relay.base.names import sha256_hex
from relay.ledger.schema import schema_sql

TEXT, NUMBER, FLAG, FLOAT = pa.string(), pa.int64(), pa.bool_(), pa.float64()
TIME = pa.timestamp("us", tz="UTC")
U64, WORDS, TEXTS = pa.decimal128(20, 0), pa.list_(TEXT), pa.map_(TEXT, TEXT)
BYTES = pa.binary()
LEDGER_PREFIX = "ledger_"
_COMMENT_KEY = b"comment"
_HAS_TIME = r"^[1-8][0-9]{18}-"  # the nanoseconds that an id of the relay begins with


def always(name: str, kind: pa.DataType, comment: str) -> pa.Field:
    """A column that is never NULL; the comment has unit and source."""
    return pa.field(name, kind, nullable=False, metadata={_COMMENT_KEY: comment.encode()})


def maybe(name: str, kind: pa.DataType, comment: str) -> pa.Field:
    """A column that may be NULL."""
    return pa.field(name, kind, metadata={_COMMENT_KEY: comment.encode()})


def comment_of(column: pa.Field) -> str:
    """Return the comment of a column."""
    return str(column.metadata[_COMMENT_KEY].decode())


_BUCKET = always("bucket", TEXT, "2026-01-31: day of the message's id; or h00 to h15, by its hash")
_FILE = always("file", TEXT, "path of the store file")
_RELAY_ID = maybe("relay_id", TEXT, "message_id of the ledger; NULL: not the relay's")
_STREAM = always("stream", TEXT, "folder of the journal's stream, below the home")
_END = always("end", NUMBER, "logical offset behind the record")
_AT = always("at", TIME, "the record's own time, milliseconds")

STORE_MESSAGES = pa.schema(
    [
        _BUCKET,
        _FILE,
        always("section", TEXT, "messages, dead_letters or archive"),
        always("id", U64, "the engine's number, unique in one store"),
        _RELAY_ID,
        always("message_type", TEXT, "Text, Command, Query, ..."),
        always("sender", TEXT, "agent"),
        maybe("to", TEXT, "the TO header"),
        maybe("kind", TEXT, "the KIND header"),
        always("channel_id", U64, "number of the channel"),
        maybe("channel", TEXT, "name of the channel; NULL when this file does not hold it"),
        maybe("correlation_id", TEXT, "UUID v4 of the thread"),
        always("priority", TEXT, "Critical, High, Normal, Low, Background"),
        maybe("ttl_s", U64, "time to live, seconds"),
        maybe("topic", TEXT, "topic of a PubSub message"),
        maybe("created_ns", NUMBER, "discovery, Unix nanoseconds"),
        maybe("created_at", TIME, "the engine's clock, whole seconds"),
        maybe("delivered_at", TIME, "written for every recipient, whole seconds"),
        maybe("acknowledged_at", TIME, "acked by all that owe an ack, whole seconds"),
        maybe("checksum", TEXT, "SHA-256 of the content, 64 hex; NULL when sealed"),
        always("content_size", NUMBER, "bytes of the content, before it was sealed"),
        always("sealed", FLAG, "the content is encrypted"),
        always("status", TEXT, "Created, Sent, Delivered, Acknowledged, Failed, ..."),
        always("retry_count", NUMBER, "deliveries tried again"),
    ]
)

STORE_DELIVERIES = pa.schema(
    [
        _BUCKET,
        _FILE,
        always("id", U64, "the engine's number of the message"),
        _RELAY_ID,
        always("recipient", TEXT, "agent"),
        always("state", TEXT, "Sent, Delivered, Acknowledged, Bounced"),
        maybe("due_at", TIME, "when the acknowledgment is overdue, or the next attempt due"),
    ]
)

STORE_CHANNELS = pa.schema(
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

STORE_SUBSCRIPTIONS = pa.schema(
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

# Of a record MessageSent: a row here, and one in journal_moves for each recipient.
JOURNAL_SENT = pa.schema(
    [
        _BUCKET,
        _STREAM,
        _END,
        _AT,
        always("number", U64, "the engine's number of the message"),
        _RELAY_ID,
        maybe("kind", TEXT, "the KIND header"),
        maybe("sender", TEXT, "agent"),
        maybe("to", TEXT, "the TO header"),
        maybe("checksum", TEXT, "SHA-256 of the content, 64 hex"),
        maybe("created_ns", NUMBER, "discovery, Unix nanoseconds"),
        maybe("created_at", TIME, "the engine's clock, whole seconds"),
        maybe("correlation_id", TEXT, "UUID v4 of the thread"),
    ]
)

JOURNAL_MOVES = pa.schema(
    [
        _STREAM,
        _END,
        _AT,
        always("event", TEXT, "MessageSent, DeliveriesMoved, MessageReceived, ..."),
        maybe("number", U64, "the engine's number of the message"),
        maybe("recipient", TEXT, "agent"),
        maybe("attempt", NUMBER, "1 for the first; NULL: as it was"),
        maybe("relay_id", TEXT, "message_id of the ledger, where the record has it"),
        maybe("state", TEXT, "of the delivery from now on: Sent, Delivered, Acknowledged, ..."),
        maybe("due_at", TIME, "when the acknowledgment is overdue, or the next attempt due"),
        maybe("said", TEXT, "the status that an acknowledgment gives"),
        maybe("answer_id", TEXT, "message_id of the answer"),
    ]
)

JOURNAL_RECORDS = pa.schema(
    [
        _STREAM,
        always("segment", NUMBER, "id of the segment"),
        _END,
        _AT,
        always("event", TEXT, "FileRefused, OfferChanged, Rolled, ...; Start, Gap, Sealed"),
        maybe("relay_id", TEXT, "message_id: FileRefused, OfferChanged, DeadLetterDiscarded"),
        maybe("sender", TEXT, "agent: FileRefused"),
        maybe("to", TEXT, "the TO header: FileRefused"),
        maybe("created_ns", NUMBER, "FileRefused: discovery, Unix nanoseconds"),
        maybe("state", TEXT, "of deliveries from now on"),
        maybe("reason", TEXT, "reason of a refusal or dead letter; of a gap"),
        maybe("answer_id", TEXT, "FileRefused: message_id of the nack"),
        maybe("archive", TEXT, "Rolled: name of the archive file, below store/archive"),
        maybe(
            "lost_ms", NUMBER, "TimeLost: time without a relay; negative: the clock was set back"
        ),
        maybe("epoch", NUMBER, "Start: how often the daemon was started"),
    ]
)

_MOVED = pa.list_(
    pa.struct(
        [
            maybe("number", U64, "the engine's number of the message"),
            maybe("recipient", TEXT, "agent"),
            maybe("attempt", NUMBER, "1 for the first; NULL: as it was"),
        ]
    )
)

# What the format `aof2` and a watch read of a journal; no table of the lake.
JOURNAL = pa.schema(
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
        maybe("relay_id", TEXT, "message_id: MessageSent, and the events of journal_records"),
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
        maybe("message_numbers", pa.list_(U64), "the engine's numbers of what it is about"),
        maybe("deliveries", _MOVED, "each delivery that it is about"),
        maybe("due_at", TIME, "when the acknowledgment is overdue, or the next attempt due"),
        maybe("held", FLAG, "MessageSent: max_pending was reached, it waits for others"),
        maybe("channel_id", U64, "of a channel's event, and of a message"),
        maybe("file_path", TEXT, "MessageSent, FileRefused: of the file, below the home"),
        maybe("file_checksum", TEXT, "the checksum that the ledger has of the file, 64 hex"),
        maybe("archive", TEXT, "Rolled: name of the archive file, below store/archive"),
        maybe(
            "lost_ms", NUMBER, "TimeLost: time without a relay; negative: the clock was set back"
        ),
        maybe("epoch", NUMBER, "Start: how often the daemon was started"),
        maybe("boot_id", TEXT, "Start: of the machine"),
        maybe("covers", NUMBER, "Checkpoint: offset up to which a store file covers the stream"),
    ]
)

ORIGINALS = pa.schema(
    [
        _BUCKET,
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

FILES = pa.schema(
    [
        always("path", TEXT, "below the home; of Tier 2, the object's key"),
        always("kind", TEXT, "ledger, store, archive, journal, segment, object, attachment"),
        maybe("day", TEXT, "2026-01-31, of a file that never changes; NULL: it may"),
        maybe("item", TEXT, "its name, the same in every tier"),
        maybe("size", NUMBER, "bytes"),
        maybe("sha256", TEXT, "of the file; of a segment size and crc64 of its records"),
        always("problems", WORDS, "faults, a line each"),
        always("warnings", WORDS, "notes, a line each"),
        always("read_at", TIME, "when its bytes were last read"),
    ]
)

USAGE = pa.schema(
    [
        always("part", TEXT, "ledger, journal, store, archive, inbox, attachment, other"),
        maybe("day", TEXT, "2026-01-31; NULL: it does not grow with the days"),
        always("files", NUMBER, "files of this part and day"),
        always("disk_bytes", NUMBER, "what they take of the disk"),
        maybe("pack_bytes", NUMBER, "of it, the day's pack; NULL: the day is not packed"),
    ]
)

LIMITS = pa.schema(
    [
        always("part", TEXT, "as in usage"),
        maybe("days", NUMBER, "retention removes what is older; NULL: no limit"),
        maybe("bytes", NUMBER, "retention keeps no more; NULL: no limit"),
    ]
)

HOME = pa.schema(
    [
        always("name", TEXT, "host:path of the home, or the name given for a copy"),
        always("snapshot_at", TIME, "the ledger's snapshot: everything before is in it"),
        always("observed_until", TIME, "until when a relay observed the home: ages end here"),
        maybe("follows", NUMBER, "the ledger's position in the journal; NULL: it has none"),
        maybe("journal_end", NUMBER, "behind the journal's last record; NULL: no journal"),
        maybe("audit_kept_from", TIME, "audit_log has what came later; NULL: all"),
        always("ack_timeout_s", NUMBER, "delivery.ack_timeout_s of config.json"),
        always("archive_days", NUMBER, "retention.archive_days; 0: no limit"),
        always("archive_mib", NUMBER, "retention.archive_mib; 0: no limit"),
        always("attachments_days", NUMBER, "retention.attachments_days; 0: no limit"),
        always("attachments_mib", NUMBER, "retention.attachments_mib; 0: no limit"),
        always("disk_bytes", NUMBER, "of the disk that has the home"),
        always("free_bytes", NUMBER, "available to an ordinary user"),
        always("floor_bytes", NUMBER, "the relay accepts nothing below it"),
        always("warm_raw_bytes", NUMBER, "of segments in Tier 1, before they were compressed"),
        always("warm_bytes", NUMBER, "the same, compressed"),
        always("evicted_bytes", NUMBER, "of segments that the object store alone has, compressed"),
        always("extractor", NUMBER, "version of what wrote the lake"),
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
_TABLE = re.compile(
    r"^CREATE TABLE (\w+) \(\n(.*?)^\)(?: WITHOUT ROWID)?;", re.MULTILINE | re.DOTALL
)
_COLUMN = re.compile(r"^ {4}(\w+) (TEXT|INTEGER|REAL)\b([^\n]*?)(?:-- ([^\n]*))?$", re.MULTILINE)
_TYPES = {"TEXT": TEXT, "INTEGER": NUMBER, "REAL": FLOAT}


def _ledger_column(name: str, kind: str, constraints: str, comment: str | None) -> pa.Field:
    is_time = kind == "INTEGER" and (name == "at" or name.endswith("_at"))
    is_rowid = kind == "INTEGER" and "PRIMARY KEY" in constraints
    make = always if is_rowid or "NOT NULL" in constraints else maybe
    return make(name, TIME if is_time else _TYPES[kind], comment or _LEDGER_COMMENTS[name])


# The tables of schema.sql, with its columns and its order.
LEDGER: dict[str, pa.Schema] = {
    table: pa.schema([_ledger_column(*column) for column in _COLUMN.findall(columns)])
    for table, columns in _TABLE.findall(schema_sql())
}


def _with_bucket(columns: pa.Schema) -> pa.Schema:
    """Put the bucket first where the rows are about a message."""
    return columns.insert(0, _BUCKET) if "message_id" in columns.names else columns


TABLES: dict[str, pa.Schema] = {
    "store_messages": STORE_MESSAGES,
    "store_deliveries": STORE_DELIVERIES,
    "store_channels": STORE_CHANNELS,
    "store_subscriptions": STORE_SUBSCRIPTIONS,
    "journal_sent": JOURNAL_SENT,
    "journal_moves": JOURNAL_MOVES,
    "journal_records": JOURNAL_RECORDS,
    "originals": ORIGINALS,
    "files": FILES,
    "usage": USAGE,
    "limits": LIMITS,
    **{f"{LEDGER_PREFIX}{table}": _with_bucket(columns) for table, columns in LEDGER.items()},
    "home": HOME,
}


def buckets_of(ids: pa.Array) -> pa.Array:
    """Return the bucket of each message id: the day of its time, or one of sixteen by its hash."""
    has_time = pc.fill_null(pc.match_substring_regex(ids, _HAS_TIME), False)
    digits = pc.utf8_slice_codeunits(ids, 0, 19)
    numbers = pc.if_else(has_time, digits, pa.scalar("0")).cast(pa.int64())
    days = numbers.cast(pa.timestamp("ns")).cast(pa.date32(), safe=False).cast(pa.string())
    if pc.all(has_time, min_count=0).as_py():
        return days
    others = [None if known else _hashed(message_id) for message_id, known in
              zip(ids.to_pylist(), has_time.to_pylist(), strict=True)]  # fmt: skip
    return pc.if_else(has_time, days, pa.array(others, pa.string()))


def _hashed(message_id: str | None) -> str:
    digest = sha256_hex((message_id or "").encode(errors="surrogateescape"))
    return f"h{int(digest[0], 16):02}"


def batch_of(rows: Sequence[Sequence[Any]], columns: pa.Schema) -> pa.RecordBatch:
    """Make a batch of rows, each in the order of the columns; times are numbers or have a zone."""
    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    arrays = [pa.array(given, column.type) for given, column in zip(values, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def with_bucket(columns: pa.Schema, batch: pa.RecordBatch, of: str) -> pa.RecordBatch:
    """Give rows the columns of a table of the lake; ``of``: the one with the message's id."""
    arrays = [
        buckets_of(batch.column(of)) if field.name == "bucket" else batch.column(field.name)
        for field in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
