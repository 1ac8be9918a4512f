"""``relay doctor``: everything that can be found wrong without changing anything."""

from __future__ import annotations

import click

from relay.cli.common import echo_json, home_option, json_option, open_home, printable
from relay.errors import EXIT_FINDINGS


@click.command(epilog="\b\nExamples:\n  relay doctor\n  relay doctor --json | jq -r .remedy")
@home_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, home: str | None, as_json: bool) -> int:
    """Look for what is wrong with the home: settings, store, journal, tiers, ledger.

    Prints a line for each finding and what to do, then how many there are, or OK. Exits 3 when
    there is one. Works beside a running relay; no file is changed.
    """
    from relay.doctor import examine

    count = 0
    with open_home(ctx, home) as opened:
        for finding in examine(opened):
            count += 1
            if as_json:
                echo_json(finding._asdict())
            else:
                click.echo(printable(str(finding)))
    if not as_json:
        click.echo(f"{count} problems found" if count else "OK")
    return EXIT_FINDINGS if count else 0
