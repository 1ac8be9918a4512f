"""``relay open``: who owes an answer, by the store file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import NS_PER_S, elapsed
from relay.base.text import times
from relay.cli.common import (
    check_agents,
    complete_agents,
    home_option,
    json_option,
    open_home,
    print_rows,
)
from relay.cli.history import read_store
from relay.cli.ids import short_ids
from relay.cli.tables import wide_option

if TYPE_CHECKING:
    from relay.acomm.model import Delivery, Obligation
    from relay.engine import Engine, Message


@click.command("open", epilog="\b\nExamples:\n  relay open\n  relay open --overdue --agent bob")
@home_option
@click.option(
    "--agent", metavar="NAME", shell_complete=complete_agents, help="Only what this agent owes."
)
@click.option(
    "--from",
    "sender",
    metavar="NAME",
    shell_complete=complete_agents,
    help="Only what this agent waits for.",
)
@click.option("--overdue", "overdue_alone", is_flag=True, help="Only what is overdue.")
@wide_option
@json_option
@click.pass_context
def open_(
    ctx: click.Context,
    home: str | None,
    agent: str | None,
    sender: str | None,
    overdue_alone: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """Show who owes an answer, to whom, and until when.

    Commands and queries are listed until they are completed, failed or given up; at-least-once
    messages until they are acknowledged. STATUS: the recipient's last interim ack and its age, or
    whether the message was read, and how often the recipient was reminded. DUE: when the answer
    becomes overdue or an at-least-once message is delivered again; - without a limit.
    """
    now_ns = time.time_ns()
    with open_home(ctx, home) as opened:
        store = read_store(opened)
        rows = [
            row
            for row in _owed(store, now_ns // 1_000_000)
            if agent in (None, row["to"]) and sender in (None, row["from"])
            if row["overdue"] or not overdue_alone
        ]
        if not rows:
            check_agents(opened, agent, sender)
    short = short_ids(row["id"] for row in rows if row["id"])
    print_rows(
        rows,
        ("ID", "AGENT", "OWES", "KIND", "AGE", "STATUS", "DUE", "CONTENT"),
        lambda row: (
            *(short.get(row["id"], row["number"]), row["to"], row["from"], row["kind"]),
            *(_age(row["delivered_at"], now_ns), _said(row, now_ns), _due(row, now_ns)),
            row["first_line"],
        ),
        as_json=as_json,
        nothing="nothing is overdue" if overdue_alone else "no open answers",
        wide=wide,
    )


def _owed(store: Engine, now_ms: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each pending answer or acknowledgment, oldest message first."""
    from relay.acomm.model import DeliveryState
    from relay.engine.rules import is_retried

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
        "first_line": message.content.decode(errors="replace").split("\n", 1)[0],
    }


def _age(at: str | None, now_ns: int) -> str | None:
    return None if at is None else elapsed(now_ns - _ns(at))


def _ns(at: str) -> int:
    return int(datetime.fromisoformat(at).timestamp()) * NS_PER_S


def _due(row: dict[str, Any], now_ns: int) -> str | None:
    if row["due_at"] is None:
        return None
    left_ns = _ns(row["due_at"]) - now_ns
    return f"in {elapsed(left_ns)}" if left_ns > 0 else f"overdue {elapsed(-left_ns)}"


def _said(row: dict[str, Any], now_ns: int) -> str:
    """Format the last interim ack and its age, or whether the file was read, and the reminders."""
    said = "read" if row["read"] else "not read"
    if row["said"]:
        said = f"{row['said'].replace('_', ' ')} {_age(row['said_at'], now_ns)}"
    return f"{said}, reminded {times(row['reminders'])}" if row["reminders"] else said
