"""``relay dead``: dead letters, from the store file; replay, discard and purge are commands."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import NS_PER_S, iso_time
from relay.base.errors import InvalidName, NotFound
from relay.cli.common import (
    AGE,
    command,
    echo_json,
    open_home,
    print_rows,
    sanitize,
)
from relay.cli.request import control_options, send_command
from relay.cli.tables import wide_option
from relay.views.ids import begins, resolve_id, short_ids
from relay.views.store import read_store, stored_facts
from relay.views.times import local_iso

if TYPE_CHECKING:
    from relay.engine import DeadLetter, Engine


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
    """List the dead letters, oldest message first."""
    rows = [facts for facts, _ in _letters(ctx, home)]
    short = short_ids(row["id"] for row in rows if row["id"])
    print_rows(
        rows,
        ("ID", "AT", "FROM", "DEAD FOR", "ATTEMPTS", "REASON"),
        lambda row: (
            *(short.get(row["id"], row["number"]), local_iso(row["dead_at"]), row["from"]),
            *(", ".join(row["dead_for"]), row["attempts"], row["reason"]),
        ),
        as_json=as_json,
        nothing="no dead letters",
        wide=wide,
    )


@command("show", of=dead, epilog="\b\nExample:\n  relay dead show 1706123456789012345-a1b2c3d4")
@click.argument("message_id", metavar="ID")
def show_dead(ctx: click.Context, home: str | None, message_id: str, as_json: bool) -> None:
    """Show one dead letter, with its content."""
    known = [facts | {"content": content} for facts, content in _letters(ctx, home)]
    found = [facts for facts in known if message_id in (facts["id"], str(facts["number"]))] or [
        facts for facts in known if message_id and begins(facts["id"] or "", message_id)
    ]
    if not found:
        raise NotFound(f"dead letter {message_id!a} does not exist", hint="see `relay dead list`")
    if len(found) > 1:
        raise NotFound(f"several dead letters match {message_id}", hint="use more digits")
    (facts,) = found
    if as_json:
        echo_json(facts)
        return
    for label in ("id", "from", "dead_for", "channel", "type", "attempts", "dead_at", "reason"):
        value = local_iso(facts[label]) if label == "dead_at" else facts[label]
        said = ", ".join(value) if isinstance(value, list) else str(value)
        click.echo(f"{label.replace('_', ' '):<10}{sanitize(said)}")
    click.echo()
    click.echo(sanitize(facts["content"], lines=True))


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


def _letters(ctx: click.Context, home: str | None) -> Iterator[tuple[dict[str, Any], str]]:
    """The facts of every dead letter, and its content."""
    with open_home(ctx, home) as opened:
        store = read_store(opened)
    for letter in store.retries.dead_letters():
        yield _dead_facts(store, letter), letter.message.content.decode(errors="replace")


def _dead_facts(store: Engine, letter: DeadLetter) -> dict[str, Any]:
    facts = stored_facts(store, letter.message)
    tried = store.state.deliveries.get(letter.message.id, {})
    attempts = [tried[name].attempt for name in letter.recipients if name in tried]
    return {
        "id": facts["id"],
        "number": facts["number"],
        "from": facts["from"],
        "dead_for": list(letter.recipients),
        "channel": facts["channel"],
        "type": facts["type"],
        "attempts": max(attempts, default=letter.message.retry_count + 1),
        "reason": letter.last_error,
        "dead_at": iso_time(letter.dead_lettered_at * NS_PER_S)[:19] + "Z",
        "sent_at": facts["at"],
    }
