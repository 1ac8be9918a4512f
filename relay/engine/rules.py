"""Rules of the engine: valid values, limits, topics, and what is acknowledged, retried or pending.

Pure functions. An invalid value is a ValidationFailed that names the field, or a NotParticipant or
ChannelUnavailable that names the channel.

In the patterns that match topics ``*`` and ``#`` are whole segments; ``#`` is only allowed last and
matches any number of segments; a leading ``*`` is allowed. Inside a segment, from the second on,
both are text, as topics may have them.

Messages for which ``requires_ack`` is true may be acknowledged. Only with at-least-once delivery
(``is_retried``) does the engine wait for the acknowledgment and deliver again until it arrives. A
message is pending while a recipient has not been delivered to, has not received it, is being
retried, or has not reacted to a command or query of a relay (``relay.engine.deliveries``). Answers
are never pending. See docs/formats/acomm.md, docs/decisions/0004-engine.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from relay.acomm.container import MAX_FILE_BYTES
from relay.acomm.fields import U32_MAX
from relay.acomm.model import (
    FLUSH_MODES,
    Channel,
    ChannelConfig,
    ChannelSettings,
    ChannelState,
    ChannelType,
    Delivery,
    DeliveryMode,
    DeliveryState,
    MatchMode,
    Message,
    MessageStatus,
    MessageType,
    Metadata,
    Obligation,
    Retention,
    RetentionKind,
)
from relay.acomm.records import MAX_CONTENT_BYTES
from relay.acomm.sections import MAX_CHANNELS, MAX_MESSAGES, MAX_SUBSCRIPTIONS
from relay.base.errors import ChannelUnavailable, NotParticipant, ValidationFailed
from relay.base.message import MAX_TOPIC_BYTES, TOPIC
from relay.base.names import is_channel_name

MAX_METADATA_ENTRIES = 64
MAX_METADATA_KEY = 128  # characters
MAX_METADATA_BYTES = 4096  # of one text
MOST_METADATA_BYTES = MAX_METADATA_ENTRIES * (4 * MAX_METADATA_KEY + MAX_METADATA_BYTES)
MAX_DESCRIPTION = 1024  # characters
MAX_TAGS = 100
MAX_TAG_BYTES = 64
PARTICIPANT_ID = re.compile(r"[a-zA-Z0-9_-]{1,128}")
MAX_SIGNATURE_BYTES = 64  # Ed25519
Member = TypeVar("Member", bound=IntEnum)
_struct_fields = cache(msgspec.structs.fields)  # it evaluates every annotation
_CONFIG_NUMBERS = {
    "max_message_size": (1, MAX_CONTENT_BYTES),
    "max_participants": (1, U32_MAX),
    "ack_timeout": (1, U32_MAX),
    "max_retries": (0, U32_MAX),
    "retry_backoff_ms": (0, U32_MAX),
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
    """The config itself, if every value is valid for a channel."""
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
    """Every field by name, converted to its declared type: a number to its enum.

    Errors: ValidationFailed for the first that is of another type.
    """
    found = {}
    for field in _struct_fields(type(values)):
        value = getattr(values, field.name)
        try:
            found[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as exc:
            raise ValidationFailed(field.name, f"{value!r}: {exc}") from None
        except UnicodeEncodeError:
            raise ValidationFailed(field.name, f"expected a string, got {value!r}") from None
    return found


def check_settings(settings: ChannelSettings) -> ChannelSettings:
    """The settings themselves, if they are valid for a channel."""
    most = settings.max_pending
    if most is not None and not (type(most) is int and 1 <= most <= U32_MAX):
        raise ValidationFailed("max_pending", f"{most!r} is not a number from 1 to {U32_MAX}")
    if settings.flush not in FLUSH_MODES:
        raise ValidationFailed("flush", f"{settings.flush!r} is not immediate, batch or manual")
    return settings


def check_words(description: object, tags: object) -> tuple[str | None, tuple[str, ...]]:
    """A channel's description and tags: 1,024 characters; 100 tags of 64 bytes."""
    if description is not None:
        length = len(text_bytes("description", description).decode())
        if length > MAX_DESCRIPTION:
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


def check_text(field: str, value: str) -> str:
    """The text itself, if UTF-8 can encode it."""
    text_bytes(field, value)
    return value


def text_bytes(field: str, value: object) -> bytes:
    """The text as UTF-8. Errors: ValidationFailed if it is not a text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise ValidationFailed(field, f"expected a string, got {value!r}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValidationFailed(field, "an unpaired surrogate is not valid text") from None


def content_bytes(content: str | bytes) -> bytes:
    """Content as the store keeps it: UTF-8. Errors: ValidationFailed if it is not valid UTF-8."""
    if not isinstance(content, bytes):
        return text_bytes("content", content)
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
        raise ValidationFailed("metadata", "an unpaired surrogate is not valid text") from None
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
    if not is_participant:
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
        check_topic(topic)
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


def unavailable(channel: Channel) -> ChannelUnavailable:
    """The error of a channel that takes nothing, with what ends that."""
    remedy = f"its owner {channel.owner} ends that with `relay channel resume {channel.name}`"
    if channel.state is ChannelState.CLOSED:
        remedy = "that is permanent"
    return ChannelUnavailable(f"channel {channel.name} is {channel.state.label}: {remedy}")


def _check_channel(
    channel: Channel, is_participant: bool, sender: str, message_type: MessageType
) -> None:
    # what a paused or draining channel has delivered must still be answered, or it would die
    answers = channel.state is not ChannelState.CLOSED and message_type in ANSWERS
    if channel.state is not ChannelState.ACTIVE and not answers:
        raise unavailable(channel)
    if not is_participant:
        command = f"`relay channel join {channel.name} --as {sender}`"
        remedy = f"join it first: {command}, or the tool channel"
        raise NotParticipant(f"{sender} is not a participant of channel {channel.name}: {remedy}")
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


class Limits(NamedTuple):
    """The limits of a store. Only a test has a reason to narrow those of the file."""

    active_messages: int = 100_000  # not archived, in memory
    messages: int = MAX_MESSAGES  # with dead letters and archived ones
    channels: int = MAX_CHANNELS
    subscriptions: int = MAX_SUBSCRIPTIONS
    file_bytes: int = MAX_FILE_BYTES
    warn_bytes: int = MAX_FILE_BYTES * 8 // 10  # where the warning comes
    reserve_bytes: int = 104_857_600  # 100 MiB below the limit nothing new is taken, answers are
    batch_recipients: int = 1000  # a larger fan-out is delivered in batches of this many


DEFAULT_LIMITS = Limits()


# -- topics ----------------------------------------------------------------------------

_FIRST = re.compile(r"[a-zA-Z0-9_-]+|\*")  # segment of a pattern
_SEGMENT = re.compile(r"[a-zA-Z0-9_*#-]+")
MULTI = "#"
ANY = "*"


def check_topic(topic: str) -> None:
    """Errors: ValidationFailed when a message cannot carry this topic."""
    if not isinstance(topic, str):
        raise ValidationFailed("topic", f"expected a string, got {topic!r}")
    if not TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC_BYTES:
        raise ValidationFailed(
            "topic",
            f"{topic!r} is not a valid topic; expected one like build.front.ok, "
            f"at most {MAX_TOPIC_BYTES} bytes",
            len(topic.encode(errors="replace")),
        )


def match_mode(pattern: str) -> MatchMode:
    """The match mode of a pattern.

    Errors: ValidationFailed for an empty segment; for ``*`` or ``#`` beside other text in the
    first segment, where no topic has them; for ``#`` as a segment anywhere but last, or at the
    end of a longer one, which other readers take for the end of a prefix.
    """
    if not isinstance(pattern, str):
        raise ValidationFailed("topic_pattern", f"expected a string, got {pattern!r}")
    segments = pattern.split(".")
    is_multi = segments[-1] == MULTI
    first, *rest = (segments[:-1] if is_multi else segments) or [ANY]
    if (
        len(pattern) > MAX_TOPIC_BYTES
        or not _FIRST.fullmatch(first)
        or not all(_SEGMENT.fullmatch(segment) and segment != MULTI for segment in rest)
        or (pattern.endswith(MULTI) and not is_multi)
    ):
        raise ValidationFailed(
            "topic_pattern",
            f"{pattern!r}: segments between dots are letters, digits, _ and -, or *; "
            f"# may only be the last segment; at most {MAX_TOPIC_BYTES} bytes",
            len(pattern.encode(errors="replace")),
        )
    if is_multi:
        return MatchMode.MULTI_LEVEL
    return MatchMode.WILDCARD if ANY in pattern else MatchMode.EXACT


def topic_matches(topic: str, pattern: str) -> bool:
    """True when ``pattern``, which must be valid (``match_mode``), matches ``topic``."""
    wanted = pattern.split(".")
    given = topic.split(".")
    if wanted[-1] == MULTI:
        wanted.pop()
        given = given[: len(wanted)]
    return len(given) == len(wanted) and all(
        want in (ANY, have) for want, have in zip(wanted, given, strict=True)
    )


# -- acknowledgments -------------------------------------------------------------------

ANSWERS = frozenset({MessageType.RESPONSE, MessageType.ACKNOWLEDGMENT})
REQUESTS = frozenset({MessageType.COMMAND, MessageType.QUERY})
_NOT_WRITTEN = frozenset({DeliveryState.SENT, DeliveryState.STAGED, DeliveryState.WAITING})
MAX_WAIT_MS = 2**53  # longer than any wait; twice that from now still fits the file's field
_UNDERWAY = _NOT_WRITTEN | {DeliveryState.DELIVERED}


def requires_ack(channel: Channel, message_type: MessageType, metadata: Metadata | None) -> bool:
    """True when recipients are expected to acknowledge such a message."""
    return message_type in REQUESTS or is_retried(channel, message_type, metadata)


def is_retried(channel: Channel, message_type: MessageType, metadata: Metadata | None) -> bool:
    """True when such a message is delivered again until it is acknowledged.

    Its channel, its ``delivery``, or a time that its sender waits for the answer asks for that.
    """
    if message_type is MessageType.ACKNOWLEDGMENT:
        return False
    asked = metadata or {}
    return (
        channel.config.delivery is not DeliveryMode.AT_MOST_ONCE
        or asked.get("delivery", "at-most-once") != "at-most-once"
        or "await_ms" in asked
    )


def requested_timeout_ms(channel: Channel, message: Message) -> int | None:
    """The time for an answer that the message asks for, else its channel; None: neither does."""
    asked_ms = (message.metadata or {}).get("await_ms")
    if isinstance(asked_ms, int) and asked_ms > 0:
        return min(asked_ms, MAX_WAIT_MS)
    asked_s = channel.config.ack_timeout
    return min(asked_s * 1000, MAX_WAIT_MS) if asked_s else None


def ack_pending(channel: Channel, message: Message) -> bool:
    """True while acknowledgments of the message are outstanding."""
    return message.status is not MessageStatus.ACKNOWLEDGED and is_retried(
        channel, message.message_type, message.metadata
    )


def requires_answer(message: Message) -> bool:
    """True for a plain command or query, whose recipients owe the sender an answer in a relay.

    Control messages to the orchestrator (a spawn, a join) are Commands of another kind.
    """
    return message.message_type in REQUESTS and "kind" not in (message.metadata or {})


def ends_obligation(message: Message, said: str, is_response: bool) -> bool:
    """True when such an answer ends the obligation; a query needs a response."""
    is_query = message.message_type is MessageType.QUERY
    return is_response or said == "failed" or (said == "completed" and not is_query)


def is_open(
    channel: Channel,
    message: Message,
    deliveries: Iterable[Delivery],
    written_is_taken: bool = False,
) -> bool:
    """True while a delivery is undelivered, not received, or owes its acknowledgment.

    ``written_is_taken``: a file in an inbox no longer needs the store, unless it owes one.
    """
    if ack_pending(channel, message):
        return any(
            delivery.state in _UNDERWAY or delivery.state is DeliveryState.RECEIVED
            for delivery in deliveries
        )
    before = _NOT_WRITTEN if written_is_taken else _UNDERWAY
    return any(delivery.state in before for delivery in deliveries)


def is_replayed(delivery: Delivery) -> bool:
    """True between the replay of a dead letter and its first attempt."""
    return delivery.state is DeliveryState.WAITING and 0 < delivery.spent == delivery.attempt


def is_pending(
    channel: Channel,
    message: Message,
    deliveries: Iterable[Delivery],
    owed: Mapping[str, Obligation],
) -> bool:
    """True for a message that counts against its channel's ``max_pending``."""
    if message.message_type in ANSWERS:
        return False
    is_silent = any(not obligation.said for obligation in owed.values())
    return is_silent or is_open(channel, message, deliveries)
