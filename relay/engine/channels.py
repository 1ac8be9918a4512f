"""Channels, their participants, and subscriptions to their topics.

Source: data-structures.txt "Channel", "Participant", "Subscription".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelSettings,
    ChannelState,
    ChannelType,
    DeliveryState,
    Message,
    MessageFilter,
    Participant,
    ParticipantRole,
    RetentionKind,
    Subscription,
)
from relay.base.errors import (
    ChannelUnavailable,
    DuplicateChannel,
    NotParticipant,
    StoreCapacity,
    ValidationFailed,
)
from relay.engine import ack_rules, events, routing, topics, validation
from relay.engine.deliveries import DeliveryCommands
from relay.engine.query import check_filter

_SETTINGS = frozenset(ChannelSettings.__struct_fields__)
_WORDS = frozenset({"description", "tags"})
_KNOWN = frozenset(ChannelConfig.__struct_fields__) | _SETTINGS | _WORDS


class ChannelCommands(DeliveryCommands):
    """The CommStore's commands on channels."""

    def create_channel(
        self,
        name: str,
        channel_type: ChannelType,
        owner: str,
        config: ChannelConfig | None = None,
        *,
        description: str | None = None,
        tags: Iterable[str] = (),
    ) -> Channel:
        """A new channel whose owner is its first participant.

        Errors: ValidationFailed for its name, type, owner, settings or words; DuplicateChannel;
        StoreCapacity when the store has as many channels as it takes.
        """
        validation.check_channel_name(name)
        validation.check_participant("owner", owner)
        if name in self.state.names:
            raise DuplicateChannel(f"channel {name} already exists")
        channel_type = validation.check_member("channel_type", channel_type, ChannelType)
        config = validation.check_config(ChannelConfig() if config is None else config)
        description, tags = validation.check_words(description, tags)
        self._check_room("channels", len(self.state.channels), self.limits.channels)
        now = self._now_s()
        first = Participant(owner, ParticipantRole.OWNER, now, self.identities.get(owner))
        channel = Channel(
            id=self.state.next_channel,
            name=name,
            channel_type=channel_type,
            owner=owner,
            participants=(first,),
            config=config,
            created_at=now,
            modified_at=now,
            description=description,
            tags=tags,
        )
        _check_participants(channel, config)
        self.apply(events.ChannelCreated(channel))
        return channel

    def get_channel_by_name(self, name: str) -> Channel | None:
        """The channel of that name, if there is one."""
        channel_id = self.state.names.get(validation.check_text("name", name))
        return None if channel_id is None else self.get_channel(channel_id)

    def list_channels(self) -> list[Channel]:
        """Every channel, by id."""
        return [self.get_channel(channel_id) for channel_id in self.state.channels]

    def message_count(self, channel_id: int) -> int:
        """The number of messages ever sent in the channel. Errors: ChannelNotFound."""
        return self.get_channel(channel_id).message_count

    def join_channel(
        self, channel_id: int, participant: str, role: ParticipantRole | None = None
    ) -> Channel:
        """Take part in a channel, as ``role``; None: in a broadcast channel as observer, else as
        member, its owner as owner.

        Again changes nothing. Who joins a sticky channel gets what was sent before and is
        still live, oldest first. Errors: ValidationFailed when a direct channel has two, or
        max_participants are there, and for a second owner.
        """
        channel = self.get_channel(channel_id)
        if role is not None:
            role = validation.check_member("role", role, ParticipantRole)
            if role is ParticipantRole.OWNER and participant != channel.owner:
                raise ValidationFailed("role", f"{channel.owner} owns channel {channel.name}")
        if self.is_participant(channel_id, participant):
            return channel
        validation.check_participant("participant", participant)
        most = channel.config.max_participants
        if channel.channel_type is ChannelType.DIRECT:
            most = 2
        if most is not None and len(channel.participants) >= most:
            raise ValidationFailed(
                "participant", f"channel {channel.name} has its {most} participants"
            )
        if role is None:
            observes = channel.channel_type is ChannelType.BROADCAST
            role = ParticipantRole.OBSERVER if observes else ParticipantRole.MEMBER
        if participant == channel.owner:  # it had left
            role = ParticipantRole.OWNER
        now = self._now_s()
        identity = self.identities.get(participant)
        joined = Participant(participant, role, now, identity)
        self.apply(events.ParticipantJoined(channel_id, joined, now))
        if channel.config.sticky_messages and channel.channel_type is not ChannelType.PUB_SUB:
            self._deliver_sticky(channel, participant, lambda _: True)
        return self.get_channel(channel_id)

    def set_identities(self, identities: Mapping[str, str]) -> None:
        """The id of each participant's key: of who joins from now on, and of who takes part.

        Others have none. Errors: ValidationFailed for an id that is not a string.
        """
        if not isinstance(identities, Mapping):
            raise ValidationFailed("identities", f"{identities!r} is not a mapping of names to ids")
        for identity in identities.values():
            validation.check_text("identity_id", identity)
        self.identities = dict(identities)
        other = {
            one.id: identities.get(one.id)
            for channel in self.state.channels.values()
            for one in channel.participants
            if one.identity_id != identities.get(one.id)
        }
        for name, identity_id in other.items():
            self.apply(events.ParticipantIdentified(name, identity_id, self._now_s()))

    def leave_channel(self, channel_id: int, participant: str) -> Channel:
        """No longer take part: what waits there for ``participant`` bounces, unless it is owed
        an acknowledgment, whose sender is told in time.

        Errors: NotParticipant; ValidationFailed for the owner of a broadcast channel, in which
        nobody else may send.
        """
        channel = self.get_channel(channel_id)
        if not self.is_participant(channel_id, participant):
            raise NotParticipant(f"{participant} does not take part in channel {channel.name}")
        if channel.channel_type is ChannelType.BROADCAST and participant == channel.owner:
            raise ValidationFailed(
                "participant",
                f"{participant} owns broadcast channel {channel.name}, and it has one owner: "
                "close the channel, or stay",
            )
        self.apply(events.ParticipantLeft(channel_id, participant, self._now_s()))
        if self.delivers_itself:  # what lies in an inbox stays there
            for number in list(self.state.queues.get(participant, ())):
                message = self.state.messages.get(number)
                if (
                    message is not None
                    and message.channel_id == channel_id
                    and not ack_rules.ack_pending(channel, message)
                ):
                    self.move_deliveries(number, [participant], DeliveryState.BOUNCED)
        return self.get_channel(channel_id)

    def subscribe(
        self,
        channel_id: int,
        subscriber: str,
        pattern: str,
        filter: MessageFilter | None = None,
    ) -> Subscription:
        """Receive what is published on topics that ``pattern`` matches; joins the channel.

        Subscribing twice to one pattern is one subscription: it is active again, and its filter is
        the one given last. On a sticky channel a new subscriber gets what matches and was sent
        before. Errors: ValidationFailed for the pattern, or when
        the channel is not a PubSub channel; StoreCapacity for one subscription too many.
        """
        channel = self._with_topics(channel_id)
        mode = topics.match_mode(pattern)
        if filter is not None:
            filter = check_filter(filter)
            sort_by, sort_order = filter.order  # a file has no filter without them
            filter = msgspec.structs.replace(filter, sort_by=sort_by, sort_order=sort_order)
        for known in self._subscriptions_to(channel_id, pattern):
            if known.subscriber == subscriber:
                return self._change_subscription(known, active=True, filter=filter)
        count = len(self.state.subscriptions)
        self._check_room("subscriptions", count, self.limits.subscriptions)
        self.join_channel(channel_id, subscriber)
        number, now = self.state.next_subscription, self._now_s()
        subscription = Subscription(
            number, channel_id, subscriber, pattern, mode, now, active=True, filter=filter
        )
        self.apply(events.SubscriptionAdded(subscription))
        if channel.config.sticky_messages:
            self._deliver_sticky(channel, subscriber, self._subscription_predicate(subscription))
        return subscription

    def subscriptions(
        self, channel_id: int | None = None, subscriber: str | None = None
    ) -> list[Subscription]:
        """Subscriptions by id: all, or those to one channel, of one subscriber, or both.

        Errors: ChannelNotFound; ValidationFailed for a subscriber that is not a string.
        """
        if channel_id is not None:
            self.get_channel(channel_id)
        if subscriber is not None:
            validation.check_text("subscriber", subscriber)
        return [
            one
            for one in self.state.subscriptions.values()
            if channel_id in (None, one.channel_id) and subscriber in (None, one.subscriber)
        ]

    def set_subscription_active(self, subscription_id: int, active: bool) -> Subscription:
        """Pause or resume a subscription; a paused one receives nothing.

        Repeating it changes nothing. Errors: ValidationFailed for an unknown id.
        """
        known = self.state.subscriptions.get(
            validation.check_number("subscription_id", subscription_id)
        )
        if known is None:
            raise ValidationFailed(
                "subscription_id", f"subscription {subscription_id} does not exist"
            )
        if type(active) is not bool:
            raise ValidationFailed("active", f"{active!r} is not True or False")
        return self._change_subscription(known, active=active, filter=known.filter)

    def _change_subscription(
        self, known: Subscription, *, active: bool, filter: MessageFilter | None
    ) -> Subscription:
        changed = msgspec.structs.replace(known, active=active, filter=filter)
        if changed != known:
            self.apply(events.SubscriptionChanged(changed, self._now_s()))
            self._invalid_filters.discard(known.id)  # of a new filter it is said again
        return changed

    def _with_topics(self, channel_id: int) -> Channel:
        """The channel. Errors: ChannelNotFound; ValidationFailed when it has no topics."""
        channel = self.get_channel(channel_id)
        if channel.channel_type is not ChannelType.PUB_SUB:
            raise ValidationFailed(
                "channel",
                f"{channel.name} is a {channel.channel_type.label} channel; "
                "only a PubSub channel has topics",
            )
        return channel

    def _subscription_predicate(self, subscription: Subscription) -> Callable[[Message], bool]:
        """A test for earlier messages that a subscription wants."""

        def is_wanted(message: Message) -> bool:
            return (
                message.topic is not None
                and topics.matches(message.topic, subscription.topic_pattern)
                and routing.passes_filter(subscription, message, self._warn_of_filter)
            )

        return is_wanted

    def _deliver_sticky(
        self, channel: Channel, participant: str, is_wanted: Callable[[Message], bool]
    ) -> None:
        """Deliver the messages of a sticky channel to a new participant, once; answers excepted."""
        if channel.config.retention.kind is not RetentionKind.FOREVER:
            self._retain(channel, 0)
        earlier = [
            message
            for number in self.state.index.channel(channel.id)
            if (message := self.state.messages[number]).sender != participant
            and message.message_type not in ack_rules.ANSWERS
            and participant not in self.state.deliveries.get(number, {})
            and not (message.ttl is not None and self._is_past(message))
            and is_wanted(message)
        ]
        if not earlier:
            return
        numbers = tuple(message.id for message in earlier)
        self.apply(events.DeliveriesAdded(participant, numbers, self._now_s()))
        if not self.delivers_itself:
            self._copies += [(number, participant) for number in numbers]
            return
        for message in earlier:
            if not self.is_held(message.id):
                self.deliver(message.id, [participant])

    def _warn_of_filter(self, subscription: Subscription) -> None:
        """Warn once of a subscription whose filter is invalid and so matches nothing."""
        if subscription.id not in self._invalid_filters:
            self._invalid_filters.add(subscription.id)
            self.warn(
                f"subscription {subscription.id} of {subscription.subscriber}: its content "
                "pattern is not a valid RE2 pattern, so nothing matches; subscribe again with a "
                "valid one"
            )

    def _check_room(self, what: str, count: int, most: int) -> None:
        if count >= most:
            raise StoreCapacity(f"{count} {what}, a store holds {most}")

    def _subscriptions_to(self, channel_id: int, pattern: str) -> list[Subscription]:
        trie = self.state.topics.get(channel_id)
        numbers = trie.find_exact(pattern) if trie else ()
        return [self.state.subscriptions[number] for number in numbers]

    def unsubscribe(self, channel_id: int, subscriber: str, pattern: str | None = None) -> int:
        """End the subscriptions to ``pattern`` (None: all of this channel); how many there were.

        Errors: ChannelNotFound.
        """
        self.get_channel(channel_id)
        validation.check_text("subscriber", subscriber)
        if pattern is not None:
            validation.check_text("topic_pattern", pattern)
        ended = [
            s.id
            for s in self.state.subscriptions.values()
            if s.channel_id == channel_id
            and s.subscriber == subscriber
            and pattern in (None, s.topic_pattern)
        ]
        for subscription_id in ended:
            self.apply(events.SubscriptionRemoved(subscription_id, self._now_s()))
        return len(ended)

    def configure_channel(self, channel_id: int, **changes: object) -> Channel:
        """Change a channel, by name: what ChannelConfig and ChannelSettings hold, its words.

        ``flush`` is immediate, batch, manual or None, as the store; ``max_pending`` a number or
        None; ``description`` a text or None; ``tags`` texts.
        Errors: ChannelNotFound; ValidationFailed for an unknown name or invalid value, and for a
        ``max_participants`` below those who are there.
        """
        channel = self.get_channel(channel_id)
        if unknown := changes.keys() - _KNOWN:
            raise ValidationFailed("config", f"unknown setting {min(unknown)}")
        words = validation.check_words(
            changes.pop("description", channel.description), changes.pop("tags", channel.tags)
        )
        beside = {name: changes.pop(name) for name in _SETTINGS & changes.keys()}
        settings = validation.check_settings(
            msgspec.structs.replace(self.get_settings(channel_id), **beside)
        )
        config = validation.check_config(msgspec.structs.replace(channel.config, **changes))
        if config.max_participants != channel.config.max_participants:
            _check_participants(channel, config)
        return self._change(channel, channel.state, config, settings, *words)

    def set_channel_state(self, channel_id: int, state: ChannelState) -> Channel:
        """Pause, drain, close or resume a channel. Closed is final.

        Errors: ChannelNotFound; ValidationFailed for an invalid state; ChannelUnavailable when
        it is closed.
        """
        channel = self.get_channel(channel_id)
        state = validation.check_member("state", state, ChannelState)
        if channel.state is ChannelState.CLOSED and state is not ChannelState.CLOSED:
            raise ChannelUnavailable(f"channel {channel.name} is Closed, and that is final")
        if channel.state is state:
            return channel
        settings = self.get_settings(channel_id)
        return self._change(
            channel, state, channel.config, settings, channel.description, channel.tags
        )

    def _change(
        self,
        channel: Channel,
        state: ChannelState,
        config: ChannelConfig,
        settings: ChannelSettings,
        description: str | None,
        tags: tuple[str, ...],
    ) -> Channel:
        now = self._now_s()
        self.apply(
            events.ChannelChanged(channel.id, state, config, now, settings, description, tags)
        )
        self.resume()
        return self.get_channel(channel.id)


def _check_participants(channel: Channel, config: ChannelConfig) -> None:
    """Errors: ValidationFailed when a channel cannot be limited to so few."""
    most = config.max_participants
    least = len(channel.participants)
    if channel.channel_type is ChannelType.DIRECT:
        least = 2
    if most is not None and most < least:
        raise ValidationFailed(
            "max_participants", f"{most} is too few for channel {channel.name}: it has {least}"
        )
