"""System processes: the only module that starts, watches and ends them.

A process is identified by pid and start time, so that a reused pid is never mistaken for it, let
alone killed. Each leads a session of its own; what remains of a session after its leader ends is
found by the session's number, which is not reused while a member lives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import psutil

from relay.agents.requests import Spec
from relay.base import process_info
from relay.base.clock import boot_id
from relay.base.discovery import HOME_VARIABLE, SPAWN_VARIABLE
from relay.base.names import NAME_VARIABLE, shown
from relay.reach.vendors import SESSION_VARIABLES

# What to do where the system's own words say too little.
ADVICE = {
    errno.E2BIG: ", an argument has at most 128 KiB: put a long prompt into a file for the agent",
    errno.ENOEXEC: ": a script begins with a line that names its program, as #!/bin/sh does",
    errno.EACCES: ": `chmod +x` makes a script a program",
}


class Pid(NamedTuple):
    """One process of the system, unambiguous after reuse of its number."""

    number: int
    start: str  # boot, and ticks since then


class ExitStatus(NamedTuple):
    """The end of a process. ``code``: negative for a signal, None if unknown."""

    code: int | None


class Usage(NamedTuple):
    """Resources used by a process and its children of the same session."""

    cpu_s: float
    rss_bytes: int


class CannotStart(Exception):
    """The system refused the start; the text is one line with the reason."""


class Spawner(Protocol):
    """The supervisor's interface to the system."""

    def start(self, spec: Spec, home: str, lock_fd: int, output_fd: int) -> Pid:
        """Start it; it holds the lock while it lives. Errors: CannotStart."""

    def find(self, request_id: str, home: str) -> Pid | None:
        """The process started for a request, if it still runs."""

    def exit_status(self, pid: Pid) -> ExitStatus | None:
        """The exit status; None while it runs. Does not reap it."""

    def is_own(self, pid: Pid) -> bool:
        """True for a child of this process: SIGCHLD announces its end."""

    def reap(self, pid: Pid) -> None:
        """Reap an ended process: its number may be reused from now on."""

    def others(self, pid: Pid) -> list[int]:
        """Other living processes of its session."""

    def signal(self, pid: Pid, number: int) -> None:
        """Send a signal to its group and to every process of its session; there may be none."""

    def usage(self, pids: Sequence[Pid]) -> dict[Pid, Usage]:
        """Usage of each running process, with one scan of the system."""


class SystemSpawner:
    """The spawner for real processes."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._boot = boot_id()

    def start(self, spec: Spec, home: str, lock_fd: int, output_fd: int) -> Pid:
        """Start it in a session of its own, with an empty standard input. Errors: CannotStart."""
        try:
            child = subprocess.Popen(
                spec.argv,
                cwd=spec.cwd,
                env=self._environment(spec, home),
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=subprocess.STDOUT,
                pass_fds=(lock_fd,),
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:
            raise CannotStart(_why_not(spec, exc)) from exc
        # It is waited for by number, by this session of the relay or a later one.
        child.returncode = 0
        start = self._start_of(child.pid)
        assert start is not None  # it is there until it is waited for
        return Pid(child.pid, start)

    def _environment(self, spec: Spec, home: str) -> dict[str, str]:
        """The relay's own, the request's, the agent's name; ``relay`` is found in its PATH."""
        names = {NAME_VARIABLE: spec.name, HOME_VARIABLE: home, SPAWN_VARIABLE: spec.request_id}
        own = {name: self._environ[name] for name in self._environ.keys() - SESSION_VARIABLES}
        found = {**own, **spec.env, **names}
        path = found.get("PATH", os.defpath)
        if shutil.which("relay", path=path) is None:  # a service's PATH does not have it
            found["PATH"] = os.pathsep.join([path, sysconfig.get_path("scripts")])
        return found

    def find(self, request_id: str, home: str) -> Pid | None:
        """The oldest session leader with the request in its environment."""
        found: list[tuple[float, int]] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) != process.pid or _is_zombie(process):
                    continue
                environ = process.environ()
                if (environ.get(SPAWN_VARIABLE), environ.get(HOME_VARIABLE)) == (request_id, home):
                    found.append((process.create_time(), process.pid))
        for _, number in sorted(found):
            start = self._start_of(number)
            if start is not None:
                return Pid(number, start)
        return None

    def exit_status(self, pid: Pid) -> ExitStatus | None:
        """The exit status; the code of another process's child is unknown."""
        with contextlib.suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            info = os.waitid(os.P_PID, pid.number, options)
            if info is None:
                return None
            is_exit = info.si_code == os.CLD_EXITED
            return ExitStatus(info.si_status if is_exit else -info.si_status)
        return None if self._lives(pid) else ExitStatus(None)

    def is_own(self, pid: Pid) -> bool:
        """True for a child of this process, ended or not."""
        try:
            os.waitid(os.P_PID, pid.number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def reap(self, pid: Pid) -> None:
        """Reap an ended child; another process's child is left to its parent."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid.number, os.WNOHANG)

    def others(self, pid: Pid) -> list[int]:
        """Other living processes of the session; its number is not reused while one lives."""
        start = self._start_of(pid.number)
        if start is not None and start != pid.start:
            return []  # the number was given again: so the session is empty
        return [member for member in self._session(pid) if member != pid.number]

    def signal(self, pid: Pid, number: int) -> None:
        """Signal the group, then session members in other groups."""
        start = self._start_of(pid.number)
        if start is not None and start != pid.start:
            return
        members = list(self._session(pid))
        if not members:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid.number, number)
        for member in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(member) != pid.number and os.getsid(member) == pid.number:
                    os.kill(member, number)

    def usage(self, pids: Sequence[Pid]) -> dict[Pid, Usage]:
        """CPU seconds and resident bytes of their sessions."""
        wanted = {pid.number: pid for pid in pids if self._lives(pid)}
        found = {pid: Usage(0.0, 0) for pid in wanted.values()}
        for process_id in psutil.pids() if wanted else ():
            with contextlib.suppress(psutil.Error, OSError):
                pid = wanted.get(os.getsid(process_id))
                if pid is None:
                    continue
                process = psutil.Process(process_id)
                times, before = process.cpu_times(), found[pid]
                cpu_s = before.cpu_s + times.user + times.system
                found[pid] = Usage(cpu_s, before.rss_bytes + process.memory_info().rss)
        return found

    def _session(self, pid: Pid) -> Iterator[int]:
        """The living processes of its session, including itself."""
        for process_id in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
                if os.getsid(process_id) == pid.number and not _is_zombie(
                    psutil.Process(process_id)
                ):
                    yield process_id

    def _lives(self, pid: Pid) -> bool:
        """False if it is known to have ended. Errors: OSError if that cannot be determined."""
        if self._start_of(pid.number) != pid.start:
            return False
        try:
            return not _is_zombie(psutil.Process(pid.number))
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:  # it is there
            return True

    def _start_of(self, number: int) -> str | None:
        """The start time of a process, unique among processes with its number; None if it is gone.

        Errors: OSError if that cannot be determined: it is neither taken for ended nor started
        twice.
        """
        try:
            _, _, start = process_info.program_of(number)
            if start is None:  # there is no /proc
                start = psutil.Process(number).create_time()
        except (ProcessLookupError, psutil.Error):
            return None
        return f"{self._boot} {start}"


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended, its exit code is not known"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"


def _is_zombie(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_ZOMBIE)


def _why_not(spec: Spec, exc: OSError | ValueError) -> str:
    """The reason of a refused start, without anything secret: argv contains the prompt."""
    program = shown(spec.argv[0])[:200]
    if isinstance(exc, OSError) and exc.filename == spec.cwd != spec.argv[0]:
        return f"WORKING_DIR {shown(spec.cwd)} cannot be entered: {exc.strerror}"
    if isinstance(exc, FileNotFoundError):
        found = shutil.which(spec.argv[0]) or os.path.join(spec.cwd, spec.argv[0])
        if os.path.isfile(found):
            return f"{program} cannot be run: the interpreter in its first line (#!…) is missing"
        return (
            f"there is no program {program}: add it to the PATH that the relay was started "
            f"with, or its path into spawn.clis of config.json ({spec.cli})"
        )
    if isinstance(exc, OSError):
        advice = ADVICE.get(exc.errno or 0, "")
        return f"{program} cannot be run: {exc.strerror}{advice}"
    return f"{program} cannot be run: an argument or name is not accepted by the system"
