"""``relay tail``: events from the ledger, one line each.

The ledger's audit_log has every change of a status, and what happened to a delivery besides.
Reading it blocks nothing and needs no running relay.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from operator import itemgetter
from textwrap import indent
from typing import Any

import click

from relay.base import outcomes
from relay.base.errors import RelayError
from relay.base.home import LEDGER, READ, Home
from relay.base.names import ORCHESTRATOR
from relay.base.text import visible
from relay.cli.common import (
    TIME,
    command,
    complete_agents,
    echo_json,
    open_home,
    sanitize,
    when,
)
from relay.cli.tables import clock_of, colour, colour_by_word, cut, day_of, wide_option
from relay.ledger import REMOVED
from relay.ledger.offers import IN_CONTEXT, OFFERED, RETURNED
from relay.views.ids import SHORT, read_file, short_ids

POLL_S = 0.2
MAX_EVENTS_PER_READ = 1000  # a backlog is read in pieces
LONGEST_KIND = len("notification")
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
_SECURITY = "SELECT id, at, kind, agent, path, detail FROM security_events WHERE id > ? LIMIT ?"


@command(
    epilog="""\b
Examples:
  relay tail
  relay tail --agent bob --body
  relay tail --since 1h --no-follow --json
  relay tail --security --no-follow --limit 100"""
)
@click.option("-f/ ", "--follow/--no-follow", default=True, help="Keep printing new events [yes].")
@click.option(
    "--agent",
    metavar="NAME",
    shell_complete=complete_agents,
    help="Only messages from or to this agent.",
)
@click.option("--since", type=TIME, help="Start 10m ago, at 14:05, '2026-11-20 18:30', yesterday.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=10,
    show_default=True,
    help="Without --since: start with this many of the newest.",
)
@click.option("--security", is_flag=True, help="Only security events.")
@click.option("--body", "has_bodies", is_flag=True, help="Also show what the messages say.")
@click.option("--all", "everything", is_flag=True, help="Also show intermediate states.")
@wide_option
def tail(
    ctx: click.Context,
    home: str | None,
    follow: bool,
    agent: str | None,
    since: int | None,
    limit: int,
    security: bool,
    has_bodies: bool,
    everything: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """Show events as they happen, one line each.

    --body adds the text of each message when it is delivered or refused. The relay need not be
    running. ^C ends it.
    """
    from relay.ledger.file import open_readonly

    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_home(ctx, home))
        db = stack.enter_context(contextlib.closing(open_readonly(opened.path(LEDGER))))
        cursor = EventCursor(db, since, limit, security=security)
        is_silent = not as_json
        lines = EventLines(wide=wide)
        while True:
            found = cursor.read()
            for event in found:
                path = event.pop("path")
                if (everything or event["event"] not in INTERMEDIATE) and _is_of(event, agent):
                    if has_bodies:
                        event["body"] = _body(opened, event, path)
                    if as_json:
                        echo_json({"at": when(event.pop("at_ns")), **event})
                    else:
                        lines.show(event)
                    is_silent = False
            sys.stdout.flush()
            if not found and not follow:
                if is_silent:
                    click.echo("nothing found", err=True)
                return
            if not found:
                time.sleep(POLL_S)


def _event_name(row: sqlite3.Row) -> str:
    """The name of a change; a message of the relay's own is not shown as new."""
    is_message = row["recipient"] is None
    if is_message and row["old_status"] is None and row["agent_name"] != ORCHESTRATOR:
        return "new"
    return str(EVENT_NAMES.get(row["new_status"], row["new_status"]))


class EventCursor:
    """Reading position in audit_log and security_events."""

    def __init__(
        self, db: sqlite3.Connection, since_ns: int | None, newest: int, *, security: bool
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
        """Return the events since the last call, oldest first."""
        events = [*self._security_events()]
        if self._has_changes:
            rows = self._db.execute(_EVENTS, (self._audit, MAX_EVENTS_PER_READ)).fetchall()
            events += self._changes(rows)
        return sorted(events, key=itemgetter("at_ns"))

    def _changes(self, rows: list[sqlite3.Row]) -> Iterator[dict[str, Any]]:
        for row in rows:
            self._audit = row["id"]
            recipient = row["recipient"]
            new, moved = row["new_status"], (row["old_status"], row["new_status"])
            is_delivered = recipient is None and moved in DELIVERED
            yield {
                "at_ns": row["at"],
                "event": "delivered" if is_delivered else _event_name(row),
                "status": new,
                "before": row["old_status"],
                "message_id": row["message_id"],
                "from": row["agent_name"],
                "to": recipient or row["target"],
                "recipients": self._recipients(row) if is_delivered else None,
                "kind": row["message_type"],
                "attempt": row["attempt"],
                "who": row["who"],
                "path": row["file_path"],
                "detail": row["last_error"] if new == "failed" else self._reason(row, new),
            }

    def _recipients(self, row: sqlite3.Row) -> list[str]:
        found = self._db.execute(
            "SELECT recipient FROM deliveries WHERE message_id = ? ORDER BY 1",
            (row["message_id"],),
        )
        return [one[0] for one in found]

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
        facts = outcomes.delivery_fields(found)
        if new == "read":
            return "removed, not seen in .read" if facts["read_how"] == REMOVED else None
        if new == "acked" and facts["answer_text"]:
            return f"{facts['ack_status']}: {facts['answer_text']}"
        why: str | None = facts["ack_status"] if new == "acked" else facts["last_error"]
        return why

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


def _is_of(event: dict[str, Any], agent: str | None) -> bool:
    named = (event["from"], event["to"], *(event["recipients"] or ()))
    return agent is None or agent in named


def _body(home: Home, event: dict[str, Any], path: str | None) -> str | None:
    """Read the text of a message that is delivered or refused now; None for other events.

    None also for a message whose file has been removed.
    """
    from relay.base.message import split

    if path is None or event["event"] not in ("delivered", "refused") or event["to"] is None:
        return None
    if event["event"] == "delivered" and event["recipients"] is None:
        return None  # to one recipient again
    name = path.rpartition("/")[2]
    inboxes = [f"agents/{one}/inbox" for one in event["recipients"] or ()]
    # the relay's own messages have only these copies
    copies = (f"{folder}/{name}" for one in inboxes for folder in (one, f"{one}/{READ}"))
    for place in (path, *copies):
        with contextlib.suppress(OSError, RelayError):
            data = read_file(home, place)
            if data is not None:
                return split(data)[1].decode(errors="replace")
    return None


class EventLines:
    """Prints events for people: local times, a line above each new day, short ids."""

    def __init__(self, *, wide: bool) -> None:
        """``wide``: lines are not cut to the terminal."""
        self._most = None
        if not wide and sys.stdout.isatty():
            self._most = shutil.get_terminal_size().columns
        self._day = day_of(time.time_ns())

    def show(self, event: dict[str, Any]) -> None:
        """Print one event."""
        at = event["at_ns"]
        if self._day != day_of(at):
            self._day = day_of(at)
            click.echo(self._day)
        to = ", ".join(event["recipients"] or ()) or event["to"]
        route = f"{event['from'] or '?'} -> {to}" if to else event["from"] or "?"
        name = f"{event['event']:<9}"
        message_id = event["message_id"] or "-"
        short, kind = short_ids([message_id])[message_id], event["kind"] or "-"
        parts = [f"{short:<{SHORT}}", f"{kind:<{LONGEST_KIND}}", route]
        if event["detail"]:
            parts.append(f"({event['detail']})")
        line = visible("  ".join([clock_of(at), name, *parts]))
        if self._most:
            line = cut(line, self._most)
        is_failed = event["event"] == "acked" and (event["detail"] or "").startswith("failed")
        coloured = colour(name, "red") if is_failed else colour_by_word(name)
        click.echo(line.replace(name, coloured, 1))
        if event.get("body"):
            click.echo(indent(sanitize(event["body"].rstrip(), lines=True) or "", " " * 14))
