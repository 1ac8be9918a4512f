"""The fake that there is: a clock that stands still."""

from __future__ import annotations

import time

from relay.clock import NS_PER_S, Clock


class FakeClock(Clock):
    """Stands still until told otherwise; begins at the real time, so that mtimes fit."""

    def __init__(self, now_ns: int | None = None) -> None:
        self._now_ns = time.time_ns() if now_ns is None else now_ns
        self._monotonic_ns = 1_000 * NS_PER_S

    def now_ns(self) -> int:
        """Unix time, nanoseconds."""
        return self._now_ns

    def monotonic_ns(self) -> int:
        """Nanoseconds that only grow."""
        return self._monotonic_ns

    def advance(self, seconds: float) -> None:
        """Both clocks go on."""
        self._now_ns += int(seconds * NS_PER_S)
        self._monotonic_ns += int(seconds * NS_PER_S)

    def jump(self, seconds: float) -> None:
        """The wall clock alone is set, as an administrator would."""
        self._now_ns += int(seconds * NS_PER_S)
