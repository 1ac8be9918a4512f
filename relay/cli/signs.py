"""Signs of trouble with an agent that show at once, before the relay changes its status.

A process that an agent registered and that has ended: the kernel knows, whatever the agent's
status. And a silence while something waits for the agent: unread, or owing an answer.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from relay.base import process_info
from relay.base.clock import NS_PER_S
from relay.base.home import Home
from relay.base.names import OPERATOR
from relay.cli.common import ago, parse_meta

SILENT_S = 60  # who reads or answers within it was busy
PRESENT = ("active", "inactive")  # of the others the reason says it
WAITING = """SELECT recipient, min(written_at) FROM deliveries WHERE state = 'written' GROUP BY 1
UNION ALL
SELECT recipient, min(written_at) FROM deliveries WHERE obligation = 'open' GROUP BY 1"""


class AgentAlert(NamedTuple):
    """The signs of one agent."""

    ended_pid: int | None = None  # of the process that it registered, and that is gone
    silent_since: int | None = None  # Unix ns: something waits for it, and it does nothing

    def text(self, now_ns: int, note: str | None = None) -> str | None:
        """In a few words for a column; None: nothing. The note of the agent itself comes last."""
        ended = f"process {self.ended_pid} has ended" if self.ended_pid is not None else ""
        silent = f"silent {ago(self.silent_since, now_ns)}" if self.silent_since else ""
        return "; ".join(filter(None, (ended, silent, note))) or None


def find_alerts(home: Home, db: sqlite3.Connection, now_ns: int) -> dict[str, AgentAlert]:
    """The signs of each agent that is there, by its name; who shows none is left out."""
    rows = db.execute("SELECT name, status, last_seen_at FROM agents").fetchall()
    waiting = _waiting(db)
    tended = _supervised(db)
    found: dict[str, AgentAlert] = {}
    for name, status, seen_at in rows:
        if status not in PRESENT:
            continue
        ended = None if name in tended else _ended_pid_of(home, name)
        silent: int | None = None
        if name in waiting and name != OPERATOR:  # a person may be away
            since = max(waiting[name], seen_at or 0)
            silent = since if now_ns - since >= SILENT_S * NS_PER_S else None
        if ended is not None or silent is not None:
            found[name] = AgentAlert(ended, silent)
    return found


def _ended_pid_of(home: Home, name: str) -> int | None:
    """The same of an agent; None as well where its meta.json cannot be read: others are told."""
    try:
        return ended_pid(home.read_meta(name))
    except OSError:
        return None


def ended_pid(meta: bytes | None) -> int | None:
    """The process that is registered in a meta.json, where that has ended."""
    known = parse_meta(meta) or {}
    pid, ticks = known.get("pid"), known.get("pid_start_ticks")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return None
    return None if process_info.runs(pid, ticks if isinstance(ticks, int) else None) else pid


def _waiting(db: sqlite3.Connection) -> dict[str, int]:
    """Since when something waits for each agent: unread, or owing an answer (Unix ns)."""
    since: dict[str, int] = {}
    for name, at in db.execute(WAITING):
        if at is not None:
            since[name] = min(at, since.get(name, at))
    return since


def _supervised(db: sqlite3.Connection) -> set[str]:
    """Whose processes the relay looks after: `relay ps` has them."""
    tended = "SELECT name FROM processes WHERE state NOT IN ('exited', 'failed', 'released')"
    return {row[0] for row in db.execute(tended)}
