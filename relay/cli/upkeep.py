"""``relay backup``, ``restore``, ``prune`` and ``ledger``: copies, what is too old, queries."""

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

from relay.base.clock import Clock
from relay.base.config import load
from relay.base.home import LEDGER, is_served
from relay.base.text import json_line, visible
from relay.cli.common import (
    check_no_home_file,
    command,
    hold_lock,
    open_home,
    plural,
    print_rows,
    root_of,
    sanitize,
    say,
    when,
)
from relay.cli.request import control_options, send_command
from relay.cli.tables import table_lines
from relay.views.times import local_iso

if TYPE_CHECKING:
    from relay.daemon.home_backup import BackupManifest
    from relay.daemon.prune import Pruned
    from relay.ledger.file import LedgerContent

MIB = 1 << 20
Rows = Iterator[tuple[Any, ...]]
# Characters that are read before the first is printed: the transaction of a shorter result has
# ended when a pager shows it.
BLOCK = 4 << 20
TABLE_ROWS = 1_000  # of one table; its columns are as wide as the cells of these rows


@command(epilog="\b\nExample:\n  relay backup /backup/monday")
@click.argument("directory", metavar="DIR", type=click.Path())
def backup(ctx: click.Context, home: str | None, directory: str, as_json: bool) -> None:
    """Copy the whole home to the new directory DIR; the relay may be running.

    Contains ledger, store, journal, mailboxes, archive, attachments, saved states, keys and
    config.json, but not the logs. It includes private keys: protect it like the home. DIR appears
    only when the copy is complete.
    """
    from relay.daemon import home_backup

    with open_home(ctx, home) as opened:
        manifest, left_out = home_backup.backup(opened, load(opened), Clock(), directory)
    text = f"backed up to {directory}: {_sizes(manifest)}, keys among them"
    left = "".join(f"\nleft out: {sanitize(line)}" for line in left_out)
    facts = _facts(manifest) | {"left_out": left_out}
    say(text + left, {"directory": directory, **facts}, as_json)


@command(
    epilog="\b\nExamples:\n  relay restore /backup/monday\n"
    "  relay --home ~/other restore /backup/monday\n"
    "  relay down; relay restore --force /backup/monday && relay up"
)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--force", is_flag=True, help="Replace an existing home; the old one is kept.")
def restore(
    ctx: click.Context, home: str | None, directory: str, force: bool, as_json: bool
) -> None:
    """Replace the home with the backup DIR; the relay must be stopped.

    Every file is checked against the backup's list before anything is changed. An existing home is
    kept as HOME.before-restore. Never run a home and its copy at the same time.
    """
    from relay.daemon import home_restore

    root = root_of(ctx, home)
    manifest, aside = home_restore.restore(directory, root, force=force)
    kept = f"; the previous home is now {aside}" if aside else ""
    at = f"as it was at {manifest.at}"
    facts = {"home": root, "aside": aside or None, **_facts(manifest)}
    say(f"restored {root} {at}: {_sizes(manifest)}{kept}", facts, as_json)


def _facts(manifest: BackupManifest) -> dict[str, object]:
    return {
        "at": manifest.at,
        "home_id": manifest.home_id,
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files),
    }


def _sizes(manifest: BackupManifest) -> str:
    size = sum(file.size for file in manifest.files)
    return f"{plural(len(manifest.files), 'file')}, {size / MIB:.1f} MiB"


@click.command(epilog="\b\nExamples:\n  relay prune --dry-run\n  relay prune")
@control_options
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
def prune(ctx: click.Context, /, dry_run: bool, **caller: Any) -> None:
    """Remove data that has expired by the `retention` settings.

    That is: the archive, messages that agents have read, refused files, logs of agents that are
    gone, attachments that nothing names or that were never finished, old rows of audit_log. A
    running relay does this every hour. NEXT says what goes next by its age, and when.
    """
    from agent_sdk import Timeout
    from relay.daemon.housekeeper import run_retention

    with open_home(ctx, caller["home"]) as home:
        config = load(home)
        if dry_run:
            _show(run_retention(home, config, Clock(), dry_run=True), caller["as_json"])
            return
        if not is_served(home):
            with hold_lock(home):
                _show(run_retention(home, config, Clock()), caller["as_json"])
            return
    try:
        send_command(ctx, "prune", {}, **caller)
    except Timeout as exc:
        hint = "the result comes as a message, `relay inbox` shows it"
        raise Timeout(str(exc), message_id=exc.message_id, hint=hint) from exc


def _show(found: list[Pruned], as_json: bool) -> None:
    # A run that removes things does not look for what goes later.
    next_ = ("NEXT",) if any(pruned.next_ns for pruned in found) else ()
    rows = [
        {
            "kind": pruned.kind,
            "count": pruned.number,
            "bytes": pruned.n_bytes,
            "oldest": when(pruned.oldest_ns),
            "newest": when(pruned.newest_ns),
            "next_count": pruned.next_number,
            "next_at": when(pruned.next_ns),
        }
        for pruned in found
    ]
    header = ("KIND", "COUNT", "BYTES", "OLDEST", "NEWEST", *next_)
    print_rows(rows, header, lambda row: _cells(row)[: len(header)], as_json=as_json, nothing="")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    oldest, newest, due = (local_iso(row[key]) for key in ("oldest", "newest", "next_at"))
    coming = f"{row['next_count']} on {due}" if due else None
    return (row["kind"], row["count"], row["bytes"], oldest, newest, coming)


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


@command("backup", of=ledger, epilog="\b\nExample:\n  relay ledger backup /backup/ledger-monday.db")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE when the new copy is complete.")
def backup_ledger(
    ctx: click.Context, home: str | None, file: str, force: bool, as_json: bool
) -> None:
    """Copy the ledger to FILE while the relay runs.

    The copy is a snapshot, checked and durable, in one file of mode 600. FILE is replaced when it
    is complete.
    """
    from relay.daemon import ledger_backup

    with open_home(ctx, home) as opened:
        check_no_home_file(file)
        content = ledger_backup.backup(opened, os.path.abspath(file), force=force)
    _say_ledger({"file": os.path.abspath(file)}, content, f"backed up to {file}", as_json)


@command(
    "restore",
    of=ledger,
    epilog="\b\nExamples:\n  relay ledger restore FILE\n"
    "  relay down && relay ledger restore FILE && relay up",
)
@click.argument("file", type=click.Path())
@click.option("--force", is_flag=True, help="Accept the ledger of another home.")
def restore_ledger(
    ctx: click.Context, home: str | None, file: str, force: bool, as_json: bool
) -> None:
    """Replace the ledger by a backup; no relay may run.

    FILE is checked first. The previous ledger is kept as ledger.db.before-restore. Changes after
    the backup are replayed from the journal at the next start.
    """
    from relay.daemon import ledger_backup

    with open_home(ctx, home) as opened:
        content, aside = ledger_backup.restore(opened, os.path.abspath(file), force=force)
    kept = f", the previous ledger is {aside}" if aside else ""
    facts = {"file": os.path.abspath(file), "aside": aside or None}
    _say_ledger(facts, content, f"restored from {file}{kept}", as_json)


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
        done = ledger_backup.rebuild(opened, load(opened), Clock(), lambda *_, **__: None)
    kept = f", the previous ledger is {done.aside}" if done.aside else ""
    text = "".join(f"\nnot restored: {sanitize(line)}" for line in done.lost)
    facts = {"aside": done.aside or None, "kept": done.kept, "lost": list(done.lost)}
    _say_ledger(facts, done.content, f"rebuilt from the journal{kept}", as_json, text)


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
    header, cells = [visible(name) for name in names], (list(map(cell, row)) for row in rows)
    block = list(itertools.islice(cells, TABLE_ROWS))
    while True:
        yield from table_lines(header, block, None)
        if not (block := list(itertools.islice(cells, TABLE_ROWS))):
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


def _say_ledger(
    facts: dict[str, Any], content: LedgerContent, text: str, as_json: bool, more: str = ""
) -> None:
    say(
        f"{text}: {content}{more}",
        {**facts, "schema": content.version, "rows": content.counts},
        as_json,
    )
