"""Files left in ``outbox/.pending``: written, and never renamed into the outbox.

    untouched for ``pending_warn_s``   a warning in the log, once a file
    untouched for ``orphan_after_s``   a ``*.msg`` is refused like a file of the outbox: a nack, and
                                       the file in ``rejected/``; any other name is removed

Untouched: neither written nor renamed. A message is never destroyed here: its writer may only have
been interrupted. Source: relay-file-system.txt 6.1.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Container, Iterator

from relay.base import fsio
from relay.base.clock import NS_PER_S, Clock, iso_date
from relay.base.config import DetectionSettings
from relay.base.errors import UnsafePath
from relay.base.home import PENDING, REJECTED, Dirs
from relay.base.names import MSG_SUFFIX
from relay.base.outbox_file import IN_PENDING, FileKey, OutboxFile, found_of, untouched_since

MOST_AT_ONCE = 1_000  # of an agent, between two scans: the next one lists the rest


class PendingFiles:
    """The files that lie in ``.pending`` for long. Owned by the loop."""

    def __init__(
        self, detection: DetectionSettings, clock: Clock, log: Callable[..., object]
    ) -> None:
        self._warn_ns = detection.pending_warn_s * NS_PER_S
        self._over_ns = detection.orphan_after_s * NS_PER_S
        self._clock = clock
        self._log = log
        self._warned: dict[str, set[tuple[str, int]]] = {}  # by agent: name and inode
        self._over: dict[FileKey, None] = {}  # agent and name, oldest look first

    @property
    def is_busy(self) -> bool:
        """True while messages wait to be refused."""
        return bool(self._over)

    def scan(self, dirs: Dirs, agent: str) -> None:
        """List an agent's ``.pending``. Errors: OSError, UnsafePath."""
        pending = dirs.ensure("agents", agent, *IN_PENDING)
        now = self._clock.now_ns()
        warned = self._warned.pop(agent, set())
        still: set[tuple[str, int]] = set()
        found = 0
        for name, status in _files(pending):
            age_ns = now - untouched_since(status, now)
            if age_ns > self._over_ns and not name.endswith(MSG_SUFFIX):
                self._remove(agent, name, pending)
                continue
            if age_ns > self._over_ns and found < MOST_AT_ONCE:
                self._over[agent, name] = None
                found += 1
            elif age_ns > self._warn_ns:
                still.add(one := (name, status.st_ino))
                if one not in warned:
                    self._warn(agent, name, age_ns)
        if still:
            self._warned[agent] = still

    def pop_overdue(
        self, dirs: Dirs, limit: int, max_bytes: int, in_hand: Container[FileKey]
    ) -> Iterator[tuple[OutboxFile, bytes]]:
        """Up to ``limit`` messages whose time is over, and what is in them (``max_bytes`` at most).

        Each is looked at once more: its writer may have gone on with it.
        """
        for agent, name in list(self._over)[:limit]:
            del self._over[agent, name]
            if (agent, f"{PENDING}/{name}") in in_hand:
                continue
            with contextlib.suppress(OSError, UnsafePath):  # the next scan tries again
                pending = dirs.get("agents", agent, *IN_PENDING)
                status = os.stat(name, dir_fd=pending, follow_symlinks=False)
                now = self._clock.now_ns()
                if now - untouched_since(status, now) <= self._over_ns:
                    continue
                data = b""
                with contextlib.suppress(UnsafePath):  # a link: kept as it is, and not read
                    data, status = fsio.read_regular(name, pending, max_bytes)
                yield found_of(agent, name, status, IN_PENDING), data

    def reason(self, agent: str) -> str:
        """The nack for such a file."""
        kept = f"archive/{iso_date(self._clock.now_ns())}/{agent}/{REJECTED}/"
        return (
            f"found in .pending, untouched for {_span(self._over_ns // NS_PER_S)}: a message is "
            f"sent by renaming it into the outbox; it is kept in {kept}, move it from there into "
            "the outbox to send it"
        )

    def _warn(self, agent: str, name: str, age_ns: int) -> None:
        self._log(
            f"A file lies in .pending of {agent} for {age_ns // NS_PER_S} s: it is sent when it is "
            "renamed into the outbox",
            action="left_in_pending",
            level="warning",
            agent=agent,
            file=name,
        )

    def _remove(self, agent: str, name: str, pending: int) -> None:
        fsio.remove(name, pending)
        self._log(
            "Removed a temporary file that its writer left in .pending",
            action="remove_orphan",
            level="warning",
            agent=agent,
            file=name,
        )


def _files(pending: int) -> Iterator[tuple[str, os.stat_result]]:
    """The names in ``.pending`` that are no directories, and what stat says of each."""
    with os.scandir(pending) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # its writer has renamed it
            if not stat.S_ISDIR(status.st_mode):
                yield entry.name, status


def _span(seconds: int) -> str:
    """A span of time in words."""
    if seconds == 3600:
        return "an hour"
    return f"{seconds // 60} minutes" if seconds >= 120 else f"{seconds} s"
