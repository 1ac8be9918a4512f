"""One session of the relay: open everything, recover, serve, close.

    ledger -> store -> recovery -> watcher -> wait(tick()) ... -> drain

The only place where the parts are connected. A session that fails is closed, and the next one's
recovery finds its unfinished work, as after a crash.
"""

from __future__ import annotations

import contextlib
import gc
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType

from relay.agents.roster import Roster
from relay.agents.spawner import Spawner, SystemSpawner
from relay.agents.supervisor import Supervisor
from relay.base import directory_guard
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.home import LEDGER, STORE, Home
from relay.base.metrics import START, STOP, WAIT
from relay.base.watcher import ScanWatcher, Watcher, WatchEvents, make_watcher
from relay.daemon import recovery
from relay.daemon.disk_monitor import make_disk_monitor
from relay.daemon.housekeeper import Housekeeper
from relay.daemon.journal_commands import run_command
from relay.daemon.opening import OpenedStore, open_store, store_key
from relay.daemon.recovery import Context
from relay.daemon.status import SharedStatus, StatusPublisher
from relay.delivery.loop import Dispatcher
from relay.engine.archives import Roller, RollPolicy
from relay.engine.checkpoint import Flusher, FlushPolicy
from relay.engine.commstore import CommStore
from relay.journal.plan import JournalCommand
from relay.journal.tiers import TierWorker, lower_priority
from relay.ledger import Ledger, wal

# Ledgers up to this size are checked at every start (5 ms a MiB), larger ones once a day only.
CHECKED_BYTES = 4 << 20
CHECKED_AFTER_CRASH_BYTES = 32 << 20
TIER_POLL_NS = NS_PER_S  # interval at which a running tier job is checked


class Session:
    """One session. Opened by ``with``; serves in the thread that opened it.

    Errors on entering: LedgerError, FormatError, OSError when a file cannot be used.
    """

    watcher: Watcher
    epoch: int
    _deadline: int

    def __init__(
        self,
        home: Home,
        config: Config,
        clock: Clock,
        log: Callable[..., object],
        board: SharedStatus | None = None,
    ) -> None:
        self._home = home
        self._config = config
        self._clock = clock
        self._log = log
        self._board = board or SharedStatus(home.root, config, clock)
        self._tally = self._board.tally
        self._stack = contextlib.ExitStack()
        self.is_ending = False  # True: end as soon as no tier job runs

    def __enter__(self) -> Session:
        self._tally.begin(START)
        gc.unfreeze()  # objects of the previous session are garbage now,
        gc.collect()  # and would be frozen as well: a whole store per reload
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        gc.freeze()  # what was loaded stays: collections need not scan it
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._board.is_serving = False
        self._tally.begin(STOP)
        self._stack.close()
        self._tally.begin(START)

    def serve(self, is_stopping: Callable[[], bool]) -> None:
        """Run the loop until ``is_stopping``; then finish the current work."""
        self._board.is_serving = True
        while not is_stopping():
            deadline = min(self._deadline, self._poll_background(), self._disk_monitor.due_ns())
            processes_due = self._supervisor.due_ns()
            if processes_due is not None:
                deadline = min(deadline, processes_due)
            timeout_ns = deadline - self._clock.monotonic_ns()
            self._tally.begin(WAIT)
            self._deadline = self._dispatcher.tick(self.watcher.wait(timeout_ns))
            self._run_jobs()
            self._tally.begin("processes")
            poll_supervisor(self._supervisor, self._dispatcher)
            self._disk_monitor.step()
        self._board.is_serving = False
        self._tally.begin(STOP)
        self._dispatcher.drain()
        self._log("Stopped", action="stopped", epoch=self.epoch)

    def wait_background(self, seconds: float) -> bool:
        """Wait for background work; False if a tier job (an upload) still runs after that time.

        Everything accepted is durable by then.
        """
        return self._tiers.wait(seconds)

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._open_ledger(stack)
        key = store_key(self._home, self._config, make=True)
        opened = self._open_store(stack, key)
        requeued = recovery.recover(self._context, opened.projection, power_cut=opened.power_cut)
        self._start_watcher(stack)
        self._start_dispatcher(stack, key)
        self._start_tiers(stack)
        executor = self._start_housekeeper(stack)
        self._supervisor = make_supervisor(self._context, self._dispatcher, executor)
        self._dispatcher.requeue(requeued)
        self._start_disk_monitor()
        self._deadline = self._dispatcher.tick(WatchEvents(agents_changed=True, scan=True))
        self._log("Ready", action="ready", epoch=self.epoch, watcher=self.watcher.name)

    def _open_ledger(self, stack: contextlib.ExitStack) -> None:
        """Secure the home, open the ledger, and record files that others could access."""
        incidents = directory_guard.secure(self._home)
        for one in incidents:
            self._log(one.detail, action=str(one.kind), file=one.path, level="warning")
        path = self._home.path(LEDGER)
        was_closed = not wal.wal_bytes(path)  # else the last writer was killed
        self._ledger = Ledger.open(path, busy_timeout_ms=self._config.ledger.busy_timeout_ms)
        stack.callback(self._ledger.close)
        self._ledger.check(most_bytes=CHECKED_BYTES if was_closed else CHECKED_AFTER_CRASH_BYTES)
        self.epoch = self._board.epoch = begin_epoch(self._ledger, self._clock)
        with self._ledger.transaction():
            self._ledger.agents.add_incidents(incidents, self._clock.now_ns(), again=True)

    def _open_store(self, stack: contextlib.ExitStack, key: bytes | None) -> OpenedStore:
        opened = self._opened = open_store(
            self._home,
            self._clock,
            self._config,
            key,
            self._warn,
            epoch=self.epoch,
            ledger_position=self._ledger.position(),
        )
        stack.callback(opened.log.close)
        if opened.power_cut:
            self._log("The machine was restarted since the last run", action="power_cut")
        self._context = Context(
            config=self._config,
            home=self._home,
            ledger=self._ledger,
            store=opened.store,
            events=opened.log,
            clock=self._clock,
            log=self._log,
            tally=self._tally,
        )
        return opened

    def _start_watcher(self, stack: contextlib.ExitStack) -> None:
        detection = self._config.detection
        self.watcher = make_watcher(self._home, detection.watcher, detection.poll_interval_ms)
        stack.callback(self.watcher.close)
        if isinstance(self.watcher, ScanWatcher) and self.watcher.why:
            text = f"Scanning every {detection.poll_interval_ms} ms: {self.watcher.why}"
            self._log(text, action="scan_instead", level="warning")

    def _start_dispatcher(self, stack: contextlib.ExitStack, key: bytes | None) -> None:
        config, opened, wake = self._config, self._opened, self.watcher.wake
        executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="flush"))
        flusher = Flusher(
            opened.store,
            self._home.path(STORE),
            _flush_policy(config),
            self._clock,
            executor,
            wake,
            key,
            opened.log,
        )
        roller = make_roller(opened.store, config, self._clock, executor, wake)
        roster = Roster(self._home, self.watcher, config.lead, self._log)
        context = self._context
        self._dispatcher = Dispatcher(
            config=context.config,
            home=context.home,
            ledger=context.ledger,
            store=context.store,
            events=context.events,
            flusher=flusher,
            roller=roller,
            roster=roster,
            metrics=context.tally,
            clock=context.clock,
            log=context.log,
        )

    def _start_disk_monitor(self) -> None:
        store = self._opened.store
        publisher = StatusPublisher(self._dispatcher, store, self.watcher, self._clock)
        self._disk_monitor = make_disk_monitor(
            self._board, self._dispatcher, publisher, self._context
        )
        self._disk_monitor.begin()

    def _start_tiers(self, stack: contextlib.ExitStack) -> None:
        thread = stack.enter_context(
            ThreadPoolExecutor(1, thread_name_prefix="tiers", initializer=lower_priority)
        )
        self._tiers = TierWorker(self._opened.tiers, thread, self._clock, self.watcher.wake)

    def _start_housekeeper(self, stack: contextlib.ExitStack) -> Executor:
        thread = stack.enter_context(
            # Three: neither the WAL nor the log of a process waits for a long run over the archive.
            # Not nice: who is put off while it has the interpreter puts the loop off, too; it
            # pauses by itself.
            ThreadPoolExecutor(3, thread_name_prefix="keeper")
        )
        self._housekeeper = Housekeeper(
            self._home, self._ledger, self._config, self._clock, thread, self._log
        )
        stack.callback(self._housekeeper.stop)  # before the thread is waited for
        return thread

    def _poll_background(self) -> int:
        """Poll background work; returns when to poll next (monotonic ns)."""
        disk = self._board.disk
        due_ns = self._housekeeper.poll(
            idle=self._deadline > self._clock.monotonic_ns(),
            is_low=disk is not None and disk.state.is_low,
        )
        self._dispatcher.pause("wal", self._housekeeper.paused)
        self._board.ledger_damage = self._housekeeper.damage
        return min(due_ns, self._poll_tiers())

    def _run_jobs(self) -> None:
        for job in self._dispatcher.pop_jobs():
            if isinstance(job, JournalCommand):
                run_command(self._home, self._opened, self._clock, job)
            else:
                self._housekeeper.enqueue(job)

    def _poll_tiers(self) -> int:
        done = self._tiers.poll(start=not self.is_ending)
        self._board.tiers_waiting = self._tiers.waiting()
        if done:
            self._log(f"The journal: {done}", action="tier_step")
        due = self._tiers.due_ns()
        soon = self._clock.monotonic_ns() + TIER_POLL_NS
        return soon if due is None or self.is_ending else due

    def _warn(self, text: str) -> None:
        self._log(f"The store: {text}", action="store_warning", level="warning")


def make_supervisor(
    context: Context,
    dispatcher: Dispatcher,
    executor: Executor,
    spawner: Spawner | None = None,
) -> Supervisor:
    """The supervisor of a home's processes; it has adopted the running ones."""
    return Supervisor(
        context.config.spawn,
        context.home,
        context.ledger,
        context.store,
        spawner or SystemSpawner(),
        executor,
        context.clock,
        context.log,
        dispatcher.notifier.send_resume_message,
    )


def poll_supervisor(supervisor: Supervisor, dispatcher: Dispatcher) -> None:
    """One turn of the supervisor: do what is due, deliver its notices."""
    supervisor.poll(has_requests=dispatcher.pop_process_requests())
    notices = supervisor.notices()
    if notices and supervisor.can_notify:
        supervisor.mark_sent(dispatcher.notifier.send(notices))


def begin_epoch(ledger: Ledger, clock: Clock) -> int:
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
    return epoch


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
    return Roller(store, store.archives, policy, clock, executor, wake)


def _flush_policy(config: Config) -> FlushPolicy:
    store = config.store
    return FlushPolicy(
        store.checkpoint_messages,
        store.checkpoint_ms,
        store.checkpoint_pause_factor,
        store.compress,
    )
