"""``relay acks``: who owes an answer or an acknowledgment for what, and what is begun."""

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
@click.option("--agent", metavar="NAME", help="What this agent owes.")
@click.option("--overdue", "overdue_alone", is_flag=True, help="What should have come by now.")
@json_option
@click.pass_context
def acks(
    ctx: click.Context, home: str | None, agent: str | None, overdue_alone: bool, as_json: bool
) -> None:
    """Show the answers and acknowledgments that are owed.

    Of commands and queries, until they are completed, failed or given up; and of what was sent
    at-least-once. Said: the last word of its recipient that was no answer, and how long ago; else
    whether it was read. Due: when the answer is overdue, or, once an at-least-once message is, when
    it is delivered again; `-` where no time is kept. Reminded: how often its recipient was.
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
    nothing = "no answer is " + ("overdue" if overdue_alone else "owed")
    print_rows(rows, header, _cells, as_json=as_json, nothing=nothing)


def _owed(store: CommStore, now_ms: int) -> Iterator[dict[str, Any]]:
    """A row for each delivery whose answer or acknowledgment is owed, oldest message first."""
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
    """The recipient's last word and its age; else what is known of the file."""
    if not row["said"]:
        return "read" if row["read"] else "not read"
    at = calendar.timegm(time.strptime(row["said_at"], "%Y-%m-%dT%H:%M:%SZ"))
    return f"{row['said']} {elapsed(time.time_ns() - at * NS_PER_S)} ago"
