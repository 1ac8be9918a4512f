"""From a renamed file to the inboxes: every address, every answer. See docs/formats/msg.md."""

from __future__ import annotations

import shutil

import pytest

from relay.base.config import Config, StoreSettings
from tests.box import Box


def test_an_answer_to_one_named_lead_that_has_left_is_not_for_who_has_the_role(box: Box) -> None:
    box.home.make_agent("lead")
    box.path("agents", "carol", "meta.json").write_text('{"role": "lead"}')
    box.tick()
    asked = box.send("lead", "TO: bob\n\nwhere is main?")
    shutil.rmtree(box.path("agents", "lead"))
    box.after(31)
    box.send("bob", f"TO: lead\nRE: {asked}\n\nat 4f2c1e9")
    assert box.inbox("carol") == {}
    assert "there is no agent lead" in box.nacks("bob")[0]


RETIRE_BOB = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.retire\nNAME: bob\n"


def test_an_agent_named_lead_may_ask_for_what_the_lead_may_where_nobody_else_is(box: Box) -> None:
    box.home.make_agent("Lead")
    box.tick()
    box.send("alice", RETIRE_BOB)
    assert "is for operator and the lead alone, not for alice" in box.nacks("alice")[0]
    box.send("Lead", RETIRE_BOB)
    assert box.bodies("Lead") == ["completed bob is retired\n"]
    box.path("agents", "carol", "meta.json").write_text('{"role": "lead"}')
    box.tick()
    box.send("Lead", RETIRE_BOB.replace("bob", "carol"))
    assert "is for operator and the lead alone, not for Lead" in box.nacks("Lead")[0]


@pytest.mark.box("bob", "Lead", config=Config(lead="dave"))
def test_nor_where_the_one_that_is_configured_is_gone(box: Box) -> None:
    box.send("Lead", RETIRE_BOB)
    assert "is for operator and the lead alone, not for Lead" in box.nacks("Lead")[0]


@pytest.mark.shows("engine 7.11")
@pytest.mark.box("alice", "bob", "carol", config=Config(store=StoreSettings(active_messages=4)))
def test_a_full_store_lets_the_file_wait(box: Box) -> None:
    senders = ("alice", "carol", "alice", "carol", "alice")
    sent = [box.send(name, "TO: bob\nKIND: command\n\ngo") for name in senders]
    assert len(box.inbox("bob")) == 4
    row = box.row(sent[4])
    assert (row["status"], row["last_error"]) == (
        "pending",
        "the store has 4 active messages, its limit is 4",
    )
    assert box.outbox("alice")[-1] == f"{sent[4]}.msg"
    assert box.nacks("alice") == []
    for name, one in zip(senders[:4], sent, strict=False):
        box.send("bob", f"TO: {name}\nKIND: ack\nRE: {one}\n\ncompleted")
    box.flush()
    for _ in range(5):
        box.after(61, turns=6)
    assert box.states(sent[4]) == {"bob": "written"}


# -- answered at once: the channel is the address, and what is for the relay itself --------


# -- the channel is the address ------------------------------------------------------------


def test_a_channel_is_joined_and_left_by_its_address(box: Box) -> None:
    for agent in ("alice", "bob"):
        box.send(agent, "TO: #build\nKIND: join\n\n")
    assert box.acks("bob") == ["completed bob is a member of build, a Group channel\n"]
    box.send("alice", "TO: #build\n\nhi")
    assert "hi" in box.bodies("bob")
    box.send("bob", "TO: #build\nKIND: leave")
    box.send("alice", "TO: #build\n\nagain")
    assert "again" not in box.bodies("bob")
    assert "no recipients: build has no other members" in box.nacks("alice")[0]


def test_topics_are_subscribed_to_and_left_by_the_address(box: Box) -> None:
    box.send("bob", "TO: #ci\nKIND: subscribe\n\nPATTERN: test.*")
    box.send("carol", "TO: #ci\nKIND: subscribe\n\n")
    box.send("alice", "TO: #ci\nKIND: join")
    box.send("alice", "TO: #ci\nTOPIC: test.red\n\none")
    box.send("alice", "TO: #ci\nTOPIC: lint\n\ntwo")
    assert [body for body in box.bodies("bob") if body in ("one", "two")] == ["one"]
    assert [body for body in box.bodies("carol") if body in ("one", "two")] == ["one", "two"]
    box.send("bob", "TO: #ci\nKIND: unsubscribe")
    box.send("alice", "TO: #ci\nTOPIC: test.red\n\nthree")
    assert "three" in box.bodies("carol") and "three" not in box.bodies("bob")


def test_two_channels_in_one_message_are_not_guessed_between(box: Box) -> None:
    box.send("alice", "TO: #build\nKIND: join\n\nCHANNEL: other")
    assert "TO says #build and CHANNEL says other" in box.nacks("alice")[0]
    assert box.store.channels.find_by_name("build") is None


# -- control messages to somebody else -----------------------------------------------------


def test_what_is_for_the_relay_reaches_nobody_else(box: Box) -> None:
    box.send("alice", "TO: #build\nKIND: join\n\n")
    for kind in ("spawn", "release", "continuity"):
        for to in ("bob", "*", "#build", "Lead"):
            text = f"TO: {to}\nKIND: {kind}\nNAME: x\nACTION: load\n\nCLI: sh"
            sent = box.send("alice", text)
            said = f"{sent}.msg: KIND {kind} is for the relay itself: send it TO: __orchestrator__"
            assert sum(said in nack for nack in box.nacks("alice")) == 1, text
            assert box.inbox("bob") == {} and box.row(sent)["status"] == "failed", text


def test_to_join_an_agent_is_refused(box: Box) -> None:
    for kind in ("join", "leave", "subscribe", "unsubscribe"):
        sent = box.send("alice", f"TO: bob\nKIND: {kind}\n\nCHANNEL: build")
        said = f"{sent}.msg: KIND {kind} is for the relay itself: send it TO: #channel, or "
        assert sum(said in nack for nack in box.nacks("alice")) == 1, kind
        assert box.inbox("bob") == {}, kind
