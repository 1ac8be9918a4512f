"""The intake queue: files to be read, sorted by name for each agent, with agents taking turns.

    ready      can be read now; a batch takes an equal share of each agent whose turn it is
    throttled  an agent over its rate: its files stay until tokens come
    settling   an agent that is still writing a file: none of its other files overtakes that
    deferred   a file that is still being written, or is retried

A large backlog of one agent delays no other: agents without a backlog get half of each batch. At
most ``MOST_FILES`` of an agent are remembered; its outbox is listed again as soon as there is room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from relay.base.clock import Clock
from relay.delivery.limits import RateLimit

FileKey = tuple[str, str]  # agent, file name
Item = TypeVar("Item")


class Hint(msgspec.Struct, frozen=True, gc=False):
    """A file to be read, and the results of earlier attempts."""

    agent: str
    file_name: str
    renamed: bool
    counted: bool = False  # it counted for its agent's rate before
    due_ns: int = 0  # monotonic; 0: now
    seen: tuple[int, int] | None = None  # size and mtime when first seen so
    seen_at_ns: int = 0  # monotonic
    number: int = 0  # in the order of discovery
    found_ns: int = 0  # monotonic: when it was first seen
    settling: bool = False  # of a look: it is still being written


_BY_DISCOVERY = attrgetter("number")
# Each agent in a batch costs the opening of its directories, so there are not all too many of them
# in one: with a thousand backlogs, 16 files of 16 and not one of 256.
AGENTS_PER_BATCH = 16
MOST_FILES = 100_000  # of an agent: some 20 MB of memory


class IntakeQueue:
    """The hints of every agent. Owned by the loop."""

    def __init__(self, limit: RateLimit, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._ready: dict[str, dict[str, Hint]] = {}  # agents in the order of their turns
        self._throttled: dict[str, int] = {}  # agent -> when it may send again (monotonic ns)
        self._settling: dict[str, Hint] = {}  # agent -> what it is still writing
        self._unsorted: set[str] = set()  # agents whose ready ones are not sorted by name
        self._deferred: dict[FileKey, Hint] = {}
        self._new: set[str] = set()  # of the ready ones: nothing of theirs has been taken yet
        self._incomplete: set[str] = set()  # agents with files that are not queued
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._ready.values())) + len(self._deferred)

    @property
    def is_busy(self) -> bool:
        """True while files wait that can be read now."""
        return any(self._is_free(agent) for agent in self._ready)

    def add(self, agent: str, file_name: str, *, renamed: bool, counted: bool) -> None:
        """Queue a file; a rename supersedes an earlier hint of a write."""
        files = self._ready.get(agent)
        known = files.get(file_name) if files else None
        if known is None:
            known = self._deferred.pop((agent, file_name), None)
        elif known.renamed or not renamed:
            return
        if known is None:
            if files is not None and len(files) >= MOST_FILES:
                self._incomplete.add(agent)
                return
            self._number += 1
            now = self._clock.monotonic_ns()
            hint = Hint(agent, file_name, renamed, counted, number=self._number, found_ns=now)
        else:
            hint = replace(known, renamed=renamed or known.renamed, due_ns=0)
            if agent in self._settling and self._settling[agent].file_name == file_name:
                del self._settling[agent]
        if files is None:
            self._new.add(agent)
        self._put(hint)

    def _put(self, hint: Hint) -> None:
        """Insert among the ready files of its agent; they are sorted when popped."""
        agent, name = hint.agent, hint.file_name
        files = self._ready.setdefault(agent, {})
        if files and name < next(reversed(files)):
            self._unsorted.add(agent)
        files[name] = hint

    def defer(self, hint: Hint) -> None:
        """Read the file when due."""
        self._deferred[hint.agent, hint.file_name] = hint

    def block_agent(self, hint: Hint) -> None:
        """Read the file when due, and no other file of its agent before."""
        self._settling[hint.agent] = hint
        self.defer(hint)

    def requeue(self, hint: Hint) -> None:
        """Requeue a popped file that waits for another one; its rate already includes it."""
        if hint.file_name not in self._ready.get(hint.agent, ()):
            self._put(replace(hint, counted=True))

    def pop_batch(self, most: int) -> list[Hint]:
        """Pop up to ``most`` due files, in equal shares of each agent.

        The agents are in order of discovery, each agent's files sorted by name.
        """
        self._wake_due()
        least = max(1, most // AGENTS_PER_BATCH)
        turns = self._round_robin()
        picked: list[Hint] = []
        while turns and len(picked) < most:
            share = max(least, (most - len(picked)) // len(turns))
            turns = [
                agent
                for agent in turns
                if len(picked) < most and self._pop_share(agent, share, most, picked)
            ]
        picked.sort(key=_BY_DISCOVERY)
        return sort_within_agents(picked, attrgetter("agent"), attrgetter("file_name"))

    def _round_robin(self) -> list[str]:
        """Agents to serve: those without and those with a backlog, alternating."""
        free = [agent for agent in self._ready if self._is_free(agent)]
        if len(free) < 2:
            return free
        new = [agent for agent in free if agent in self._new]
        old = [agent for agent in free if agent not in self._new]
        both = [agent for pair in zip(new, old, strict=False) for agent in pair]
        return both + new[len(old) :] + old[len(new) :]

    def _is_free(self, agent: str) -> bool:
        return agent not in self._throttled and agent not in self._settling

    @property
    def has_unlisted(self) -> bool:
        """True while agents have files that are not remembered."""
        return bool(self._incomplete)

    def agents_to_rescan(self) -> list[str]:
        """Agents with unremembered files, now that half of the remembered ones are done."""
        roomy = [
            agent for agent in self._incomplete if 2 * len(self._ready.get(agent, ())) <= MOST_FILES
        ]
        self._incomplete.difference_update(roomy)
        return roomy

    def oldest_ns(self) -> int | None:
        """Time at which the longest waiting file was seen (monotonic); None if none waits."""
        firsts = [next(iter(files.values())) for files in self._ready.values()]
        return min((hint.found_ns for hint in (*firsts, *self._deferred.values())), default=None)

    def due_ns(self) -> int | None:
        """Time at which the next file is due (monotonic); 0: now."""
        if not (self._ready or self._throttled or self._deferred):
            return None
        if self.is_busy:
            return 0
        held = [hint.due_ns for agent, hint in self._settling.items() if agent in self._ready]
        later = [hint.due_ns for hint in self._deferred.values()]
        return min([*self._throttled.values(), *held, *later], default=None)

    def _pop_share(self, agent: str, share: int, most: int, picked: list[Hint]) -> bool:
        """Pop an agent's share; True if it has more that may be popped. It moves to the end."""
        files = self._ready.pop(agent)
        if agent in self._unsorted:
            self._unsorted.discard(agent)
            files = dict(sorted(files.items()))
        self._new.discard(agent)
        share = min(share, most - len(picked))
        tokens = self._limit.allowance(agent)
        free = tokens
        # the front of the dict all at once: taking it key by key is quadratic
        for name in list(islice(files, share)):
            if not files[name].counted:
                if not tokens:
                    break
                tokens -= 1
            picked.append(files.pop(name))
        if free != tokens:
            self._limit.spend(agent, free - tokens)
        if not files:
            return False
        self._ready[agent] = files
        if not tokens and not next(iter(files.values())).counted:
            self._throttled[agent] = self._clock.monotonic_ns() + self._limit.wait_ns(agent)
            return False
        return True

    def _wake_due(self) -> None:
        if not (self._throttled or self._deferred):  # what settles is deferred, too
            return
        now = self._clock.monotonic_ns()
        for agent in [agent for agent, due in self._throttled.items() if due <= now]:
            del self._throttled[agent]
        for agent in [agent for agent, hint in self._settling.items() if hint.due_ns <= now]:
            del self._settling[agent]
        for key in [key for key, hint in self._deferred.items() if hint.due_ns <= now]:
            hint = replace(self._deferred.pop(key), due_ns=0)
            if key[1] not in self._ready.get(key[0], ()):
                self._put(hint)


def sort_within_agents(
    items: Sequence[Item], agent_of: Callable[[Item], str], rank: Callable[[Item], Any]
) -> list[Item]:
    """Sort the items of each agent by ``rank``, keeping the positions of the agents."""
    if len(items) < 2:
        return list(items)
    places: dict[str, list[Item]] = {}
    for item in items:
        places.setdefault(agent_of(item), []).append(item)
    sorted_ = {agent: iter(sorted(mine, key=rank)) for agent, mine in places.items()}
    return [next(sorted_[agent_of(item)]) for item in items]


def in_turns(items: Sequence[Item], agent_of: Callable[[Item], str]) -> list[Item]:
    """The first item of each agent, then the second of each, and so on."""
    turns: Counter[str] = Counter()
    keyed: list[tuple[int, Item]] = []
    for item in items:
        agent = agent_of(item)
        keyed.append((turns[agent], item))
        turns[agent] += 1
    return [item for _, item in sorted(keyed, key=itemgetter(0))]
