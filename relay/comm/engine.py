"""CommStore: channels, messages and subscriptions, and the pipeline that sends.

A store is changed by events alone, and only in ``apply``. The methods validate, make the event,
apply it and return the new value; a refusal is an error that names the field, and leaves the
store as it was. Not thread-safe: one owner; ``snapshot`` gives values that any thread may read.

    send: 1 validate, 2 number and time, 3 route, 4 keep (the flush policy writes), 5 deliver

Source: message-engine.txt, "Send Pipeline"; data-structures.txt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from relay.checksums import uuid4_of
from relay.clock import NS_PER_S, Clock
from relay.comm import events, invariants, topics, validation
from relay.comm.engine_state import EngineState, Snapshot
from relay.comm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageStatus,
    MessageType,
    Metadata,
    Participant,
    ParticipantRole,
    Priority,
    StoreFile,
    Subscription,
    with_status,
)
from relay.errors import ChannelNotFound, DuplicateChannel, NotParticipant, ValidationFailed

# What a delivery's end means for its message, once all of them are there.
_STATUS_OF = {
    DeliveryState.DELIVERED: MessageStatus.DELIVERED,
    DeliveryState.ACKNOWLEDGED: MessageStatus.ACKNOWLEDGED,
    DeliveryState.BOUNCED: MessageStatus.FAILED,
}


class CommStore:
    """The live store in memory."""

    def __init__(self, clock: Clock, created_at: int | None = None) -> None:
        self._clock = clock
        self.created_at = self._now_s() if created_at is None else created_at
        self.modified_at = self.created_at
        self.sequence = 0  # events applied since the store began
        self._channels: dict[int, Channel] = {}
        self._names: dict[str, int] = {}
        self._members: dict[int, dict[str, None]] = {}  # channel -> participants, in order
        self._counts: dict[int, int] = {}  # channel -> message_count
        self.messages_sent = 0  # since the store was opened
        self._messages: dict[int, Message] = {}
        self._deliveries: dict[int, dict[str, DeliveryState]] = {}
        self._relay_ids: dict[str, int] = {}
        self._threads: dict[str, list[int]] = {}  # correlation id -> messages
        self._subscriptions: dict[int, Subscription] = {}
        self._kept: tuple[tuple[Message, ...], tuple[Message, ...]] = ((), ())  # dead, archive
        self._next_channel = self._next_message = self._next_subscription = 1

    @classmethod
    def load(cls, clock: Clock, file: StoreFile) -> CommStore:
        """The store that a file holds; counters that the file lacks are derived.

        Errors: FormatError when it breaks an invariant, or its engine state is cut short.
        """
        invariants.check(file)
        store = cls(clock, file.created_at)
        store.modified_at = file.modified_at
        for channel in file.channels:
            store._add_channel(channel)
        for message in file.messages:
            store._add_message(message)
        store._subscriptions = {s.id: s for s in file.subscriptions}
        store._kept = (file.dead_letters, file.archive)
        state = EngineState.decode(file.engine_state)
        store._deliveries.update(state.deliveries)
        store.sequence = state.sequence
        kept = (*file.messages, *file.dead_letters, *file.archive)
        store._next_channel = max([state.next_channel - 1, *store._channels]) + 1
        store._next_message = max([state.next_message - 1, *(m.id for m in kept)]) + 1
        store._next_subscription = max([state.next_subscription - 1, *store._subscriptions]) + 1
        return store

    def snapshot(self) -> Snapshot:
        """Everything in the store as immutable values, in O(messages) pointer copies."""
        dead, archive = self._kept
        return Snapshot(
            StoreFile(
                self.created_at,
                self.modified_at,
                tuple(
                    msgspec.structs.replace(channel, message_count=self._counts[channel.id])
                    for channel in self._channels.values()
                ),
                tuple(self._messages.values()),
                tuple(self._subscriptions.values()),
                dead,
                archive,
            ),
            EngineState(
                self._next_channel,
                self._next_message,
                self._next_subscription,
                self.sequence,
                self._deliveries.copy(),
            ),
        )

    # -- channels ----------------------------------------------------------------------

    def create_channel(
        self,
        name: str,
        channel_type: ChannelType,
        owner: str,
        config: ChannelConfig | None = None,
    ) -> Channel:
        """A new channel whose owner is its first participant.

        Errors: ValidationFailed for its name or owner; DuplicateChannel.
        """
        validation.check_channel_name(name)
        validation.check_participant("owner", owner)
        if name in self._names:
            raise DuplicateChannel(f"there is a channel {name} already")
        now = self._now_s()
        channel = Channel(
            self._next_channel,
            name,
            channel_type,
            owner,
            (Participant(owner, ParticipantRole.OWNER, now),),
            config or ChannelConfig(),
            ChannelState.ACTIVE,
            now,
            now,
        )
        self.apply(events.ChannelCreated(channel))
        return channel

    def get_channel(self, channel_id: int) -> Channel:
        """Errors: ChannelNotFound."""
        try:
            return self._channels[channel_id]
        except KeyError:
            raise ChannelNotFound(f"there is no channel {channel_id}") from None

    def get_channel_by_name(self, name: str) -> Channel | None:
        """The channel of that name, if there is one."""
        return self._channels.get(self._names.get(name, 0))

    def list_channels(self) -> list[Channel]:
        """Every channel, by id."""
        return list(self._channels.values())

    def takes_part(self, channel_id: int, participant: str) -> bool:
        """True when ``participant`` is one of the channel's."""
        return participant in self._members[channel_id]

    def message_count(self, channel_id: int) -> int:
        """How many messages the channel has had."""
        return self._counts[channel_id]

    def join_channel(self, channel_id: int, participant: str) -> Channel:
        """Take part in a channel, in a broadcast channel as observer; again changes nothing.

        Errors: ValidationFailed when a direct channel has two, or max_participants are there.
        """
        channel = self.get_channel(channel_id)
        if self.takes_part(channel_id, participant):
            return channel
        validation.check_participant("participant", participant)
        most = channel.config.max_participants
        if channel.channel_type is ChannelType.DIRECT:
            most = 2
        if most is not None and len(channel.participants) >= most:
            raise ValidationFailed(
                "participant", f"channel {channel.name} has its {most} participants"
            )
        is_broadcast = channel.channel_type is ChannelType.BROADCAST
        role = ParticipantRole.OBSERVER if is_broadcast else ParticipantRole.MEMBER
        now = self._now_s()
        self.apply(events.ParticipantJoined(channel_id, Participant(participant, role, now), now))
        return self._channels[channel_id]

    def leave_channel(self, channel_id: int, participant: str) -> Channel:
        """No longer take part. Errors: NotParticipant."""
        channel = self.get_channel(channel_id)
        if not self.takes_part(channel_id, participant):
            raise NotParticipant(f"{participant} does not take part in channel {channel.name}")
        self.apply(events.ParticipantLeft(channel_id, participant, self._now_s()))
        return self._channels[channel_id]

    def subscribe(self, channel_id: int, subscriber: str, pattern: str) -> Subscription:
        """Receive what is published on topics that ``pattern`` matches; joins the channel.

        Subscribing twice to one pattern is one subscription. Errors: ValidationFailed for the
        pattern, or when the channel is not a PubSub channel.
        """
        channel = self.get_channel(channel_id)
        if channel.channel_type is not ChannelType.PUB_SUB:
            raise ValidationFailed(
                "channel",
                f"{channel.name} is a {channel.channel_type.label} channel; "
                "only a PubSub channel has topics",
            )
        mode = topics.match_mode(pattern)
        wanted = (channel_id, subscriber, pattern)
        for known in self._subscriptions.values():
            if (known.channel_id, known.subscriber, known.topic_pattern) == wanted:
                return known
        self.join_channel(channel_id, subscriber)
        subscription = Subscription(
            self._next_subscription, channel_id, subscriber, pattern, mode, self._now_s()
        )
        self.apply(events.SubscriptionAdded(subscription))
        return subscription

    def unsubscribe(self, channel_id: int, subscriber: str, pattern: str | None = None) -> int:
        """End the subscriptions to ``pattern`` (None: all of this channel); how many there were."""
        ended = [
            s.id
            for s in self._subscriptions.values()
            if s.channel_id == channel_id
            and s.subscriber == subscriber
            and pattern in (None, s.topic_pattern)
        ]
        for subscription_id in ended:
            self.apply(events.SubscriptionRemoved(subscription_id, self._now_s()))
        return len(ended)

    # -- messages ----------------------------------------------------------------------

    def send_message(
        self,
        channel_id: int,
        sender: str,
        message_type: MessageType,
        content: str | bytes,
        **fields: object,
    ) -> Message:
        """The whole pipeline: the message stands in its recipients' queues when this returns.

        ``fields`` are those of ``accept``. Errors: as there; nothing is kept then.
        """
        message = self.accept(channel_id, sender, message_type, content, **fields)  # type: ignore[arg-type]
        self.deliver(message.id, self.recipients(message.id))
        return self._messages[message.id]

    def accept(
        self,
        channel_id: int,
        sender: str,
        message_type: MessageType,
        content: str | bytes,
        *,
        recipients: Iterable[str] | None = None,
        topic: str | None = None,
        correlation_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        metadata: Metadata | None = None,
        ttl: int | None = None,
        signature: bytes | None = None,
    ) -> Message:
        """Stages 1 to 4: the message is kept and its recipients are known, not yet reached.

        ``recipients`` narrows the route, as an answer goes to the original's sender alone.
        Errors: ValidationFailed, ChannelNotFound, ChannelUnavailable, NotParticipant.
        """
        body = validation.content_bytes(content)
        channel = self.get_channel(channel_id)
        validation.check_message(
            channel, self.takes_part(channel_id, sender), sender, message_type, body, topic, ttl
        )
        validation.check_metadata(metadata)
        validation.check_correlation(
            message_type,
            correlation_id,
            ((m.message_type, self.expects_ack(m)) for m in self.thread(correlation_id or "")),
        )
        message = Message(
            self._next_message,
            message_type,
            sender,
            channel_id,
            body,
            topic,
            correlation_id,
            priority,
            metadata,
            self._now_s(),
            None,
            None,
            ttl,
            MessageStatus.SENT,
            0,
            signature,
        )
        if correlation_id is None and self.expects_ack(message):  # its answer must find it
            key = str((metadata or {}).get("relay_id", message.id))
            message = msgspec.structs.replace(message, correlation_id=uuid4_of(key))
        routed = tuple(recipients) if recipients is not None else self.route(channel, sender, topic)
        self.apply(events.MessageSent(message, routed))
        return message

    def route(self, channel: Channel, sender: str, topic: str | None = None) -> tuple[str, ...]:
        """Stage 3: who receives what ``sender`` sends to the channel. Source: guide, "Route"."""
        if channel.channel_type is ChannelType.PUB_SUB:
            reached = {
                s.subscriber: None
                for s in self._subscriptions.values()
                if s.channel_id == channel.id
                and s.active
                and topics.matches(topic or "", s.topic_pattern)
            }
        else:
            reached = dict(self._members[channel.id])
        if not channel.config.echo or channel.channel_type is ChannelType.DIRECT:
            reached.pop(sender, None)
        return tuple(reached)

    def deliver(self, message_id: int, recipients: Iterable[str]) -> None:
        """Stage 5: these recipients have it now."""
        self.move_deliveries(message_id, recipients, DeliveryState.DELIVERED)

    def move_deliveries(
        self, message_id: int, recipients: Iterable[str], state: DeliveryState
    ) -> None:
        """Note what became of these recipients' deliveries; the same again changes nothing.

        Nothing moves back: what is acknowledged was delivered, whatever is noted later.
        """
        known = self._deliveries.get(message_id, {})
        moved = tuple(
            r
            for r in dict.fromkeys(recipients)
            if known.get(r, state) < state and known[r] is not DeliveryState.ACKNOWLEDGED
        )
        if moved:
            self.apply(events.DeliveriesMoved(message_id, moved, state, self._now_s()))

    def recipients(self, message_id: int) -> tuple[str, ...]:
        """Who the message was routed to."""
        return tuple(self._deliveries.get(message_id, ()))

    def get_message(self, message_id: int) -> Message | None:
        """The message of that number, if it is in the live store."""
        return self._messages.get(message_id)

    def by_relay_id(self, relay_id: str) -> Message | None:
        """The message that came through the relay under this id."""
        return self._messages.get(self._relay_ids.get(relay_id, 0))

    def thread(self, correlation_id: str) -> list[Message]:
        """The live messages of a thread, oldest first."""
        return [self._messages[n] for n in self._threads.get(correlation_id, ())]

    def is_answered(self, message_id: int, recipient: str) -> bool:
        """True once ``recipient`` has acknowledged the message, or answered it."""
        return self._deliveries.get(message_id, {}).get(recipient) is DeliveryState.ACKNOWLEDGED

    def expects_ack(self, message: Message) -> bool:
        """True for a Command, a Query, and whatever is delivered at least once.

        An Acknowledgment never expects one, whatever its channel promises.
        """
        if message.message_type is MessageType.ACKNOWLEDGMENT:
            return False
        mode = self._channels[message.channel_id].config.delivery
        asked = (message.metadata or {}).get("delivery", "at-most-once")
        return (
            message.message_type in (MessageType.COMMAND, MessageType.QUERY)
            or mode is not DeliveryMode.AT_MOST_ONCE
            or asked != "at-most-once"
        )

    def undelivered(self) -> dict[str, int]:
        """Relay id -> number of each message that somebody has not got yet."""
        return {
            relay_id: number
            for relay_id, number in self._relay_ids.items()
            if DeliveryState.SENT in self._deliveries.get(number, {}).values()
        }

    def shown_channel(self, message: Message) -> str | None:
        """The name of the message's channel, unless that is one between two."""
        channel = self._channels[message.channel_id]
        return None if channel.channel_type is ChannelType.DIRECT else channel.name

    def __len__(self) -> int:
        return len(self._messages)

    # -- events ------------------------------------------------------------------------

    def apply(self, event: events.Event) -> None:
        """Change the store as the event says. The only code that does."""
        _APPLY[type(event)](self, event)
        self.sequence += 1

    def _channel_created(self, event: events.ChannelCreated) -> None:
        self._add_channel(event.channel)
        self._next_channel = max(self._next_channel, event.channel.id + 1)
        self.modified_at = event.channel.created_at

    def _participant_joined(self, event: events.ParticipantJoined) -> None:
        channel = self._channels[event.channel_id]
        self._channels[event.channel_id] = msgspec.structs.replace(
            channel,
            participants=(*channel.participants, event.participant),
            modified_at=event.at,
        )
        self._members[event.channel_id][event.participant.id] = None
        self.modified_at = event.at

    def _participant_left(self, event: events.ParticipantLeft) -> None:
        channel = self._channels[event.channel_id]
        self._channels[event.channel_id] = msgspec.structs.replace(
            channel,
            participants=tuple(p for p in channel.participants if p.id != event.participant),
            modified_at=event.at,
        )
        self._members[event.channel_id].pop(event.participant, None)
        self._subscriptions = {
            s.id: s
            for s in self._subscriptions.values()
            if (s.channel_id, s.subscriber) != (event.channel_id, event.participant)
        }
        self.modified_at = event.at

    def _subscription_added(self, event: events.SubscriptionAdded) -> None:
        subscription = event.subscription
        self._subscriptions[subscription.id] = subscription
        self._next_subscription = max(self._next_subscription, subscription.id + 1)
        self.modified_at = subscription.created_at

    def _subscription_removed(self, event: events.SubscriptionRemoved) -> None:
        self._subscriptions.pop(event.subscription_id, None)
        self.modified_at = event.at

    def _message_sent(self, event: events.MessageSent) -> None:
        message = event.message
        self._add_message(message)
        self._counts[message.channel_id] += 1
        self.messages_sent += 1
        self._next_message = max(self._next_message, message.id + 1)
        self._deliveries[message.id] = dict.fromkeys(event.recipients, DeliveryState.SENT)
        self.modified_at = message.created_at

    def _deliveries_moved(self, event: events.DeliveriesMoved) -> None:
        message = self._messages.get(event.message_id)
        if message is None:
            return
        moved = dict.fromkeys(event.recipients, event.state)
        # a new dict, never a change of the old one: a snapshot may hold that
        states = self._deliveries[event.message_id] | moved
        self._deliveries[event.message_id] = states
        self.modified_at = event.at
        status = _STATUS_OF.get(min(states.values()))
        if status is not None and status is not message.status:
            self._messages[event.message_id] = with_status(message, status, event.at)

    def _add_channel(self, channel: Channel) -> None:
        self._channels[channel.id] = channel
        self._names[channel.name] = channel.id
        self._members[channel.id] = {member.id: None for member in channel.participants}
        self._counts[channel.id] = channel.message_count

    def _add_message(self, message: Message) -> None:
        self._messages[message.id] = message
        if message.correlation_id is not None:
            self._threads.setdefault(message.correlation_id, []).append(message.id)
        if message.metadata is not None:
            relay_id = message.metadata.get("relay_id")
            if isinstance(relay_id, str):
                self._relay_ids[relay_id] = message.id

    def _now_s(self) -> int:
        return self._clock.now_ns() // NS_PER_S


_APPLY: dict[type, Callable[..., None]] = {
    events.ChannelCreated: CommStore._channel_created,
    events.ParticipantJoined: CommStore._participant_joined,
    events.ParticipantLeft: CommStore._participant_left,
    events.SubscriptionAdded: CommStore._subscription_added,
    events.SubscriptionRemoved: CommStore._subscription_removed,
    events.MessageSent: CommStore._message_sent,
    events.DeliveriesMoved: CommStore._deliveries_moved,
}
