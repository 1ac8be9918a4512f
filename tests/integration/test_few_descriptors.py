"""A real relay that may have few open files: it serves all the same, and says so."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.procs import PATIENCE_S, drop, environment, home_of, log_of, until

# idle it has some thirty; forty agents have eighty directories. An agent has three of its own open
# at a time: of three limits in a row one is reached in the middle of a write.
FEW = (70, 71, 72)
AGENTS = [f"agent{number:02d}" for number in range(40)]


@pytest.mark.parametrize("few", FEW)
def test_a_broadcast_reaches_everybody_though_not_all_can_be_open_at_once(
    tmp_path: Path, few: int
) -> None:
    home = home_of(tmp_path / "home", "alice", *AGENTS)
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "relay.daemon", "--home", str(home)]
    relay = subprocess.Popen(
        [*command, "--ready-fd", str(write_fd)],
        env=environment(),
        pass_fds=(write_fd,),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (few, few)),
    )
    os.close(write_fd)
    try:
        serve(home, relay, read_fd, few)
    finally:
        relay.kill()
        relay.wait(PATIENCE_S)


def serve(home: Path, relay: subprocess.Popen[bytes], read_fd: int, few: int) -> None:
    """What it is asked to do."""
    with os.fdopen(read_fd, "rb") as answer:
        assert answer.readline() == b"ready\n"
    drop(home, "alice", "TO: *\n\nto all")
    inboxes = [home / "agents" / name / "inbox" / "1000000001-01.msg" for name in AGENTS]
    until(lambda: all(inbox.exists() for inbox in inboxes))
    for inbox in inboxes:
        inbox.rename(inbox.parent / ".read" / inbox.name)
    drop(home, AGENTS[0], "TO: alice\n\nback", "1000000002-02.msg")
    until(lambda: (home / "agents/alice/inbox/1000000002-02.msg").exists())
    relay.terminate()
    assert relay.wait(PATIENCE_S) == 0
    (said,) = log_of(home, "few_descriptors")
    assert f"open files is {few}" in said["event"] and "ulimit" in said["event"]
    assert not log_of(home, "begin_again") and not log_of(home, "postpone")
