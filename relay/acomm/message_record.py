"""The message record of an `.acomm` file: to bytes, back again, and back by the 100,000.

    id u64 | type u8 | sender | channel_id u64 | content | topic? | correlation_id? | priority u8
    | metadata? | created_at u64 | delivered_at? | acknowledged_at? | ttl? | status u8
    | retry_count u32 | signature?          ? is a tag byte, 0 absent or 1 present

``read_message`` checks field by field and names what is wrong. ``read_messages`` reads many by
the same rules at several times the speed: it takes each record as if it were right, and hands
the ones that are not to ``read_message``. Both give equal values for any bytes.

Faults while reading are FormatErrors; values that the format cannot hold, or that pass a limit
of the source document, are ValidationFailed. Source: FORMATS section 2, "Records".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from struct import Struct

from relay.acomm.model import Message, MessageStatus, MessageType, Metadata, MetadataValue, Priority
from relay.acomm.reader import F64, I64, U32, U64, Reader
from relay.acomm.writer import ABSENT, BYTE, MAX_NAME_BYTES, PRESENT, U32_MAX, U64_MAX, name, text
from relay.acomm.writer import topic as topic_text
from relay.base.errors import FormatError, ValidationFailed

MAX_CONTENT_BYTES = 1_048_576
# A longer text is rare, and may be a length that lies: it is read field by field.
MAX_FAST_TEXT = 1024
# AES-256-GCM adds a nonce of 12 and a tag of 16 bytes to the content that it seals.
SEAL_BYTES = 28

# Far more than any record that this writes; one that is not whole in so many bytes is none.
MOST_RECORD_BYTES = 16 << 20

# The smallest record: texts empty, options absent.
MIN_MESSAGE = 46
MIN_METADATA_ENTRY = 5

META_STRING, META_INTEGER, META_FLOAT, META_BOOLEAN, META_NULL = range(5)

START = Struct("<QB")  # id, message_type; then sender
CONTENT_LENGTH = Struct("<QI")  # channel_id, length of content; then content
# All of these, and the length of sender, at once: by that length.
HEADS = tuple(Struct(f"<QBI{size}sQI") for size in range(MAX_NAME_BYTES + 1))
SENDER_LENGTH_AT = START.size
STATE = Struct("<BIB")  # status, retry_count, tag of signature
# created_at to the tag of signature, of a message that was delivered and nothing else.
DELIVERED = Struct("<QBQBBBIB")
OPT_U64 = Struct("<BQ")  # tag 1, value
TAGGED_I64 = Struct("<Bq")
TAGGED_F64 = Struct("<Bd")

MESSAGE_TYPES = tuple(MessageType)
PRIORITIES = tuple(Priority)
STATUSES = tuple(MessageStatus)
BOOLEANS = (False, True)
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


def walk_messages(pieces: Iterable[bytes], path: str, name: str, limit: int, where: str) -> None:
    """Find out whether what comes in pieces is a count and so many messages; none is kept.

    Errors: FormatError with the first fault; what is missing at the end is for who reads it all.
    """
    data, base, left = b"", 0, -1
    for piece in pieces:
        data += piece
        reader = Reader(data, path, base=base, where=where)
        if left < 0:
            if len(data) < U64.size:
                continue
            left = reader.u64(f"count of {name}")
            if left > limit:
                raise reader.fault(0, f"count of {name} of at most {limit}", left)
        left -= _skip_messages(reader, left)
        if not left:
            reader.finish(name)
        base += reader.pos
        data = data[reader.pos :]


def _skip_messages(reader: Reader, most: int) -> int:
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
        metadata, pos = _metadata_fast(data, pos)
    if tags > 1:
        raise IndexError
    return topic, correlation, priority, metadata, pos


def _end_fast(
    data: bytes, pos: int
) -> tuple[int | None, int | None, int | None, int, int, bytes | None, int]:
    """What stands behind created_at, from the tag of delivered_at on, and where it ends."""
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


def _metadata_fast(data: bytes, pos: int) -> tuple[Metadata, int]:
    metadata: Metadata = {}
    (count,) = U32.unpack_from(data, pos)
    pos += 4
    for _ in range(count):
        end = pos + 5 + data[pos]
        key, tag = _key_and_tag(data[pos:end])
        if tag == META_STRING:
            (size,) = U32.unpack_from(data, end)
            if size > MAX_FAST_TEXT:
                raise IndexError
            pos = end + 4 + size
            metadata[key] = data[end + 4 : pos].decode()
        elif tag == META_INTEGER:
            pos = end + 8
            (metadata[key],) = I64.unpack_from(data, end)
        elif tag == META_FLOAT:
            pos = end + 8
            (metadata[key],) = F64.unpack_from(data, end)
        elif tag == META_BOOLEAN:
            pos = end + 1
            metadata[key] = BOOLEANS[data[end]]
        elif tag == META_NULL:
            pos = end
            metadata[key] = None
        else:
            raise IndexError
    if len(metadata) != count:
        raise IndexError
    return metadata, pos


# A store has few keys, and each stands in nearly every message.
@lru_cache(maxsize=4096)
def _key_and_tag(head: bytes) -> tuple[str, int]:
    """What an entry begins with, when its key is shorter than 256 bytes."""
    (size,) = U32.unpack_from(head)
    if size + 5 != len(head):
        raise IndexError
    return head[4:-1].decode(), head[-1]


def encode_metadata(metadata: Metadata) -> bytes:
    """Metadata by key in byte order (UTF-8 sorts as its code points do)."""
    parts = [U32.pack(len(metadata))]
    for key in sorted(metadata):
        cached = _key(key) if len(key) <= MAX_NAME_BYTES else text("metadata key", key)
        parts += (cached, _metadata_value(key, metadata[key]))
    return b"".join(parts)


def read_metadata(reader: Reader) -> Metadata:
    """Metadata in the order stored. A key given twice is a fault: one value would be lost."""
    metadata: Metadata = {}
    for _ in range(reader.count("metadata entries", MIN_METADATA_ENTRY)):
        start = reader.pos
        key = reader.text("metadata key")
        if key in metadata:
            raise reader.fault(start, "each metadata key once", f"{key!r} twice")
        metadata[key] = _read_metadata_value(reader)
    return metadata


# A store has few keys, and writes each of them with every message.
@lru_cache(maxsize=4096)
def _key(key: str) -> bytes:
    return text("metadata key", key)


def _metadata_value(key: str, value: MetadataValue) -> bytes:
    if isinstance(value, str):
        return BYTE[META_STRING] + text("metadata value", value)
    if value is None:
        return BYTE[META_NULL]
    if isinstance(value, bool):  # before int, which a bool is as well
        return bytes((META_BOOLEAN, value))
    if isinstance(value, float):
        return TAGGED_F64.pack(META_FLOAT, value)
    try:
        return TAGGED_I64.pack(META_INTEGER, value)
    except struct.error:
        raise ValidationFailed(f"metadata {key}", f"{value} does not fit 64 bits") from None


def _read_metadata_value(reader: Reader) -> MetadataValue:
    tag = reader.u8("metadata tag")
    if tag == META_STRING:
        return reader.text("metadata value")
    if tag == META_INTEGER:
        return reader.i64("metadata value")
    if tag == META_FLOAT:
        return reader.f64("metadata value")
    if tag == META_BOOLEAN:
        return reader.boolean("metadata value")
    if tag == META_NULL:
        return None
    raise reader.fault(reader.pos - 1, "metadata tag 0-4", tag)
