"""Conversations of agents over the hours of working days.

A conversation begins with a post; what it causes (an ack, a response, the next word of a thread)
is a post of its own, due some time after its recipient has read. Pure: the seed decides all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from relay.base.clock import NS_PER_S
from relay.base.message import Kind
from relay.base.names import EVERYONE, OPERATOR
from scripts.history.text import Text

HOUR_NS = 3600 * NS_PER_S
DAY_NS = 24 * HOUR_NS
QUIET_NS = 40 * 60 * NS_PER_S  # nothing begins that late: every answer comes before the end
# Share of each hour, UTC; on weekends a quarter of it.
HOURS = (1, 1, 1, 1, 1, 2, 4, 8, 14, 18, 20, 19, 14, 17, 20, 19, 16, 12, 8, 5, 4, 3, 2, 1)
WEEKEND = 0.25
PEERS = 6  # that an agent talks to, beside its lead
TEAM = 5
THREAD_MOST = 6
ATTACHED = 0.005  # of direct messages
LEAD = "lead"
ROLES = ("planner", "builder", "tester", "reviewer", "writer", "scout", "fixer", "runner")

# How often a conversation is of a kind, and how many messages it has at the most:
# a fifth of all messages are commands, and as many their acks.
SHARES = (("text", 36, 1), ("command", 32, 2), ("query", 9, 2), ("team", 9, 1), ("topic", 3, 1))
THREADS = 6
BROADCASTS = 100  # one in so many, or fewer where there are many agents


class Follow(NamedTuple):
    """Reaction of a recipient after reading."""

    what: str  # "ack", "response", "thread"
    left: int = 1  # posts that are still to come


class Post(NamedTuple):
    """A message to be sent."""

    at_ns: int  # when the relay finds it
    sender: str
    to: str  # a name, *, #channel
    kind: Kind
    body: bytes
    headers: dict[str, str] = {}  # noqa: RUF012 - never altered
    follow: Follow | None = None
    attach: bool = False
    fault: str = ""  # what is done wrong with it


class Cast(NamedTuple):
    """Agents and teams of a history."""

    agents: tuple[str, ...]  # without the operator
    peers: dict[str, tuple[str, ...]]
    teams: dict[str, tuple[str, ...]]  # group channels, by name
    subscribers: dict[str, str]  # of the channel TOPICS: agent -> pattern

    @property
    def everyone(self) -> tuple[str, ...]:
        """Recipients of a broadcast, in the relay's order."""
        return tuple(sorted((*self.agents, OPERATOR)))


TOPICS = "builds"  # the PubSub channel
BRANCHES = ("build.main", "build.release", "build.main.flaky", "deploy.staging")


def make_cast(rng: random.Random, count: int) -> Cast:
    """Create so many agents, their teams, and partners."""
    names = [LEAD]
    while len(names) < count:
        round_, role = divmod(len(names) - 1, len(ROLES))
        names.append(f"{ROLES[role]}-{round_ + 1}")
    peers = {}
    for name in names:
        others = [other for other in names if other not in (name, LEAD)]
        chosen = rng.sample(others, min(PEERS, len(others)))
        peers[name] = tuple(chosen if name == LEAD else [LEAD, *chosen])
    teams = {}
    for number in range(max(1, count // TEAM)):
        members = rng.sample(names, min(TEAM, count))
        teams[f"team/{number + 1}"] = tuple(sorted(members))
    patterns = ("build.#", "build.main", "*.release", "deploy.*")
    chosen = rng.sample(names, max(1, count // 3))
    subscribers = {name: patterns[place % 4] for place, name in enumerate(sorted(chosen))}
    return Cast(tuple(names), peers, teams, subscribers)


class Talk:
    """Conversations of a history, hour by hour, with ``messages`` posts in total."""

    def __init__(
        self, rng: random.Random, cast: Cast, messages: int, begin_ns: int, end_ns: int
    ) -> None:
        self._rng = rng
        self._cast = cast
        self._text = Text(rng)
        self._messages = messages
        self._begin_ns = begin_ns
        self._end_ns = end_ns - QUIET_NS
        kinds = [*SHARES, ("thread", THREADS, THREAD_MOST)]
        self._kinds = {name: most for name, _, most in kinds} | {"broadcast": 1}
        self._weights: list[float] = [weight for _, weight, _ in kinds]
        self._weights.append(sum(self._weights) / max(BROADCASTS, 2 * len(cast.agents)))

    def hours(self) -> Iterator[tuple[int, list[Post]]]:
        """(End of the hour, its first posts in order of time)."""
        weights = list(self._hour_weights())
        total = sum(weight for _, _, weight in weights)
        passed, planned = 0.0, 0
        for begin_ns, end_ns, weight in weights:
            passed += weight
            due = round(self._messages * passed / total)
            posts: list[Post] = []
            while planned < due:
                post, count = self._begin(
                    self._rng.randrange(begin_ns, end_ns), self._messages - planned
                )
                posts.append(post)
                planned += count
            yield end_ns, sorted(posts, key=lambda post: post.at_ns)

    def _hour_weights(self) -> Iterator[tuple[int, int, float]]:
        at_ns = self._begin_ns
        while at_ns < self._end_ns:
            end_ns = min(at_ns - at_ns % HOUR_NS + HOUR_NS, self._end_ns)
            day = at_ns // DAY_NS
            share = HOURS[at_ns // HOUR_NS % 24] * (WEEKEND if (day + 3) % 7 >= 5 else 1)
            yield at_ns, end_ns, share * (end_ns - at_ns) / HOUR_NS
            at_ns = end_ns

    def _begin(self, at_ns: int, left: int) -> tuple[Post, int]:
        """First post of a conversation, and its number of posts."""
        rng, cast = self._rng, self._cast
        name = rng.choices(list(self._kinds), self._weights)[0]
        count = rng.randint(2, THREAD_MOST) if name == "thread" else self._kinds[name]
        if count > left:
            name, count = "text", 1
        sender = rng.choice(cast.agents)
        to = rng.choice(cast.peers[sender])
        body = self._text.body()
        post = Post(at_ns, sender, to, Kind.MESSAGE, body)
        if name == "command":
            return post._replace(kind=Kind.COMMAND, follow=Follow("ack")), count
        if name == "query":
            return post._replace(kind=Kind.QUERY, follow=Follow("response")), count
        if name == "thread":
            headers = {"THREAD": f"task-{rng.getrandbits(32):08x}"}
            return post._replace(headers=headers, follow=Follow("thread", count - 1)), count
        if name == "broadcast":
            return post._replace(to=EVERYONE), count
        if name == "team":
            team = rng.choice([t for t, m in cast.teams.items() if sender in m] or [""])
            return post._replace(to=f"#{team}" if team else to), count
        if name == "topic":
            headers = {"TOPIC": rng.choice(BRANCHES)}
            return post._replace(to=f"#{TOPICS}", headers=headers), count
        return post._replace(attach=rng.random() < ATTACHED), count

    def next_post(self, post: Post, message_id: str, reader: str, read_ns: int) -> Post | None:
        """Message that ``reader`` writes after reading ``post``, or None."""
        follow = post.follow
        if follow is None:
            return None
        rng = self._rng
        if follow.what == "ack":
            body = rng.choice((b"completed", b"completed\n", self._text.body("completed: ")))
            at_ns = read_ns + latency_ns(rng, 3, 0.7, 25)
            return Post(at_ns, reader, post.sender, Kind.ACK, body, {"RE": message_id})
        if follow.what == "response":
            at_ns = read_ns + latency_ns(rng, 6, 0.7, 25)
            headers = {"RE": message_id}
            return Post(at_ns, reader, post.sender, Kind.RESPONSE, self._text.body(), headers)
        rest = Follow("thread", follow.left - 1) if follow.left > 1 else None
        at_ns = read_ns + latency_ns(rng, 15, 0.6, 120)
        return Post(at_ns, reader, post.sender, Kind.MESSAGE, self._text.body(), post.headers, rest)


def latency_ns(rng: random.Random, median_s: float, spread: float, most_s: float) -> int:
    """Log-normal duration: half are below the median, none above ``most_s``."""
    return int(min(rng.lognormvariate(0, spread) * median_s, most_s) * NS_PER_S)
