"""``relay acks``: who owes an acknowledgment for what. As of the store's last flush."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from relay.cli.common import home_option, json_option, open_home, show_rows
from relay.cli.history import read_store

if TYPE_CHECKING:
    from relay.comm import CommStore, Message
    from relay.comm.model import Delivery


@click.command(epilog="\b\nExamples:\n  relay acks\n  relay acks --overdue --agent bob")
@home_option
@click.option("--agent", metavar="NAME", help="What this agent owes.")
@click.option("--overdue", "overdue_alone", is_flag=True, help="What should have come by now.")
@json_option
@click.pass_context
def acks(
    ctx: click.Context, home: str | None, agent: str | None, overdue_alone: bool, as_json: bool
) -> None:
    """Show the acknowledgments that are owed.

    Of commands, queries and what was sent at-least-once: delivered, and not acknowledged. Due:
    when it counts as overdue, or, once it is, when the message is delivered again; `-` where no
    time is kept.
    """
    with open_home(ctx, home) as opened:
        store = read_store(opened)
    now_ms = time.time_ns() // 1_000_000
    rows = [
        row
        for row in _owed(store, now_ms)
        if agent in (None, row["to"]) and (row["overdue"] or not overdue_alone)
    ]
    header = ("ID", "FROM", "TO", "KIND", "DELIVERED", "DUE", "OVERDUE", "ATTEMPT")
    nothing = "no acknowledgment is " + ("overdue" if overdue_alone else "owed")
    show_rows(rows, header, _cells, as_json=as_json, nothing=nothing)


def _owed(store: CommStore, now_ms: int) -> Iterator[dict[str, Any]]:
    """A row for each delivery that awaits its acknowledgment, oldest message first."""
    from relay.comm.model import DeliveryState

    awaits = (DeliveryState.WAITING, DeliveryState.DELIVERED, DeliveryState.RECEIVED)
    for message in store.state.messages.values():
        deliveries = store.state.deliveries.get(message.id, {})
        if not deliveries or not store.expects_ack(message):
            continue
        for recipient, delivery in deliveries.items():
            if delivery.state in awaits:
                waits = delivery.state is DeliveryState.WAITING
                overdue = waits or delivery.due_ms <= now_ms if delivery.due_ms else None
                yield _row(message, recipient, delivery, overdue)


def _row(
    message: Message, recipient: str, delivery: Delivery, overdue: bool | None
) -> dict[str, Any]:
    from relay.clock import NS_PER_MS, NS_PER_S, iso_time
    from relay.flow.router import KIND_OF

    metadata = message.metadata or {}
    delivered = message.delivered_at
    return {
        "id": metadata.get("relay_id"),
        "number": message.id,
        "from": message.sender,
        "to": recipient,
        "kind": str(metadata.get("kind", KIND_OF[message.message_type])),
        "delivered_at": iso_time(delivered * NS_PER_S)[:19] + "Z" if delivered else None,
        "due_at": iso_time(delivery.due_ms * NS_PER_MS) if delivery.due_ms else None,
        "overdue": overdue,
        "attempt": delivery.attempt,
    }


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    due = row["due_at"]
    return (
        row["id"] or row["number"],
        row["from"],
        row["to"],
        row["kind"],
        row["delivered_at"],
        due[:19] + "Z" if due else None,
        {True: "yes", False: "no", None: None}[row["overdue"]],
        row["attempt"],
    )
