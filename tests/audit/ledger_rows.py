"""Rows put into a ledger by hand: histories that no relay would write, or only in a year."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from tests.audit.home_builder import FILE_SIZE, START_NS, HomeBuilder

NOW = datetime(2026, 1, 31, 10, 30, tzinfo=UTC)
MS = 1_000_000
S = 1_000 * MS
MINUTE, HOUR, DAY = 60 * S, 3600 * S, 86_400 * S
END_NS = START_NS + HOUR  # when HomeBuilder.inputs takes its snapshot
TICK = 123_456_789  # no whole second: what is of whole seconds was made again from the journal


def insert(home: HomeBuilder, table: str, rows: Iterable[Mapping[str, object]]) -> None:
    """Rows of a table, in one transaction; columns that are not named are NULL or the default."""
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        for row in rows:
            names, marks = ", ".join(row), ", ".join("?" for _ in row)
            db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values()))


def message(message_id: str, at_ns: int, **columns: object) -> dict[str, object]:
    """A row of messages: archived, from alice to bob, unless the columns say otherwise."""
    row: dict[str, object] = {
        "message_id": message_id,
        "agent_name": "alice",
        "direction": "outbox",
        "file_path": f"archive/2026-01-31/alice/{message_id}.msg",
        "file_size": FILE_SIZE,
        "file_mtime_ns": at_ns,
        "status": "archived",
        "message_type": "message",
        "target": "bob",
        "discovered_at": at_ns,
        "processed_at": at_ns + DAY,
    }
    return {**row, **columns}


def delivery(
    message_id: str, staged_ns: int, after_ms: float, **columns: object
) -> dict[str, object]:
    """A row of deliveries: written for bob so long after it was staged."""
    row: dict[str, object] = {
        "message_id": message_id,
        "recipient": "bob",
        "state": "written",
        "staged_at": staged_ns,
        "written_at": staged_ns + int(after_ms * MS),
    }
    return {**row, **columns}


def agent(name: str, seen_ns: int, **columns: object) -> dict[str, object]:
    """A row of agents: active, registered thirty days before the end."""
    return {"name": name, "registered_at": END_NS - 30 * DAY, "last_seen_at": seen_ns, **columns}


def process(name: str, state: str, changed_ns: int, **columns: object) -> dict[str, object]:
    """A row of processes."""
    row: dict[str, object] = {
        "name": name,
        "state": state,
        "cli": "claude",
        "cwd": "/",
        "restart": "on-failure",
        "requested_by": "lead",
        "request_id": f"0-{name}",
        "started_at": changed_ns,
        "changed_at": changed_ns,
    }
    return {**row, **columns}
