"""The supervisor: starts processes on request, monitors them and ends them.

Used from the loop's thread, once a turn: ``poll`` does all due work, ``notices`` is what to send
about it, ``mark_sent`` says which notices are in the journal. A process makes no further step
before the notices of its last step are sent, so that after a crash each step is found and
reported once.

    intent recorded -> locked, started -> answered; row and intent recorded with it
    end seen -> rest of its session ended -> end recorded -> reported -> started again, or over

A name never has two processes: the process holds run/{name}.lock while it lives.
States: docs/states.md, "A process the relay started".
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from concurrent.futures import Executor

from relay.agents import run_files
from relay.agents.processes import (
    Child,
    ProcessMonitor,
    ProcessNotice,
    Starter,
    answer_notice,
    decide_restart,
    lock_held_text,
    new_row,
    restarted,
    started_text,
    terminate_unstarted,
    terminated_status,
    time_after_end,
)
from relay.agents.requests import Spec
from relay.agents.spawner import CannotStart, Pid, Spawner, describe_exit
from relay.agents.status import Activity, AgentStatus, StatusChange
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.config import SpawnSettings
from relay.base.home import Home
from relay.base.logs import LogCall
from relay.base.message import Kind
from relay.engine.engine import Engine
from relay.ledger.agents import (
    ENDS,
    EXITED,
    FAILED,
    RELEASED,
    STARTING,
    PendingOperation,
    ProcessRow,
)
from relay.ledger.ledger import Ledger

LOOK_NS = 5 * NS_PER_S  # between two looks at what it uses, owes and writes
ADOPTED_NS = NS_PER_S  # no signal announces the end of an adopted process
ENDING_NS = 50 * NS_PER_MS  # polling between SIGTERM and SIGKILL, and after
MOST_AT_ONCE = 4  # requests in one turn: each start takes milliseconds, and messages wait meanwhile
AGAIN_NS = NS_PER_S  # after a notice or start that failed


class Supervisor:
    """Owns the processes started by the relay."""

    def __init__(
        self,
        settings: SpawnSettings,
        home: Home,
        ledger: Ledger,
        store: Engine,
        spawner: Spawner,
        executor: Executor,
        clock: Clock,
        log: LogCall,
        before_start: Callable[[str, str], object],
    ) -> None:
        self._settings = settings
        self._home = home
        self._ledger = ledger
        self._activity = Activity(ledger, store)
        self._spawner = spawner
        self._clock = clock
        self._log = log
        self._starter = Starter(settings, home, spawner, clock, log, before_start)
        self._monitor = ProcessMonitor(
            settings, home, ledger, self._activity, spawner, executor, clock, log
        )
        self._children: dict[str, Child] = {}
        self._in_hand: set[int] = set()  # intents that are being carried out
        self._out: list[tuple[Child | None, ProcessNotice]] = []
        self._refused_at: int | None = None  # monotonic; the notices could not be carried
        self._next_look = 0
        self._ask_again = False  # an intent waits for the last notice about its name
        self._resume()

    # -- the loop's side ---------------------------------------------------------------------

    def poll(self, *, has_requests: bool) -> None:
        """Do all due work. ``has_requests``: intents were recorded since the last call."""
        if has_requests or self._ask_again:
            self._ask_again = False
            self._take_intents()
        for child in list(self._children.values()):
            if not child.pending_notices:
                self._step(child)
        if self._clock.monotonic_ns() >= self._next_look:
            self._measure()
        self._monitor.rotate_logs(self._children.values())

    def notices(self) -> list[ProcessNotice]:
        """Notices to be sent now; returned again until they are marked as sent."""
        return [notice for _, notice in self._out]

    @property
    def can_notify(self) -> bool:
        """False for a while after notices could not be sent."""
        at = self._refused_at
        return at is None or self._clock.monotonic_ns() >= at + AGAIN_NS

    def mark_sent(self, done: Collection[int]) -> None:
        """Mark notices, by index in ``notices``, as sent and recorded; the rest is sent again."""
        left: list[tuple[Child | None, ProcessNotice]] = []
        for place, (child, notice) in enumerate(self._out):
            if place not in done:
                left.append((child, notice))
                continue
            self._in_hand -= set(notice.closed_intents)
            if notice.forget is not None:
                with self._home.dirs() as dirs:
                    run_files.remove_spec(dirs, *notice.forget)
            if child is not None:
                child.pending_notices -= 1
                if child.is_over and not child.pending_notices:
                    self._forget(child)
        self._out = left
        self._refused_at = self._clock.monotonic_ns() if left else None

    def due_ns(self) -> int | None:
        """Time at which ``poll`` has work to do (monotonic)."""
        logs_due = self._monitor.due_ns()
        due = [] if logs_due is None else [logs_due]
        if self._out:
            due.append(0 if self._refused_at is None else self._refused_at + AGAIN_NS)
        if self._ask_again:
            due.append(0)
        now = self._clock.monotonic_ns()
        for child in self._children.values():
            if child.pending_notices:
                continue
            due.append(self._next_look)
            if child.row.pid is None:
                due.append(child.start_at)
            elif child.term_at is not None or child.releases:
                due.append(now + ENDING_NS)
            else:
                due.append(child.check_at)
        return min(due, default=None)

    # -- what was asked ----------------------------------------------------------------------

    def _resume(self) -> None:
        """Adopt the processes of the last session, or of a relay that was killed."""
        with self._home.dirs() as dirs:
            rows = self._ledger.processes.rows()
            for row in rows.values():
                if row.state not in ENDS:
                    child = Child(row, run_files.read_spec(dirs, row.name, row.request_id))
                    self._children[row.name] = child
                    self._adopt(child)
            intents = {i.request_id for i in self._ledger.processes.open_operations().values()}
            for name, request_id in run_files.list_specs(dirs):
                known = self._children.get(name)
                if request_id not in intents and not (known and known.row.request_id == request_id):
                    self._find_lost(name, request_id)
        self._take_intents(resumed=True)

    def _adopt(self, child: Child) -> None:
        """Adopt a process; one started again whose pid was not recorded is found."""
        row, pid = child.row, child.pid
        if pid is None and child.spec is not None:
            pid = self._starter.find(child.spec)
            if pid is not None:
                child.row = restarted(row, self._settings, self._clock.now_ns())
                self._starter.note(child, pid)
                self._notify_restarted(child, row)
        if pid is not None:
            facts = {"action": "adopt_process", "agent": row.name, "pid": pid.number}
            self._log(f"Looks after {row.name} again, pid {pid.number}", **facts)

    def _find_lost(self, name: str, request_id: str) -> None:
        """Find the process of a spec without row or intent: the ledger was lost."""
        with self._home.dirs() as dirs:
            spec = run_files.read_spec(dirs, name, request_id)
            found = self._starter.find(spec) if spec and name not in self._children else None
            if found is None or spec is None:
                run_files.remove_spec(dirs, name, request_id)
                return
        child = self._children[name] = Child(new_row(spec, self._clock.now_ns()), spec)
        self._starter.note(child, found)
        with self._ledger.transaction():
            self._ledger.processes.put([child.row])
        self._adopt(child)

    def _take_intents(self, *, resumed: bool = False) -> None:
        waiting = self._ledger.processes.open_operations().items()
        for number_begun, (number, intent) in enumerate(
            (n, i) for n, i in waiting if n not in self._in_hand
        ):
            if number_begun == MOST_AT_ONCE and not resumed:
                self._ask_again = True
                break
            self._in_hand.add(number)
            if intent.operation == "spawn":
                self._spawn(number, intent, resumed=resumed)
            else:
                self._release(number, intent)

    def _spawn(self, number: int, intent: PendingOperation, *, resumed: bool) -> None:
        known = self._children.get(intent.name)
        if known is not None and known.is_over:  # the name is free once its end is reported
            self._in_hand.discard(number)
            return
        answered = self._activity.previous_answer(intent) if resumed else None
        if known is not None and known.row.request_id == intent.request_id:
            self._enqueue_notice(
                known, answer_notice(intent, Kind.ACK, started_text(known.row), number)
            )
            return
        with self._home.dirs() as dirs:
            spec = run_files.read_spec(dirs, intent.name, intent.request_id)
        if answered is not None and answered[0] is Kind.NACK:  # a crash came before that was noted
            row = None
            if spec is not None and intent.name not in self._ledger.processes.rows():
                now = self._clock.now_ns()
                row = new_row(spec, now).moved(FAILED, now, ended_at=now, last_error=answered[1])
            self._refuse(intent, number, answered[1], row)
        elif known is not None:
            self._refuse(intent, number, known.busy_text)
        elif spec is None:
            self._refuse(intent, number, "its spec was lost in a crash: send it again")
        else:
            self._begin(number, intent, spec, resumed=resumed, is_done=answered is not None)

    def _begin(
        self, number: int, intent: PendingOperation, spec: Spec, *, resumed: bool, is_done: bool
    ) -> None:
        """Start a process for the first time, or adopt it if it was started before a crash."""
        child = Child(new_row(spec, self._clock.now_ns()), spec)
        try:
            if not resumed:
                self._starter.check_free(spec.name)
            runs = self._starter.start(child, resumed=resumed, is_done=is_done)
        except CannotStart as exc:
            now = self._clock.now_ns()
            row = child.row.moved(FAILED, now, ended_at=now, last_error=str(exc))
            self._refuse(intent, number, str(exc), row)
            return
        self._children[spec.name] = child
        if not runs:  # it was started and answered, and has ended since
            at = child.row.changed_at
            child.row = child.row._replace(started_at=at, ended_at=self._clock.now_ns())
        self._measure_soon()
        notice = answer_notice(intent, Kind.ACK, started_text(child.row), number)
        active = StatusChange(spec.name, AgentStatus.ACTIVE, None)
        self._enqueue_notice(child, notice._replace(process=child.row, status_change=active))

    def _refuse(
        self, intent: PendingOperation, number: int, reason: str, row: ProcessRow | None = None
    ) -> None:
        """Refuse a request: the requester gets the reason, and the spec is removed."""
        notice = answer_notice(intent, Kind.NACK, reason, number)
        spec = (intent.name, intent.request_id)
        change = terminate_unstarted(self._ledger, self._home, row) if row is not None else None
        self._enqueue_notice(None, notice._replace(process=row, forget=spec, status_change=change))
        self._log(
            f"Did not start {intent.name}: {reason}",
            action="spawn_failed",
            level="warning",
            agent=intent.name,
            message_id=intent.request_id,
        )

    def _release(self, number: int, intent: PendingOperation) -> None:
        child = self._children.get(intent.name)
        if child is not None and not child.is_over:
            child.releases[number] = intent
            return
        row = child.row if child else self._ledger.processes.rows().get(intent.name)
        if row is None:
            text = f"the relay has no process {intent.name}: `relay ps` lists its processes"
            self._enqueue_notice(None, answer_notice(intent, Kind.NACK, text, number))
        else:
            text = f"{intent.name} is not running (it is {row.state})"
            self._enqueue_notice(None, answer_notice(intent, Kind.ACK, f"completed {text}", number))

    # -- one process -------------------------------------------------------------------------

    def _step(self, child: Child) -> None:
        pid, now = child.pid, self._clock.monotonic_ns()
        if pid is None:
            if not child.is_finished:
                self._finish(child)
            elif child.releases:
                self._finish_release(child)
            elif now >= child.start_at:
                self._restart(child)
            return
        is_ending = child.term_at is not None or bool(child.releases)
        if now < child.check_at and not is_ending and not self._spawner.is_own(pid):
            return
        child.check_at = now + (LOOK_NS if self._spawner.is_own(pid) else ADOPTED_NS)
        ended = self._spawner.exit_status(pid)
        if ended is None:
            if child.releases:
                self._end(child, pid)
            return
        if self._spawner.others(pid):  # until it is reaped, its number is not reused
            self._end(child, pid)
            return
        at = self._clock.now_ns()
        child.row = child.row.ended(at, ended.code)
        with self._ledger.transaction():
            self._ledger.processes.put([child.row])
        self._spawner.reap(pid)
        child.term_at, child.killed = None, False
        self._finish(child)

    def _end(self, child: Child, pid: Pid) -> None:
        """Send SIGTERM to the session, and after the grace period SIGKILL."""
        now = self._clock.monotonic_ns()
        if child.term_at is None:
            child.term_at = now
            self._spawner.signal(pid, signal.SIGTERM)
        elif now - child.term_at >= self._settings.grace_s * NS_PER_S:
            if not child.killed:
                self._log(
                    f"{child.row.name} did not end within {self._settings.grace_s} s: killed",
                    action="kill_process",
                    level="warning",
                    agent=child.row.name,
                )
            child.killed = True
            self._spawner.signal(pid, signal.SIGKILL)

    def _finish(self, child: Child) -> None:
        """Report a recorded end, and restart the process if its policy says so."""
        if child.releases:
            self._finish_release(child)
            return
        child.is_finished = True
        row, now, settings = child.row, self._clock.now_ns(), self._settings
        verdict = decide_restart(row, settings, now)
        again_s, is_lost = verdict.again_in_s, False
        text = error = f"{row.name} {describe_exit(row.exit_code)}"
        if again_s is not None and child.spec is None:
            again_s, is_lost = None, True
            text += "; its spec was lost, so it is not restarted"
        if again_s is not None:
            child.start_at = self._clock.monotonic_ns() + again_s * NS_PER_S
            child.row = row.moved(STARTING, now, last_error=error)
            text += f"; it will be restarted in {again_s} s"
        else:
            child.is_over = True
            state = FAILED if verdict.gave_up or is_lost else EXITED
            if verdict.gave_up:
                error = f"given up after {settings.restart_times} restarts: {error}"
            is_fault = state == FAILED or row.exit_code != 0
            child.row = row.moved(state, now, last_error=error if is_fault else None)
        begun_at = row.started_at or 0
        self._notify(child, f"exited {begun_at}", "\n".join([text, *self._tail(child)]))
        if verdict.gave_up:
            times, window_s = settings.restart_times, settings.restart_window_s
            text = f"{row.name} is given up: it was restarted {times} times in {window_s} s"
            self._notify(child, f"given up {begun_at}", text, (row.ended_at or 0) + 2)

    def _finish_release(self, child: Child) -> None:
        """Report a requested end to its requesters and to the requester of the spawn."""
        row, releases = child.row, child.releases
        child.is_over, child.releases, child.is_finished = True, {}, True
        asked = [(request.requested_by, request.reason) for request in releases.values()]
        why = "released by " + ", ".join(f"{name}: {reason}".rstrip(": ") for name, reason in asked)
        child.row = row.moved(RELEASED, self._clock.now_ns(), last_error=None)
        how = describe_exit(row.exit_code)
        for number, intent in releases.items():
            text = f"completed released {row.name}: it {how}{self._starter.left_over(row.name)}"
            notice = answer_notice(intent, Kind.ACK, text, number)
            self._enqueue_notice(
                child, notice._replace(process=child.row, status_change=terminated_status(row, why))
            )
        if row.requested_by not in (name for name, _ in asked):
            text = f"{row.name} {how}: {why}"
            self._notify(child, f"released {row.started_at or 0}", text, why=why)

    def _restart(self, child: Child) -> None:
        """Start it again, or give it up if it cannot be started now."""
        assert child.spec is not None
        before, now = child.row, self._clock.now_ns()
        child.row = restarted(before, self._settings, now)
        try:
            runs = self._starter.start(child)
        except CannotStart as exc:
            child.row = before
            self._give_up(child, str(exc))
            return
        if not runs:
            self._wait_for_lock(child, before)
            return
        child.waits_since = None
        self._measure_soon()
        self._notify_restarted(child, before)

    def _wait_for_lock(self, child: Child, before: ProcessRow) -> None:
        """Wait for the grace period: a process that left its session may still hold the lock."""
        now = self._clock.monotonic_ns()
        if child.waits_since is None:
            child.waits_since = now
        child.row, child.start_at = before, now + AGAIN_NS
        if now - child.waits_since >= self._settings.grace_s * NS_PER_S:
            self._give_up(child, lock_held_text(before.name))

    def _give_up(self, child: Child, reason: str) -> None:
        before = child.row
        child.is_over = True
        child.row = before.moved(FAILED, self._clock.now_ns(), last_error=reason)
        text = f"{before.name} is given up: it cannot be restarted: {reason}"
        self._notify(child, f"given up {before.started_at}", text, time_after_end(before))

    def _notify_restarted(self, child: Child, before: ProcessRow) -> None:
        row = child.row
        text = f"{row.name} was restarted, pid {row.pid}"
        self._notify(child, f"restarted {row.restarts}", text, time_after_end(before))

    def _measure_soon(self) -> None:
        self._next_look = min(self._next_look, self._clock.monotonic_ns() + LOOK_NS)

    def _measure(self) -> None:
        """Measure all running processes; report those that have become stuck, once."""
        self._next_look = self._clock.monotonic_ns() + LOOK_NS
        running = [
            c for c in self._children.values() if c.row.pid is not None and not c.pending_notices
        ]
        for child, seen in self._monitor.measure(running) if running else ():
            owed_s = self._activity.age_ns(seen.owes_since or 0) // NS_PER_S
            name = child.row.name
            text = (
                f"{name} is stuck: it owes a read or an answer for {owed_s} s; "
                f"`relay open --agent {name}` and its inbox show what"
            )
            at = (seen.owes_since or 0) + self._settings.stuck_after_s * NS_PER_S
            self._notify(child, f"stuck {seen.owes_since}", text, at)

    def _tail(self, child: Child) -> list[str]:
        secrets = child.spec.secrets if child.spec else ()
        try:
            return run_files.last_lines(self._home, child.row.name, child.output_from, secrets)
        except OSError:
            return []

    def _notify(self, child: Child, key: str, text: str, at: int = 0, why: str = "") -> None:
        """Notify the requester of a process; the ledger is updated with the same commit.

        ``at``: the notice's id is derived from it; the same again after a crash.
        """
        row = child.row
        change = terminated_status(row, why or text.partition("\n")[0]) if child.is_over else None
        notice = ProcessNotice(
            row.requested_by,
            row.request_id,
            at or (row.ended_at or 0) + 1,
            Kind.NOTIFICATION,
            text,
            key,
            row,
            (),
            change,
        )
        self._enqueue_notice(child, notice)
        self._log(
            text.partition("\n")[0],
            action="process_" + key.partition(" ")[0],
            agent=row.name,
            message_id=row.request_id,
        )

    def _enqueue_notice(self, child: Child | None, notice: ProcessNotice) -> None:
        self._out.append((child, notice))
        self._refused_at = None
        if child is not None:
            child.pending_notices += 1

    def _forget(self, child: Child) -> None:
        """Remove a process that has ended and was fully reported, with its secrets."""
        with self._home.dirs() as dirs:
            run_files.remove_spec(dirs, child.row.name, child.row.request_id)
        if self._children.get(child.row.name) is child:
            del self._children[child.row.name]
        self._ask_again = True
