"""Agents that answer each other without end: what is too deep along RE is held for a while.

A message's depth is the number of messages that it answers, one behind the other, of the last
minute. Beyond ``limits.reply_depth`` it waits in its outbox, as over a rate: nothing is lost, and
it goes as soon as enough of the others are older. The lead and the operator hear it, once a loop.
The store has all that is asked for here, so a start knows what was known before.
"""

from __future__ import annotations

from typing import NamedTuple

from relay.base.clock import NS_PER_S, Clock
from relay.base.incidents import Incident, IncidentKind
from relay.base.message import MessageFile
from relay.delivery.work import WorkItem
from relay.engine.commstore import CommStore

WINDOW_NS = 60 * NS_PER_S
CALM_NS = 5 * WINDOW_NS  # nothing of a loop was held for so long: it is over


class ReplyLoop(NamedTuple):
    """A loop that begins to be held."""

    message_id: str  # of the first that is held
    at_ns: int  # when that was discovered
    incident: Incident


class ReplyLoops:
    """Finds loops. Owned by the loop of the relay."""

    def __init__(self, store: CommStore, most: int, clock: Clock) -> None:
        self._store = store
        self._most = most
        self._clock = clock
        self._held_ns: dict[frozenset[str], int] = {}  # who takes part -> when last (monotonic)
        self._begun: list[ReplyLoop] = []

    def check(self, work: WorkItem, message: MessageFile) -> str:
        """Why a message waits, or nothing. Begins a loop unless its agents are in one."""
        answers = message.headers.get("RE")
        if answers is None:
            return ""
        since = self._clock.now_ns() - WINDOW_NS
        who = {work.agent}
        for _ in range(self._most + 1):
            stored = self._store.find_by_relay_id(answers) if answers else None
            metadata = (stored.metadata or {}) if stored is not None else {}
            if stored is None or int(metadata.get("created_ns") or 0) < since:
                return ""
            who.add(stored.sender)
            answers = str(metadata.get("re") or "")
        names = ", ".join(sorted(who))
        why = f"more than {self._most} answers of {names} along RE within a minute"
        self._note(work, frozenset(who), why)
        return f"{why} (limits.reply_depth): it waits until they are fewer"

    def pop_new(self) -> list[ReplyLoop]:
        """Loops that began since the last time: to be told."""
        begun, self._begun = self._begun, []
        return begun

    def requeue(self, untold: list[ReplyLoop]) -> None:
        """These could not be told now."""
        self._begun = untold + self._begun

    def _note(self, work: WorkItem, who: frozenset[str], why: str) -> None:
        now = self._clock.monotonic_ns()
        last = self._held_ns.get(who)
        self._held_ns = {one: at for one, at in self._held_ns.items() if now - at < CALM_NS}
        self._held_ns[who] = now
        if last is None or now - last >= CALM_NS:
            what = f"{work.message_id} waits in the outbox of {work.agent}"
            detail = f"a loop of answers: {why} (limits.reply_depth); {what}, nothing is lost"
            path = f"agents/{work.agent}/outbox"
            incident = Incident(IncidentKind.REPLY_LOOP, work.agent, path, detail)
            self._begun.append(ReplyLoop(work.message_id, work.discovered_at, incident))
