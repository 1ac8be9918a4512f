"""The stream: tells an open page that something happened, so that it looks again.

The id of an event is a position: the offset of the journal that the ledger has followed, the last
rows of what the ledger alone knows, and a mark of the states that are in no database: sessions,
and whether a relay runs. A page names the position at which it was made: one that slept is told
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import zlib
from collections.abc import AsyncIterator
from typing import Protocol

from starlette.concurrency import run_in_threadpool

from relay.base.errors import LedgerError, RelayError
from relay.base.home import LEDGER, SESSIONS, Home, lock_holder
from relay.ledger.file import open_current

POLL_S = 0.25
BEAT_S = 15.0  # so that a cut connection is noticed, too
GONE = "gone"  # the home
_POSITION = """SELECT (SELECT value FROM orchestrator_state WHERE key = 'journal'),
(SELECT max(id) FROM audit_log), (SELECT max(id) FROM security_events),
(SELECT max(at) FROM rejections), (SELECT max(changed_at) FROM agents),
(SELECT max(changed_at) FROM processes)"""


def position(home: Home) -> str:
    """Where the home is now: equal as long as no page would be different."""
    row: tuple[object, ...] = (None,)
    with contextlib.suppress(LedgerError):
        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            row = tuple(db.execute(_POSITION).fetchone())
    beside = (row[1:], lock_holder(home), _changed(home.path(SESSIONS)))
    return f"{row[0] or 0}-{zlib.crc32(repr(beside).encode()):08x}"


def _changed(folder: str) -> list[int]:
    """When the files of a folder were changed, the folder itself first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        found = [os.stat(folder).st_mtime_ns]
        for file in files:
            with contextlib.suppress(OSError):
                found.append(file.stat(follow_symlinks=False).st_mtime_ns)
    return found


class Served(Protocol):
    """The home that is served, and whether it is no longer."""

    root: str
    is_over: bool


async def events(of: Served, seen: str) -> AsyncIterator[str]:
    """Yield an event when the position is another than ``seen``, and whenever it changes.

    And one now and then, without a new position: an answer becomes overdue by the clock alone.
    """
    yield ": here\n\n"  # the headers go out
    quiet_s = 0.0
    while not of.is_over:
        found = await run_in_threadpool(_position_of, of.root)
        if found != seen:
            seen, quiet_s = found, 0.0
            yield f"event: changed\nid: {found}\ndata: {found}\n\n"
        elif quiet_s >= BEAT_S:
            quiet_s = 0.0
            yield "event: time\ndata:\n\n"
        await asyncio.sleep(POLL_S)
        quiet_s += POLL_S


def _position_of(root: str) -> str:
    with contextlib.suppress(RelayError, OSError), Home(root) as home:
        return position(home)
    return GONE
