"""Answers: replies, acks, questions that wait, and what the relay says to control messages."""

from __future__ import annotations

import pytest

from agent_sdk import Agent, Kind, MessageError, Refused, Timeout
from relay.base.errors import InvalidName
from relay.base.message import MessageFile
from tests.agent_sdk.support import HandRelay, script


def take(agent: Agent) -> object:
    message = agent.receive(timeout_s=0)
    assert message is not None
    return message


def test_a_reply_goes_to_the_sender_in_the_same_thread_or_as_it_is_told(
    relay: HandRelay, alice: Agent, bob: Agent
) -> None:
    sent = alice.send("bob", "which branch?", kind="query", thread="t-1")
    relay.carry()
    question = take(bob)
    bob.reply(question, "main", priority=1)
    bob.reply(question, "by the way", kind="message", thread="t-2")
    relay.carry()
    answer, aside = alice.messages(timeout_s=0)
    assert (answer.sender, answer.re, answer.thread, answer.kind, answer.body) == (
        "bob", sent, "t-1", Kind.RESPONSE, "main",
    )  # fmt: skip
    assert answer.headers["PRIORITY"] == "1"
    assert (aside.kind, aside.thread) == (Kind.MESSAGE, "t-2")


def test_an_id_cannot_be_replied_to(bob: Agent) -> None:
    for options in ({}, {"kind": "message"}):
        with pytest.raises(MessageError, match="reply takes a message that was received, got 'de"):
            bob.reply("deadbeef", "x", **options)


def test_short_ids_name_messages_of_the_mailbox(relay: HandRelay, alice: Agent, bob: Agent) -> None:
    asked = alice.send("bob", "deploy", kind="command", wait=0)
    relay.carry()
    short = asked.partition("-")[2][:8]
    take(bob)
    bob.ack(short, "completed", to="alice")
    bob.send("alice", "and more", re=short)
    relay.carry()
    assert [one.re for one in alice.messages(timeout_s=0)] == [asked, asked]
    with pytest.raises(MessageError, match="'00ff' is not the id of a message that bob has"):
        bob.send("alice", "x", re="00ff")


def test_a_question_waits_for_its_response_and_leaves_the_rest(
    relay: HandRelay, alice: Agent, bob: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay.deliver("alice", "before")
    relay.put_bytes("alice", "1706123456-ab.msg", b"no message")

    def something_else() -> None:
        relay.carry()
        relay.deliver("alice", "meanwhile")
        relay.deliver("alice", "to another question", kind=Kind.RESPONSE, RE="1706123456-cd")

    def bob_answers() -> None:
        question = take(bob)
        assert "AWAIT" not in question.headers  # patience is the sender's alone
        bob.ack(question, "in_progress")
        bob.reply(question, "main")
        relay.carry()

    script(monkeypatch, something_else, bob_answers)
    answer = alice.query("bob", "which branch?", timeout_s=30)
    assert (answer.body, answer.kind) == ("main", Kind.RESPONSE)
    with pytest.raises(MessageError):
        alice.receive(timeout_s=0)
    assert [message.body for message in alice.messages(timeout_s=0)] == [
        "before", "meanwhile", "to another question", "in_progress",
    ]  # fmt: skip


def test_a_response_that_comes_too_late_is_received_like_any_message(
    relay: HandRelay, alice: Agent, bob: Agent
) -> None:
    with pytest.raises(Timeout, match=r"no response to .* came within 0.05 s"):
        alice.query("bob", "which branch?", timeout_s=0.05)
    relay.carry()
    question = take(bob)
    assert "AWAIT" not in question.headers
    bob.reply(question, "main")
    relay.carry()
    assert take(alice).re == question.id


def test_acks_go_to_the_sender_or_by_id_to_the_relay(
    relay: HandRelay, alice: Agent, bob: Agent
) -> None:
    sent = alice.send("bob", "deploy", kind="command")
    relay.carry()
    command = take(bob)
    bob.ack(command)
    bob.ack(command, "completed", "all green")
    bob.nack(command, "no: frozen")
    bob.ack(sent, "in_progress")
    bob.ack(sent, to="alice")
    relay.carry()
    assert [(m.kind, m.re, m.body) for m in alice.messages(timeout_s=0)] == [
        (Kind.ACK, sent, "received"),
        (Kind.ACK, sent, "completed\nall green"),
        (Kind.NACK, sent, "no: frozen"),
        (Kind.ACK, sent, "received"),
    ]
    ((_, message),) = relay.for_orchestrator
    assert (message.to, message.kind, message.body) == (
        "__orchestrator__", Kind.ACK, b"in_progress",
    )  # fmt: skip
    with pytest.raises(MessageError, match="'done' is not one of received"):
        bob.ack(command, "done")
    with pytest.raises(MessageError, match="RE"):
        bob.ack("that one")


def test_channels_are_asked_for_at_the_relay(relay: HandRelay, alice: Agent) -> None:
    sent = [
        alice.join("ci"),
        alice.subscribe("#ci/front", "build.#"),
        alice.subscribe("ci", "#", filter="sender=bob"),
        alice.unsubscribe("ci/front", "build.#"),
        alice.leave("ci"),
        alice.status("building"),
    ]
    assert relay.carry() == sent
    assert [(m.kind, m.body) for _, m in relay.for_orchestrator] == [
        (Kind.JOIN, b"CHANNEL: ci"),
        (Kind.SUBSCRIBE, b"CHANNEL: ci/front\nPATTERN: build.#"),
        (Kind.SUBSCRIBE, b"CHANNEL: ci\nPATTERN: #\nFILTER: sender=bob"),
        (Kind.UNSUBSCRIBE, b"CHANNEL: ci/front\nPATTERN: build.#"),
        (Kind.LEAVE, b"CHANNEL: ci"),
        (Kind.STATUS, b"building"),
    ]
    with pytest.raises(InvalidName):
        alice.join("c i")
    with pytest.raises(MessageError, match="not one word"):
        alice.subscribe("ci", "build.#\nCHANNEL: other")
    with pytest.raises(MessageError, match="not one line"):
        alice.subscribe("ci", "#", filter="sender=a\nCHANNEL: other")


def answer(relay: HandRelay, kind: Kind, text: str) -> None:
    """What the relay says to the last thing that it was asked."""
    relay.carry()
    sent, _ = relay.for_orchestrator[-1]
    relay.deliver("alice", text, sender="__orchestrator__", kind=kind, RE=sent)


def test_given_time_it_waits_for_the_relays_word(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(
        monkeypatch,
        lambda: answer(relay, Kind.ACK, "completed bob is a member of ci"),
        lambda: answer(relay, Kind.NACK, "channel dev does not exist"),
    )
    sent = alice.join("ci", timeout_s=5)
    assert relay.for_orchestrator == [
        (sent, MessageFile("__orchestrator__", Kind.JOIN, relay.for_orchestrator[0][1].headers,
                           b"CHANNEL: ci"))
    ]  # fmt: skip
    with pytest.raises(Refused, match="channel dev does not exist"):
        alice.leave("dev", timeout_s=5)
    with pytest.raises(Timeout):
        alice.leave("dev", timeout_s=0)
    assert alice.receive(timeout_s=0) is None


def test_a_request_waits_past_progress_and_leaves_the_rest(
    relay: HandRelay, alice: Agent, bob: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay.deliver("alice", "before")

    def bob_begins() -> None:
        relay.carry()
        command = take(bob)
        assert (command.kind, "AWAIT" in command.headers) == (Kind.COMMAND, False)
        bob.ack(command)
        bob.ack(command, "in_progress", "completed in a minute")
        relay.deliver("alice", "to another", kind=Kind.ACK, RE="1706123456-cd")
        bob.ack(command, "completed", "shipped")
        relay.carry()

    told: list[str] = []
    script(monkeypatch, bob_begins)
    answer = alice.request("bob", "deploy", 30, progress=lambda ack: told.append(ack.body))
    assert answer.body == "completed\nshipped"
    assert told == ["received", "in_progress\ncompleted in a minute"]
    assert [message.body for message in alice.messages(timeout_s=0)] == ["before", "to another"]


@pytest.mark.parametrize("kind", [Kind.RESPONSE, Kind.MESSAGE, Kind.NACK, Kind.ERROR])
def test_a_request_is_answered_or_refused_by_whatever_names_it(
    relay: HandRelay, alice: Agent, bob: Agent, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    def bob_answers() -> None:
        relay.carry()
        bob.reply(take(bob), "no such branch", kind=kind)
        relay.carry()

    script(monkeypatch, bob_answers)
    if kind in (Kind.RESPONSE, Kind.MESSAGE):
        assert alice.request("bob", "branch?", 5, kind="query", thread="t-1").thread == "t-1"
        return
    with pytest.raises(Refused, match="no such branch"):
        alice.request("bob", "deploy", 5)


@pytest.mark.parametrize("kind", [Kind.MESSAGE, Kind.ERROR])
def test_who_was_not_asked_answers_nothing(
    relay: HandRelay, alice: Agent, bob: Agent, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    def others_first() -> None:
        relay.carry()
        asked = take(bob)
        relay.deliver("alice", "yes", kind=kind, sender="mallory", RE=asked.id)
        bob.reply(asked, "no")
        relay.carry()

    script(monkeypatch, others_first)
    assert alice.request("bob", "may I?", 5, kind="query").body == "no"
    (left,) = alice.messages(timeout_s=0)
    assert (left.sender, left.body) == ("mallory", "yes")


def test_a_request_that_nobody_answers_says_what_was_sent(relay: HandRelay, alice: Agent) -> None:
    with pytest.raises(Timeout, match=r"no answer to .* came within 0.05 s") as error:
        alice.request("bob", "deploy", 0.05)
    assert relay.waiting("alice", "outbox") == [f"{error.value.message_id}.msg"]
