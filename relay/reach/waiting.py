"""The messages that wait in an inbox, and when to ring for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

NS = 10**9
PAUSES_S = (5, 10, 20, 40, 80, 120)  # between rings that were not answered
URGENT = ("0", "1")  # PRIORITY
URGENT_PAUSE_S = 1  # many urgent messages are few rings, too
HEADER_BYTES = 8192


class Pace:
    """When to ring: once for all that waits, then more and more slowly. Times are Unix ns."""

    def __init__(self) -> None:
        self.rung: frozenset[str] = frozenset()  # ids that waited at the last ring
        self.at = 0  # of that ring; 0: nothing waited since
        self.count = 0  # rings that were not answered
        self.took = 0  # ns until it was over; pauses begin there
        self.again_s = 0.0  # least pause after it

    def due(self, waiting: Mapping[str, bool], answered_at: int, now: int) -> int | None:
        """The time of the next ring; None if nothing waits.

        waiting: message id -> is it urgent. answered_at: the agent's last sign of life.
        """
        if not waiting:
            self.__init__()  # type: ignore[misc]
            return None
        if self.at > now:  # the clock was set back
            self.at = now
        is_answered, fresh = answered_at > self.at, waiting.keys() - self.rung
        if not self.at or (fresh and is_answered):
            return now
        over = self.at + self.took
        earliest = over + round(self.again_s * NS)
        if any(waiting[one] for one in fresh):
            return max(now, earliest, over + URGENT_PAUSE_S * NS)
        return max(over + PAUSES_S[min(self.count, len(PAUSES_S)) - 1] * NS, earliest)

    def rang(self, waiting: Iterable[str], answered_at: int, now: int, again_s: float) -> None:
        """Remember a ring."""
        waiting = frozenset(waiting)
        is_new = answered_at > self.at and bool(waiting - self.rung)
        self.count = 1 if is_new or not self.at else self.count + 1
        self.rung, self.at, self.took, self.again_s = waiting, now, 0, again_s


class Inbox:
    """The messages in an agent's inbox; their priorities are read once."""

    def __init__(self, root: str, agent: str) -> None:
        self.path = os.path.join(root, "agents", agent, "inbox")
        self._urgent: dict[str, bool] = {}

    def messages(self) -> dict[str, bool]:
        """Message id -> is it urgent. Empty without an inbox."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return {}
        ids = [name[:-4] for name in names if name.endswith(".msg") and name[0] != "."]
        self._urgent = {one: self._is_urgent(one) for one in ids}
        return dict(self._urgent)

    def _is_urgent(self, message_id: str) -> bool:
        known = self._urgent.get(message_id)
        if known is not None:
            return known
        try:
            path = os.path.join(self.path, message_id + ".msg")
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                header = file.read(HEADER_BYTES).replace(b"\r\n", b"\n").partition(b"\n\n")[0]
        except OSError:
            return False
        for line in header.split(b"\n"):
            name, _, value = line.partition(b":")
            if name.strip().upper() == b"PRIORITY":
                return value.strip().decode(errors="replace") in URGENT
        return False
