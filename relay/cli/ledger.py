"""``relay ledger``: back up, restore, rebuild, check and query the ledger; show its audit log."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import os
import signal
import sqlite3
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from relay.base.errors import EXIT_FINDINGS
from relay.base.home import LEDGER
from relay.base.text import json_line, visible
from relay.cli.common import (
    echo_json,
    home_option,
    json_option,
    open_home,
    print_rows,
    sanitize,
    when,
)
from relay.cli.history import parse_time
from relay.cli.ids import short_ids
from relay.cli.tables import cut, local_time, screen_columns, wide_option

if TYPE_CHECKING:
    from relay.ledger.file import LedgerContent


Rows = Iterator[tuple[Any, ...]]
POLL_S = 0.5
# Characters that are read before the first is printed: the transaction of a shorter result has
# ended when a pager shows it.
BLOCK = 4 << 20
TABLE_ROWS = 1_000  # of one table; its columns are as wide as the cells of these rows
# Rows of both tables with the same columns; agent: the sender of the message.
_ROWS = {
    "audit_log": """
        SELECT a.id, a.at, 'audit_log' AS source, a.what, a.old_status AS old,
               a.new_status AS new, a.who, a.attempt, NULL AS kind, m.agent_name AS agent,
               NULL AS path, NULL AS detail
        FROM audit_log AS a LEFT JOIN messages AS m
            ON m.message_id = substr(a.what, 1, instr(a.what || ' ', ' ') - 1)
        WHERE a.id > ? AND a.at >= ?""",
    "security_events": """
        SELECT id, at, 'security_events' AS source, NULL AS what, NULL AS old, NULL AS new,
               NULL AS who, NULL AS attempt, kind, agent, path, detail
        FROM security_events WHERE id > ? AND at >= ?""",
}
_OF_AGENT = {
    "audit_log": " AND (m.agent_name = ? OR substr(a.what, instr(a.what, ' > ') + 3) = ?)",
    "security_events": " AND (agent = ? OR agent = ?)",
}
_FIELDS = {
    "audit_log": ("what", "old", "new", "attempt", "who", "agent"),
    "security_events": ("kind", "agent", "path", "detail"),
}


@click.group(
    epilog="""\b
Examples:
  relay ledger backup /backup/ledger-monday.db
  relay ledger check /backup/ledger-monday.db
  relay down && relay ledger restore /backup/ledger-monday.db && relay up
  relay down; relay ledger rebuild && relay up
  relay ledger query "select status, count(*) from messages group by 1"
  relay ledger audit --security""",
)
def ledger() -> None:
    """Back up, restore, rebuild, check and query the ledger, show its changes."""


@ledger.command(epilog="\b\nExample:\n  relay ledger backup /backup/ledger-monday.db")
@home_option
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE when the new copy is complete.")
@json_option
@click.pass_context
def backup(ctx: click.Context, home: str | None, file: str, force: bool, as_json: bool) -> None:
    """Copy the ledger to FILE while the relay runs.

    The copy is a snapshot, checked and durable, in one file of mode 600. FILE is replaced when it
    is complete.
    """
    from relay.daemon import ledger_backup

    with open_home(ctx, home) as opened:
        content = ledger_backup.backup(opened, os.path.abspath(file), force=force)
    _say({"file": os.path.abspath(file)}, content, f"backed up to {file}", as_json)


@ledger.command(
    epilog="\b\nExamples:\n  relay ledger restore FILE\n"
    "  relay down && relay ledger restore FILE && relay up",
)
@home_option
@click.argument("file", type=click.Path())
@click.option("--force", is_flag=True, help="Accept the ledger of another home.")
@json_option
@click.pass_context
def restore(ctx: click.Context, home: str | None, file: str, force: bool, as_json: bool) -> None:
    """Replace the ledger by a backup; no relay may run.

    FILE is checked first. The previous ledger is kept as ledger.db.before-restore. Changes after
    the backup are replayed from the journal at the next start.
    """
    from relay.daemon import ledger_backup

    with open_home(ctx, home) as opened:
        restored = ledger_backup.restore(opened, os.path.abspath(file), force=force)
    kept = f", the previous ledger is {restored.aside}" if restored.aside else ""
    facts = {"file": os.path.abspath(file), "aside": restored.aside or None}
    _say(facts, restored.content, f"restored from {file}{kept}", as_json)


@ledger.command(epilog="\b\nExample:\n  relay ledger rebuild && relay up    # after `relay down`")
@home_option
@json_option
@click.pass_context
def rebuild(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """Rebuild the ledger from the journal; no relay may run.

    For a damaged ledger without a backup. The previous ledger is kept as
    ledger.db.before-rebuild; facts that are not in the journal are copied from it, as far as it is
    readable. A line is printed for each loss.
    """
    from relay.base import config as configuration
    from relay.base.clock import Clock
    from relay.daemon import ledger_backup

    with open_home(ctx, home) as opened:
        config = configuration.load(opened)
        done = ledger_backup.rebuild(opened, config, Clock(), lambda *_, **__: None)
    text = "rebuilt from the journal"
    text += f", the previous ledger is {done.aside}" if done.aside else ""
    facts = {"aside": done.aside or None, "kept": done.kept, "lost": list(done.lost)}
    _say(facts, done.content, text, as_json)
    if not as_json:
        for line in done.lost:
            click.echo(sanitize(f"not restored: {line}"))


@ledger.command(epilog="\b\nExample:\n  relay ledger check\n  relay ledger check FILE")
@home_option
@click.argument("file", type=click.Path(), required=False)
@json_option
@click.pass_context
def check(ctx: click.Context, home: str | None, file: str | None, as_json: bool) -> int:
    """Check the ledger, or a backup FILE, completely; exit 3 if it is damaged."""
    from relay.ledger.check import check_file

    if file is None:
        with open_home(ctx, home) as opened:
            file = opened.path(LEDGER)
    errors, content = check_file(os.path.abspath(file))
    if content is None:
        if as_json:
            echo_json({"file": file, "problem": "; ".join(one.text for one in errors)})
        for one in () if as_json else errors:
            click.echo(sanitize(one.text))
        return EXIT_FINDINGS
    if as_json:
        _say({"file": file, "problem": None}, content, "", as_json)
    else:
        click.echo(f"OK: {content}")
    return 0


@ledger.command(
    epilog="""\b
Examples:
  relay ledger query "select status, count(*) from messages group by 1"
  relay ledger query "select * from deliveries where state = 'dead'" --csv > dead.csv
  relay ledger query "select * from agents" --json""",
)
@home_option
@click.argument("sql")
@click.option("--json", "style", flag_value="json", help="JSON lines for programs.")
@click.option("--csv", "style", flag_value="csv", help="Comma-separated values with a header.")
@click.option("--table", "style", flag_value="table", help="A table for people; the default.")
@click.pass_context
def query(ctx: click.Context, home: str | None, sql: str, style: str | None) -> None:
    """Run one SQL statement that reads, also while the relay runs.

    Statements that write are refused. Binary values are X'…' in tables and CSV, and base64 in
    JSON. Large tables have a header every 1,000 rows.
    """
    from relay.ledger.inspect import open_for_queries, run_query

    with open_home(ctx, home) as opened, open_for_queries(opened.path(LEDGER)) as db, _killable():
        names, rows = run_query(db, sql)
        _print_blocks(_STYLES[style or "table"](names, rows), db.close)


@contextlib.contextmanager
def _killable() -> Iterator[None]:
    """Let ^C end the process at once.

    Python would handle it between two bytecodes: not inside a statement, and it loses an interrupt
    raised in a callback of SQLite. A process that reads leaves nothing to clean up.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _print_blocks(lines: Iterator[str], end: Callable[[], None]) -> None:
    """Print lines, a block at a time; call ``end`` when all lines are read."""
    has_more = True
    while has_more:
        block, size = [], 0
        for line in lines:
            block.append(line)
            size += len(line)
            if size > BLOCK:
                break
        else:
            has_more = False
            end()
        if block:
            click.echo("\n".join(block))


def _as_json(names: list[str], rows: Rows) -> Iterator[str]:
    from sqlite_utils.utils import dedupe_keys

    keys = dedupe_keys(names)
    for row in rows:
        yield json_line(dict(zip(keys, map(_json_value, row), strict=True)))


def _as_csv(names: list[str], rows: Rows) -> Iterator[str]:
    is_screen = sys.stdout.isatty()
    for row in itertools.chain([names], rows):
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(map(_cell, row))
        yield visible(text.getvalue(), keep="\n\t") if is_screen else text.getvalue()


def _as_table(names: list[str], rows: Rows) -> Iterator[str]:
    from tabulate import tabulate

    block = list(itertools.islice(rows, TABLE_ROWS))
    while True:
        cells = [[visible(str(_cell(value))) for value in row] for row in block]
        header = [visible(name) for name in names]
        yield str(tabulate(cells, header, tablefmt="simple", disable_numparse=True))
        block = list(itertools.islice(rows, TABLE_ROWS))
        if not block:
            return


def _cell(value: object) -> object:
    """A value for a table or CSV: binary ones as SQL writes them, NULL as an empty cell."""
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    return "" if value is None else value


def _json_value(value: object) -> object:
    """A value for JSON, which has neither bytes nor infinity."""
    if isinstance(value, bytes):
        return {"$base64": True, "encoded": b64encode(value).decode()}
    return str(value) if isinstance(value, float) and math.isinf(value) else value


_STYLES = {"json": _as_json, "csv": _as_csv, "table": _as_table}


@ledger.command(epilog="\b\nExample:\n  relay ledger tables")
@home_option
@json_option
@click.pass_context
def tables(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """List the tables and views with their numbers of rows and their columns."""
    from relay.ledger.inspect import list_tables, open_for_queries

    with open_home(ctx, home) as opened, open_for_queries(opened.path(LEDGER)) as db:
        found = list_tables(db)
    print_rows(
        [one._asdict() for one in found],
        ("NAME", "KIND", "ROWS", "COLUMNS"),
        lambda one: (one["name"], one["kind"], one["rows"], ", ".join(one["columns"])),
        as_json=as_json,
        nothing="nothing found",
    )


@ledger.command(epilog="\b\nExamples:\n  relay ledger schema\n  relay ledger schema deliveries")
@home_option
@click.argument("table", required=False)
@click.pass_context
def schema(ctx: click.Context, home: str | None, table: str | None) -> None:
    """Print the SQL of all tables, views, indexes and triggers, or of those of one TABLE."""
    from relay.ledger.inspect import open_for_queries, schema_of

    with open_home(ctx, home) as opened, open_for_queries(opened.path(LEDGER)) as db:
        click.echo(sanitize(schema_of(db, table), lines=True))


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
    "--since", metavar="TIME", help="Start at 2026-11-20T18:30 (UTC), or 30s, 10m, 2h, 1d ago."
)
@click.option(
    "--agent", metavar="NAME", help="Only messages from or to this agent, and its own events."
)
@click.option("--security", is_flag=True, help="Only security events.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Show at most this many, the newest.",
)
@click.option("--follow", is_flag=True, help="Keep printing new rows, until ^C.")
@wide_option
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
    wide: bool,
    as_json: bool,
) -> None:
    """Show status changes and security events, oldest first.

    Both tables are append-only: rows are never changed.
    """
    from relay.ledger.file import open_readonly

    begin_ns = parse_time(since, "--since") * 10**9 if since else 0
    tables = ("security_events",) if security else ("audit_log", "security_events")
    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
    try:
        last = dict.fromkeys(tables, 0)
        rows = _read(db, last, begin_ns, agent, newest=limit)
        while True:
            _show(rows, as_json, screen_columns(wide=wide))
            if not follow:
                if not rows and not as_json:
                    click.echo("nothing found", err=True)
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
    """Rows after ``last``, which is updated, by time."""
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


def _show(rows: Sequence[sqlite3.Row], as_json: bool, columns: int | None) -> None:
    if as_json:
        for row in rows:
            facts: dict[str, Any] = {"at": when(row["at"]), "source": row["source"]}
            echo_json(facts | {name: row[name] for name in ("id", *_FIELDS[row["source"]])})
        return
    short = short_ids(row["what"].partition(" > ")[0] for row in rows if row["what"])
    for row in rows:
        line = visible("  ".join((local_time(row["at"], precise=True), *_words(row, short))))
        click.echo(line if columns is None else cut(line, columns))


def _words(row: sqlite3.Row, short: dict[str, str]) -> Iterator[str]:
    if row["source"] == "audit_log":
        message_id, arrow, recipient = row["what"].partition(" > ")
        yield f"{short[message_id]}{arrow}{recipient}"
        attempt = f", attempt {row['attempt']}" if (row["attempt"] or 1) > 1 else ""
        yield f"{row['old'] or '-'} > {row['new']}{attempt}"
        yield f"({row['who'] or 'by hand'})"
    else:
        yield f"! {row['kind']}"
        yield row["agent"] or "-"
        yield row["detail"] or ""


def _say(facts: dict[str, Any], content: LedgerContent, text: str, as_json: bool) -> None:
    if as_json:
        echo_json({**facts, "schema": content.version, "rows": content.counts})
    else:
        click.echo(sanitize(f"{text}: {content}"))
