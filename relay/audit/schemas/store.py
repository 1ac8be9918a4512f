"""The tables of the format `acomm`: the sections of a store file."""

from __future__ import annotations

from pyspark.sql.types import StructType

from relay.audit.schemas.fields import (
    BYTES,
    FLAG,
    NUMBER,
    TEXT,
    TEXTS,
    TIME,
    U64,
    WORDS,
    always,
    maybe,
)

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
        maybe("metadata", TEXTS, "values that are no text are written as JSON"),
        maybe("relay_id", TEXT, "metadata relay_id: message_id of the ledger"),
        maybe("to", TEXT, "metadata to: the TO header"),
        maybe("kind", TEXT, "the KIND header: metadata kind, or what message_type stands for"),
        maybe("created_ns", NUMBER, "metadata created_ns: discovery, Unix nanoseconds"),
        maybe("created_at", TIME, "the engine's clock, whole seconds"),
        maybe("delivered_at", TIME, "written for every recipient, whole seconds"),
        maybe("acknowledged_at", TIME, "acked by all that owe it, whole seconds"),
        maybe("ttl_s", U64, "seconds that it is worth delivering"),
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
