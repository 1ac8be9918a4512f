"""``relay acks``: pending answers and acknowledgments."""

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
    from relay.engine import CommStore, Message


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
    is delivered again; - if there is no limit. REMINDED: number of reminders sent.
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


def _owed(store: CommStore, now_ms: int) -> Iterator[dict[str, Any]]:
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
