"""Pure rules on acknowledgments, retries and pending messages, for state and commands.

An acknowledgment may be given to what ``requires_ack`` names. It is waited for, and the message
delivered again until it comes, where at least once was asked for (``is_retried``) and nowhere
else. A message is pending while somebody has it on the way, has not received it, is delivered to
again, or has said nothing of the answer that a relay waits for (``relay.engine.deliveries``).
Answers are never pending: who waits for one waits for nothing else then.
Source: message-engine.txt, "Acknowledgment Flow" and "Channel Pressure"; DESIGN, "Bounded".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from relay.acomm.model import (
    Channel,
    Delivery,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageStatus,
    MessageType,
    Metadata,
    Obligation,
)

ANSWERS = frozenset({MessageType.RESPONSE, MessageType.ACKNOWLEDGMENT})
REQUESTS = frozenset({MessageType.COMMAND, MessageType.QUERY})
_NOBODY: Mapping[str, Obligation] = {}
_NOT_WRITTEN = frozenset({DeliveryState.SENT, DeliveryState.STAGED, DeliveryState.WAITING})
_UNDERWAY = _NOT_WRITTEN | {DeliveryState.DELIVERED}


def requires_ack(channel: Channel, message_type: MessageType, metadata: Metadata | None) -> bool:
    """True when a message like this is to be acknowledged by its recipients."""
    return message_type in REQUESTS or is_retried(channel, message_type, metadata)


def is_retried(channel: Channel, message_type: MessageType, metadata: Metadata | None) -> bool:
    """True when a message like this is delivered again until it is acknowledged.

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


def ack_pending(channel: Channel, message: Message) -> bool:
    """True while acknowledgments are waited for; once all have come the message wants no more."""
    return message.status is not MessageStatus.ACKNOWLEDGED and is_retried(
        channel, message.message_type, message.metadata
    )


def requires_answer(message: Message) -> bool:
    """True for a plain command or query: who gets it from a relay owes its sender an answer.

    What the orchestrator takes (a spawn, a join) is a Command, too, of another kind.
    """
    return message.message_type in REQUESTS and "kind" not in (message.metadata or {})


def ends_obligation(message: Message, said: str, is_response: bool) -> bool:
    """True when an answer like this ends what is owed: a question is answered by a response."""
    is_query = message.message_type is MessageType.QUERY
    return is_response or said == "failed" or (said == "completed" and not is_query)


def is_open(
    channel: Channel,
    message: Message,
    deliveries: Iterable[Delivery],
    written_is_taken: bool = False,
) -> bool:
    """True while a delivery is undelivered, not received, or owes its acknowledgment.

    ``written_is_taken``: what stands in an inbox needs this store no more, unless it owes one.
    """
    if ack_pending(channel, message):
        return any(
            one.state in _UNDERWAY or one.state is DeliveryState.RECEIVED for one in deliveries
        )
    before = _NOT_WRITTEN if written_is_taken else _UNDERWAY
    return any(one.state in before for one in deliveries)


def is_replayed(delivery: Delivery) -> bool:
    """True between a dead letter's replay and the first attempt that it gives."""
    return delivery.state is DeliveryState.WAITING and 0 < delivery.spent == delivery.attempt


def is_pending(
    channel: Channel,
    message: Message,
    deliveries: Iterable[Delivery],
    owed: Mapping[str, Obligation] = _NOBODY,
) -> bool:
    """True for a message that counts against its channel's ``max_pending``."""
    if message.message_type in ANSWERS:
        return False
    is_silent = any(not one.said for one in owed.values())
    return is_silent or is_open(channel, message, deliveries)
