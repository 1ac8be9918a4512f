"""The life of a delivery, and what else the ledger keeps: rejections, agents, state, intents."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relay.base.incidents import Refusal, RefusalCode
from relay.ledger.deliveries import DeliveryRow, HeldDelivery, ReadDelivery, WrittenDelivery
from relay.ledger.ledger import Ledger
from tests.ledger.support import NOW, Look, facts, message_id, record, stage

STATES = ["held", "staged", "written", "read", "acked", "expired", "bounced", "dead"]
OPEN = ["staged", "held", "written", "read"]
ENDS = [*OPEN, "dead"]  # a dead letter that is replayed may end in another way
Move = Callable[[Ledger, str], object]
KEY = "bob"

# What each call does with a delivery in each state; every state that is not named stays.
MOVES: dict[str, tuple[Move, dict[str, str]]] = {
    "stage again": (
        lambda db, one: db.deliveries.add_undelivered(
            [(one, KEY, "staged", NOW + 9, "again", None)]
        ),
        {},
    ),
    "written": (
        lambda db, one: db.deliveries.mark_written([WrittenDelivery(one, KEY, 1, NOW, NOW)]),
        {"staged": "written", "held": "written"},
    ),
    "hold": (
        lambda db, one: db.deliveries.hold([HeldDelivery(one, KEY, 1, "why", NOW)]),
        dict.fromkeys(("staged", "held", "written", "read", "dead"), "held"),
    ),
    "deliver again": (
        lambda db, one: db.deliveries.mark_written([WrittenDelivery(one, KEY, 2, NOW, NOW)]),
        dict.fromkeys(("staged", "held", "written", "read", "dead"), "written"),
    ),
    "end as dead": (
        lambda db, one: db.deliveries.give_up(one, KEY, "dead", "why"),
        dict.fromkeys(OPEN, "dead"),
    ),
    "expire": (
        lambda db, one: db.deliveries.give_up(one, KEY, "expired", "why"),
        dict.fromkeys(ENDS, "expired"),
    ),
    "bounce": (
        lambda db, one: db.deliveries.give_up(one, KEY, "bounced", "why"),
        dict.fromkeys(ENDS, "bounced"),
    ),
    "read": (
        lambda db, one: db.deliveries.mark_read([ReadDelivery(one, KEY, 1, NOW)]),
        {"written": "read"},
    ),
    "again": (
        lambda db, one: db.deliveries.redeliver([(one, KEY, 2, NOW)], "vanished"),
        {"written": "held"},
    ),
    "acknowledge": (
        lambda db, one: db.deliveries.acknowledge(one, KEY, "completed", NOW),
        dict.fromkeys([state for state in STATES if state != "staged"], "acked"),  # late or not
    ),
}


@pytest.mark.parametrize("state", ["dead", "expired", "bounced"])
def test_M01_what_was_given_up_keeps_its_state(ledger: Ledger, look: Look, state: str) -> None:
    (one,) = record(ledger, 1)
    ledger.deliveries.mark_written([WrittenDelivery(one, KEY, 1, NOW, NOW + 1)])
    ledger.deliveries.give_up(one, KEY, state, "why")
    ledger.deliveries.mark_read([ReadDelivery(one, KEY, 1, NOW + 2, "taken")])
    ledger.deliveries.mark_read([ReadDelivery(one, KEY, 1, NOW + 3, "removed")])  # once is enough
    columns = "state, read_at, read_how, last_error"
    assert look.all(f"SELECT {columns} FROM deliveries") == [(state, NOW + 2, "taken", "why")]
    log = "SELECT old_status, new_status FROM audit_log WHERE recipient = 'bob' ORDER BY id"
    assert look.all(log) == [("written", state), (state, "read")]


@pytest.mark.parametrize(("taken", "read_at"), [(NOW + 3, NOW + 2), (NOW + 1, NOW + 1)])
def test_M02_an_answer_implies_a_read_that_may_have_been_before_it(
    ledger: Ledger, look: Look, taken: int, read_at: int
) -> None:
    (one,) = record(ledger, 1)
    ledger.deliveries.mark_written([WrittenDelivery(one, KEY, 1, NOW, NOW + 1)])
    ledger.deliveries.acknowledge(one, KEY, "failed", NOW + 2, "9-ab", "no such branch")
    ledger.deliveries.mark_read([ReadDelivery(one, KEY, 1, taken, "removed")])
    columns = "state, read_at, read_how, ack_status, answer_id, answer_text"
    assert look.all(f"SELECT {columns} FROM deliveries") == [
        ("acked", read_at, "removed", "failed", "9-ab", "no such branch")
    ]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", MOVES)
def test_a_call_moves_a_delivery_as_it_may(
    ledger: Ledger, look: Look, name: str, state: str
) -> None:
    (one,) = record(ledger, 1)
    ledger.deliveries.add_undelivered(
        [(one, KEY, state, NOW, None, None), (one, "carol", state, NOW, None, None)]
    )
    call, moves = MOVES[name]
    with ledger.transaction():
        call(ledger, one)
    assert look.state(one, KEY) == moves.get(state, state)
    assert look.state(one, "carol") == state


def test_every_hop_has_its_time(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    stage(ledger, one, "bob")
    ledger.deliveries.mark_written([WrittenDelivery(one, "bob", 1, NOW, NOW + 1)])
    ledger.deliveries.mark_read([ReadDelivery(one, "bob", 1, NOW + 2)])
    ledger.deliveries.acknowledge(one, "bob", "in_progress", NOW + 3)
    columns = "staged_at, written_at, read_at, acked_at, ack_status, attempt, due_at, last_error"
    assert look.all(f"SELECT {columns} FROM deliveries") == [
        (NOW, NOW + 1, NOW + 2, NOW + 3, "in_progress", 1, None, None)
    ]
    ledger.deliveries.acknowledge(one, "bob", "completed", NOW + 4)
    assert look.all("SELECT acked_at, ack_status, read_at FROM deliveries") == [
        (NOW + 4, "completed", NOW + 2)
    ]


def test_an_ack_is_a_reading_and_a_bounce_keeps_its_reason(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    stage(ledger, one, "bob", "carol")
    ledger.deliveries.mark_written([WrittenDelivery(one, "bob", 1, NOW, NOW + 1)])
    ledger.deliveries.acknowledge(one, "bob", "received", NOW + 7)
    ledger.deliveries.hold([HeldDelivery(one, "carol", 1, "inbox cannot be written", NOW + 100)])
    ledger.deliveries.give_up(one, "carol", "bounced", "no longer an agent")
    ledger.deliveries.add_undelivered([(one, "gone", "bounced", NOW, "no longer an agent", None)])
    columns = "state, read_at, last_error, due_at"
    assert look.all(f"SELECT {columns} FROM deliveries ORDER BY recipient") == [
        ("acked", NOW + 7, None, None),
        ("bounced", None, "no longer an agent", None),
        ("bounced", None, "no longer an agent", None),
    ]
    assert ledger.deliveries.next_due() is None


def test_a_held_delivery_is_tried_again_until_it_is_written(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    stage(ledger, one, "bob", "carol")
    ledger.deliveries.hold([HeldDelivery(one, "bob", 1, "inbox cannot be written", NOW + 100)])
    assert look.all("SELECT attempt, due_at, last_error FROM deliveries WHERE state='held'") == [
        (1, NOW + 100, "inbox cannot be written")
    ]
    assert ledger.deliveries.next_due() == NOW + 100
    assert ledger.deliveries.due(NOW + 99, 10) == []
    assert ledger.deliveries.due(NOW + 100, 10) == [
        DeliveryRow(one, "bob", "held", 1, NOW, "inbox cannot be written", None, None)
    ]

    ledger.deliveries.hold([HeldDelivery(one, "bob", 1, "still", NOW + 300)])
    assert ledger.deliveries.next_due() == NOW + 300
    ledger.deliveries.mark_written([WrittenDelivery(one, "bob", 1, NOW, NOW + 300)])
    assert ledger.deliveries.next_due() is None
    assert look.all("SELECT attempt, due_at FROM deliveries WHERE recipient='bob'") == [(1, None)]


def test_what_is_delivered_again_has_its_attempt(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    stage(ledger, one, "bob")
    ledger.deliveries.mark_written([WrittenDelivery(one, "bob", 1, NOW, NOW + 1)])
    ledger.deliveries.mark_written(
        [WrittenDelivery(one, "bob", 1, NOW, NOW + 4)]
    )  # a word too many
    ledger.deliveries.mark_read([ReadDelivery(one, "bob", 1, NOW + 4)])
    ledger.deliveries.mark_written([WrittenDelivery(one, "bob", 2, NOW + 5, NOW + 6)])
    ledger.deliveries.mark_read(
        [ReadDelivery(one, "bob", 1, NOW + 7)]
    )  # of the file that was taken before
    assert look.state(one, "bob") == "written"
    assert look.all("SELECT attempt, staged_at, written_at FROM deliveries") == [
        (2, NOW + 5, NOW + 6)
    ]


def test_the_next_one_due_is_the_earliest(ledger: Ledger) -> None:
    assert ledger.deliveries.next_due() is None
    (one,) = record(ledger, 1)
    stage(ledger, one, "a", "b", "c")
    ledger.deliveries.hold(
        HeldDelivery(one, name, 1, "x", NOW + due)
        for name, due in (("a", 30), ("b", 10), ("c", 20))
    )
    assert ledger.deliveries.next_due() == NOW + 10
    assert {held.recipient for held in ledger.deliveries.due(NOW + 20, 10)} == {"b", "c"}
    assert len(ledger.deliveries.due(NOW + 30, 2)) == 2


def test_deliveries_of_some_messages(ledger: Ledger) -> None:
    one, two, three = record(ledger, 1, 2, 3)
    stage(ledger, one, "bob", "carol")
    stage(ledger, two, "bob")
    assert ledger.deliveries.rows([one, three]) == {
        one: {
            "bob": DeliveryRow(one, "bob", "staged", 1, NOW, None, None, None),
            "carol": DeliveryRow(one, "carol", "staged", 1, NOW, None, None, None),
        }
    }
    assert ledger.deliveries.rows([]) == {}


def test_what_stands_in_an_inbox(ledger: Ledger) -> None:
    one, two, three = record(ledger, 1, 2, 3)
    for message in (one, two, three):
        stage(ledger, message, "bob", "carol")
    standing = [(one, "bob"), (two, "bob"), (two, "carol")]
    ledger.deliveries.mark_written([WrittenDelivery(*key, 1, NOW, NOW) for key in standing])
    ledger.deliveries.mark_read([ReadDelivery(two, "bob", 1, NOW)])
    assert ledger.deliveries.unread("bob") == {one: NOW}
    assert ledger.deliveries.unread("carol") == {two: NOW}
    assert ledger.deliveries.unread("nobody") == {}
    ledger.deliveries.give_up(one, "bob", "dead", "no acknowledgment")
    assert ledger.deliveries.unread("bob") == {one: NOW}  # it stands there all the same
    ledger.deliveries.mark_read([ReadDelivery(one, "bob", 1, NOW + 1, "taken")])
    assert ledger.deliveries.unread("bob") == {}


def test_all_messages_has_what_was_sent_and_delivered(ledger: Ledger, look: Look) -> None:
    one, two = record(ledger, 1, 2)
    stage(ledger, one, "bob", "carol")
    ledger.deliveries.mark_written([WrittenDelivery(one, "bob", 1, NOW, NOW + 1)])
    ledger.deliveries.hold([HeldDelivery(one, "carol", 1, "inbox cannot be written", NOW + 100)])
    all_messages = "FROM all_messages ORDER BY direction DESC, id, agent_name"
    assert look.all(f"SELECT direction, agent_name, target, file_path {all_messages}") == [
        ("outbox", "alice", "bob", f"agents/alice/outbox/{one}.msg"),
        ("outbox", "alice", "bob", f"agents/alice/outbox/{two}.msg"),
        ("inbox", "bob", "bob", f"agents/bob/inbox/{one}.msg"),
        ("inbox", "carol", "carol", f"agents/carol/inbox/{one}.msg"),
    ]
    of_each = "message_id, status, discovered_at, processed_at, retry_count, last_error"
    assert look.all(f"SELECT {of_each} {all_messages}") == [
        (one, "pending", NOW + 1, None, 0, None),
        (two, "pending", NOW + 2, None, 0, None),
        (one, "written", NOW, NOW + 1, 0, None),
        (one, "held", NOW, None, 0, "inbox cannot be written"),
    ]


def test_all_messages_has_the_columns_of_messages(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    stage(ledger, one, "bob", "carol")
    names = [row[1] for row in look.all("PRAGMA table_info(all_messages)")]
    assert names == [row[1] for row in look.all("PRAGMA table_info(messages)")]
    given = facts(1)
    of_the_file = "file_size, file_mtime_ns, checksum, message_type"
    assert look.all(f"SELECT DISTINCT {of_the_file} FROM all_messages") == [
        (given.file_size, given.file_mtime_ns, given.checksum, given.message_type)
    ]


# -- the rest ------------------------------------------------------------------------------


BAD_NAME = Refusal(RefusalCode.BAD_NAME, "no name of a message")


def test_a_refusal_without_a_row_is_kept_once(ledger: Ledger, look: Look) -> None:
    for _ in range(2):  # again after a crash
        ledger.add_rejection("alice", "x.msg", 7, NOW, BAD_NAME, message_id(1), NOW + 1)
    ledger.add_rejection(
        "alice", "x.msg", 8, NOW, BAD_NAME._replace(reason="again"), message_id(2), NOW + 2
    )
    assert look.all("SELECT * FROM rejections ORDER BY at") == [
        ("alice", "x.msg", 7, NOW, "no name of a message", message_id(1), NOW + 1, "bad_name"),
        ("alice", "x.msg", 8, NOW, "again", message_id(2), NOW + 2, "bad_name"),
    ]


def test_names_that_are_no_text_are_kept_with_escapes(ledger: Ledger, look: Look) -> None:
    ledger.add_rejection("alice", "\udcff.msg", 7, NOW, BAD_NAME, message_id(1), NOW)
    ledger.agents.add_security_event(
        "not_a_regular_file", "alice", "agents/alice/\udcfe", "why", NOW
    )
    ledger.agents.add_security_event("x", None, None, "why", NOW)
    assert look.one("SELECT file_name FROM rejections") == "\\xff.msg"
    assert look.all("SELECT path FROM security_events") == [("agents/alice/\\xfe",), (None,)]


def test_agents_come_go_and_come_back(ledger: Ledger, look: Look) -> None:
    ledger.agents.register("alice", NOW, 4711)
    ledger.agents.register("bob", NOW)
    active = "SELECT name FROM agents WHERE status = 'active' ORDER BY 1"
    assert look.all(active) == [("alice",), ("bob",)]
    ledger.agents.deactivate("alice")
    assert look.all(active) == [("bob",)]
    ledger.agents.register("alice", NOW + 5)
    assert look.all("SELECT registered_at, pid, status FROM agents WHERE name = 'alice'") == [
        (NOW, 4711, "active")
    ]
    ledger.agents.register("alice", NOW + 6, 4712)
    assert look.one("SELECT pid FROM agents WHERE name = 'alice'") == 4712


def test_what_an_agent_did_and_says_of_itself(ledger: Ledger, look: Look) -> None:
    ledger.agents.register("alice", NOW)
    ledger.agents.register("bob", NOW)
    ledger.agents.mark_seen(["alice", "nobody"], NOW + 1)
    assert look.all("SELECT name, last_seen_at FROM agents ORDER BY 1") == [
        ("alice", NOW + 1),
        ("bob", None),
    ]
    ledger.agents.deactivate("bob")
    ledger.agents.set_note("bob", "compiling", NOW + 2)
    assert look.all("SELECT note, last_seen_at, status FROM agents WHERE name = 'bob'") == [
        ("compiling", NOW + 2, "active")
    ]


def test_state_is_set_and_set_again(ledger: Ledger, look: Look) -> None:
    assert ledger.get_state("epoch") is None
    ledger.set_state("epoch", "1", NOW)
    ledger.set_state("epoch", "2", NOW + 1)
    assert ledger.get_state("epoch") == "2"
    assert look.all("SELECT * FROM orchestrator_state") == [("epoch", "2", NOW + 1)]


def test_an_open_intent_is_closed_and_named(ledger: Ledger, look: Look) -> None:
    add = "INSERT INTO pending_operations (operation_type, payload, created_at, completed_at) "
    ledger._db.execute(
        add + "VALUES ('spawn', '{\"name\": \"w\"}', 1, NULL), ('deliver', '{}', 1, 5)"
    )
    assert ledger.processes.roll_back(NOW) == ['spawn {"name": "w"}']
    assert ledger.processes.roll_back(NOW + 1) == []
    assert look.all("SELECT completed_at FROM pending_operations ORDER BY id") == [(NOW,), (5,)]
