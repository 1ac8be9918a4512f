"""A message is taken, and its reader cannot print it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.procs import Relay, environment, relay, until
from tests.shells import RELAY_SH


@pytest.fixture
def two_wait(running: Relay, home: Path) -> Path:
    """The inbox of bob, with two messages."""
    inbox = home / "agents/bob/inbox"
    for text in ("one", "two"):
        relay("send", "--as", "alice", "bob", text, home=home)
    until(lambda: len(list(inbox.glob("*.msg"))) == 2)
    return inbox


def test_relay_recv_names_the_one_message_that_it_took(two_wait: Path, home: Path) -> None:
    """The next one stays."""
    script = f'. "{RELAY_SH}"; relay_recv -t 1 > /dev/full'
    done = subprocess.run(
        ["sh", "-c", script],
        env=environment(AGENT_RELAY_DIR=str(home), AGENT_RELAY_NAME="bob"),
        capture_output=True,
        text=True,
        check=False,
    )
    (taken,) = (two_wait / ".read").glob("*.msg")
    assert (done.returncode, done.stderr) == (1, f"relay: could not print {taken}\n")
    assert len(list(two_wait.glob("*.msg"))) == 1


def test_an_answered_message_has_left_the_inbox(two_wait: Path, home: Path) -> None:
    """``reply`` and ``nack`` of a message that was only looked at."""
    first, second = sorted(path.stem for path in two_wait.glob("*.msg"))
    assert relay("reply", "--as", "bob", first[20:28], "thanks", home=home).returncode == 0
    assert relay("nack", "--as", "bob", second[20:28], "no", home=home).returncode == 0
    left = {path.stem for path in two_wait.glob("*.msg")}  # perhaps a nack: none was expected
    assert left.isdisjoint({first, second})
    assert sorted(path.stem for path in (two_wait / ".read").glob("*.msg")) == [first, second]
