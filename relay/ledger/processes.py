"""The ledger's table of processes, and the pending operations on them.

On the ledger's connection, within its transactions: an operation is added with the message that
requests it, and completed with the answer to that message. States: docs/states.md, "A process the
relay started".
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

STARTING = "starting"  # has a pid and was not seen yet, or waits for a restart
READY = "ready"  # it wrote or read for the first time
WORKING = "working"  # it owes a read or an answer, or wrote, read or used CPU lately
IDLE = "idle"  # no activity for a while
STUCK = "stuck"  # it has owed a read or an answer for too long
EXITED = "exited"  # ended, and not to be restarted
FAILED = "failed"  # could not be started, or was given up
RELEASED = "released"  # ended on request
ENDS = (EXITED, FAILED, RELEASED)


class PendingOperation(msgspec.Struct, frozen=True):
    """A request to start or end a process, in ``pending_operations`` until it is done.

    Holds no secrets.
    """

    operation: str  # spawn or release
    request_id: str  # message id of the request
    requested_by: str
    asked_at: int  # when the message was discovered; ids of answers are derived from it
    name: str  # the agent
    reason: str = ""  # of a release


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
    """Both tables. Used from the loop's thread alone, on the ledger's connection."""

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

    def add_operations(self, operations: Iterable[PendingOperation], now_ns: int) -> None:
        """Add operations, open until ``close_operations``."""
        self._db.executemany(
            "INSERT INTO pending_operations (operation_type, payload, created_at) VALUES (?, ?, ?)",
            [(one.operation, msgspec.json.encode(one).decode(), now_ns) for one in operations],
        )

    def open_operations(self) -> dict[int, PendingOperation]:
        """Open operations by id, oldest first; invalid payloads are left to recovery."""
        found: dict[int, PendingOperation] = {}
        for number, payload in self._db.execute(
            "SELECT id, payload FROM pending_operations WHERE completed_at IS NULL "
            "AND operation_type IN ('spawn', 'release') ORDER BY id"
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
        known = self.open_operations()
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
        found: dict[str, int] = {}
        for name in names:
            row = self._db.execute(
                "SELECT last_seen_at FROM agents WHERE name = ?", (name,)
            ).fetchone()
            if row and row[0] is not None:
                found[name] = row[0]
        return found

    def unread_since(self, names: Iterable[str]) -> dict[str, int]:
        """The time of the oldest unread delivery in each inbox that has one."""
        found: dict[str, int] = {}
        for name in names:
            row = self._db.execute(
                "SELECT min(written_at) FROM deliveries WHERE recipient = ? AND state = 'written'",
                (name,),
            ).fetchone()
            if row[0] is not None:
                found[name] = row[0]
        return found
