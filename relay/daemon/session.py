"""One session of the relay: open everything, recover, serve, close.

    ledger -> store -> recovery -> watcher -> wait(tick()) ... -> drain

The only place where the parts are connected. A session that fails is closed, and the next one's
recovery finds its unfinished work, as after a crash.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple

from relay.agents.roster import Roster
from relay.agents.spawner import Spawner, SystemSpawner
from relay.agents.supervisor import Supervisor
from relay.base import directory_guard
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.disk import DiskWatch, MeasureDisk, measure_disk
from relay.base.home import LEDGER, STORE, Home
from relay.base.logs import LogCall
from relay.base.metrics import START, STOP, WAIT, Metrics
from relay.base.watcher import ScanWatcher, Watcher, WatchEvents, make_watcher
from relay.daemon import recovery
from relay.daemon.disk_monitor import DiskMonitor
from relay.daemon.housekeeper import PAUSE_S, Housekeeper
from relay.daemon.journal_commands import run_command
from relay.daemon.opening import open_store, store_key
from relay.daemon.recovery import Context
from relay.daemon.status import SharedStatus, StatusPublisher
from relay.delivery.eventlog import EventLog
from relay.delivery.loop import Dispatcher
from relay.engine.archives import Roller, RollPolicy
from relay.engine.checkpoint import Flusher, FlushPolicy, InlineExecutor
from relay.engine.commstore import CommStore
from relay.journal.plan import JournalCommand
from relay.journal.tiers import Tiers, TierWorker, lower_priority
from relay.ledger import Ledger, wal

# Ledgers up to this size are checked at every start (5 ms a MiB), larger ones once a day only.
CHECKED_BYTES = 4 << 20
CHECKED_AFTER_CRASH_BYTES = 32 << 20
TIER_POLL_NS = NS_PER_S  # interval at which a running tier job is checked


class Executors(NamedTuple):
    """Where a session's background work runs. The session closes them."""

    flush: Executor  # writes the store's file and its archives
    tiers: Executor  # moves the journal's segments between tiers
    keeper: Executor  # retention, packing, the ledger's WAL, logs of processes
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
        )

    @classmethod
    def inline(cls) -> Executors:
        """No threads: the loop does all work itself, at once."""
        return cls(InlineExecutor(), InlineExecutor(), InlineExecutor(), pause_s=0)

    def close(self) -> None:
        """Wait for running work; nothing can be submitted any more."""
        for executor in (self.keeper, self.tiers, self.flush):
            executor.shutdown()


class Stores(NamedTuple):
    """Ledger, store and journal of a home: open and recovered."""

    epoch: int
    ledger: Ledger
    store: CommStore
    events: EventLog
    tiers: Tiers
    key: bytes | None  # of the store's file
    requeued: list[tuple[str, str]]  # files to process first: (agent, file name)


class Session:
    """One session, open and recovered; closed by ``with``. Used in the thread that opened it."""

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
        """Open everything, recover from the previous run, and do what is due.

        ``boot``: the machine's boot id if not its real one.
        Errors: LedgerError, FormatError, OSError when a file cannot be used.
        """
        self.home, self.clock, self._log = home, clock, log
        self.status = status or SharedStatus(home.root, config, clock)
        self.is_ending = False  # True: end as soon as no tier job runs
        tally = self.status.tally
        tally.begin(START)
        executors = executors or Executors.threads()
        keeper = executors.keeper
        with contextlib.ExitStack() as stack:
            ledger = _open_ledger(stack, home, config, clock, log)
            stores = recover_stores(
                stack, home, config, clock, log, ledger, self._warn, boot=boot, tally=tally
            )
            self.stores, self.status.epoch = stores, stores.epoch
            self.watcher = _open_watcher(stack, home, config, log)
            wake = self.watcher.wake
            stack.callback(executors.close)
            self.flusher = make_flusher(stores, home, config, clock, executors.flush, wake)
            roller = make_roller(stores.store, config, clock, executors.flush, wake)
            roster = Roster(home, self.watcher, config.lead, log)
            self.dispatcher = Dispatcher(
                config=config,
                home=home,
                ledger=ledger,
                store=stores.store,
                events=stores.events,
                flusher=self.flusher,
                roller=roller,
                roster=roster,
                metrics=tally,
                clock=clock,
                log=log,
            )
            self.housekeeper = Housekeeper(
                home, ledger, config, clock, keeper, log, pause_s=executors.pause_s
            )
            stack.callback(self.housekeeper.stop)  # before its threads are waited for
            self._tier_worker = TierWorker(stores.tiers, executors.tiers, clock, wake)
            self.supervisor = Supervisor(
                config.spawn,
                home,
                ledger,
                stores.store,
                spawner or SystemSpawner(),
                keeper,
                clock,
                log,
                self.dispatcher.notifier.send_resume_message,
            )
            self.disk_monitor = DiskMonitor(
                self.status,
                self.dispatcher,
                StatusPublisher(self.dispatcher, stores.store, self.watcher, clock),
                DiskWatch(home.root, config.disk, clock, measure_disk),
                ledger,
                clock,
                log,
            )
            self.disk_monitor.begin()
            self.dispatcher.requeue(stores.requeued)
            self.deadline = self.dispatcher.tick(WatchEvents(agents_changed=True, scan=True))
            log("Ready", action="ready", epoch=stores.epoch, watcher=self.watcher.name)
            self._stack = stack.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close everything as it is; work in progress is the next session's."""
        self.status.is_serving = False
        self.status.tally.begin(STOP)
        self._stack.close()
        self.status.tally.begin(START)

    def serve(self, is_stopping: Callable[[], bool]) -> None:
        """Run the loop until ``is_stopping``; then finish the current work."""
        self.status.is_serving = True
        while not is_stopping():
            self.turn()
        self.status.is_serving = False
        self.status.tally.begin(STOP)
        self.dispatcher.drain()
        self._log("Stopped", action="stopped", epoch=self.stores.epoch)

    def turn(self, *, is_waiting: bool = True) -> None:
        """One turn of the loop: wait for an event or the earliest deadline, then do all due work.

        ``is_waiting`` False: do what is due now, without waiting.
        """
        due = self._poll_background()
        timeout_ns = due - self.clock.monotonic_ns() if is_waiting else 0
        self.status.tally.begin(WAIT)
        self.deadline = self.dispatcher.tick(self.watcher.wait(timeout_ns))
        self._run_jobs()
        self.status.tally.begin("processes")
        self.poll_supervisor()
        self.disk_monitor.step()

    def wait_background(self, seconds: float) -> bool:
        """Wait for background work; False if a tier job (an upload) still runs after that time.

        Everything accepted is durable by then.
        """
        return self._tier_worker.wait(seconds)

    def poll_supervisor(self) -> None:
        """Start, end and watch processes as far as due, and deliver the supervisor's notices."""
        supervisor, dispatcher = self.supervisor, self.dispatcher
        supervisor.poll(has_requests=dispatcher.pop_process_requests())
        notices = supervisor.notices()
        if notices and supervisor.can_notify:
            supervisor.mark_sent(dispatcher.notifier.send(notices))

    def _poll_background(self) -> int:
        """Poll background work; returns when the next turn is due (monotonic ns)."""
        usage = self.status.disk
        keeper_due = self.housekeeper.poll(
            idle=self.deadline > self.clock.monotonic_ns(),
            is_low=usage is not None and usage.state.is_low,
        )
        self.dispatcher.pause("wal", self.housekeeper.paused)
        self.status.ledger_damage = self.housekeeper.damage
        due = [self.deadline, keeper_due, self._poll_tiers(), self.disk_monitor.due_ns()]
        processes_due = self.supervisor.due_ns()
        return min(due if processes_due is None else [*due, processes_due])

    def _warn(self, text: str) -> None:
        self._log(f"The store: {text}", action="store_warning", level="warning")

    def _run_jobs(self) -> None:
        for job in self.dispatcher.pop_jobs():
            if isinstance(job, JournalCommand):
                run_command(self.home, self.stores.events, self.stores.tiers, self.clock, job)
            else:
                self.housekeeper.enqueue(job)

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
    for one in incidents:
        log(one.detail, action=str(one.kind), file=one.path, level="warning")
    path = home.path(LEDGER)
    was_closed = not wal.wal_bytes(path)  # else the last writer was killed
    ledger = Ledger.open(path, busy_timeout_ms=config.ledger.busy_timeout_ms)
    stack.callback(ledger.close)
    ledger.check(most_bytes=CHECKED_BYTES if was_closed else CHECKED_AFTER_CRASH_BYTES)
    begin_epoch(ledger, clock)
    with ledger.transaction():
        ledger.agents.add_incidents(incidents, clock.now_ns(), again=True)
    return ledger


def recover_stores(
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
    tally: Metrics | None = None,
) -> Stores:
    """Open store and journal beside a ledger whose epoch has begun, and recover all three.

    Errors: those of ``open_store`` and ``store_key``.
    """
    epoch = int(ledger.get_state("epoch") or 0)
    key = store_key(home, config, make=make_key)
    position = ledger.position()
    opened = open_store(
        home, clock, config, key, warn, epoch=epoch, ledger_position=position, boot=boot
    )
    stack.callback(opened.log.close)
    if opened.power_cut:
        log("The machine was restarted since the last run", action="power_cut")
    store, events = opened.store, opened.log
    context = Context(config, home, ledger, store, events, clock, log, tally or Metrics(clock))
    requeued = recovery.recover(context, opened.projection, power_cut=opened.power_cut)
    return Stores(epoch, ledger, store, events, opened.tiers, key, requeued)


def _open_watcher(stack: contextlib.ExitStack, home: Home, config: Config, log: LogCall) -> Watcher:
    detection = config.detection
    watcher = make_watcher(home, detection.watcher, detection.poll_interval_ms)
    stack.callback(watcher.close)
    if isinstance(watcher, ScanWatcher) and watcher.why:
        text = f"Scanning every {detection.poll_interval_ms} ms: {watcher.why}"
        log(text, action="scan_instead", level="warning")
    return watcher


def begin_epoch(ledger: Ledger, clock: Clock) -> None:
    """Count the start, and record this process as the writer."""
    now = clock.now_ns()
    with ledger.transaction():
        epoch = int(ledger.get_state("epoch") or 0) + 1
        if ledger.get_state("home_id") is None:  # tells a backup of another home apart
            ledger.set_state("home_id", uuid.uuid4().hex, now)
        for key, value in (
            ("epoch", epoch),
            ("writer", f"daemon {epoch}"),
            ("pid", os.getpid()),
            ("started_at", now),
        ):
            ledger.set_state(key, str(value), now)


def make_roller(
    store: CommStore,
    config: Config,
    clock: Clock,
    executor: Executor,
    wake: Callable[[], None] = lambda: None,
) -> Roller:
    """The roller, which moves final messages from a relay's store into its archives."""
    assert store.archives is not None
    settings = config.store
    policy = RollPolicy(
        after_s=settings.roll_after_s,
        messages=settings.roll_messages,
        live_messages=settings.active_messages // 2,
    )
    return Roller(store.engine.archives, store.archives, policy, clock, executor, wake)


def make_flusher(
    stores: Stores,
    home: Home,
    config: Config,
    clock: Clock,
    executor: Executor,
    wake: Callable[[], None] = lambda: None,
) -> Flusher:
    """The writer of checkpoints: ``store/relay.acomm``."""
    settings, path = config.store, home.path(STORE)
    policy = FlushPolicy(
        settings.checkpoint_messages,
        settings.checkpoint_ms,
        settings.checkpoint_pause_factor,
        settings.compress,
    )
    store, key, events = stores.store, stores.key, stores.events
    return Flusher(store, path, policy, clock, executor, wake, key, events)
