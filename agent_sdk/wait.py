"""Waiting for an inbox: a hint that something may have come, never what.

inotify where it works, a look every 50 ms where it does not. Whoever waits makes the watch
first and lists the directory then, so nothing that comes in between is slept through.
"""

from __future__ import annotations

import os
import select
import time
from typing import Protocol

POLL_S = 0.05
# inotify sees nothing that another machine does on a network file system, nor a directory that
# was replaced: so often the inbox is listed whatever the kernel says.
RELIST_S = 5.0


class InboxWaiter(Protocol):
    """What a waiting call sleeps on. Used from one thread."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until something may have come, or the time is up."""

    def close(self) -> None:
        """Give every descriptor back."""


def open_waiter(path: str) -> InboxWaiter:
    """Watch the directory ``path``: what is renamed in after this returns ends a wait."""
    try:
        return InotifyWaiter(path)
    except Exception:  # no inotify, no watch left, not readable: looking always works
        return PollWaiter()


class PollWaiter:
    """No watch: every wait is a short sleep."""

    def wait(self, timeout_s: float) -> None:
        """Sleep 50 ms, or less when less is asked for."""
        time.sleep(min(timeout_s, POLL_S))

    def close(self) -> None:
        """Nothing to give back."""


class InotifyWaiter:
    """One private inotify descriptor of watchdog with one watch, read in the caller's thread.

    watchdog takes 30 ms to import, so that happens here: when a call really has to wait.
    Errors: whatever stands in the way, ImportError and OSError among it.
    """

    def __init__(self, path: str) -> None:
        from watchdog.observers import inotify_c

        bits = inotify_c.InotifyConstants
        mask = bits.IN_MOVED_TO | bits.IN_CLOSE_WRITE | bits.IN_ONLYDIR | bits.IN_DONT_FOLLOW
        self._inotify = inotify_c.InotifyFD()
        try:
            fd: int = self._inotify._inotify_fd
            os.set_inheritable(fd, False)
            watch = self._inotify.add_callback(os.fsencode(path), mask, self, 0)  # type: ignore[arg-type]
            if watch < 0:  # watchdog says nothing of a directory that cannot be read
                raise PermissionError(path)
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_s: float) -> None:
        """Sleep until a file is renamed in or closed after writing."""
        if self._poll.poll(min(timeout_s, RELIST_S) * 1000):
            self._inotify.read_events()  # what they say is of no use: the listing decides

    def close(self) -> None:
        """Close the descriptors; the kernel drops the watch."""
        # Until the first read, watchdog's close() leaves the descriptors to a reader thread
        # that there is none of here.
        never_read = self._inotify._is_reading
        self._inotify.close()
        if never_read:
            self._inotify._close_resources()

    # watchdog's callback interface: it wants one, and calls the second on close.
    def on_event(self, event: object) -> None:
        """Unused."""

    def on_watch_deleted(self, wd: int) -> None:
        """Unused."""

    def on_queue_overflow(self) -> None:
        """Unused."""
