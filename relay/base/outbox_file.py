"""A file in an outbox, and the facts by which it is known again."""

from __future__ import annotations

import os
from typing import NamedTuple

from relay.base.clock import NS_PER_S
from relay.base.home import PENDING
from relay.base.names import message_id_of

FileKey = tuple[str, str]  # agent, file name
OUTBOX = ("outbox",)
IN_PENDING = ("outbox", PENDING)  # where a writer left it
MOST_DRAFTED_NS = 86_400 * NS_PER_S  # between naming a file and writing it
LATEST_NS = 9 * 10**18  # the year 2255


class OutboxFile(NamedTuple):
    """One file in an outbox, and what fstat said of it."""

    agent: str
    file_name: str
    message_id: str | None  # None: the name is none of ours
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int = 0  # last changed or renamed: no writer can set it; 0: it has other names
    place: tuple[str, ...] = OUTBOX  # below the agent's directory

    @property
    def path(self) -> str:
        """Relative to the home."""
        return "/".join(("agents", self.agent, *self.place, self.file_name))

    @property
    def key(self) -> tuple[str, str]:
        """What stands for the file while it waits or is worked on."""
        return (self.agent, "/".join((*self.place[1:], self.file_name)))


def found_of(
    agent: str, name: str, status: os.stat_result, place: tuple[str, ...] = OUTBOX
) -> OutboxFile:
    """The facts of a file; its writer may have set any mtime, SQLite takes 63 bits."""
    mtime_ns = min(max(status.st_mtime_ns, 0), LATEST_NS)
    return OutboxFile(
        agent,
        name,
        message_id_of(name),
        status.st_size,
        mtime_ns,
        status.st_ino,
        0 if status.st_nlink > 1 else status.st_ctime_ns,  # each name that goes changes it for all
        place,
    )


def is_same(found: OutboxFile, status: os.stat_result) -> bool:
    """True when that file is still in its place, and unchanged."""
    now = found_of(found.agent, found.file_name, status, found.place)
    if 0 in (found.ctime_ns, now.ctime_ns):
        now = now._replace(ctime_ns=found.ctime_ns)
    return now == found


def sent_at(found: OutboxFile, discovered_at: int) -> int:
    """When a file was sent (Unix ns): the time in its name or its mtime, whichever is earlier, and
    not later than it was found.

    A name that is more than a day older than what was written is copied from an example, and says
    nothing; nor do digits that are no nanoseconds of our days.
    """
    at = min(found.mtime_ns, discovered_at)
    named = int((found.message_id or "0").partition("-")[0])
    return named if at - MOST_DRAFTED_NS <= named < at else at


def untouched_since(status: os.stat_result, now_ns: int) -> int:
    """When a file was last written or renamed (Unix ns); a time to come says nothing."""
    times = [at for at in (status.st_mtime_ns, status.st_ctime_ns) if at <= now_ns]
    return max(times, default=now_ns)
