"""The home's file system: its usage, the thresholds that follow from it, and what statx tells.

    OK      -> ALERT  used >= alert_percent: logged, one notification
            -> LOW    used >= low_percent: the archive is packed
            -> FLOOR  free < the floor: intake pauses, deliveries in progress continue

Hysteresis keeps a disk at a threshold from switching back and forth. Free is what an ordinary user
may still write; used is what `df` shows.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from relay.base.clock import NS_PER_S
from relay.base.config import DiskSettings

MIB = 1 << 20
SPARE_PERCENT = 2  # an alert ends once used is this far below its threshold
FLOOR_SHARE = 20  # the floor is at most a twentieth of the disk, for small disks
RESUME = (5, 4)  # intake resumes at this multiple of the floor


MeasureDisk = Callable[[str], tuple[int, int, int]]


class DiskState(Enum):
    """Level of disk usage."""

    OK = "ok"
    ALERT = "alert"  # operator and lead are notified
    LOW = "low"  # the relay frees space
    FLOOR = "floor"  # intake pauses

    @property
    def is_alert(self) -> bool:
        """True when operator and lead are to be notified."""
        return self is not DiskState.OK

    @property
    def is_low(self) -> bool:
        """True when the relay is to free space."""
        return self in (DiskState.LOW, DiskState.FLOOR)


class DiskUsage(NamedTuple):
    """One measurement of the disk."""

    state: DiskState
    size_bytes: int
    free_bytes: int
    used_percent: float
    floor_bytes: int

    def sentence(self) -> str:
        """Usage as text."""
        return f"{self.used_percent:.0f} % used, {self.free_bytes // MIB} MiB free"


def measure_disk(path: str) -> tuple[int, int, int]:
    """(size, used, free) in bytes of the file system of ``path``. Errors: OSError."""
    status = os.statvfs(path)
    size = status.f_blocks * status.f_frsize
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    return size, used, status.f_bavail * status.f_frsize


def refuses_files(path: str) -> str:
    """Why no file can be made in a directory, such as ``Read-only file system``; empty: one can.

    statvfs does not tell: a quota may be reached, or no inode be free, and newer kernels still
    report ext4 as read-write after a fault. So an unnamed file (O_TMPFILE) is opened where the
    system has that. Errors: OSError.
    """
    try:
        os.close(os.open(path, getattr(os, "O_TMPFILE", 0) | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return os.strerror(exc.errno)
    return os.strerror(errno.EROFS) if os.statvfs(path).f_flag & os.ST_RDONLY else ""


CHECK_S = 5  # between two measurements: a busy relay writes some 50 MB in that


class DiskWatch:
    """The state of a disk, from one check to the next."""

    def __init__(
        self, path: str, settings: DiskSettings, measure: MeasureDisk = measure_disk
    ) -> None:
        self._path = path
        self._settings = settings
        self._measure = measure
        self.reading: DiskUsage | None = None  # None: not checked yet, or not readable

    def check(self) -> tuple[DiskUsage | None, DiskUsage] | None:
        """(previous, current) if the state changed or at the first check, else None.

        A disk that cannot be read keeps its previous state; a write to it will fail.
        """
        before = self.reading
        try:
            size, used, free = self._measure(self._path)
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
    """Free bytes below which intake pauses."""
    return min(settings.floor_mib * MIB, size // FLOOR_SHARE)


_STATX_BTIME, _STATX_MNT_ID_UNIQUE, _AT_EMPTY_PATH = 0x800, 0x4000, 0x1000  # linux/stat.h, fcntl.h
_MASK, _BTIME, _MNT_ID = struct.Struct("<I"), struct.Struct("<qI"), struct.Struct("<Q")
_BTIME_AT, _MNT_ID_AT, _STATX_BYTES = 80, 144, 256  # in struct statx


def created_ns(fd: int) -> int:
    """Creation time of a file (Unix ns), which ``os.stat`` does not return on Linux; 0: unknown."""
    seconds, nanoseconds = _statx_field(fd, _STATX_BTIME, _BTIME, _BTIME_AT) or (0, 0)
    return int(seconds * NS_PER_S + nanoseconds)


def mount_id(fd: int) -> int:
    """Number of the mount that a file is on, which no other has until a reboot; 0: unknown.

    Linux knows it since 6.8.
    """
    (number,) = _statx_field(fd, _STATX_MNT_ID_UNIQUE, _MNT_ID, _MNT_ID_AT) or (0,)
    return int(number)


def _statx_field(fd: int, mask: int, kind: struct.Struct, at: int) -> tuple[int, ...] | None:
    """A field of struct statx; None where the file system, kernel or C library has none."""
    statx = _statx()
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, mask, answer) != 0:
        return None
    return kind.unpack_from(answer, at) if _MASK.unpack_from(answer)[0] & mask else None


@functools.cache
def _statx() -> Callable[..., int] | None:
    """The C library's statx; None if it is too old."""
    return getattr(ctypes.CDLL(None), "statx", None)
