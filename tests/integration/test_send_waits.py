"""``Agent.send`` waits for a relay that runs; the CLI's texts are tested elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agent_sdk import Agent, Refused, RelayWarning
from tests.procs import Relay, inbox_of, until


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send as outside of the tests."""
    monkeypatch.delenv("RELAY_NO_WAIT")


def test_it_returns_when_the_relay_has_the_message(running: Relay, home: Path) -> None:
    with Agent("alice", home) as alice, Agent("bob", home) as bob:
        sent = alice.send("bob", "hi")
        assert list((home / "agents/alice/outbox").glob("*.msg")) == []
        message = bob.receive(0)
        assert message is not None
        assert message.id == sent


def test_a_refusal_is_raised_and_its_nack_is_taken(running: Relay, home: Path) -> None:
    with Agent("alice", home) as alice:
        sent: list[str] = []
        with pytest.raises(Refused, match="there is no agent bbo") as caught:
            alice.send("bbo", "hi", on_sent=sent.append)
        assert [caught.value.message_id] == sent
        with pytest.raises(Refused, match="there is no agent bbo"):
            alice.query("bbo", "hi", 10)
        assert alice.receive(0) is None


def test_some_of_several_did_not_get_it_is_no_refusal(running: Relay, home: Path) -> None:
    with Agent("alice", home) as alice, Agent("bob", home) as bob, Agent("carol", home) as carol:
        for agent in (alice, bob, carol):
            agent.join("team", timeout_s=10)
        with Agent("operator", home) as operator:
            operator.request("__orchestrator__", "ACTION: agent.retire\nNAME: carol", 10)
        while alice.receive(0.2):
            pass
        sent = alice.send("#team", "hi")
        nack = alice.receive(0)
        assert nack is not None
        assert (nack.kind, nack.re) == ("nack", sent)
        assert "carol did not get" in nack.body
        assert [path.stem for path in inbox_of(home, "bob")][-1] == sent


def test_a_relay_that_hangs_is_not_waited_for_longer(running: Relay, home: Path) -> None:
    os.kill(running.pid, signal.SIGSTOP)
    try:
        with (
            Agent("alice", home) as alice,
            pytest.warns(RelayWarning, match=r"has not taken message .* within 0.2 s"),
        ):
            sent = alice.send("bob", "hi", wait_s=0.2)
    finally:
        os.kill(running.pid, signal.SIGCONT)
    until((home / "agents/bob/inbox" / f"{sent}.msg").exists)


def test_with_no_wait_a_refusal_is_a_message(
    running: Relay, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAY_NO_WAIT", "1")
    with Agent("alice", home) as alice:
        sent = alice.send("bbo", "hi")
        nack = alice.receive(10)
        assert nack is not None
        assert (nack.kind, nack.re) == ("nack", sent)
