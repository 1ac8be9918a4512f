"""The table of deliveries: one row for each message and recipient.

Called within the caller's transaction, from the loop's thread alone. States of a delivery and of
the answer that its recipient owes: docs/states.md.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from relay.ledger.file import as_json


class WrittenDelivery(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A delivery whose file is in the inbox, in the order of the INSERT below."""

    message_id: str
    recipient: str
    attempt: int
    staged_at: int  # the commit that accepted it
    written_at: int
    obligation: str | None = None  # 'open': its recipient owes an answer
    due_at: int | None = None  # Unix ns: when that is overdue


MAX_ATTEMPT = 1 << 31  # above any


class ReadDelivery(NamedTuple):
    """A delivery whose file left the inbox."""

    message_id: str
    recipient: str
    attempt: int  # this attempt or an earlier one; MAX_ATTEMPT: it is not known which
    at_ns: int  # Unix nanoseconds
    how: str | None = None  # TAKEN or REMOVED; None: unknown


class HeldDelivery(NamedTuple):
    """A delivery to be attempted at ``due_at`` (Unix ns)."""

    message_id: str
    recipient: str
    attempt: int
    reason: str
    due_at: int


class DeliveryFacts(NamedTuple):
    """A row of ``deliveries`` as the journal has it; None: unknown to the journal."""

    message_id: str
    recipient: str
    state: str
    attempt: int
    staged_at: int | None = None
    written_at: int | None = None
    read_at: int | None = None
    acked_at: int | None = None
    ack_status: str | None = None
    last_error: str | None = None
    due_at: int | None = None
    read_how: str | None = None
    answer_id: str | None = None
    answer_text: str | None = None


class ObligationFacts(NamedTuple):
    """An answer that is owed, as the journal has it; None: unknown to the journal."""

    message_id: str
    recipient: str
    obligation: str
    due_at: int | None = None
    reminders: int = 0
    ack_status: str | None = None  # of the recipient's last answer
    acked_at: int | None = None


class DeliveryRow(NamedTuple):
    """A row of ``deliveries``, as far as the relay reads it back."""

    message_id: str
    recipient: str
    state: str
    attempt: int
    staged_at: int
    last_error: str | None
    read_how: str | None
    read_at: int | None


_COLUMNS = "message_id, recipient, state, attempt, staged_at, last_error, read_how, read_at"
_WRITTEN = (  # one statement for the rows of a batch
    "INSERT INTO deliveries (message_id, recipient, state, attempt, staged_at, written_at, "
    "obligation, due_at) "
    "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), 'written', "
    + ", ".join(f"json_extract(value, '$[{column}]')" for column in range(2, 7))
    + " FROM json_each(?) WHERE true ON CONFLICT (message_id, recipient) DO UPDATE SET "
    "state = 'written', attempt = excluded.attempt, staged_at = excluded.staged_at, "
    "written_at = excluded.written_at, due_at = excluded.due_at, last_error = NULL, "
    "obligation = coalesce(excluded.obligation, obligation) "
    "WHERE state IN ('staged', 'held') "
    "OR (state IN ('written', 'read', 'dead') AND excluded.attempt > attempt)"
)

_READ = (
    "UPDATE deliveries SET state = CASE state WHEN 'written' THEN 'read' ELSE state END, "
    # an answer implies a read; the file may have been taken before it, and recorded after it
    "read_at = CASE state WHEN 'acked' THEN min(coalesce(read_at, at), at) ELSE at END, "
    "read_how = how "
    "FROM (SELECT json_extract(value, '$[0]') AS id_, json_extract(value, '$[1]') AS name, "
    "json_extract(value, '$[2]') AS last, json_extract(value, '$[3]') AS at, "
    "json_extract(value, '$[4]') AS how FROM json_each(?)) "
    "WHERE message_id = id_ AND recipient = name AND attempt <= last AND (state = 'written' "
    "OR (state = 'acked' AND read_how IS NULL) "
    "OR (state IN ('dead', 'expired', 'bounced') AND coalesce(read_at, 0) < written_at))"
)


class DeliveryTable:
    """The rows of ``deliveries``: their states, and the answers that recipients owe."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def add_undelivered(
        self, deliveries: Iterable[tuple[str, str, str, int, str | None, int | None]]
    ) -> None:
        """Add (message id, recipient, state, staged_at, error, due_at); existing rows stay."""
        self._db.executemany(
            "INSERT OR IGNORE INTO deliveries "
            "(message_id, recipient, state, staged_at, last_error, due_at) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            deliveries,
        )

    def mark_written(self, deliveries: Sequence[WrittenDelivery]) -> None:
        """Record files placed in inboxes, by a first or a later attempt."""
        self._db.execute(_WRITTEN, (as_json(deliveries),))

    def restore(self, deliveries: Iterable[DeliveryFacts]) -> None:
        """Add or update rows that are missing, or older than what the journal has."""
        self._db.executemany(
            "INSERT INTO deliveries (message_id, recipient, state, attempt, staged_at, written_at, "
            "read_at, acked_at, ack_status, last_error, due_at, read_how, answer_id, answer_text) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (message_id, recipient) "
            "DO UPDATE SET state = excluded.state, attempt = max(attempt, excluded.attempt), "
            "staged_at = CASE WHEN attempt < excluded.attempt "  # its age is that of its attempt
            "THEN coalesce(excluded.staged_at, staged_at) "
            "ELSE coalesce(staged_at, excluded.staged_at) END, "
            "written_at = CASE WHEN attempt < excluded.attempt "
            "THEN coalesce(excluded.written_at, written_at) "
            "ELSE coalesce(written_at, excluded.written_at) END, "  # it may know it more exactly
            "read_at = coalesce(read_at, excluded.read_at), "
            "acked_at = coalesce(excluded.acked_at, acked_at), "
            "ack_status = coalesce(excluded.ack_status, ack_status), "
            "last_error = coalesce(excluded.last_error, last_error), due_at = excluded.due_at, "
            "read_how = coalesce(excluded.read_how, read_how), "
            "answer_id = coalesce(excluded.answer_id, answer_id), "
            "answer_text = coalesce(excluded.answer_text, answer_text) "
            "WHERE state <> excluded.state OR attempt < excluded.attempt "
            "OR (read_how IS NULL AND excluded.read_how IS NOT NULL) "
            "OR answer_id IS NOT coalesce(excluded.answer_id, answer_id)",
            deliveries,
        )

    def hold(self, held: Iterable[HeldDelivery]) -> None:
        """Mark deliveries as held until they are due."""
        self._db.executemany(
            "UPDATE deliveries SET state = 'held', last_error = ?, due_at = ?, attempt = ? "
            "WHERE message_id = ? AND recipient = ? "
            "AND state IN ('staged', 'held', 'written', 'read', 'dead')",
            [(one.reason, one.due_at, one.attempt, *one[:2]) for one in held],
        )

    def release(self, message_ids: Iterable[str], now_ns: int) -> None:
        """Make the held deliveries of these messages due now."""
        self._db.execute(
            "UPDATE deliveries SET due_at = ? WHERE state = 'held' "
            "AND message_id IN (SELECT value FROM json_each(?))",
            (now_ns, json.dumps(list(message_ids))),
        )

    def give_up(self, message_id: str, recipient: str, state: str, reason: str) -> None:
        """End a delivery as ``expired``, ``bounced`` or ``dead``; an acked one stays acked."""
        self._db.execute(
            "UPDATE deliveries SET state = ?, last_error = ?, due_at = NULL, "
            "obligation = CASE obligation WHEN 'open' THEN 'given_up' ELSE obligation END "
            "WHERE message_id = ? AND recipient = ? "
            "AND state IN ('staged', 'held', 'written', 'read', 'dead') AND state <> ?",
            (state, reason, message_id, recipient, state),
        )

    def redeliver(self, vanished: Iterable[tuple[str, str, int, int]], reason: str) -> None:
        """Schedule (message id, recipient, next attempt) at a time: the file vanished unread."""
        self._db.executemany(
            "UPDATE deliveries SET state = 'held', attempt = ?, staged_at = ?, due_at = ?, "
            "last_error = ? WHERE message_id = ? AND recipient = ? AND state = 'written'",
            [
                (attempt, at, at, reason, message_id, name)
                for message_id, name, attempt, at in vanished
            ],
        )

    def discard(self, letters: Iterable[tuple[str, int]]) -> None:
        """Record that dead letters, (message id, when), were discarded: nothing waits any more."""
        self._db.executemany(
            "UPDATE deliveries SET discarded_at = ? WHERE message_id = ? AND state = 'dead'",
            [(at, message_id) for message_id, at in letters],
        )

    def waiting_letters(self) -> set[str]:
        """The message ids of dead deliveries that were neither replayed nor discarded."""
        found = self._db.execute(
            "SELECT DISTINCT message_id FROM deliveries WHERE state = 'dead' "
            "AND discarded_at IS NULL"
        )
        return {row[0] for row in found}

    def mark_read(self, taken: Sequence[ReadDelivery]) -> None:
        """Record files that left the inbox, unless a later attempt has been written since.

        A delivery that was given up, or acknowledged before, keeps its state.
        """
        self._db.execute(_READ, (as_json(taken),))

    def acknowledge(
        self,
        message_id: str,
        recipient: str,
        status: str,
        now_ns: int,
        answer_id: str | None = None,
        text: str | None = None,
    ) -> None:
        """Record an ack, late or not; a later one replaces the status of an earlier one."""
        self._db.execute(
            "UPDATE deliveries SET state = 'acked', acked_at = ?, ack_status = ?, "
            "read_at = coalesce(read_at, ?), answer_id = ?, answer_text = ? "
            "WHERE message_id = ? AND recipient = ? AND state <> 'staged'",
            (now_ns, status, now_ns, answer_id, text, message_id, recipient),
        )

    def rows(self, message_ids: Iterable[str]) -> dict[str, dict[str, DeliveryRow]]:
        """The deliveries of these messages: id -> recipient -> row."""
        found: dict[str, dict[str, DeliveryRow]] = {}
        for row in self._db.execute(
            f"SELECT {_COLUMNS} FROM deliveries "
            "WHERE message_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(message_ids)),),
        ):
            found.setdefault(row[0], {})[row[1]] = DeliveryRow(*row)
        return found

    def next_due(self) -> int | None:
        """The time the next held delivery is due (Unix nanoseconds)."""
        row = self._db.execute(
            "SELECT min(due_at) FROM deliveries WHERE state IN ('held', 'staged')"
        ).fetchone()
        return row[0] if row else None

    def due(self, now_ns: int, limit: int) -> list[DeliveryRow]:
        """Up to ``limit`` held deliveries that are due."""
        return [
            DeliveryRow(*row)
            for row in self._db.execute(
                f"SELECT {_COLUMNS} FROM deliveries "
                "WHERE state IN ('held', 'staged') AND state = 'held' AND due_at <= ? LIMIT ?",
                (now_ns, limit),
            )
        ]

    def unread(self, recipient: str) -> dict[str, int]:
        """Message id -> time written, of the messages in this agent's inbox, those included that
        were given up and are still there."""
        return dict(
            self._db.execute(
                "SELECT message_id, coalesce(written_at, 0) FROM deliveries "
                "WHERE recipient = ? AND state = 'written' UNION ALL "
                "SELECT message_id, written_at FROM deliveries "
                "WHERE recipient = ? AND state = 'dead' AND coalesce(read_at, 0) < written_at",
                (recipient, recipient),
            ).fetchall()
        )

    def unread_senders(self, recipient: str) -> list[tuple[str, int, str]]:
        """(sender, number of its messages, the first of them) of what this agent has not read."""
        return self._db.execute(
            "SELECT agent_name, count(*), min(message_id) FROM deliveries JOIN messages "
            "USING (message_id) WHERE recipient = ? AND state IN ('written', 'held') "
            "GROUP BY 1 ORDER BY 1",
            (recipient,),
        ).fetchall()

    def unread_of(self, recipient: str, message_ids: Iterable[str]) -> dict[str, int]:
        """The same as ``unread``, for these messages only."""
        found = self._db.execute(
            "SELECT message_id, coalesce(written_at, 0) FROM deliveries WHERE recipient = ? "
            "AND state IN ('written', 'dead') AND message_id IN (SELECT value FROM json_each(?))",
            (recipient, json.dumps(list(message_ids))),
        )
        return dict(found.fetchall())

    def undelivered(self, recipient: str, message_ids: set[str]) -> set[str]:
        """Those of these messages that have no delivery for this agent."""
        found = self._db.execute(
            "SELECT value FROM json_each(?) WHERE NOT EXISTS "
            "(SELECT 1 FROM deliveries WHERE message_id = value AND recipient = ?)",
            (json.dumps(sorted(message_ids)), recipient),
        )
        return {row[0] for row in found}

    # -- answers that are owed ------------------------------------------------------------

    def restore_obligations(self, obligations: Iterable[ObligationFacts]) -> None:
        """Update existing rows to the obligations that journal and store have."""
        self._db.executemany(
            "UPDATE deliveries SET obligation = ?, due_at = CASE state WHEN 'held' THEN due_at "
            "ELSE ? END, reminders = max(reminders, ?), ack_status = coalesce(?, ack_status), "
            "acked_at = coalesce(?, acked_at) WHERE message_id = ? AND recipient = ?",
            [(*one[2:], *one[:2]) for one in obligations],
        )
        self._db.execute(
            "UPDATE deliveries SET obligation = 'given_up', due_at = NULL "
            "WHERE obligation = 'open' AND state IN ('bounced', 'expired', 'dead')"
        )

    def open_obligations(self) -> list[tuple[str, str, str]]:
        """(message id, recipient, status of its last ack) of every answer that is owed."""
        return self._db.execute(
            "SELECT message_id, recipient, coalesce(ack_status, '') FROM deliveries "
            "WHERE obligation = 'open'"
        ).fetchall()

    def set_obligation(
        self,
        message_id: str,
        recipient: str,
        obligation: str,
        due_at: int | None,
        reminders: int = 0,
    ) -> None:
        """Set the state of an answer that is owed, and when it is overdue."""
        self._db.execute(
            "UPDATE deliveries SET obligation = ?, due_at = CASE state WHEN 'held' THEN due_at "
            "ELSE ? END, reminders = max(reminders, ?) WHERE message_id = ? AND recipient = ?",
            (obligation, due_at, reminders, message_id, recipient),
        )

    def cap_due_times(self, latest_ns: int) -> None:
        """Make no held delivery due later than this, after the clock was set back."""
        self._db.execute(
            "UPDATE deliveries SET due_at = ? "
            "WHERE state IN ('held', 'staged') AND state = 'held' AND due_at > ?",
            (latest_ns, latest_ns),
        )
