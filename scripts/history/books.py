"""The ledger of a history: rows in bulk, with the times of the history.

The triggers of the schema stamp what the clock on the wall says, so they are put aside while rows
are written, and ``audit_log`` is written here as they would have: the same words, a row for each
change of a status, times in whole milliseconds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import astuple

from relay.base.clock import NS_PER_MS
from relay.base.incidents import Refusal
from relay.ledger.agents import ProcessRow
from relay.ledger.ledger import FileFacts, Ledger

BATCH = 20_000  # rows that wait before they are written


class Delivered(NamedTuple):
    """A row of ``deliveries``."""

    message_id: str
    recipient: str
    state: str
    attempt: int = 1
    staged_at: int | None = None
    written_at: int | None = None
    read_at: int | None = None
    acked_at: int | None = None
    ack_status: str | None = None
    due_at: int | None = None
    last_error: str | None = None
    read_how: str | None = None
    answer_id: str | None = None
    answer_text: str | None = None
    obligation: str | None = None
    reminders: int = 0
    discarded_at: int | None = None


class Books:
    """A new ledger. ``close`` restores the triggers, so that a relay can use it."""

    def __init__(self, path: str) -> None:
        Ledger.open(path).close()
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA cache_size = -65536")
        found = self._db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        self._triggers: dict[str, str] = dict(found.fetchall())
        for name in self._triggers:
            self._db.execute(f"DROP TRIGGER {name}")
        self._db.execute("BEGIN")
        self.writer = "daemon 1"
        self.messages = 0  # rows so far, which are the order of discovery
        self._rows: dict[str, list[tuple[object, ...]]] = {}
        self._waiting = 0

    def message(
        self,
        facts: FileFacts,
        status: str,
        processed_at: int | None,
        refusal: Refusal | None = None,
    ) -> None:
        """Add a finished row, in order of discovery."""
        self.messages += 1
        values = astuple(facts)
        head, rest = values[:2], values[2:7]
        self._put(
            "messages",
            (
                self.messages,
                *head,
                "outbox",
                *rest,
                status,
                *values[7:],
                processed_at,
                0,
                *((refusal.reason, refusal.code) if refusal else (None, None)),
            ),
        )

    def delivery(self, row: Delivered) -> None:
        """Add a recipient's row in its final state."""
        self._put("deliveries", row)

    def moved(
        self,
        at_ns: int,
        what: tuple[str, str | None],
        old: str | None,
        new: str,
        attempt: int | None = None,
        before: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Add a row of the audit log, in the order of time of a real relay.

        ``what``: message id and recipient; None: the message itself.
        """
        at_ns -= at_ns % NS_PER_MS
        self._put("audit_log", (None, at_ns, *what, old, new, self.writer, attempt, *before))

    def security(self, at_ns: int, kind: str, agent: str | None, path: str, detail: str) -> None:
        """Add a security event."""
        self._put("security_events", (None, at_ns, kind, agent, path, detail))

    def agent(self, name: str, registered_at: int, seen_at: int | None) -> None:
        """Add an active agent."""
        row = (name, registered_at, seen_at, None, "active", None, None, None, None, None)
        self._put("agents", row)

    def process(self, row: ProcessRow) -> None:
        """Add a process in its final state."""
        self._put("processes", row)

    def refer(self, digest: str, message_id: str, at_ns: int) -> None:
        """Record that a message refers to an attachment."""
        self._put("attachment_refs", (digest, message_id, at_ns))

    def reject(self, row: tuple[object, ...]) -> None:
        """Record a refused file without a row in ``messages``."""
        self._put("rejections", row)

    def state(self, values: Iterable[tuple[str, object]], at_ns: int) -> None:
        """Set a value that the relay reads on its next start."""
        for key, value in values:
            self._put("orchestrator_state", (key, str(value), at_ns))

    def _put(self, table: str, row: tuple[object, ...]) -> None:
        self._rows.setdefault(table, []).append(row)
        self._waiting += 1
        if self._waiting >= BATCH:
            self._write()

    def _write(self) -> None:
        for table, rows in self._rows.items():
            places = ", ".join("?" * len(rows[0]))
            self._db.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
        self._rows, self._waiting = {}, 0

    def close(self) -> None:
        """Write pending rows and restore the triggers."""
        self._write()
        self._db.execute("COMMIT")
        for sql in self._triggers.values():
            self._db.execute(sql)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.close()
