"""The events of the message engine: every mutation of a store is one of these.

``CommStore.apply(event)`` is the only code that changes a store, so applying the same events
to the same start gives the same store. They are values; a journal keeps them as they are.
"""

from __future__ import annotations

import msgspec

from relay.comm.model import Channel, DeliveryState, Message, Participant, Subscription


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class ChannelCreated(_Event, frozen=True):
    """A channel exists from now on."""

    channel: Channel


class ParticipantJoined(_Event, frozen=True):
    """Somebody takes part in a channel."""

    channel_id: int
    participant: Participant
    at: int  # Unix seconds


class ParticipantLeft(_Event, frozen=True):
    """Somebody no longer takes part; its subscriptions there end."""

    channel_id: int
    participant: str
    at: int


class SubscriptionAdded(_Event, frozen=True):
    """A participant wants the topics that a pattern matches."""

    subscription: Subscription


class SubscriptionRemoved(_Event, frozen=True):
    """A subscription ends."""

    subscription_id: int
    at: int


class MessageSent(_Event, frozen=True):
    """A message is accepted, numbered and routed: its content and its recipients."""

    message: Message
    recipients: tuple[str, ...]


class DeliveriesMoved(_Event, frozen=True):
    """Deliveries of one message moved on, all to the same state."""

    message_id: int
    recipients: tuple[str, ...]
    state: DeliveryState
    at: int


Event = (
    ChannelCreated
    | ParticipantJoined
    | ParticipantLeft
    | SubscriptionAdded
    | SubscriptionRemoved
    | MessageSent
    | DeliveriesMoved
)
