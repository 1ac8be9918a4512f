"""``relay channel``: what channels there are. As of the store's last flush."""

from __future__ import annotations

from typing import Any

import click

from relay.cli.common import columns, echo_json, home_option, json_option, open_home
from relay.cli.history import read_store


@click.group()
def channel() -> None:
    """Show channels, and who takes part in them."""


@channel.command("list", epilog="\b\nExample:\n  relay channel list --all")
@home_option
@click.option("--all", "everything", is_flag=True, help="Those between two agents as well.")
@json_option
@click.pass_context
def list_(ctx: click.Context, home: str | None, everything: bool, as_json: bool) -> None:
    """List the channels there are."""
    with open_home(ctx, home) as opened:
        store = read_store(opened)
    rows = [
        {
            "name": one.name,
            "type": one.channel_type.label,
            "state": one.state.label,
            "owner": one.owner,
            "participants": len(one.participants),
            "messages": store.message_count(one.id),
        }
        for one in store.list_channels()
        if everything or one.channel_type.label != "Direct"
    ]
    if as_json:
        for row in rows:
            echo_json(row)
    elif rows:
        header = tuple(name.upper() for name in rows[0])
        columns(header, [tuple(row.values()) for row in rows])
    else:
        click.echo("no channels; an agent makes one with KIND join or subscribe", err=True)


@channel.command(epilog="\b\nExample:\n  relay channel show ci")
@home_option
@click.argument("name")
@json_option
@click.pass_context
def show(ctx: click.Context, home: str | None, name: str, as_json: bool) -> None:
    """Show one channel: participants, subscriptions, settings."""
    from relay.errors import ChannelNotFound

    with open_home(ctx, home) as opened:
        store = read_store(opened)
    found = store.get_channel_by_name(name.removeprefix("#"))
    if found is None:
        raise ChannelNotFound(f"there is no channel {name}", hint="`relay channel list --all`")
    config = found.config
    facts: dict[str, Any] = {
        "name": found.name,
        "type": found.channel_type.label,
        "state": found.state.label,
        "owner": found.owner,
        "messages": store.message_count(found.id),
        "delivery": config.delivery.label,
        "ack_timeout_s": config.ack_timeout,
        "max_retries": config.max_retries,
        "participants": {member.id: member.role.label for member in found.participants},
        "subscriptions": [
            {"subscriber": one.subscriber, "pattern": one.topic_pattern}
            for one in store.state.subscriptions.values()
            if one.channel_id == found.id
        ],
    }
    if as_json:
        echo_json(facts)
        return
    for label in ("name", "type", "state", "owner", "messages", "delivery"):
        click.echo(f"{label:<13}{facts[label]}")
    for member, role in facts["participants"].items():
        click.echo(f"{'participant':<13}{member} ({role})")
    for one in facts["subscriptions"]:
        click.echo(f"{'subscription':<13}{one['subscriber']} {one['pattern']}")
