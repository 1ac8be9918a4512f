"""The records of an `.acomm` file: values to bytes and back.

Fields are packed in the order of the values in model.py; a record that was read encodes to the
same bytes. Reading applies no limits: what is stored is data.

``MESSAGE`` checks field by field. ``read_messages`` reads many by the same rules at several times
the speed: it parses each record without checks and hands those that fail to ``MESSAGE``.
Errors: FormatError when reading; ValidationFailed for values that the format cannot hold or that
exceed a limit. See docs/formats/acomm.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from struct import Struct

from relay.acomm.codec import CONTENT, NAME, TEXT, TOPIC, U32, enum, many, opt, record
from relay.acomm.fields import (
    ABSENT,
    BYTE,
    MAX_FAST_TEXT,
    MAX_NAME_BYTES,
    PRESENT,
    U64,
    Reader,
    encode_metadata,
    name,
    read_metadata_fast,
    text,
)
from relay.acomm.fields import U32 as U32_STRUCT
from relay.acomm.fields import topic as topic_text
from relay.acomm.model import (
    Channel,
    ChannelConfig,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Metadata,
    Participant,
    Priority,
    SortField,
    SortOrder,
    Subscription,
)
from relay.base.errors import FormatError, ValidationFailed

# An empty description is the same as none.
_DESCRIPTION = TEXT._replace(
    encode=lambda field, value: text(field, value or ""),
    read=lambda reader, field: reader.text(field) or None,
    dump=opt(TEXT).dump,
    load=opt(TEXT).load,
)
PARTICIPANT = record(Participant, id=NAME)
CHANNEL = record(
    Channel,
    name=NAME,
    owner=NAME,
    participants=many(PARTICIPANT),
    config=record(ChannelConfig, max_participants=opt(U32), max_retries=U32),
    description=_DESCRIPTION,
)
SUBSCRIPTION = record(
    Subscription,
    subscriber=NAME,
    topic_pattern=TOPIC,
    filter=opt(
        record(
            MessageFilter,
            sort_by=enum(SortField, SortField.CREATED_AT),
            sort_order=enum(SortOrder, SortOrder.DESCENDING),
        )
    ),
)
MESSAGE = record(Message, sender=NAME, content=CONTENT, topic=opt(TOPIC), retry_count=U32)


MAX_CONTENT_BYTES = 1_048_576
# AES-256-GCM adds a nonce of 12 and a tag of 16 bytes to the content that it seals.
ENCRYPTION_BYTES = 28

# Far more than any record written here; anything larger is not a record.
MOST_RECORD_BYTES = 16 << 20

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
                b"" if signature is None else U32_STRUCT.pack(len(signature)) + signature,
            )
        )
    except struct.error:
        return MESSAGE.encode("", message)  # names the field that is out of range


def read_messages(reader: Reader, count: int) -> tuple[Message, ...]:
    """The next ``count`` messages; as ``MESSAGE`` reads them, and faster."""
    data, pos, end = reader.data, reader.pos, reader.end
    known: dict[bytes, str] = {}
    messages = []
    for _ in range(count):
        try:
            message, after = _read_fast(data, pos, known)
        except (IndexError, UnicodeDecodeError, struct.error):
            after = end + 1
        if after > end:  # invalid: let MESSAGE find the fault
            reader.pos = pos
            message = MESSAGE.read(reader, "")
            after = reader.pos
        messages.append(message)
        pos = after
    reader.pos = pos
    return tuple(messages)


def walk_messages(reader: Reader, most: int) -> Iterator[tuple[int, int]]:
    """Walk over complete messages, ``most`` at most; yields created_at and id of each."""
    known: dict[bytes, str] = {}
    for _ in range(most):
        start = reader.pos
        try:
            message, after = _read_fast(reader.data, start, known)
        except (IndexError, UnicodeDecodeError, struct.error):
            after = reader.end + 1
        if after <= reader.end:
            reader.pos = after
        else:
            try:
                message = MESSAGE.read(reader, "")
            except FormatError:  # truncated or invalid
                reader.pos = start
                if reader.end - start > MOST_RECORD_BYTES:
                    raise
                return
        yield message.created_at, message.id


def _read_fast(data: bytes, pos: int, known: dict[bytes, str]) -> tuple[Message, int]:
    """The message at ``pos`` and its end, which may be past the reader's end.

    Any exception means that the record is invalid, or not supported here. ``known`` interns
    repeated texts, so that each is in memory once.
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
        pos = start + U32_STRUCT.unpack_from(data, pos)[0]
        signature = data[start:pos]
    if tags | tag > 1:
        raise IndexError
    return *times, status, retries, signature, pos


def _text_fast(data: bytes, pos: int, known: dict[bytes, str]) -> tuple[str, int]:
    (size,) = U32_STRUCT.unpack_from(data, pos)
    if size > MAX_FAST_TEXT:
        raise IndexError
    start = pos + 4
    end = start + size
    found = known.get(raw := data[start:end])
    if found is None:
        found = known[raw] = raw.decode()
    return found, end
