"""Channels, who takes part in them, and subscriptions to their topics.

Source: data-structures.txt "Channel", "Participant", "Subscription".
"""

from __future__ import annotations

import msgspec

from relay.comm import events, topics, validation
from relay.comm.base import StoreBase
from relay.comm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    MessageFilter,
    Participant,
    ParticipantRole,
    Subscription,
)
from relay.comm.query import check_filter
from relay.errors import ChannelUnavailable, DuplicateChannel, NotParticipant, ValidationFailed


class ChannelCommands(StoreBase):
    """The CommStore's commands on channels."""

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
        if name in self.state.names:
            raise DuplicateChannel(f"there is a channel {name} already")
        now = self._now_s()
        channel = Channel(
            self.state.next_channel,
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

    def get_channel_by_name(self, name: str) -> Channel | None:
        """The channel of that name, if there is one."""
        channel_id = self.state.names.get(name)
        return None if channel_id is None else self.state.channels[channel_id]

    def list_channels(self) -> list[Channel]:
        """Every channel, by id."""
        return list(self.state.channels.values())

    def message_count(self, channel_id: int) -> int:
        """How many messages the channel has had."""
        return self.state.counts[channel_id]

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
        observes = channel.channel_type is ChannelType.BROADCAST
        role = ParticipantRole.OBSERVER if observes else ParticipantRole.MEMBER
        now = self._now_s()
        self.apply(events.ParticipantJoined(channel_id, Participant(participant, role, now), now))
        return self.state.channels[channel_id]

    def leave_channel(self, channel_id: int, participant: str) -> Channel:
        """No longer take part. Errors: NotParticipant."""
        channel = self.get_channel(channel_id)
        if not self.takes_part(channel_id, participant):
            raise NotParticipant(f"{participant} does not take part in channel {channel.name}")
        self.apply(events.ParticipantLeft(channel_id, participant, self._now_s()))
        return self.state.channels[channel_id]

    def subscribe(
        self,
        channel_id: int,
        subscriber: str,
        pattern: str,
        filter: MessageFilter | None = None,
    ) -> Subscription:
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
        for known in self._subscriptions_to(channel_id, pattern):
            if known.subscriber == subscriber:
                return known
        if filter is not None:
            check_filter(filter)
        self.join_channel(channel_id, subscriber)
        subscription = Subscription(
            self.state.next_subscription,
            channel_id,
            subscriber,
            pattern,
            mode,
            self._now_s(),
            True,
            filter,
        )
        self.apply(events.SubscriptionAdded(subscription))
        return subscription

    def _subscriptions_to(self, channel_id: int, pattern: str) -> list[Subscription]:
        trie = self.state.topics.get(channel_id)
        numbers = trie.exactly(pattern) if trie else ()
        return [self.state.subscriptions[number] for number in numbers]

    def unsubscribe(self, channel_id: int, subscriber: str, pattern: str | None = None) -> int:
        """End the subscriptions to ``pattern`` (None: all of this channel); how many there were."""
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
        """Change settings of a channel: those of ChannelConfig, by name.

        Errors: ChannelNotFound; ValidationFailed for a name or value that is none.
        """
        channel = self.get_channel(channel_id)
        unknown = changes.keys() - set(ChannelConfig.__struct_fields__)
        if unknown:
            raise ValidationFailed("config", f"there is no setting {min(unknown)}")
        config = validation.check_config(msgspec.structs.replace(channel.config, **changes))
        self.apply(events.ChannelChanged(channel_id, channel.state, config, self._now_s()))
        return self.state.channels[channel_id]

    def set_channel_state(self, channel_id: int, state: ChannelState) -> Channel:
        """Pause, drain, close or resume a channel. Closed is final.

        Errors: ChannelNotFound, ChannelUnavailable when it is closed.
        """
        channel = self.get_channel(channel_id)
        if channel.state is ChannelState.CLOSED and state is not ChannelState.CLOSED:
            raise ChannelUnavailable(f"channel {channel.name} is Closed, and that is final")
        if channel.state is not state:
            self.apply(events.ChannelChanged(channel_id, state, channel.config, self._now_s()))
        return self.state.channels[channel_id]
