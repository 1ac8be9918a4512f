"""A home that never had a checkpoint raises no alarm; one on a read-only file system does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base.home import STORE
from tests.box import Box
from tests.procs import PATIENCE_S, Relay, environment, relay

READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


def read_only(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees the home on a read-only file system, as nobody else does."""
    inside = ["sh", "-c", READ_ONLY, "sh", str(home), *command]
    user = ["-r"] if os.geteuid() else []
    return subprocess.run(
        ["unshare", *user, "-m", *inside],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_doctor_says_that_a_home_is_read_only(running: Relay, home: Path) -> None:
    running.stop()
    relay("search", "x", home=home)
    assert (home / "search.db").exists()
    try:
        if read_only(home, "true").returncode:
            pytest.skip("this machine lets nobody mount in a namespace of their own")
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    done = read_only(home, sys.executable, "-m", "relay", "--home", str(home), "doctor")
    assert done.returncode == 3, done.stdout + done.stderr
    said = f"limits: {home} is on a read-only file system: no messages are accepted"
    assert said in done.stdout
    assert "must be able to read" not in done.stdout  # of the index
    found = read_only(home, sys.executable, "-m", "relay", "--home", str(home), "search", "x")
    assert "searched the store itself: no search index:" in found.stderr
    assert "Read-only file system" in found.stderr and "[Errno" not in found.stderr
    assert relay("doctor", home=home).stdout == "OK\n"


def made_again(box: Box) -> list[str]:
    return [one["event"] for one in box.log if "rebuilt from the journal" in one["event"]]


@pytest.mark.box("alice", "bob")
def test_a_home_that_never_had_a_checkpoint_raises_no_alarm(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.kill()
    assert not box.path(STORE).exists()
    for _ in range(2):  # the second start of a young home, and the third
        box.open()
        assert made_again(box) == [] and len(box.store.state.messages) == 1
        box.kill()
