"""The life of a delivery, and what else the ledger keeps: rejections, agents, state, intents."""

from __future__ import annotations

from typing import Any

import pytest

from relay.ledger.deliveries import DeliveryFacts, ObligationFacts, held_delivery
from relay.ledger.ledger import Ledger
from tests.ledger.support import NOW, Look, facts, message_id, put, record, stage, taken_by

STATES = ["held", "staged", "written", "read", "acked", "expired", "bounced", "dead"]
WRITTEN = {"staged_at": NOW, "written_at": NOW + 1}


@pytest.mark.parametrize("state", ["dead", "expired", "bounced"])
def test_what_was_given_up_keeps_its_state(ledger: Ledger, look: Look, state: str) -> None:
    (one,) = record(ledger, 1)
    put(ledger, one, "bob", "written", **WRITTEN)
    put(ledger, one, "bob", state, last_error="why")
    ledger.deliveries.mark_read([taken_by(one, "bob", NOW + 2, "taken")])
    ledger.deliveries.mark_read([taken_by(one, "bob", NOW + 3, "removed")])  # once is enough
    columns = "state, read_at, read_how, last_error"
    assert look.all(f"SELECT {columns} FROM deliveries") == [(state, NOW + 2, "taken", "why")]
    log = "SELECT old_status, new_status FROM audit_log WHERE recipient = 'bob' ORDER BY id"
    assert look.all(log) == [("written", state), (state, "read")]


def test_what_was_read_is_not_written_again_by_what_is_older(ledger: Ledger, look: Look) -> None:
    """A start applies events again that the ledger has; a further attempt is another thing."""
    (one,) = record(ledger, 1)
    put(ledger, one, "bob", "written", **WRITTEN)
    put(ledger, one, "bob", "read", read_at=NOW + 2, read_how="taken")
    put(ledger, one, "bob", "written", **WRITTEN)
    log = "SELECT old_status, new_status FROM audit_log WHERE recipient = 'bob' ORDER BY id"
    assert look.all(log) == [("written", "read")]
    put(ledger, one, "bob", "written", 2, staged_at=NOW + 3, written_at=NOW + 3)
    assert look.all("SELECT state, attempt FROM deliveries") == [("written", 2)]


@pytest.mark.parametrize(("taken", "read_at"), [(NOW + 3, NOW + 2), (NOW + 1, NOW + 1)])
@pytest.mark.parametrize("has_left", [False, True])
def test_an_answer_implies_a_read_that_may_have_been_before_it(
    ledger: Ledger, look: Look, taken: int, read_at: int, has_left: bool
) -> None:
    (one,) = record(ledger, 1)
    put(ledger, one, "bob", "written", **WRITTEN)
    answer = {"ack_status": "failed", "answer_id": "9-ab", "answer_text": "no such branch"}
    put(ledger, one, "bob", "acked", acked_at=NOW + 2, read_at=NOW + 2, **answer)
    if has_left:
        ledger.deliveries.mark_read([taken_by(one, "bob", taken, "removed")])
    else:
        put(ledger, one, "bob", "acked", read_at=taken, read_how="removed")
    columns = "state, read_at, read_how, ack_status, answer_id, answer_text"
    assert look.all(f"SELECT {columns} FROM deliveries") == [
        ("acked", read_at, "removed", "failed", "9-ab", "no such branch")
    ]


@pytest.mark.parametrize("state", STATES)
def test_what_is_held_has_a_reason_and_a_time_and_nothing_else_has(
    ledger: Ledger, look: Look, state: str
) -> None:
    (one,) = record(ledger, 1)
    for name in ("bob", "carol"):
        put(ledger, one, name, state)
    ledger.deliveries.hold([held_delivery(one, "bob", "why", NOW)])
    ledger.deliveries.hold([held_delivery(message_id(2), "bob", "no such row", NOW)])
    told = ("held", "why", NOW) if state == "held" else (state, None, None)
    columns = "state, last_error, due_at"
    assert look.all(f"SELECT {columns} FROM deliveries ORDER BY recipient") == [
        told,
        (state, None, None),
    ]
    ledger.deliveries.hold_rest("after a crash", NOW + 1)
    rest = ("held", "after a crash", NOW + 1) if state == "held" else (state, None, None)
    assert look.all(f"SELECT {columns} FROM deliveries ORDER BY recipient") == [told, rest]


@pytest.mark.parametrize(
    ("column", "states"),
    [
        ("last_error", {"held": "why"}),  # for that it was
        ("obligation", dict.fromkeys(("expired", "bounced", "dead"), "given_up")),
    ],
)
@pytest.mark.parametrize("state", STATES)
def test_what_a_further_fact_leaves_as_it_is(
    ledger: Ledger, look: Look, state: str, column: str, states: dict[str, Any]
) -> None:
    (one,) = record(ledger, 1)
    put(ledger, one, "bob", "written", **WRITTEN)
    put(ledger, one, "bob", "held", 2, last_error="why")
    ledger.deliveries.set_obligations([ObligationFacts(one, "bob", "open")])
    ledger.deliveries.hold([held_delivery(one, "bob", "why", NOW)])
    again = {"written_at": NOW + 5} if state == "written" else {}
    put(ledger, one, "bob", state, 2, **again)
    others = {"last_error": None, "obligation": "open"}
    found = look.one(f"SELECT {column} FROM deliveries")
    assert found == states.get(state, others[column])


def test_a_read_does_not_change_when_an_answer_is_overdue(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    put(ledger, one, "bob", "written", **WRITTEN)
    ledger.deliveries.set_obligations([ObligationFacts(one, "bob", "open", NOW + 9)])
    for state, due_at in (("read", NOW + 9), ("acked", NOW + 9), ("expired", None)):
        put(ledger, one, "bob", state)
        assert look.one("SELECT due_at FROM deliveries") == due_at


def test_an_answer_is_not_owed_by_who_was_given_up(ledger: Ledger, look: Look) -> None:
    one, two = record(ledger, 1, 2)
    put(ledger, one, "bob", "dead", last_error="why")
    put(ledger, two, "bob", "held", last_error="why", due_at=NOW + 1)
    ledger.deliveries.set_obligations(
        [ObligationFacts(name, "bob", "open", NOW + 9, 1) for name in (one, two, message_id(3))]
    )
    columns = "obligation, due_at, reminders"
    assert look.all(f"SELECT {columns} FROM deliveries ORDER BY message_id") == [
        ("given_up", None, 1),
        ("open", NOW + 1, 1),  # when it is tried again comes first
    ]


def test_every_hop_has_its_time(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    stage(ledger, one, "bob")
    put(ledger, one, "bob", "written", written_at=NOW + 1)
    put(ledger, one, "bob", "read", read_at=NOW + 2)
    said = {"acked_at": NOW + 3, "read_at": NOW + 3}
    put(ledger, one, "bob", "acked", ack_status="in_progress", **said)
    columns = "staged_at, written_at, read_at, acked_at, ack_status, attempt, due_at, last_error"
    assert look.all(f"SELECT {columns} FROM deliveries") == [
        (NOW, NOW + 1, NOW + 2, NOW + 3, "in_progress", 1, None, None)
    ]
    put(ledger, one, "bob", "acked", ack_status="completed", acked_at=NOW + 4)
    assert look.all("SELECT acked_at, ack_status, read_at FROM deliveries") == [
        (NOW + 4, "completed", NOW + 2)
    ]


def test_a_held_delivery_is_tried_again_until_it_is_written(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    stage(ledger, one, "bob", "carol")
    put(ledger, one, "bob", "held")
    ledger.deliveries.hold([held_delivery(one, "bob", "inbox cannot be written", NOW + 100)])
    assert look.all("SELECT attempt, due_at, last_error FROM deliveries WHERE state='held'") == [
        (1, NOW + 100, "inbox cannot be written")
    ]
    assert ledger.deliveries.next_due() == NOW + 100
    assert ledger.deliveries.due(NOW + 99, 10) == []
    assert ledger.deliveries.due(NOW + 100, 10) == [
        DeliveryFacts(
            one, "bob", "held", 1, NOW, last_error="inbox cannot be written", due_at=NOW + 100
        )
    ]

    ledger.deliveries.hold([held_delivery(one, "bob", "still", NOW + 300)])
    assert ledger.deliveries.next_due() == NOW + 300
    put(ledger, one, "bob", "written", staged_at=NOW + 299, written_at=NOW + 300)
    assert ledger.deliveries.next_due() is None
    assert look.all("SELECT attempt, due_at FROM deliveries WHERE recipient='bob'") == [(1, None)]


def test_what_is_delivered_again_has_its_attempt(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    stage(ledger, one, "bob")
    put(ledger, one, "bob", "written", written_at=NOW + 1)
    put(ledger, one, "bob", "written", written_at=NOW + 4)  # as found after a crash: not so exact
    put(ledger, one, "bob", "read", read_at=NOW + 4)
    columns = "attempt, staged_at, written_at, read_at"
    assert look.all(f"SELECT {columns} FROM deliveries") == [(1, NOW, NOW + 1, NOW + 4)]
    put(ledger, one, "bob", "held", 2, staged_at=NOW + 5)
    put(ledger, one, "bob", "held", 2, staged_at=NOW + 6)  # its age is that of the attempt
    assert look.all(f"SELECT {columns} FROM deliveries") == [(2, NOW + 5, NOW + 1, NOW + 4)]
    put(ledger, one, "bob", "written", 2, staged_at=NOW + 7, written_at=NOW + 8)
    put(ledger, one, "bob", "read", 1, read_at=NOW + 9)
    assert look.all(f"SELECT {columns} FROM deliveries") == [(2, NOW + 7, NOW + 8, NOW + 9)]


def test_the_next_one_due_is_the_earliest(ledger: Ledger) -> None:
    assert ledger.deliveries.next_due() is None
    (one,) = record(ledger, 1)
    stage(ledger, one, "a", "b", "c")
    for name, due in (("a", 30), ("b", 10), ("c", 20)):
        put(ledger, one, name, "held", last_error="x", due_at=NOW + due)
    assert ledger.deliveries.next_due() == NOW + 10
    assert {held.recipient for held in ledger.deliveries.due(NOW + 20, 10)} == {"b", "c"}
    assert len(ledger.deliveries.due(NOW + 30, 2)) == 2


def test_deliveries_of_some_messages(ledger: Ledger) -> None:
    one, two, three = record(ledger, 1, 2, 3)
    stage(ledger, one, "bob", "carol")
    stage(ledger, two, "bob")
    assert ledger.deliveries.rows([one, three]) == {
        one: {
            "bob": DeliveryFacts(one, "bob", "staged", 1, NOW),
            "carol": DeliveryFacts(one, "carol", "staged", 1, NOW),
        }
    }
    assert ledger.deliveries.rows([]) == {}


def test_what_stands_in_an_inbox(ledger: Ledger) -> None:
    one, two, three = record(ledger, 1, 2, 3)
    for message in (one, two, three):
        stage(ledger, message, "bob", "carol")
    standing = [(one, "bob"), (two, "bob"), (two, "carol")]
    for key in standing:
        put(ledger, *key, "written", written_at=NOW)
    put(ledger, two, "bob", "read", read_at=NOW)
    assert ledger.deliveries.unread("bob") == {one: NOW}
    assert ledger.deliveries.unread("carol") == {two: NOW}
    assert ledger.deliveries.unread("nobody") == {}
    put(ledger, one, "bob", "dead", last_error="no acknowledgment")
    assert ledger.deliveries.unread("bob") == {one: NOW}  # it stands there all the same
    put(ledger, one, "bob", "dead", read_at=NOW + 1, read_how="taken")
    assert ledger.deliveries.unread("bob") == {}


def test_all_messages_has_what_was_sent_and_delivered(ledger: Ledger, look: Look) -> None:
    one, two = record(ledger, 1, 2)
    stage(ledger, one, "bob", "carol")
    put(ledger, one, "bob", "written", written_at=NOW + 1)
    put(ledger, one, "carol", "held", last_error="inbox cannot be written", due_at=NOW + 100)
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


def test_a_refusal_without_a_row_is_kept_once(ledger: Ledger, look: Look) -> None:
    for _ in range(2):  # again after a crash
        first = (
            "alice",
            "x.msg",
            7,
            NOW,
            "no name of a message",
            message_id(1),
            NOW + 1,
            "bad_name",
        )
        ledger.add_rejections([first])
    second = ("alice", "x.msg", 8, NOW, "again", message_id(2), NOW + 2, "bad_name")
    ledger.add_rejections([first, second])
    assert look.all("SELECT * FROM rejections ORDER BY at") == [first, second]


def test_paths_that_are_no_text_are_kept_with_escapes(ledger: Ledger, look: Look) -> None:
    ledger.agents.add_security_event(
        "not_a_regular_file", "alice", "agents/alice/\udcfe", "why", NOW
    )
    ledger.agents.add_security_event("x", None, None, "why", NOW)
    assert look.all("SELECT path FROM security_events") == [("agents/alice/\\xfe",), (None,)]


def test_agents_come_go_and_come_back(ledger: Ledger, look: Look) -> None:
    ledger.agents.register("alice", NOW, 4711)
    ledger.agents.register("bob", NOW)
    active = "SELECT name FROM agents WHERE status = 'active' ORDER BY 1"
    assert look.all(active) == [("alice",), ("bob",)]
    ledger.agents.deactivate("alice", NOW)
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
    ledger.agents.deactivate("bob", NOW)
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
