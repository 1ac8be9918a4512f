"""``relay doctor``: report problems of a home, and repair what is safe to repair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relay.base.errors import EXIT_FINDINGS
from relay.cli.common import (
    echo_json,
    home_option,
    json_option,
    name_home,
    open_home,
    plural,
    sanitize,
)

if TYPE_CHECKING:
    from relay.base.home import Home
    from relay.doctor import Finding


@click.command(
    epilog="\b\nExamples:\n  relay doctor\n  relay doctor --repair\n"
    "  relay doctor --json | jq -r .remedy"
)
@home_option
@click.option("--repair", "do_repair", is_flag=True, help="Apply the safe repairs and report them.")
@click.option("--deep", is_flag=True, help="Also read every attachment and archive.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, home: str | None, do_repair: bool, deep: bool, as_json: bool) -> int:
    """Check the home for problems: settings, process, limits, files, store, journal, tiers,
    ledger, attachments.

    Prints one line per finding with what to do, then the number of problems, or OK. Of a very
    large home it checks a part, and says so. Exits 3 if there is a problem; notes do not count.
    The relay may be running. Without --repair no file is changed; --repair only restricts file
    modes and removes leftovers of crashes.
    """
    from relay.doctor import Severity, examine

    with open_home(ctx, home) as opened:
        if do_repair:
            _repair(opened, list(examine(opened, deep=deep)), as_json)
        problems, is_part = 0, False
        for finding in examine(opened, deep=deep):
            problems += finding.severity is not Severity.NOTE
            is_part |= finding.is_partial
            if as_json:
                echo_json(_facts(finding))
            else:
                click.echo(sanitize(name_home(str(finding))))
    if not as_json:
        well = "OK, as far as checked" if is_part else "OK"
        click.echo(f"{plural(problems, 'problem')} found" if problems else well)
    return EXIT_FINDINGS if problems else 0


def _repair(home: Home, findings: list[Finding], as_json: bool) -> None:
    from relay.doctor import repair

    for one, error in repair(home, findings):
        if as_json:
            echo_json({"repair": one.action, "path": one.path, "error": error or None})
        else:
            done = f"{one.action} {one.path}"
            click.echo(sanitize(f"not {done}: {error}" if error else done), err=bool(error))


def _facts(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.what,
        "severity": str(finding.severity),
        "where": finding.where or None,
        "finding": finding.text,
        "remedy": name_home(finding.advice),
        "repairable": bool(finding.repairs),
    }
