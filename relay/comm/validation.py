"""Stage 1 of the send pipeline: every rule a message must keep before it is anything.

Pure functions; each fault is a ValidationFailed that names the field, or a NotParticipant or
ChannelUnavailable that names the channel. Source: message-engine.txt "Validate",
data-structures.txt "Validation Rules".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from relay.comm import topics
from relay.comm.model import Channel, ChannelState, ChannelType, MessageType
from relay.errors import ChannelUnavailable, NotParticipant, ValidationFailed
from relay.names import is_channel_name

MAX_CONTENT_BYTES = 1_048_576
PARTICIPANT_ID = re.compile(r"[a-zA-Z0-9_-]{1,128}")
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.I)
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
