"""A thousand agents, all idle but twenty: each is watched, each message arrives."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from relay.base.names import new_message_id
from scripts.benchmarks.idle import watches_of
from tests.procs import Relay, home_of, until

AGENTS = 1_000
BUSY = 20
EACH = 5


@pytest.mark.shows("ready 6.5")
@pytest.mark.timeout(120)
def test_a_thousand_agents_have_two_watches_each_and_get_their_mail(tmp_path: Path) -> None:
    names = [f"agent{number:04d}" for number in range(AGENTS)]
    home = home_of(tmp_path / "home", *names)
    relay = Relay(home)
    relay.start()
    assert relay.process is not None
    watches = watches_of(relay.process.pid)
    assert 2 * (AGENTS + 1) <= watches <= 2 * (AGENTS + 1) + 1  # the operator; and agents/ itself

    idle, busy = names[:-BUSY], names[-BUSY:]
    sent = {
        send(home, name, idle[(turn * BUSY + number) * 7 % len(idle)])
        for turn in range(EACH)
        for number, name in enumerate(busy)
    }
    until(lambda: sent == {path.stem for path in home.glob("agents/*/inbox/*.msg")})
    assert watches_of(relay.process.pid) == watches
    assert relay.stop() == 0


def send(home: Path, sender: str, to: str) -> str:
    outbox = home / "agents" / sender / "outbox"
    message_id = new_message_id(time.time_ns())
    pending = outbox / ".pending" / f"{message_id}.msg"
    pending.write_text(f"TO: {to}\n\nhello")
    os.rename(pending, outbox / pending.name)
    return message_id
