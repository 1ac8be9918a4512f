"""What a delivery still has before it: pure rules that state and commands share.

A message is pending while somebody has it on the way, has not received it, or owes its
acknowledgment. Answers are never pending: who waits for one waits for nothing else then.
Source: message-engine.txt, "Acknowledgment Flow" and "Channel Pressure"; DESIGN, "Bounded".
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.comm.model import (
    Channel,
    Delivery,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageStatus,
    MessageType,
    Metadata,
)

ANSWERS = frozenset({MessageType.RESPONSE, MessageType.ACKNOWLEDGMENT})
_NOT_WRITTEN = frozenset({DeliveryState.SENT, DeliveryState.STAGED, DeliveryState.WAITING})
_UNDERWAY = _NOT_WRITTEN | {DeliveryState.DELIVERED}


def owes_ack(channel: Channel, message_type: MessageType, metadata: Metadata | None) -> bool:
    """True when a message like this is to be acknowledged by its recipients."""
    if message_type is MessageType.ACKNOWLEDGMENT:
        return False
    asked = (metadata or {}).get("delivery", "at-most-once")
    return (
        message_type in (MessageType.COMMAND, MessageType.QUERY)
        or channel.config.delivery is not DeliveryMode.AT_MOST_ONCE
        or asked != "at-most-once"
    )


def still_owed(channel: Channel, message: Message) -> bool:
    """True while the message waits for acknowledgments; once all have come it wants no more."""
    return message.status is not MessageStatus.ACKNOWLEDGED and owes_ack(
        channel, message.message_type, message.metadata
    )


def is_open(
    channel: Channel,
    message: Message,
    deliveries: Iterable[Delivery],
    written_is_taken: bool = False,
) -> bool:
    """True while a delivery is undelivered, not received, or owes its acknowledgment.

    ``written_is_taken``: what stands in an inbox needs this store no more, unless it owes one.
    """
    if still_owed(channel, message):
        return any(
            one.state in _UNDERWAY or one.state is DeliveryState.RECEIVED for one in deliveries
        )
    before = _NOT_WRITTEN if written_is_taken else _UNDERWAY
    return any(one.state in before for one in deliveries)


def is_replayed(delivery: Delivery) -> bool:
    """True between a dead letter's replay and the first attempt that it gives."""
    return delivery.state is DeliveryState.WAITING and 0 < delivery.spent == delivery.attempt


def is_pending(channel: Channel, message: Message, deliveries: Iterable[Delivery]) -> bool:
    """True for a message that counts against its channel's ``max_pending``."""
    return message.message_type not in ANSWERS and is_open(channel, message, deliveries)
