"""A disk that fails, and processes that are killed, at the calls that ``fsio.fault`` announces.

with failing("write", ".msg"): ...     no space for any write to a path with .msg in it
with hooked(hook): ...                 ``hook`` sees every call, and may raise
steps_of(work)                         the calls that a piece of work makes
with killed_before(3) as calls: ...    the block ends before its third call
killed_at(number, work)                a process that does the work, killed at one of its calls
flip(path, 100)                        a bit of a file is another one
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from relay.base import fsio
from tests.kills import Killed

Hook = Callable[[str, str], None]


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Let ``hook`` see every call of fsio."""
    before = fsio.fault
    fsio.fault = hook
    try:
        yield
    finally:
        fsio.fault = before


@contextmanager
def failing(operation: str, name: str = "", code: int = errno.ENOSPC) -> Iterator[None]:
    """Let every call of this operation fail on a path with ``name`` in it."""

    def fault(found: str, path: str) -> None:
        if found == operation and name in path:
            raise OSError(code, os.strerror(code), path)

    with hooked(fault):
        yield


def steps_of(work: Callable[[], object]) -> list[tuple[str, str]]:
    """The operation and the path of every call that the work makes."""
    steps: list[tuple[str, str]] = []
    with hooked(lambda *step: steps.append(step)):
        work()
    return steps


@contextmanager
def killed_before(number: int, operation: str = "") -> Iterator[list[str]]:
    """Leave the block before its ``number``-th call, from 1, of this operation or of any.

    Gives the paths of these calls so far: fewer than ``number`` when the block came to its end.
    """
    calls: list[str] = []

    def kill(found: str, path: str) -> None:
        if not operation or found == operation:
            calls.append(path)
            if len(calls) == number:
                raise Killed

    with suppress(Killed), hooked(kill):
        yield calls


def killed_at(number: int, work: Callable[[], object], operation: str = "") -> None:
    """Do the work in a process that is killed at its ``number``-th call of fsio, from 1; of this
    operation, or of any.

    It is a fork of this one: what the work opens must not be open here.
    """
    calls = count(1)

    def kill(found: str, path: str) -> None:
        if operation in ("", found) and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        try:
            with hooked(kill):
                work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Change bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)
