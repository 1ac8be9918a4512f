"""``relay dead``: dead letters, messages whose delivery was given up.

They are read from the store file; replay, discard and purge are commands to the relay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relay.cli.common import echo_json, home_option, json_option, open_home, print_rows, sanitize
from relay.cli.history import message_facts, read_store, wait_for_flush
from relay.cli.request import control_options, send_command

if TYPE_CHECKING:
    from relay.engine import CommStore, DeadLetter

UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_DIGITS = 9


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


@dead.command("list", epilog="\b\nExample:\n  relay dead list --json | jq -r .id")
@home_option
@json_option
@click.pass_context
def list_(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """List the dead letters, oldest message first."""
    with open_home(ctx, home) as opened:
        wait_for_flush(opened)
        store = read_store(opened)
    rows = [_facts(store, letter) for letter in store.dead_letters()]
    header = ("ID", "FROM", "DEAD FOR", "ATTEMPTS", "AT", "REASON")
    print_rows(rows, header, _cells, as_json=as_json, nothing="no dead letters")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["id"] or row["number"],
        row["from"],
        sanitize(", ".join(row["dead_for"]), 30),
        row["attempts"],
        row["dead_at"],
        sanitize(row["reason"]),
    )


@dead.command(epilog="\b\nExample:\n  relay dead show 1706123456789012345-a1b2c3d4")
@home_option
@click.argument("message_id", metavar="ID")
@json_option
@click.pass_context
def show(ctx: click.Context, home: str | None, message_id: str, as_json: bool) -> None:
    """Show one dead letter, with its content."""
    from relay.base.errors import NotFound

    with open_home(ctx, home) as opened:
        wait_for_flush(opened)
        store = read_store(opened)
    for letter in store.dead_letters():
        facts = _facts(store, letter)
        if message_id in (facts["id"], str(facts["number"])):
            break
    else:
        raise NotFound(f"there is no dead letter {message_id!a}", hint="see `relay dead list`")
    facts |= {"content": letter.message.content.decode(errors="replace")}
    if as_json:
        echo_json(facts)
        return
    for label in ("id", "from", "dead_for", "channel", "type", "attempts", "dead_at", "reason"):
        value = facts[label]
        said = ", ".join(value) if isinstance(value, list) else str(value)
        click.echo(f"{label.replace('_', ' '):<10}{sanitize(said)}")
    click.echo()
    click.echo(sanitize(facts["content"], lines=True))


@dead.command(epilog="\b\nExample:\n  relay dead replay 1706123456789012345-a1b2c3d4")
@control_options
@click.argument("message_id", metavar="ID")
def replay(ctx: click.Context, /, message_id: str, **caller: Any) -> None:
    """Deliver a dead letter again to the recipients that did not get it, from the first attempt.

    In a paused channel it waits; a draining or closed channel refuses it.
    """
    send_command(ctx, "dead.replay", {"ID": message_id}, **caller)


@dead.command(epilog="\b\nExample:\n  relay dead discard 1706123456789012345-a1b2c3d4")
@control_options
@click.argument("message_id", metavar="ID")
def discard(ctx: click.Context, /, message_id: str, **caller: Any) -> None:
    """Discard a dead letter permanently."""
    send_command(ctx, "dead.discard", {"ID": message_id}, **caller)


@dead.command(epilog="\b\nExample:\n  relay dead purge --older-than 7d")
@control_options
@click.option("--older-than", required=True, metavar="AGE", help="30s, 10m, 2h or 7d; 0s: all.")
def purge(ctx: click.Context, /, older_than: str, **caller: Any) -> None:
    """Discard all dead letters older than AGE."""
    send_command(ctx, "dead.purge", {"OLDER_THAN": _age_s(older_than)}, **caller)


def _age_s(text: str) -> int:
    """Parse an age as seconds. The unit is required because purging cannot be undone."""
    number, unit = text[:-1], text[-1:]
    if (
        unit not in UNIT_S
        or not (number.isascii() and number.isdigit())
        or len(number) > MOST_DIGITS
    ):
        raise click.BadParameter(
            f"invalid age {text!r}: expected one like 30s, 10m, 2h or 7d", param_hint="AGE"
        )
    return int(number) * UNIT_S[unit]


def _facts(store: CommStore, letter: DeadLetter) -> dict[str, Any]:
    from relay.base.clock import NS_PER_S, iso_time

    facts = message_facts(store, letter.message)
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
