"""``relay dead``: dead letters; replay, discard and purge are commands to the relay."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import click

from relay.base.errors import InvalidName, NotFound
from relay.cli.common import AGE, command, open_home
from relay.cli.listing import MOST, list_messages
from relay.cli.request import control_options, send_command
from relay.cli.tables import wide_option
from relay.views.ids import resolve_id


@click.group(
    epilog="""\b
Examples:
  relay dead list
  relay dead replay 1706123456789012345-a1b2c3d4
  relay dead purge --older-than 7d""",
)
def dead() -> None:
    """Show dead letters, replay or discard them.

    A message becomes a dead letter for a recipient that has not acknowledged it after the last
    attempt.
    """


@command("list", of=dead, epilog="\b\nExample:\n  relay dead list --json | jq -r .id")
@wide_option
def list_dead(ctx: click.Context, home: str | None, wide: bool, as_json: bool) -> None:
    """List dead letters, oldest first: `relay list is:dead sort:oldest`."""
    from relay.search.query import Query

    query = Query(states=("dead",), sort="oldest")
    list_messages(ctx, home, query, "no dead letters", limit=MOST, wide=wide, as_json=as_json)


@dead.command(epilog="\b\nExample:\n  relay dead replay 1706123456789012345-a1b2c3d4")
@control_options
@click.argument("message_id", metavar="ID")
def replay(ctx: click.Context, /, message_id: str, **caller: Any) -> None:
    """Deliver a dead letter again, to the recipients for whom it is dead.

    In a paused channel it waits; a draining or closed channel refuses it.
    """
    send_command(ctx, "dead.replay", {"ID": _whole_id(ctx, caller, message_id)}, **caller)


def _whole_id(ctx: click.Context, caller: Mapping[str, Any], given: str) -> str:
    """Return the whole id; what names no message goes to the relay as it is, which refuses it."""
    with open_home(ctx, caller["home"]) as opened, contextlib.suppress(NotFound, InvalidName):
        return resolve_id(opened, given)
    return given


@dead.command(epilog="\b\nExample:\n  relay dead discard 1706123456789012345-a1b2c3d4")
@control_options
@click.argument("message_id", metavar="ID")
def discard(ctx: click.Context, /, message_id: str, **caller: Any) -> None:
    """Discard a dead letter permanently."""
    send_command(ctx, "dead.discard", {"ID": _whole_id(ctx, caller, message_id)}, **caller)


@dead.command(epilog="\b\nExample:\n  relay dead purge --older-than 7d")
@control_options
@click.option("--older-than", required=True, type=AGE, help="10m, 2h or 7d; 0s: all.")
def purge(ctx: click.Context, /, older_than: float, **caller: Any) -> None:
    """Discard all dead letters older than this. The unit is required: it cannot be undone."""
    send_command(ctx, "dead.purge", {"OLDER_THAN": math.ceil(older_than)}, **caller)
