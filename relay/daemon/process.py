"""The daemon process: lock, signals, and one session after another.

One daemon per home, ensured by the kernel's lock on ``.lock``, which a killed holder frees at once.
SIGTERM and SIGINT finish the current batch, write the store and exit. SIGHUP reads config.json
again: after the old session's clean end a session with the new configuration starts.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

from relay.base import config as configuration
from relay.base import fsio
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.errors import EXIT_FAILED, AlreadyRunning, HomeMissing, RelayError, StateFault
from relay.base.home import (
    FEW_DESCRIPTORS,
    LEDGER,
    LOCK,
    LOG,
    TROUBLE_CHARACTERS,
    Home,
    lock_holder,
    locked_home,
    running_trouble,
    write_trouble,
)
from relay.base.logs import Log, LogCall, make_log, where
from relay.base.sd_notify import SystemdNotifier, Watchdog
from relay.base.status_client import ask, silence
from relay.daemon.admin import Admin
from relay.daemon.attention import AttentionThread
from relay.daemon.home_backup import MANIFEST
from relay.daemon.session import PATIENCE_S, Session
from relay.daemon.status import SharedStatus
from relay.ledger.check import naming_bad_rows

# The longest time that the thread writing the store holds the interpreter before the loop runs.
SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (100_000, 20, 100)
READY = b"ready\n"
MOST_PAUSE_S = 60


class Daemon:
    """One running relay. Everything happens in the thread of ``run`` except the store's flush, the
    journal's tiers and HTTP."""

    def __init__(self, home: Home, config: Config, log: Log, notifier: SystemdNotifier) -> None:
        self._home = home
        self._log = log
        self._clock = Clock()
        self._config = config
        self._previous_config: Config | None = None  # until a session runs with the current one
        self._notifier = notifier
        self.status = SharedStatus(home.root, config, self._clock)
        self._admin = Admin(self.status, log)
        self._attention = AttentionThread(home.root, lambda: self._config.attention.command, log)
        self._session: Session | None = None
        self._next_config: Config | None = None  # applied as soon as the session can end
        self._was_ready = False  # reported once
        self._has_served = False  # since the last failed session
        self._stopping = False
        self._reload_requested = False
        self._lock_fd = -1
        self._held = contextlib.ExitStack()  # what is given back when the process ends

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until a signal says stop.

        Errors: AlreadyRunning; LedgerError, FormatError when a file cannot be used; HomeMissing
        when the home was removed meanwhile.
        """
        with contextlib.ExitStack() as stack:
            try:
                self._lock_fd = stack.enter_context(locked_home(self._home.root))
            except BlockingIOError as exc:
                raise self._already_running() from exc
            self._held = stack
            self._set_trouble("")
            watchdog = Watchdog(self._notifier, lambda: self.status.health().is_healthy)
            stack.callback(self._admin.end)
            stack.callback(watchdog.end)
            stack.callback(self._attention.end)
            self._admin.begin(self._config.admin.listen)
            watchdog.begin()
            self._attention.begin()
            try:
                self._serve(ready)
            finally:  # the pid stays in the lock file unless the end was requested
                if self._stopping or not self._was_ready:
                    os.ftruncate(self._lock_fd, 0)

    def _keep_lock_file(self) -> None:
        """Make the lock file again if somebody removed it: it says who runs. Called every turn."""
        path = self._home.path(LOCK)
        with contextlib.suppress(OSError):
            status = os.stat(path, follow_symlinks=False)
            if os.path.samestat(status, os.fstat(self._lock_fd)):
                return
        try:
            self._home.check_place()
            self._lock_fd = self._held.enter_context(fsio.locked(path))
        except (OSError, RelayError):
            return  # the home is elsewhere or gone, or a command has the file for an instant
        write_trouble(self._lock_fd, self.status.trouble)
        text = f"{path} was removed or replaced while the relay ran, and is made again"
        self._log(text, action="lock_made", level="warning")

    def _already_running(self) -> AlreadyRunning:
        """The error for a lock held by another relay, with its pid and whether it answers."""
        pid = lock_holder(self._home)
        reply = ask(self._home)
        status = reply.status or {}
        known = pid or status.get("pid") or "not known"  # by its socket, if its lock file is gone
        text = f"a relay runs for {self._home.root} already, its pid is {known}"
        if pid is None or not reply.is_silent:
            why = "" if status.get("ready", True) else "; ".join(status.get("reasons", ()))
            trouble = running_trouble(self._home)
            why = f"not serving; retrying: {trouble}" if trouble else why
            return AlreadyRunning(f"{text}: {why}" if why else text)
        what, remedy = silence(pid)
        return AlreadyRunning(f"{text}, and {what}", hint=remedy)

    def _set_trouble(self, text: str) -> None:
        """Write the reason why no session runs next to the pid; the ledger may be unavailable."""
        trouble = self.status.trouble = " ".join(text.split())[:TROUBLE_CHARACTERS]
        write_trouble(self._lock_fd, trouble)

    def stop(self) -> None:
        """End the loop after the current batch; safe in a signal handler."""
        self._stopping = True
        self.wake()

    def reload(self) -> None:
        """Read config.json again after the current batch; safe in a signal handler."""
        self._reload_requested = True
        self.wake()

    def wake(self) -> None:
        """End the wait of the running session, if there is one."""
        session = self._session
        if session is not None:
            session.watcher.wake()

    def _serve(self, ready: Callable[[], None]) -> None:
        """Run sessions, one after another: a temporary disk error ends a session, not the relay.

        The next session's recovery finds the unfinished work of the previous one, as after a crash.
        """
        pause_s = 1
        while not self._stopping:
            try:
                self._run_session(lambda: self._on_session_start(ready))
            except Exception as exc:
                # An unexpected error must not end the relay for all agents either.
                if not self._was_ready:
                    self._log_refusal(exc)
                if not self._was_ready or isinstance(exc, HomeMissing):
                    raise
                if self._previous_config is not None:
                    self._revert_config(exc)
                    continue
                pause_s = 1 if self._has_served else min(2 * pause_s, MOST_PAUSE_S)
                self._has_served = False
                self._wait_for_retry(pause_s, exc)
        self._notifier.say("STOPPING=1")
        if self.status.hanging_step():  # its thread would hold up the end of the process
            self._exit_now()

    def _log_refusal(self, exc: Exception) -> None:
        """Log why the first session did not start; the caller reports it, too."""
        if isinstance(exc, RelayError):
            text = f"Did not start: {exc}" + (f"; {exc.hint}" if exc.hint else "")
            self._log(text, action="not_started", level="error", error=type(exc).__name__)

    def _on_session_start(self, ready: Callable[[], None]) -> None:
        """Note that a session is open and recovered; the first one is reported as ready."""
        self._has_served = True
        self._previous_config = None
        self._set_trouble("")
        if not self._was_ready:
            self._was_ready = True
            ready()
        self._notifier.say("READY=1", f"STATUS=serving {self._home.root}")

    def _wait_for_retry(self, pause_s: int, exc: Exception) -> None:
        """Log why a session ended or did not start, and wait before the next.

        Errors: HomeMissing when the home is gone.
        """
        self._home.check_is_there()
        reason, hint = str(exc) or type(exc).__name__, remedy(exc)
        text = f"{reason}; {hint}" if hint else reason
        self._set_trouble(text)
        self._log(
            f"Retrying in {pause_s} s: {text}",
            action="begin_again",
            level="error",
            error=type(exc).__name__,
            where=where(exc.__cause__) if isinstance(exc, StateFault) and exc.__cause__ else None,
            exc_info=hint is None,
        )
        self._pause(pause_s)

    def _pause(self, seconds: int) -> None:
        """Wait; a stop or a new configuration ends the wait."""
        deadline = self._clock.monotonic_ns() + seconds * NS_PER_S
        while not self._session_must_end() and self._clock.monotonic_ns() < deadline:
            self._home.check_is_there()
            time.sleep(0.1)

    def _run_session(self, ready: Callable[[], None]) -> None:
        """Open everything, recover, serve until the session must end, close everything."""
        self._home.check_place()
        with open_session(self._home, self._config, self._clock, self._log, self.status) as session:
            self._session = session
            try:
                ready()
                session.serve(self._session_must_end)
                if self._stopping:
                    self._notifier.say("STOPPING=1")
                    if not session.wait_background(PATIENCE_S):
                        self._exit_now()
            finally:
                self._session = None

    def _exit_now(self) -> None:
        """End at once. The current batch is finished and the store written; a tier job is cut off
        as by a kill, and the next start continues it."""
        self._log(
            f"Left a job of the journal's tiers unfinished: it did not end within {PATIENCE_S} s",
            action="stopped",
            level="warning",
        )
        self._admin.end()
        os.ftruncate(self._lock_fd, 0)
        os._exit(0)

    # -- SIGHUP ------------------------------------------------------------------------

    def _session_must_end(self) -> bool:
        """True when the session is to end: for good, or for one with another configuration.

        A reload neither waits for a running tier job nor aborts it: an upload may take minutes, and
        the session serves meanwhile.
        """
        if self._stopping:
            return True
        self._keep_lock_file()
        session = self._session
        if self._reload_requested:
            self._reload_requested = False
            self._next_config = self._read_config()
            if session is not None:
                session.is_ending = self._next_config is not None
        if self._next_config is None or (session is not None and not session.wait_background(0)):
            return False
        self._notifier.reloading(self._clock.monotonic_ns())
        # Without a session, a failure to start one is not caused by the new configuration.
        self._previous_config = None if session is None else self._config
        self._apply_config(self._next_config)
        self._next_config = None
        return True

    def _read_config(self) -> Config | None:
        """The present config.json if it is valid and differs from the one in use."""
        try:
            fresh = configuration.load(self._home)
        except (RelayError, OSError) as exc:
            self._refuse_config(str(exc))
            return None
        self.status.config_error = ""
        changed = configuration.changes(self._config, fresh)
        text = f"Read config.json again: {', '.join(changed) or 'nothing changed'}"
        self._log(text, action="reload", changed=changed)
        return fresh if changed else None

    def _apply_config(self, config: Config) -> None:
        """Apply a configuration to everything outside of the session."""
        listen_before = self._config.admin.listen
        self._config = self.status.config = config
        self._log.set(config.log_level, config.log.max_mib, config.log.keep_files)
        self._attention.begin()
        if config.admin.listen != listen_before:
            self._admin.end()
            self._admin.begin(config.admin.listen)

    def _revert_config(self, exc: Exception) -> None:
        """Return to the previous configuration, because no session starts with the new one."""
        assert self._previous_config is not None
        previous, self._previous_config = self._previous_config, None
        self._apply_config(previous)
        self._refuse_config(f"no session starts with it: {exc}")

    def _refuse_config(self, why: str) -> None:
        self.status.config_error = " ".join(why.split())[:TROUBLE_CHARACTERS]
        self._log(
            f"the new config.json is ignored, the previous one is used: {self.status.config_error}",
            action="reload",
            level="error",
        )


def remedy(exc: BaseException) -> str | None:
    """Hint for an expected error; None for an unexpected one."""
    if isinstance(exc, RelayError):
        return exc.hint
    if isinstance(exc, MemoryError) or getattr(exc, "errno", 0) == errno.ENOMEM:
        return "free memory, or raise the limit of this process (`ulimit -v`, MemoryMax)"
    if isinstance(exc, RuntimeError) and "can't start new thread" in str(exc):
        return "raise the limit of processes and threads (`ulimit -u`, TasksMax)"
    if isinstance(exc, OSError):
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            return "raise the limit of open files (`ulimit -Hn`, LimitNOFILE)"
        return "the disk or its permissions do not allow the relay to write"
    return None


def open_session(
    home: Home, config: Config, clock: Clock, log: LogCall, status: SharedStatus | None = None
) -> Session:
    """Open a session; the garbage collector frees the previous one, and ignores what it loads."""
    gc.unfreeze()
    gc.collect()
    gc.disable()  # a replay makes very many objects and no cycles
    try:
        session = Session(home, config, clock, log, status=status)
        gc.freeze()
    finally:
        gc.enable()
    return session


def tune_process() -> int:
    """Tune the process for the loop: short thread switches, more descriptors, rare collections.

    Returns the limit of open descriptors.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a batch opens three directories an agent
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # the store has no reference cycles: repeated full collections find nothing
    gc.set_threshold(*GC_THRESHOLDS)
    return hard


def run_daemon(root: str, *, log_path: str | None, ready: Callable[[], None]) -> None:
    """Run a relay for the home at ``root`` until it is stopped.

    Errors: those of ``Daemon.run``, HomeMissing, ConfigError; RelayError for a backup.
    """
    descriptors = tune_process()
    with Home(root) as home:
        if fsio.exists(home.path(MANIFEST)):  # what a relay changes, no restore accepts any more
            hint = f"`relay restore {root}` makes a home of it; without {MANIFEST} it is one itself"
            raise RelayError(f"{root} is a backup, which a relay would change", hint=hint)
        fsio.ensure_dir(home.path(os.path.dirname(LOG)))
        config = configuration.load(home)
        settings = config.log
        log = make_log(
            config.log_level, log_path, max_mib=settings.max_mib, keep_files=settings.keep_files
        )
        if 0 <= descriptors < FEW_DESCRIPTORS:
            log(
                f"The limit of open files is {descriptors}, which makes the relay slower; "
                "raise the hard limit (`ulimit -Hn`, LimitNOFILE)",
                action="few_descriptors",
                level="warning",
            )
        daemon = Daemon(home, config, log, SystemdNotifier(os.environ))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.stop())
        is_at_terminal = log_path is None and sys.stderr.isatty()  # which hangs up when it goes
        hang_up = daemon.stop if is_at_terminal else daemon.reload
        daemon.status.reloads = not is_at_terminal
        signal.signal(signal.SIGHUP, lambda *_: hang_up())
        signal.signal(signal.SIGCHLD, lambda *_: daemon.wake())  # a process of ours has ended
        daemon.run(ready)


def main() -> int:
    """Entry point of ``relay up``'s background process and of services. Reports ``ready``, or the
    error, on the descriptor given, else on stderr."""
    parser = argparse.ArgumentParser(prog="python -m relay.daemon")
    parser.add_argument("--home", required=True)
    parser.add_argument("--ready-fd", type=int)
    arguments = parser.parse_args()
    root = os.path.abspath(arguments.home)
    os.chdir("/")  # the directory of whoever started it may be removed, or unmounted

    is_reported = False

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # the caller may have gone
            fd = sys.stderr.fileno() if arguments.ready_fd is None else arguments.ready_fd
            os.write(fd, text.encode(errors="backslashreplace"))

    def ready() -> None:
        nonlocal is_reported
        is_reported = True
        say(READY.decode())
        if arguments.ready_fd is not None:
            os.close(arguments.ready_fd)

    try:
        with naming_bad_rows(os.path.join(root, LEDGER)):
            run_daemon(root, log_path=os.path.join(root, LOG), ready=ready)
    except Exception as exc:
        hint = remedy(exc)
        if hint is None:
            raise
        code = exc.exit_code if isinstance(exc, RelayError) else EXIT_FAILED
        reason = str(exc) or type(exc).__name__  # a MemoryError has no text
        if is_reported:  # the caller no longer waits: stderr goes to the service manager
            print(f"relay: {reason}; {hint}", file=sys.stderr)
        else:
            say(f"{code}\n{reason}\n{hint}\n")
        return code
    return 0
