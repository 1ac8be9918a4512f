"""Agents' lives: who is away, who came back, on what evidence. The rules: ``standing``.

The ledger has each agent's status; what the router asks of it is kept here beside it, and read
again when something changed there. Looked at with every scan, and for one agent when mail for it
would bounce: no wakeup of its own. A status moves in the ledger first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from relay.agents.roster import Roster
from relay.base import process_info
from relay.base.agent_status import (
    UNAVAILABLE,
    AgentFacts,
    AgentStatus,
    StatusChange,
    next_status,
    unavailable_reason,
)
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import AgentSettings
from relay.base.home import Dirs
from relay.ledger import Ledger
from relay.ledger.agents import AgentRow
from relay.ledger.processes import ProcessRow


class Reactivation(NamedTuple):
    """A process of an agent that was away: it is active once it has been greeted."""

    name: str
    key: str  # tells this process from every other one


class AgentStatusTracker:
    """Keeps agents' statuses true. Owned by the loop.

    ``away`` and ``silent`` are the same objects for ever: who is given them sees every change.
    """

    def __init__(
        self,
        ledger: Ledger,
        roster: Roster,
        settings: AgentSettings,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._settings = settings
        self._clock = clock
        self._log = log
        self.unavailable: dict[
            str, str
        ] = {}  # terminated, retired: what who writes to them is told
        self.inactive: set[str] = set()  # inactive
        self._statuses: dict[str, str] = {}  # of all that are not active
        self._changes = -1
        # pid, when it was first found ended, when it had become its agent's (Unix ns)
        self._ended: dict[str, tuple[int, int, int]] = {}

    def refresh(self) -> None:
        """Read again what the ledger says, if anything changed there."""
        if self._ledger.agents.changes == self._changes:
            return
        self._changes = self._ledger.agents.changes
        self.unavailable.clear()
        self.inactive.clear()
        self._statuses.clear()
        for one in self._ledger.agents.rows():
            if one.status == AgentStatus.ACTIVE:
                continue
            self._statuses[one.name] = one.status
            if one.status in UNAVAILABLE:
                self.unavailable[one.name] = unavailable_reason(
                    one.name, one.status, one.reason, one.changed_at
                )
            else:
                self.inactive.add(one.name)

    @property
    def retired(self) -> list[str]:
        """Names of the agents that were taken out of service."""
        return [name for name, status in self._statuses.items() if status == AgentStatus.RETIRED]

    def mark_seen(self, when: Mapping[str, int], *, by_reading: bool = False) -> None:
        """These agents wrote something, or read it, at these times (Unix ns): that makes them
        active again.

        Who is retired is not brought back by reading what it still has; nor is anybody by what
        the process that the relay saw end did before its end, though it is found only now; nor
        whose directory is gone, for what was in its inbox went with it.
        """
        back = sorted(when.keys() & self._statuses.keys() & self._roster.agents)
        if by_reading:
            back = [name for name in back if self._statuses[name] != AgentStatus.RETIRED]
        back = [name for name in back if not self._predates_exit(name, when[name])]
        self._set_statuses([StatusChange(name, AgentStatus.ACTIVE, None) for name in back])

    def _predates_exit(self, name: str, at: int) -> bool:
        """True for what the process that ended left; a clock that was set back tells nothing."""
        if self._statuses[name] != AgentStatus.TERMINATED:
            return False
        ended_at = self._ledger.processes.ended_at(name)
        return ended_at is not None and at <= ended_at <= self._clock.now_ns()

    def process_endings(self) -> Callable[[str, int], str]:
        """A function that tells how the process ended that an agent had in a given second.

        Empty: it has not, or left in good order. One that the relay started has ended, too, when
        it was started again since. One look at the ledger, however many are asked about.
        """
        rows = self._ledger.processes.rows()
        return lambda name, since: self._ended_of(name, since, rows.get(name))

    def _ended_of(self, name: str, since: int, row: ProcessRow | None) -> str:
        end = since + NS_PER_S
        if row is not None and (row.started_at or 0) >= end:
            return f"the process of {name} ended, and was started again"
        if row is not None and row.ended_at and since <= row.ended_at:
            return f"the process of {name} ended"
        pid, found_at, started_at = self._ended.get(name, (0, 0, 0))
        if started_at < end and since <= found_at:
            return f"process {pid} of {name} ended"
        return ""

    def check(self, dirs: Dirs, names: Iterable[str] | None = None) -> list[Reactivation]:
        """Judge every agent by what is known now, or those of ``names``.

        Those whom a process of their own brings back are returned, to be greeted first and then
        given to ``come_back``; killed in between, the next look finds them again.
        """
        now = self._clock.now_ns()
        wanted = set(self._roster.agents if names is None else names)
        tended = self._ledger.processes.supervised()
        changes: list[StatusChange] = []
        comebacks: list[Reactivation] = []
        heard_of: list[tuple[str, int]] = []
        pids_now: list[tuple[str, int | None]] = []
        for one in self._ledger.agents.rows():
            if one.name not in wanted or one.name not in self._roster.agents:
                continue
            facts = self._facts(dirs, one, now)._replace(is_supervised=one.name in tended)
            if facts.runs and facts.started_at > (one.last_seen_at or 0):
                heard_of.append((one.name, min(facts.started_at, now)))
            running = facts.pid if facts.runs else one.pid if facts.pid is not None else None
            if running != one.pid:
                pids_now.append((one.name, running))
            change = next_status(facts, now, self._settings)
            if change is None:
                continue
            if one.status in UNAVAILABLE:
                comebacks.append(Reactivation(one.name, f"process {facts.pid} {facts.started_at}"))
            else:
                changes.append(change)
        if heard_of or pids_now:
            self._record(heard_of, pids_now)
        self._set_statuses(changes)
        return comebacks

    def reactivate(self, comebacks: Iterable[Reactivation]) -> None:
        """They have been greeted, and are active."""
        self._set_statuses([StatusChange(one.name, AgentStatus.ACTIVE, None) for one in comebacks])

    def _facts(self, dirs: Dirs, one: AgentRow, now: int) -> AgentFacts:
        meta = self._roster.meta(dirs, one.name)
        pid, ticks, started_at = (
            meta.pid,
            _int_or_none(meta.pid_start_ticks),
            _int_or_none(meta.started_at),
        )
        runs = pid is not None and pid > 0 and process_info.runs(pid, ticks)
        ended_at = 0
        if runs or pid is None:
            self._ended.pop(one.name, None)
        else:
            known = self._ended.get(one.name)
            if known is None or known[0] != pid:
                known = self._ended[one.name] = (pid, now, started_at or 0)
            ended_at = known[1]
        return AgentFacts(
            one.name,
            one.status,
            one.changed_at or 0,
            max(one.last_seen_at or 0, one.registered_at),
            one.pid,
            pid,
            runs,
            min(started_at or 0, now),
            ended_at,
            unregisters=meta.unregisters is not False,
        )

    def _record(
        self, heard_of: list[tuple[str, int]], running: list[tuple[str, int | None]]
    ) -> None:
        with self._ledger.transaction():
            for name, at in heard_of:
                self._ledger.agents.mark_seen([name], at)
            for name, pid in running:
                self._ledger.agents.set_pid(name, pid)

    def _set_statuses(self, changes: list[StatusChange]) -> None:
        """Statuses, in the ledger and here; each is logged."""
        if not changes:
            return
        now = self._clock.now_ns()
        with self._ledger.transaction():
            for change in changes:
                self._ledger.agents.set_status(*change, now)
        self.refresh()
        for change in changes:
            why = f": {change.reason}" if change.reason else ""
            self._log(
                f"Agent {change.name} is {change.status}{why}",
                action="agent_status",
                agent=change.name,
                status=str(change.status),
            )


def _int_or_none(value: object) -> int | None:
    """A whole number of an agent's own file, as far as it is one."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    return None
