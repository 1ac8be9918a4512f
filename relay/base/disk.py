"""Disk usage of the home's file system, and the thresholds that follow from it.

    OK      -> ALERT  used >= alert_percent: logged, told once
            -> LOW    used >= low_percent: what can be made smaller is
            -> FLOOR  free < the floor: nothing is taken in; deliveries in hand go on

A state is left only with some room to spare, so that a disk at the edge does not make it flicker.
Free is what an ordinary user may still write; used is what `df` calls so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from relay.base.clock import NS_PER_S, Clock
from relay.base.config import DiskSettings

MIB = 1 << 20
SPARE_PERCENT = 2  # an alert is over once used is so far below its limit
FLOOR_SHARE = 20  # the floor is a twentieth of the disk at most: a small one is not all floor
RESUME = (5, 4)  # of the floor must be free before anything is taken in again


class DiskState(Enum):
    """Level of disk usage."""

    OK = "ok"  # room enough
    ALERT = "alert"  # somebody should look after it
    LOW = "low"  # the relay frees what it can
    FLOOR = "floor"  # nothing is taken in

    @property
    def is_alert(self) -> bool:
        """True when somebody is to be told."""
        return self is not DiskState.OK

    @property
    def is_low(self) -> bool:
        """True when what can be made smaller is."""
        return self in (DiskState.LOW, DiskState.FLOOR)


class DiskUsage(NamedTuple):
    """The disk as it was looked at."""

    state: DiskState
    size_bytes: int
    free_bytes: int
    used_percent: float
    floor_bytes: int

    def sentence(self) -> str:
        """For people: how full it is."""
        return f"{self.used_percent:.0f} % used, {self.free_bytes // MIB} MiB free"


def look(path: str) -> tuple[int, int, int]:
    """(size, used, free) in bytes of the file system of ``path``. Errors: OSError."""
    status = os.statvfs(path)
    size = status.f_blocks * status.f_frsize
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    return size, used, status.f_bavail * status.f_frsize


class DiskWatch:
    """Looks every ``check_s``. Owned by the loop; ``reading`` may be read from any thread."""

    def __init__(
        self,
        path: str,
        settings: DiskSettings,
        clock: Clock,
        look: Callable[[str], tuple[int, int, int]] = look,
    ) -> None:
        self._path = path
        self._settings = settings
        self._clock = clock
        self._look = look
        self._due_ns = 0
        self.reading: DiskUsage | None = None  # None: not looked yet, or it cannot be

    def due_ns(self) -> int:
        """When to look next (monotonic)."""
        return self._due_ns

    def check(self) -> tuple[DiskUsage | None, DiskUsage] | None:
        """(before, now) where the state changed or it is the first look, else None.

        One that cannot be asked is taken as it was before: a write will tell.
        """
        now = self._clock.monotonic_ns()
        if now < self._due_ns:
            return None
        self._due_ns = now + self._settings.check_s * NS_PER_S
        before = self.reading
        try:
            size, used, free = self._look(self._path)
        except OSError:
            return None
        percent = 100 * used / max(used + free, 1)
        floor = floor_bytes(self._settings, size)
        state = self._state(percent, free, floor, before.state if before else DiskState.OK)
        self.reading = DiskUsage(state, size, free, percent, floor)
        is_news = before is None or before.state is not state
        return (before, self.reading) if is_news else None

    def _state(self, percent: float, free: int, floor: int, before: DiskState) -> DiskState:
        order = list(DiskState)
        above, below = RESUME
        if free < (floor * above // below if before is DiskState.FLOOR else floor):
            return DiskState.FLOOR
        was = order.index(before)
        for state, limit in (
            (DiskState.LOW, self._settings.low_percent),
            (DiskState.ALERT, self._settings.alert_percent),
        ):
            is_left_late = was >= order.index(state)
            if percent >= (limit - SPARE_PERCENT if is_left_late else limit):
                return state
        return DiskState.OK


def floor_bytes(settings: DiskSettings, size: int) -> int:
    """Below so many free bytes nothing is taken in."""
    return min(settings.floor_mib * MIB, size // FLOOR_SHARE)
