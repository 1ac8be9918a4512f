"""One file, one agent, one fault: nobody else is stopped, and the sender hears of it."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from relay.base.errors import StateFault
from relay.delivery.plan import plan_file
from relay.delivery.values import Inbound, Plan
from relay.engine import events, transitions
from relay.engine.state import State
from tests.box import Box

pytestmark = pytest.mark.shows("ready 1.5")


def test_a_fault_of_ours_refuses_one_file_and_stops_no_other(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(inbound: Inbound, *rest: Any) -> Plan:
        if inbound.message and inbound.message.body == b"poison":
            raise ZeroDivisionError("division by zero")
        return plan_file(inbound, *rest)

    monkeypatch.setattr("relay.delivery.loop.plan_file", faulty)
    sent = box.drop("alice", "TO: bob\n\npoison")
    box.drop("carol", "TO: bob\n\nwater")
    box.tick()
    assert box.bodies("bob") == ["water"]
    assert "internal error of the relay" in box.nacks("alice")[0]
    assert box.row(sent)["status"] == "failed"


def test_a_fault_while_an_event_changes_the_store_ends_the_session_and_refuses_one_file(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an event in memory is worth nothing: the store is opened again, without the file."""
    change = transitions._APPLY[events.MessageSent]

    def faulty(state: State, event: events.MessageSent) -> None:
        change(state, event)
        if event.message.content == b"poison":
            raise ZeroDivisionError("poison")

    monkeypatch.setitem(transitions._APPLY, events.MessageSent, faulty)
    sent = box.drop("alice", "TO: bob\n\npoison")
    box.drop("carol", "TO: bob\n\nwater")
    with pytest.raises(StateFault, match="MessageSent cannot be applied: ZeroDivisionError"):
        box.tick()
    box.restart()
    box.after(1)
    assert box.bodies("bob") == ["water"]
    assert "internal error: MessageSent cannot be applied" in box.nacks("alice")[0]
    assert box.row(sent)["status"] == "failed" and box.outbox("alice") == []
    assert box.store.messages.find_by_relay_id(sent) is None


def test_an_archive_that_cannot_be_written_is_tried_again(box: Box) -> None:
    archive = box.path("archive")
    shutil.rmtree(archive)
    archive.write_text("a file")
    sent = box.send("alice", "TO: bob\n\nhi")
    box.flush()
    assert box.row(sent)["status"] == "completed"
    assert box.states(box.send("bob", "TO: carol\n\ngo on")) == {"carol": "written"}

    archive.unlink()
    archive.mkdir()
    box.after(31)
    assert box.row(sent)["status"] == "archived"
    assert box.outbox("alice") == []
    assert not list(archive.glob("*/alice/duplicates/*"))


def test_an_agent_being_removed_is_not_made_again_under_ones_hands(box: Box) -> None:
    agent = box.path("agents", "alice")
    shutil.rmtree(agent / "outbox")
    box.tick()  # the relay hears of it, and gives it a second
    assert not (agent / "outbox").exists()
    shutil.rmtree(agent)
    box.tick()
    assert not agent.exists()
    assert box.sql("SELECT status FROM agents WHERE name = 'alice'") == [("inactive",)]


def test_a_clock_set_back_is_logged(box: Box) -> None:
    box.clock.jump(-3600)
    box.tick()
    assert [line for line in box.log if line["action"] == "clock_skew"]
    assert box.states(box.send("alice", "TO: bob\n\nhi")) == {"bob": "written"}
