"""``relay ledger``: what the ledger keeps of the past."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import click

from relay.cli.common import echo_json, home_option, json_option, open_home, printable, when
from relay.cli.history import parse_time
from relay.home import LEDGER

POLL_S = 0.5
# Rows of both tables in one shape; of a message its sender, and whoever a delivery was for.
_ROWS = {
    "audit_log": """
        SELECT a.id, a.at, 'audit_log' AS source, a.what, a.old_status AS old,
               a.new_status AS new, a.who, NULL AS kind, m.agent_name AS agent, NULL AS path,
               NULL AS detail
        FROM audit_log AS a LEFT JOIN messages AS m
            ON m.message_id = substr(a.what, 1, instr(a.what || ' ', ' ') - 1)
        WHERE a.id > ? AND a.at >= ?""",
    "security_events": """
        SELECT id, at, 'security_events' AS source, NULL AS what, NULL AS old, NULL AS new,
               NULL AS who, kind, agent, path, detail
        FROM security_events WHERE id > ? AND at >= ?""",
}
_OF_AGENT = {
    "audit_log": " AND (m.agent_name = ? OR substr(a.what, instr(a.what, ' > ') + 3) = ?)",
    "security_events": " AND (agent = ? OR agent = ?)",
}
_FIELDS = {
    "audit_log": ("what", "old", "new", "who", "agent"),
    "security_events": ("kind", "agent", "path", "detail"),
}


@click.group(epilog="\b\nExamples:\n  relay ledger audit --security\n  relay ledger audit --follow")
def ledger() -> None:
    """Look into what the ledger keeps of the past."""


@ledger.command(
    epilog="""\b
Examples:
  relay ledger audit --since 10m
  relay ledger audit --agent alice --limit 20
  relay ledger audit --security --since 2026-11-20
  relay ledger audit --follow --json""",
)
@home_option
@click.option(
    "--since", metavar="TIME", help="From 2026-11-20T18:30 on (UTC), or from 30s, 10m, 2h ago."
)
@click.option("--agent", metavar="NAME", help="Of messages from it or for it, and of itself.")
@click.option("--security", is_flag=True, help="Security events alone.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="The newest.")
@click.option("--follow", is_flag=True, help="And what comes, until ^C.")
@json_option
@click.pass_context
def audit(
    ctx: click.Context,
    home: str | None,
    since: str | None,
    agent: str | None,
    security: bool,
    limit: int,
    follow: bool,
    as_json: bool,
) -> None:
    """Show every change of a status, and every security event, oldest first.

    Both tables are append-only: nothing in them is ever changed.
    """
    from relay.ledger import open_readonly

    begin_ns = parse_time(since, "--since") * 10**9 if since else 0
    tables = ("security_events",) if security else ("audit_log", "security_events")
    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
    try:
        last = dict.fromkeys(tables, 0)
        rows = _read(db, last, begin_ns, agent, newest=limit)
        while True:
            for row in rows:
                _show(row, as_json)
            if not follow:
                return
            time.sleep(POLL_S)
            rows = _read(db, last, begin_ns, agent)
    finally:
        db.close()


def _read(
    db: sqlite3.Connection,
    last: dict[str, int],
    begin_ns: int,
    agent: str | None,
    newest: int | None = None,
) -> list[sqlite3.Row]:
    """Rows behind ``last``, which is moved on, by time."""
    found: list[sqlite3.Row] = []
    for table, after in last.items():
        query = _ROWS[table]
        values: list[object] = [after, begin_ns]
        if agent is not None:
            query, values = query + _OF_AGENT[table], [*values, agent, agent]
        column = "a.id" if table == "audit_log" else "id"
        rows = db.execute(f"{query} ORDER BY {column} DESC LIMIT ?", [*values, newest or -1])
        found += rows.fetchall()
        last[table] = db.execute(f"SELECT coalesce(max(id), 0) FROM {table}").fetchone()[0]
    found.sort(key=lambda row: (row["at"], row["source"], row["id"]))
    return found[-newest:] if newest else found


def _show(row: sqlite3.Row, as_json: bool) -> None:
    if as_json:
        facts: dict[str, Any] = {"at": when(row["at"]), "source": row["source"], "id": row["id"]}
        echo_json(facts | {name: row[name] for name in _FIELDS[row["source"]]})
        return
    click.echo(f"{when(row['at'])}  {'  '.join(_words(row))}")


def _words(row: sqlite3.Row) -> Iterator[str]:
    if row["source"] == "audit_log":
        yield printable(row["what"]) or ""
        yield f"{row['old'] or '-'} > {row['new']}"
        yield f"({printable(row['who']) or 'by hand'})"
    else:
        yield f"! {printable(row['kind'])}"
        yield printable(row["agent"]) or "-"
        yield printable(row["detail"]) or ""
