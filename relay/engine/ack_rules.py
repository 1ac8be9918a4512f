"""Pure rules on acknowledgments, retries and pending messages, for state and commands.

Messages for which ``requires_ack`` is true may be acknowledged. Only with at-least-once delivery
(``is_retried``) does the engine wait for the acknowledgment and deliver again until it arrives. A
message is pending while a recipient has not been delivered to, has not received it, is being
retried, or has not reacted to a command or query of a relay (``relay.engine.deliveries``). Answers
are never pending.
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
            one.state in _UNDERWAY or one.state is DeliveryState.RECEIVED for one in deliveries
        )
    before = _NOT_WRITTEN if written_is_taken else _UNDERWAY
    return any(one.state in before for one in deliveries)


def is_replayed(delivery: Delivery) -> bool:
    """True between the replay of a dead letter and its first attempt."""
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
