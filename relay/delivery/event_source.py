"""Detection: turns watcher events and scans into file hints, reads and agent changes.

A scan finds what inotify missed; it runs at a start, after an overflow, for a new agent and every
``detection.scan_interval_s``. Files that left an inbox are classified by ``reads``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from relay.agents.roster import Roster
from relay.agents.status import AgentStatus, AgentStatusTracker, StatusChange
from relay.base import directory_guard
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import FormatError, UnsafePath
from relay.base.home import AGENT_DIRS, META, READ
from relay.base.incidents import Incident, IncidentDedup, IncidentKind
from relay.base.names import MSG_SUFFIX, message_id_of
from relay.base.watcher import POLL_MS, WatchEvents
from relay.delivery.downtime import Deadlines
from relay.delivery.intake import Intake
from relay.delivery.notifications import Notifier
from relay.delivery.reads import GRACE_NS, ReadDetector
from relay.delivery.reports import ReportReader
from relay.delivery.values import Part, Resources
from relay.reach.report import SUFFIX

Folders = tuple[tuple[int, int], ...]  # inode and ctime of each
_PARTS = ("", *AGENT_DIRS, META)
SCANNED_AT_ONCE = 500  # agents in one turn: 100 ms at first, a tenth of that later
RACY_NS = 2 * NS_PER_S  # far more than a tick of the clock that the kernel sets file times by


class EventSource(Part):
    """Turns what the watcher saw, and scans, into files to be read, reads and agents."""

    def __init__(
        self,
        given: Resources,
        *,
        reads: ReadDetector,
        reports: ReportReader,
        deadlines: Deadlines,
        intake: Intake,
        roster: Roster,
        statuses: AgentStatusTracker,
        notifier: Notifier,
    ) -> None:
        super().__init__(given)
        self._reads = reads
        self._reports = reports
        self._deadlines = deadlines
        self._intake = intake
        self._roster = roster
        self._statuses = statuses
        self._notifier = notifier
        self._told = IncidentDedup()
        self._next_scan_ns = 0
        self._unscanned: list[str] = []  # agents that the scan has still to come to, the next last
        self._scans_again = False  # a scan was asked for while one went on
        self._next_poll_ns = 0
        self._recheck_ns: int | None = None
        self._empty: dict[str, Folders] = {}  # agents with nothing to be found, as scanned last
        self._broken: dict[str, int] = {}  # agents without an inbox, since when (monotonic)
        # in inboxes, and not unread as the ledger has it
        self._known_strays: dict[str, set[str]] = {}

    def poll(self, wake: WatchEvents, now: int) -> None:
        """Process watcher events, and scan if due. ``now``: monotonic ns."""
        scan = wake.scan or now >= self._next_scan_ns
        appeared: list[str] = []
        recheck = self._recheck_ns is not None and now >= self._recheck_ns
        if wake.agents_changed or scan or recheck:
            appeared = self._refresh_agents(complete=scan or recheck)
            self._empty = {
                agent: self._empty[agent] for agent in self._empty.keys() & self._roster.agents
            }
        for touched in wake.touched:
            if touched.agent not in self._roster.agents:
                continue
            if touched.file_name.endswith(SUFFIX):
                self._reports.add(touched.agent, touched.file_name)
            else:
                self._intake.add(touched.agent, touched.file_name, renamed=touched.renamed)
        if wake.left:
            self._reads.on_removed(wake.left)
        if scan:
            self._ledger.check_file()
            self._deadlines.record_alive()
            self._intake.rate_limit.sweep()
            self._record_incidents(directory_guard.stray_agents(self._home))
            self._next_scan_ns = now + self._config.detection.scan_interval_s * NS_PER_S
            self._unscanned = [name for name in self._unscanned if name in self._roster.agents]
            if self._unscanned:
                self._scans_again = True  # those that were scanned before now: after this round
            else:
                self._unscanned = sorted(self._roster.agents, reverse=True)
                appeared = []  # they are among these
        if self._unscanned:
            self._scan_next({hint.agent for hint in wake.touched}, appeared, now)
        elif self._roster.unwatched and now >= self._next_poll_ns:
            self._scan(self._roster.unwatched | set(appeared))
        elif appeared:
            self._scan(appeared)
            self.check_liveness(appeared)  # before what vanished with a mailbox is delivered again
        if self._roster.unwatched:
            self._next_poll_ns = now + POLL_MS * NS_PER_MS
        self._reads.check_missing()

    def _refresh_agents(self, *, complete: bool) -> list[str]:
        changes = self._roster.refresh(complete=complete)
        self._recheck_ns = None
        if changes.incomplete and not complete:  # a removal may be in progress
            self._recheck_ns = self._clock.monotonic_ns() + NS_PER_S
        if changes.appeared or changes.gone:
            now = self._clock.now_ns()
            with self._ledger.transaction():
                for name in changes.appeared:
                    self._ledger.agents.register(name, now)
                for name in changes.gone:
                    self._ledger.agents.deactivate(name, now)
            self._statuses.refresh()
        return changes.appeared

    def due_ns(self) -> int:
        """Time of the next scan or check (monotonic)."""
        if self._unscanned:
            return 0
        due = [self._next_scan_ns]
        if self._recheck_ns is not None:
            due.append(self._recheck_ns)
        if self._roster.unwatched:
            due.append(self._next_poll_ns)
        missing_ns = self._reads.due_ns()
        if missing_ns is not None:
            due.append(missing_ns)
        return min(due)

    def check_liveness(self, names: Iterable[str] | None) -> None:
        """Update agent statuses; who is concerned is told first."""
        notifier = self._notifier
        with self._home.dirs() as dirs:
            comebacks, endings = self._statuses.check(dirs, names)
        told = [change for change, since in endings if notifier.tell_of_end(change, since)]
        told += [
            StatusChange(name, AgentStatus.ACTIVE, None)
            for name, key in comebacks
            if notifier.send_resume_message(name, key)
        ]
        self._statuses.set_statuses(told)

    def _scan_next(self, senders: set[str], appeared: list[str], now: int) -> None:
        """Scan some of the agents that the scan has still to come to, and those that appeared.

        First who sends now: earlier files may be there, which only the scan finds.
        """
        self._unscanned.sort(key=senders.__contains__)
        at_once = max(SCANNED_AT_ONCE, len(senders))
        part = self._unscanned[-at_once:]
        del self._unscanned[-at_once:]
        self._scan(self._roster.agents.intersection(part + appeared))
        if not self._unscanned:
            self.check_liveness(None)
            if self._scans_again:
                self._scans_again = False
                self._next_scan_ns = min(self._next_scan_ns, now + NS_PER_S)
        elif appeared:
            self.check_liveness(appeared)

    def _scan(self, agents: Iterable[str]) -> None:
        """Scan outboxes for files inotify missed, and inboxes for unseen reads."""
        for agent in sorted(agents):
            try:
                before = self._folders_of(agent)
                if before and self._empty.get(agent) == before:
                    continue
                self._empty.pop(agent, None)
                with self._home.dirs() as dirs:  # closed again: a thousand agents are many
                    found = directory_guard.agent_incidents(dirs, agent)
                    self._record_incidents(found)
                    is_waiting = self._intake.scan(dirs, agent, self._reports.add)
                    others = self._reads.scan(dirs, agent)
                self._record_incidents(self._strays(agent, others), again=True)
                if before and not (found or is_waiting or others):
                    self._empty[agent] = before
            except FileNotFoundError:  # it was just removed; see the next refresh
                self._repair(agent)
                continue
            except (OSError, UnsafePath) as exc:
                self._log(
                    f"Cannot scan agent {agent}, the next scan tries again: {exc}",
                    action="scan_failed",
                    level="warning",
                    agent=agent,
                )
            self._broken.pop(agent, None)
        for agent in self._statuses.retired:
            if agent not in self._roster.agents:
                self._reads.return_unread(agent)

    def _folders_of(self, agent: str) -> Folders:
        """The identities and times of an agent's directories; empty if one has just changed.

        Every new, removed or renamed file, and every change of a mode, changes such a time, but
        not within one tick of the kernel's clock.
        """
        folders: list[tuple[int, int]] = []
        latest = time.time_ns() - RACY_NS  # the kernel's clock, as the times of files
        root = self._home.path("agents", agent)
        for part in _PARTS:
            try:
                status = os.stat(f"{root}/{part}" if part else root, follow_symlinks=False)
            except OSError:
                if part == META:
                    continue
                return ()
            if status.st_ctime_ns > latest:
                return ()
            folders.append((status.st_ino, status.st_ctime_ns))
        return tuple(folders)

    def _repair(self, agent: str) -> None:
        """Create a missing inbox again after a while, since no watch reports its removal."""
        now = self._clock.monotonic_ns()
        if now - self._broken.setdefault(agent, now) >= GRACE_NS and agent in self._roster.agents:
            del self._broken[agent]
            with contextlib.suppress(OSError, UnsafePath):
                self._home.complete_agent(agent)

    def _strays(self, agent: str, others: set[str]) -> list[Incident]:
        """Incidents for messages in an inbox that were not delivered by the relay."""
        fresh = others - self._known_strays.get(agent, set())
        self._known_strays[agent] = others
        ids = {name for name in fresh if message_id_of(name + MSG_SUFFIX) is not None}
        strays = sorted(self._ledger.deliveries.undelivered(agent, ids)) if ids else []
        strays = [stray for stray in strays if not self._was_sent(stray, agent)]
        if not strays:
            return []
        path = f"agents/{agent}/inbox/{strays[0]}{MSG_SUFFIX}"
        text = f"{path} was not delivered by the relay: find out who put it there"
        if len(strays) > 1:
            text += f"; so with {len(strays) - 1} more there"
        return [Incident(IncidentKind.STRAY_MESSAGE, agent, path, text)]

    def _was_sent(self, message_id: str, agent: str) -> bool:
        """True if the store knows the delivery, although the ledger does not."""
        with contextlib.suppress(OSError, FormatError):
            stored = self._store.messages.find_by_relay_id(message_id, include_archived=True)
            return stored is not None and agent in self._store.messages.recipients(stored.id)
        return False

    def flush_reads(self) -> None:
        """Record reads in the ledger, once the journal has them."""
        read: dict[str, int] = {}
        for agent, message_id in self._reads.flush():
            if self._statuses.is_away(agent):
                read[agent] = max(read.get(agent, 0), self._read_at(agent, message_id))
        if read:
            self._statuses.mark_seen(read, by_reading=True)

    def _read_at(self, agent: str, message_id: str) -> int:
        """The time at which a file left the inbox, or a later one (Unix ns)."""
        with self._home.dirs() as dirs, contextlib.suppress(OSError, UnsafePath):
            inbox = dirs.get("agents", agent, "inbox")
            with contextlib.suppress(FileNotFoundError):
                name = f"{READ}/{message_id}{MSG_SUFFIX}"
                return os.stat(name, dir_fd=inbox, follow_symlinks=False).st_ctime_ns
            return os.fstat(inbox).st_mtime_ns
        return self._clock.now_ns()

    def _record_incidents(self, found: list[Incident], *, again: bool = False) -> None:
        """Log and record incidents, once while they last; ``again``: they may predate a restart."""
        repaired = [incident for incident in found if incident.kind is IncidentKind.MODE_REPAIRED]
        fresh = repaired + self._told.fresh(
            [incident for incident in found if incident not in repaired]
        )
        if not fresh:
            return
        with self._ledger.transaction():
            self._ledger.agents.add_incidents(fresh, self._clock.now_ns(), again=again)
        for incident in fresh:
            self._log(
                incident.detail, action=str(incident.kind), level="warning", agent=incident.agent
            )
