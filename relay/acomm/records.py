"""The records of an `.acomm` file: values to bytes and back.

``encode_*`` returns a record's bytes, ``read_*`` reads one from a Reader. Fields are packed in the
order of the values in model.py; a record that was read encodes to the same bytes. Reading applies
no limits: what is stored is data.

``read_message`` checks field by field. ``read_messages`` reads many by the same rules at several
times the speed: it parses each record without checks and hands those that fail to
``read_message``. Errors: FormatError when reading; ValidationFailed for values that the format
cannot hold or that exceed a limit of the source document. Source: FORMATS section 2, "Records".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from enum import IntEnum
from struct import Struct

from relay.acomm.fields import (
    ABSENT,
    BYTE,
    MAX_FAST_TEXT,
    MAX_NAME_BYTES,
    PRESENT,
    U32,
    U32_MAX,
    U64,
    U64_MAX,
    E,
    Reader,
    encode_metadata,
    items,
    name,
    opt,
    read_metadata,
    read_metadata_fast,
    text,
    u32,
    u64,
)
from relay.acomm.fields import topic as topic_text
from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    MatchMode,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Metadata,
    Participant,
    ParticipantRole,
    Priority,
    Retention,
    RetentionKind,
    SortField,
    SortOrder,
    Subscription,
)
from relay.base.errors import FormatError, ValidationFailed

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
            topic_text("topic_pattern", subscription.topic_pattern),
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


MAX_CONTENT_BYTES = 1_048_576
# AES-256-GCM adds a nonce of 12 and a tag of 16 bytes to the content that it seals.
ENCRYPTION_BYTES = 28

# Far more than any record that is written here; one that is larger is not a record.
MOST_RECORD_BYTES = 16 << 20

# The smallest record: texts empty, options absent.
MIN_MESSAGE = 46


START = Struct("<QB")  # id, message_type; then sender
CONTENT_LENGTH = Struct("<QI")  # channel_id, length of content; then content
# All of these, and the length of sender, at once: by that length.
HEADS = tuple(Struct(f"<QBI{size}sQI") for size in range(MAX_NAME_BYTES + 1))
SENDER_LENGTH_AT = START.size
STATE = Struct("<BIB")  # status, retry_count, tag of signature
# created_at to the tag of signature, of a message that was delivered and nothing else.
DELIVERED = Struct("<QBQBBBIB")
OPT_U64 = Struct("<BQ")  # tag 1, value

MESSAGE_TYPES = tuple(MessageType)
PRIORITIES = tuple(Priority)
STATUSES = tuple(MessageStatus)
# Topic, correlation_id and metadata absent, and the priority between them.
BARE = {bytes((0, 0, priority, 0)): priority for priority in PRIORITIES}


def encode_message(message: Message, max_content: int = MAX_CONTENT_BYTES) -> bytes:
    """A message's record; a hot path, so the fields are checked only when packing fails.

    Errors: ValidationFailed naming the field, for content above ``max_content`` bytes, names
    and topics above theirs, and values that their field cannot hold.
    """
    content, topic, correlation = message.content, message.topic, message.correlation_id
    metadata, signature = message.metadata, message.signature
    delivered, acknowledged, ttl = message.delivered_at, message.acknowledged_at, message.ttl
    if len(content) > max_content:
        raise ValidationFailed("content", f"above {max_content} bytes", len(content))
    try:
        return b"".join(
            (
                START.pack(message.id, message.message_type),
                name("sender", message.sender),
                CONTENT_LENGTH.pack(message.channel_id, len(content)),
                content,
                ABSENT if topic is None else PRESENT + topic_text("topic", topic),
                ABSENT if correlation is None else PRESENT + text("correlation_id", correlation),
                BYTE[message.priority],
                ABSENT if metadata is None else PRESENT + encode_metadata(metadata),
                U64.pack(message.created_at),
                ABSENT if delivered is None else OPT_U64.pack(1, delivered),
                ABSENT if acknowledged is None else OPT_U64.pack(1, acknowledged),
                ABSENT if ttl is None else OPT_U64.pack(1, ttl),
                STATE.pack(message.status, message.retry_count, signature is not None),
                b"" if signature is None else U32.pack(len(signature)) + signature,
            )
        )
    except struct.error:
        raise _outside_its_field(message) from None


def _outside_its_field(message: Message) -> ValidationFailed:
    """Which integer of a message could not be packed."""
    for field in ("id", "channel_id", "created_at", "delivered_at", "acknowledged_at", "ttl"):
        value = getattr(message, field)
        if value is not None and not 0 <= value <= U64_MAX:
            return ValidationFailed(field, f"{value} is outside 0-{U64_MAX}")
    return ValidationFailed("retry_count", f"{message.retry_count} is outside 0-{U32_MAX}")


def read_message(reader: Reader) -> Message:
    """The next message, checked field by field."""
    return Message(
        reader.u64("id"),
        reader.enum("message_type", MessageType),
        reader.text("sender"),
        reader.u64("channel_id"),
        reader.blob("content"),
        reader.opt("topic", reader.text),
        reader.opt("correlation_id", reader.text),
        reader.enum("priority", Priority),
        reader.opt("metadata", lambda _: read_metadata(reader)),
        reader.u64("created_at"),
        reader.opt("delivered_at", reader.u64),
        reader.opt("acknowledged_at", reader.u64),
        reader.opt("ttl", reader.u64),
        reader.enum("status", MessageStatus),
        reader.u32("retry_count"),
        reader.opt("signature", reader.blob),
    )


def read_messages(reader: Reader, count: int) -> tuple[Message, ...]:
    """The next ``count`` messages; equal to ``count`` calls of ``read_message``, and faster."""
    data, pos, end = reader.data, reader.pos, reader.end
    known: dict[bytes, str] = {}
    messages = []
    for _ in range(count):
        try:
            message, after = _read_fast(data, pos, known)
        except (IndexError, UnicodeDecodeError, struct.error):
            after = end + 1
        if after > end:  # something is wrong with it: find out what
            reader.pos = pos
            message = read_message(reader)
            after = reader.pos
        messages.append(message)
        pos = after
    reader.pos = pos
    return tuple(messages)


def skip_messages(reader: Reader, most: int) -> int:
    """Go on behind the messages that are whole, ``most`` at most; how many they were."""
    known: dict[bytes, str] = {}
    for number in range(most):
        start = reader.pos
        try:
            _, after = _read_fast(reader.data, start, known)
        except (IndexError, UnicodeDecodeError, struct.error):
            after = reader.end + 1
        if after <= reader.end:
            reader.pos = after
            continue
        try:
            read_message(reader)
        except FormatError:  # it is cut off here, or wrong
            reader.pos = start
            if reader.end - start > MOST_RECORD_BYTES:
                raise
            return number
    return most


def _read_fast(data: bytes, pos: int, known: dict[bytes, str]) -> tuple[Message, int]:
    """The message at ``pos``, and where it ends, which may lie behind the reader's end.

    Any exception means that the record is not right, or not read here. ``known`` keeps texts
    that come again and again, so that each is in memory once.
    """
    head = HEADS[data[pos + SENDER_LENGTH_AT]]
    ident, kind, size, raw, channel, length = head.unpack_from(data, pos)
    if size != len(raw):
        raise IndexError
    sender = known.get(raw)
    if sender is None:
        sender = known[raw] = raw.decode()
    start = pos + head.size
    pos = start + length
    content = data[start:pos]
    topic = correlation = metadata = acknowledged = ttl = signature = None
    priority = BARE.get(data[pos : pos + 4])
    if priority is not None:
        pos += 4
    else:
        topic, correlation, priority, metadata, pos = _middle_fast(data, pos, known)
    created, one, delivered, two, three, status, retries, four = DELIVERED.unpack_from(data, pos)
    if one == 1 and not two | three | four:
        pos += DELIVERED.size
        if delivered == created:
            delivered = created  # one number in memory, not two
    else:
        delivered, acknowledged, ttl, status, retries, signature, pos = _end_fast(data, pos + 8)
    return Message(
        ident,
        MESSAGE_TYPES[kind],
        sender,
        channel,
        content,
        topic,
        correlation,
        priority,
        metadata,
        created,
        delivered,
        acknowledged,
        ttl,
        STATUSES[status],
        retries,
        signature,
    ), pos


def _middle_fast(
    data: bytes, pos: int, known: dict[bytes, str]
) -> tuple[str | None, str | None, Priority, Metadata | None, int]:
    """Topic, correlation_id, priority and metadata at ``pos``, and where they end."""
    topic = correlation = metadata = None
    tags = tag = data[pos]
    pos += 1
    if tag:
        topic, pos = _text_fast(data, pos, known)
    tags |= (tag := data[pos])
    pos += 1
    if tag:
        correlation, pos = _text_fast(data, pos, known)
    priority = PRIORITIES[data[pos]]
    tags |= (tag := data[pos + 1])
    pos += 2
    if tag:
        metadata, pos = read_metadata_fast(data, pos)
    if tags > 1:
        raise IndexError
    return topic, correlation, priority, metadata, pos


def _end_fast(
    data: bytes, pos: int
) -> tuple[int | None, int | None, int | None, int, int, bytes | None, int]:
    """The fields after created_at, from the tag of delivered_at on, and their end."""
    tags = 0
    times: list[int | None] = []
    for _ in range(3):
        tags |= (tag := data[pos])
        times.append(U64.unpack_from(data, pos + 1)[0] if tag else None)
        pos += 9 if tag else 1
    status, retries, tag = STATE.unpack_from(data, pos)
    pos += STATE.size
    signature = None
    if tag:
        start = pos + 4
        pos = start + U32.unpack_from(data, pos)[0]
        signature = data[start:pos]
    if tags | tag > 1:
        raise IndexError
    return *times, status, retries, signature, pos


def _text_fast(data: bytes, pos: int, known: dict[bytes, str]) -> tuple[str, int]:
    (size,) = U32.unpack_from(data, pos)
    if size > MAX_FAST_TEXT:
        raise IndexError
    start = pos + 4
    end = start + size
    found = known.get(raw := data[start:end])
    if found is None:
        found = known[raw] = raw.decode()
    return found, end
