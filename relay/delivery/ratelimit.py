"""How fast an agent may send: a token bucket each.

    burst   what it may send at once: the bucket is that large, and full at first
    rate    tokens that come back a second

What is over waits in the outbox; nothing is dropped. An episode begins when an agent finds its
bucket empty, and is over when nothing of it was held back for a minute: it is told once an
episode. Buckets are in memory alone: after a start they are full. Source: relay-file-system.txt,
phase 4.
"""

from __future__ import annotations

from relay.base.clock import NS_PER_S, Clock

# An agent over its limit is looked at this often: a sync of the journal for each single message
# would cost more than the messages do.
SLICES_PER_S = 20
CALM_NS = 60 * NS_PER_S  # nothing held back for so long: the episode is over


class _Bucket:
    __slots__ = ("at_ns", "held_ns", "tokens")

    def __init__(self, tokens: float, at_ns: int) -> None:
        self.tokens = tokens
        self.at_ns = at_ns  # monotonic, when ``tokens`` was so
        self.held_ns: int | None = None  # when something was last held back; None: no episode


class RateLimit:
    """The buckets of every agent that sent lately. Owned by the loop."""

    def __init__(self, rate_per_s: int, burst: int, clock: Clock) -> None:
        self.rate_per_s = rate_per_s
        self._burst = burst
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._begun: list[str] = []
        self.limited_total = 0  # episodes, since the relay started

    def allowance(self, agent: str) -> int:
        """How many messages it may send now."""
        bucket = self._buckets.get(agent)
        return self._burst if bucket is None else int(self._fill(bucket).tokens)

    def spend(self, agent: str, messages: int) -> None:
        """It sent so many, which it was allowed."""
        bucket = self._buckets.get(agent)
        if bucket is None:
            bucket = self._buckets[agent] = _Bucket(self._burst, self._clock.monotonic_ns())
        bucket.tokens -= messages

    def wait_ns(self, agent: str) -> int:
        """It may send nothing now, and wants to: how long until a few messages may go.

        Begins an episode unless it is in one.
        """
        bucket = self._buckets[agent]
        if bucket.held_ns is None:
            self.limited_total += 1
            self._begun.append(agent)
        bucket.held_ns = bucket.at_ns
        wanted = min(max(1, self.rate_per_s // SLICES_PER_S), self._burst)
        return max(1, int((wanted - bucket.tokens) * NS_PER_S / self.rate_per_s) + 1)

    def pop_new_alerts(self) -> list[str]:
        """Agents whose episode began since the last time: to be told."""
        begun, self._begun = self._begun, []
        return begun

    @property
    def limited(self) -> list[str]:
        """Agents that are in an episode now."""
        return sorted(
            name for name, one in self._buckets.items() if self._fill(one).held_ns is not None
        )

    def sweep(self) -> None:
        """Forget the buckets that are full again: who sends nothing costs nothing."""
        for name, one in list(self._buckets.items()):
            if self._fill(one).tokens >= self._burst and one.held_ns is None:
                del self._buckets[name]

    def _fill(self, bucket: _Bucket) -> _Bucket:
        now = self._clock.monotonic_ns()
        came = (now - bucket.at_ns) * self.rate_per_s / NS_PER_S
        bucket.tokens = min(self._burst, bucket.tokens + came)
        bucket.at_ns = now
        if bucket.held_ns is not None and now >= bucket.held_ns + CALM_NS:
            bucket.held_ns = None
        return bucket
