"""Counters of the loop: totals, time per stage, and the current stage.

Plain numbers that one thread writes and any thread reads. They outlive a session and end with the
process, as collectors of metrics expect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from relay.base.clock import NS_PER_S, Clock

# From a rename (tens of microseconds) to a noticeable delay (a minute).
SECONDS = (
    *(0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
FILES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

# Stages outside of a batch: not timed, and never counted as a stall.
START = "start"  # opening and recovering, or waiting to begin again
WAIT = "wait"  # for something to happen
STOP = "stop"
NEVER_STUCK = (START, WAIT, STOP)

STAGES = {
    "detect": "watcher events, agent directories and scans",
    "read": "open, read and parse files",
    "claim": "add claimed rows to the ledger",
    "plan": "validate, plan and store messages",
    "stage": "write files into inbox/.pending",
    "commit": "append events to the journal, one sync",
    "deliver": "rename files into inboxes",
    "complete": "archive originals, record the batch in the ledger",
    "retry": "reads, reports, held and overdue deliveries, reminders",
    "maintain": "archive rolling, checkpoints, journal segments",
}


class Buckets(NamedTuple):
    """A snapshot of a histogram."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # of each bucket; the last is above every bound
    total: float  # the sum of all values

    @property
    def number(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The bound below which ``share`` of the values lie; None where there are none, or the
        last bound does not reach so far."""
        wanted, seen = share * self.number, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if count and seen >= wanted:
                return bound
        return None


class Histogram:
    """Values counted by size. Written by one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a clock that was set back counts as no time."""
        if value < 0.0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def read(self) -> Buckets:
        """Counts so far."""
        return Buckets(self.bounds, tuple(self.counts), self.total)


class Metrics:
    """All counters. Written by the loop's thread, read from any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at: tuple[str, int] = (START, clock.monotonic_ns())  # the step, since when
        self.accepted = 0  # messages
        self.refused = 0
        self.postponed = 0  # left in the outbox for a passing reason
        self.written = 0  # deliveries by outcome
        self.again = 0  # of these: another attempt
        self.held = 0
        self.bounced = 0
        self.expired = 0
        self.dead = 0
        self.read = 0
        self.acked = 0
        self.overflows = 0  # of inotify's queue
        self.stages = {name: Histogram(SECONDS) for name in STAGES}
        self.delivery_s = Histogram(SECONDS)  # from the sender's last write to the inboxes
        self.commit_s = Histogram(SECONDS)  # the journal's write and sync alone
        self.batch_files = Histogram(FILES)

    def begin(self, step: str) -> int:
        """Begin a stage; the previous one has ended. Returns the time (monotonic ns)."""
        now = self._clock.monotonic_ns()
        before, since = self.at
        times = self.stages.get(before)
        if times is not None:  # as ``observe``: this is done a dozen times a turn
            seconds = (now - since) / NS_PER_S
            times.counts[bisect_left(times.bounds, seconds)] += 1
            times.total += seconds
        self.at = (step, now)
        return now

    def stuck_s(self) -> tuple[str, float]:
        """The step that the loop is in, and for how long (seconds); 0 where it may be long."""
        step, since = self.at
        if step in NEVER_STUCK:
            return step, 0.0
        return step, (self._clock.monotonic_ns() - since) / NS_PER_S
