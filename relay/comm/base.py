"""What every part of the CommStore stands on: the state, the clock, and ``apply``."""

from __future__ import annotations

from relay.clock import NS_PER_MS, NS_PER_S, Clock
from relay.comm import events
from relay.comm.engine_state import Snapshot
from relay.comm.model import Channel
from relay.comm.state import State
from relay.errors import ChannelNotFound


class StoreBase:
    """A state, and the time. Not thread-safe: one owner."""

    def __init__(self, clock: Clock, state: State | None = None) -> None:
        self._clock = clock
        self.state = state or State(self._now_s())
        self.ack_timeout_s = 60  # where neither message nor channel says otherwise
        # False: its owner delivers by other means, and says so; see ``DueCommands``.
        self.delivers_itself = True
        self.give_up_after_s = 86_400  # a day: what is not acknowledged by then is a dead letter

    @property
    def created_at(self) -> int:
        """When the store was made, Unix seconds."""
        return self.state.created_at

    @property
    def modified_at(self) -> int:
        """When it last changed, Unix seconds."""
        return self.state.modified_at

    @property
    def sequence(self) -> int:
        """How many events the store has had in its life."""
        return self.state.sequence

    @property
    def messages_sent(self) -> int:
        """How many messages were sent since the store was opened."""
        return self.state.messages_sent

    def apply(self, event: events.Event) -> None:
        """Change the store as the event says; a journal's records are applied like this, too."""
        self.state.apply(event)

    def snapshot(self) -> Snapshot:
        """Everything in the store as immutable values, for any thread to read."""
        return self.state.snapshot()

    def get_channel(self, channel_id: int) -> Channel:
        """Errors: ChannelNotFound."""
        try:
            return self.state.channels[channel_id]
        except KeyError:
            raise ChannelNotFound(f"there is no channel {channel_id}") from None

    def takes_part(self, channel_id: int, participant: str) -> bool:
        """True when ``participant`` is one of the channel's."""
        return participant in self.state.members[channel_id]

    def _now_ns(self) -> int:
        return self._clock.now_ns()

    def _now_ms(self) -> int:
        return self._clock.now_ns() // NS_PER_MS

    def _now_s(self) -> int:
        return self._clock.now_ns() // NS_PER_S
