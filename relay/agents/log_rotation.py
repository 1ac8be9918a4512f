"""Logs of processes, kept short: what is too long is copied aside in slices, and cut.

    logs/{name}.log.1      the one before, and so on; the oldest goes
    logs/{name}.log.part   a copy that is being made; one that a crash left is begun anew

A process keeps its descriptor and may write faster than anybody copies: of a log that is more than
twice too long the last bytes are copied, and a copy ends when it is twice as long as a log may be.
What is left out is counted in its place. What is written between the last byte copied and the cut
is lost, which is microseconds; killed between the two, the next copy has those bytes again.
How often a log is looked at follows from how fast it grows. Source: relay-file-system.txt 4.3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import NamedTuple

from relay.agents.runfiles import LOGS, output_size
from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import UnsafePath
from relay.base.home import Dirs, Home

PART = ".log.part"
SLICE = 512 << 10  # bytes of one step: less than a millisecond
SOON_NS = 50 * NS_PER_MS  # between two looks at a log that grows fast
FIRST_NS = 500 * NS_PER_MS  # behind a start: nobody knows yet how fast it grows
SELDOM_NS = 5 * NS_PER_S
AGAIN_NS = 5 * NS_PER_S  # after a rotation that the disk refused


class Rotation:
    """One log that is being copied aside. Errors of every method: OSError, UnsafePath."""

    def __init__(self, dirs: Dirs, name: str, most_bytes: int, keep_files: int) -> None:
        self._name, self._most, self._keep = name, most_bytes, keep_files
        logs = dirs.ensure(LOGS)
        fsio.remove(name + PART, logs)
        fsio.remove(f"{name}.log.{keep_files}", logs)  # what is renamed over it would take longer
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._source = os.open(f"{name}.log", flags, dir_fd=logs)
        try:
            self._target = fsio.open_append(name + PART, logs)
        except OSError:
            os.close(self._source)
            raise
        size = os.fstat(self._source).st_size
        self._from = self._at = size - most_bytes if size > 2 * most_bytes else 0
        self._leave_out(self._from)

    def step(self, dirs: Dirs) -> bool:
        """Copy one slice; True when it was the last, and the log is cut."""
        data = os.pread(self._source, SLICE, self._at)
        self._at += len(data)
        while data:
            data = data[os.write(self._target, data) :]
        room = self._at - self._from < 2 * self._most
        if room and self._at < os.fstat(self._source).st_size:
            return False
        self._finish(dirs.ensure(LOGS))
        return True

    def close(self) -> None:
        """Let go of the files; what was not finished is begun anew by the next one."""
        os.close(self._source)
        os.close(self._target)

    def _finish(self, logs: int) -> None:
        self._leave_out(os.fstat(self._source).st_size - self._at)
        for number in range(self._keep - 1, 0, -1):
            if fsio.exists(f"{self._name}.log.{number}", logs):
                fsio.rename(
                    f"{self._name}.log.{number}", logs, f"{self._name}.log.{number + 1}", logs
                )
        fsio.rename(self._name + PART, logs, f"{self._name}.log.1", logs)
        fsio.truncate(self._source, 0, f"{self._name}.log")

    def _leave_out(self, size: int) -> None:
        if size > 0:
            note = f"\n[{size} bytes left out: they came faster than a log is kept]\n"
            os.write(self._target, note.encode())


class Growth(NamedTuple):
    """How long a log was when it was looked at, and when to look again (monotonic)."""

    size: int
    at: int
    next_at: int


class Rotations:
    """Keeps the logs of all processes short. Used from the loop's thread."""

    def __init__(
        self,
        home: Home,
        most_bytes: int,
        keep_files: int,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._home = home
        self._most = most_bytes
        self._keep = keep_files
        self._clock = clock
        self._log = log
        self._growth: dict[str, Growth] = {}
        self._in_hand: dict[str, Rotation] = {}

    def due_ns(self) -> int | None:
        """When ``step`` has something to do next (monotonic)."""
        if self._in_hand:
            return 0
        return min((one.next_at for one in self._growth.values()), default=None)

    def step(self, running: Collection[str]) -> list[str]:
        """Look at what is due, and copy a slice of what is in hand; the logs that were cut now.

        ``running``: whose processes write. A log that nothing writes to any more has a last look.
        """
        now = self._clock.monotonic_ns()
        for name in self._growth.keys() - running:
            self._look(name, self._growth.pop(name), now)
            self._growth.pop(name)
        for name in running:
            known = self._growth.get(name)
            if known is None:
                self._growth[name] = Growth(self._size(name), now, now + FIRST_NS)
            elif now >= known.next_at and name not in self._in_hand:
                self._look(name, known, now)
        return [name for name, one in list(self._in_hand.items()) if self._copy(name, one)]

    def close(self) -> None:
        """Let go of what is in hand."""
        for rotation in self._in_hand.values():
            rotation.close()
        self._in_hand.clear()

    def _look(self, name: str, known: Growth, now: int) -> None:
        size = self._size(name)
        grown, took = size - known.size, max(now - known.at, 1)
        wait = SELDOM_NS
        if grown > 0:  # half of the time in which it would be full
            wait = min(SELDOM_NS, max(SOON_NS, max(self._most - size, 0) * took // grown // 2))
        self._growth[name] = Growth(size, now, now + wait)
        if size > self._most:
            self._begin(name)

    def _begin(self, name: str) -> None:
        if name in self._in_hand:
            return
        try:
            with self._home.dirs() as dirs:
                self._in_hand[name] = Rotation(dirs, name, self._most, self._keep)
        except (OSError, UnsafePath) as exc:
            self._put_off(name, exc)

    def _copy(self, name: str, rotation: Rotation) -> bool:
        is_done = False
        try:
            with self._home.dirs() as dirs:
                is_done = rotation.step(dirs)
            if not is_done:
                return False
        except (OSError, UnsafePath) as exc:
            self._put_off(name, exc)
        else:
            if name in self._growth:  # its last look was at the bytes that are cut off now
                known = self._growth[name]
                self._growth[name] = known._replace(size=0)
        rotation.close()
        self._in_hand.pop(name)
        return is_done

    def _put_off(self, name: str, exc: Exception) -> None:
        if name in self._growth:
            now = self._clock.monotonic_ns()
            self._growth[name] = self._growth[name]._replace(next_at=now + AGAIN_NS)
        self._log(
            f"Cannot rotate logs/{name}.log, trying again: {exc}",
            action="rotate_failed",
            level="warning",
            agent=name,
        )

    def _size(self, name: str) -> int:
        try:
            with self._home.dirs() as dirs:
                return output_size(dirs, name)
        except OSError:
            return 0
