"""The process: the only place where the parts are put together, and the loop that runs them.

    lock -> ledger -> store -> recovery -> watcher -> ready -> wait(tick()) ... -> drain

One daemon a home: the kernel's lock on ``.lock`` decides, and a killed holder frees it at once.
SIGTERM and SIGINT finish the batch in hand, write the store and leave.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

import structlog

from relay import fsio, recovery
from relay.aof2.tiers import TierWorker
from relay.clock import NS_PER_S, Clock
from relay.comm.engine import CommStore
from relay.comm.flush import Flusher, FlushPolicy
from relay.comm.rolling import Roller, RollPolicy
from relay.config import Config
from relay.config import decode as decode_config
from relay.dispatch import Dispatcher
from relay.errors import AlreadyRunning, LedgerError, RelayError
from relay.home import LEDGER, LOCK, STORE, Home
from relay.ledger import Ledger
from relay.roster import Roster
from relay.stores import open_store, store_key
from relay.upkeep import obey
from relay.watcher import Wake, Watcher, make_watcher

# The thread that writes the store holds the interpreter this long at most before the loop goes on.
SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (100_000, 20, 100)
LOG = "logs/relay.log"
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
READY = b"ready\n"
MOST_PAUSE_S = 60
TROUBLE_CHARACTERS = 500
TIER_POLL_NS = NS_PER_S  # a step that runs is looked at so often
TIER_NICENESS = 10  # compression takes what the loop leaves


class Daemon:
    """One running relay. Everything but the store's flush happens in the thread of ``run``."""

    def __init__(self, home: Home, config: Config, log: Callable[..., object]) -> None:
        self._home = home
        self._log = log
        self._clock = Clock()
        self._config = config
        self._watcher: Watcher | None = None  # the running session's
        self._stopping = False
        self._lock_fd = -1

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until a signal says stop.

        Errors: AlreadyRunning; LedgerError, FormatError when a file cannot be used.
        """
        with contextlib.ExitStack() as held:
            try:
                lock_fd = held.enter_context(fsio.locked(self._home.path(LOCK)))
            except BlockingIOError as exc:
                raise AlreadyRunning(
                    f"a relay runs for {self._home.root} already, "
                    f"its pid is {lock_holder(self._home) or 'not known'}"
                ) from exc
            self._lock_fd = lock_fd
            self._note_trouble("")
            self._serve(ready)
            os.ftruncate(lock_fd, 0)

    def _note_trouble(self, text: str) -> None:
        """Leave word beside the pid of why there is no session now: no ledger may be at hand."""
        note = " ".join(text.split())[:TROUBLE_CHARACTERS]
        data = f"{os.getpid()}\n{note}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock_fd, os.pwrite(self._lock_fd, data, 0))

    def stop(self) -> None:
        """End the loop after the batch in hand; safe in a signal handler."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        """End the wait of the session that runs, if one does."""
        if self._watcher is not None:
            self._watcher.wake()

    def _serve(self, ready: Callable[[], None]) -> None:
        """Sessions, one after the other: a passing fault of the disk ends one and not the relay.

        What a session had in hand is found again by the next one's recovery, as after a crash.
        """
        began = False
        served = False

        def begin() -> None:
            nonlocal began, served
            served = True
            self._note_trouble("")
            if not began:
                began = True
                ready()

        pause_s = 1
        while not self._stopping:
            try:
                self._session(begin)
            except Exception as exc:
                # A fault nobody foresaw must not take the relay from everybody, either.
                if not began:
                    raise
                pause_s = 1 if served else min(2 * pause_s, MOST_PAUSE_S)
                served = False
                self._note_trouble(str(exc) or repr(exc))
                self._log(
                    f"Beginning again in {pause_s} s: {exc}",
                    action="begin_again",
                    level="error",
                    error=type(exc).__name__,
                    exc_info=not isinstance(exc, LedgerError | OSError),
                )
                self._pause(pause_s)

    def _pause(self, seconds: int) -> None:
        """Wait, unless told to stop."""
        deadline = self._clock.monotonic_ns() + seconds * NS_PER_S
        while not self._stopping and self._clock.monotonic_ns() < deadline:
            time.sleep(0.1)

    def _session(self, ready: Callable[[], None]) -> None:
        """Open everything, recover, serve until told to stop, close everything."""
        gc.unfreeze()  # what a session before left is nobody's any more
        with contextlib.ExitStack() as stack:
            config = self._config
            for name in self._home.secure():
                self._log(f"Narrowed the mode of {name}", action="narrow_mode", file=name)
            ledger = Ledger.open(
                self._home.path(LEDGER), busy_timeout_ms=config.ledger.busy_timeout_ms
            )
            stack.callback(ledger.close)
            epoch = self._begin_epoch(ledger)
            key = store_key(self._home, config, make=True)
            opened = open_store(
                self._home,
                self._clock,
                config,
                key,
                self._warn_of_store,
                epoch=epoch,
                ledger_position=ledger.position(),
            )
            store, events_log = opened.store, opened.log
            stack.callback(events_log.close)
            if opened.power_cut:
                self._log("The machine was switched off since", action="power_cut")
            feed = recovery.recover(
                self._home,
                ledger,
                store,
                events_log,
                opened.told,
                self._clock,
                self._log,
                power_cut=opened.power_cut,
            )
            watcher = make_watcher(
                self._home, config.detection.watcher, config.detection.poll_interval_ms
            )
            stack.callback(watcher.close)
            self._watcher = watcher
            stack.callback(self._forget_watcher)
            executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="flush"))
            flusher = Flusher(
                store,
                self._home.path(STORE),
                _flush_policy(config),
                self._clock,
                executor,
                watcher.wake,
                key,
                events_log,
            )
            roster = Roster(self._home, watcher, config.lead, self._log)
            roller = make_roller(store, config, self._clock, executor, watcher.wake)
            tier_thread = stack.enter_context(
                ThreadPoolExecutor(1, thread_name_prefix="tiers", initializer=_be_nice)
            )
            tiers = TierWorker(opened.tiers, tier_thread, self._clock, watcher.wake)
            dispatcher = Dispatcher(
                config,
                self._home,
                ledger,
                store,
                events_log,
                flusher,
                roller,
                roster,
                self._clock,
                self._log,
            )
            dispatcher.feed(feed)
            deadline = dispatcher.tick(Wake(agents_changed=True, scan=True))
            gc.freeze()  # what was loaded stays: no need to walk it again and again
            self._log("Ready", action="ready", epoch=epoch, watcher=watcher.name)
            ready()
            while not self._stopping:
                timeout_ns = min(deadline, self._poll(tiers)) - self._clock.monotonic_ns()
                deadline = dispatcher.tick(watcher.wait(timeout_ns))
                for order in dispatcher.take_orders():
                    obey(self._home, opened, self._clock, order)
            dispatcher.drain()
            self._log("Stopped", action="stopped", epoch=epoch)

    def _poll(self, tiers: TierWorker) -> int:
        """Let the tiers go on beside the loop; when to look at them again (monotonic ns)."""
        done = tiers.poll()
        if done:
            self._log(f"The journal: {done}", action="tier_step")
        due = tiers.due_ns()
        return self._clock.monotonic_ns() + TIER_POLL_NS if due is None else due

    def _warn_of_store(self, text: str) -> None:
        self._log(f"The store: {text}", action="store_warning", level="warning")

    def _forget_watcher(self) -> None:
        self._watcher = None

    def _begin_epoch(self, ledger: Ledger) -> int:
        """Count the start, and say who writes from now on."""
        now = self._clock.now_ns()
        with ledger.transaction():
            epoch = int(ledger.get_state("epoch") or 0) + 1
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
    """What moves final messages of a relay's store into its archives."""
    assert store.archives is not None
    settings = config.store
    policy = RollPolicy(
        after_s=settings.roll_after_s,
        messages=settings.roll_messages,
        live_messages=settings.active_messages // 2,
    )
    return Roller(store, store.archives, policy, clock, executor, wake)


def _be_nice() -> None:
    """On Linux a thread has a priority of its own; elsewhere nothing is changed."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), TIER_NICENESS)


def lock_holder(home: Home) -> int | None:
    """The pid of the relay that runs for this home, or None when none does; asks the kernel."""
    return fsio.lock_owner(home.path(LOCK))


def trouble(home: Home) -> str:
    """Why the relay that runs serves nobody now and begins again; empty when it serves."""
    with contextlib.suppress(OSError):
        data, _ = fsio.read_regular(home.path(LOCK), None, 4 * TROUBLE_CHARACTERS)
        return "".join(data.decode(errors="replace").splitlines()[1:2])
    return ""


def make_log(level: str, path: str | None) -> Callable[..., object]:
    """A log of JSON lines, to a file or to stderr.

    Called as ``log(sentence, action=..., level="info", **facts)``.
    """
    descriptor = os.open(path, _APPEND, 0o600) if path else sys.stderr.fileno()
    numbers = {"debug": 10, "info": 20, "warning": 30, "error": 40}
    logger = structlog.wrap_logger(
        _Lines(descriptor),
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numbers[level]),
    )

    def log(event: str, *, level: str = "info", **facts: object) -> None:
        getattr(logger, level)(event, **facts)

    return log


class _Lines:
    """Writes lines to a descriptor. One that a full disk does not take is dropped: what it told of
    must not stop the relay, and a log that fails is no reason to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_torn = False

    def msg(self, line: str) -> None:
        """One line; what follows one that was cut short begins on a line of its own."""
        data = f"{chr(10) * self._is_torn}{line}\n".encode(errors="backslashreplace")
        try:
            written = os.write(self._descriptor, data)
        except OSError:
            return
        self._is_torn = written < len(data)

    debug = info = warning = error = msg


def tune_process() -> None:
    """Set what the loop needs of its process: short switches, descriptors, rare collections."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a batch opens three directories an agent
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # the store is values without cycles: walking all of it again and again finds nothing
    gc.set_threshold(*GC_THRESHOLDS)


def run_daemon(root: str, *, log_path: str | None, ready: Callable[[], None]) -> None:
    """Run a relay for the home at ``root`` until it is told to stop.

    Errors: those of ``Daemon.run``, HomeMissing, ConfigError.
    """
    tune_process()
    with Home(root) as home:
        config = decode_config(home.read_config(), home.path("config.json"))
        daemon = Daemon(home, config, make_log(config.log_level, log_path))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.stop())
        daemon.run(ready)


def _flush_policy(config: Config) -> FlushPolicy:
    store = config.store
    return FlushPolicy(
        store.checkpoint_messages,
        store.checkpoint_ms,
        store.checkpoint_pause_factor,
        store.compress,
    )


def main() -> int:
    """The background process of ``relay up``: says ``ready`` or why not on a descriptor."""
    parser = argparse.ArgumentParser(prog="python -m relay.daemon")
    parser.add_argument("--home", required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args()

    told = False

    def ready() -> None:
        nonlocal told
        told = True
        with contextlib.suppress(OSError):  # who asked may have gone
            os.write(arguments.ready_fd, READY)
        os.close(arguments.ready_fd)

    try:
        run_daemon(arguments.home, log_path=os.path.join(arguments.home, LOG), ready=ready)
    except RelayError as exc:
        if told:
            raise
        os.write(arguments.ready_fd, f"{exc.exit_code}\n{exc}\n{exc.hint}\n".encode())
        return exc.exit_code
    except OSError as exc:
        if told:
            raise
        hint = "the disk, or its rights, take nothing of the relay's now; then start it again"
        os.write(arguments.ready_fd, f"1\n{exc}\n{hint}\n".encode(errors="backslashreplace"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
