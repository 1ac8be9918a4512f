"""Up to when there was a relay to see what happens: what came after it says nothing of agents.

A home that nobody serves any more, or a copy of one, is judged by the time of its last sign: an
agent is not silent for the months that the copy lay about.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3

from relay.audit.ledger_source import LedgerSnapshot
from relay.base import fsio
from relay.base.errors import LedgerError
from relay.base.home import LOCK

DEFAULT_RECENT_DAYS = 7.0  # a long weekend is within it, and what was mended is soon forgotten
_SIGNS = (
    "SELECT discovered_at FROM messages ORDER BY id DESC LIMIT 1",
    "SELECT at FROM audit_log ORDER BY id DESC LIMIT 1",
    "SELECT at FROM security_events ORDER BY id DESC LIMIT 1",
    "SELECT max(last_seen_at) FROM agents",
    "SELECT max(changed_at) FROM processes",
    "SELECT max(updated_at) FROM orchestrator_state",
)


def is_served(home: str) -> bool:
    """Whether a relay runs there now."""
    try:
        return fsio.lock_owner(os.path.join(home, LOCK)) is not None
    except OSError:
        return False


def watched_until(home: str, ledger: LedgerSnapshot) -> int:
    """Unix nanoseconds: the snapshot's time while a relay runs, else that of its last sign.

    Never later than the snapshot. Errors: LedgerError when the snapshot cannot be read.
    """
    if is_served(home):
        return ledger.taken_ns
    try:
        with contextlib.closing(sqlite3.connect(f"file:{ledger.path}?mode=ro", uri=True)) as db:
            rows = [db.execute(query).fetchone() for query in _SIGNS]
    except sqlite3.Error as exc:
        raise LedgerError(f"{ledger.path}: {exc}") from exc
    signs = [row[0] for row in rows if row and row[0] is not None]
    return min(max(signs, default=ledger.taken_ns), ledger.taken_ns)
