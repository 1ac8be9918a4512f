"""Who is there, what was meant, and what should not have been: the ledger's other tables.

Agents and security events. On the ledger's connection, and within its transactions.
Source: relay-file-system.txt 2.1, FORMATS 4.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from relay.base.checksums import SHA256_PREFIX
from relay.base.incidents import Incident
from relay.base.names import shown

DIRECTORY_GONE = "its directory is gone"  # the reason of an agent that is inactive for it


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
        """The agent's directory is gone; who was terminated or retired stays that."""
        self.changes += 1
        self._db.execute(
            "UPDATE agents SET status = 'inactive', reason = ?, changed_at = ? WHERE name = ? "
            "AND status IN ('active', 'inactive')",
            (DIRECTORY_GONE, now_ns, name),
        )

    def set_status(self, name: str, status: str, reason: str | None, now_ns: int) -> None:
        """How an agent stands from now on, and why; the same again changes nothing.

        Who is retired stays that when its process ends: somebody's word says more than an end.
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
        """What an agent says of itself (KIND: status): it is there. Who is away is brought back
        by having written it, or is not (``Lives.heard``)."""
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
        """(agent, what tells its inbox from any other one): that one is delivered to now."""
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
        """Register (agent, key); an empty one is none."""
        self._db.executemany(
            "INSERT INTO agents (name, registered_at, public_key) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET public_key = excluded.public_key",
            [(name, now_ns, key or None) for name, key in keys],
        )

    # -- attachments -------------------------------------------------------------------

    def refer(self, references: Iterable[tuple[str, str, int]]) -> None:
        """Keep (``sha256:…``, message id, Unix ns): that message names that attachment."""
        self._db.executemany(
            "INSERT OR IGNORE INTO attachment_refs VALUES (?, ?, ?)",
            [(one.removeprefix(SHA256_PREFIX), *rest) for one, *rest in references],
        )

    def last_references(self) -> dict[str, int]:
        """SHA-256 -> when a message last named it (Unix ns)."""
        return dict(self._db.execute("SELECT sha256, max(at) FROM attachment_refs GROUP BY 1"))

    def needs_attachment(self, digest: str, since_ns: int) -> bool:
        """True where a message named it since, or one that names it is still to be delivered or
        read."""
        found = self._db.execute(
            "SELECT 1 FROM attachment_refs AS r WHERE sha256 = ? AND (at >= ? OR EXISTS (SELECT 1 "
            "FROM deliveries AS d WHERE d.message_id = r.message_id "
            "AND d.state IN ('held', 'staged', 'written')))",
            (digest, since_ns),
        )
        return found.fetchone() is not None

    def forget_references(self, digests: Iterable[str]) -> None:
        """These attachments are gone."""
        self._db.executemany(
            "DELETE FROM attachment_refs WHERE sha256 = ?", [(one,) for one in digests]
        )

    # -- security ----------------------------------------------------------------------

    def note_incidents(
        self, incidents: Iterable[Incident], now_ns: int, *, again: bool = False
    ) -> None:
        """Keep incidents. ``again``: some may be there, from before a crash; not twice, then."""
        for one in incidents:
            if not (again and self._has_incident(one)):
                self.security_event(str(one.kind), one.agent, one.path, one.detail, now_ns)

    def _has_incident(self, one: Incident) -> bool:
        """True for one of the newest rows: a table of millions is not searched for it."""
        found = self._db.execute(
            "SELECT 1 FROM security_events WHERE id > (SELECT max(id) FROM security_events) - 1000 "
            "AND kind = ? AND agent IS ? AND path IS ? AND detail = ?",
            (str(one.kind), one.agent, one.path and shown(one.path), one.detail),
        ).fetchone()
        return found is not None

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
