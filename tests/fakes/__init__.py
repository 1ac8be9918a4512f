"""The fakes that there are: a clock that stands still, a disk, a system that runs no process."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from relay.agents.requests import Spec
from relay.agents.spawner import CannotStart, ExitStatus, Pid, Usage
from relay.base.clock import NS_PER_S, Clock
from relay.base.disk import MIB

P = ParamSpec("P")
T = TypeVar("T")


class FakeClock(Clock):
    """Stands still until told otherwise; begins at the real time, so that mtimes fit."""

    def __init__(self, now_ns: int | None = None) -> None:
        self._now_ns = time.time_ns() if now_ns is None else now_ns
        self._monotonic_ns = 1_000 * NS_PER_S

    def now_ns(self) -> int:
        """Unix time, nanoseconds."""
        return self._now_ns

    def monotonic_ns(self) -> int:
        """Nanoseconds that only grow."""
        return self._monotonic_ns

    def advance(self, seconds: float) -> None:
        """Both clocks go on."""
        self._now_ns += int(seconds * NS_PER_S)
        self._monotonic_ns += int(seconds * NS_PER_S)

    def jump(self, seconds: float) -> None:
        """The wall clock alone is set, as an administrator would."""
        self._now_ns += int(seconds * NS_PER_S)


class FakeDisk:
    """A disk of 100,000 MiB of which so much is used."""

    def __init__(self) -> None:
        self.size = 100_000 * MIB
        self.used_mib = 0
        self.error: OSError | None = None

    def __call__(self, path: str) -> tuple[int, int, int]:
        """(size, used, free) in bytes."""
        if self.error:
            raise self.error
        return self.size, self.used_mib * MIB, self.size - self.used_mib * MIB


class IdleExecutor(Executor):
    """Begins nothing: a test that does the work itself takes it."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A future that never ends."""
        return Future()


class FakeProcess:
    """A process that does nothing by itself."""

    def __init__(self, pid: Pid, spec: Spec, lock_fd: int, output_fd: int) -> None:
        self.pid = pid
        self.spec = spec
        self.lock_fd = os.dup(lock_fd)  # inherited: the same open file, the same lock
        self.output = os.dup(output_fd)
        self.code: int | None = None  # set: it has ended
        self.signals: list[int] = []
        self.others = 0  # what else lives in its session
        self.dies_of: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)
        self.usage = Usage(0.0, 1 << 20)
        self.is_own = True


class FakeSpawner:
    """Processes that are told what to do by the test; ``step`` is called around each start."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []
        self.refuses = ""  # why nothing can be started
        self.lets_go = False  # of the lock, as a program that closes all it inherited
        self.step: Callable[[], None] = lambda: None

    def start(self, spec: Spec, home: str, lock_fd: int, output_fd: int) -> Pid:
        """A new one; never two that live of one name."""
        self.step()
        if self.refuses:
            raise CannotStart(self.refuses)
        assert not [p for p in self.running() if p.spec.name == spec.name], "two of one name"
        pid = Pid(1_000_000 + len(self.processes), f"boot {len(self.processes)}")
        process = FakeProcess(pid, spec, lock_fd, output_fd)
        self.processes.append(process)
        if self.lets_go:
            os.close(process.lock_fd)
            process.lock_fd = -1
        self.step()
        return pid

    def running(self) -> list[FakeProcess]:
        """Those that have not ended."""
        return [p for p in self.processes if p.code is None]

    def end(self, code: int, *lines: str) -> None:
        """The one that runs writes these lines and ends."""
        (process,) = self.running()
        os.write(process.output, "".join(f"{line}\n" for line in lines).encode())
        self._end(process, code)

    def _end(self, process: FakeProcess, code: int) -> None:
        process.code = code
        os.close(process.output)
        if process.lock_fd >= 0:
            fcntl.flock(process.lock_fd, fcntl.LOCK_UN)
            os.close(process.lock_fd)

    def adopt_all(self) -> None:
        """As after a restart of the relay: they are nobody's children now."""
        for process in self.processes:
            process.is_own = False

    def find(self, request_id: str, home: str) -> Pid | None:
        """The one that runs for a request."""
        found = [p.pid for p in self.running() if p.spec.request_id == request_id]
        return found[0] if found else None

    def exit_status(self, pid: Pid) -> ExitStatus | None:
        """How it ended; of one that is not our child, only that it did."""
        process = self._of(pid)
        if process is None:
            return None if pid.number == os.getpid() else ExitStatus(None)
        if process.code is None:
            return None
        return ExitStatus(process.code if process.is_own else None)

    def is_own(self, pid: Pid) -> bool:
        """True for one that this relay started."""
        process = self._of(pid)
        return process is not None and process.is_own

    def reap(self, pid: Pid) -> None:
        """Nothing is left of it."""
        process = self._of(pid)
        if process is not None:
            process.is_own = False

    def others(self, pid: Pid) -> list[int]:
        """What else lives in its session."""
        process = self._of(pid)
        return list(range(process.others)) if process else []

    def signal(self, pid: Pid, number: int) -> None:
        """It is noted, and ends what heeds it."""
        self.step()
        process = self._of(pid)
        if process is None:
            return
        process.signals.append(number)
        if number in process.dies_of:
            process.others = 0
            if process.code is None:
                self._end(process, -number)

    def usage(self, pids: Sequence[Pid]) -> dict[Pid, Usage]:
        """What the test says that they use."""
        return {p.pid: p.usage for p in self.running() if p.pid in pids}

    def _of(self, pid: Pid) -> FakeProcess | None:
        return next((p for p in self.processes if p.pid == pid), None)
