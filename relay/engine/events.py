"""The events of the message engine: every mutation of a store is one of these.

``CommStore.apply(event)`` is the only code that changes a store, so applying the same events
to the same start gives the same store. They are values; a journal keeps them as they are.
"""

from __future__ import annotations

import msgspec

from relay.acomm.model import (
    ArchiveNote,
    Channel,
    ChannelConfig,
    ChannelSettings,
    ChannelState,
    Delivery,
    DeliveryState,
    Message,
    Origin,
    Participant,
    Subscription,
)


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class ChannelCreated(_Event, frozen=True):
    """A channel exists from now on."""

    channel: Channel


class ChannelChanged(_Event, frozen=True):
    """A channel's state, settings and words are these from now on."""

    channel_id: int
    state: ChannelState
    config: ChannelConfig
    at: int
    settings: ChannelSettings = ChannelSettings()
    description: str | None = None
    tags: tuple[str, ...] = ()


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


class ParticipantIdentified(_Event, frozen=True):
    """The key of a participant has this id from now on, in every channel; None: it has none."""

    participant: str
    identity_id: str | None
    at: int


class SubscriptionAdded(_Event, frozen=True):
    """A participant wants the topics that a pattern matches."""

    subscription: Subscription


class SubscriptionChanged(_Event, frozen=True):
    """A subscription is active or rests, and has this filter, from now on."""

    subscription: Subscription
    at: int


class SubscriptionRemoved(_Event, frozen=True):
    """A subscription ends."""

    subscription_id: int
    at: int


class MessageSent(_Event, frozen=True):
    """A message is accepted, numbered and routed: its content and its recipients."""

    message: Message
    recipients: tuple[str, ...]
    held: bool = False  # max_pending is reached: delivered when others are done
    origin: Origin | None = None  # where an owner that delivers got it from


class DeliveriesAdded(_Event, frozen=True):
    """Somebody who joined a sticky channel is a recipient of these earlier messages, too."""

    recipient: str
    message_ids: tuple[int, ...]
    at: int


class DeliveriesMoved(_Event, frozen=True):
    """Deliveries of one message moved on, all to the same state."""

    message_id: int
    recipients: tuple[str, ...]
    state: DeliveryState
    at: int
    due_ms: int = 0  # when the acknowledgment is overdue
    attempt: int = 0  # of a delivery that was made again; 0: as it was
    said: str = ""  # the status that an acknowledgment gives
    answer_id: str = ""  # of an acknowledgment: the relay's id of it
    answer_text: str = ""  # and the first line of what it says


class DeliveriesStaged(_Event, frozen=True):
    """An owner that delivers has these ready, the whole batch: only the last step is left.

    Each is (message id, recipient, attempt).
    """

    deliveries: tuple[tuple[int, str, int], ...]
    at: int


class FileRefused(_Event, frozen=True):
    """An owner that delivers refused a file; nothing in the store changes by it."""

    message_id: str  # the relay's; empty where its name gives none
    origin: Origin
    reason: str
    answer_id: str  # of the nack
    has_row: bool  # False: its id is another message's
    unsafe: bool  # no regular file
    at: int


class MessageReceived(_Event, frozen=True):
    """The recipient took the message out of its queue."""

    message_id: int
    participant: str
    at: int
    how: str = ""  # of an owner that delivers: taken or removed; empty: not known


class LateRead(_Event, frozen=True):
    """The file of a delivery that was over, or answered where it stood, left the inbox after all.

    Nothing in the store changes by it.
    """

    message_id: int
    recipient: str
    state: DeliveryState  # of the delivery, then and afterwards
    how: str
    at: int


class DeliveryTimed(_Event, frozen=True):
    """A delivery's time was up: it waits for another attempt, or is attempted again."""

    message_id: int
    recipient: str
    delivery: Delivery
    at: int


class DeadLettered(_Event, frozen=True):
    """Deliveries of a message were given up."""

    message_id: int
    recipients: tuple[str, ...]
    last_error: str
    at: int


class DeadLetterReplayed(_Event, frozen=True):
    """A dead letter's next attempt is due, for those alone for whom it was given up."""

    message_id: int
    at: int


class DeadLetterDiscarded(_Event, frozen=True):
    """A dead letter is gone for good."""

    message_id: int
    at: int


class MessagesArchived(_Event, frozen=True):
    """Messages left the live ones; they are kept in the archive."""

    message_ids: tuple[int, ...]
    at: int


class ArchiveDropped(_Event, frozen=True):
    """Archived messages are gone for good."""

    message_ids: tuple[int, ...]
    at: int


class Rolled(_Event, frozen=True):
    """An archive file counts from now on; its messages are leaving the store."""

    note: ArchiveNote
    message_ids: tuple[int, ...]
    at: int


class TakenOut(_Event, frozen=True):
    """The first so many of the messages that are leaving have left."""

    count: int
    at: int


class Owed(_Event, frozen=True):
    """These recipients owe an answer from now on, or said that it is under way."""

    message_id: int
    recipients: tuple[str, ...]
    due_ms: int  # when it is overdue; 0: attempts to deliver it go on, and end first
    at: int
    said: str = ""  # received, in_progress: the status of an acknowledgment that ends nothing


class Reminded(_Event, frozen=True):
    """A recipient is reminded of the answer that it owes."""

    message_id: int
    recipient: str
    due_ms: int  # when it is overdue again
    reminders: int  # with this one
    at: int


class OwedNoMore(_Event, frozen=True):
    """These recipients have answered, or their answers are waited for no longer."""

    message_id: int
    recipients: tuple[str, ...]
    at: int
    said: str = ""  # the answer's status; empty: given up


class TimeLost(_Event, frozen=True):
    """Time went by in which the store's owner did not run: each deadline is so much later."""

    by_ms: int  # negative: the clock was set back
    at: int


class DuplicateNoted(_Event, frozen=True):
    """An exactly-once delivery happened: until it expires it does not happen again."""

    key: tuple[str, int, str]  # correlation id, message id, recipient
    expires_ms: int


class DuplicatesForgotten(_Event, frozen=True):
    """Every entry of the exactly-once set that had expired by then is gone."""

    at_ms: int


Event = (
    ChannelCreated
    | ChannelChanged
    | ParticipantJoined
    | ParticipantLeft
    | ParticipantIdentified
    | SubscriptionAdded
    | SubscriptionChanged
    | SubscriptionRemoved
    | MessageSent
    | DeliveriesAdded
    | DeliveriesMoved
    | DeliveriesStaged
    | FileRefused
    | MessageReceived
    | LateRead
    | DeliveryTimed
    | DeadLettered
    | DeadLetterReplayed
    | DeadLetterDiscarded
    | MessagesArchived
    | ArchiveDropped
    | Rolled
    | TakenOut
    | Owed
    | Reminded
    | OwedNoMore
    | TimeLost
    | DuplicateNoted
    | DuplicatesForgotten
)
