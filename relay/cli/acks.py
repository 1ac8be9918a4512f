"""``relay acks`` and ``relay dead``: pending answers, and dead letters.

They are read from the store file; replay, discard and purge are commands to the relay.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import NS_PER_S, elapsed
from relay.cli.common import home_option, json_option, open_home, print_rows
from relay.cli.history import read_store

if TYPE_CHECKING:
    from relay.acomm.model import Delivery, Obligation
    from relay.engine import Engine, Message
from relay.cli.common import echo_json, sanitize
from relay.cli.history import message_facts, wait_for_flush
from relay.cli.request import control_options, send_command

if TYPE_CHECKING:
    from relay.engine import DeadLetter, Engine


UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_DIGITS = 9


@click.command(epilog="\b\nExamples:\n  relay acks\n  relay acks --overdue --agent bob")
@home_option
@click.option("--agent", metavar="NAME", help="Show only acks owed by this agent.")
@click.option("--overdue", "overdue_alone", is_flag=True, help="Show only overdue ones.")
@json_option
@click.pass_context
def acks(
    ctx: click.Context, home: str | None, agent: str | None, overdue_alone: bool, as_json: bool
) -> None:
    """Show pending answers and acknowledgments.

    Commands and queries are listed until they are completed, failed or given up; at-least-once
    messages until they are acknowledged. SAID: the recipient's last interim ack and its age, or
    whether the message was read. DUE: when the answer becomes overdue or an at-least-once message
    is delivered again; - without a limit. REMINDED: number of reminders sent.
    """
    with open_home(ctx, home) as opened:
        store = read_store(opened)
    now_ms = time.time_ns() // 1_000_000
    rows = [
        row
        for row in _owed(store, now_ms)
        if agent in (None, row["to"]) and (row["overdue"] or not overdue_alone)
    ]
    header = (
        *("ID", "FROM", "TO", "KIND", "DELIVERED", "SAID"),
        *("DUE", "OVERDUE", "ATTEMPT", "REMINDED"),
    )
    nothing = "no overdue acks" if overdue_alone else "no pending acks"
    print_rows(rows, header, _cells, as_json=as_json, nothing=nothing)


def _owed(store: Engine, now_ms: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each pending answer or acknowledgment, oldest message first."""
    from relay.acomm.model import DeliveryState
    from relay.engine.ack_rules import is_retried

    awaits = (DeliveryState.WAITING, DeliveryState.DELIVERED, DeliveryState.RECEIVED)
    for message in store.state.messages.values():
        owed = store.state.owed.get(message.id, {})
        channel = store.state.channels[message.channel_id]
        again = is_retried(channel, message.message_type, message.metadata)
        if not owed and not again:
            continue
        for recipient, delivery in store.state.deliveries.get(message.id, {}).items():
            if recipient in owed or (again and delivery.state in awaits):
                waits = delivery.state is DeliveryState.WAITING
                one = owed.get(recipient)
                due_ms = delivery.due_ms or (one.due_ms if one else 0)
                overdue = waits or due_ms <= now_ms if due_ms else None
                yield _row(message, recipient, delivery, one, due_ms, overdue)


def _row(
    message: Message,
    recipient: str,
    delivery: Delivery,
    owed: Obligation | None,
    due_ms: int,
    overdue: bool | None,
) -> dict[str, Any]:
    from relay.acomm.model import DeliveryState
    from relay.base.clock import NS_PER_MS, NS_PER_S, iso_time
    from relay.delivery.router import KIND_OF

    metadata = message.metadata or {}
    delivered = message.delivered_at
    said = owed.said if owed else ""
    return {
        "id": metadata.get("relay_id"),
        "number": message.id,
        "from": message.sender,
        "to": recipient,
        "kind": str(metadata.get("kind", KIND_OF[message.message_type])),
        "delivered_at": iso_time(delivered * NS_PER_S)[:19] + "Z" if delivered else None,
        "due_at": iso_time(due_ms * NS_PER_MS) if due_ms else None,
        "overdue": overdue,
        "attempt": delivery.attempt,
        "read": delivery.state >= DeliveryState.RECEIVED,
        "said": said or None,
        "said_at": iso_time(owed.since * NS_PER_S)[:19] + "Z" if owed and said else None,
        "reminders": owed.reminders if owed else 0,
    }


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    due = row["due_at"]
    return (
        row["id"] or row["number"],
        row["from"],
        row["to"],
        row["kind"],
        row["delivered_at"],
        _said(row),
        due[:19] + "Z" if due else None,
        {True: "yes", False: "no", None: None}[row["overdue"]],
        row["attempt"],
        row["reminders"],
    )


def _said(row: dict[str, Any]) -> str:
    """Format the recipient's last interim ack and its age, or whether the file was read."""
    if not row["said"]:
        return "read" if row["read"] else "not read"
    at = calendar.timegm(time.strptime(row["said_at"], "%Y-%m-%dT%H:%M:%SZ"))
    return f"{row['said']} {elapsed(time.time_ns() - at * NS_PER_S)} ago"


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
def list_dead(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """List the dead letters, oldest message first."""
    with open_home(ctx, home) as opened:
        wait_for_flush(opened)
        store = read_store(opened)
    rows = [_dead_facts(store, letter) for letter in store.retries.dead_letters()]
    header = ("ID", "FROM", "DEAD FOR", "ATTEMPTS", "AT", "REASON")
    print_rows(rows, header, _dead_cells, as_json=as_json, nothing="no dead letters")


def _dead_cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["id"] or row["number"],
        row["from"],
        sanitize(", ".join(row["dead_for"]), 30),
        row["attempts"],
        row["dead_at"],
        sanitize(row["reason"]),
    )


@dead.command("show", epilog="\b\nExample:\n  relay dead show 1706123456789012345-a1b2c3d4")
@home_option
@click.argument("message_id", metavar="ID")
@json_option
@click.pass_context
def show_dead(ctx: click.Context, home: str | None, message_id: str, as_json: bool) -> None:
    """Show one dead letter, with its content."""
    from relay.base.errors import NotFound

    with open_home(ctx, home) as opened:
        wait_for_flush(opened)
        store = read_store(opened)
    for letter in store.retries.dead_letters():
        facts = _dead_facts(store, letter)
        if message_id in (facts["id"], str(facts["number"])):
            break
    else:
        raise NotFound(f"dead letter {message_id!a} does not exist", hint="see `relay dead list`")
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
    """Deliver a dead letter again, to the recipients for whom it is dead.

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


def _dead_facts(store: Engine, letter: DeadLetter) -> dict[str, Any]:
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
