"""An agent CLI that runs the real hooks beside a real relay: what it owes, and who hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sdk import Agent
from tests.procs import PATIENCE_S, Relay, agents_of, relay, until
from tests.reach.hooks import Cli


@pytest.fixture
def bob(home: Path) -> Iterator[Cli]:
    """A session of Claude Code as bob, with a transcript, that has begun."""
    cli = Cli(home, AGENT_RELAY_NAME="bob")
    cli.transcript.touch()
    cli.start()
    yield cli
    cli.die()


def test_from_a_command_to_its_answer(running: Relay, home: Path, bob: Cli, alice: Agent) -> None:
    asked = alice.send("bob", "deploy", kind="command", wait=PATIENCE_S)
    assert agents_of(home)["bob"]["state"] == "idle"
    assert f"Message {asked} from alice (command" in bob.prompt("what is new?")
    assert bob.stop() != ""  # seen, and owed: whichever of both it is kept for
    bob.tool()
    until(lambda: not (home / "agents/bob/inbox" / f"{asked}.msg").exists())
    assert agents_of(home)["bob"]["state"] == "working"

    bob.prompt("and now?")
    heard = bob.stop()
    assert f"for an answer to command {asked}: `relay ack {asked} completed`" in heard
    assert bob.stop(stop_hook_active=True) == ""
    until(lambda: agents_of(home)["bob"]["owed"] == 1)
    assert "idle and owes 1" in relay("agents", home=home).stdout
    notice = alice.receive(PATIENCE_S)
    assert notice is not None
    assert notice.re == asked
    assert notice.body.startswith("bob is idle and has not answered the command")

    bob.prompt("answer her")
    assert relay("ack", "--as", "bob", asked, "completed", home=home).returncode == 0
    assert bob.stop() == ""  # even before the relay has taken the answer
    done = alice.receive(PATIENCE_S)
    assert done is not None
    assert (done.kind, done.re) == ("ack", asked)
    until(lambda: agents_of(home)["bob"]["owed"] == 0)


@pytest.mark.parametrize("step", ["print", "printed"])
def test_a_hook_killed_around_its_print_tells_it_no_more_often(
    running: Relay, home: Path, bob: Cli, alice: Agent, step: str
) -> None:
    asked = alice.send("bob", "deploy", kind="command", wait=PATIENCE_S)
    bob.prompt("what is new?")
    bob.tool()
    until(lambda: not (home / "agents/bob/inbox" / f"{asked}.msg").exists())
    bob.stop(killed_at=step)
    assert bob.session.told == {asked: 1}
    bob.prompt("go on")
    assert asked in bob.stop()
    bob.prompt("go on")
    assert bob.stop() == ""
