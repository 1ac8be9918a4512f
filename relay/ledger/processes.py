"""The ledger's table of processes, and the intents of what is to be done with them.

On the ledger's connection, and within its transactions: an intent is noted with the message that
asks for it, and closed with the answer to it. States: docs/states.md, "A process the relay
started".
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

STARTING = "starting"  # a pid, and nothing heard of it; or it waits to be started again
READY = "ready"  # it wrote or read for the first time
WORKING = "working"  # it owes something, or wrote, read or used CPU lately
IDLE = "idle"  # nothing for a while
STUCK = "stuck"  # it owes a read or an answer for too long
EXITED = "exited"  # ended, and not to be started again
FAILED = "failed"  # could not be started, or was given up
RELEASED = "released"  # ended because somebody asked for it
ENDS = (EXITED, FAILED, RELEASED)


class Intent(msgspec.Struct, frozen=True):
    """What was asked, as ``pending_operations`` keeps it until it is done; no secrets."""

    operation: str  # spawn or release
    request_id: str  # the message
    requested_by: str
    asked_at: int  # when the message was discovered: what ids of answers are derived from
    name: str  # the agent
    reason: str = ""  # of a release


class Process(NamedTuple):
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

    def moved(self, state: str, now_ns: int, **facts: object) -> Process:
        """The row in another state from now on."""
        return self._replace(state=state, changed_at=now_ns, **facts)  # type: ignore[arg-type]

    def ended(self, at: int, code: int | None) -> Process:
        """The row of a process that has just ended: nothing runs, and nothing is used."""
        row = self._replace(pid=None, pid_start=None, ended_at=at, exit_code=code)
        return row._replace(cpu_percent=None, rss_bytes=None, idle_s=None)

    @property
    def recent_restarts(self) -> tuple[int, ...]:
        """When it was started again, in the window of the last time."""
        return msgspec.json.decode(self.restarted_at, type=tuple[int, ...])


_COLUMNS = ", ".join(Process._fields)
_PLACES = ", ".join("?" * len(Process._fields))
_SET = ", ".join(f"{name} = excluded.{name}" for name in Process._fields[1:])


class Processes:
    """The two tables. Used from the loop's thread alone, on the ledger's connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def put(self, rows: Iterable[Process]) -> None:
        """What is so now, in the place of what was."""
        self._db.executemany(
            f"INSERT INTO processes ({_COLUMNS}) VALUES ({_PLACES}) "
            f"ON CONFLICT (name) DO UPDATE SET {_SET}",
            rows,
        )

    def rows(self) -> dict[str, Process]:
        """Every process there is or was, by name."""
        found = self._db.execute(f"SELECT {_COLUMNS} FROM processes ORDER BY name")
        return {row[0]: Process(*row) for row in found.fetchall()}

    def tended(self) -> set[str]:
        """Whose processes run, or are to be started again."""
        ends = ", ".join(f"'{state}'" for state in ENDS)
        found = self._db.execute(f"SELECT name FROM processes WHERE state NOT IN ({ends})")
        return {row[0] for row in found.fetchall()}

    def ended_at(self, name: str) -> int | None:
        """When the last process of that name ended; None where none did, or one runs."""
        row = self._db.execute("SELECT ended_at FROM processes WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def intend(self, intents: Iterable[Intent], now_ns: int) -> None:
        """Note what is to be done, until it is closed."""
        self._db.executemany(
            "INSERT INTO pending_operations (operation_type, payload, created_at) VALUES (?, ?, ?)",
            [(one.operation, msgspec.json.encode(one).decode(), now_ns) for one in intents],
        )

    def intents(self) -> dict[int, Intent]:
        """What is still to be done, oldest first; a payload that is none is left to recovery."""
        found: dict[int, Intent] = {}
        for number, payload in self._db.execute(
            "SELECT id, payload FROM pending_operations WHERE completed_at IS NULL "
            "AND operation_type IN ('spawn', 'release') ORDER BY id"
        ).fetchall():
            try:
                found[number] = msgspec.json.decode(payload, type=Intent)
            except msgspec.MsgspecError:
                continue
        return found

    def close(self, numbers: Iterable[int], now_ns: int) -> None:
        """These intents are done with."""
        self._db.executemany(
            f"UPDATE pending_operations SET completed_at = {now_ns:d} "
            "WHERE id = ? AND completed_at IS NULL",
            [(number,) for number in numbers],
        )

    def roll_back(self, now_ns: int) -> list[str]:
        """Close every open intent that nobody can carry out; what each was, for the log."""
        known = self.intents()
        closed = []
        for number, kind, payload in self._db.execute(
            "SELECT id, operation_type, payload FROM pending_operations WHERE completed_at IS NULL"
        ).fetchall():
            if number not in known:
                self.close([number], now_ns)
                closed.append(f"{kind} {payload}")
        return closed

    def last_seen(self, names: Iterable[str]) -> dict[str, int]:
        """When these agents last wrote or read; those that never did are left out."""
        found: dict[str, int] = {}
        for name in names:
            row = self._db.execute(
                "SELECT last_seen_at FROM agents WHERE name = ?", (name,)
            ).fetchone()
            if row and row[0] is not None:
                found[name] = row[0]
        return found

    def unread_since(self, names: Iterable[str]) -> dict[str, int]:
        """Since when the oldest unread delivery stands in an inbox, where there is one."""
        found: dict[str, int] = {}
        for name in names:
            row = self._db.execute(
                "SELECT min(written_at) FROM deliveries WHERE recipient = ? AND state = 'written'",
                (name,),
            ).fetchone()
            if row[0] is not None:
                found[name] = row[0]
        return found
