"""The tables of deliveries, a row for each message and recipient, and of offers and rings: what
hooks showed to agents, and how idle ones were rung.

Called within the caller's transaction, from the loop's thread alone. States of a delivery, of the
answer that its recipient owes, and of an offer: docs/states.md.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from relay.ledger import OFFERED, UNREAD
from relay.ledger.file import as_json

# As the index deliveries_open has it: SQLite takes it only for a condition that it can see to be in
# the index's own.
_IS_HELD = "state IN ('held', 'staged') AND state = 'held'"


class DeliveryFacts(msgspec.Struct, gc=False, array_like=True):
    """A row of ``deliveries`` as it is read, or its new values; times in Unix ns.

    ``upsert``: None leaves the row's value; ``written_at`` clears the error and the due time of
    before.
    """

    message_id: str
    recipient: str
    state: str
    attempt: int
    staged_at: int | None = None  # the commit that accepted it, or began this attempt
    written_at: int | None = None
    read_at: int | None = None
    acked_at: int | None = None
    ack_status: str | None = None
    last_error: str | None = None
    due_at: int | None = None  # None: of one that is held, it is not known yet
    read_how: str | None = None  # TAKEN or REMOVED; None: unknown
    answer_id: str | None = None
    answer_text: str | None = None
    discarded_at: int | None = None  # of one that was given up: its dead letter was discarded


def held_delivery(message_id: str, recipient: str, why: str, due_at: int) -> DeliveryFacts:
    """A delivery as ``DeliveryTable.hold`` needs it."""
    return DeliveryFacts(message_id, recipient, "held", 0, last_error=why, due_at=due_at)


class ObligationFacts(msgspec.Struct, gc=False, array_like=True):
    """New values for the answer that a recipient owes; None leaves those of its last ack."""

    message_id: str
    recipient: str
    obligation: str
    due_at: int | None = None
    reminders: int = 0
    ack_status: str | None = None  # of the recipient's last answer
    acked_at: int | None = None


_FACTS = DeliveryFacts.__struct_fields__
_COLUMNS = ", ".join(_FACTS)
_UPSERT = (  # one statement for the rows of a batch
    f"INSERT INTO deliveries ({_COLUMNS}) SELECT "
    + ", ".join(f"json_extract(value, '$[{place}]')" for place in range(len(_FACTS)))
    + " FROM json_each(?) WHERE json_extract(value, '$[0]') IN (SELECT message_id FROM messages) "
    "ON CONFLICT (message_id, recipient) DO UPDATE SET "
    # what was staged may have been written: the row is then ahead of the journal
    "state = CASE WHEN excluded.state = 'staged' AND state <> 'held' "
    "AND attempt >= excluded.attempt THEN state "
    # and what was written may have been read: a start that applies old events again says both
    "WHEN excluded.state = 'written' AND state = 'read' AND attempt >= excluded.attempt "
    "AND read_at >= excluded.written_at THEN state ELSE excluded.state END, "
    "attempt = max(attempt, excluded.attempt), "
    "staged_at = CASE WHEN excluded.state = 'held' AND attempt >= excluded.attempt "
    "THEN coalesce(staged_at, excluded.staged_at) "  # its age is that of its attempt
    "ELSE coalesce(excluded.staged_at, staged_at) END, "
    "written_at = CASE WHEN state = 'held' OR attempt < excluded.attempt "
    "THEN coalesce(excluded.written_at, written_at) "
    "ELSE coalesce(written_at, excluded.written_at) END, "  # the row may know it more exactly
    "read_at = CASE WHEN excluded.read_at IS NULL THEN read_at "
    # the time of an attempt before this one does not count
    "WHEN attempt < excluded.attempt OR state IN ('held', 'staged', 'written') "
    "OR (state NOT IN ('read', 'acked') AND coalesce(read_at, 0) "
    "< max(coalesce(written_at, 0), coalesce(excluded.written_at, 0))) "
    "THEN excluded.read_at ELSE coalesce(min(read_at, excluded.read_at), excluded.read_at) END, "
    "acked_at = coalesce(excluded.acked_at, acked_at), "
    "ack_status = coalesce(excluded.ack_status, ack_status), "
    # why it was held, and until when, ends with that
    "last_error = CASE WHEN excluded.written_at IS NOT NULL "
    "OR (state = 'held' AND excluded.state <> 'held') THEN excluded.last_error "
    "ELSE coalesce(excluded.last_error, last_error) END, "
    "due_at = CASE WHEN excluded.written_at IS NULL AND excluded.state IN ('read', 'acked') "
    "AND state <> 'held' THEN due_at ELSE excluded.due_at END, "
    "obligation = CASE WHEN excluded.state IN ('expired', 'bounced', 'dead') "
    "AND obligation = 'open' THEN 'given_up' ELSE obligation END, "
    "read_how = coalesce(excluded.read_how, read_how), "
    "discarded_at = CASE WHEN excluded.state = 'dead' "  # an ack takes it back
    "THEN coalesce(excluded.discarded_at, discarded_at) END, "
    "answer_id = coalesce(excluded.answer_id, answer_id), "
    "answer_text = CASE WHEN excluded.answer_id IS NULL "
    "THEN answer_text ELSE excluded.answer_text END"
)
# While a row is held, its due time is that of the next attempt.
_OBLIGATIONS = (
    "UPDATE deliveries SET obligation = CASE WHEN owed = 'open' "
    "AND state IN ('expired', 'bounced', 'dead') THEN 'given_up' ELSE owed END, "
    "due_at = CASE WHEN state = 'held' THEN due_at "
    "WHEN state IN ('expired', 'bounced', 'dead') THEN NULL ELSE due END, "
    "reminders = max(reminders, times), ack_status = coalesce(said, ack_status), "
    "acked_at = coalesce(at, acked_at) "
    "FROM (SELECT json_extract(value, '$[0]') AS id_, json_extract(value, '$[1]') AS name, "
    "json_extract(value, '$[2]') AS owed, json_extract(value, '$[3]') AS due, "
    "json_extract(value, '$[4]') AS times, json_extract(value, '$[5]') AS said, "
    "json_extract(value, '$[6]') AS at FROM json_each(?)) "
    "WHERE message_id = id_ AND recipient = name"
)
_READ = (
    "UPDATE deliveries SET state = CASE state WHEN 'written' THEN 'read' ELSE state END, "
    # an answer implies a read; the file may have been taken before it, and recorded after it
    "read_at = CASE state WHEN 'acked' THEN min(coalesce(read_at, at), at) ELSE at END, "
    "read_how = how "
    "FROM (SELECT json_extract(value, '$[0]') AS id_, json_extract(value, '$[1]') AS name, "
    "json_extract(value, '$[6]') AS at, json_extract(value, '$[11]') AS how FROM json_each(?)) "
    "WHERE message_id = id_ AND recipient = name AND (state = 'written' "
    "OR (state = 'acked' AND read_how IS NULL) "
    "OR (state IN ('dead', 'expired', 'bounced') AND coalesce(read_at, 0) < written_at))"
)


class DeliveryTable:
    """The rows of ``deliveries``: their states, and the answers that recipients owe."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def upsert(self, deliveries: Sequence[DeliveryFacts]) -> None:
        """Add rows, or bring existing ones up to date, of messages that have a row."""
        self._db.execute(_UPSERT, (as_json(deliveries),))

    def hold(self, held: Iterable[DeliveryFacts]) -> None:
        """Set why deliveries are held, and when they are due: nothing else of them."""
        self._db.executemany(
            "UPDATE deliveries SET last_error = ?, due_at = ? "
            "WHERE message_id = ? AND recipient = ? AND state = 'held'",
            [(one.last_error, one.due_at, one.message_id, one.recipient) for one in held],
        )

    def hold_rest(self, reason: str, due_at: int) -> None:
        """The same for each held delivery that has no due time: it was not tried yet."""
        self._db.execute(
            f"UPDATE deliveries SET last_error = ?, due_at = ? WHERE {_IS_HELD} AND due_at IS NULL",
            (reason, due_at),
        )

    def end_orphans(self, message_id: str, reason: str) -> None:
        """End the deliveries of a message whose row somebody has removed."""
        self._db.execute(
            "UPDATE deliveries SET state = 'bounced', last_error = ?, due_at = NULL "
            "WHERE message_id = ? AND state = 'held'",
            (reason, message_id),
        )

    def release(self, message_ids: Iterable[str], now_ns: int) -> None:
        """Make the held deliveries of these messages due now."""
        self._db.execute(
            "UPDATE deliveries SET due_at = ? WHERE state = 'held' "
            "AND message_id IN (SELECT value FROM json_each(?))",
            (now_ns, json.dumps(list(message_ids))),
        )

    def discard(self, letters: Iterable[tuple[str, int]]) -> None:
        """Record that dead letters, (message id, when), were discarded: nothing waits any more."""
        self._db.executemany(
            "UPDATE deliveries SET discarded_at = ? "
            "WHERE message_id = ? AND state = 'dead' AND discarded_at IS NULL",
            [(at, message_id) for message_id, at in letters],
        )

    def waiting_letters(self) -> set[str]:
        """The message ids of dead deliveries that were neither replayed nor discarded."""
        found = self._db.execute(
            "SELECT DISTINCT message_id FROM deliveries WHERE state = 'dead' "
            "AND discarded_at IS NULL"
        )
        return {row[0] for row in found}

    def mark_read(self, taken: Sequence[DeliveryFacts]) -> None:
        """Record files that left the inbox, of messages that the store no longer has.

        Their ``read_at`` and ``read_how`` alone count. A delivery that was given up, or
        acknowledged before, keeps its state.
        """
        self._db.execute(_READ, (as_json(taken),))

    def rows(self, message_ids: Iterable[str]) -> dict[str, dict[str, DeliveryFacts]]:
        """The deliveries of these messages: id -> recipient -> row."""
        found: dict[str, dict[str, DeliveryFacts]] = {}
        for row in self._db.execute(
            f"SELECT {_COLUMNS} FROM deliveries "
            "WHERE message_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(message_ids)),),
        ):
            found.setdefault(row[0], {})[row[1]] = DeliveryFacts(*row)
        return found

    def next_due(self) -> int | None:
        """The time the next held delivery is due (Unix nanoseconds)."""
        row = self._db.execute(
            "SELECT min(due_at) FROM deliveries WHERE state IN ('held', 'staged')"
        ).fetchone()
        return row[0] if row else None

    def due(self, now_ns: int, limit: int) -> list[DeliveryFacts]:
        """Up to ``limit`` held deliveries that are due."""
        return [
            DeliveryFacts(*row)
            for row in self._db.execute(
                f"SELECT {_COLUMNS} FROM deliveries WHERE {_IS_HELD} AND due_at <= ? LIMIT ?",
                (now_ns, limit),
            )
        ]

    def unread(self, recipient: str) -> dict[str, int]:
        """Message id -> time written, of the messages in this agent's inbox, those included that
        were given up and are still there."""
        return dict(
            self._db.execute(
                f"SELECT message_id, coalesce(written_at, 0) FROM {UNREAD} WHERE recipient = ?",
                (recipient,),
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

    def set_obligations(self, obligations: Sequence[ObligationFacts]) -> None:
        """Bring existing rows up to date with answers that are owed."""
        self._db.execute(_OBLIGATIONS, (as_json(obligations),))

    def open_obligations(self) -> list[tuple[str, str, str]]:
        """(message id, recipient, status of its last ack) of every answer that is owed."""
        return self._db.execute(
            "SELECT message_id, recipient, coalesce(ack_status, '') FROM deliveries "
            "WHERE obligation = 'open'"
        ).fetchall()

    def cap_due_times(self, latest_ns: int) -> None:
        """Make no held delivery due later than this, after the clock was set back."""
        self._db.execute(
            f"UPDATE deliveries SET due_at = ? WHERE {_IS_HELD} AND due_at > ?",
            (latest_ns, latest_ns),
        )


MOST_OFFERS = 1_000  # of one delivery; what goes beyond is not recorded


class OfferChange(NamedTuple):
    """An offer of a message to a session, or the end of one."""

    message_id: str
    recipient: str
    session: str
    offer: int  # the n-th of this delivery; 0: the last one to this session
    state: str
    detail: str  # the hook's event, the evidence, or why it was returned
    at: int  # Unix nanoseconds


_OF_DELIVERY = "message_id = :message_id AND recipient = :recipient"
_OF_SESSION = f"{_OF_DELIVERY} AND session = :session"
# Numbered anew if its number is another session's, or none; an end without its offer makes the row.
_ADD = (
    "INSERT INTO offers (message_id, recipient, offer, session, state, after, offered_at, "
    "ended_at, evidence) SELECT :message_id, :recipient, number, "
    ":session, :state, CASE :state WHEN 'offered' THEN :detail END, :at, "
    "CASE :state WHEN 'offered' THEN NULL ELSE :at END, "
    "CASE :state WHEN 'offered' THEN NULL ELSE :detail END FROM (SELECT "
    f"CASE WHEN :offer NOT BETWEEN 1 AND {MOST_OFFERS} OR EXISTS (SELECT 1 FROM offers "
    f"WHERE {_OF_DELIVERY} AND offer = :offer) THEN coalesce((SELECT max(offer) FROM offers "
    f"WHERE {_OF_DELIVERY} AND offer <= {MOST_OFFERS}), 0) + 1 ELSE :offer END AS number) "
    f"WHERE number <= {MOST_OFFERS} "
    f"AND NOT EXISTS (SELECT 1 FROM offers WHERE {_OF_SESSION} AND offered_at = :at)"
)
_ENDED = f"SELECT 1 FROM offers WHERE {_OF_SESSION} AND ended_at = :at AND evidence = :detail"
# What was returned may be found in the context after all; never the other way round.
_END = (
    "UPDATE offers SET state = :state, ended_at = :at, evidence = :detail "
    f"WHERE {_OF_SESSION} AND (state = 'offered' OR state = 'returned' AND :state = 'in_context') "
    f"AND offer = (SELECT max(offer) FROM offers WHERE {_OF_SESSION} AND :offer IN (0, offer))"
)


class OfferTable:
    """The rows of ``offers`` and ``rings``. The same change twice is one."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def change(self, changes: Iterable[OfferChange]) -> None:
        """Record offers and their ends, in their order."""
        for change in changes:
            values = change._asdict()
            if change.state != OFFERED:
                if self._db.execute(_ENDED, values).fetchone():
                    continue  # the last offer may be a later one
                known = f"SELECT 1 FROM offers WHERE {_OF_SESSION} AND :offer IN (0, offer)"
                self._db.execute(_END, values)
                if self._db.execute(known, values).fetchone():
                    continue
            self._db.execute(_ADD, values)

    def is_shown_to(self, message_id: str, recipient: str) -> list[str]:
        """The sessions that are being shown the message: it is not known yet if they saw it."""
        values = {"message_id": message_id, "recipient": recipient}
        query = f"SELECT session FROM offers WHERE {_OF_DELIVERY} AND state = 'offered'"
        return [row[0] for row in self._db.execute(query, values)]

    def add_rings(self, rings: Iterable[tuple[object, ...]]) -> None:
        """Record rings: (agent, Unix ns, session, rung, number of messages, result)."""
        self._db.executemany("INSERT OR IGNORE INTO rings VALUES (?, ?, ?, ?, ?, ?)", rings)
