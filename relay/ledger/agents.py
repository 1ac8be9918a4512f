"""The tables of agents and their keys, of references to attachments, and of security events.

On the ledger's connection, within its transactions. Source: relay-file-system.txt 2.1, FORMATS 4.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from relay.base.checksums import SHA256_PREFIX
from relay.base.incidents import Incident
from relay.base.names import shown

DIRECTORY_GONE = "its directory is gone"  # the reason of an agent that is inactive for it


class AgentRow(NamedTuple):
    """A row of ``agents``; times are Unix nanoseconds."""

    name: str
    status: str
    reason: str | None
    changed_at: int | None
    registered_at: int
    last_seen_at: int | None
    pid: int | None


class AgentTable:
    """Agents, attachment references and security events. Used from the loop's thread alone.

    ``changes`` counts updates that may change a status, so that caches know when to reload.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self.changes = 0

    # -- agents ------------------------------------------------------------------------

    def register(self, name: str, now_ns: int, pid: int | None = None) -> None:
        """Add an agent; reactivate one whose directory was gone, leave any other as it is."""
        self.changes += 1
        was_gone = (
            f"status = 'inactive' AND coalesce(reason, '{DIRECTORY_GONE}') = '{DIRECTORY_GONE}'"
        )
        self._db.execute(
            "INSERT INTO agents (name, registered_at, pid) VALUES (?, ?, ?) ON CONFLICT (name) "
            f"DO UPDATE SET status = CASE WHEN {was_gone} THEN 'active' ELSE status END, "
            f"changed_at = CASE WHEN {was_gone} THEN ? ELSE changed_at END, "
            f"reason = CASE WHEN {was_gone} THEN NULL ELSE reason END, "
            "pid = coalesce(excluded.pid, pid)",
            (name, now_ns, pid, now_ns),
        )

    def deactivate(self, name: str, now_ns: int | None = None) -> None:
        """Mark an agent inactive: its directory is gone. A terminated or retired one stays so."""
        self.changes += 1
        self._db.execute(
            "UPDATE agents SET status = 'inactive', reason = ?, changed_at = ? WHERE name = ? "
            "AND status IN ('active', 'inactive')",
            (DIRECTORY_GONE, now_ns, name),
        )

    def set_status(self, name: str, status: str, reason: str | None, now_ns: int) -> None:
        """Set an agent's status and its reason; nothing changes if both are the same.

        A retired agent stays retired when its process ends: it was retired on request.
        """
        self.changes += 1
        self._db.execute(
            "UPDATE agents SET status = ?, reason = ?, changed_at = ?, "
            "pid = CASE WHEN ? = 'terminated' THEN NULL ELSE pid END "
            "WHERE name = ? AND (status IS NOT ? OR reason IS NOT ?) "
            "AND NOT (status = 'retired' AND ? = 'terminated')",
            (status, reason, now_ns, status, name, status, reason, status),
        )

    def set_pid(self, name: str, pid: int | None) -> None:
        """Set the pid of the agent's running process; None: it has ended."""
        self._db.execute("UPDATE agents SET pid = ? WHERE name = ?", (pid, name))

    def rows(self) -> list[AgentRow]:
        """All agents, past ones included, by name."""
        return [
            AgentRow(*row)
            for row in self._db.execute(
                "SELECT name, status, reason, changed_at, registered_at, last_seen_at, pid "
                "FROM agents ORDER BY name"
            ).fetchall()
        ]

    def mark_seen(self, names: Iterable[str], now_ns: int) -> None:
        """Record that these agents wrote or read something."""
        self._db.executemany(
            "UPDATE agents SET last_seen_at = ? WHERE name = ?",
            [(now_ns, name) for name in names],
        )

    def set_note(self, name: str, note: str, now_ns: int) -> None:
        """Store an agent's own status message (KIND: status), and reactivate an inactive one.

        Other statuses are left to the tracker of agents' statuses, which saw the message, too.
        """
        self._db.execute(
            "UPDATE agents SET note = ?, last_seen_at = ? WHERE name = ?", (note, now_ns, name)
        )
        self.changes += 1
        self._db.execute(
            "UPDATE agents SET status = 'active', reason = NULL, changed_at = ? "
            "WHERE name = ? AND status = 'inactive'",
            (now_ns, name),
        )

    def mailboxes(self) -> dict[str, str]:
        """The identity of each agent's inbox, as last seen."""
        return dict(
            self._db.execute(
                "SELECT name, mailbox FROM agents WHERE mailbox IS NOT NULL"
            ).fetchall()
        )

    def set_mailboxes(self, mailboxes: Iterable[tuple[str, str | None]]) -> None:
        """Set (agent, identity of the inbox that it is delivered to)."""
        self._db.executemany(
            "UPDATE agents SET mailbox = ? WHERE name = ?",
            [(mailbox, name) for name, mailbox in mailboxes],
        )

    # -- keys --------------------------------------------------------------------------

    def public_keys(self) -> dict[str, str]:
        """The registered keys, 64 hex digits each, by agent."""
        return dict(
            self._db.execute("SELECT name, public_key FROM agents WHERE public_key IS NOT NULL")
        )

    def set_public_keys(self, keys: Iterable[tuple[str, str]], now_ns: int) -> None:
        """Register (agent, key); an empty key removes the registered one."""
        self._db.executemany(
            "INSERT INTO agents (name, registered_at, public_key) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET public_key = excluded.public_key",
            [(name, now_ns, key or None) for name, key in keys],
        )

    # -- attachments -------------------------------------------------------------------

    def add_references(self, references: Iterable[tuple[str, str, int]]) -> None:
        """Add (``sha256:…``, message id, Unix ns): a message refers to an attachment."""
        self._db.executemany(
            "INSERT OR IGNORE INTO attachment_refs VALUES (?, ?, ?)",
            [(one.removeprefix(SHA256_PREFIX), *rest) for one, *rest in references],
        )

    def last_references(self) -> dict[str, int]:
        """SHA-256 -> the last time a message referred to it (Unix ns)."""
        return dict(self._db.execute("SELECT sha256, max(at) FROM attachment_refs GROUP BY 1"))

    def needs_attachment(self, digest: str, since_ns: int) -> bool:
        """True if a message referred to it since then, or one that does is undelivered or
        unread."""
        found = self._db.execute(
            "SELECT 1 FROM attachment_refs AS r WHERE sha256 = ? AND (at >= ? OR EXISTS (SELECT 1 "
            "FROM deliveries AS d WHERE d.message_id = r.message_id "
            "AND d.state IN ('held', 'staged', 'written')))",
            (digest, since_ns),
        )
        return found.fetchone() is not None

    def remove_references(self, digests: Iterable[str]) -> None:
        """Remove the references to these attachments, which are gone."""
        self._db.executemany(
            "DELETE FROM attachment_refs WHERE sha256 = ?", [(one,) for one in digests]
        )

    # -- security ----------------------------------------------------------------------

    def add_incidents(
        self, incidents: Iterable[Incident], now_ns: int, *, again: bool = False
    ) -> None:
        """Add incidents. ``again``: skip those already recorded before a crash."""
        for one in incidents:
            if not (again and self._has_incident(one)):
                self.add_security_event(str(one.kind), one.agent, one.path, one.detail, now_ns)

    def _has_incident(self, one: Incident) -> bool:
        """True if it is among the newest rows: a table of millions is not searched."""
        found = self._db.execute(
            "SELECT 1 FROM security_events WHERE id > (SELECT max(id) FROM security_events) - 1000 "
            "AND kind = ? AND agent IS ? AND path IS ? AND detail = ?",
            (str(one.kind), one.agent, one.path and shown(one.path), one.detail),
        ).fetchone()
        return found is not None

    def add_security_event(
        self, kind: str, agent: str | None, path: str | None, detail: str, now_ns: int
    ) -> None:
        """Add a security event."""
        self._db.execute(
            "INSERT INTO security_events (at, kind, agent, path, detail) VALUES (?, ?, ?, ?, ?)",
            (now_ns, kind, agent, path and shown(path), detail),
        )

    def prune_log(self, before_ns: int, limit: int) -> dict[str, int]:
        """Remove up to ``limit`` of the oldest rows of audit_log and of security_events from
        before ``before_ns``; the number of rows by table."""
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
