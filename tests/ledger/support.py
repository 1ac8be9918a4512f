"""What the tests of the ledger share."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from relay.base.incidents import Refusal, RefusalCode
from relay.ledger.deliveries import DeliveryFacts
from relay.ledger.ledger import FileFacts, Ledger

NOW = 1_769_851_800_000_000_000
DAY = 86_400 * 10**9


def message_id(number: int) -> str:
    return f"{NOW + number}-{number:08x}"


def refusal(reason: str) -> Refusal:
    return Refusal(RefusalCode.NO_RECIPIENT, reason)


def facts(number: int, agent: str = "alice", **changes: Any) -> FileFacts:
    """The facts of one file in an outbox."""
    name = message_id(number)
    found = FileFacts(
        name,
        agent,
        f"agents/{agent}/outbox/{name}.msg",
        100 + number,
        NOW - 10**9,
        4000 + number,
        f"{number:064x}",
        "message",
        "bob",
        NOW + number,
    )
    return replace(found, **changes)


def add(ledger: Ledger, *numbers: int) -> list[str]:
    """Rows for these, claimed; their ids."""
    ledger.add([facts(number) for number in numbers])
    return [message_id(number) for number in numbers]


def record(ledger: Ledger, *numbers: int) -> list[str]:
    """Rows for these, pending; their ids."""
    with ledger.transaction():
        ids = add(ledger, *numbers)
        ledger.reset(ids)
    return ids


def put(
    ledger: Ledger, message: str, recipient: str, state: str, attempt: int = 1, **fields: Any
) -> None:
    """A delivery in a state; ``fields``: those of DeliveryFacts."""
    ledger.deliveries.upsert([DeliveryFacts(message, recipient, state, attempt, **fields)])


def stage(ledger: Ledger, message: str, *recipients: str) -> None:
    """Deliveries of a message, staged."""
    with ledger.transaction():
        for name in recipients:
            put(ledger, message, name, "staged", staged_at=NOW)


def taken_by(message: str, recipient: str, at_ns: int, how: str | None = None) -> DeliveryFacts:
    """A file that left an inbox, as the table is told."""
    return DeliveryFacts(message, recipient, "read", 0, read_at=at_ns, read_how=how)


class Look:
    """A connection of somebody who looks into the ledger with a tool of their own."""

    def __init__(self, path: Path | str) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.db.execute(sql, values).fetchall()

    def one(self, sql: str, *values: Any) -> Any:
        """The only value."""
        ((value,),) = self.all(sql, *values)
        return value

    def status(self, message: str) -> str:
        return str(self.one("SELECT status FROM messages WHERE message_id = ?", message))

    def state(self, message: str, recipient: str) -> str:
        return str(
            self.one(
                "SELECT state FROM deliveries WHERE message_id = ? AND recipient = ?",
                message,
                recipient,
            )
        )

    def close(self) -> None:
        self.db.close()


def statements(ledger: Ledger, call: Callable[[], object]) -> list[str]:
    """The SQL that a call runs, with its values in place."""
    seen: list[str] = []
    ledger._db.set_trace_callback(seen.append)
    try:
        call()
    finally:
        ledger._db.set_trace_callback(None)
    return seen


def plan(ledger: Ledger, sql: str) -> list[str]:
    """How SQLite goes about a statement."""
    return [row[3] for row in ledger._db.execute(f"EXPLAIN QUERY PLAN {sql}")]
