"""What of the channels with ``max_pending`` is underway, and what is held back.

Part of the state, and made from it: the same events give the same. A message is held when it is
accepted, and no more once a delivery of it has moved. Source: message-engine.txt, "Channel
Pressure".
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from relay.acomm.model import Message, Priority


class Pending:
    """Message ids: pending ones by channel, held ones by channel and priority."""

    def __init__(self) -> None:
        self.pending: dict[int, dict[int, None]] = {}  # only of channels that have a limit
        self.held: dict[int, None] = {}  # every held message, in the order of acceptance
        self._waiting: dict[int, tuple[dict[int, None], ...]] = {}  # channel -> by priority

    def hold(self, message: Message) -> None:
        """Keep a message back, behind those of its priority."""
        self.held[message.id] = None
        waiting = self._waiting.setdefault(message.channel_id, tuple({} for _ in Priority))
        waiting[message.priority][message.id] = None

    def release(self, message: Message) -> None:
        """It is held no more."""
        if message.id in self.held:
            del self.held[message.id]
            del self._waiting[message.channel_id][message.priority][message.id]

    def holds_any(self, channel_id: int) -> bool:
        """True when a channel holds something back."""
        return any(self._waiting.get(channel_id, ()))

    def holding(self) -> list[int]:
        """The channels that hold something back, by id."""
        return sorted(c for c, waiting in self._waiting.items() if any(waiting))

    def in_order(self, channel_id: int, heeds_priority: bool) -> Iterator[int]:
        """What a channel holds, in the order in which it goes on."""
        waiting = self._waiting[channel_id]
        if heeds_priority:
            for one in waiting:
                yield from one
        else:
            yield from merge(*waiting)
