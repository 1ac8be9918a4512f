"""The records of an `.acomm` file but for messages: values to bytes and back.

``encode_*`` gives a record's bytes, ``read_*`` takes one off a Reader. Fields are packed in
the order of the values in model.py, and a record that was read encodes to the same bytes.

Faults while reading are FormatErrors; values that the format cannot hold, or that pass a
limit of the source document, are ValidationFailed. Reading applies no limits: what is stored
is data. Source: FORMATS section 2, "Records".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    MatchMode,
    MessageFilter,
    MessageStatus,
    MessageType,
    Participant,
    ParticipantRole,
    Priority,
    Retention,
    RetentionKind,
    SortField,
    SortOrder,
    Subscription,
)
from relay.acomm.reader import E, Reader
from relay.acomm.writer import BYTE, items, name, opt, text, topic, u32, u64

# The smallest record of each kind: every text and list empty, every option absent.
MIN_CHANNEL = 81
MIN_PARTICIPANT = 14
MIN_SUBSCRIPTION = 35


def encode_channel(channel: Channel) -> bytes:
    """A channel's record. An empty description is the same as none."""
    return b"".join(
        (
            u64("id", channel.id),
            name("name", channel.name),
            BYTE[channel.channel_type],
            name("owner", channel.owner),
            items(channel.participants, _encode_participant),
            encode_config(channel.config),
            BYTE[channel.state],
            u64("created_at", channel.created_at),
            u64("modified_at", channel.modified_at),
            u64("message_count", channel.message_count),
            text("description", channel.description or ""),
            items(channel.tags, lambda tag: text("tag", tag)),
        )
    )


def read_channel(reader: Reader) -> Channel:
    """The next channel."""
    return Channel(
        reader.u64("id"),
        reader.text("name"),
        reader.enum("channel_type", ChannelType),
        reader.text("owner"),
        reader.items("participants", MIN_PARTICIPANT, lambda _: _read_participant(reader)),
        read_config(reader),
        reader.enum("state", ChannelState),
        reader.u64("created_at"),
        reader.u64("modified_at"),
        reader.u64("message_count"),
        reader.text("description") or None,
        reader.items("tags", 4, reader.text),
    )


def _encode_participant(participant: Participant) -> bytes:
    return b"".join(
        (
            name("participant id", participant.id),
            BYTE[participant.role],
            u64("joined_at", participant.joined_at),
            opt(participant.identity_id, lambda value: text("identity_id", value)),
        )
    )


def _read_participant(reader: Reader) -> Participant:
    return Participant(
        reader.text("participant id"),
        reader.enum("role", ParticipantRole),
        reader.u64("joined_at"),
        reader.opt("identity_id", reader.text),
    )


def encode_config(config: ChannelConfig) -> bytes:
    """A channel's configuration; the amount of a Forever retention is not written."""
    retention = config.retention
    forever = retention.kind is RetentionKind.FOREVER
    return b"".join(
        (
            BYTE[config.delivery],
            u64("max_message_size", config.max_message_size),
            opt(config.max_participants, lambda value: u32("max_participants", value)),
            BYTE[retention.kind],
            b"" if forever else u64("retention amount", retention.amount),
            opt(config.ack_timeout, lambda value: u64("ack_timeout", value)),
            u32("max_retries", config.max_retries),
            u64("retry_backoff_ms", config.retry_backoff_ms),
            bytes((config.echo, config.sticky_messages, config.priority_ordering)),
        )
    )


def read_config(reader: Reader) -> ChannelConfig:
    """The next channel configuration."""
    return ChannelConfig(
        reader.enum("delivery", DeliveryMode),
        reader.u64("max_message_size"),
        reader.opt("max_participants", reader.u32),
        _read_retention(reader),
        reader.opt("ack_timeout", reader.u64),
        reader.u32("max_retries"),
        reader.u64("retry_backoff_ms"),
        reader.boolean("echo"),
        reader.boolean("sticky_messages"),
        reader.boolean("priority_ordering"),
    )


def _read_retention(reader: Reader) -> Retention:
    kind = reader.enum("retention", RetentionKind)
    return Retention(kind, 0 if kind is RetentionKind.FOREVER else reader.u64("retention amount"))


def encode_subscription(subscription: Subscription) -> bytes:
    """A subscription's record."""
    return b"".join(
        (
            u64("id", subscription.id),
            u64("channel_id", subscription.channel_id),
            name("subscriber", subscription.subscriber),
            topic("topic_pattern", subscription.topic_pattern),
            BYTE[subscription.match_mode],
            u64("created_at", subscription.created_at),
            BYTE[subscription.active],
            opt(subscription.filter, encode_filter),
        )
    )


def read_subscription(reader: Reader) -> Subscription:
    """The next subscription."""
    return Subscription(
        reader.u64("id"),
        reader.u64("channel_id"),
        reader.text("subscriber"),
        reader.text("topic_pattern"),
        reader.enum("match_mode", MatchMode),
        reader.u64("created_at"),
        reader.boolean("active"),
        reader.opt("filter", lambda _: read_filter(reader)),
    )


def encode_filter(wanted: MessageFilter) -> bytes:
    """A filter's record."""

    def enums(values: Collection[IntEnum]) -> bytes:
        return items(values, lambda value: BYTE[value])

    return b"".join(
        (
            opt(wanted.channel_ids, lambda ids: items(ids, lambda i: u64("channel_ids", i))),
            opt(wanted.sender, lambda value: text("sender", value)),
            opt(wanted.message_types, enums),
            opt(wanted.topic_pattern, lambda value: text("topic_pattern", value)),
            opt(wanted.after, lambda value: u64("after", value)),
            opt(wanted.before, lambda value: u64("before", value)),
            opt(wanted.status, enums),
            opt(wanted.priority, enums),
            opt(wanted.correlation_id, lambda value: text("correlation_id", value)),
            opt(wanted.content_pattern, lambda value: text("content_pattern", value)),
            u64("limit", wanted.limit),
            u64("offset", wanted.offset),
            bytes((*wanted.order, wanted.include_archived)),
        )
    )


def read_filter(reader: Reader) -> MessageFilter:
    """The next filter."""

    def enums(kind: type[E]) -> Callable[[str], tuple[E, ...]]:
        return lambda field: reader.items(field, 1, lambda _: reader.enum(field, kind))

    return MessageFilter(
        reader.opt("channel_ids", lambda field: reader.items(field, 8, reader.u64)),
        reader.opt("sender", reader.text),
        reader.opt("message_types", enums(MessageType)),
        reader.opt("topic_pattern", reader.text),
        reader.opt("after", reader.u64),
        reader.opt("before", reader.u64),
        reader.opt("status", enums(MessageStatus)),
        reader.opt("priority", enums(Priority)),
        reader.opt("correlation_id", reader.text),
        reader.opt("content_pattern", reader.text),
        reader.u64("limit"),
        reader.u64("offset"),
        reader.enum("sort_by", SortField),
        reader.enum("sort_order", SortOrder),
        reader.boolean("include_archived"),
    )
