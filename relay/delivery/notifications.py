"""The orchestrator's own word: what it says without being asked.

Of disks and limits, of processes, and what an agent finds that begins again. Each has an id that is
derived from what it is about, so that a crash says nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relay.agents.processes import ProcessNotice
from relay.agents.roster import Roster
from relay.agents.saved_state import StateStore
from relay.base.errors import CommError, StoreCapacity, StoreFull, UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import Incident
from relay.base.names import OPERATOR
from relay.delivery import resume
from relay.delivery.carry import BatchWriter
from relay.delivery.context import Context
from relay.delivery.decide import Planner
from relay.delivery.loops import ReplyLoop
from relay.delivery.work import WorkItem, system_work_about


class Notifier:
    """Owned by the loop."""

    def __init__(
        self,
        context: Context,
        roster: Roster,
        planner: Planner,
        writer: BatchWriter,
        states: StateStore,
    ) -> None:
        self._home = context.home
        self._store = context.store
        self._roster = roster
        self._planner = planner
        self._writer = writer
        self._states = states
        self._clock = context.clock
        self._log = context.log
        self._pending: list[Incident] = []  # limits whose agents the disk kept us from telling

    def announce(
        self,
        agents: Iterable[str],
        text: str,
        key: str,
        at_ns: int,
        incident: Incident | None = None,
    ) -> bool:
        """Notify those of ``agents`` that are there, once for each key and time; an incident is
        kept with it.

        False when disk or store takes nothing now, or nobody is there: ask again.
        """
        names = sorted(self._roster.agents.intersection(agents))
        try:
            works = [self._planner.notify(name, at_ns, key, text) for name in names]
        except (StoreFull, StoreCapacity):
            return False
        for work in works[:1] if incident is not None else ():
            assert incident is not None
            work.incidents, work.is_repeat = [incident], True
        with self._home.dirs() as dirs:
            return bool(works) and not self._writer.execute(dirs, works)

    def send(self, notices: Sequence[ProcessNotice]) -> set[int]:
        """Tell agents of processes, and note in the ledger what is so; the places of those done.

        The others are to be told later: neither disk nor store takes them now.
        """
        works: list[WorkItem] = []
        for one in notices:
            agent = one.agent if one.agent in self._roster.agents else ""
            try:
                work = self._planner.reply(
                    agent, one.request_id, one.at, one.key, one.text, one.kind
                )
            except (StoreFull, StoreCapacity) as exc:
                self._log(f"Cannot tell {agent} now: {exc}", action="postpone", level="warning")
                break
            work.process, work.closed_intents = one.process, one.closed_intents
            work.status_change = one.status_change
            works.append(work)
        with self._home.dirs() as dirs:
            put_off = {id(one.work) for one in self._writer.execute(dirs, works)}
        return {place for place, work in enumerate(works) if id(work) not in put_off}

    def send_resume_message(self, name: str, key: str) -> bool:
        """Put the first message of a new life into an agent's inbox (``continuity.welcome``).

        To be called before its process is started; ``key`` tells this start from every other
        one. False: not now, the disk or the store takes nothing; nothing was done.
        """
        try:
            work = resume.resume_message(self._states, self._store, name, key, self._clock.now_ns())
            with self._home.dirs() as dirs:
                return not (work and self._writer.execute(dirs, [work]))
        except (CommError, OSError, UnsafePath) as exc:
            self._log(f"Cannot greet {name} now: {exc}", action="postpone", level="warning")
            return False

    def report_loops(self, begun: list[ReplyLoop]) -> list[ReplyLoop]:
        """Lead and operator hear of loops, once each; those that cannot be told now."""
        untold: list[ReplyLoop] = []
        for one in begun:
            hears = {OPERATOR, self._roster.lead() or OPERATOR}
            key, detail = f"loop {one.message_id}", one.incident.detail
            if self.announce(hears, detail, key, one.at_ns, one.incident):
                kind, agent = str(one.incident.kind), one.incident.agent
                self._log(detail, action=kind, level="warning", agent=agent)
            else:
                untold.append(one)
        return untold

    def report_limits(self, dirs: Dirs, begun: list[Incident]) -> None:
        """Agents that ran into a limit, ``begun`` since the last time, hear it once; it is kept."""
        now = self._clock.now_ns()
        works: list[WorkItem] = []
        for one in self._pending + begun:
            agent = one.agent or ""
            try:
                work = self._planner.notify(agent, now, f"{one.kind} {now}", one.detail)
            except (StoreFull, StoreCapacity):  # it is kept all the same
                work = system_work_about("", agent, now, str(one.kind))
            work.incidents.append(one)
            works.append(work)
            self._log(one.detail, action=str(one.kind), level="warning", agent=agent)
        put_off = self._writer.execute(dirs, works) if works else []
        self._pending = [incident for one in put_off for incident in one.work.incidents]
