"""The core that the parts of an engine share: its state, the one way to change it, time, limits.

A part decides what a command does; it changes the store only by ``Core.apply``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from relay.acomm.model import Message
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.engine import events, transitions
from relay.engine.state import State
from relay.engine.validation import DEFAULT_LIMITS, Limits

Warn = Callable[[str], object]
log_warning = logging.getLogger("relay.engine").warning


class DeliverySettings(NamedTuple):
    """The way messages reach recipients, and the times for acknowledgments and answers.

    ``by_files``: the owner writes a message to its recipient's inbox, and reports that. A written
    file no longer needs the store, and the recipient of a plain command or query owes an answer.
    Else recipients receive their messages from queues.
    """

    by_files: bool = False
    ack_timeout_s: int = 60  # unless set by the message or the channel
    command_timeout_s: int = 1800  # the same for the answer owed to a command
    dead_letter_after_s: int = 86_400  # what is not acknowledged within a day is a dead letter


IN_QUEUES = DeliverySettings()


class Core:
    """A state, the time, and limits. Not thread-safe: one owner."""

    def __init__(
        self,
        clock: Clock,
        state: State | None = None,
        limits: Limits = DEFAULT_LIMITS,
        settings: DeliverySettings = IN_QUEUES,
        warn: Warn | None = None,
        door: Callable[[events.Event], None] | None = None,
        *,
        keeps_events: bool = False,
    ) -> None:
        self.clock = clock
        self.state = state or State(self.now_s())
        self.limits = limits
        self.settings = settings
        self.warn = warn or log_warning
        self._door = door
        # events for the owner's journal; None without one
        self.fresh_events: list[events.Event] | None = [] if keeps_events else None

    def apply(self, event: events.Event) -> None:
        """Change the store as the event says, and keep the event for the journal, if any."""
        if self._door is None:
            transitions.apply(self.state, event)
        else:
            self._door(event)
        if self.fresh_events is not None:
            self.fresh_events.append(event)

    def now_ns(self) -> int:
        """The time by the owner's clock, Unix nanoseconds."""
        return self.clock.now_ns()

    def now_ms(self) -> int:
        """The same in milliseconds."""
        return self.clock.now_ns() // NS_PER_MS

    def now_s(self) -> int:
        """The same in seconds."""
        return self.clock.now_ns() // NS_PER_S

    def is_expired(self, message: Message) -> bool:
        """True when the TTL of the message has passed, counted from when it was accepted."""
        ttl = message.ttl
        return ttl is not None and self.now_ns() >= (message.created_at + ttl) * NS_PER_S
