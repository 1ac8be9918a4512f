"""``relay ledger``: the ledger kept, put back and checked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from relay.cli.common import echo_json, home_option, json_option, open_home, printable
from relay.errors import EXIT_FINDINGS, FormatError

if TYPE_CHECKING:
    from relay.ledger_file import Content


@click.group(
    epilog="""\b
Examples:
  relay ledger backup /backup/ledger-monday.db
  relay ledger check /backup/ledger-monday.db
  relay down && relay ledger restore /backup/ledger-monday.db && relay up""",
)
def ledger() -> None:
    """Keep a copy of the ledger, put one back, check one."""


@ledger.command(epilog="\b\nExample:\n  relay ledger backup /backup/ledger-monday.db")
@home_option
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE, once the new copy is complete.")
@json_option
@click.pass_context
def backup(ctx: click.Context, home: str | None, file: str, force: bool, as_json: bool) -> None:
    """Copy the ledger to FILE while the relay goes on.

    The copy is of one instant, checked, and on the disk when this returns; it is one file of mode
    600. Until then FILE is as it was.
    """
    from relay import ledger_backup

    with open_home(ctx, home) as opened:
        content = ledger_backup.backup(opened, os.path.abspath(file), force=force)
    _say({"file": os.path.abspath(file)}, content, f"backed up to {file}", as_json)


@ledger.command(
    epilog="\b\nExamples:\n  relay ledger restore FILE\n"
    "  relay down && relay ledger restore FILE && relay up",
)
@home_option
@click.argument("file", type=click.Path())
@json_option
@click.pass_context
def restore(ctx: click.Context, home: str | None, file: str, as_json: bool) -> None:
    """Put a backup in the ledger's place; no relay may run.

    FILE is checked first. The ledger that was there is kept as ledger.db.before-restore. What
    happened after the backup is told again from the journal at the next start.
    """
    from relay import ledger_backup

    with open_home(ctx, home) as opened:
        restored = ledger_backup.restore(opened, os.path.abspath(file))
    kept = f", the ledger before is {restored.aside}" if restored.aside else ""
    facts = {"file": os.path.abspath(file), "aside": restored.aside or None}
    _say(facts, restored.content, f"restored from {file}{kept}", as_json)


@ledger.command(epilog="\b\nExample:\n  relay ledger check\n  relay ledger check FILE")
@home_option
@click.argument("file", type=click.Path(), required=False)
@json_option
@click.pass_context
def check(ctx: click.Context, home: str | None, file: str | None, as_json: bool) -> int:
    """Check the ledger, or a backup FILE, row by row and page by page; exit 3 for a damaged one."""
    from relay.home import LEDGER
    from relay.ledger_file import verify

    if file is None:
        with open_home(ctx, home) as opened:
            file = opened.path(LEDGER)
    try:
        content = verify(os.path.abspath(file))
    except FormatError as exc:
        if as_json:
            echo_json({"file": file, "problem": str(exc)})
        else:
            click.echo(printable(str(exc)))
        return EXIT_FINDINGS
    if as_json:
        _say({"file": file, "problem": None}, content, "", as_json)
    else:
        click.echo(f"OK: {content}")
    return 0


def _say(facts: dict[str, Any], content: Content, text: str, as_json: bool) -> None:
    if as_json:
        echo_json({**facts, "schema": content.version, "rows": content.counts})
    else:
        click.echo(printable(f"{text}: {content}"))
