"""``relay ledger audit``: every change of a status and every security event, oldest first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.box import Box
from tests.procs import environment, relay, until


def lines(box: Box, *arguments: str) -> list[str]:
    done = relay("ledger", "audit", *arguments, home=box.root)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def short(message_id: str) -> str:
    """An id as tables show it."""
    return message_id.partition("-")[2]


def fifo(box: Box, agent: str = "alice") -> None:
    """Something in an outbox that should not be there."""
    path = box.path("agents", agent, "outbox", box.name())
    os.mkfifo(path.with_suffix(".tmp"))
    os.rename(path.with_suffix(".tmp"), path)
    box.tick()


@pytest.mark.shows("ready 3.5")
def test_for_people(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    fifo(box)
    with box.ledger.transaction():
        box.ledger._db.execute("DELETE FROM orchestrator_state WHERE key = 'writer'")
    other = box.send("alice", "TO: bob\n\nhi again")
    shown = lines(box)
    assert any(line.endswith(f"  {short(sent)}  - > processing  (daemon 1)") for line in shown)
    assert any(line.endswith(f"  {short(other)}  - > processing  (by hand)") for line in shown)
    assert any(f"  {short(sent)}  processing > archived  " in line for line in shown)
    (event,) = [line for line in shown if "  ! " in line]
    assert "  ! not_a_regular_file  alice  " in event
    assert lines(box, "--security") == [event]
    times = [line.split()[:2] for line in shown]
    assert sorted(times) == times


@pytest.mark.timeout(60)
def test_for_programs_by_agent_time_and_number(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.take("bob", sent)
    box.tick()
    box.send("carol", "TO: alice\n\nhello")
    fifo(box)
    rows = [json.loads(line) for line in lines(box, "--json", "--agent", "bob")]
    assert [(row["what"], row["old"], row["new"]) for row in rows] == [
        (f"{sent} > bob", "written", "read")
    ]
    assert rows[0].keys() == {"at", "source", "id", "what", "old", "new", "attempt", "who", "agent"}
    alices = [json.loads(line) for line in lines(box, "--json", "--agent", "alice")]
    assert {row.get("what") for row in alices} >= {sent, f"{sent} > bob", None}
    (event,) = [row for row in alices if row["source"] == "security_events"]
    assert event.keys() == {"at", "source", "id", "kind", "agent", "path", "detail"}
    assert lines(box, "--since", "2099-01-01") == []
    assert len(lines(box, "--since", "1h")) == len(lines(box))
    assert lines(box, "--limit", "2") == lines(box)[-2:]
    assert lines(box, "--agent", "nobody") == []


@pytest.mark.timeout(60)
def test_follow_shows_what_comes(box: Box) -> None:
    command = [sys.executable, "-m", "relay.cli", "--home", str(box.root), "ledger", "audit"]
    with subprocess.Popen(
        [*command, "--follow", "--security"], env=environment(), stdout=subprocess.PIPE
    ) as following:
        assert following.stdout is not None
        os.set_blocking(following.stdout.fileno(), False)
        seen = bytearray()

        def shows(number: int) -> bool:
            seen.extend(following.stdout.read() or b"")  # type: ignore[union-attr]
            return seen.count(b"\n") == number

        fifo(box)
        until(lambda: shows(1))
        fifo(box, "bob")  # of alice's it would be a count, a minute later
        until(lambda: shows(2))
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == 130
    assert seen.count(b"not_a_regular_file") == 2
