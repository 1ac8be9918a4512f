"""From a renamed file to the inboxes: every address, every answer. See docs/formats/msg.md."""

from __future__ import annotations

import os
import shutil

import pytest

from relay.base.config import Config, StoreSettings
from tests.box import Box


def test_a_message_reaches_its_recipient_and_every_hop_is_in_the_ledger(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nX-Ticket: 42\n\nhello")

    (delivered,) = box.inbox("bob").values()
    assert delivered.body == b"hello"
    assert delivered.headers["FROM"] == "alice"
    assert delivered.headers["ID"] == sent
    assert delivered.headers["X-TICKET"] == "42"
    assert delivered.headers["ATTEMPT"] == "1"
    assert list(box.inbox("bob")) == [sent]  # the same name as the file that was sent
    assert box.row(sent)["status"] == "archived"
    assert box.states(sent) == {"bob": "written"}

    box.flush()
    assert box.row(sent)["status"] == "archived"
    assert box.stored() == [sent]
    assert box.outbox("alice") == []
    assert box.path(box.row(sent)["file_path"]).read_text() == "TO: bob\nX-Ticket: 42\n\nhello"

    box.take("bob", sent)
    box.tick()
    assert box.states(sent) == {"bob": "read"}


def test_the_sender_is_the_directory_never_the_file(box: Box) -> None:
    box.send("alice", "TO: bob\nFROM: carol\nID: 1\nCHANNEL: x\n\nhello")

    (delivered,) = box.inbox("bob").values()
    assert delivered.headers["FROM"] == "alice"
    assert "CHANNEL" not in delivered.headers


def test_star_reaches_every_other_agent(box: Box) -> None:
    sent = box.send("alice", "TO: *\n\nlunch")

    assert box.states(sent) == {"bob": "written", "carol": "written", "operator": "written"}
    assert box.inbox("bob")[sent].headers["CHANNEL"] == "all"
    assert box.inbox("alice") == {}


def test_star_does_not_reach_those_who_left(box: Box) -> None:
    box.send("alice", "TO: *\n\none")
    os.rename(box.path("agents", "carol"), box.path("tmp", "carol"))
    sent = box.send("alice", "TO: *\n\ntwo")

    assert box.states(sent) == {"bob": "written", "operator": "written"}


def test_a_channel_reaches_those_who_joined(box: Box) -> None:
    box.join("team", "alice")
    box.send("bob", "TO: __orchestrator__\nKIND: join\n\nCHANNEL: #team")
    sent = box.send("alice", "TO: #team\n\nhello team")

    assert box.states(sent) == {"bob": "written"}
    assert box.inbox("bob")[sent].headers["CHANNEL"] == "team"

    box.send("bob", "TO: __orchestrator__\nKIND: leave\n\nCHANNEL: team")
    later = box.send("alice", "TO: #team\n\nstill there?")
    assert box.states(later) == {}


def test_who_has_not_joined_a_channel_is_told(box: Box) -> None:
    box.join("team", "alice")
    sent = box.send("carol", "TO: #team\n\nlet me in")

    assert box.row(sent)["status"] == "failed"
    assert "carol is not a participant of channel team" in box.nacks("carol")[0]


def test_topics_reach_those_who_subscribed(box: Box) -> None:
    box.send(
        "bob", "TO: __orchestrator__\nKIND: subscribe\n\nCHANNEL: ci\nPATTERN: build.*.success"
    )
    box.send("carol", "TO: __orchestrator__\nKIND: subscribe\n\nCHANNEL: ci\nPATTERN: *.failure")
    box.join("ci", "alice")
    sent = box.send("alice", "TO: #ci\nTOPIC: build.front.success\n\n847 tests passed")

    assert box.states(sent) == {"bob": "written"}

    box.send(
        "bob", "TO: __orchestrator__\nKIND: unsubscribe\n\nCHANNEL: ci\nPATTERN: build.*.success"
    )
    assert box.states(box.send("alice", "TO: #ci\nTOPIC: build.front.success\n\nagain")) == {}


def test_lead_is_who_has_the_role(box: Box) -> None:
    sent = box.send("alice", "TO: Lead\n\nwho?")
    assert "no lead is set" in box.nacks("alice")[0]

    box.path("agents", "carol", "meta.json").write_text('{"role": "lead"}')
    sent = box.send("alice", "TO: LEAD\n\nyou?")
    assert box.states(sent) == {"carol": "written"}


def test_mail_and_answers_for_an_agent_named_lead_reach_it_whoever_has_the_role(box: Box) -> None:
    box.home.make_agent("lead")
    box.path("agents", "carol", "meta.json").write_text('{"role": "lead"}')
    box.tick()
    asked = box.send("lead", "TO: bob\nKIND: query\n\nwhere is main?")
    assert box.states(box.send("bob", f"TO: lead\nRE: {asked}\n\nat 4f2c1e9")) == {
        "lead": "written"
    }
    assert box.states(box.send("alice", "TO: lead\n\nfor the agent")) == {"lead": "written"}
    assert box.states(box.send("alice", "TO: Lead\n\nfor the role")) == {"carol": "written"}


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


def test_and_may_ask_for_what_the_lead_may(box: Box) -> None:
    box.home.make_agent("Lead")
    box.tick()
    box.send("alice", RETIRE_BOB)
    assert "is for operator and the lead alone, not for alice" in box.nacks("alice")[0]
    box.send("Lead", RETIRE_BOB)
    assert box.bodies("Lead") == ["completed bob is retired\n"]


def test_but_not_where_another_one_is_the_lead(box: Box) -> None:
    box.home.make_agent("Lead")
    box.path("agents", "carol", "meta.json").write_text('{"role": "lead"}')
    box.tick()
    box.send("Lead", RETIRE_BOB)
    assert "is for operator and the lead alone, not for Lead" in box.nacks("Lead")[0]


@pytest.mark.box("bob", "Lead", config=Config(lead="dave"))
def test_nor_where_the_one_that_is_configured_is_gone(box: Box) -> None:
    box.send("Lead", RETIRE_BOB)
    assert "is for operator and the lead alone, not for Lead" in box.nacks("Lead")[0]


def test_status_is_kept_with_the_agent(box: Box) -> None:
    sent = box.send("bob", "TO: __orchestrator__\nKIND: status\n\nrefactoring the parser")

    assert box.states(sent) == {"__orchestrator__": "read"}
    assert box.sql("SELECT note FROM agents WHERE name = 'bob'") == [("refactoring the parser",)]
    assert box.inbox("bob") == {}  # told, not asked


def test_join_is_answered(box: Box) -> None:
    sent = box.send("bob", "TO: __orchestrator__\nKIND: join\n\nCHANNEL: team")

    (answer,) = box.inbox("bob").values()
    assert (answer.kind, answer.headers["RE"]) == ("ack", sent)
    assert answer.headers["FROM"] == "__orchestrator__"
    assert answer.body == b"completed created the group team, you are its owner\n"


def test_a_response_answers_the_one_query_of_its_thread(box: Box) -> None:
    query = box.send("alice", "TO: bob\nKIND: query\nTHREAD: t-1\n\nwhich branch?")
    answer = box.send("bob", "TO: alice\nKIND: response\nTHREAD: t-1\n\nmain")

    assert box.bodies("alice") == ["main"]
    assert box.states(query) == {"bob": "acked"}
    message = box.store.messages.find_by_relay_id(answer)
    original = box.store.messages.find_by_relay_id(query)
    assert message is not None and original is not None
    assert message.correlation_id == original.correlation_id


def test_one_bad_inbox_does_not_stop_the_others(box: Box) -> None:
    inbox = box.path("agents", "bob", "inbox")
    os.rename(inbox, box.path("tmp", "inbox"))
    inbox.write_text("a file where a directory must be")
    sent = box.send("alice", "TO: *\n\nhello")

    assert box.states(sent) == {"bob": "held", "carol": "written", "operator": "written"}
    box.flush()
    assert box.row(sent)["status"] == "archived"

    inbox.unlink()
    os.rename(box.path("tmp", "inbox"), inbox)
    box.after(60, turns=1)
    assert box.states(sent)["bob"] == "written"
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "1"
    assert box.bodies("bob") == ["hello"]


def test_who_has_left_a_group_may_answer_and_stays_out(box: Box) -> None:
    box.join("team", "alice", "bob")
    asked = box.send("alice", "TO: #team\nKIND: query\n\nwho is free?")
    box.send("bob", "TO: __orchestrator__\nKIND: leave\n\nCHANNEL: team")
    answer = box.send("bob", f"TO: #team\nKIND: response\nRE: {asked}\n\nI am")

    assert box.states(answer) == {"alice": "written"}
    box.send("alice", "TO: #team\n\nanybody?")
    assert "anybody?" not in box.bodies("bob")


def test_a_group_of_one_is_told_that_nobody_gets_it(box: Box) -> None:
    box.join("team", "alice")
    box.send("alice", "TO: #team\n\nanybody?")
    assert box.nacks("alice") == ["no recipients: team has no other members\n"]


@pytest.mark.shows("engine 7.11")
@pytest.mark.box("alice", "bob", config=Config(store=StoreSettings(active_messages=4)))
def test_a_full_store_lets_the_file_wait(box: Box) -> None:
    sent = [box.send("alice", f"TO: bob\nKIND: command\n\n{number}") for number in range(5)]
    assert len(box.inbox("bob")) == 4
    row = box.row(sent[4])
    assert (row["status"], row["last_error"]) == (
        "pending",
        "the store has 4 active messages, its limit is 4",
    )
    assert box.outbox("alice")[-1] == f"{sent[4]}.msg"
    assert box.nacks("alice") == []
    for one in sent[:4]:
        box.send("bob", f"TO: alice\nKIND: ack\nRE: {one}\n\ncompleted")
    box.flush()
    for _ in range(5):
        box.after(61, turns=6)
    assert box.states(sent[4]) == {"bob": "written"}
