"""One session of the relay: open everything, recover, serve, close.

    ledger -> store -> recovery -> watcher -> wait(tick()) ... -> drain

Opens the stores, and connects the process with the loop (``Dispatcher``). A session that fails is
closed, and the next one's recovery finds its unfinished work, as after a crash.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, TypeVar

from relay.agents.roster import Roster
from relay.agents.spawner import Spawner, SystemSpawner
from relay.agents.supervisor import Supervisor
from relay.base import directory_guard
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.disk import DiskWatch, MeasureDisk, measure_disk
from relay.base.home import LEDGER, STORE, Home, use_openat2
from relay.base.logs import LogCall
from relay.base.metrics import START, STOP, WAIT
from relay.base.watcher import POLL_MS, ScanWatcher, Watcher, WatchEvents, make_watcher
from relay.daemon import recovery
from relay.daemon.disk_monitor import DiskMonitor
from relay.daemon.home_journal import run_command
from relay.daemon.housekeeper import PAUSE_S, Housekeeper
from relay.daemon.opening import OpenedStore, open_store
from relay.daemon.search_filler import SearchFiller
from relay.daemon.status import SharedStatus, StatusPublisher
from relay.delivery.loop import Dispatcher
from relay.delivery.values import Resources
from relay.engine.archives import Roller
from relay.engine.checkpoint import Flusher, FlushPolicy
from relay.journal.tier_plan import JournalCommand
from relay.journal.tiers import TierWorker, lower_priority
from relay.ledger import wal
from relay.ledger.ledger import Ledger

# Ledgers up to this size are checked at every start (5 ms a MiB), larger ones once a day only.
CHECKED_BYTES = 4 << 20
CHECKED_AFTER_CRASH_BYTES = 32 << 20
PATIENCE_S = 2  # wait at the end for a step of the tiers: a stop takes less than five seconds
TIER_POLL_NS = NS_PER_S  # interval at which a running tier job is checked
BACKGROUND_NS = NS_PER_S  # after a busy turn background work is looked after within this time


P = ParamSpec("P")
T = TypeVar("T")


class WakingExecutor(Executor):
    """Hands work to another executor, and wakes the loop when it is done."""

    def __init__(self, executor: Executor, wake: Callable[[], None]) -> None:
        self._executor = executor
        self._wake = wake

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The other's future. Errors: RuntimeError if no thread can be started."""
        future = self._executor.submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._wake())
        return future


class Executors(NamedTuple):
    """Where a session's background work runs. The session closes them."""

    flush: Executor  # writes the store's file and its archives
    tiers: Executor  # moves the journal's segments between tiers
    keeper: Executor  # retention, packing, the ledger's WAL, logs of processes
    search: Executor | None = None  # fills the search index; None: no index is kept
    pause_s: float = PAUSE_S  # of the keeper between two slices of its work

    @classmethod
    def threads(cls) -> Executors:
        """Threads beside the loop. Three for the keeper: neither the WAL nor the log of a process
        waits for a long run over the archive. They pause by themselves instead of being nice,
        because a low-priority thread that holds the interpreter delays the loop."""
        return cls(
            ThreadPoolExecutor(1, thread_name_prefix="flush"),
            ThreadPoolExecutor(1, thread_name_prefix="tiers", initializer=lower_priority),
            ThreadPoolExecutor(3, thread_name_prefix="keeper"),
            ThreadPoolExecutor(1, thread_name_prefix="search"),
        )

    def waking(self, wake: Callable[[], None]) -> Executors:
        """The same, whose work wakes the loop at its end."""
        flush, tiers, keeper = (WakingExecutor(executor, wake) for executor in self[:3])
        search = WakingExecutor(self.search, wake) if self.search is not None else None
        return self._replace(flush=flush, tiers=tiers, keeper=keeper, search=search)

    def close(self, *, wait_tiers: bool = True) -> None:
        """Wait for running work; nothing can be submitted any more."""
        self.tiers.shutdown(wait=wait_tiers, cancel_futures=True)
        for executor in (self.keeper, self.flush, self.search):
            if executor is not None:
                executor.shutdown()


class Session:
    """One session. Used in the thread that opened it.

    Session(...)  opens everything and recovers from the previous run
    begin()       takes the first turn; ``with`` calls it, and closes at the end
    serve()       takes turns until the session has to end
    """

    def __init__(
        self,
        home: Home,
        config: Config,
        clock: Clock,
        log: LogCall,
        *,
        status: SharedStatus | None = None,
        executors: Executors | None = None,
        spawner: Spawner | None = None,
        measure_disk: MeasureDisk = measure_disk,
        boot: str = "",
    ) -> None:
        """Open everything, and recover from the previous run.

        ``boot``: the machine's boot id if not its real one.
        Errors: LedgerError, FormatError, OSError when a file cannot be used.
        """
        self.home, self.clock, self._log = home, clock, log
        self.status = status or SharedStatus(home.root, config, clock)
        self._background_ns = 0  # monotonic: when to look after background work
        use_openat2()
        self.is_ending = False  # True: end as soon as no tier job runs
        self.status.metrics.begin(START)
        self._executors = executors or Executors.threads()
        with contextlib.ExitStack() as stack:
            self.ledger = ledger = _open_ledger(stack, home, config, clock, log)
            self.epoch = self.status.epoch = epoch_of(ledger)
            given, self.opened, requeued = open_recovered(
                stack, home, config, clock, log, ledger, self._warn, boot=boot
            )
            store = self.opened.store
            self.watcher = _open_watcher(stack, home, config, log)
            executors = self._executors.waking(self.watcher.wake)
            keeper = executors.keeper
            self._tier_worker = TierWorker(self.opened.tiers, executors.tiers, clock)
            stack.callback(self._close_executors)
            self.flusher = make_flusher(self.opened, home, config, executors.flush)
            self.dispatcher = Dispatcher(
                given,
                flusher=self.flusher,
                roller=Roller(store.archives, config.store, executors.flush),
                roster=Roster(home, self.watcher, config.lead, log),
                metrics=self.status.metrics,
            )
            self.housekeeper = Housekeeper(given, keeper, pause_s=executors.pause_s)
            stack.callback(self.housekeeper.stop)  # before its threads are waited for
            self._search = SearchFiller(home, config, clock, self.opened.key, executors.search, log)
            stack.callback(self._search.stop)
            resume = self.dispatcher.notifier.send_resume_message
            spawner = spawner or SystemSpawner()
            self.supervisor = Supervisor(
                config.spawn, home, ledger, store, spawner, keeper, clock, log, resume
            )
            self._publisher = StatusPublisher(self.dispatcher, store, self.watcher)
            disk = DiskWatch(home.root, config.disk, measure_disk)
            self.disk_monitor = DiskMonitor(given, self.status, self.dispatcher, disk)
            self.dispatcher.requeue(requeued)
            self._stack = stack.pop_all()

    def begin(self) -> None:
        """Take the first turn: everything that waits in outboxes. Closes the session if it fails.

        Errors: as those of a turn.
        """
        try:
            self.disk_monitor.check()
            self.dispatcher.tick(WatchEvents(agents_changed=True, scan=True))
            self.status.publish(self._publisher.step())
        except BaseException:
            self.close()
            raise
        self.status.is_serving, self.status.wake = True, self.watcher.wake
        self._log("Ready", action="ready", epoch=self.epoch, watcher=self.watcher.name)

    def __enter__(self) -> Session:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close everything as it is; work in progress is the next session's."""
        self.status.is_serving, self.status.wake = False, None
        self.status.metrics.begin(STOP)
        self._stack.close()
        self.status.metrics.begin(START)

    def _close_executors(self) -> None:
        """Wait for background work, for a step of the tiers ``PATIENCE_S`` at most.

        One that hangs in an object store is left behind, as by a kill: its manifest is closed, so
        it records nothing more, and the next session's steps find what it did.
        """
        left = self._tier_worker.wait(PATIENCE_S)
        self._executors.close(wait_tiers=left is None)
        if left is not None:
            self.status.left_step = left
            text = f"Left a step of the journal's tiers: it did not end within {PATIENCE_S} s"
            self._log(text, action="tier_step", level="warning")

    def serve(self, is_stopping: Callable[[], bool]) -> None:
        """Run the loop until ``is_stopping``; then finish the current work."""
        while not is_stopping():
            self.turn()
        self.status.is_serving = False
        self.status.metrics.begin(STOP)
        self.dispatcher.drain()
        self._log("Stopped", action="stopped", epoch=self.epoch)

    def turn(self, *, is_waiting: bool = True) -> None:
        """One turn of the loop: wait for an event or the earliest deadline, then do all due work.

        ``is_waiting`` False: look at everything now, without waiting.
        """
        dispatcher = self.dispatcher
        due_ns = min(dispatcher.due_ns, self._background_ns)
        now = self.status.metrics.begin(WAIT)
        wake = self.watcher.wait(due_ns - now if is_waiting else 0)
        is_busy = dispatcher.tick(wake if is_waiting else wake._replace(woken=True))
        now = self.clock.monotonic_ns()
        is_due = wake.woken or now >= self._background_ns or dispatcher.has_requests
        if is_due or not is_waiting:
            self._background_ns = self._look_after(now)
        elif is_busy:  # it may have made work: the WAL grows, the journal, a segment is full
            self._background_ns = min(self._background_ns, now + BACKGROUND_NS)
        if self.status.asked:
            self.status.publish(self._publisher.step())

    def wait_background(self, seconds: float) -> bool:
        """Wait for background work; False if a tier job (an upload) still runs after that time.

        Everything accepted is durable by then.
        """
        return self._tier_worker.wait(seconds) is None

    def poll_supervisor(self) -> None:
        """Start, end and watch processes as far as due, and deliver the supervisor's notices."""
        supervisor, dispatcher = self.supervisor, self.dispatcher
        supervisor.poll(has_requests=dispatcher.pop_process_requests())
        notices = supervisor.notices()
        if notices and supervisor.can_notify:
            supervisor.mark_sent(dispatcher.notifier.send(notices))

    def _look_after(self, now: int) -> int:
        """Look after processes, the disk and background work; returns when to do so again
        (monotonic ns)."""
        self.dispatcher.guard.check()
        self.status.metrics.begin("processes")
        self._run_jobs()
        self.poll_supervisor()
        self.disk_monitor.step()
        usage = self.status.disk
        is_low = usage is not None and usage.state.is_low
        keeper_due = self.housekeeper.poll(idle=self.dispatcher.due_ns > now, is_low=is_low)
        self._answer_jobs()
        self.dispatcher.pause("wal", self.housekeeper.wal.paused)
        self.status.pauses = self.dispatcher.pauses
        self.status.ledger_damage = self.housekeeper.damage
        due = [keeper_due, self._poll_tiers(), self.disk_monitor.due_ns()]
        due.append(self._search.poll(self.opened.events.journal.durable, is_low=is_low))
        processes_due = self.supervisor.due_ns()
        return min(due if processes_due is None else [*due, processes_due])

    def _warn(self, text: str) -> None:
        self._log(f"The store: {text}", action="store_warning", level="warning")

    def _run_jobs(self) -> None:
        for asked_by, job in self.dispatcher.pop_jobs():
            if isinstance(job, JournalCommand):
                run_command(self.home, self.opened.events, self.opened.tiers, self.clock, job)
            else:
                self.housekeeper.enqueue(job, asked_by)

    def _answer_jobs(self) -> None:
        answers, answer = self.housekeeper.answers, self.dispatcher.notifier.answer
        self.housekeeper.answers = [reply for reply in answers if not answer(*reply)]

    def _poll_tiers(self) -> int:
        done = self._tier_worker.poll(start=not self.is_ending)
        self.status.tiers_waiting = self._tier_worker.waiting()
        if done:
            self._log(f"The journal: {done}", action="tier_step")
        due = self._tier_worker.due_ns()
        soon = self.clock.monotonic_ns() + TIER_POLL_NS
        return soon if due is None or self.is_ending else due


def _open_ledger(
    stack: contextlib.ExitStack, home: Home, config: Config, clock: Clock, log: LogCall
) -> Ledger:
    """Secure the home, open the ledger, and record files that others could access."""
    incidents = directory_guard.secure(home)
    for incident in incidents:
        log(incident.detail, action=str(incident.kind), file=incident.path, level="warning")
    path = home.path(LEDGER)
    was_closed = not wal.wal_bytes(path)  # else the last writer was killed
    ledger = Ledger.open(path)
    stack.callback(ledger.close)
    ledger.check(most_bytes=CHECKED_BYTES if was_closed else CHECKED_AFTER_CRASH_BYTES)
    begin_epoch(ledger, clock)
    with ledger.transaction():
        ledger.agents.add_incidents(incidents, clock.now_ns(), again=True)
    return ledger


def open_recovered(
    stack: contextlib.ExitStack,
    home: Home,
    config: Config,
    clock: Clock,
    log: LogCall,
    ledger: Ledger,
    warn: Callable[[str], object],
    *,
    make_key: bool = True,
    boot: str = "",
) -> tuple[Resources, OpenedStore, list[tuple[str, str]]]:
    """Open store and journal beside the ledger of a begun epoch, and recover all three.

    Returns also the files to process first, (agent, file name). Errors: those of ``open_store``.
    """
    restorer = recovery.Restorer(home, ledger, clock, log)
    opened = open_store(
        home,
        config,
        clock,
        warn,
        make_key=make_key,
        epoch=epoch_of(ledger),
        ledger_position=ledger.position(),
        boot=boot,
        write_piece=restorer.write,
    )
    stack.callback(opened.events.close)
    given = Resources(config, home, ledger, opened.store, opened.events, clock, log)
    return given, opened, recovery.recover(given, opened, restorer)


def epoch_of(ledger: Ledger) -> int:
    """Number of the relay's starts with this ledger."""
    return int(ledger.get_state("epoch") or 0)


def _open_watcher(stack: contextlib.ExitStack, home: Home, config: Config, log: LogCall) -> Watcher:
    watcher = make_watcher(home, config.detection.watcher)
    stack.callback(watcher.close)
    if isinstance(watcher, ScanWatcher) and watcher.why:
        text = f"Scanning every {POLL_MS} ms: {watcher.why}"
        log(text, action="scan_instead", level="warning")
    return watcher


def begin_epoch(ledger: Ledger, clock: Clock) -> None:
    """Count the start, and record this process as the writer."""
    now = clock.now_ns()
    with ledger.transaction():
        epoch = epoch_of(ledger) + 1
        if ledger.get_state("home_id") is None:  # tells a backup of another home apart
            ledger.set_state("home_id", uuid.uuid4().hex, now)
        for key, value in (
            ("epoch", epoch),
            ("writer", f"daemon {epoch}"),
            ("pid", os.getpid()),
            ("started_at", now),
        ):
            ledger.set_state(key, str(value), now)


def make_flusher(opened: OpenedStore, home: Home, config: Config, executor: Executor) -> Flusher:
    """The writer of checkpoints: ``store/relay.acomm``."""
    settings, path = config.store, home.path(STORE)
    policy = FlushPolicy(
        settings.checkpoint_messages,
        settings.checkpoint_ms,
        settings.checkpoint_pause_factor,
        settings.compress,
    )
    store, key, events = opened.store, opened.key, opened.events
    return Flusher(store, path, policy, executor, key, events)
