"""The state of a store, and the one way to change it: ``State.apply(event)``.

Applying the same events to the same start gives the same state; nothing here asks the clock or
decides. Values are immutable and replaced, so ``snapshot`` copies pointers and any thread may
read what it took. Owned by the CommStore. Source: data-structures.txt, "CommStore".
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappush

import msgspec

from relay.comm import events, invariants
from relay.comm.engine_state import DeadNote, DuplicateKey, EngineState, Snapshot
from relay.comm.model import (
    Channel,
    Delivery,
    DeliveryState,
    Message,
    MessageStatus,
    Metadata,
    StoreFile,
    Subscription,
    with_status,
)
from relay.comm.query import MessageIndex
from relay.comm.topics import TopicTrie

# What a delivery's state means for its message, once every delivery is at least there.
_STATUS_OF = {
    DeliveryState.DELIVERED: MessageStatus.DELIVERED,
    DeliveryState.RECEIVED: MessageStatus.DELIVERED,
    DeliveryState.ACKNOWLEDGED: MessageStatus.ACKNOWLEDGED,
    DeliveryState.BOUNCED: MessageStatus.FAILED,
    DeliveryState.EXPIRED: MessageStatus.FAILED,
}
_HOPELESS = frozenset({DeliveryState.BOUNCED, DeliveryState.EXPIRED, DeliveryState.DEAD})
_SENT = Delivery()


class State:
    """Everything that a store knows. Read it freely; change it by ``apply`` alone."""

    def __init__(self, created_at: int) -> None:
        self.created_at = created_at  # Unix seconds
        self.modified_at = created_at
        self.sequence = 0  # events applied since the store began
        self.messages_sent = 0  # since it was opened
        self.channels: dict[int, Channel] = {}
        self.names: dict[str, int] = {}  # channel name -> id
        self.members: dict[int, dict[str, None]] = {}  # channel -> participants, in order
        self.counts: dict[int, int] = {}  # channel -> message_count
        self.messages: dict[int, Message] = {}
        self.deliveries: dict[int, dict[str, Delivery]] = {}  # inner dicts are replaced
        self.queues: dict[str, dict[int, None]] = {}  # participant -> delivered, not received
        self.relay_ids: dict[str, int] = {}
        self.index = MessageIndex()
        self.subscriptions: dict[int, Subscription] = {}
        self.topics: dict[int, TopicTrie] = {}  # channel -> its subscriptions by pattern
        self.timers: list[tuple[int, int, str]] = []  # heap of (due ms, message, recipient)
        self.dead: dict[int, DeadNote] = {}  # what was given up, by message
        self.dead_letters: dict[int, Message] = {}  # those given up for all: no longer live
        self.duplicates: dict[DuplicateKey, int] = {}  # the exactly-once set: key -> expiry ms
        self.next_forget_ms: int | None = None  # when the first of them expires
        self.archive: tuple[Message, ...] = ()
        self.next_channel = self.next_message = self.next_subscription = 1

    @classmethod
    def load(cls, file: StoreFile) -> State:
        """The state that a file holds; counters that the file lacks are derived.

        Where ENGINE_STATE is missing nobody's deliveries are known: nothing waits in a queue.
        Errors: FormatError when it breaks an invariant, or its engine state is cut short.
        """
        invariants.check(file)
        state = cls(file.created_at)
        state.modified_at = file.modified_at
        for channel in file.channels:
            state._add_channel(channel)
        state._load_messages(file.messages)
        for subscription in file.subscriptions:
            state._add_subscription(subscription)
        state.dead_letters = {message.id: message for message in file.dead_letters}
        state.archive = file.archive
        kept = EngineState.decode(file.engine_state)
        state._load_deliveries(kept.deliveries)
        state.dead = {m.id: DeadNote(m.created_at, "", ()) for m in file.dead_letters} | kept.dead
        state.duplicates = dict(kept.duplicates)
        state.next_forget_ms = min(kept.duplicates.values(), default=None)
        state.sequence = kept.sequence
        numbers = (m.id for m in (*file.dead_letters, *file.archive))
        state.next_channel = max([kept.next_channel - 1, *state.channels]) + 1
        state.next_message = max([kept.next_message - 1, *state.messages, *numbers]) + 1
        state.next_subscription = max([kept.next_subscription - 1, *state.subscriptions]) + 1
        return state

    def snapshot(self) -> Snapshot:
        """Everything as immutable values, in O(messages) pointer copies."""
        return Snapshot(
            StoreFile(
                self.created_at,
                self.modified_at,
                tuple(
                    msgspec.structs.replace(channel, message_count=self.counts[channel.id])
                    for channel in self.channels.values()
                ),
                tuple(self.messages.values()),
                tuple(self.subscriptions.values()),
                tuple(sorted(self.dead_letters.values(), key=lambda m: (m.created_at, m.id))),
                self.archive,
            ),
            EngineState(
                self.next_channel,
                self.next_message,
                self.next_subscription,
                self.sequence,
                self.deliveries.copy(),
                self.dead.copy(),
                self.duplicates.copy(),
            ),
        )

    def apply(self, event: events.Event) -> None:
        """Change the state as the event says. The only code that does."""
        _APPLY[type(event)](self, event)
        self.sequence += 1

    def _channel_created(self, event: events.ChannelCreated) -> None:
        self._add_channel(event.channel)
        self.next_channel = max(self.next_channel, event.channel.id + 1)
        self.modified_at = event.channel.created_at

    def _channel_changed(self, event: events.ChannelChanged) -> None:
        channel = self.channels[event.channel_id]
        self.channels[event.channel_id] = msgspec.structs.replace(
            channel, state=event.state, config=event.config, modified_at=event.at
        )
        self.modified_at = event.at

    def _participant_joined(self, event: events.ParticipantJoined) -> None:
        channel = self.channels[event.channel_id]
        self.channels[event.channel_id] = msgspec.structs.replace(
            channel,
            participants=(*channel.participants, event.participant),
            modified_at=event.at,
        )
        self.members[event.channel_id][event.participant.id] = None
        self.modified_at = event.at

    def _participant_left(self, event: events.ParticipantLeft) -> None:
        channel = self.channels[event.channel_id]
        self.channels[event.channel_id] = msgspec.structs.replace(
            channel,
            participants=tuple(p for p in channel.participants if p.id != event.participant),
            modified_at=event.at,
        )
        self.members[event.channel_id].pop(event.participant, None)
        for subscription in list(self.subscriptions.values()):
            if (subscription.channel_id, subscription.subscriber) == (
                event.channel_id,
                event.participant,
            ):
                self._drop_subscription(subscription.id)
        self.modified_at = event.at

    def _subscription_added(self, event: events.SubscriptionAdded) -> None:
        subscription = event.subscription
        self._add_subscription(subscription)
        self.next_subscription = max(self.next_subscription, subscription.id + 1)
        self.modified_at = subscription.created_at

    def _subscription_removed(self, event: events.SubscriptionRemoved) -> None:
        self._drop_subscription(event.subscription_id)
        self.modified_at = event.at

    def _message_sent(self, event: events.MessageSent) -> None:
        message = event.message
        self._add_message(message)
        self.counts[message.channel_id] += 1
        self.messages_sent += 1
        self.next_message = max(self.next_message, message.id + 1)
        self.deliveries[message.id] = dict.fromkeys(event.recipients, _SENT)
        self.modified_at = message.created_at

    def _deliveries_moved(self, event: events.DeliveriesMoved) -> None:
        known = self.deliveries.get(event.message_id)
        if known is None:
            return
        queued = event.state is DeliveryState.DELIVERED
        moved = {
            recipient: Delivery(
                event.state, event.attempt or before.attempt, event.due_ms, queued, before.spent
            )
            for recipient in event.recipients
            for before in (known[recipient],)
        }
        self._set_deliveries(event.message_id, known, moved)
        if event.state is DeliveryState.ACKNOWLEDGED and event.message_id in self.dead:
            self._answered_after_all(event.message_id, event.recipients)
        self._set_status(event.message_id, event.at)
        if event.attempt:
            self._note_retries(event.message_id, moved[event.recipients[0]])

    def _message_received(self, event: events.MessageReceived) -> None:
        known = self.deliveries.get(event.message_id, {})
        before = known.get(event.participant, _SENT)
        waits = before.state is DeliveryState.WAITING  # for its next attempt, all the same
        after = msgspec.structs.replace(
            before, state=before.state if waits else DeliveryState.RECEIVED, queued=False
        )
        self._set_deliveries(event.message_id, known, {event.participant: after})
        self.modified_at = event.at

    def _delivery_timed(self, event: events.DeliveryTimed) -> None:
        known = self.deliveries[event.message_id]
        self._set_deliveries(event.message_id, known, {event.recipient: event.delivery})
        self._note_retries(event.message_id, event.delivery)
        self.modified_at = event.at

    def _dead_lettered(self, event: events.DeadLettered) -> None:
        known = self.deliveries[event.message_id]
        dead = {
            recipient: msgspec.structs.replace(
                known[recipient], state=DeliveryState.DEAD, due_ms=0, queued=False
            )
            for recipient in event.recipients
        }
        self._set_deliveries(event.message_id, known, dead)
        earlier = self.dead.get(event.message_id, DeadNote(event.at, "", ()))
        self.dead[event.message_id] = DeadNote(
            event.at, event.last_error, (*earlier.recipients, *event.recipients)
        )
        self.modified_at = event.at
        if min(d.state for d in self.deliveries[event.message_id].values()) in _HOPELESS:
            message = self.messages.pop(event.message_id)
            self.index.remove(message)
            self.dead_letters[message.id] = msgspec.structs.replace(
                message, status=MessageStatus.DEAD_LETTER
            )

    def _dead_letter_replayed(self, event: events.DeadLetterReplayed) -> None:
        note = self.dead.pop(event.message_id)
        self._return_to_life(event.message_id)
        message = self.messages[event.message_id]
        self.messages[message.id] = msgspec.structs.replace(
            message, status=MessageStatus.SENT, retry_count=0
        )
        known = self.deliveries.get(event.message_id, {})
        due = {}
        for recipient in note.recipients:
            tried = known.get(recipient, _SENT).attempt
            due[recipient] = Delivery(DeliveryState.WAITING, tried, event.at * 1000, False, tried)
        self._set_deliveries(event.message_id, known, due)
        for key in [k for k in self.duplicates if k[1] == event.message_id]:
            if key[2] in note.recipients:
                del self.duplicates[key]  # a replay is meant to be delivered again
        self.modified_at = event.at

    def _dead_letter_discarded(self, event: events.DeadLetterDiscarded) -> None:
        del self.dead[event.message_id]
        gone = self.dead_letters.pop(event.message_id, None)
        if gone is not None:
            self.deliveries.pop(gone.id, None)
            relay_id = (gone.metadata or {}).get("relay_id")
            if isinstance(relay_id, str) and self.relay_ids.get(relay_id) == gone.id:
                del self.relay_ids[relay_id]
        self.modified_at = event.at

    def _duplicate_noted(self, event: events.DuplicateNoted) -> None:
        self.duplicates[event.key] = event.expires_ms
        if self.next_forget_ms is None or event.expires_ms < self.next_forget_ms:
            self.next_forget_ms = event.expires_ms

    def _duplicates_forgotten(self, event: events.DuplicatesForgotten) -> None:
        self.duplicates = {k: at for k, at in self.duplicates.items() if at > event.at_ms}
        self.next_forget_ms = min(self.duplicates.values(), default=None)

    def _return_to_life(self, message_id: int) -> None:
        """A message that was dead for all is live again, where it stood before."""
        message = self.dead_letters.pop(message_id, None)
        if message is not None:
            self._add_message(message)
            self.messages = dict(sorted(self.messages.items()))

    def _answered_after_all(self, message_id: int, recipients: tuple[str, ...]) -> None:
        """An acknowledgment of what was given up: for these it is dead no longer."""
        note = self.dead.pop(message_id)
        left = tuple(name for name in note.recipients if name not in recipients)
        if left:
            self.dead[message_id] = note._replace(recipients=left)
        self._return_to_life(message_id)

    def _note_retries(self, message_id: int, delivery: Delivery) -> None:
        """How often the message was tried again, whoever it was for."""
        message = self.messages[message_id]
        retries = delivery.attempt - delivery.spent
        retries -= delivery.state is not DeliveryState.WAITING
        if retries > message.retry_count:
            self.messages[message_id] = msgspec.structs.replace(message, retry_count=retries)

    def _set_status(self, message_id: int, at: int) -> None:
        """The message's status, as its deliveries stand now."""
        self.modified_at = at
        message = self.messages.get(message_id)
        lowest = min(delivery.state for delivery in self.deliveries[message_id].values())
        status = _STATUS_OF.get(lowest)
        if message is not None and status is not None and status is not message.status:
            self.messages[message_id] = with_status(message, status, at)

    def _set_deliveries(
        self, message_id: int, known: dict[str, Delivery], moved: dict[str, Delivery]
    ) -> None:
        """Keep deliveries that moved, their queues and their timers."""
        # a new dict, never a change of the old one: a snapshot may hold that
        self.deliveries[message_id] = known | moved
        for recipient, delivery in moved.items():
            if delivery.due_ms:
                heappush(self.timers, (delivery.due_ms, message_id, recipient))
            if delivery.queued:
                self.queues.setdefault(recipient, {})[message_id] = None
            elif recipient in self.queues:
                self.queues[recipient].pop(message_id, None)

    def _add_subscription(self, subscription: Subscription) -> None:
        self.subscriptions[subscription.id] = subscription
        trie = self.topics.setdefault(subscription.channel_id, TopicTrie())
        trie.add(subscription.topic_pattern, subscription.id)

    def _drop_subscription(self, subscription_id: int) -> None:
        gone = self.subscriptions.pop(subscription_id, None)
        if gone is not None:
            self.topics[gone.channel_id].remove(gone.topic_pattern, gone.id)

    def _add_channel(self, channel: Channel) -> None:
        self.channels[channel.id] = channel
        self.names[channel.name] = channel.id
        self.members[channel.id] = {member.id: None for member in channel.participants}
        self.counts[channel.id] = channel.message_count

    def _add_message(self, message: Message) -> None:
        self.messages[message.id] = message
        self.index.add(message)
        if message.metadata is not None:
            self._note_relay_id(message, message.metadata)

    def _load_messages(self, messages: tuple[Message, ...]) -> None:
        """What ``_add_message`` does for each, all at once: a store is opened with it."""
        self.messages = {message.id: message for message in messages}
        self.index = MessageIndex(messages)
        for message in messages:
            if message.metadata is not None:
                self._note_relay_id(message, message.metadata)

    def _load_deliveries(self, deliveries: dict[int, dict[str, Delivery]]) -> None:
        """Like ``_set_deliveries`` for each."""
        self.deliveries = deliveries
        for message_id, records in deliveries.items():
            for recipient, delivery in records.items():
                if delivery.due_ms:
                    self.timers.append((delivery.due_ms, message_id, recipient))
                if delivery.queued:
                    self.queues.setdefault(recipient, {})[message_id] = None
        heapify(self.timers)

    def _note_relay_id(self, message: Message, metadata: Metadata) -> None:
        relay_id = metadata.get("relay_id")
        if isinstance(relay_id, str):
            self.relay_ids[relay_id] = message.id


_APPLY: dict[type, Callable[..., None]] = {
    events.ChannelCreated: State._channel_created,
    events.ChannelChanged: State._channel_changed,
    events.ParticipantJoined: State._participant_joined,
    events.ParticipantLeft: State._participant_left,
    events.SubscriptionAdded: State._subscription_added,
    events.SubscriptionRemoved: State._subscription_removed,
    events.MessageSent: State._message_sent,
    events.DeliveriesMoved: State._deliveries_moved,
    events.MessageReceived: State._message_received,
    events.DeliveryTimed: State._delivery_timed,
    events.DeadLettered: State._dead_lettered,
    events.DeadLetterReplayed: State._dead_letter_replayed,
    events.DeadLetterDiscarded: State._dead_letter_discarded,
    events.DuplicateNoted: State._duplicate_noted,
    events.DuplicatesForgotten: State._duplicates_forgotten,
}
