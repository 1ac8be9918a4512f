"""Supervised processes: state rules, restart policy, monitoring and starting.

The lock of a name is taken before the fork and inherited: whatever is killed when, the kernel knows
whether a process of that name lives. A process whose pid was not recorded is found by its
environment. States: docs/states.md, "A process the relay started".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import msgspec

from relay.agents import run_files
from relay.agents.requests import Spec, check_dir, dir_refusal
from relay.agents.run_files import LogRotator
from relay.agents.spawner import CannotStart, Pid, Spawner, Usage
from relay.agents.status import Activity, AgentStatus, LastSeen, StatusChange
from relay.base.clock import NS_PER_S, Clock, boot_id
from relay.base.config import SpawnSettings
from relay.base.errors import RelayError
from relay.base.home import Home
from relay.base.logs import LogCall
from relay.base.message import Kind
from relay.base.process_info import is_elsewhere
from relay.ledger.agents import IDLE, READY, STARTING, STUCK, WORKING, PendingOperation, ProcessRow
from relay.ledger.ledger import Ledger

MOST_RESTART_PAUSE_S = 60
BUSY_PERCENT = 1.0  # of a CPU, between two looks: less is a program that waits in a loop


class ProcessNotice(NamedTuple):
    """A message about a process, and what the ledger records with it."""

    agent: str  # the recipient; empty: none
    request_id: str  # the message that it is about
    at: int  # its id is derived from it: the same after a crash
    kind: Kind  # ACK or NACK: the answer; NOTIFICATION: what came later
    text: str
    key: str = ""  # tells one notification about a message from another
    process: ProcessRow | None = None
    closed_intents: tuple[int, ...] = ()  # numbers of operations that are done
    status_change: StatusChange | None = None  # the agent's status, with it
    forget: tuple[str, str] | None = None  # name, request: the spec to remove once sent


class RestartDecision(NamedTuple):
    """The consequence of an end."""

    again_in_s: int | None  # None: it is not started again
    gave_up: bool = False  # it would have been, and was too often


def new_row(spec: Spec, now_ns: int) -> ProcessRow:
    """The row of a process to be started for the first time."""
    return ProcessRow(
        spec.name,
        STARTING,
        None,
        None,
        spec.cli,
        spec.cwd,
        spec.restart,
        spec.requested_by,
        spec.request_id,
        0,
        "[]",
        None,
        now_ns,
    )


def decide_restart(row: ProcessRow, settings: SpawnSettings, now_ns: int) -> RestartDecision:
    """Apply the restart policy to an end whose code is in the row.

    An unknown code counts as a failure. The pause doubles with every restart in the window.
    """
    if row.restart == "never" or (row.restart == "on-failure" and row.exit_code == 0):
        return RestartDecision(None)
    recent = len(restarts_in_window(row, settings, now_ns))
    if recent >= settings.restart_times:
        return RestartDecision(None, gave_up=True)
    return RestartDecision(min(1 << min(recent, 30), MOST_RESTART_PAUSE_S))


def restarts_in_window(row: ProcessRow, settings: SpawnSettings, now_ns: int) -> list[int]:
    """The restarts within ``restart_window_s``."""
    since = now_ns - settings.restart_window_s * NS_PER_S
    return [at for at in row.recent_restarts if since < at <= now_ns]  # later: the clock was set


def restarted(row: ProcessRow, settings: SpawnSettings, now_ns: int) -> ProcessRow:
    """The row with one more restart."""
    recent = [*restarts_in_window(row, settings, now_ns), now_ns]
    return row._replace(
        restarts=row.restarts + 1, restarted_at=msgspec.json.encode(recent).decode()
    )


def next_state(
    row: ProcessRow,
    seen: LastSeen,
    busy_at: int,
    settings: SpawnSettings,
    age_ns: Callable[[int], int],
) -> str:
    """The state of a running process by its activity.

    ``busy_at``: when it last used CPU. ``age_ns``: the running time since a time. An obligation
    overdue for ``stuck_after_s`` makes it stuck.
    """
    started_at = row.started_at or 0
    owes = seen.owes_since
    if owes is not None:
        since = max(owes, started_at)  # what was there before is owed from its start on
        if age_ns(since) >= settings.stuck_after_s * NS_PER_S:
            return STUCK
    heard_at = seen.seen_at if seen.seen_at and seen.seen_at >= started_at else None
    if heard_at is None:
        return STARTING
    if row.state == STARTING:
        return READY
    if owes is not None:
        return WORKING
    active_at = max(heard_at, busy_at)
    if age_ns(active_at) >= settings.idle_after_s * NS_PER_S:
        return IDLE
    if row.state == READY and active_at <= row.changed_at:
        return READY
    return WORKING


def answer_notice(intent: PendingOperation, kind: Kind, text: str, number: int) -> ProcessNotice:
    """The answer to a request; sending it closes the intent."""
    return ProcessNotice(
        intent.requested_by,
        intent.request_id,
        intent.asked_at,
        kind,
        text,
        closed_intents=(number,),
    )


def time_after_end(row: ProcessRow) -> int:
    """A time that sorts after the end of a process."""
    return (row.ended_at or row.started_at or 0) + 3


def started_text(row: ProcessRow) -> str:
    """The text of the answer to a spawn."""
    return f"completed started {row.name}, pid {row.pid or 'gone already'}"


def terminated_status(row: ProcessRow, reason: str) -> StatusChange:
    """The status change of an agent whose process has ended."""
    return StatusChange(row.name, AgentStatus.TERMINATED, reason)


def terminate_unstarted(ledger: Ledger, home: Home, row: ProcessRow) -> StatusChange | None:
    """The status change of an agent whose first process could not be started.

    Mail for it would wait for ever. None for an agent that has ever done anything.
    """
    if ledger.processes.last_seen([row.name]):
        return None
    if row.name in home.agent_names():  # its mailbox was made, and is not noticed yet
        with ledger.transaction():
            ledger.agents.register(row.name, row.changed_at)
    return terminated_status(row, f"it could not be started: {row.last_error}")


class Child:
    """A supervised process in memory. Only the supervisor uses it."""

    def __init__(self, row: ProcessRow, spec: Spec | None) -> None:
        self.row = row
        self.spec = spec  # None: it was lost, and it cannot be started again
        self.releases: dict[int, PendingOperation] = {}
        self.pending_notices = 0  # notices about it that are not journalled yet
        self.is_finished = False  # its end is reported; it waits for its next start
        self.is_over = False  # nothing more comes of it
        self.start_at = 0  # monotonic; of the next start
        self.term_at: int | None = None  # monotonic; SIGTERM was sent
        self.killed = False
        self.waits_since: int | None = None  # monotonic; something holds its lock
        self.check_at = 0  # monotonic; when to look whether it lives
        self.output_from = 0  # bytes of its log that are not this run's
        self.cpu_s: float | None = None
        self.cpu_at = 0  # monotonic
        self.busy_at = 0  # Unix ns; it used CPU

    @property
    def pid(self) -> Pid | None:
        """The running process."""
        row = self.row
        return None if row.pid is None else Pid(row.pid, row.pid_start or "")

    @property
    def busy_text(self) -> str:
        """The reason why no other process of its name is started."""
        row = self.row
        if self.releases:
            return f"{row.name} is being released: try again when that is done"
        first = f"`relay release {row.name}` first"
        if row.pid is None:
            return f"{row.name} will be restarted: {first}"
        return f"{row.name} is already running, pid {row.pid}: {first}"


class ProcessMonitor:
    """Measures running processes and rotates their logs. Used from the loop's thread."""

    def __init__(
        self,
        settings: SpawnSettings,
        home: Home,
        ledger: Ledger,
        activity: Activity,
        spawner: Spawner,
        executor: Executor,
        clock: Clock,
        log: LogCall,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._activity = activity
        self._spawner = spawner
        self._clock = clock
        self._rotator = LogRotator(home, settings.output_mib << 20, executor, clock, log)
        self.due_ns = self._rotator.due_ns

    def measure(self, running: Sequence[Child]) -> list[tuple[Child, LastSeen]]:
        """Record usage and state; returns processes that have just become stuck.

        These are not recorded: that is done with the notice to their requesters.
        """
        seen = self._activity.last_seen(child.row.name for child in running)
        usage = self._spawner.usage([child.pid for child in running if child.pid])
        stuck = []
        for child in running:
            before = child.row.state
            if child.pid in usage:
                self._measure_one(child, seen[child.row.name], usage[child.pid])
            if child.row.state == STUCK != before:
                stuck.append((child, seen[child.row.name]))
        newly_stuck = {child.row.name for child, _ in stuck}
        with self._ledger.transaction():
            self._ledger.processes.put(c.row for c in running if c.row.name not in newly_stuck)
        return stuck

    def _measure_one(self, child: Child, seen: LastSeen, usage: Usage) -> None:
        now, mono = self._clock.now_ns(), self._clock.monotonic_ns()
        percent = None
        if child.cpu_s is not None and mono > child.cpu_at:
            used_s = max(0.0, usage.cpu_s - child.cpu_s)
            percent = round(100 * used_s * NS_PER_S / (mono - child.cpu_at), 1)
            if percent >= BUSY_PERCENT:
                child.busy_at = now
        child.cpu_s, child.cpu_at = usage.cpu_s, mono
        active_at = max(child.busy_at, seen.seen_at or 0, child.row.started_at or 0)
        child.row = child.row._replace(
            cpu_percent=percent,
            rss_bytes=usage.rss_bytes,
            idle_s=max(0, self._activity.age_ns(active_at)) // NS_PER_S,
        )
        age_ns = self._activity.age_ns
        state = next_state(child.row, seen, child.busy_at, self._settings, age_ns)
        if state != child.row.state:
            child.row = child.row.moved(state, now)

    def rotate_logs(self, children: Iterable[Child]) -> None:
        """Rotate the logs of running processes, and of those that have just ended."""
        running = {child.row.name: child for child in children if child.row.pid is not None}
        for name in self._rotator.poll(running):
            if name in running:
                running[name].output_from = 0


class _Registered(msgspec.Struct):
    """The process registered in an agent's meta.json."""

    pid: int | None = None
    pid_start_ticks: int | None = None
    pid_namespace: int = 0


class Starter:
    """Starts processes. Used from the loop's thread.

    ``before_start`` is called before each start with the name and a key unique to that start, so
    that the resume message is in the inbox first.
    """

    def __init__(
        self,
        settings: SpawnSettings,
        home: Home,
        spawner: Spawner,
        clock: Clock,
        log: LogCall,
        before_start: Callable[[str, str], object],
    ) -> None:
        self._settings = settings
        self._home = home
        self._spawner = spawner
        self._clock = clock
        self._log = log
        self._before_start = before_start

    def start(self, child: Child, *, resumed: bool = False, is_done: bool = False) -> bool:
        """Start a process, or find the one started for this request; its row is updated.

        ``resumed``: the request is from before a crash. ``is_done``: it was answered, so it is not
        started again. False: it has ended since, or one of its processes still holds the lock.
        Errors: CannotStart.
        """
        spec = child.spec
        assert spec is not None
        try:
            self._home.make_agent(spec.name)
            pid = self.find(spec) if resumed else None
            if pid is None:
                pid = self._start(child, spec, is_done=is_done)
        except (OSError, RelayError) as exc:
            raise CannotStart(f"its mailbox, lock or log cannot be used: {exc}") from exc
        if pid is None:
            return False
        self.note(child, pid)
        return True

    def find(self, spec: Spec) -> Pid | None:
        """The process started for the request of this spec, if it still runs."""
        return self._spawner.find(spec.request_id, self._home.root)

    def note(self, child: Child, pid: Pid) -> None:
        """Update the row of a process that has started."""
        now = self._clock.now_ns()
        child.check_at, child.cpu_s, child.busy_at = 0, None, now
        child.is_finished = False
        child.row = child.row.moved(
            STARTING,
            now,
            pid=pid.number,
            pid_start=pid.start,
            started_at=now,
            ended_at=None,
            exit_code=None,
            last_error=None,
        )

    def check_free(self, name: str) -> None:
        """Errors: CannotStart if a process started by hand is this agent, or may be."""
        try:
            meta = msgspec.json.decode(self._home.read_meta(name) or b"{}", type=_Registered)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, RelayError):
            return
        except OSError as exc:
            raise CannotStart(f"meta.json of {name} cannot be read: {exc.strerror}") from exc
        if meta.pid is None or meta.pid_start_ticks is None or meta.pid <= 0:
            return
        if is_elsewhere(meta.pid_namespace):  # nobody here knows whether it runs
            return
        if self._spawner.exit_status(Pid(meta.pid, f"{boot_id()} {meta.pid_start_ticks}")) is None:
            raise CannotStart(
                f"{name} is already running, pid {meta.pid}, and was not started by the relay: "
                "end it first"
            )

    def _start(self, child: Child, spec: Spec, *, is_done: bool) -> Pid | None:
        with self._home.dirs() as dirs:
            lock_fd = run_files.take_lock(dirs, spec.name)
            if lock_fd is None:
                return self._holder(child, spec)
            if is_done:
                os.close(lock_fd)
                return None
            try:
                child.output_from = run_files.output_size(dirs, spec.name)
                output_fd = run_files.open_output(dirs, spec.name)
                try:
                    return self._fork(child, spec, lock_fd, output_fd)
                finally:
                    os.close(output_fd)
            finally:
                os.close(lock_fd)

    def _fork(self, child: Child, spec: Spec, lock_fd: int, output_fd: int) -> Pid:
        if check_dir(spec.cwd, self._settings.roots) != spec.cwd:  # it may be another by now
            raise CannotStart(dir_refusal(spec.cwd, self._settings.roots))
        self._before_start(spec.name, f"{spec.request_id} {child.row.restarts}")
        pid = self._spawner.start(spec, self._home.root, lock_fd, output_fd)
        self._log(
            f"Started {spec.name}, pid {pid.number}",
            action="start_process",
            agent=spec.name,
            cli=spec.cli,
            message_id=spec.request_id,
        )
        return pid

    def _holder(self, child: Child, spec: Spec) -> Pid | None:
        """The holder of the lock, if it is ours and a crash kept its pid from being recorded."""
        pid = self.find(spec)
        if pid is None and child.row.started_at is None:
            raise CannotStart(lock_held_text(spec.name))
        return pid

    def left_over(self, name: str) -> str:
        """A hint if a process still holds the lock of one that ended."""
        try:
            with self._home.dirs() as dirs:
                lock_fd = run_files.take_lock(dirs, name)
        except (OSError, RelayError):
            return ""
        if lock_fd is None:
            return "; " + lock_held_text(name)
        os.close(lock_fd)
        return ""


def lock_held_text(name: str) -> str:
    """The hint about a lock held by an unknown process."""
    return (
        f"an unknown process holds run/{name}.lock: "
        "find it with `fuser` or `lsof`, end it, then try again"
    )
