"""Stage 1 of the send pipeline: every rule a message must keep before it is anything.

Pure functions; each fault is a ValidationFailed that names the field, or a NotParticipant or
ChannelUnavailable that names the channel. Source: message-engine.txt "Validate",
data-structures.txt "Validation Rules".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from relay.comm import topics
from relay.comm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    MessageType,
    Metadata,
)
from relay.errors import ChannelUnavailable, NotParticipant, ValidationFailed
from relay.names import is_channel_name

MAX_CONTENT_BYTES = 1_048_576
MAX_METADATA_ENTRIES = 64
MAX_METADATA_KEY = 128  # characters
MAX_METADATA_BYTES = 4096  # of one text
PARTICIPANT_ID = re.compile(r"[a-zA-Z0-9_-]{1,128}")
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.I)
_MOST = 2**32 - 1  # what a file has room for
_CONFIG_NUMBERS = {
    "max_message_size": (1, MAX_CONTENT_BYTES),
    "max_participants": (1, _MOST),
    "ack_timeout": (1, _MOST),
    "max_retries": (0, _MOST),
    "retry_backoff_ms": (0, _MOST),
}
ANSWERS = frozenset({MessageType.RESPONSE, MessageType.ACKNOWLEDGMENT})


def check_participant(field: str, name: str) -> None:
    """A participant's id: 1-128 of letters, digits, _ and -."""
    if not PARTICIPANT_ID.fullmatch(name):
        raise ValidationFailed(
            field, f"{name!r}: 1-128 of letters, digits, _ and -", len(name.encode())
        )


def check_channel_name(name: str) -> None:
    """A channel's name: parts like a participant's id, joined by slashes, 128 bytes at most."""
    if not is_channel_name(name):
        raise ValidationFailed(
            "name",
            f"{name!r}: letters, digits, _ and -, parts joined by /, 128 bytes at most",
            len(name.encode()),
        )


def check_config(config: ChannelConfig) -> ChannelConfig:
    """The settings themselves, when every value is one that a channel can have."""
    values = {}
    for field in msgspec.structs.fields(ChannelConfig):
        value = getattr(config, field.name)
        try:
            values[field.name] = msgspec.convert(value, field.type)  # a number is its enum
        except msgspec.ValidationError as exc:
            raise ValidationFailed(field.name, f"{value!r}: {exc}") from None
        least, most = _CONFIG_NUMBERS.get(field.name, (0, None))
        if most is not None and value is not None and not least <= value <= most:
            raise ValidationFailed(field.name, f"{value!r} is not a number from {least} to {most}")
    if not 0 <= config.retention.amount < 2**64:
        raise ValidationFailed("retention", f"{config.retention.amount} does not fit 64 bits")
    return ChannelConfig(**values)


def content_bytes(content: str | bytes) -> bytes:
    """Content as the store keeps it: UTF-8."""
    if isinstance(content, bytes):
        return content
    try:
        return content.encode()
    except UnicodeEncodeError:
        raise ValidationFailed("content", "half of a surrogate pair is not text") from None


def check_metadata(metadata: Metadata | None) -> None:
    """At most 64 entries, keys of 128 characters, texts of 4,096 bytes, integers of 64 bits."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise ValidationFailed("metadata", f"{len(metadata)} entries, at most 64", len(metadata))
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise ValidationFailed("metadata", f"key {key[:20]!r}… is too long", len(key))
        if isinstance(value, str):
            if len(value) > MAX_METADATA_BYTES or not (key.isascii() and value.isascii()):
                _check_metadata_text(key, value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValidationFailed(f"metadata {key}", f"{value} does not fit 64 bits")


def _check_metadata_text(key: str, value: str) -> None:
    try:
        key.encode()
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValidationFailed("metadata", "half of a surrogate pair is not text") from None
    if size > MAX_METADATA_BYTES:
        raise ValidationFailed(f"metadata {key}", f"at most {MAX_METADATA_BYTES} bytes", size)


def check_message(
    channel: Channel,
    takes_part: bool,
    sender: str,
    message_type: MessageType,
    content: bytes,
    topic: str | None,
    ttl: int | None,
) -> None:
    """Sender, channel, content, topic and ttl of one message."""
    check_participant("sender", sender)
    _check_channel(channel, takes_part, sender, message_type)
    limit = min(channel.config.max_message_size, MAX_CONTENT_BYTES)
    if not content:
        raise ValidationFailed("content", "the message is empty", 0)
    if len(content) > limit:
        raise ValidationFailed(
            "content",
            f"Message content exceeds channel max_message_size ({limit} bytes)",
            len(content),
        )
    if topic is not None:
        topics.check_topic(topic)
    elif channel.channel_type is ChannelType.PUB_SUB and message_type not in ANSWERS:
        raise ValidationFailed("topic", f"channel {channel.name} needs a TOPIC")
    if ttl is not None and ttl <= 0:
        raise ValidationFailed("ttl", "must be above 0")
    if ttl is not None and ttl >= 2**64:
        raise ValidationFailed("ttl", f"{ttl} does not fit 64 bits")


def _check_channel(
    channel: Channel, takes_part: bool, sender: str, message_type: MessageType
) -> None:
    if channel.state is not ChannelState.ACTIVE:
        raise ChannelUnavailable(f"channel {channel.name} is {channel.state.label}")
    if not takes_part:
        raise NotParticipant(f"{sender} does not take part in channel {channel.name}")
    if (
        channel.channel_type is ChannelType.BROADCAST
        and sender != channel.owner
        and message_type not in ANSWERS
    ):
        raise NotParticipant(f"only its owner {channel.owner} sends to channel {channel.name}")
    if channel.channel_type is ChannelType.DIRECT and len(channel.participants) != 2:
        raise ValidationFailed("channel", f"direct channel {channel.name} lacks its second")


def check_correlation(
    message_type: MessageType,
    correlation_id: str | None,
    thread: Iterable[tuple[MessageType, bool]],
) -> None:
    """The correlation id's form, and that an answer answers something.

    ``thread``: type and "expects an acknowledgment" of each message that has this id.
    """
    if correlation_id is not None and not UUID4.fullmatch(correlation_id):
        raise ValidationFailed("correlation_id", f"{correlation_id!r} is no UUID v4")
    if message_type is MessageType.RESPONSE:
        if not any(kind is MessageType.QUERY for kind, _ in thread):
            raise ValidationFailed("correlation_id", "a Response must answer an existing Query")
    elif message_type is MessageType.ACKNOWLEDGMENT and not any(owes for _, owes in thread):
        raise ValidationFailed(
            "correlation_id", "an Acknowledgment must answer a message that expects one"
        )
