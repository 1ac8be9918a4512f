"""Who is there, what was meant, and what should not have been: the ledger's other tables.

Agents and security events. On the ledger's connection, and within its transactions.
Source: relay-file-system.txt 2.1, FORMATS 4.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from relay.names import shown


class Registry:
    """The ledger's tables beside messages and deliveries. Used from the loop's thread alone."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    # -- agents ------------------------------------------------------------------------

    def register(self, name: str, now_ns: int, pid: int | None = None) -> None:
        """Add an agent, or make a known one active again."""
        self._db.execute(
            "INSERT INTO agents (name, registered_at, pid) VALUES (?, ?, ?) ON CONFLICT (name) "
            "DO UPDATE SET status = 'active', pid = coalesce(excluded.pid, pid)",
            (name, now_ns, pid),
        )

    def deactivate(self, name: str) -> None:
        """The agent's directory is gone."""
        self._db.execute("UPDATE agents SET status = 'inactive' WHERE name = ?", (name,))

    def set_status(self, name: str, status: str, reason: str, now_ns: int) -> None:
        """An agent's status from now on, and why; one that is not known is left alone."""
        self._db.execute(
            "UPDATE agents SET status = ?, reason = ?, changed_at = ? WHERE name = ?",
            (status, reason or None, now_ns, name),
        )

    def seen(self, names: Iterable[str], now_ns: int) -> None:
        """These agents wrote or read something."""
        self._db.executemany(
            f"UPDATE agents SET last_seen_at = {now_ns:d} WHERE name = ?",
            [(name,) for name in names],
        )

    def note_status(self, name: str, note: str, now_ns: int) -> None:
        """What an agent says of itself (KIND: status)."""
        self._db.execute(
            "UPDATE agents SET note = ?, last_seen_at = ?, status = 'active' WHERE name = ?",
            (note, now_ns, name),
        )

    # -- security ----------------------------------------------------------------------

    def security_event(
        self, kind: str, agent: str | None, path: str | None, detail: str, now_ns: int
    ) -> None:
        """Keep something that should not have been there."""
        self._db.execute(
            "INSERT INTO security_events (at, kind, agent, path, detail) VALUES (?, ?, ?, ?, ?)",
            (now_ns, kind, agent, path and shown(path), detail),
        )
