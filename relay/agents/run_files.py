"""Files of supervised processes: specs and locks in ``run/``, output in ``logs/``.

    run/{name}.{request id}.json   the Spec with the values of ENV, until the process is finished
    run/{name}.lock                locked by the process itself while it lives
    logs/{name}.log                its output; logs/{name}.log.1 and so on: rotated, newest first

A process keeps the descriptor of its log, so a log is rotated by copying and truncating it. Bytes
written between the last read and the truncation are lost, which is microseconds; after a crash in
between the next rotation copies them again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future

import msgspec

from relay.agents.requests import Spec, mask
from relay.base import fsio
from relay.base.clock import NS_PER_S, Clock
from relay.base.errors import UnsafePath
from relay.base.home import RUN, Dirs, Home

SUFFIX = ".json"
LOGS = "logs"
MOST_SPEC = 8 << 20
TAIL_BYTES = 64 << 10
TAIL_LINES = 8
TAIL_LINE = 240  # characters
PART = ".log.part"  # a copy being made; one left by a crash is removed
BLOCK_BYTES = 512 << 10
KEPT_FILES = 2  # rotated ones, of each agent
CHECK_NS = NS_PER_S  # between two checks of the logs' sizes
RETRY_NS = 5 * NS_PER_S  # after a rotation that failed


def save_spec(dirs: Dirs, spec: Spec) -> None:
    """Write a spec durably, replacing an earlier one. Errors: OSError, UnsafePath."""
    name, run = _name(spec.name, spec.request_id), dirs.ensure(RUN)
    fsio.remove(name, run)
    fsio.create(name, msgspec.json.encode(spec), run, sync=True)


def read_spec(dirs: Dirs, name: str, request_id: str) -> Spec | None:
    """The spec of a request; None if it is missing or truncated by a crash."""
    try:
        data, _ = fsio.read_regular(_name(name, request_id), dirs.ensure(RUN), MOST_SPEC)
        return msgspec.json.decode(data, type=Spec)
    except (FileNotFoundError, UnsafePath, msgspec.MsgspecError):
        return None


def remove_spec(dirs: Dirs, name: str, request_id: str) -> None:
    """Remove a spec, and the secrets in it, once its process is finished or was never started."""
    fsio.remove(_name(name, request_id), dirs.ensure(RUN))


def list_specs(dirs: Dirs) -> list[tuple[str, str]]:
    """(name, request id) of every spec."""
    found = []
    for file_name in sorted(os.listdir(dirs.ensure(RUN))):
        name, dot, request_id = file_name.removesuffix(SUFFIX).partition(".")
        if dot and file_name.endswith(SUFFIX):
            found.append((name, request_id))
    return found


def take_lock(dirs: Dirs, name: str) -> int | None:
    """The lock of a name, for the process to inherit; None while another process holds it."""
    return fsio.take_lock(f"{name}.lock", dirs.ensure(RUN))


def open_output(dirs: Dirs, name: str) -> int:
    """Open the log of a process for appending, so that it stays valid after a rotation."""
    return fsio.open_append(f"{name}.log", dirs.ensure(LOGS))


def output_size(dirs: Dirs, name: str) -> int:
    """Bytes in the log of a process; 0 if there is none."""
    try:
        return os.stat(f"{name}.log", dir_fd=dirs.ensure(LOGS), follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def last_lines(home: Home, name: str, begin: int, secrets: tuple[str, ...]) -> list[str]:
    """The last lines of a log from offset ``begin`` on, with the values of ENV masked."""
    with home.dirs() as dirs:
        size = output_size(dirs, name)
        begin = begin if begin <= size else 0  # rotated since
        is_cut = begin < size - TAIL_BYTES
        begin = max(begin, size - TAIL_BYTES)
        try:
            fd = os.open(
                f"{name}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirs.ensure(LOGS)
            )
        except OSError:
            return []
        try:
            data = os.pread(fd, TAIL_BYTES, begin)
        finally:
            os.close(fd)
    if is_cut:  # it may begin with the end of a secret
        data = data[max((len(secret.encode()) for secret in secrets), default=0) :]
    text = mask(data.decode(errors="replace"), secrets)
    lines = [line for line in map(_plain, text.splitlines()) if line]
    return [line[:TAIL_LINE] for line in lines[-TAIL_LINES:]]


def _plain(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line).rstrip()


def _name(name: str, request_id: str) -> str:
    return f"{name}.{request_id}{SUFFIX}"


# -- rotation --------------------------------------------------------------------------------


class LogRotator:
    """Rotates the logs of running processes, in ``executor``. Used from the loop's thread."""

    def __init__(
        self,
        home: Home,
        most_bytes: int,
        executor: Executor,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._home = home
        self._most_bytes = most_bytes
        self._executor = executor
        self._clock = clock
        self._log = log
        self._watched: set[str] = set()
        self._copying: dict[str, Future[None]] = {}
        self._retry_at: dict[str, int] = {}  # name -> monotonic
        self._next_ns = 0

    def due_ns(self) -> int | None:
        """When to call ``poll`` next (monotonic); None while no log can grow."""
        return self._next_ns if self._watched or self._copying else None

    def poll(self, running: Collection[str]) -> list[str]:
        """Start rotating logs that are too long; returns those truncated since the last call.

        ``running``: names of the running processes. The log of one that ended is checked again.
        """
        rotated = [name for name, copy in list(self._copying.items()) if self._collect(name, copy)]
        now = self._clock.monotonic_ns()
        ended = self._watched.difference(running)
        if now >= self._next_ns or ended:
            self._next_ns = now + CHECK_NS
            for name in {*running, *ended}:
                self._check(name, now)
        self._watched = set(running)
        return rotated

    def _check(self, name: str, now: int) -> None:
        if name in self._copying or now < self._retry_at.get(name, 0):
            return
        with contextlib.suppress(OSError), self._home.dirs() as dirs:
            if output_size(dirs, name) > self._most_bytes:
                self._copying[name] = self._executor.submit(
                    rotate, self._home, name, self._most_bytes
                )

    def _collect(self, name: str, copy: Future[None]) -> bool:
        """True if the rotation of a log is done."""
        if not copy.done():
            return False
        del self._copying[name]
        self._retry_at.pop(name, None)
        exc = copy.exception()
        if exc is None:
            return True
        if not isinstance(exc, OSError | UnsafePath):
            raise exc
        self._retry_at[name] = self._clock.monotonic_ns() + RETRY_NS
        self._log(
            f"Cannot rotate logs/{name}.log, trying again: {exc}",
            action="rotate_failed",
            level="warning",
            agent=name,
        )
        return False


def rotate(home: Home, name: str, most_bytes: int) -> None:
    """Copy a log to ``{name}.log.1`` and truncate it, while its process may continue writing.

    Disk use is bounded: of a log twice too long only the last ``most_bytes`` are copied, and a copy
    ends at twice ``most_bytes``. A line in its place counts the bytes left out.
    Errors: OSError, UnsafePath.
    """
    with home.dirs() as dirs, contextlib.ExitStack() as stack:
        logs = dirs.ensure(LOGS)
        fsio.remove(name + PART, logs)
        fsio.remove(f"{name}.log.{KEPT_FILES}", logs)  # makes room before the copy
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        source = os.open(f"{name}.log", flags, dir_fd=logs)
        stack.callback(os.close, source)
        target = fsio.open_append(name + PART, logs)
        stack.callback(os.close, target)
        size = os.fstat(source).st_size
        begin = at = size - most_bytes if size > 2 * most_bytes else 0
        _note_left_out(target, begin)
        while at - begin < 2 * most_bytes and (data := os.pread(source, BLOCK_BYTES, at)):
            at += len(data)
            while data:
                data = data[os.write(target, data) :]
        _note_left_out(target, os.fstat(source).st_size - at)
        for number in range(KEPT_FILES - 1, 0, -1):
            if fsio.exists(f"{name}.log.{number}", logs):
                fsio.rename(f"{name}.log.{number}", logs, f"{name}.log.{number + 1}", logs)
        fsio.rename(name + PART, logs, f"{name}.log.1", logs)
        fsio.truncate(source, 0, f"{name}.log")


def _note_left_out(target: int, size: int) -> None:
    if size > 0:
        note = f"\n[{size} bytes left out: they came faster than a log is kept]\n"
        os.write(target, note.encode())
