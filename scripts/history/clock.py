"""A clock that stands where the history is."""

from __future__ import annotations

from relay.base.clock import Clock


class HistoryClock(Clock):
    """Goes where it is told to, and never back."""

    def __init__(self, at_ns: int) -> None:
        self._at_ns = at_ns

    def now_ns(self) -> int:
        """Where the history is."""
        return self._at_ns

    def monotonic_ns(self) -> int:
        """The same: nothing jumps in it."""
        return self._at_ns

    def go_to(self, at_ns: int) -> None:
        """Later, or as it is."""
        self._at_ns = max(self._at_ns, at_ns)
