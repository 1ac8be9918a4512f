"""What every part of the CommStore stands on: the state, the clock, and ``apply``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec

from relay.acomm.engine_state import Snapshot
from relay.acomm.model import Channel, ChannelSettings
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import ChannelNotFound
from relay.engine import events
from relay.engine.archives import Archives
from relay.engine.limits import DEFAULT_LIMITS, Limits
from relay.engine.state import State

_warn = logging.getLogger("relay.engine").warning
_DEFAULT = ChannelSettings()


class StoreBase:
    """A state, and the time. Not thread-safe: one owner."""

    def __init__(
        self, clock: Clock, state: State | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._clock = clock
        self.state = state or State(self._now_s())
        self.ack_timeout_s = 60  # where neither message nor channel says otherwise
        self.command_timeout_s = 1800  # the same for the answer to a command, where one is owed
        # False: its owner delivers by other means, and says so; see ``DueCommands``.
        self.delivers_itself = True
        self.give_up_after_s = 86_400  # a day: what is not acknowledged by then is a dead letter
        self.archives: Archives | None = None  # what was rolled out is found there
        self.identities: dict[
            str, str
        ] = {}  # participant -> its key's id, where its owner knows it
        self._copies: list[tuple[int, str]] = []
        # For a journal: its owner takes them and appends them. None: nobody asks for them.
        self.fresh_events: list[events.Event] | None = None
        self.limits = limits
        self.warn: Callable[[str], object] = _warn
        self.file_bytes = 0  # of its file, when that was last written
        self.file_sequence = 0  # the events that it covers
        self._sent_in_file = 0  # ``state.bytes_sent`` as that file has it
        self._patience: dict[int, int] = {}  # channel -> looks at its retention to be skipped
        self._next_relief = 0  # the sequence before which looking for final messages is vain
        self._roomy_until = (
            0  # ``state.bytes_sent`` below which no limit but that of memory is near
        )
        self._warned = False  # of the file's size
        self._slow: set[int] = set()  # subscriptions whose filter was found to be slow

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

    @property
    def bytes_sent(self) -> int:
        """About how many bytes of records were sent since the store was opened."""
        return self.state.bytes_sent

    def take_copies(self) -> list[tuple[int, str]]:
        """(message id, recipient) of sticky copies for an owner that delivers; each once."""
        copies, self._copies = self._copies, []
        return copies

    def note_file(self, size: int, sequence: int, bytes_sent: int) -> None:
        """Its file was written: its size, and what it covers."""
        self.file_bytes = size
        self.file_sequence = sequence
        self._sent_in_file = bytes_sent
        self._roomy_until = 0

    def settle(self, channel_id: int) -> None:
        """Write what a command did in a channel that is flushed at once. Errors: as ``flush``."""
        if self.state.settings and self.get_settings(channel_id).flush == "immediate":
            self.flush()

    def as_one(self, channel_id: int) -> AbstractContextManager[None]:
        """A block whose events go into the file together, where the store writes one."""
        return nullcontext()

    def flush(self) -> None:
        """Write everything now, where the store writes a file of its own."""

    def apply(self, event: events.Event) -> None:
        """Change the store as the event says, and keep it for the journal where there is one."""
        self.state.apply(event)
        if self.fresh_events is not None:
            self.fresh_events.append(event)

    def note(self, event: events.Event) -> None:
        """Put on record what the store itself has no part in."""
        self.apply(event)

    def snapshot(self) -> Snapshot:
        """Everything in the store as immutable values, for any thread to read."""
        return self.state.snapshot()

    def get_channel(self, channel_id: int) -> Channel:
        """The channel as it is now, its message count included. Errors: ChannelNotFound."""
        channel = self.state.channels.get(channel_id) if type(channel_id) is int else None
        if channel is None:
            raise ChannelNotFound(f"there is no channel {channel_id!r}")
        # the state counts beside its channels: sending need not make a new one each time
        return msgspec.structs.replace(channel, message_count=self.state.counts[channel_id])

    def get_settings(self, channel_id: int) -> ChannelSettings:
        """What the channel was told beside its config. Errors: ChannelNotFound."""
        return self.state.settings.get(self.get_channel(channel_id).id, _DEFAULT)

    def takes_part(self, channel_id: int, participant: str) -> bool:
        """True when ``participant`` is one of the channel's."""
        return isinstance(participant, str) and participant in self.state.members.get(
            channel_id, ()
        )

    def now_ns(self) -> int:
        """The time by the store's clock, Unix nanoseconds."""
        return self._clock.now_ns()

    def _now_ns(self) -> int:
        return self._clock.now_ns()

    def _now_ms(self) -> int:
        return self._clock.now_ns() // NS_PER_MS

    def _now_s(self) -> int:
        return self._clock.now_ns() // NS_PER_S
