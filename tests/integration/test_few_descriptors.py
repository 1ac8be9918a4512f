"""A real relay that may have few open files: it serves all the same, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs import Relay, drop, home_of, log_of, until

# idle it has some thirty; forty agents have eighty directories. An agent has three of its own open
# at a time: of three limits in a row one is reached in the middle of a write.
FEW = (70, 71, 72)
AGENTS = [f"agent{number:02d}" for number in range(40)]


@pytest.mark.parametrize("few", FEW)
def test_a_broadcast_reaches_everybody_though_not_all_can_be_open_at_once(
    tmp_path: Path, few: int
) -> None:
    home = home_of(tmp_path / "home", "alice", *AGENTS)
    relay = Relay(home)
    relay.start("sh", "-c", f'ulimit -n {few}; exec "$@"', "sh")
    try:
        drop(home, "alice", "TO: *\n\nto all")
        inboxes = [home / "agents" / name / "inbox" / "1000000001-01.msg" for name in AGENTS]
        until(lambda: all(inbox.exists() for inbox in inboxes))
        for inbox in inboxes:
            inbox.rename(inbox.parent / ".read" / inbox.name)
        drop(home, AGENTS[0], "TO: alice\n\nback", "1000000002-02.msg")
        until(lambda: (home / "agents/alice/inbox/1000000002-02.msg").exists())
    finally:
        assert relay.stop() == 0
    (said,) = log_of(home, "few_descriptors")
    assert f"open files is {few}" in said["event"] and "ulimit" in said["event"]
    assert not log_of(home, "begin_again") and not log_of(home, "postpone")
