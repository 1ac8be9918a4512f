"""What waits in an inbox is taken by priority, then age: Agent.receive, and what it costs."""

from __future__ import annotations

import os

import pytest

from agent_sdk import Agent
from agent_sdk import inbox as inbox_module
from tests.agent_sdk.support import HandRelay


def bodies(alice: Agent) -> list[str]:
    return [message.body for message in alice.messages(timeout_s=0)]


def test_what_waits_is_taken_by_priority_then_age(relay: HandRelay, alice: Agent) -> None:
    for body, priority in (("low", "3"), ("a", ""), ("urgent", "0"), ("b", "2"), ("also", "0")):
        relay.deliver("alice", body, **({"PRIORITY": priority} if priority else {}))
    assert bodies(alice) == ["urgent", "also", "a", "b", "low"]


def test_what_comes_later_and_is_urgent_is_next(relay: HandRelay, alice: Agent) -> None:
    for number in range(40):
        relay.deliver("alice", str(number))
    assert alice.receive(0).body == "0"
    relay.deliver("alice", "urgent", PRIORITY="1")
    assert alice.receive(0).body == "urgent"
    assert alice.receive(0).body == "1"


def test_a_priority_in_a_body_is_text(relay: HandRelay, alice: Agent) -> None:
    relay.deliver("alice", "first")
    relay.deliver("alice", "x\n\nPRIORITY: 0\n")
    relay.put_bytes(
        "alice", "1706123457-ab.msg", b"FROM: bob\r\npriority:  1 \r\nTO: alice\r\n\r\nnow"
    )
    assert bodies(alice) == ["now", "first", "x\n\nPRIORITY: 0\n"]


def test_a_file_that_says_nothing_valid_waits_its_turn(relay: HandRelay, alice: Agent) -> None:
    relay.deliver("alice", "low", PRIORITY="4")
    relay.put_bytes("alice", "1806123457-ab.msg", b"")
    (relay.box("alice", "inbox") / "1806123458-ab.msg").mkdir()
    with pytest.raises(inbox_module.MessageError, match=r"1806123457-ab\.msg"):
        alice.receive(0)
    with pytest.raises(inbox_module.MessageError, match=r"1806123458-ab\.msg"):
        alice.receive(0)
    assert bodies(alice) == ["low"]


def test_each_file_is_looked_into_once(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        relay.deliver("alice", str(number), PRIORITY=str(number % 5))
    looks: list[str] = []
    look = inbox_module.priority_in

    def counted(name: str, dir_fd: int) -> int:
        looks.append(name)
        return look(name, dir_fd)

    monkeypatch.setattr(inbox_module, "priority_in", counted)
    assert len(bodies(alice)) == 30
    assert len(looks) == 30


def test_of_a_long_queue_an_urgent_one_is_seen_soon(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        relay.deliver("alice", str(number))
    assert alice.receive(0).body == "0"
    relay.deliver("alice", "urgent", PRIORITY="0")
    now = inbox_module.monotonic
    monkeypatch.setattr(inbox_module, "monotonic", lambda: now() + 3600)  # the agent was at work
    assert alice.receive(0).body == "urgent"
    assert len(os.listdir(relay.box("alice", "inbox/.read"))) == 2
