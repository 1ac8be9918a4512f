"""Events of the ledger, in order: each change of a status, what happened to a delivery, security.

The ledger's audit_log has them. Reading it blocks nothing and needs no running relay.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from relay.base.clock import NS_PER_S
from relay.base.errors import RelayError
from relay.base.home import READ, Home
from relay.base.names import ORCHESTRATOR
from relay.base.outcomes import REMOVED, Outcome, is_cancelled
from relay.ledger import IN_CONTEXT, OFFERED, RETURNED
from relay.ledger.file import Connection
from relay.views.ids import read_file

SAME_ANSWER_NS = 2 * NS_PER_S  # an event and its answer are noted in one turn
MAX_EVENTS_PER_READ = 1000  # a backlog is read in pieces
INTERMEDIATE = ("pending", "processing", "archived", "asked")  # events shown only with --all
# status -> name in an event's line
EVENT_NAMES = {
    "failed": "refused",
    "written": "delivered",
    "offered": "shown",
    "in_context": "seen",
    "given_up": "given up",
}
DELIVERED = frozenset(  # (old, new): the message is in its inboxes
    {("processing", "completed"), ("processing", "archived")}
)
OFFERS = (OFFERED, IN_CONTEXT, RETURNED)
WITH_REASON = (
    "read",
    "held",
    "bounced",
    "expired",
    "dead",
    "acked",
)  # shown with details
_EVENTS = """
SELECT a.id, a.at, a.message_id, a.recipient, a.old_status, a.new_status, a.attempt, a.who,
       m.agent_name, m.target, m.message_type, m.last_error, m.file_path
FROM audit_log AS a LEFT JOIN messages AS m ON m.message_id = a.message_id
WHERE a.id > ? ORDER BY a.id LIMIT ?
"""
NOT_REACHED = ("held", "bounced")  # what a delivery may be instead of written
_FIRST_STATES = """
SELECT d.recipient, d.state, d.last_error, coalesce(a.old_status, d.state) AS first_state
FROM deliveries AS d LEFT JOIN (
    SELECT recipient, old_status, min(id) FROM audit_log WHERE message_id = :id
        AND old_status IN ('held', 'staged', 'written', 'read', 'acked', 'bounced')
    GROUP BY recipient
) AS a USING (recipient)
WHERE d.message_id = :id ORDER BY first_state IN ('held', 'bounced'), first_state, 1
"""
_SECURITY = "SELECT id, at, kind, agent, path, detail FROM security_events WHERE id > ? LIMIT ?"


def _event_name(row: sqlite3.Row) -> str:
    """The name of a change; a message of the relay's own is not shown as new."""
    is_message = row["recipient"] is None
    if is_message and row["old_status"] is None and row["agent_name"] != ORCHESTRATOR:
        return "new"
    return str(EVENT_NAMES.get(row["new_status"], row["new_status"]))


def _is_delivered(row: sqlite3.Row) -> bool:
    moved = row["old_status"], row["new_status"]
    return row["recipient"] is None and moved in DELIVERED


class EventCursor:
    """Reading position in audit_log and security_events."""

    def __init__(
        self, db: Connection, since_ns: int | None, newest: int, *, security: bool
    ) -> None:
        """Start at ``since_ns`` (Unix), or so many events before now."""
        self._db = db
        self._has_changes = not security
        self._audit = self._begin("audit_log", since_ns, newest)
        self._security = self._begin("security_events", since_ns, newest)

    def _begin(self, table: str, since_ns: int | None, newest: int) -> int:
        """Return the id to read after. Scans back from the newest row: ``at`` has no index."""
        if since_ns is None:
            query = f"SELECT coalesce(max(id), 0) - ? FROM {table}"
            return max(0, int(self._db.execute(query, (newest,)).fetchone()[0]))
        row = self._db.execute(
            f"SELECT id FROM {table} WHERE at < ? ORDER BY id DESC LIMIT 1", (since_ns,)
        ).fetchone()
        return int(row[0]) if row else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events since the last call, oldest first.

        Errors: LedgerError, also when another ledger is in its place: nothing comes into this one.
        """
        self._db.check_file()
        events = [*self._security_events()]
        if self._has_changes:
            rows = self._db.execute(_EVENTS, (self._audit, MAX_EVENTS_PER_READ)).fetchall()
            events += self._changes(rows)
        return sorted(events, key=itemgetter("at_ns"))

    def _changes(self, rows: list[sqlite3.Row]) -> Iterator[dict[str, Any]]:
        for row in rows:
            self._audit = row["id"]
            new = row["new_status"]
            why = row["last_error"] if new == "failed" else self._reason(row, new)
            event = {
                "at_ns": row["at"],
                "event": str(Outcome.CANCELLED) if is_cancelled(new, why) else _event_name(row),
                "status": new,
                "before": row["old_status"],
                "message_id": row["message_id"],
                "from": row["agent_name"],
                "to": row["recipient"] or row["target"],
                "recipients": None,
                "kind": row["message_type"],
                "attempt": row["attempt"],
                "who": row["who"],
                "path": row["file_path"],
                "detail": why,
            }
            if not _is_delivered(row):
                yield event
                continue
            for name, recipients, reason in self._first_results(row["message_id"]):
                yield event | {"event": name, "recipients": recipients, "detail": reason}

    def _first_results(self, message_id: str) -> Iterator[tuple[str, list[str], str | None]]:
        """Yield (event, recipients, reason) of a message that was accepted: who got it, and not.

        The first change of a delivery tells what it was before, else it is that still.
        """
        first: dict[str, list[sqlite3.Row]] = {}
        for row in self._db.execute(_FIRST_STATES, {"id": message_id}):
            state = row["first_state"]
            name = state if state in NOT_REACHED else "delivered"
            first.setdefault(name, []).append(row)
        for name, found in (first or {"delivered": list[sqlite3.Row]()}).items():
            reason = found[0]["last_error"] if found and found[0]["state"] == name else None
            yield name, [row["recipient"] for row in found], reason

    def _reason(self, row: sqlite3.Row, new: str) -> str | None:
        if new == "written" and (row["attempt"] or 1) > 1:
            return f"attempt {row['attempt']}"
        if new == "rung":
            return self._ring(row)
        if row["recipient"] is None or new not in (*WITH_REASON, *OFFERS):
            return None
        if new in OFFERS:
            return self._offer(row, new)
        found = self._db.execute(
            "SELECT * FROM deliveries WHERE message_id = ? AND recipient = ?",
            (row["message_id"], row["recipient"]),
        ).fetchone()
        if found is None:
            return None
        facts = dict(found)
        if new == "read":
            return "removed, not seen in .read" if facts["read_how"] == REMOVED else None
        if new == "acked" and self._is_earlier_answer(row, facts["acked_at"] or 0):
            return "answered again since"  # the row has the last answer alone
        if new == "acked" and facts["answer_text"]:
            return f"{facts['ack_status']}: {facts['answer_text']}"
        why: str | None = facts["ack_status"] if new == "acked" else facts["last_error"]
        return why

    def _is_earlier_answer(self, row: sqlite3.Row, last_ns: int) -> bool:
        """True if an answer was followed by another one, which earlier versions did not note."""
        if row["old_status"] != "acked" and last_ns - row["at"] > SAME_ANSWER_NS:
            return True
        later = (
            "SELECT 1 FROM audit_log WHERE message_id = ? AND recipient = ? "
            "AND new_status = 'acked' AND id > ?"
        )
        values = row["message_id"], row["recipient"], row["id"]
        return self._db.execute(later, values).fetchone() is not None

    def _offer(self, row: sqlite3.Row, state: str) -> str | None:
        """The session of an offer, and its evidence."""
        found = self._db.execute(
            "SELECT session, after, evidence FROM offers WHERE message_id = ? AND recipient = ? "
            "AND offer = coalesce(?, offer) ORDER BY offer DESC",
            (row["message_id"], row["recipient"], row["attempt"]),
        ).fetchone()
        if found is None:
            return None
        session, after, evidence = found
        if state != OFFERED:
            return f"{session}: {evidence}"
        return f"{session}, after {after}" if after else str(session)

    def _ring(self, row: sqlite3.Row) -> str | None:
        """The way the agent was rung, for how many messages, and the result."""
        found = self._db.execute(
            "SELECT rung, messages, result FROM rings WHERE agent = ? AND at <= ? + 1000000 "
            "ORDER BY at DESC LIMIT 1",
            (row["recipient"], row["at"]),
        ).fetchone()
        return None if found is None else "{}, {} waiting: {}".format(*found)

    def _security_events(self) -> Iterator[dict[str, Any]]:
        for row in self._db.execute(_SECURITY, (self._security, MAX_EVENTS_PER_READ)).fetchall():
            self._security = row["id"]
            yield {
                "at_ns": row["at"],
                "event": "security",
                "status": row["kind"],
                "before": None,
                "message_id": None,
                "from": row["agent"],
                "to": None,
                "recipients": None,
                "kind": None,
                "attempt": None,
                "who": None,
                "path": None,
                "detail": f"{row['kind']}: {row['path'] or ''} {row['detail'] or ''}".strip(),
            }


def is_of(event: dict[str, Any], agent: str | None) -> bool:
    """True if an event is of a message from or to the agent; None: of anybody."""
    named = (event["from"], event["to"], *(event["recipients"] or ()))
    return agent is None or agent in named


def body_of(home: Home, event: dict[str, Any], path: str | None) -> str | None:
    """Read the text of a message that is delivered or refused now; None for other events.

    None also for a message whose file has been removed.
    """
    from relay.base.message import split

    if path is None or event["event"] not in ("delivered", "refused") or event["to"] is None:
        return None
    if event["event"] == "delivered" and event["recipients"] is None and event["before"] != "held":
        return None  # to one recipient again
    name = path.rpartition("/")[2]
    inboxes = [f"agents/{recipient}/inbox" for recipient in event["recipients"] or (event["to"],)]
    # the relay's own messages have only these copies
    copies = (f"{folder}/{name}" for inbox in inboxes for folder in (inbox, f"{inbox}/{READ}"))
    for place in (path, *copies):
        with contextlib.suppress(OSError, RelayError):
            data = read_file(home, place)
            if data is not None:
                return split(data)[1].decode(errors="replace")
    return None
