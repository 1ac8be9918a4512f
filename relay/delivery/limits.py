"""Limits on senders: rate and reply loops. Excess waits in the outbox; none is lost.

A rate is a token bucket for each agent: ``burst`` is its size, ``rate`` the tokens added a second.
An episode begins when an agent finds its bucket empty, and ends after a minute without throttling;
it is reported once. Buckets are in memory alone: after a start they are full.

The depth of a message is the length of its RE chain within the last minute. Beyond
``limits.reply_depth`` it waits until enough of the chain is older; the lead and the operator are
notified once a loop.
"""

from __future__ import annotations

from typing import NamedTuple

from relay.base.clock import NS_PER_S, Clock
from relay.base.incidents import Incident, IncidentKind
from relay.delivery.values import Inbound, Part, Resources

# An agent over its limit is looked at this often: a sync of the journal for each single message
# would cost more than the messages do.
SLICES_PER_S = 20
CALM_NS = 60 * NS_PER_S  # nothing held for so long: the episode has ended


class Alert(NamedTuple):
    """A limit that was exceeded: to be reported, once."""

    incident: Incident
    key: str  # of the notice
    at_ns: int  # Unix nanoseconds


class _Bucket:
    __slots__ = ("at_ns", "held_ns", "tokens")

    def __init__(self, tokens: float, at_ns: int) -> None:
        self.tokens = tokens
        self.at_ns = at_ns  # monotonic, when ``tokens`` was so
        self.held_ns: int | None = None  # when something was last held; None: no episode


class RateLimit:
    """The token buckets of active agents. Owned by the loop."""

    def __init__(self, rate_per_s: int, burst: int, clock: Clock) -> None:
        self.rate_per_s = rate_per_s
        self._burst = burst
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self.alerts: list[Alert] = []  # of episodes, to be reported

    def allowance(self, agent: str) -> int:
        """Number of messages the agent may send now."""
        bucket = self._buckets.get(agent)
        return self._burst if bucket is None else int(self._fill(bucket).tokens)

    def spend(self, agent: str, messages: int) -> None:
        """Take tokens for messages that were sent."""
        bucket = self._buckets.get(agent)
        if bucket is None:
            bucket = self._buckets[agent] = _Bucket(self._burst, self._clock.monotonic_ns())
        bucket.tokens -= messages

    def wait_ns(self, agent: str) -> int:
        """Time until an agent with an empty bucket may send a few messages; begins an episode."""
        bucket = self._buckets[agent]
        if bucket.held_ns is None:
            self.alerts.append(self._alert(agent))
        bucket.held_ns = bucket.at_ns
        wanted = min(max(1, self.rate_per_s // SLICES_PER_S), self._burst)
        return max(1, int((wanted - bucket.tokens) * NS_PER_S / self.rate_per_s) + 1)

    def _alert(self, agent: str) -> Alert:
        detail = (
            f"{agent} sends faster than {self.rate_per_s} messages a second "
            "(security.rate_per_s): excess messages wait in the outbox, nothing is lost"
        )
        kind, now = IncidentKind.RATE_LIMITED, self._clock.now_ns()
        return Alert(Incident(kind, agent, f"agents/{agent}/outbox", detail), f"{kind} {now}", now)

    def sweep(self) -> None:
        """Drop full buckets, so that idle agents cost nothing."""
        for name, bucket in list(self._buckets.items()):
            if self._fill(bucket).tokens >= self._burst and bucket.held_ns is None:
                del self._buckets[name]

    def _fill(self, bucket: _Bucket) -> _Bucket:
        now = self._clock.monotonic_ns()
        came = (now - bucket.at_ns) * self.rate_per_s / NS_PER_S
        bucket.tokens = min(self._burst, bucket.tokens + came)
        bucket.at_ns = now
        if bucket.held_ns is not None and now >= bucket.held_ns + CALM_NS:
            bucket.held_ns = None
        return bucket


LOOP_WINDOW_NS = 60 * NS_PER_S
LOOP_CALM_NS = 5 * LOOP_WINDOW_NS  # nothing of a loop was held for so long: it has ended


class ReplyLoops(Part):
    """Detects reply loops."""

    def __init__(self, given: Resources) -> None:
        super().__init__(given)
        self._held_ns: dict[frozenset[str], int] = {}  # agents of a loop -> last held (monotonic)
        self.alerts: list[Alert] = []  # to be reported

    def check(self, inbound: Inbound) -> str:
        """The reason to hold a message; empty if there is none. May begin a loop."""
        answers = inbound.message.headers.get("RE") if inbound.message else None
        if inbound.refusal:
            return ""
        agent, message_id = inbound.file.agent, inbound.file.message_id
        now_ns, most = self._clock.now_ns(), self._config.limits.reply_depth
        agents = {agent}
        for _ in range(most + 1):
            stored = self._store.messages.find_by_relay_id(answers) if answers else None
            if stored is None:
                return ""
            age_ns = now_ns - stored.created_ns
            if not 0 <= age_ns <= LOOP_WINDOW_NS:  # or the clock was set back
                return ""
            agents.add(stored.sender)
            answers = str((stored.metadata or {}).get("re") or "")
        names = ", ".join(sorted(agents))
        why = f"more than {most} answers of {names} along RE within a minute"
        if self._is_new(frozenset(agents)):
            what = f"{message_id} waits in the outbox of {agent}"
            detail = f"a loop of answers: {why} (limits.reply_depth); {what}, nothing is lost"
            path = f"agents/{agent}/outbox"
            incident = Incident(IncidentKind.REPLY_LOOP, agent, path, detail)
            self.alerts.append(Alert(incident, f"loop {message_id}", inbound.discovered_at))
        return f"{why} (limits.reply_depth): it waits until they are fewer"

    def _is_new(self, agents: frozenset[str]) -> bool:
        """True unless a message between these agents was held lately."""
        now = self._clock.monotonic_ns()
        last = self._held_ns.get(agents)
        self._held_ns = {pair: at for pair, at in self._held_ns.items() if now - at < LOOP_CALM_NS}
        self._held_ns[agents] = now
        return last is None or now - last >= LOOP_CALM_NS
