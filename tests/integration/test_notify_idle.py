"""``relay send --notify-idle`` and ``Agent.wait_idle``, with a relay and a session that runs."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from agent_sdk import Agent, Received, Refused, RelayWarning, Timeout, aio, requests
from relay.base.process_info import PROC, START_FIELD
from relay.reach.owed import report_state
from relay.reach.session import IDLE, WORKING, Session, save_session, session_lock
from tests.procs import PATIENCE_S, Relay, relay, until

pytestmark = pytest.mark.usefixtures("waits")


class Cli:
    """bob's agent CLI: this process."""

    def __init__(self, home: Path) -> None:
        self.root = str(home)
        self.session = Session("claude", "s-1")
        self.session.agent, self.session.pid = "bob", os.getpid()
        with open(f"{PROC}/self/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        self.session.pid_start = int(fields[START_FIELD - 3])
        self.is_now(WORKING)

    def is_now(self, state: str) -> None:
        """Its hook reports and saves a state."""
        with session_lock(self.root, "claude-s-1.json"):
            report_state(self.root, self.session, state)
            save_session(self.root, self.session)


@pytest.fixture
def bob_cli(home: Path) -> Cli:
    """It works."""
    return Cli(home)


def read_by_bob(home: Path) -> Received:
    """bob takes his first message."""
    with Agent("bob", home) as bob:
        message = bob.receive(PATIENCE_S)
    assert message is not None
    return message


def test_the_sender_gets_one_ack_when_it_is_idle_and_has_read_it(
    running: Relay, home: Path, bob_cli: Cli, alice: Agent
) -> None:
    done = relay("send", "bob", "hi", "--as", "alice", "--notify-idle", home=home)
    assert (done.returncode, done.stderr) == (0, "relay: delivered to bob, not read yet\n")
    sent = done.stdout.strip()
    assert read_by_bob(home).id == sent
    assert alice.receive(0.2) is None
    bob_cli.is_now(IDLE)
    ack = alice.receive(PATIENCE_S)
    assert ack is not None
    assert (ack.kind, ack.sender) == ("ack", "__orchestrator__")
    assert ack.body == f"completed bob is idle and has read {sent}\n"
    assert alice.receive(0.2) is None


def test_what_another_reports_of_its_session_does_not_count(
    running: Relay, home: Path, bob_cli: Cli, alice: Agent
) -> None:
    relay("send", "bob", "hi", "--as", "alice", "--notify-idle", home=home)
    read_by_bob(home)
    forged = Session("claude", "s-1")
    forged.agent, forged.state = "alice", WORKING
    report_state(bob_cli.root, forged, IDLE)
    outbox = home / "agents" / "alice" / "outbox"
    until(lambda: not list(outbox.glob("*.report")), "the relay took the report")
    assert alice.receive(0.3) is None
    bob_cli.is_now(IDLE)
    assert alice.receive(PATIENCE_S) is not None


def test_wait_idle_returns_when_it_is(
    running: Relay, home: Path, bob_cli: Cli, alice: Agent
) -> None:
    sent = alice.send("bob", "hi")

    def work() -> None:
        time.sleep(0.3)
        assert read_by_bob(home).id == sent
        bob_cli.is_now(IDLE)

    thread = threading.Thread(target=work)
    thread.start()
    alice.wait_idle("bob", PATIENCE_S, sent)
    thread.join()
    alice.wait_idle("bob", float("inf"))  # at once
    with pytest.raises(ValueError, match="nan is not"):
        alice.wait_idle("bob", float("nan"))
    assert alice.receive(0) is None  # nothing of it is left in her inbox


async def test_tasks_wait_likewise(running: Relay, home: Path, bob_cli: Cli) -> None:
    async with aio.Agent("alice", home) as alice:
        waiting = asyncio.create_task(alice.wait_idle("bob", PATIENCE_S))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await asyncio.to_thread(bob_cli.is_now, IDLE)
        await waiting
        with pytest.raises(Refused, match="there is no agent nobody"):
            await alice.wait_idle("nobody", PATIENCE_S)


def test_the_time_is_over(
    running: Relay, home: Path, bob_cli: Cli, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "IDLE_GRACE_S", PATIENCE_S)
    with pytest.raises(Timeout, match="bob was not idle within 0 s"):
        alice.wait_idle("bob", 0.2)
    sent = alice.send("bob", "hi")
    with pytest.raises(Timeout, match=f"bob has not read {sent} within 1 s"):
        alice.wait_idle("bob", 1, sent)
    assert alice.receive(0.2) is None


def test_without_a_relay_the_request_waits_in_the_outbox(home: Path, alice: Agent) -> None:
    with (
        pytest.warns(RelayWarning, match="no relay is running"),
        pytest.raises(Timeout, match=r"not told within 0\.1 s whether bob is idle"),
    ):
        alice.wait_idle("bob", 0.1)


@pytest.mark.parametrize(
    ("to", "code", "said"),
    [
        ("#ci", 2, "--notify-idle needs the name of one agent, got '#ci'"),
        ("Lead", 2, "--notify-idle needs the name of one agent, got 'Lead'"),
        ("bbo", 1, "there is no agent 'bbo'"),
        ("alice", 1, "alice has no running session whose hooks report to the relay"),
    ],
)
def test_for_whom_it_cannot_be_told_nothing_is_sent(
    home: Path, bob_cli: Cli, to: str, code: int, said: str
) -> None:
    done = relay("send", to, "hi", "--as", "alice", "--notify-idle", home=home)
    assert (done.returncode, done.stdout) == (code, "")
    assert len([one for one in done.stderr.splitlines() if said in one]) == 1
    assert list((home / "agents/alice/outbox").glob("*.msg")) == []


def test_it_is_not_for_a_sender_that_waits_anyway(home: Path, bob_cli: Cli) -> None:
    done = relay("send", "bob", "hi", "--notify-idle", "--wait", "answer=1s", home=home)
    assert done.returncode == 2
    assert "--notify-idle and --wait answer cannot be used together" in done.stderr
