"""Validation of messages, channels and settings, and the limits of a store.

Pure functions; each error is a ValidationFailed that names the field, or a NotParticipant or
ChannelUnavailable that names the channel. Source: message-engine.txt, "Validate", "Backpressure";
data-structures.txt, "Validation Rules"; acomm-file-format.txt, "Size Limits".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from relay.acomm.container import MAX_FILE_BYTES
from relay.acomm.model import (
    FLUSH_MODES,
    Channel,
    ChannelConfig,
    ChannelSettings,
    ChannelState,
    ChannelType,
    MessageType,
    Metadata,
    Retention,
    RetentionKind,
)
from relay.acomm.sections import MAX_CHANNELS, MAX_MESSAGES, MAX_SUBSCRIPTIONS
from relay.base.errors import ChannelUnavailable, NotParticipant, ValidationFailed
from relay.base.names import is_channel_name
from relay.engine import topics
from relay.engine.ack_rules import ANSWERS

MAX_CONTENT_BYTES = 1_048_576
MAX_METADATA_ENTRIES = 64
MAX_METADATA_KEY = 128  # characters
MAX_METADATA_BYTES = 4096  # of one text
MAX_DESCRIPTION = 1024  # characters
MAX_TAGS = 100
MAX_TAG_BYTES = 64
PARTICIPANT_ID = re.compile(r"[a-zA-Z0-9_-]{1,128}")
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.I)
_MOST = 2**32 - 1  # what a file has room for
MAX_SIGNATURE_BYTES = 64  # Ed25519
Member = TypeVar("Member", bound=IntEnum)
_CONFIG_NUMBERS = {
    "max_message_size": (1, MAX_CONTENT_BYTES),
    "max_participants": (1, _MOST),
    "ack_timeout": (1, _MOST),
    "max_retries": (0, _MOST),
    "retry_backoff_ms": (0, _MOST),
}


def check_number(field: str, value: object) -> int:
    """Require an ``int``: not a bool, not a float."""
    if type(value) is not int:
        raise ValidationFailed(field, f"expected an integer, got {value!r}")
    return value


def check_participant(field: str, name: str) -> None:
    """A participant's id: 1-128 of letters, digits, _ and -."""
    if not (isinstance(name, str) and PARTICIPANT_ID.fullmatch(name)):
        raise ValidationFailed(field, f"{name!r}: 1-128 of letters, digits, _ and -", _length(name))


def check_timeout(timeout_s: object) -> int:
    """Seconds to wait for an acknowledgment, as a channel's ack_timeout may be."""
    least, most = _CONFIG_NUMBERS["ack_timeout"]
    if not least <= check_number("timeout_s", timeout_s) <= most:
        raise ValidationFailed("timeout_s", f"{timeout_s!r} is not a number from {least} to {most}")
    return check_number("timeout_s", timeout_s)


def check_channel_name(name: str) -> None:
    """A channel's name: parts like a participant's id, joined by slashes, 128 bytes at most."""
    if not (isinstance(name, str) and is_channel_name(name)):
        raise ValidationFailed(
            "name",
            f"{name!r}: letters, digits, _ and -, parts joined by /, 128 bytes at most",
            _length(name),
        )


def check_config(config: ChannelConfig) -> ChannelConfig:
    """The settings themselves, when every value is one that a channel can have."""
    if not isinstance(config, ChannelConfig):
        raise ValidationFailed("config", f"expected a ChannelConfig, got {config!r}")
    if not isinstance(config.retention, Retention):
        raise ValidationFailed("retention", f"expected a Retention, got {config.retention!r}")
    values = fields_of(config)
    for name, (least, most) in _CONFIG_NUMBERS.items():
        value = values[name]
        if value is not None and not least <= value <= most:
            raise ValidationFailed(name, f"{value!r} is not a number from {least} to {most}")
    if not 0 <= config.retention.amount < 2**64:
        raise ValidationFailed("retention", f"{config.retention.amount} does not fit 64 bits")
    if values["retention"].kind is RetentionKind.FOREVER:
        values["retention"] = Retention()  # a file has no amount for it
    return ChannelConfig(**values)


def fields_of(values: msgspec.Struct) -> dict[str, Any]:
    """Every field by name, as the type that it has in a file: a number is its enum.

    Errors: ValidationFailed for the first that is of another type.
    """
    found = {}
    for field in msgspec.structs.fields(type(values)):
        value = getattr(values, field.name)
        try:
            found[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as exc:
            raise ValidationFailed(field.name, f"{value!r}: {exc}") from None
        except UnicodeEncodeError:
            raise ValidationFailed(field.name, f"expected a string, got {value!r}") from None
    return found


def check_settings(settings: ChannelSettings) -> ChannelSettings:
    """The settings themselves, when a channel can have them."""
    most = settings.max_pending
    if most is not None and not (type(most) is int and 1 <= most <= _MOST):
        raise ValidationFailed("max_pending", f"{most!r} is not a number from 1 to {_MOST}")
    if settings.flush not in FLUSH_MODES:
        raise ValidationFailed("flush", f"{settings.flush!r} is not immediate, batch or manual")
    return settings


def check_words(description: object, tags: object) -> tuple[str | None, tuple[str, ...]]:
    """A channel's description and tags: 1,024 characters; 100 tags of 64 bytes."""
    if description is not None and len(check_text("description", description)) > MAX_DESCRIPTION:
        length = len(str(description))
        raise ValidationFailed("description", f"at most {MAX_DESCRIPTION} characters", length)
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise ValidationFailed("tags", f"expected a list of tags, got {tags!r}")
    found = tuple(check_text("tags", tag) for tag in tags)
    if len(found) > MAX_TAGS:
        raise ValidationFailed("tags", f"{len(found)} tags, at most {MAX_TAGS}", len(found))
    for tag in found:
        size = len(tag.encode())
        if not 1 <= size <= MAX_TAG_BYTES:
            raise ValidationFailed("tags", f"{tag[:20]!r}: 1 to {MAX_TAG_BYTES} bytes", size)
    return str(description) if description else None, found


def check_text(field: str, value: object) -> str:
    """The text itself, when it is one that UTF-8 can hold."""
    if not isinstance(value, str):
        raise ValidationFailed(field, f"expected a string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValidationFailed(field, "half of a surrogate pair is not text") from None
    return value


def content_bytes(content: str | bytes) -> bytes:
    """Content as the store keeps it: UTF-8. Errors: ValidationFailed if it is not valid UTF-8."""
    if not isinstance(content, bytes):
        return check_text("content", content).encode()
    try:
        content.decode()
    except UnicodeDecodeError as exc:
        raise ValidationFailed("content", f"byte {exc.start} is not UTF-8", len(content)) from None
    return content


def check_metadata(metadata: Metadata | None) -> None:
    """At most 64 entries, keys of 128 characters, texts of 4,096 bytes, integers of 64 bits."""
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise ValidationFailed("metadata", f"expected a dict, got {metadata!r}")
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise ValidationFailed("metadata", f"{len(metadata)} entries, at most 64", len(metadata))
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise ValidationFailed("metadata", f"expected a string as key, got {key!r}")
        if len(key) > MAX_METADATA_KEY:
            raise ValidationFailed("metadata", f"key {key[:20]!r}… is too long", len(key))
        if isinstance(value, str):
            if len(value) > MAX_METADATA_BYTES or not (key.isascii() and value.isascii()):
                _check_metadata_text(key, value)
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise ValidationFailed(f"metadata {key}", f"{value} does not fit 64 bits")
        elif not (value is None or isinstance(value, float)):
            raise ValidationFailed(
                f"metadata {key}", f"expected a string, number or bool, got {value!r}"
            )


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
    is_participant: bool,
    sender: str,
    message_type: MessageType,
    content: bytes,
    topic: str | None,
    ttl: int | None,
) -> None:
    """Sender, channel, content, topic and ttl of one message."""
    check_participant("sender", sender)
    _check_channel(channel, is_participant, sender, message_type)
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
    if ttl is not None and type(ttl) is not int:
        raise ValidationFailed("ttl", f"expected seconds as an integer, got {ttl!r}")
    if ttl is not None and ttl <= 0:
        raise ValidationFailed("ttl", "must be above 0")
    if ttl is not None and ttl >= 2**64:
        raise ValidationFailed("ttl", f"{ttl} does not fit 64 bits")


def check_member(field: str, value: int, kind: type[Member]) -> Member:
    """The value as a member of its enum, of that or by its number: a file holds no others."""
    if (type(value) is not int and not isinstance(value, kind)) or value not in list(kind):
        raise ValidationFailed(field, f"{value!r} is not a number from 0 to {len(kind) - 1}")
    return kind(value)


def check_signature(signature: object) -> None:
    """At most the 64 bytes of an Ed25519 signature."""
    if not isinstance(signature, bytes):
        raise ValidationFailed("signature", f"expected bytes, got {signature!r}")
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise ValidationFailed("signature", f"at most {MAX_SIGNATURE_BYTES} bytes", len(signature))


def _length(name: object) -> int:
    return len(str(name).encode(errors="replace"))


def _check_channel(
    channel: Channel, is_participant: bool, sender: str, message_type: MessageType
) -> None:
    # what a paused or draining channel has delivered must still be answered, or it would die
    answers = channel.state is not ChannelState.CLOSED and message_type in ANSWERS
    if channel.state is not ChannelState.ACTIVE and not answers:
        raise ChannelUnavailable(f"channel {channel.name} is {channel.state.label}")
    if not is_participant:
        raise NotParticipant(f"{sender} does not take part in channel {channel.name}")
    if (
        channel.channel_type is ChannelType.BROADCAST
        and sender != channel.owner
        and message_type not in ANSWERS
    ):
        raise NotParticipant(f"only its owner {channel.owner} sends to channel {channel.name}")
    if channel.channel_type is ChannelType.DIRECT and len(channel.participants) != 2:
        raise ValidationFailed(
            "channel", f"direct channel {channel.name} has no second participant yet"
        )


def check_correlation(
    message_type: MessageType,
    correlation_id: str | None,
    thread: Iterable[tuple[MessageType, bool]],
) -> None:
    """The correlation id's form, and that an answer answers something.

    ``thread``: type and "expects an acknowledgment" of each message that has this id.
    """
    if correlation_id is not None and not (
        isinstance(correlation_id, str) and UUID4.fullmatch(correlation_id)
    ):
        raise ValidationFailed("correlation_id", f"{correlation_id!r} is not a valid UUID v4")
    if message_type is MessageType.RESPONSE:
        if not any(kind is MessageType.QUERY for kind, _ in thread):
            raise ValidationFailed("correlation_id", "a Response must answer an existing Query")
    elif message_type is MessageType.ACKNOWLEDGMENT and not any(owes for _, owes in thread):
        raise ValidationFailed(
            "correlation_id", "an Acknowledgment must answer a message that expects one"
        )


class Limits(NamedTuple):
    """The limits of a store. Only a test has a reason to narrow those of the file."""

    active_messages: int = 100_000  # not archived, in memory; the guide's threshold
    messages: int = MAX_MESSAGES  # with dead letters and archived ones
    channels: int = MAX_CHANNELS
    subscriptions: int = MAX_SUBSCRIPTIONS
    file_bytes: int = MAX_FILE_BYTES
    warn_bytes: int = MAX_FILE_BYTES * 8 // 10  # where the warning comes
    reserve_bytes: int = 104_857_600  # 100 MiB below the limit nothing new is taken, answers are
    batch_recipients: int = 1000  # a larger fan-out is delivered in batches of this many


DEFAULT_LIMITS = Limits()
