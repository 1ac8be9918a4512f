"""Answers that recipients owe, in the table of deliveries; and when the relay last ran.

Called within the caller's transaction, from the loop's thread alone. States: docs/states.md, "An
answer that is owed".
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from relay.ledger.values import DutyFacts


class Duties:
    """The columns ``obligation``, ``reminders`` and ``due_at``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def restore(self, duties: Iterable[DutyFacts]) -> None:
        """Update existing rows to what journal and store say is owed."""
        self._db.executemany(
            "UPDATE deliveries SET obligation = ?, due_at = CASE state WHEN 'held' THEN due_at "
            "ELSE ? END, reminders = max(reminders, ?), ack_status = coalesce(?, ack_status), "
            "acked_at = coalesce(?, acked_at) WHERE message_id = ? AND recipient = ?",
            [(*one[2:], *one[:2]) for one in duties],
        )
        self._db.execute(
            "UPDATE deliveries SET obligation = 'given_up' WHERE obligation = 'open' "
            "AND state IN ('bounced', 'expired', 'dead')"
        )

    def open(self) -> list[tuple[str, str, str]]:
        """(message id, recipient, its last ack's status) of every answer that is owed."""
        return self._db.execute(
            "SELECT message_id, recipient, coalesce(ack_status, '') FROM deliveries "
            "WHERE obligation = 'open'"
        ).fetchall()

    def owe(
        self,
        message_id: str,
        recipient: str,
        obligation: str,
        due_at: int | None,
        reminders: int = 0,
    ) -> None:
        """Set the state of an answer that is owed."""
        self._db.execute(
            "UPDATE deliveries SET obligation = ?, due_at = CASE state WHEN 'held' THEN due_at "
            "ELSE ? END, reminders = max(reminders, ?) WHERE message_id = ? AND recipient = ?",
            (obligation, due_at, reminders, message_id, recipient),
        )

    def hasten(self, latest_ns: int) -> None:
        """No held delivery is due later than this: the clock was set back."""
        self._db.execute(
            "UPDATE deliveries SET due_at = ? "
            "WHERE state IN ('held', 'staged') AND state = 'held' AND due_at > ?",
            (latest_ns, latest_ns),
        )

    def note_alive(self, now_ns: int) -> None:
        """The relay runs: how long it did not, the next start finds out by this."""
        self._db.execute(
            "INSERT INTO orchestrator_state VALUES ('alive_at', ?1, ?1) ON CONFLICT (key) "
            "DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at",
            (now_ns,),
        )

    def alive_at(self) -> int:
        """When the relay was last seen to run (Unix nanoseconds); 0: this ledger does not know."""
        row = self._db.execute(
            "SELECT max(updated_at) FROM orchestrator_state WHERE key IN ('alive_at', 'journal')"
        ).fetchone()
        return int(row[0] or 0)
