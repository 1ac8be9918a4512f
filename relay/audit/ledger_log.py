"""Whether the ledger's own log is whole: audit_log and security_events, and what keeps them so.

Both are append-only, by triggers. Retention takes the first rows alone, so that the ids of what is
left follow one another; what was rolled back leaves no gap. Who takes a row out of the middle has
removed a trigger for it.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3

from relay.base.errors import LedgerError
from relay.ledger import schema_sql

LOGS = ("audit_log", "security_events")
_TRIGGER = re.compile(r"^CREATE TRIGGER (\w+)", re.MULTILINE)


def problems_of(snapshot: str) -> list[str]:
    """What is wrong with the log in a snapshot of a ledger, a line each; nothing changes it.

    Rows that are missing at the end cannot be told. Errors: LedgerError when it cannot be read.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{snapshot}?mode=ro", uri=True)) as db:
            gaps = [_gap_in(db, table) for table in LOGS]
            rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            there = {name for (name,) in rows}
    except sqlite3.Error as exc:
        raise LedgerError(f"{snapshot}: {exc}") from exc
    gone = [name for name in _TRIGGER.findall(schema_sql()) if name not in there]
    return [gap for gap in gaps if gap] + [f"its trigger {name} is gone" for name in gone]


def _gap_in(db: sqlite3.Connection, table: str) -> str:
    count, first, last = db.execute(f"SELECT count(*), min(id), max(id) FROM {table}").fetchone()
    lacking = last - first + 1 - count if count else 0
    return f"{table} lacks {lacking} of its rows {first} to {last}" if lacking else ""
