"""The tables of agents and their keys, of the processes started for them, of references to
attachments, and of security events.

On the ledger's connection, within its transactions: an operation on a process is added with the
message that requests it, and completed with the answer to that message. See
docs/formats/ledger.md and docs/states.md, "A process the relay started".
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from relay.base.incidents import Incident
from relay.base.names import SHA256_PREFIX, shown

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

    def deactivate(self, name: str, now_ns: int) -> None:
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
                f"SELECT {', '.join(AgentRow._fields)} FROM agents ORDER BY name"
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
            [(reference.removeprefix(SHA256_PREFIX), *rest) for reference, *rest in references],
        )

    def references(self, after: str, limit: int) -> dict[str, int]:
        """SHA-256 -> the last time a message referred to it (Unix ns): a slice, in their order."""
        found = self._db.execute(
            "SELECT sha256, max(at) FROM attachment_refs WHERE sha256 > ? GROUP BY 1 ORDER BY 1 "
            "LIMIT ?",
            (after, limit),
        )
        return dict(found.fetchall())

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
        """Remove the references to these deleted attachments."""
        self._db.executemany(
            "DELETE FROM attachment_refs WHERE sha256 = ?", [(digest,) for digest in digests]
        )

    # -- security ----------------------------------------------------------------------

    def add_incidents(
        self, incidents: Iterable[Incident], now_ns: int, *, again: bool = False
    ) -> None:
        """Add incidents. ``again``: skip those already recorded before a crash."""
        for incident in incidents:
            if not (again and self._has_incident(incident)):
                self.add_security_event(
                    str(incident.kind), incident.agent, incident.path, incident.detail, now_ns
                )

    def _has_incident(self, incident: Incident) -> bool:
        """True if it is among the newest rows: a table of millions is not searched."""
        found = self._db.execute(
            "SELECT 1 FROM security_events WHERE id > (SELECT max(id) FROM security_events) - 1000 "
            "AND kind = ? AND agent IS ? AND path IS ? AND detail = ?",
            (
                str(incident.kind),
                incident.agent,
                incident.path and shown(incident.path),
                incident.detail,
            ),
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

    def prune_log(self, before_ns: int, now_ns: int, limit: int) -> dict[str, int]:
        """Remove up to ``limit`` of the oldest rows of audit_log and of security_events from
        before ``before_ns``; the number of rows by table."""
        removed = {}
        for table in ("audit_log", "security_events"):
            # Rows later than now are of a clock that was ahead: they hold up no others.
            oldest = self._db.execute(
                f"SELECT id, at FROM {table} WHERE at <= ? ORDER BY id LIMIT ?", (now_ns, limit)
            )
            ids = []
            for row_id, at in oldest:
                if at >= before_ns:
                    break  # ids grow with time
                ids.append(row_id)
            removed[table] = len(ids)
            if ids:
                self._db.execute(
                    "INSERT INTO orchestrator_state VALUES ('audit_kept_from', ?, ?) "
                    "ON CONFLICT (key) DO UPDATE SET value = excluded.value "
                    "WHERE CAST(value AS INTEGER) < CAST(excluded.value AS INTEGER)",
                    (str(before_ns), before_ns),
                )
                gone = (ids[-1], before_ns)
                self._db.execute(f"DELETE FROM {table} WHERE id <= ? AND at < ?", gone)
        return removed


# States of a process
STARTING = "starting"  # has a pid and was not seen yet, or waits for a restart
READY = "ready"  # it wrote or read for the first time
WORKING = "working"  # it owes a read or an answer, or wrote, read or used CPU lately
IDLE = "idle"  # no activity for a while
STUCK = "stuck"  # it has owed a read or an answer for too long
EXITED = "exited"  # ended, and not to be restarted
FAILED = "failed"  # could not be started, or was given up
RELEASED = "released"  # ended on request
ENDS = (EXITED, FAILED, RELEASED)


PROCESS_OPERATIONS = ("spawn", "release")
NOTIFY_IDLE = "notify_idle"


class PendingOperation(msgspec.Struct, frozen=True):
    """A request that is answered later, in ``pending_operations`` until it is.

    To start or end a process, or to be told when an agent is idle. Holds no secrets.
    """

    operation: str  # spawn, release or notify_idle
    request_id: str  # message id of the request
    requested_by: str
    asked_at: int  # when the message was discovered; ids of answers are derived from it
    name: str  # the agent
    reason: str = ""  # of a release
    message_id: str = ""  # of notify_idle: the message that the agent is to have; empty: none
    until: int = 0  # and when it is given up (Unix ns)


class ProcessRow(NamedTuple):
    """A row of ``processes``, in its order."""

    name: str
    state: str
    pid: int | None
    pid_start: str | None
    cli: str
    cwd: str
    restart: str
    requested_by: str
    request_id: str
    restarts: int
    restarted_at: str  # JSON: Unix ns of the restarts in the window of the last one
    started_at: int | None
    changed_at: int
    ended_at: int | None = None
    exit_code: int | None = None
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    idle_s: int | None = None
    last_error: str | None = None

    def moved(self, state: str, now_ns: int, **facts: object) -> ProcessRow:
        """The row in another state from now on."""
        return self._replace(state=state, changed_at=now_ns, **facts)  # type: ignore[arg-type]

    def ended(self, at: int, code: int | None) -> ProcessRow:
        """The row of a process that has just ended, without pid and usage."""
        row = self._replace(pid=None, pid_start=None, ended_at=at, exit_code=code)
        return row._replace(cpu_percent=None, rss_bytes=None, idle_s=None)

    @property
    def recent_restarts(self) -> tuple[int, ...]:
        """Times of the restarts in the window of the last one."""
        return msgspec.json.decode(self.restarted_at, type=tuple[int, ...])


_COLUMNS = ", ".join(ProcessRow._fields)
_PLACES = ", ".join("?" * len(ProcessRow._fields))
_SET = ", ".join(f"{name} = excluded.{name}" for name in ProcessRow._fields[1:])


class ProcessTable:
    """Processes and pending operations on them. Used from the loop's thread alone."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def put(self, rows: Iterable[ProcessRow]) -> None:
        """Insert or replace rows."""
        self._db.executemany(
            f"INSERT INTO processes ({_COLUMNS}) VALUES ({_PLACES}) "
            f"ON CONFLICT (name) DO UPDATE SET {_SET}",
            rows,
        )

    def rows(self) -> dict[str, ProcessRow]:
        """All processes, past ones included, by name."""
        found = self._db.execute(f"SELECT {_COLUMNS} FROM processes ORDER BY name")
        return {row[0]: ProcessRow(*row) for row in found.fetchall()}

    def supervised(self) -> set[str]:
        """Names of the agents whose process runs, or is to be restarted."""
        ends = ", ".join(f"'{state}'" for state in ENDS)
        found = self._db.execute(f"SELECT name FROM processes WHERE state NOT IN ({ends})")
        return {row[0] for row in found.fetchall()}

    def ended_at(self, name: str) -> int | None:
        """The time the last process of that name ended; None if none did, or one runs."""
        row = self._db.execute("SELECT ended_at FROM processes WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def add_operation(self, operation: PendingOperation, now_ns: int) -> None:
        """Add an operation, open until ``close_operations``."""
        self._db.execute(
            "INSERT INTO pending_operations (operation_type, payload, created_at) VALUES (?, ?, ?)",
            (operation.operation, msgspec.json.encode(operation).decode(), now_ns),
        )

    def open_operations(self, *kinds: str) -> dict[int, PendingOperation]:
        """Open operations of these kinds, by default on processes, by id, oldest first.

        Invalid payloads are left to recovery.
        """
        wanted = ", ".join(f"'{kind}'" for kind in kinds or PROCESS_OPERATIONS)
        found: dict[int, PendingOperation] = {}
        for number, payload in self._db.execute(
            "SELECT id, payload FROM pending_operations WHERE completed_at IS NULL "
            f"AND operation_type IN ({wanted}) ORDER BY id"
        ).fetchall():
            try:
                found[number] = msgspec.json.decode(payload, type=PendingOperation)
            except msgspec.MsgspecError:
                continue
        return found

    def close_operations(self, numbers: Iterable[int], now_ns: int) -> None:
        """Mark operations as completed."""
        self._db.executemany(
            "UPDATE pending_operations SET completed_at = ? WHERE id = ? AND completed_at IS NULL",
            [(now_ns, number) for number in numbers],
        )

    def roll_back(self, now_ns: int) -> list[str]:
        """Close every open operation that is not valid; a text about each, for the log."""
        known = self.open_operations(*PROCESS_OPERATIONS, NOTIFY_IDLE)
        closed = []
        for number, kind, payload in self._db.execute(
            "SELECT id, operation_type, payload FROM pending_operations WHERE completed_at IS NULL"
        ).fetchall():
            if number not in known:
                self.close_operations([number], now_ns)
                closed.append(f"{kind} {payload}")
        return closed

    def last_seen(self, names: Iterable[str]) -> dict[str, int]:
        """The time each of these agents last wrote or read; those that never did are left out."""
        return self._times("SELECT last_seen_at FROM agents WHERE name = value", names)

    def unread_since(self, names: Iterable[str]) -> dict[str, int]:
        """The time of the oldest unread delivery in each inbox that has one."""
        return self._times(
            "SELECT min(written_at) FROM deliveries WHERE recipient = value AND state = 'written'",
            names,
        )

    def _times(self, time_of: str, names: Iterable[str]) -> dict[str, int]:
        """The results of a query for each of the names, where there are any."""
        found = self._db.execute(
            f"SELECT value, ({time_of}) AS at FROM json_each(?) WHERE at IS NOT NULL",
            (json.dumps(list(names)),),
        )
        return dict(found.fetchall())
