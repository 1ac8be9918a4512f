"""The table of the format `aof2`: one row a record of a journal."""

from __future__ import annotations

from pyspark.sql.types import StructType

from relay.audit.schemas.fields import (
    NUMBER,
    TEXT,
    TIME,
    U64,
    WORDS,
    always,
    maybe,
)

JOURNAL = StructType(
    [
        always("stream", TEXT, "of the journal"),
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
        maybe("sender", TEXT, "agent: MessageSent, FileRefused"),
        maybe("to", TEXT, "MessageSent: the TO header"),
        maybe("recipients", WORDS, "agents whose deliveries it is about"),
        maybe("checksum", TEXT, "MessageSent: SHA-256 of the content, 64 hex; NULL when sealed"),
        maybe("content_size", NUMBER, "MessageSent: bytes"),
        maybe("correlation_id", TEXT, "MessageSent: UUID v4 of the thread"),
        maybe("created_ns", NUMBER, "MessageSent: discovery, Unix nanoseconds"),
        maybe("state", TEXT, "of the deliveries from now on: Sent, Delivered, Acknowledged, ..."),
        maybe("attempt", NUMBER, "of a delivery that was made again"),
        maybe("said", TEXT, "the status that an acknowledgment gives"),
        maybe("reason", TEXT, "why it was refused, or given up"),
        maybe("answer_id", TEXT, "FileRefused: message_id of the nack"),
    ]
)
