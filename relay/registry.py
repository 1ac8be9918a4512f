"""Who is there, what was meant, and what should not have been: the ledger's other tables.

Agents, intents of operations of several steps, security events. On the ledger's connection, and
within its transactions. Source: relay-file-system.txt 2.1 and 2.4, FORMATS 4.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from relay.names import shown
from relay.standing import GONE


class Standing(NamedTuple):
    """What the ledger knows of an agent; times are Unix nanoseconds."""

    name: str
    status: str
    reason: str | None
    changed_at: int | None
    registered_at: int
    last_seen_at: int | None
    pid: int | None


class Registry:
    """The ledger's tables beside messages and deliveries. Used from the loop's thread alone.

    ``changes`` counts what may have changed a status: who keeps one in memory asks again then.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self.changes = 0

    # -- agents ------------------------------------------------------------------------

    def register(self, name: str, now_ns: int, pid: int | None = None) -> None:
        """Add an agent; one whose directory was gone is active again, any other stays as it is."""
        self.changes += 1
        was_gone = f"status = 'inactive' AND coalesce(reason, '{GONE}') = '{GONE}'"
        self._db.execute(
            "INSERT INTO agents (name, registered_at, pid) VALUES (?, ?, ?) ON CONFLICT (name) "
            f"DO UPDATE SET status = CASE WHEN {was_gone} THEN 'active' ELSE status END, "
            f"changed_at = CASE WHEN {was_gone} THEN ? ELSE changed_at END, "
            f"reason = CASE WHEN {was_gone} THEN NULL ELSE reason END, "
            "pid = coalesce(excluded.pid, pid)",
            (name, now_ns, pid, now_ns),
        )

    def deactivate(self, name: str, now_ns: int | None = None) -> None:
        """The agent's directory is gone; who was terminated or retired stays that."""
        self.changes += 1
        self._db.execute(
            "UPDATE agents SET status = 'inactive', reason = ?, changed_at = ? WHERE name = ? "
            "AND status IN ('active', 'inactive')",
            (GONE, now_ns, name),
        )

    def set_status(self, name: str, status: str, reason: str | None, now_ns: int) -> None:
        """How an agent stands from now on, and why; the same again changes nothing."""
        self.changes += 1
        self._db.execute(
            "UPDATE agents SET status = ?, reason = ?, changed_at = ?, "
            "pid = CASE WHEN ? = 'terminated' THEN NULL ELSE pid END "
            "WHERE name = ? AND (status IS NOT ? OR reason IS NOT ?)",
            (status, reason, now_ns, status, name, status, reason),
        )

    def set_pid(self, name: str, pid: int | None) -> None:
        """The process of this agent that was seen to run; None: it has left."""
        self._db.execute("UPDATE agents SET pid = ? WHERE name = ?", (pid, name))

    def standings(self) -> list[Standing]:
        """Every agent that ever was, by name."""
        return [
            Standing(*row)
            for row in self._db.execute(
                "SELECT name, status, reason, changed_at, registered_at, last_seen_at, pid "
                "FROM agents ORDER BY name"
            ).fetchall()
        ]

    def seen(self, names: Iterable[str], now_ns: int) -> None:
        """These agents wrote or read something."""
        self._db.executemany(
            f"UPDATE agents SET last_seen_at = {now_ns:d} WHERE name = ?",
            [(name,) for name in names],
        )

    def note_status(self, name: str, note: str, now_ns: int) -> None:
        """What an agent says of itself (KIND: status): it is there, and active."""
        self._db.execute(
            "UPDATE agents SET note = ?, last_seen_at = ? WHERE name = ?", (note, now_ns, name)
        )
        self.set_status(name, "active", None, now_ns)

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
