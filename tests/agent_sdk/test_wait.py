"""``send`` waits for the relay: what it says, and how soon, with and without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent, Kind, Refused, RelayWarning
from tests.agent_sdk.support import HandRelay, fail_at, relay_runs

pytestmark = pytest.mark.usefixtures("waits")


def nack(relay: HandRelay, text: str, sender: str = "__orchestrator__") -> Callable[[], None]:
    """A turn of the relay: it takes the one message and sends its nack."""

    def turn() -> None:
        (name,) = relay.waiting("alice", "outbox")
        (relay.box("alice", "outbox") / name).unlink()
        re = name.removesuffix(".msg")
        relay.deliver("alice", text, sender=sender, kind=Kind.NACK, RE=re)

    return turn


def test_it_returns_when_the_relay_has_taken_the_message(
    relay: HandRelay, alice: Agent, bob: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay_runs(monkeypatch, lambda: None, relay.carry)
    called = fail_at(monkeypatch, "none", 1)
    sent = alice.send("bob", "hello")
    assert called == ["create", "write", "rename"]  # the relay syncs
    assert relay.waiting("bob", "inbox") == [f"{sent}.msg"]


def test_a_message_that_nobody_gets_is_an_error_and_its_nack_is_taken(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay_runs(monkeypatch, nack(relay, "not delivered: there is no agent bobb"))
    sent: list[str] = []
    with pytest.raises(Refused, match="there is no agent bobb") as refused:
        alice.send("bobb", "hello", on_sent=sent.append)
    assert sent == [refused.value.message_id]
    assert alice.receive(0) is None
    (answer,) = relay.waiting("alice", "inbox/.read")
    text = (relay.box("alice", "inbox/.read") / answer).read_text()
    assert f"\nRE: {refused.value.message_id}\n" in text


@pytest.mark.parametrize(
    ("to", "text", "sender"),
    [
        ("#team", "carol is terminated; carol did not get 1-a.msg", "__orchestrator__"),
        ("bob", "I cannot do that", "bob"),
    ],
)
def test_a_nack_of_what_was_delivered_stays_in_the_inbox(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch, to: str, text: str, sender: str
) -> None:
    relay_runs(monkeypatch, nack(relay, text, sender))
    sent = alice.send(to, "hello")
    received = alice.receive(0)
    assert received is not None
    assert (received.body, received.re) == (text, sent)


def test_without_a_relay_a_warning_says_where_the_message_is(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = fail_at(monkeypatch, "none", 1)
    with pytest.warns(RelayWarning, match="no relay is running for .* waits in the outbox") as one:
        sent = alice.send("bob", "hello")
    assert Path(one[0].filename) == Path(__file__)
    assert called == ["create", "write", "sync", "rename", "sync_dir"]
    assert relay.waiting("alice", "outbox") == [f"{sent}.msg"]


def test_what_is_not_taken_in_time_waits_durably(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay_runs(monkeypatch)
    called = fail_at(monkeypatch, "none", 1)
    with pytest.warns(RelayWarning, match="has not taken message .* over within 0.01 s"):
        sent = alice.send("bob", "hello", wait=0.01)
    assert called == ["create", "write", "rename", "sync", "sync_dir"]
    assert relay.waiting("alice", "outbox") == [f"{sent}.msg"]


def test_an_interrupted_wait_leaves_it_durable_and_says_that_it_is_sent(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    relay_runs(monkeypatch, interrupt)
    called = fail_at(monkeypatch, "none", 1)
    with pytest.raises(KeyboardInterrupt) as error:
        alice.send("bob", "hello")
    assert called[-2:] == ["sync", "sync_dir"]
    (name,) = relay.waiting("alice", "outbox")
    assert error.value.__notes__ == [
        f"message {name.removesuffix('.msg')} has been sent: do not send it again"
    ]


@pytest.mark.parametrize("options", [{"wait": 0}, {"wait": "none"}, {}])
def test_who_asks_for_no_wait_gets_none(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    if not options:
        monkeypatch.setenv("RELAY_NO_WAIT", "1")
    relay_runs(monkeypatch)
    called = fail_at(monkeypatch, "none", 1)
    alice.send("bob", "hello", **options)
    assert called == ["create", "write", "sync", "rename", "sync_dir"]


def test_acks_replies_and_status_wait_as_well(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay.deliver("alice", "which branch?", kind=Kind.QUERY)
    received = alice.receive(0)
    assert received is not None
    text = "not delivered: it expects no ack"
    for call in (
        lambda: alice.ack(received),
        lambda: alice.nack(received, "no"),
        lambda: alice.reply(received, "main"),
        lambda: alice.status("busy"),
        lambda: alice.join("team"),
    ):
        relay_runs(monkeypatch, nack(relay, text))
        with pytest.raises(Refused, match=text):
            call()
