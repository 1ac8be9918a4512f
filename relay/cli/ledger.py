"""``relay ledger``: back up, restore, rebuild and query the ledger."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import os
import signal
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from relay.base import config as configuration
from relay.base.clock import Clock
from relay.base.home import LEDGER
from relay.base.text import json_line, visible
from relay.cli.common import (
    command,
    echo_json,
    open_home,
    sanitize,
)

if TYPE_CHECKING:
    from relay.ledger.file import LedgerContent


Rows = Iterator[tuple[Any, ...]]
# Characters that are read before the first is printed: the transaction of a shorter result has
# ended when a pager shows it.
BLOCK = 4 << 20
TABLE_ROWS = 1_000  # of one table; its columns are as wide as the cells of these rows


@click.group(
    epilog="""\b
Examples:
  relay ledger backup /backup/ledger-monday.db
  relay down && relay ledger restore /backup/ledger-monday.db && relay up
  relay down; relay ledger rebuild && relay up
  relay ledger query "select status, count(*) from messages group by 1\"""",
)
def ledger() -> None:
    """Back up, restore, rebuild and query the ledger."""


@command(of=ledger, epilog="\b\nExample:\n  relay ledger backup /backup/ledger-monday.db")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE when the new copy is complete.")
def backup(ctx: click.Context, home: str | None, file: str, force: bool, as_json: bool) -> None:
    """Copy the ledger to FILE while the relay runs.

    The copy is a snapshot, checked and durable, in one file of mode 600. FILE is replaced when it
    is complete.
    """
    from relay.daemon import ledger_backup

    with open_home(ctx, home) as opened:
        content = ledger_backup.backup(opened, os.path.abspath(file), force=force)
    _say({"file": os.path.abspath(file)}, content, f"backed up to {file}", as_json)


@command(
    of=ledger,
    epilog="\b\nExamples:\n  relay ledger restore FILE\n"
    "  relay down && relay ledger restore FILE && relay up",
)
@click.argument("file", type=click.Path())
@click.option("--force", is_flag=True, help="Accept the ledger of another home.")
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


@command(
    of=ledger,
    epilog="""\b
Example:
  relay ledger rebuild && relay up    # after `relay down`""",
)
def rebuild(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """Rebuild the ledger from the journal; no relay may run.

    For a damaged ledger without a backup. The previous ledger is kept as
    ledger.db.before-rebuild; facts that are not in the journal are copied from it, as far as it is
    readable. A line is printed for each loss.
    """
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


@command(
    of=ledger,
    json=False,
    epilog="""\b
Examples:
  relay ledger query "select status, count(*) from messages group by 1"
  relay ledger query "select * from deliveries where state = 'dead'" --csv > dead.csv
  relay ledger query "select sql from sqlite_master"        # the tables and their columns""",
)
@click.argument("sql")
@click.option("--json", "style", flag_value="json", help="JSON lines for programs.")
@click.option("--csv", "style", flag_value="csv", help="Comma-separated values with a header.")
@click.option("--table", "style", flag_value="table", help="A table for people; the default.")
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
        yield json_line(dict(zip(keys, map(json_value, row), strict=True)))


def _as_csv(names: list[str], rows: Rows) -> Iterator[str]:
    is_screen = sys.stdout.isatty()
    for row in itertools.chain([names], rows):
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(map(cell, row))
        yield visible(text.getvalue(), keep="\n\t") if is_screen else text.getvalue()


def _as_table(names: list[str], rows: Rows) -> Iterator[str]:
    from tabulate import tabulate

    block = list(itertools.islice(rows, TABLE_ROWS))
    while True:
        cells = [[visible(str(cell(value))) for value in row] for row in block]
        header = [visible(name) for name in names]
        yield str(tabulate(cells, header, tablefmt="simple", disable_numparse=True))
        block = list(itertools.islice(rows, TABLE_ROWS))
        if not block:
            return


def cell(value: object) -> object:
    """A value for a table or CSV: binary ones as SQL writes them, NULL as an empty cell."""
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    return "" if value is None else value


def json_value(value: object) -> object:
    """A value for JSON, which has neither bytes nor infinity."""
    if isinstance(value, bytes):
        return {"$base64": True, "encoded": b64encode(value).decode()}
    return str(value) if isinstance(value, float) and math.isinf(value) else value


_STYLES = {"json": _as_json, "csv": _as_csv, "table": _as_table}


def _say(facts: dict[str, Any], content: LedgerContent, text: str, as_json: bool) -> None:
    if as_json:
        echo_json({**facts, "schema": content.version, "rows": content.counts})
    else:
        click.echo(sanitize(f"{text}: {content}"))
