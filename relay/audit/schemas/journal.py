"""The tables of the format `aof2`: a row a record of a journal, and what is damaged in one."""

from __future__ import annotations

from pyspark.sql.types import ArrayType, StructType

from relay.audit.schemas.fields import (
    FLAG,
    NUMBER,
    TEXT,
    TIME,
    U64,
    WORDS,
    always,
    maybe,
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
        maybe("relay_id", TEXT, "message_id of the ledger: MessageSent and FileRefused"),
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
        maybe("reason", TEXT, "why it was refused, or given up"),
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
