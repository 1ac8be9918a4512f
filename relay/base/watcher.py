"""Watch outboxes for new files and inboxes for removed ones.

inotify is only an aid: events may be coalesced, lost or unavailable, so periodic scans decide. An
event is a hint where to look, not a statement about a file's content.

    InotifyWatcher  one descriptor, two watches an agent: outbox (renamed in, closed after
                    writing) and inbox (moved out, deleted)
    ScanWatcher     the same interface without inotify: it requests a scan every 100 ms
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from relay.base.clock import NS_PER_MS
from relay.base.errors import RelayError
from relay.base.home import Home
from relay.base.names import is_agent_name

POLL_MS = 100  # between two looks without inotify
NO_WATCH = "set detection.watcher to scan, or raise fs.inotify.max_user_watches"


class WatcherUnavailable(RelayError):
    """The kernel gives no inotify here."""

    hint = "set detection.watcher to scan, or raise fs.inotify.max_user_instances"


class OutboxEvent(NamedTuple):
    """A file in an outbox. Renamed into place it is complete; closed after writing perhaps not."""

    agent: str
    file_name: str
    renamed: bool


class WatchEvents(NamedTuple):
    """Events since the last wait."""

    touched: tuple[OutboxEvent, ...] = ()
    left: tuple[tuple[str, str], ...] = ()  # (agent, file name) that left an inbox
    agents_changed: bool = False  # list agents/ again
    scan: bool = False  # something may have been missed: list everything
    woken: bool = False  # ``wake`` was called: background work has ended, or somebody asks


NOTHING = WatchEvents()  # the time was up


class Watcher(Protocol):
    """The loop's source of events. Used from the loop's thread, ``wake`` from any."""

    name: str
    overflows: int  # how often the kernel dropped events; a scan followed each time

    @property
    def watches_held(self) -> int:
        """Directories that the kernel watches."""

    def add_agent(self, agent: str) -> bool:
        """Watch an agent's outbox and inbox; False when it must be scanned instead."""

    def remove_agent(self, agent: str) -> None:
        """Stop watching an agent."""

    def watches(self, agent: str) -> bool:
        """True while the agent is watched; its directories may have been replaced."""

    def wait(self, timeout_ns: int) -> WatchEvents:
        """Sleep until something happens, ``wake`` is called or the time is up."""

    def wake(self) -> None:
        """End the wait now; safe from another thread and from a signal handler."""

    def close(self) -> None:
        """Give every descriptor back."""


MOST_MS = 3_600_000  # poll takes no more than 31 bits of them


class _WakePipe:
    """A pipe that ends a poll: one byte is enough, more change nothing."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is pending; or the reader is closed
            os.write(self._write_fd, b"!")

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)


class InotifyWatcher:
    """Watches through one private descriptor of watchdog, read in the loop's own thread.

    watchdog's public observers hold a rename out of a watched directory for half a second;
    its descriptor class does not.
    """

    name = "inotify"

    def __init__(self, home: Home) -> None:
        try:
            from watchdog.observers import inotify_c
        except (ImportError, OSError) as exc:
            raise WatcherUnavailable(f"inotify is missing here: {exc}") from exc
        self.overflows = 0
        self._home = home
        self._mask = mask = inotify_c.InotifyConstants
        plain_dir = mask.IN_ONLYDIR | mask.IN_DONT_FOLLOW | mask.IN_MOVE_SELF
        self._outbox_mask = mask.IN_MOVED_TO | mask.IN_CLOSE_WRITE | plain_dir
        self._inbox_mask = mask.IN_MOVED_FROM | mask.IN_DELETE | plain_dir
        try:
            self._inotify = inotify_c.InotifyFD()
        except OSError as exc:
            raise WatcherUnavailable(f"inotify gives no descriptor: {exc}") from exc
        self._fd: int = self._inotify._inotify_fd
        os.set_inheritable(self._fd, False)
        self._bell = _WakePipe()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(self._bell.fd, select.POLLIN)
        self._watches: dict[int, tuple[str, bool]] = {}  # descriptor -> (agent, is it the outbox)
        self._by_agent: dict[str, list[int]] = {}
        names = mask.IN_CREATE | mask.IN_MOVED_TO | mask.IN_DELETE | mask.IN_MOVED_FROM
        self._agents_wd = self._add("agents", mask=names | plain_dir)
        if self._agents_wd < 0:
            self.close()
            raise WatcherUnavailable(f"{home.path('agents')} cannot be watched", hint=NO_WATCH)

    @property
    def watches_held(self) -> int:
        """The number of watched directories: two for each agent, and agents/."""
        return len(self._watches) + (self._agents_wd >= 0)

    def add_agent(self, agent: str) -> bool:
        """Watch an agent's outbox and inbox; False when inotify's limit is reached."""
        self.remove_agent(agent)
        for part, mask in (("outbox", self._outbox_mask), ("inbox", self._inbox_mask)):
            wd = self._add("agents", agent, part, mask=mask)
            if wd < 0:
                self.remove_agent(agent)
                return False
            self._watches[wd] = (agent, part == "outbox")
            self._by_agent.setdefault(agent, []).append(wd)
        return True

    def remove_agent(self, agent: str) -> None:
        """Stop watching an agent; one that is not watched is fine."""
        for wd in self._by_agent.pop(agent, ()):
            self._watches.pop(wd, None)
            with contextlib.suppress(OSError):
                self._inotify.remove_callbacks([(wd, 0)])  # type: ignore[list-item]

    def watches(self, agent: str) -> bool:
        """True while both directories are watched."""
        return len(self._by_agent.get(agent, ())) == 2

    def wait(self, timeout_ns: int) -> WatchEvents:
        """All events since the last wait; one read is one batch."""
        ready = [fd for fd, _ in self._poll.poll(min(max(0, -(-timeout_ns // NS_PER_MS)), MOST_MS))]
        if not ready:
            return NOTHING
        woken = self._bell.fd in ready
        if woken:
            self._bell.silence()
        events = self._inotify.read_events() if self._fd in ready else ()
        return self._sort(events, woken=woken)

    def wake(self) -> None:
        """End the wait now."""
        self._bell.ring()

    def close(self) -> None:
        """Close the descriptors; the kernel drops the watches."""
        self._inotify._is_reading = False  # or a descriptor never read would stay open
        self._inotify.close()
        self._bell.close()

    def _add(self, *parts: str, mask: int) -> int:
        """A watch descriptor, or -1 when the limit is reached or the directory is gone."""
        path = os.fsencode(self._home.path(*parts))
        try:
            # The id only has to be unique within one watch; there is one callback a watch.
            return int(self._inotify.add_callback(path, mask, self, 0))  # type: ignore[arg-type]
        except OSError:
            return -1

    def _sort(self, events: Sequence[object], *, woken: bool = False) -> WatchEvents:
        """Kernel events into hints."""
        touched: list[OutboxEvent] = []
        left: list[tuple[str, str]] = []
        agents_changed = scan = False
        for event in events:
            wd, mask = event.wd, event.mask  # type: ignore[attr-defined]
            if mask & self._mask.IN_Q_OVERFLOW:
                scan = True
                self.overflows += 1
            elif mask & self._mask.IN_MOVE_SELF:
                agents_changed |= self._forget(wd)
            elif mask & self._mask.IN_IGNORED:
                agents_changed |= self._forget(wd)
                self._inotify.handle_event(event)  # type: ignore[arg-type]
            elif wd == self._agents_wd:
                agents_changed |= is_agent_name(os.fsdecode(event.name))  # type: ignore[attr-defined]
            elif wd in self._watches:
                agent, is_outbox = self._watches[wd]
                file_name = os.fsdecode(event.name)  # type: ignore[attr-defined]
                if is_outbox:
                    renamed = bool(mask & self._mask.IN_MOVED_TO)
                    touched.append(OutboxEvent(agent, file_name, renamed))
                else:
                    left.append((agent, file_name))
        return WatchEvents(tuple(touched), tuple(left), agents_changed or scan, scan, woken)

    def _forget(self, wd: int) -> bool:
        """Handle a watched directory that was removed or moved; True if it was watched here."""
        if wd == self._agents_wd:  # the caller starts again with a full scan
            raise FileNotFoundError(
                2, "agents/ was moved away or removed", self._home.path("agents")
            )
        agent, _ = self._watches.pop(wd, ("", False))
        if agent:
            self.remove_agent(agent)
        return bool(agent)

    # watchdog's callback interface; events are sorted from read_events instead.
    def on_event(self, event: object) -> None:
        """Unused; required by watchdog."""

    def on_watch_deleted(self, wd: int) -> None:
        """Unused: ``_forget`` has done it."""

    def on_queue_overflow(self) -> None:
        """Unused: ``wait`` reports it as ``scan``."""


class ScanWatcher:
    """The watcher for systems without inotify: every wait ends with a request to scan."""

    name = "scan"
    overflows = 0
    watches_held = 0

    def __init__(self, why: str = "") -> None:
        self.why = why  # why inotify is not used; empty if it was configured so
        self._bell = _WakePipe()
        self._poll = select.poll()  # select takes no descriptor above 1,023
        self._poll.register(self._bell.fd, select.POLLIN)

    def add_agent(self, agent: str) -> bool:
        """Nothing to watch: every agent is scanned."""
        return True

    def remove_agent(self, agent: str) -> None:
        """Nothing to forget."""

    def watches(self, agent: str) -> bool:
        """Every agent is scanned anyway."""
        return True

    def wait(self, timeout_ns: int) -> WatchEvents:
        """Sleep for the interval at most, then request a scan."""
        timeout_ms = min(POLL_MS, max(0, -(-timeout_ns // NS_PER_MS)))
        if self._poll.poll(timeout_ms):
            self._bell.silence()
        return WatchEvents(agents_changed=True, scan=True)

    def wake(self) -> None:
        """End the wait now."""
        self._bell.ring()

    def close(self) -> None:
        """Close the pipe."""
        self._bell.close()


def make_watcher(home: Home, wanted: str) -> Watcher:
    """The configured watcher; ``auto`` falls back to scanning.

    Errors: WatcherUnavailable when ``inotify`` is configured and not available.
    """
    if wanted == "scan" or (wanted == "auto" and not sys.platform.startswith("linux")):
        return ScanWatcher()
    try:
        return InotifyWatcher(home)
    except WatcherUnavailable as exc:
        if wanted == "inotify":
            raise
        return ScanWatcher(f"{exc}; {exc.hint}")
