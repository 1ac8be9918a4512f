"""What the ledger remembers by itself, who may read beside the writer, and which index serves."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import pytest

from relay.base.errors import LedgerError
from relay.ledger.deliveries import DeliveryFacts, ObligationFacts, held_delivery
from relay.ledger.file import open_readonly
from relay.ledger.ledger import Ledger
from tests.ledger.support import (
    NOW,
    Look,
    add,
    message_id,
    plan,
    put,
    record,
    refusal,
    stage,
    statements,
    taken_by,
)

pytestmark = pytest.mark.shows("ready 3.5")


def trail(look: Look) -> list[tuple[str, str | None, str, str | None]]:
    return look.all(
        "SELECT message_id || ifnull(' > ' || recipient, ''), old_status, new_status, who "
        "FROM audit_log ORDER BY id"
    )  # type: ignore[return-value]


# -- audit_log and security_events ---------------------------------------------------------


def test_every_change_of_a_status_is_logged_with_old_and_new(ledger: Ledger, look: Look) -> None:
    ledger.set_state("writer", "daemon 3", NOW)
    one, two, three = add(ledger, 1, 2, 3)
    ledger.postpone([(one, "disk full")])
    ledger.claim([one])
    ledger.complete([one], NOW)
    ledger.archive([(one, None), (three, None)], NOW)
    ledger.fail([(two, refusal("why"))], NOW)
    who = "daemon 3"
    assert trail(look) == [
        (one, None, "processing", who),
        (two, None, "processing", who),
        (three, None, "processing", who),
        (one, "processing", "pending", who),
        (one, "pending", "processing", who),
        (one, "processing", "completed", who),
        (one, "completed", "archived", who),
        (three, "processing", "archived", who),
        (two, "processing", "failed", who),
    ]


def test_every_move_of_a_delivery_is_logged(ledger: Ledger, look: Look) -> None:
    (one,) = add(ledger, 1)
    stage(ledger, one, "bob")
    for state in ("held", "held", "written", "read", "acked", "acked"):
        put(ledger, one, "bob", state)
    assert [(what, old, new) for what, old, new, _ in trail(look)[1:]] == [
        (f"{one} > bob", "staged", "held"),
        (f"{one} > bob", "held", "written"),
        (f"{one} > bob", "written", "read"),
        (f"{one} > bob", "read", "acked"),
    ]


def test_what_is_asked_shown_and_rung_is_logged_beside(ledger: Ledger, look: Look) -> None:
    (one,) = add(ledger, 1)
    put(ledger, one, "bob", "written")
    for reminders in (0, 1):
        ledger.deliveries.set_obligations([ObligationFacts(one, "bob", "open", NOW, reminders)])
    put(ledger, one, "bob", "expired", last_error="its TTL passed")
    look.db.execute(
        "INSERT INTO offers (message_id, recipient, offer, session, state, offered_at) "
        "VALUES (?, 'bob', 2, 'claude:1', 'offered', 1)",
        (one,),
    )
    look.db.execute("INSERT INTO rings VALUES ('bob', 1, 'claude:1', 'command', 3, 'ok')")
    rows = look.all("SELECT message_id, recipient, new_status, attempt FROM audit_log")
    assert {row for row in rows if row[1]} == {
        (one, "bob", "asked", None),
        (one, "bob", "reminded", None),
        (one, "bob", "expired", 1),
        (one, "bob", "given_up", None),
        (one, "bob", "offered", 2),
        (None, "bob", "rung", None),
    }


def test_a_change_by_hand_is_logged_as_well(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    look.db.execute("UPDATE messages SET status = 'failed'")
    assert trail(look)[-1] == (one, "pending", "failed", None)


def test_the_time_of_a_change_is_the_machines(ledger: Ledger, look: Look) -> None:
    before = look.one("SELECT CAST((julianday('now') - 2440587.5) * 86400 AS INTEGER)")
    add(ledger, 1)
    at_s = look.one("SELECT at / 1000000000 FROM audit_log")
    assert before <= at_s + 1 and at_s <= before + 5


@pytest.mark.parametrize("table", ["audit_log", "security_events"])
def test_nothing_in_it_is_changed_or_removed(ledger: Ledger, look: Look, table: str) -> None:
    add(ledger, 1)
    event = ("not_a_regular_file", "alice", "agents/alice/outbox/x", "a link")
    ledger.agents.add_security_event(*event, NOW)
    assert look.all("SELECT at, kind, agent, path, detail FROM security_events") == [(NOW, *event)]
    before = look.all(f"SELECT * FROM {table}")
    assert len(before) == 1
    for change in (
        f"DELETE FROM {table}",
        f"DELETE FROM {table} WHERE id = 1",
        f"UPDATE {table} SET at = 0",
        f"UPDATE {table} SET id = 99 WHERE id = 1",
        f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}",
    ):
        for db in (ledger._db, look.db):
            with pytest.raises((LedgerError, sqlite3.Error), match=f"{table} is append-only"):
                db.execute(change)
    assert look.all(f"SELECT * FROM {table}") == before


@pytest.mark.parametrize("table", ["audit_log", "security_events"])
def test_retention_lets_go_of_what_is_older(ledger: Ledger, look: Look, table: str) -> None:
    add(ledger, 1)
    ledger.agents.add_security_event("hard_link", "alice", "x", "why", NOW)
    (at,) = look.all(f"SELECT at FROM {table}")[0]
    ledger.set_state("audit_kept_from", str(at), NOW)
    with pytest.raises(LedgerError, match=f"{table} is append-only"):
        ledger._db.execute(f"DELETE FROM {table}")
    ledger.set_state("audit_kept_from", str(at + 1), NOW)  # type: ignore[operator]
    ledger._db.execute(f"DELETE FROM {table}")
    assert look.all(f"SELECT * FROM {table}") == []


# -- readers beside the writer -------------------------------------------------------------


def test_a_writer_never_blocks_a_reader(ledger: Ledger, look: Look, ledger_path: str) -> None:
    record(ledger, 1)
    with ledger.transaction():
        ledger.claim([message_id(1)])
        assert look.status(message_id(1)) == "pending"  # timeout is 0: it would fail
        tool = open_readonly(ledger_path)
        assert tool.execute("SELECT status FROM messages").fetchone()["status"] == "pending"
        tool.close()
    assert look.status(message_id(1)) == "processing"


# -- indexes -------------------------------------------------------------------------------

Query = Callable[[Ledger], object]

QUERIES: dict[str, tuple[Query, str | tuple[str, str]]] = {
    "open rows": (lambda db: list(db.open_rows(9)), "messages_open"),
    "when held mail is due": (lambda db: db.deliveries.next_due(), "deliveries_open"),
    "held mail that is due": (lambda db: db.deliveries.due(NOW, 256), "deliveries_open"),
    "unread of one agent": (
        lambda db: db.deliveries.unread("bob"),
        ("deliveries_unread", "deliveries_dead"),
    ),
    "rows by id": (lambda db: db.rows([message_id(1)]), "sqlite_autoindex_messages_1"),
    "claim": (lambda db: db.claim([message_id(1)]), "sqlite_autoindex_messages_1"),
    "complete": (lambda db: db.complete([message_id(1)], NOW), "sqlite_autoindex_messages_1"),
    "archive": (lambda db: db.archive([(message_id(1), None)], NOW), "sqlite_autoindex_messages_1"),
    "fail": (
        lambda db: db.fail([(message_id(1), refusal("x"))], NOW),
        "sqlite_autoindex_messages_1",
    ),
    "deliveries by id": (lambda db: db.deliveries.rows([message_id(1)]), "PRIMARY KEY"),
    "read": (
        lambda db: db.deliveries.mark_read([taken_by(message_id(1), "bob", NOW)]),
        "PRIMARY KEY",
    ),
    "hold": (
        lambda db: db.deliveries.hold([held_delivery(message_id(1), "bob", "x", NOW)]),
        "PRIMARY KEY",
    ),
    "obligations": (
        lambda db: db.deliveries.set_obligations([ObligationFacts(message_id(1), "bob", "open")]),
        "PRIMARY KEY",
    ),
}


def check_plan(ledger: Ledger, name: str) -> None:
    """Every statement that the call runs goes through the index, and through nothing else."""
    call, index = QUERIES[name]
    sql = [text for text in statements(ledger, lambda: call(ledger)) if "audit_log" not in text]
    assert sql
    for text in sql:
        steps = [step for step in plan(ledger, text) if "messages" in step or "deliveries" in step]
        used = (index,) if isinstance(index, str) else index
        assert steps and all(any(one in step for one in used) for step in steps), (text, steps)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_is_served_by_its_index(ledger: Ledger, name: str) -> None:
    ids = record(ledger, *range(2000))
    stage(ledger, ids[0], "bob")
    check_plan(ledger, name)
    with ledger.transaction():
        for state, some in (("staged", ids), ("written", ids[10:]), ("read", ids[20:])):
            ledger.deliveries.upsert([DeliveryFacts(one, "bob", state, 1, NOW) for one in some])
        ledger.claim(ids[10:])
        ledger.complete(ids[10:], NOW)
        ledger.archive([(one, None) for one in ids[10:]], NOW)
    ledger._db.execute("ANALYZE")
    check_plan(ledger, name)
