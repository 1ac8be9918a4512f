"""Held deliveries: tried when due, with longer pauses, from wherever the original lies now."""

from __future__ import annotations

import os
from collections.abc import Set

import msgspec
import pytest

from relay.acomm.model import DeliveryState
from relay.agents.status import Directory
from relay.base.clock import NS_PER_S
from relay.delivery.retry import HeldQueue
from relay.delivery.values import Plan, Resources
from relay.engine.engine import Engine
from tests.box import Box


def given(box: Box) -> Resources:
    return Resources(
        box.config, box.home, box.ledger, box.store, box.events, box.clock, box.dispatcher._log
    )


@pytest.fixture
def held(box: Box) -> HeldQueue:
    """The same as the dispatcher's, to be called by hand."""
    return HeldQueue(given(box))


def due_in_s(box: Box, held: HeldQueue) -> float | None:
    due = held.due_ns()
    return None if due is None else (due - box.clock.monotonic_ns()) / NS_PER_S


def plans_due(box: Box, held: HeldQueue, agents: Set[str] | None = None) -> list[Plan]:
    with box.home.dirs() as dirs:
        return held.plans_due(dirs, Directory(box.roster.agents if agents is None else agents))


def retry(box: Box, held: HeldQueue, later_s: int = 0) -> None:
    box.clock.advance(later_s)
    execute(box, held, plans_due(box, held))


def execute(box: Box, held: HeldQueue, plans: list[Plan]) -> None:
    with box.home.dirs() as dirs:
        held.settle(box.dispatcher._executor.execute(dirs, plans))


def test_pauses_grow_to_a_minute_and_hold_nobody_else_up(box: Box, held: HeldQueue) -> None:
    assert held.due_ns() is None
    with box.broken_inbox("bob"):
        with box.broken_inbox("carol"):
            sent = box.send("alice", "TO: *\n\nhi")
        assert due_in_s(box, held) == 1
        retry(box, held)
        assert due_in_s(box, held) == 1  # not before its time
        for pause_s in (2, 4, 8, 16, 32, 60, 60):
            box.clock.advance(due_in_s(box, held) or 0)
            retry(box, held)
            assert due_in_s(box, held) == pause_s
            assert box.states(sent) == {"bob": "held", "carol": "written", "operator": "written"}
        (error,) = box.sql("SELECT last_error FROM deliveries WHERE state = 'held'")
        assert "inbox is a link or not a directory" in error[0]
        stored = box.store.messages.find_by_relay_id(sent)
        assert stored and stored.status.label == "Sent"  # not delivered to all of them
        box.clock.advance(120)
        assert due_in_s(box, held) == 0
    retry(box, held)
    assert box.states(sent) == dict.fromkeys(("bob", "carol", "operator"), "written")
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "1"  # its first delivery
    assert held.due_ns() is None


def test_from_the_outbox_and_from_the_archive(box: Box, held: HeldQueue) -> None:
    box.join("team", "alice", "bob")
    with box.broken_inbox("bob"):
        one = box.send("alice", "TO: #team\nX-Ticket: 42\n\none")
        box.flush()
        assert box.row(one)["file_path"].startswith("archive/")
        archive = box.path("archive")
        os.rename(archive, box.path("tmp", "archive"))
        archive.write_text("nothing can be archived")
        two = box.send("alice", "TO: bob\n\ntwo")
        assert box.row(two)["file_path"].startswith("agents/")
        archive.unlink()
        os.rename(box.path("tmp", "archive"), archive)
    retry(box, held, 60)
    delivered = box.inbox("bob")
    assert {number: delivered[number].body for number in (one, two)} == {one: b"one", two: b"two"}
    assert delivered[one].headers["X-TICKET"] == "42"
    assert (delivered[one].headers["FROM"], delivered[one].headers["CHANNEL"]) == ("alice", "team")
    assert "CHANNEL" not in delivered[two].headers
    stored = box.store.messages.find_by_relay_id(one)
    assert stored and stored.status.label == "Delivered"


def test_the_orchestrators_own_come_from_the_engine(box: Box, held: HeldQueue) -> None:
    with box.broken_inbox("alice"):
        sent = box.send("alice", "TO: nobody\n\nhi")
        box.flush()
        assert box.nacks("alice") == []
    retry(box, held, 60)
    (nack,) = box.nacks("alice")
    assert "there is no agent nobody" in nack
    (message,) = box.inbox("alice").values()
    assert message.headers["RE"] == sent
    assert message.headers["FROM"] == "__orchestrator__"


def test_so_many_at_a_time(box: Box) -> None:
    limits = msgspec.structs.replace(box.config.limits, batch_files=2)
    config = msgspec.structs.replace(box.config, limits=limits)
    held = HeldQueue(given(box)._replace(config=config))
    with box.broken_inbox("bob"):
        for number in range(5):
            box.send("alice", f"TO: bob\n\n{number}")
    box.clock.advance(60)
    for left in (3, 1, 0):
        retry(box, held)
        assert len(box.sql("SELECT 1 FROM deliveries WHERE state = 'held'")) == left
    assert len(box.bodies("bob")) == 5


@pytest.mark.parametrize(("late_s", "state"), [(29, "written"), (31, "expired")])
def test_not_past_its_ttl(box: Box, held: HeldQueue, late_s: int, state: str) -> None:
    with box.broken_inbox("bob"):
        sent = box.send("alice", "TO: bob\nTTL: 30\n\nquick")
    retry(box, held, late_s)
    assert box.states(sent) == {"bob": state}
    assert held.due_ns() is None
    assert (box.bodies("bob") == ["quick"]) is (state == "written")
    told = "".join(box.nacks("alice"))
    assert told.startswith("not delivered to bob: its TTL of 30 s passed") is (state == "expired")


def test_a_lost_original_comes_from_the_engine(box: Box, held: HeldQueue) -> None:
    with box.broken_inbox("bob"):
        gone = box.send("alice", "TO: bob\nTHREAD: t\nX-Ticket: 42\nPRIORITY: 0\n\ngone")
        changed = box.send("alice", "TO: bob\n\nfirst")
        box.flush()
        os.unlink(box.path(*box.row(gone)["file_path"].split("/")))
        box.path(*box.row(changed)["file_path"].split("/")).write_text("TO: bob\n\nsecond")
    retry(box, held, 60)
    inbox = box.inbox("bob")
    assert (inbox[gone].body, inbox[changed].body) == (b"gone", b"first")
    assert inbox[gone].headers["X-TICKET"] == "42"
    assert inbox[gone].headers["THREAD"] == "t"
    assert inbox[gone].headers["PRIORITY"] == "0"


def test_after_a_day_it_is_given_up(box: Box, held: HeldQueue) -> None:
    with box.broken_inbox("bob"):
        sent = box.send("alice", "TO: bob\n\nhi")
        box.clock.advance(86_399)
        retry(box, held)
        assert box.states(sent) == {"bob": "held"}
        box.after(60, turns=1)
    assert box.states(sent) == {"bob": "dead"}
    (letter,) = box.store.retries.dead_letters()
    assert letter.recipients == ("bob",)
    (nack,) = box.nacks("alice")
    assert nack.startswith("not delivered to bob: its inbox could not be written for 86459 s: ")


def test_to_one_who_is_gone_it_bounces(box: Box, held: HeldQueue) -> None:
    with box.broken_inbox("bob"):
        sent = box.send("alice", "TO: bob\n\nhi")
    box.clock.advance(60)
    plans = plans_due(box, held, {"alice", "operator"})
    ((ended,),) = [plan.changes.ended for plan in plans]
    assert (ended.recipient, ended.state, ended.reason) == (
        "bob",
        DeliveryState.BOUNCED,
        "no longer an agent",
    )
    assert box.states(sent) == {"bob": "held"}  # its sender is told with it
    execute(box, held, plans)
    assert box.nacks("alice") == ["not delivered to bob: no longer an agent\n"]
    assert box.states(sent) == {"bob": "bounced"}
    stored = box.store.messages.find_by_relay_id(sent)
    assert stored and stored.status.label == "Failed"
    assert held.due_ns() is None


@pytest.mark.damages
def test_without_the_engine_the_file_is_enough_and_without_both_it_waits(box: Box) -> None:
    with box.broken_inbox("bob"):
        one = box.send("alice", "TO: bob\n\none")
        two = box.send("alice", "TO: bob\n\ntwo")
        box.flush()
    os.unlink(box.path(*box.row(two)["file_path"].split("/")))
    box.clock.advance(60)
    alone = HeldQueue(given(box)._replace(store=Engine(box.clock)))
    retry(box, alone)
    assert box.bodies("bob") == ["one"]
    assert (box.states(one), box.states(two)) == ({"bob": "written"}, {"bob": "held"})
    ((error,),) = box.sql("SELECT last_error FROM deliveries WHERE state = 'held'")
    assert "neither file nor store holds it" in error


@pytest.mark.damages
def test_a_delivery_of_no_message_is_over(box: Box, held: HeldQueue) -> None:
    with box.ledger.transaction():
        box.ledger._db.execute(
            "INSERT INTO deliveries (message_id, recipient, state, staged_at, due_at) "
            "VALUES ('1-', 'bob', 'held', 1, 1)"
        )
    retry(box, held)
    assert box.sql("SELECT state, last_error FROM deliveries WHERE message_id = '1-'") == [
        ("bounced", "its row is gone")
    ]
    assert held.due_ns() is None
