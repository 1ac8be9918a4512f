"""The tables of offers and rings: what hooks showed to agents, and how idle ones were rung.

Called within the caller's transaction, from the loop's thread alone. The same change twice is one.
States of an offer: docs/states.md.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

OFFERED, IN_CONTEXT, RETURNED = "offered", "in_context", "returned"
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
    """The rows of ``offers`` and ``rings``."""

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

    def is_open(self, message_id: str, recipient: str) -> bool:
        """True while a session is being shown the message: it is not known yet if it was seen."""
        values = {"message_id": message_id, "recipient": recipient}
        query = f"SELECT 1 FROM offers WHERE {_OF_DELIVERY} AND state = 'offered'"
        return self._db.execute(query, values).fetchone() is not None

    def add_rings(self, rings: Iterable[tuple[object, ...]]) -> None:
        """Record rings: (agent, Unix ns, session, rung, number of messages, result)."""
        self._db.executemany("INSERT OR IGNORE INTO rings VALUES (?, ?, ?, ?, ?, ?)", rings)
