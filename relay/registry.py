"""Who is there, what was meant, and what should not have been: the ledger's other tables.

Agents, intents of operations of several steps, security events. On the ledger's connection, and
within its transactions. Source: relay-file-system.txt 2.1 and 2.4, FORMATS 4.
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

    # -- intents -----------------------------------------------------------------------

    def roll_back_operations(self, now_ns: int) -> list[str]:
        """Close every open intent; returns what each was, for the log."""
        return [
            f"{kind} {payload}"
            for kind, payload in self._db.execute(
                "UPDATE pending_operations SET completed_at = ? WHERE completed_at IS NULL "
                "RETURNING operation_type, payload",
                (now_ns,),
            ).fetchall()
        ]

    # -- security ----------------------------------------------------------------------

    def security_event(
        self, kind: str, agent: str | None, path: str | None, detail: str, now_ns: int
    ) -> None:
        """Keep something that should not have been there."""
        self._db.execute(
            "INSERT INTO security_events (at, kind, agent, path, detail) VALUES (?, ?, ?, ?, ?)",
            (now_ns, kind, agent, path and shown(path), detail),
        )

    def forget(self, before_ns: int, limit: int) -> dict[str, int]:
        """Remove up to ``limit`` of the first rows of audit_log and of security_events that are
        older; how many by table. The caller says so in the same transaction."""
        gone = {}
        for table in ("audit_log", "security_events"):
            oldest = self._db.execute(f"SELECT id, at FROM {table} ORDER BY id LIMIT ?", (limit,))
            ids = []
            for row_id, at in oldest:
                if at >= before_ns:
                    break  # ids grow with time
                ids.append(row_id)
            gone[table] = len(ids)
            if ids:
                self._db.execute(
                    "INSERT INTO orchestrator_state VALUES ('audit_kept_from', ?, ?) "
                    "ON CONFLICT (key) DO UPDATE SET value = excluded.value "
                    "WHERE CAST(value AS INTEGER) < CAST(excluded.value AS INTEGER)",
                    (str(before_ns), before_ns),
                )
                self._db.execute(f"DELETE FROM {table} WHERE id <= ?", (ids[-1],))
        return gone
