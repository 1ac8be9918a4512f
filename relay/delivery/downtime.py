"""Downtime: time in which the relay did not run, the machine slept, or the clock was set.

Deadlines are clock times but count running time, so each is moved by the time lost: at a start, and
when the clock advanced more than the monotonic clock, which stops while a machine sleeps. A clock
that was set back moves deadlines nearer again. Only a TTL is not moved.
"""

from __future__ import annotations

import contextlib

from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import LedgerError
from relay.delivery.values import MOST_PAUSE_S, Part, Resources
from relay.engine.engine import Engine
from relay.ledger.deliveries import ObligationFacts

LEAST_NS = 5 * NS_PER_S  # less is a busy machine, or a clock that is being adjusted


class Deadlines(Part):
    """The deadlines of store and ledger."""

    def __init__(self, given: Resources) -> None:
        super().__init__(given)
        self._last: tuple[int, int] | None = None  # both clocks, when they were last looked at

    def check(self, monotonic_ns: int) -> None:
        """Detect downtime while running: compare both clocks with their last values."""
        now = self._clock.now_ns(), monotonic_ns
        last, self._last = self._last, now
        if last is not None:
            lost_ns = (now[0] - last[0]) - (now[1] - last[1])
            if abs(lost_ns) >= LEAST_NS:
                self._log(_describe(lost_ns), action="clock_skew", level="warning")
                self._move(lost_ns)

    def extend(self) -> None:
        """Move them at a start by the time no relay ran, as far as ledger and store tell."""
        now, state = self._clock.now_ns(), self._store.state
        lost, seen_at = state.downtimes, self._ledger.alive_at() or 0
        if state.sequence:  # of a store without an event, made just now, it is the present
            # A restored ledger is older than the last event.
            seen_at = max(seen_at, state.modified_at * NS_PER_S)
        if lost and lost[-1].at * NS_PER_S > seen_at:  # a crash came before the ledger update
            seen_at = lost[-1].at * NS_PER_S
        if seen_at and abs(now - seen_at) >= LEAST_NS:
            self._move(now - seen_at)

    def record_alive(self) -> None:
        """Record that the relay is running, for the next start.

        A failed write is ignored: deadlines would only be later by it.
        """
        with contextlib.suppress(LedgerError):
            with self._ledger.transaction():
                self._set_alive(self._clock.now_ns())

    def _move(self, lost_ns: int) -> None:
        """Move all of them, durably first: after a crash the next start does not repeat it."""
        ledger, now = self._ledger, self._clock.now_ns()
        self._store.deliveries.add_downtime(lost_ns // NS_PER_MS)
        self._events.commit()
        with ledger.transaction():
            ledger.deliveries.set_obligations(open_obligations(self._store))
            ledger.deliveries.cap_due_times(now + MOST_PAUSE_S * NS_PER_S)
            self._set_alive(now)

    def _set_alive(self, now: int) -> None:
        """Record the time from which the next start measures the downtime."""
        self._ledger.set_state("alive_at", str(now), now)


def open_obligations(store: Engine) -> list[ObligationFacts]:
    """Every owed answer in the store."""
    return [
        ObligationFacts(
            message.relay_id,
            recipient,
            "open",
            owed.due_ms * NS_PER_MS or None,
            owed.reminders,
            owed.said or None,
        )
        for number, known in store.state.owed.items()
        if (message := store.messages.get(number)) is not None and message.relay_id is not None
        for recipient, owed in known.items()
    ]


def _describe(lost_ns: int) -> str:
    seconds = abs(lost_ns) / NS_PER_S
    if lost_ns < 0:
        return f"The clock was set back by {seconds:.1f} s"
    return f"The clock is {seconds:.1f} s ahead: it was set, or the machine slept"
