"""``relay doctor``: everything that can be found wrong, and what of it is safe to mend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relay.base.errors import EXIT_FINDINGS
from relay.cli.common import (
    echo_json,
    home_option,
    json_option,
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
@click.option("--repair", "mend", is_flag=True, help="Do what is safe, and say what was done.")
@click.option("--deep", is_flag=True, help="Read every attachment and every packed day, too.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, home: str | None, mend: bool, deep: bool, as_json: bool) -> int:
    """Look for what is wrong with the home: settings, process, limits, files, store, journal,
    tiers, ledger, attachments.

    Prints a line for each finding and what to do, then how many problems there are, or OK; of a
    very large home it looks at a part, and says so. Exits 3 when there is a problem; notes count
    as none. Works beside a running relay; without --repair no file is changed. --repair narrows
    modes and removes what a crash left over, nothing else.
    """
    from relay.doctor import Severity, examine

    with open_home(ctx, home) as opened:
        if mend:
            _mend(opened, list(examine(opened, deep=deep)), as_json)
        problems, is_part = 0, False
        for finding in examine(opened, deep=deep):
            problems += finding.severity is not Severity.NOTE
            is_part |= finding.is_part
            if as_json:
                echo_json(_facts(finding))
            else:
                click.echo(sanitize(str(finding)))
    if not as_json:
        well = "OK, as far as was looked" if is_part else "OK"
        click.echo(f"{plural(problems, 'problem')} found" if problems else well)
    return EXIT_FINDINGS if problems else 0


def _mend(home: Home, findings: list[Finding], as_json: bool) -> None:
    from relay.doctor import repair

    for one, error in repair(home, findings):
        if as_json:
            echo_json({"repair": one.action, "path": one.path, "error": error or None})
        else:
            done = f"{one.action} {one.path}"
            click.echo(sanitize(f"not {done}: {error}" if error else done), err=bool(error))


def _facts(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "severity": str(finding.severity),
        "where": finding.where or None,
        "finding": finding.finding,
        "remedy": finding.remedy,
        "repairable": finding.repairable,
    }
