"""A message is taken, and its reader cannot print it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.box import Box
from tests.procs import relay
from tests.shells import environment_of


@pytest.fixture
def home(box: Box) -> Path:
    """Two messages wait for bob."""
    for text in ("one", "two"):
        box.send("alice", f"TO: bob\n\n{text}")
    return box.root


def test_relay_recv_names_the_one_message_that_it_took(home: Path) -> None:
    """The next one stays."""
    inbox = home / "agents/bob/inbox"
    script = '. "$RELAY_SH"; relay_recv -t 1 > /dev/full'
    done = subprocess.run(
        ["sh", "-c", script],
        env=environment_of(home, "bob"),
        capture_output=True,
        text=True,
        check=False,
    )
    (taken,) = (inbox / ".read").glob("*.msg")
    assert (done.returncode, done.stderr) == (1, f"relay: could not print {taken}\n")
    assert len(list(inbox.glob("*.msg"))) == 1


def test_an_answered_message_has_left_the_inbox(home: Path) -> None:
    """``reply`` and ``nack`` of a message that was only looked at."""
    inbox = home / "agents/bob/inbox"
    first, second = sorted(path.stem for path in inbox.glob("*.msg"))
    assert relay("reply", "--as", "bob", first[20:28], "thanks", home=home).returncode == 0
    assert relay("nack", "--as", "bob", second[20:28], "no", home=home).returncode == 5
    assert list(inbox.glob("*.msg")) == []
    assert sorted(path.stem for path in (inbox / ".read").glob("*.msg")) == [first, second]
