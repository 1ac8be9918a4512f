"""Channels, their participants, and subscriptions to their topics."""

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
    Subscription,
)
from relay.base.errors import (
    ChannelNotFound,
    ChannelUnavailable,
    DuplicateChannel,
    NotParticipant,
    StoreCapacity,
    ValidationFailed,
)
from relay.base.names import ORCHESTRATOR
from relay.engine import events, routing, rules
from relay.engine.archives import Archives
from relay.engine.query import check_filter
from relay.engine.state import Core

MOST_OWNED = 1000  # channels of one agent in a relay: their number is limited for all together
_SETTINGS = frozenset(ChannelSettings.__struct_fields__)
_WORDS = frozenset({"description", "tags"})
_DEFAULT = ChannelSettings()
_KNOWN = frozenset(ChannelConfig.__struct_fields__) | _SETTINGS | _WORDS


class Channels:
    """Channels, their participants and subscriptions. Part of an engine."""

    def __init__(self, core: Core, archives: Archives) -> None:
        self._core = core
        self._state = core.state
        self._archives = archives
        self._identities: Mapping[str, str] = {}  # participant -> its key's id, where it is known
        self._copies: list[tuple[int, str]] = []  # of sticky messages, not delivered yet
        self._filters = routing.Filters(core.warn)

    def get(self, channel_id: int) -> Channel:
        """The channel as it is now, its message count included. Errors: ChannelNotFound."""
        channel = self.find(channel_id)
        # the state counts beside its channels: sending need not make a new one each time
        return msgspec.structs.replace(channel, message_count=self._state.counts[channel_id])

    def find(self, channel_id: int) -> Channel:
        """The channel without its message count. Errors: ChannelNotFound."""
        channel = self._state.channels.get(channel_id) if type(channel_id) is int else None
        if channel is None:
            raise ChannelNotFound(f"channel {channel_id!r} does not exist")
        return channel

    def settings(self, channel_id: int) -> ChannelSettings:
        """The settings of a channel beside its config. Errors: ChannelNotFound."""
        return self._state.settings.get(self.find(channel_id).id, _DEFAULT)

    def is_participant(self, channel_id: int, participant: str) -> bool:
        """True when ``participant`` is one of the channel's."""
        return isinstance(participant, str) and participant in self._state.members.get(
            channel_id, ()
        )

    def label(self, channel_id: int) -> str | None:
        """The name of a channel; None for a direct channel."""
        channel = self._state.channels[channel_id]
        return None if channel.channel_type is ChannelType.DIRECT else channel.name

    def route(self, channel: Channel, message: Message) -> tuple[str, ...]:
        """The recipients of a message in the channel."""
        return routing.route(self._state, channel, message, self._filters)

    def create(
        self,
        name: str,
        channel_type: ChannelType,
        owner: str,
        config: ChannelConfig | None = None,
        *,
        description: str | None = None,
        tags: Iterable[str] = (),
    ) -> Channel:
        """Create a channel; its owner is the first participant.

        Errors: ValidationFailed for an invalid name, type, owner, setting, description or tag;
        DuplicateChannel; StoreCapacity when the store has its maximum of channels.
        """
        rules.check_channel_name(name)
        rules.check_participant("owner", owner)
        if name in self._state.names:
            raise DuplicateChannel(f"channel {name} already exists")
        channel_type = rules.check_member("channel_type", channel_type, ChannelType)
        config = rules.check_config(ChannelConfig() if config is None else config)
        description, tags = rules.check_words(description, tags)
        self._check_room("channels", len(self._state.channels), self._core.limits.channels)
        if self._core.rules.by_files and channel_type is not ChannelType.DIRECT:
            self._check_owned(owner)
        now = self._core.now_s()
        first = Participant(owner, ParticipantRole.OWNER, now, self._identities.get(owner))
        channel = Channel(
            id=self._state.next_channel,
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
        self._core.apply(events.ChannelCreated(channel))
        return channel

    def find_by_name(self, name: str) -> Channel | None:
        """The channel of that name without its message count, if there is one."""
        channel_id = self._state.names.get(name)
        return None if channel_id is None else self._state.channels[channel_id]

    def list_all(self) -> list[Channel]:
        """Every channel, by id."""
        return [self.get(channel_id) for channel_id in self._state.channels]

    def join(
        self, channel_id: int, participant: str, role: ParticipantRole | None = None
    ) -> Channel:
        """Add a participant in ``role``; by default the owner as owner, others as observers of a
        broadcast channel and as members elsewhere.

        Joining twice changes nothing. A new participant of a sticky channel gets the earlier
        messages that are still live, oldest first. Errors: ValidationFailed when the channel is
        full (a direct channel has two participants), and for a second owner.
        """
        channel = self.find(channel_id)
        if role is not None:
            role = rules.check_member("role", role, ParticipantRole)
            if role is ParticipantRole.OWNER and participant != channel.owner:
                raise ValidationFailed("role", f"{channel.owner} owns channel {channel.name}")
        if self.is_participant(channel_id, participant):
            return self.get(channel_id)
        rules.check_participant("participant", participant)
        most = channel.config.max_participants
        if channel.channel_type is ChannelType.DIRECT:
            most = 2
        if most is not None and len(channel.participants) >= most:
            raise ValidationFailed(
                "participant",
                f"channel {channel.name} is full: it is limited to {most} participants",
            )
        if role is None:
            observes = channel.channel_type is ChannelType.BROADCAST
            role = ParticipantRole.OBSERVER if observes else ParticipantRole.MEMBER
        if participant == channel.owner:  # it had left
            role = ParticipantRole.OWNER
        now = self._core.now_s()
        identity = self._identities.get(participant)
        joined = Participant(participant, role, now, identity)
        self._core.apply(events.ParticipantJoined(channel_id, joined, now))
        if channel.config.sticky_messages and channel.channel_type is not ChannelType.PUB_SUB:
            self._add_sticky(channel, participant, lambda _: True)
        return self.get(channel_id)

    def set_identities(self, identities: Mapping[str, str]) -> None:
        """Set the key id of each participant, present and future; others have none.

        Errors: ValidationFailed for an id that is not a string.
        """
        if not isinstance(identities, Mapping):
            raise ValidationFailed("identities", f"{identities!r} is not a mapping of names to ids")
        for identity in identities.values():
            rules.check_text("identity_id", identity)
        self._identities = dict(identities)
        other = {
            participant.id: identities.get(participant.id)
            for channel in self._state.channels.values()
            for participant in channel.participants
            if participant.identity_id != identities.get(participant.id)
        }
        for name, identity_id in other.items():
            self._core.apply(events.ParticipantIdentified(name, identity_id, self._core.now_s()))

    def leave(self, channel_id: int, participant: str) -> Channel:
        """Remove a participant; what it was sent stays as it is.

        Errors: NotParticipant; ValidationFailed for the owner of a broadcast channel, who is the
        only one allowed to send in it.
        """
        channel = self.find(channel_id)
        if not self.is_participant(channel_id, participant):
            raise NotParticipant(f"{participant} is not a participant of channel {channel.name}")
        if channel.channel_type is ChannelType.BROADCAST and participant == channel.owner:
            raise ValidationFailed(
                "participant",
                f"{participant} owns broadcast channel {channel.name}, which always has an owner: "
                "close the channel instead of leaving it",
            )
        self._core.apply(events.ParticipantLeft(channel_id, participant, self._core.now_s()))
        return self.get(channel_id)

    def subscribe(
        self,
        channel_id: int,
        subscriber: str,
        pattern: str,
        filter: MessageFilter | None = None,
    ) -> Subscription:
        """Subscribe to the topics that ``pattern`` matches, and join the channel.

        Subscribing again to the same pattern reactivates the subscription and replaces its filter.
        On a sticky channel a new subscriber also gets the matching earlier messages. Errors:
        ValidationFailed for an invalid pattern, or when the channel is not a PubSub channel;
        StoreCapacity when the store has its maximum of subscriptions.
        """
        channel = self._with_topics(channel_id)
        mode = rules.match_mode(pattern)
        if filter is not None:
            filter = check_filter(filter)
            sort_by, sort_order = filter.order  # a file has no filter without them
            filter = msgspec.structs.replace(filter, sort_by=sort_by, sort_order=sort_order)
        for known in self._subscriptions_to(channel_id, pattern):
            if known.subscriber == subscriber:
                return self._change_subscription(known, active=True, filter=filter)
        count = len(self._state.subscriptions)
        self._check_room("subscriptions", count, self._core.limits.subscriptions)
        self.join(channel_id, subscriber)
        number, now = self._state.next_subscription, self._core.now_s()
        subscription = Subscription(
            number, channel_id, subscriber, pattern, mode, now, active=True, filter=filter
        )
        self._core.apply(events.SubscriptionAdded(subscription))
        if channel.config.sticky_messages:
            self._add_sticky(channel, subscriber, self._subscription_predicate(subscription))
        return subscription

    def subscriptions(
        self, channel_id: int | None = None, subscriber: str | None = None
    ) -> list[Subscription]:
        """Subscriptions in the order of their ids, optionally of one channel or one subscriber.

        Errors: ChannelNotFound; ValidationFailed for a subscriber that is not a string.
        """
        if channel_id is not None:
            self.get(channel_id)
        if subscriber is not None:
            rules.check_text("subscriber", subscriber)
        return [
            subscription
            for subscription in self._state.subscriptions.values()
            if channel_id in (None, subscription.channel_id)
            and subscriber in (None, subscription.subscriber)
        ]

    def set_subscription_active(self, subscription_id: int, active: bool) -> Subscription:
        """Pause or resume a subscription; a paused one receives nothing.

        Repeating it changes nothing. Errors: ValidationFailed for an unknown id.
        """
        known = self._state.subscriptions.get(
            rules.check_number("subscription_id", subscription_id)
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
            self._core.apply(events.SubscriptionChanged(changed, self._core.now_s()))
            self._filters.forget(known.id)
        return changed

    def _with_topics(self, channel_id: int) -> Channel:
        """The channel. Errors: ChannelNotFound; ValidationFailed when it has no topics."""
        channel = self.find(channel_id)
        if channel.channel_type is not ChannelType.PUB_SUB:
            raise ValidationFailed(
                "channel",
                f"{channel.name} is a {channel.channel_type.label} channel; "
                "only a PubSub channel has topics",
            )
        return channel

    def _subscription_predicate(self, subscription: Subscription) -> Callable[[Message], bool]:
        """A test for earlier messages that a subscription matches."""

        def is_wanted(message: Message) -> bool:
            return (
                message.topic is not None
                and rules.topic_matches(message.topic, subscription.topic_pattern)
                and self._filters.let_through(subscription, message)
            )

        return is_wanted

    def _add_sticky(
        self, channel: Channel, participant: str, is_wanted: Callable[[Message], bool]
    ) -> None:
        """Add a new participant to the recipients of earlier messages, except answers, once."""
        self._archives.retain_in(channel)
        earlier = [
            message
            for number in self._state.index.channel(channel.id)
            if (message := self._state.messages[number]).sender != participant
            and message.message_type not in rules.ANSWERS
            and participant not in self._state.deliveries.get(number, {})
            and not message.is_expired(self._core.now_ns())
            and not self._is_cancelled(number)
            and is_wanted(message)
        ]
        if not earlier:
            return
        numbers = tuple(message.id for message in earlier)
        self._core.apply(events.DeliveriesAdded(participant, numbers, self._core.now_s()))
        self._copies += [(number, participant) for number in numbers]

    def _is_cancelled(self, number: int) -> bool:
        """True for a message whose sender took it back from a recipient."""
        known = self._state.deliveries.get(number, {}).values()
        return any(delivery.state is DeliveryState.EXPIRED for delivery in known)

    def pop_sticky(self) -> list[tuple[int, str]]:
        """Remove and return (message id, recipient) of sticky copies the owner has to deliver."""
        copies, self._copies = self._copies, []
        return copies

    def _check_owned(self, owner: str) -> None:
        """Errors: ValidationFailed for one more channel of an agent that has very many."""
        known = self._state.channels.values()
        owned = sum(one.owner == owner for one in known if one.channel_type != ChannelType.DIRECT)
        if owned >= MOST_OWNED and owner != ORCHESTRATOR:
            text = f"{owner} owns {owned} channels, at most {MOST_OWNED}: use one with topics"
            raise ValidationFailed("owner", text)

    def _check_room(self, what: str, count: int, most: int) -> None:
        if count >= most:
            raise StoreCapacity(f"the store has {count} {what}, its limit is {most}")

    def _subscriptions_to(self, channel_id: int, pattern: str) -> list[Subscription]:
        trie = self._state.topics.get(channel_id)
        numbers = trie.find_exact(pattern) if trie else ()
        return [self._state.subscriptions[number] for number in numbers]

    def unsubscribe(self, channel_id: int, subscriber: str, pattern: str | None = None) -> int:
        """End the subscriptions to ``pattern`` (None: all of this channel); returns their number.

        Errors: ChannelNotFound.
        """
        self.get(channel_id)
        rules.check_text("subscriber", subscriber)
        if pattern is not None:
            rules.check_text("topic_pattern", pattern)
        ended = [
            s.id
            for s in self._state.subscriptions.values()
            if s.channel_id == channel_id
            and s.subscriber == subscriber
            and pattern in (None, s.topic_pattern)
        ]
        for subscription_id in ended:
            self._core.apply(events.SubscriptionRemoved(subscription_id, self._core.now_s()))
        return len(ended)

    def configure(self, channel_id: int, **changes: object) -> Channel:
        """Change a channel's config, settings, description or tags, by name.

        ``flush`` is immediate, batch, manual or None (as the store); ``max_pending`` a number or
        None; ``description`` a text or None; ``tags`` texts.
        Errors: ChannelNotFound; ValidationFailed for an unknown name or invalid value, and for a
        ``max_participants`` below the present number.
        """
        channel = self.find(channel_id)
        if unknown := changes.keys() - _KNOWN:
            raise ValidationFailed("config", f"unknown setting {min(unknown)}")
        words = rules.check_words(
            changes.pop("description", channel.description), changes.pop("tags", channel.tags)
        )
        beside = {name: changes.pop(name) for name in _SETTINGS & changes.keys()}
        settings = rules.check_settings(
            msgspec.structs.replace(self.settings(channel_id), **beside)
        )
        config = rules.check_config(msgspec.structs.replace(channel.config, **changes))
        if config.max_participants != channel.config.max_participants:
            _check_participants(channel, config)
        return self._change(channel, channel.state, config, settings, *words)

    def set_state(self, channel_id: int, state: ChannelState) -> Channel:
        """Pause, drain, close or resume a channel. A closed channel stays closed.

        Errors: ChannelNotFound; ValidationFailed for an invalid state; ChannelUnavailable when
        it is closed.
        """
        channel = self.find(channel_id)
        state = rules.check_member("state", state, ChannelState)
        if channel.state is ChannelState.CLOSED and state is not ChannelState.CLOSED:
            raise ChannelUnavailable(f"channel {channel.name} was closed, which is permanent")
        if channel.state is state:
            return self.get(channel_id)
        settings = self.settings(channel_id)
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
        now = self._core.now_s()
        self._core.apply(
            events.ChannelChanged(channel.id, state, config, now, settings, description, tags)
        )
        return self.get(channel.id)


def _check_participants(channel: Channel, config: ChannelConfig) -> None:
    """Errors: ValidationFailed when a channel cannot be limited to so few."""
    most = config.max_participants
    least = len(channel.participants)
    if channel.channel_type is ChannelType.DIRECT:
        least = 2
    if most is not None and most < least:
        raise ValidationFailed(
            "max_participants",
            f"{most} is too few for channel {channel.name}: it has {least} participants",
        )
