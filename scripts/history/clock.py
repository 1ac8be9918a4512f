"""A clock that follows the history."""

from __future__ import annotations

from relay.base.clock import Clock


class HistoryClock(Clock):
    """Clock that is set explicitly, and only forward."""

    def __init__(self, at_ns: int) -> None:
        self._at_ns = at_ns

    def now_ns(self) -> int:
        """Current time of the history."""
        return self._at_ns

    def monotonic_ns(self) -> int:
        """The same, because the clock never jumps."""
        return self._at_ns

    def go_to(self, at_ns: int) -> None:
        """Set the time; earlier times are ignored."""
        self._at_ns = max(self._at_ns, at_ns)
