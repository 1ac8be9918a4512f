"""The process: its lock, its signals, and one session after the other.

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
import time
from collections.abc import Callable

from relay import fsio
from relay.clock import NS_PER_S, Clock
from relay.config import Config
from relay.config import decode as decode_config
from relay.errors import AlreadyRunning, LedgerError, RelayError
from relay.home import LOCK, Home
from relay.logs import make_log
from relay.session import Session
from relay.watcher import Watcher

# The thread that writes the store holds the interpreter this long at most before the loop goes on.
SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (100_000, 20, 100)
LOG = "logs/relay.log"
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
        self.wake()

    def wake(self) -> None:
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
        with Session(self._home, self._config, self._clock, self._log) as session:
            self._watcher = session.watcher
            try:
                ready()
                session.serve(lambda: self._stopping)
            finally:
                self._watcher = None


def lock_holder(home: Home) -> int | None:
    """The pid of the relay that runs for this home, or None when none does; asks the kernel."""
    return fsio.lock_owner(home.path(LOCK))


def trouble(home: Home) -> str:
    """Why the relay that runs serves nobody now and begins again; empty when it serves."""
    with contextlib.suppress(OSError):
        data, _ = fsio.read_regular(home.path(LOCK), None, 4 * TROUBLE_CHARACTERS)
        return "".join(data.decode(errors="replace").splitlines()[1:2])
    return ""


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
        signal.signal(signal.SIGCHLD, lambda *_: daemon.wake())  # a process of ours has ended
        daemon.run(ready)


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
