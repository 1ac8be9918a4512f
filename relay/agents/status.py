"""Agent status: the rules, the facts they apply to, and the tracker that keeps statuses current.

    active       gets broadcasts and messages
    inactive     its directory is gone, or it was silent for ``agents.inactive_after_s``:
                 no broadcasts; direct messages wait
    terminated   its process ended and it was silent for ``agents.dead_after_s``: messages bounce
    retired      retired by the operator or the lead: messages bounce

Writing makes an agent active again, whatever its status, and so does a process of its own started
since. Reading does, unless it is retired. The ledger holds the statuses; the tracker caches what
the router needs and checks agents at every scan, and one agent when messages to it would bounce.
docs/states.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from enum import StrEnum
from typing import NamedTuple

from relay.agents.roster import Roster
from relay.base import process_info
from relay.base.clock import NS_PER_S, Clock, iso_time
from relay.base.config import AgentSettings
from relay.base.home import Dirs
from relay.base.message import Kind
from relay.base.names import OPERATOR, ORCHESTRATOR, answer_id
from relay.engine.engine import Engine
from relay.ledger.agents import AgentRow, PendingOperation, ProcessRow
from relay.ledger.ledger import Ledger

RETIRE, REVIVE = "agent.retire", "agent.revive"
MOST_REASON = 200  # characters; repeated in the nack of every bounced message


class AgentStatus(StrEnum):
    """The values of ``agents.status``."""

    ACTIVE = "active"  # it is there, or may come back any moment
    INACTIVE = "inactive"  # away, and its mail waits
    TERMINATED = "terminated"  # its process ended
    RETIRED = "retired"  # taken out of service


UNAVAILABLE = frozenset({AgentStatus.TERMINATED, AgentStatus.RETIRED})  # messages to these bounce


class StatusChange(NamedTuple):
    """An agent's new status and its reason."""

    name: str
    status: str
    reason: str | None


class AgentFacts(NamedTuple):
    """Facts about an agent; times are Unix nanoseconds, 0 if unknown."""

    name: str
    status: str
    changed_at: int  # of the status
    seen_at: int  # last activity; else its registration
    seen_pid: int | None = None  # the process that was last seen to run
    pid: int | None = None  # of the process that registered itself
    runs: bool = False  # that very process is there
    started_at: int = 0  # when it became this agent
    ended_at: int = 0  # when it was first found ended
    unregisters: bool = True  # it takes itself out when it ends: gone is not the same as dead else
    is_supervised: bool = False  # the relay started a process of it, which runs or is started again


def next_status(
    facts: AgentFacts, age_ns: Callable[[int], int], settings: AgentSettings
) -> StatusChange | None:
    """The status change due by now; None if there is none.

    ``age_ns``: the time since a time in which the relay ran, and the machine did not sleep.
    """
    if facts.status in UNAVAILABLE:
        came_back = facts.runs and (
            facts.status == AgentStatus.TERMINATED or facts.started_at > facts.changed_at
        )
        return StatusChange(facts.name, AgentStatus.ACTIVE, None) if came_back else None
    if facts.name == OPERATOR:  # a person may be away for as long as they like
        return None
    silent_since = _silent_since(facts)
    if _has_ended(facts):
        dead_since = max(silent_since, facts.ended_at)
        if age_ns(dead_since) >= settings.dead_after_s * NS_PER_S:
            reason = f"its process {facts.pid} ended; no activity since {_at(silent_since)}"
            return StatusChange(facts.name, AgentStatus.TERMINATED, reason)
    is_there = facts.runs or facts.is_supervised
    is_silent = not is_there and age_ns(silent_since) >= settings.inactive_after_s * NS_PER_S
    if is_silent and facts.status == AgentStatus.ACTIVE:
        return StatusChange(facts.name, AgentStatus.INACTIVE, f"silent since {_at(silent_since)}")
    if is_there and facts.status == AgentStatus.INACTIVE:
        return StatusChange(facts.name, AgentStatus.ACTIVE, None)
    return None


def _silent_since(facts: AgentFacts) -> int:
    """Time of the last activity (Unix ns)."""
    active_since = facts.changed_at if facts.status == AgentStatus.ACTIVE else 0
    return max(facts.seen_at, facts.started_at, active_since)


def _has_ended(facts: AgentFacts) -> bool:
    """True if the agent's process died, after the agent was last made active.

    The end of a shell does not count: it cannot unregister before it exits. Nor does a process that
    the agent has outlived, by its own message or the operator's command.
    """
    is_its_own = facts.pid == facts.seen_pid or facts.started_at > facts.changed_at
    is_gone = facts.pid is not None and not (facts.runs or facts.is_supervised)
    return is_gone and facts.unregisters and is_its_own


def parse_status_command(
    action: str, fields: Mapping[str, str], sender: str
) -> StatusChange | None:
    """The status change requested by a command, without a permission check; None if there is none.

    The same command gives the same change, so that it can be recorded again after a crash.
    """
    if action == RETIRE:
        reason = fields.get("REASON") or f"{sender} retired it"
        return StatusChange(fields["NAME"], AgentStatus.RETIRED, reason[:MOST_REASON])
    if action == REVIVE:
        return StatusChange(fields["NAME"], AgentStatus.ACTIVE, None)
    return None


def unavailable_reason(name: str, status: str, reason: str | None, changed_at: int | None) -> str:
    """The text for senders to an unavailable agent: why, since when, what to do."""
    since = f" since {_at(changed_at)}" if changed_at else ""
    why = f": {reason}" if reason else ""
    if status == AgentStatus.RETIRED:
        what = f"`relay agents revive {name}` brings it back"
    else:
        what = (
            "start it again; it becomes active as soon as it writes a message or registers its "
            "process"
        )
    return f"{name} is {status}{since}{why}; {what}"


def _at(at_ns: int) -> str:
    return iso_time(at_ns)[:19] + "Z"


class Directory(NamedTuple):
    """The agents that can be recipients, as of now."""

    agents: Set[str]  # those that have a mailbox, `operator` among them
    lead: str | None = None  # the agent addressed as Lead
    unavailable: Mapping[str, str] = {}  # terminated or retired -> the nack for senders
    inactive: Set[str] = frozenset()  # they get no broadcasts
    home: str = ""  # its path, named where an agent is not found

    def absence(self, name: str) -> str:
        """The reason why an agent gets nothing now; empty if it does."""
        return self.unavailable.get(name, "" if name in self.agents else NO_AGENT)


NO_AGENT = "no longer an agent"


class AgentStatusTracker:
    """Keeps agent statuses current. Owned by the loop."""

    def __init__(
        self,
        ledger: Ledger,
        roster: Roster,
        settings: AgentSettings,
        clock: Clock,
        age_ns: Callable[[int], int],
        log: Callable[..., object],
    ) -> None:
        """``age_ns``: as for ``next_status``."""
        self._ledger = ledger
        self._roster = roster
        self._settings = settings
        self._age_ns = age_ns
        self._clock = clock
        self._log = log
        self.unavailable: Mapping[str, str] = {}  # terminated or retired -> the nack for senders
        self._inactive: Set[str] = frozenset()
        self._statuses: dict[str, str] = {}  # of all that are not active
        self._changes = -1
        # pid, when it was first found ended, when it had become its agent's (Unix ns)
        self._ended: dict[str, tuple[int, int, int]] = {}

    def refresh(self) -> None:
        """Reload the statuses if the ledger has changed."""
        if self._ledger.agents.changes == self._changes:
            return
        self._changes = self._ledger.agents.changes
        away = [row for row in self._ledger.agents.rows() if row.status != AgentStatus.ACTIVE]
        self._statuses = {row.name: row.status for row in away}
        self.unavailable = {
            row.name: unavailable_reason(row.name, row.status, row.reason, row.changed_at)
            for row in away
            if row.status in UNAVAILABLE
        }
        self._inactive = self._statuses.keys() - self.unavailable.keys()

    def directory(self, lead: str | None = None) -> Directory:
        """The agents that can be recipients now."""
        return Directory(
            self._roster.agents, lead, self.unavailable, self._inactive, self._roster.home_root
        )

    def is_away(self, name: str) -> bool:
        """True for an agent that is not active."""
        return name in self._statuses

    @property
    def retired(self) -> list[str]:
        """Names of retired agents."""
        return [name for name, status in self._statuses.items() if status == AgentStatus.RETIRED]

    def mark_seen(self, when: Mapping[str, int], *, by_reading: bool = False) -> None:
        """Mark agents active that wrote something, or read it, at these times (Unix ns).

        Reading does not reactivate a retired agent. Activity from before a process's recorded exit,
        and inbox removals caused by a deleted agent directory, are ignored.
        """
        back = sorted(when.keys() & self._statuses.keys() & self._roster.agents)
        if by_reading:
            back = [name for name in back if self._statuses[name] != AgentStatus.RETIRED]
        back = [name for name in back if not self._predates_exit(name, when[name])]
        self.set_statuses([StatusChange(name, AgentStatus.ACTIVE, None) for name in back])

    def _predates_exit(self, name: str, at: int) -> bool:
        """True for activity of the ended process; a clock that was set back proves nothing."""
        if self._statuses[name] != AgentStatus.TERMINATED:
            return False
        ended_at = self._ledger.processes.ended_at(name)
        return ended_at is not None and at <= ended_at <= self._clock.now_ns()

    def process_endings(self) -> Callable[[str, int], str]:
        """A function that tells how the process ended that an agent had in a given second.

        It returns an empty text if the process runs or left in good order. A process started again
        since counts as ended. The ledger is read once, however many agents are looked up.
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

    def check(
        self, dirs: Dirs, names: Iterable[str] | None = None
    ) -> tuple[list[tuple[str, str]], list[tuple[StatusChange, int]]]:
        """Update the status of every agent, or of those in ``names``, but for two kinds.

        Returns (name, key of the process) of unavailable agents that have a new process, which get
        a resume message before they are active; and (change, last sign of life in Unix ns) of
        agents whose process ended: who wrote to them is told before it is set. After a crash
        before ``set_statuses`` both are found again.
        """
        now = self._clock.now_ns()
        wanted = set(self._roster.agents if names is None else names)
        tended = self._ledger.processes.supervised()
        changes: list[StatusChange] = []
        comebacks: list[tuple[str, str]] = []
        endings: list[tuple[StatusChange, int]] = []
        heard_of: list[tuple[str, int]] = []
        pids_now: list[tuple[str, int | None]] = []
        for row in self._ledger.agents.rows():
            if row.name not in wanted or row.name not in self._roster.agents:
                continue
            facts = self._facts(dirs, row, now)._replace(is_supervised=row.name in tended)
            if facts.runs and facts.started_at > (row.last_seen_at or 0):
                heard_of.append((row.name, min(facts.started_at, now)))
            running = facts.pid if facts.runs else row.pid if facts.pid is not None else None
            if running != row.pid:
                pids_now.append((row.name, running))
            change = next_status(facts, self._age_ns, self._settings)
            if change is None:
                continue
            if row.status in UNAVAILABLE:
                comebacks.append((row.name, f"process {facts.pid} {facts.started_at}"))
            elif change.status == AgentStatus.TERMINATED:
                endings.append((change, _silent_since(facts)))
            else:
                changes.append(change)
        if heard_of or pids_now:
            self._record(heard_of, pids_now)
        self.set_statuses(changes)
        return comebacks, endings

    def _facts(self, dirs: Dirs, row: AgentRow, now: int) -> AgentFacts:
        meta = self._roster.meta(dirs, row.name)
        pid, ticks, started_at = (
            meta.pid,
            _int_or_none(meta.pid_start_ticks),
            _int_or_none(meta.started_at),
        )
        if process_info.is_elsewhere(meta.pid_namespace):
            # Nobody here knows when it ends; it ran when it registered.
            pid, runs = None, (started_at or 0) > max(row.last_seen_at or 0, row.changed_at or 0)
        else:
            runs = pid is not None and pid > 0 and process_info.runs(pid, ticks)
        ended_at = 0
        if runs or pid is None:
            self._ended.pop(row.name, None)
        else:
            known = self._ended.get(row.name)
            if known is None or known[0] != pid:
                known = self._ended[row.name] = (pid, now, started_at or 0)
            ended_at = known[1]
        return AgentFacts(
            row.name,
            row.status,
            row.changed_at or 0,
            max(row.last_seen_at or 0, row.registered_at),
            row.pid,
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

    def set_statuses(self, changes: list[StatusChange]) -> None:
        """Set statuses in the ledger and here, and log each."""
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
    """A valid non-negative integer from an agent's own file, or None."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    return None


class LastSeen(NamedTuple):
    """The last activity of an agent; Unix nanoseconds."""

    seen_at: int | None  # it wrote or read; None: never
    owes_since: int | None  # the oldest thing that it owes; None: nothing


class Activity:
    """Activity of agents, from ledger and store. Read-only. Used from the loop's thread.

    An agent owes an unread message in its inbox, and an answer to a message that requires one.
    """

    def __init__(self, ledger: Ledger, store: Engine) -> None:
        self._ledger = ledger
        self._store = store

    def age_ns(self, since_ns: int) -> int:
        """The time since then in which the relay ran, and the machine did not sleep."""
        return self._store.deliveries.running_ns(since_ns)

    def last_seen(self, names: Iterable[str]) -> dict[str, LastSeen]:
        """The last activity of these agents, with one pass over the pending answers."""
        wanted = set(names)
        last_seen = self._ledger.processes.last_seen(wanted)
        owes = self._ledger.processes.unread_since(wanted)
        state = self._store.state
        for _, number, recipient in state.timers.current():
            message = state.messages[number]
            if recipient in wanted and message.delivered_at:
                since = message.delivered_at * NS_PER_S
                owes[recipient] = min(since, owes.get(recipient, since))
        for known in state.owed.values():
            for recipient in wanted.intersection(known):
                if not known[recipient].said:  # what has begun takes the time that it takes
                    since = known[recipient].since * NS_PER_S
                    owes[recipient] = min(since, owes.get(recipient, since))
        return {name: LastSeen(last_seen.get(name), owes.get(name)) for name in wanted}

    def previous_answer(self, intent: PendingOperation) -> tuple[Kind, str] | None:
        """The answer given to a request before a crash; an id is never used twice."""
        for kind in (Kind.ACK, Kind.NACK):
            at, agent, message_id = intent.asked_at, intent.requested_by, intent.request_id
            answer = self._store.messages.find_by_relay_id(answer_id(at, agent, message_id, kind))
            if answer is not None and answer.sender == ORCHESTRATOR:
                return kind, answer.content.decode().removesuffix("\n")
        return None
