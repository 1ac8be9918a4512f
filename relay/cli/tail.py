"""``relay tail``: events from the ledger, one line each.

The ledger's audit_log has every change of a status, deliveries by message and recipient. Reading
it blocks nothing and needs no running relay.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import click

from relay.base.home import LEDGER
from relay.cli import outcomes
from relay.cli.common import echo_json, home_option, json_option, open_home, sanitize, when
from relay.ledger.deliveries import REMOVED

POLL_S = 0.2
INITIAL_EVENTS = 10  # events shown first, without --since
MAX_EVENTS_PER_READ = 1000  # a backlog is read in pieces
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
INTERMEDIATE = ("processing", "archived")  # statuses shown only with --all

# status -> name in an event's line
EVENT_NAMES = {
    "pending": "new",
    "completed": "delivered",
    "failed": "refused",
    "written": "delivered",
}

WITH_REASON = (
    "read",
    "held",
    "bounced",
    "expired",
    "dead",
    "acked",
)  # shown with details

_EVENTS = """
SELECT a.id, a.at, a.what, a.old_status, a.new_status, a.attempt, m.message_id,
       m.agent_name, m.target, m.message_type, m.last_error,
       CASE WHEN instr(a.what, ' > ') THEN substr(a.what, instr(a.what, ' > ') + 3) END AS recipient
FROM audit_log AS a LEFT JOIN messages AS m ON m.message_id =
    CASE WHEN instr(a.what, ' > ') THEN substr(a.what, 1, instr(a.what, ' > ') - 1) ELSE a.what END
WHERE a.id > ? ORDER BY a.id LIMIT ?
"""
_SECURITY = "SELECT id, at, kind, agent, path, detail FROM security_events WHERE id > ? LIMIT ?"


@click.command(
    epilog="\b\nExamples:\n  relay tail\n  relay tail --agent bob\n"
    "  relay tail --since 1h --no-follow --json",
)
@home_option
@click.option("-f/ ", "--follow/--no-follow", default=True, help="Keep printing new events [yes].")
@click.option("--agent", metavar="NAME", help="Only messages from or to this agent.")
@click.option("--since", metavar="TIME", help="Start this long ago: 30s, 10m, 2h, 7d.")
@click.option("--all", "everything", is_flag=True, help="Also show intermediate states.")
@json_option
@click.pass_context
def tail(
    ctx: click.Context,
    home: str | None,
    follow: bool,
    agent: str | None,
    since: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show events as they happen, one line each.

    The relay need not be running. ^C ends it.
    """
    from relay.ledger import open_readonly

    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
    try:
        begin = None if since is None else max(0, time.time_ns() - _duration_ns(since))
        cursor, is_silent = EventCursor(db, begin), not as_json
        while True:
            found = cursor.read()
            for event in found:
                if (everything or event["status"] not in INTERMEDIATE) and _is_of(event, agent):
                    _show(event, as_json)
                    is_silent = False
            sys.stdout.flush()
            if not found and not follow:
                if is_silent:
                    click.echo("nothing found", err=True)
                return
            if not found:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        return
    finally:
        db.close()


class EventCursor:
    """Reading position in audit_log and security_events."""

    def __init__(self, db: sqlite3.Connection, since_ns: int | None) -> None:
        """Start at ``since_ns`` (Unix), or a few events before now."""
        self._db = db
        self._audit = self._begin("audit_log", since_ns)
        self._security = self._begin("security_events", since_ns)

    def _begin(self, table: str, since_ns: int | None) -> int:
        """Return the id to read after. Scans back from the newest row: ``at`` has no index."""
        if since_ns is None:
            query = f"SELECT coalesce(max(id), 0) - ? FROM {table}"
            return max(0, int(self._db.execute(query, (INITIAL_EVENTS,)).fetchone()[0]))
        row = self._db.execute(
            f"SELECT id FROM {table} WHERE at < ? ORDER BY id DESC LIMIT 1", (since_ns,)
        ).fetchone()
        return int(row[0]) if row else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events since the last call, oldest first."""
        rows = self._db.execute(_EVENTS, (self._audit, MAX_EVENTS_PER_READ)).fetchall()
        events = [*self._changes(rows), *self._security_events()]
        return sorted(events, key=itemgetter("at_ns"))

    def _changes(self, rows: list[sqlite3.Row]) -> Iterator[dict[str, Any]]:
        for row in rows:
            self._audit = row["id"]
            recipient = row["recipient"]
            new = row["new_status"]
            yield {
                "at_ns": row["at"],
                "event": EVENT_NAMES.get(new, new),
                "status": new,
                "before": row["old_status"],
                "message_id": row["message_id"] or row["what"],
                "from": row["agent_name"],
                "to": recipient or row["target"],
                "recipients": self._recipients(row) if new == "completed" else None,
                "kind": row["message_type"],
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
        if row["recipient"] is None or new not in WITH_REASON:
            return None
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
                "detail": f"{row['kind']}: {row['path'] or ''} {row['detail'] or ''}".strip(),
            }


def _is_of(event: dict[str, Any], agent: str | None) -> bool:
    named = (event["from"], event["to"], *(event["recipients"] or ()))
    return agent is None or agent in named


def _show(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        event = {"at": when(event["at_ns"]), **event}
        del event["at_ns"]
        echo_json(event)
        return
    at = (when(event["at_ns"]) or "")[:23] + "Z"
    to = ", ".join(event["recipients"] or ()) or event["to"]
    route = f"{event['from'] or '?'} -> {to}" if to else event["from"] or "?"
    parts = [at, f"{event['event']:<9}", event["message_id"] or "-", event["kind"] or "-", route]
    if event["detail"]:
        parts.append(f"({event['detail']})")
    click.echo(sanitize("  ".join(parts)))


def _duration_ns(text: str) -> int:
    """Parse ``30s``, ``10m``, ``2h``, ``7d`` as nanoseconds. Errors: BadParameter."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        raise click.BadParameter(
            f"invalid duration {text!r}: expected a number and s, m, h or d, as in 10m",
            param_hint="--since",
        )
    return int(match[1]) * UNITS[match[2]] * 1_000_000_000
