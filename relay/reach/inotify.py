"""Changes in folders by inotify, for a small process: watchdog takes 10 MB more."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import time

CHANGED = 0x0C0 | 0x100 | 0x200  # moved from and to, created, deleted
_MASK = CHANGED | 0x01000000 | 0x02000000  # a folder, and no link to one
_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK


class Folders:
    """Tells when a name in one of the watched folders appears, goes or is replaced.

    Without inotify ``wait`` returns after SCAN_S at most, and the caller looks for itself.
    """

    SCAN_S = 1.0

    def __init__(self) -> None:
        self._fd = -1
        self._pids: list[int] = []
        self._prefixes: dict[int, bytes] = {}
        self._all_watched = True
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.inotify_init1(_CLOEXEC_NONBLOCK)
        self._poll = select.poll()
        if self._fd >= 0:
            self._poll.register(self._fd, select.POLLIN)

    def add(self, path: str, prefix: str = "") -> None:
        """Watch a folder, for names that begin with ``prefix``."""
        wd = -1
        if self._fd >= 0:
            wd = self._libc.inotify_add_watch(self._fd, os.fsencode(path), _MASK)
        if wd < 0:
            self._all_watched = False
        self._prefixes[wd] = os.fsencode(prefix)

    def add_process(self, pid: int) -> None:
        """End each wait when the process has ended."""
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # older kernel, another system, or it has ended
            return
        self._pids.append(fd)
        self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Sleep until something changes, a process ends, or the time is up."""
        if not self._all_watched:
            seconds = min(seconds, self.SCAN_S)
        until = time.monotonic() + max(0.0, seconds)
        while True:
            left = max(0.0, until - time.monotonic())
            ready = [fd for fd, _ in self._poll.poll(left * 1000)]
            for fd in ready:
                if fd in self._pids:  # told once
                    self._poll.unregister(fd)
            if ready != [self._fd] or self._has_changed(os.read(self._fd, 1 << 16)):
                return

    def _has_changed(self, events: bytes) -> bool:
        """True if one of the events is of a name that is watched, or some were lost."""
        at = 0
        while at < len(events):
            wd, mask, _, length = struct.unpack_from("iIII", events, at)
            name = events[at + 16 : at + 16 + length]
            if mask & ~CHANGED or name.startswith(self._prefixes.get(wd, b"")):
                return True
            at += 16 + length
        return False

    def close(self) -> None:
        """Close the descriptors; the kernel drops the watches."""
        for fd in [*self._pids, self._fd]:
            if fd >= 0:
                os.close(fd)
        self._pids, self._fd = [], -1
