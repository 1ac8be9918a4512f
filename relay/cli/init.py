"""``relay init`` and ``relay sh``."""

from __future__ import annotations

import os

import click

from relay.cli.common import echo_json, home_option, json_option, root_of


@click.command(
    epilog="\b\nExamples:\n  relay init\n  relay init --home /srv/team-relay",
)
@home_option
@json_option
@click.pass_context
def init(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """Make a relay home, or complete one.

    What is there stays: config.json, messages, the ledger. Modes are set to 700 and 600.
    """
    from relay.base import config
    from relay.base.home import LEDGER, Home
    from relay.ledger import Ledger

    root = root_of(ctx, home)
    existed = os.path.exists(os.path.join(root, LEDGER))
    with Home.create(root, config.encode(config.Config())) as made:
        Ledger.open(made.path(LEDGER)).close()
    if as_json:
        echo_json({"home": root, "created": not existed})
        return
    click.echo(f"{'completed' if existed else 'made'} {root}")
    click.echo("start the relay with `relay up`")


@click.command(
    epilog='\b\nExample:\n  . "$(relay sh)" && relay_send bob "hello"',
)
def sh() -> None:
    """Print the path of relay.sh, to be sourced by a shell."""
    import agent_sdk

    click.echo(os.path.join(os.path.dirname(agent_sdk.__file__), "relay.sh"))
