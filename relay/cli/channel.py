"""``relay channel``: show, create and change channels.

Channels are read from the store file; a change is a command to the relay, whose answer is printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import whole
from relay.cli.common import (
    command,
    complete_agents,
    complete_channels,
    echo_json,
    open_home,
    print_rows,
    sanitize,
)
from relay.cli.request import control_options, send_command
from relay.views.ids import short_ids
from relay.views.names import agent_not_found, channel_not_found
from relay.views.store import read_store

if TYPE_CHECKING:
    from relay.acomm.model import Channel
    from relay.engine.engine import Engine

MOST_PENDING = 10  # named
TYPES = ("group", "broadcast", "pubsub", "direct")
agent_option = click.option(
    "--agent",
    "other",
    metavar="NAME",
    shell_complete=complete_agents,
    help="Act on this agent instead of yourself.",
)


@click.group(
    epilog="""\b
Examples:
  relay channel create ci --type pubsub ack_timeout=30s
  relay channel show ci
  relay channel pause ci && relay channel resume ci""",
)
def channel() -> None:
    """Show, create and change channels."""


@command("list", of=channel, epilog="\b\nExample:\n  relay channel list --all")
@click.option("--all", "everything", is_flag=True, help="Include channels between two agents.")
def list_(ctx: click.Context, home: str | None, everything: bool, as_json: bool) -> None:
    """List the channels."""
    with open_home(ctx, home) as opened:
        store = read_store(opened)
    rows = [
        {
            "name": channel.name,
            "type": channel.channel_type.label,
            "state": channel.state.label,
            "owner": channel.owner,
            "participants": len(channel.participants),
            "messages": store.channels.get(channel.id).message_count,
        }
        for channel in store.channels.list_all()
        if everything or not channel.name.startswith("dm/")
    ]
    print_rows(
        rows,
        ("NAME", "TYPE", "STATE", "OWNER", "PARTICIPANTS", "MESSAGES"),
        dict.values,
        as_json=as_json,
        nothing="no channels; `relay channel create NAME` creates one",
    )


@command(of=channel, epilog="\b\nExample:\n  relay channel show ci")
@click.argument("name", shell_complete=complete_channels)
def show(ctx: click.Context, home: str | None, name: str, as_json: bool) -> None:
    """Show one channel: participants, subscriptions, settings."""
    with open_home(ctx, home) as opened:
        store = read_store(opened)
    found = store.channels.find_by_name(name.removeprefix("#"))
    if found is None:
        raise channel_not_found(name, [channel.name for channel in store.channels.list_all()])
    facts = _facts(store, found)
    if as_json:
        echo_json(facts)
        return
    for label in ("name", "type", "state", "owner", "messages"):
        click.echo(sanitize(f"{label:<13}{facts[label]}"))
    if found.description is not None:
        click.echo(f"{'description':<13}{sanitize(found.description)}")
    if found.tags:
        click.echo(f"{'tags':<13}{sanitize(', '.join(found.tags))}")
    for member, role in facts["participants"].items():
        click.echo(sanitize(f"{'participant':<13}{member} ({role})"))
    for subscription in facts["subscriptions"]:
        where = f" where {subscription['filter']}" if subscription["filter"] else ""
        shown = f"{'subscription':<13}{subscription['subscriber']} {subscription['pattern']}{where}"
        click.echo(sanitize(shown))
    if pending := facts["pending"]:
        short = [*short_ids(pending).values()][:MOST_PENDING]
        more = f" and {len(pending) - len(short)} more" if len(pending) > len(short) else ""
        click.echo(f"{'pending':<13}{', '.join(short)}{more}")
    for setting, value in facts["settings"].items():
        click.echo(sanitize(f"{'setting':<13}{setting}={_said(value)}"))


def _facts(store: Engine, found: Channel) -> dict[str, Any]:
    from relay.delivery.channel_fields import SETTINGS, in_words

    config, pending = found.config, None
    counted = store.state.pending.pending.get(found.id)  # where max_pending is set
    if counted is not None:
        pending = [store.state.messages[number].relay_id for number in sorted(counted)]
    return {
        "name": found.name,
        "type": found.channel_type.label,
        "state": found.state.label,
        "owner": found.owner,
        "messages": store.channels.get(found.id).message_count,
        "description": found.description,
        "tags": list(found.tags),
        "delivery": config.delivery.label,
        "ack_timeout_s": config.ack_timeout,
        "max_retries": config.max_retries,
        "participants": {member.id: member.role.label for member in found.participants},
        "subscriptions": [
            {
                "subscriber": subscription.subscriber,
                "pattern": subscription.topic_pattern,
                "filter": in_words(subscription.filter) or None,
            }
            for subscription in store.channels.subscriptions(found.id)
        ],
        "pending": pending,
        "settings": {
            name: _plain(getattr(values, name))
            for values in (config, store.channels.settings(found.id))
            for name in values.__struct_fields__
            if name in SETTINGS
        },
    }


def _plain(value: Any) -> Any:
    """Convert a setting's value to the form ``config`` accepts."""
    from relay.acomm.model import DeliveryMode, Retention
    from relay.base.message import DELIVERY_MODES

    if isinstance(value, DeliveryMode):
        return DELIVERY_MODES[value]
    if isinstance(value, Retention):
        amount = f" {value.amount}" if value.amount else ""
        return f"{value.kind.name.lower()}{amount}"
    return value


def _said(value: object) -> str:
    return str(value).lower()  # true, false, none


@channel.command(
    epilog="""\b
Examples:
  relay channel create team
  relay channel create ci --type pubsub --owner builder ack_timeout=30s
  relay channel create news --type broadcast retention='count 1000'""",
)
@control_options
@click.argument("name")
@click.argument("settings", metavar="[SETTING=VALUE]...", nargs=-1)
@click.option("--type", "kind", type=click.Choice(TYPES), default="group", show_default=True)
@click.option("--owner", metavar="NAME", shell_complete=complete_agents, help="Owner [yourself].")
def create(
    ctx: click.Context,
    /,
    name: str,
    settings: tuple[str, ...],
    kind: str,
    owner: str | None,
    **caller: Any,
) -> None:
    """Create a channel; its owner becomes a participant.

    Creating the same channel again changes nothing. `relay channel config --help` lists the
    settings.
    """
    check_agent(ctx, caller["home"], owner)
    fields = {"CHANNEL": name, "TYPE": kind, "OWNER": owner} | _pairs(settings)
    send_command(ctx, "channel.create", fields, **caller)


@channel.command(
    epilog="\b\nExamples:\n  relay channel join team --as alice\n"
    "  relay channel join team --agent bob"
)
@control_options
@click.argument("name", shell_complete=complete_channels)
@agent_option
def join(ctx: click.Context, /, name: str, other: str | None, **caller: Any) -> None:
    """Join a channel."""
    check_agent(ctx, caller["home"], other)
    send_command(ctx, "channel.join", {"CHANNEL": name, "AGENT": other}, **caller)


@channel.command(epilog="\b\nExample:\n  relay channel leave team --agent bob")
@control_options
@click.argument("name", shell_complete=complete_channels)
@agent_option
def leave(ctx: click.Context, /, name: str, other: str | None, **caller: Any) -> None:
    """Leave a channel; its subscriptions there end."""
    send_command(ctx, "channel.leave", {"CHANNEL": name, "AGENT": other}, **caller)


@channel.command(epilog="\b\nExample:\n  relay channel subscribe ci 'build.#' --agent bob")
@control_options
@click.argument("name", shell_complete=complete_channels)
@click.argument("pattern")
@click.option(
    "--filter",
    "wanted",
    metavar="WORDS",
    help="Only messages that match: 'sender=ci type=Command,Query priority=0,1 match=REGEX'.",
)
@agent_option
def subscribe(
    ctx: click.Context,
    /,
    name: str,
    pattern: str,
    wanted: str | None,
    other: str | None,
    **caller: Any,
) -> None:
    """Receive messages on topics that match PATTERN.

    `*` matches one word, `#` at the end any number of words. Subscribing again replaces the
    filter.
    """
    check_agent(ctx, caller["home"], other)
    fields = {"CHANNEL": name, "PATTERN": pattern, "FILTER": wanted, "AGENT": other}
    send_command(ctx, "channel.subscribe", fields, **caller)


@channel.command(
    epilog="\b\nExamples:\n  relay channel unsubscribe ci 'build.#'\n"
    "  relay channel unsubscribe ci --agent bob    # all subscriptions"
)
@control_options
@click.argument("name", shell_complete=complete_channels)
@click.argument("pattern", required=False)
@agent_option
def unsubscribe(
    ctx: click.Context, /, name: str, pattern: str | None, other: str | None, **caller: Any
) -> None:
    """End one subscription, or all."""
    fields = {"CHANNEL": name, "PATTERN": pattern, "AGENT": other}
    send_command(ctx, "channel.unsubscribe", fields, **caller)


@channel.command(
    epilog="""\b
Settings:
  delivery=at-most-once|at-least-once|exactly-once
  ack_timeout=DURATION   max_retries=N          retry_backoff_ms=MS
  max_message_size=BYTES max_participants=N     max_pending=N
  retention=forever | 'duration 1h' | 'count MESSAGES' | 'size BYTES'
  echo, sticky_messages, priority_ordering = true | false
  description=TEXT       tags=ci,build
  none unsets an optional setting: ack_timeout=none

\b
Examples:
  relay channel config ci delivery=at-least-once ack_timeout=30s
  relay channel config ci retention='duration 1h' max_participants=none""",
)
@control_options
@click.argument("name", shell_complete=complete_channels)
@click.argument("settings", metavar="SETTING=VALUE...", nargs=-1, required=True)
def config(ctx: click.Context, /, name: str, settings: tuple[str, ...], **caller: Any) -> None:
    """Change settings of a channel; `relay channel show` prints the current ones."""
    send_command(ctx, "channel.config", {"CHANNEL": name} | _pairs(settings), **caller)


def _pairs(settings: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier() or name != name.lower() or name in pairs:
            why = "given twice" if name in pairs else "not SETTING=VALUE"
            raise click.BadParameter(f"{setting!r} is {why}", param_hint="SETTING=VALUE")
        pairs[name] = _in_its_unit(name, value)
    return pairs


def _in_its_unit(name: str, value: str) -> str:
    """A duration as the number that the relay takes; what is none is refused by it."""
    unit = {"ack_timeout": "s", "retry_backoff_ms": "ms", "retention": "s"}.get(name)
    word, gap, amount = value.partition(" ") if name == "retention" else ("", "", value)
    with contextlib.suppress(ValueError):
        return f"{word}{gap}{whole(amount, unit)}" if unit and word in ("", "duration") else value
    return value


def _state_command(verb: str, says: str) -> click.Command:
    """Make the command ``pause``, ``resume``, ``drain`` or ``close``."""

    @click.command(verb, help=says, epilog=f"\b\nExample:\n  relay channel {verb} ci")
    @control_options
    @click.argument("name", shell_complete=complete_channels)
    def change(ctx: click.Context, /, name: str, **caller: Any) -> None:
        send_command(ctx, f"channel.{verb}", {"CHANNEL": name}, **caller)

    return change


for _verb, _says in {
    "pause": "Accept no new messages in a channel until it is resumed.",
    "resume": "Accept messages again in a paused or draining channel.",
    "drain": "Accept no new messages in a channel, but deliver pending ones.",
    "close": "Close a channel permanently: its name cannot be used again.",
}.items():
    channel.add_command(_state_command(_verb, _says))


def check_agent(ctx: click.Context, home: str | None, name: str | None) -> None:
    """Require that the agent exists, if a name is given. Errors: NotFound."""
    if name is not None:
        with open_home(ctx, home) as opened:
            if name not in opened.agent_inodes():
                raise agent_not_found(opened, name)
