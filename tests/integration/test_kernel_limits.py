"""A real relay where the kernel gives no more inotify, or few open files: it serves, and says so.

Those of inotify are set in a user namespace of its own; where the machine allows none, there is
nothing to be seen here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.procs import Relay, drop, home_of, log_of, relay, status_of, until

LIMIT = 'echo "$2" > "/proc/sys/user/$1" && shift 2 && exec "$@"'
CASES = {
    # three watches: that of agents/, and one agent's two
    "watches": ("max_inotify_watches", 3, "inotify", "raise fs.inotify.max_user_watches"),
    "no watch at all": ("max_inotify_watches", 0, "scan", "raise fs.inotify.max_user_watches"),
    "instances": ("max_inotify_instances", 0, "scan", "raise fs.inotify.max_user_instances"),
}


def limited(name: str, limit: int) -> list[str]:
    """What a command is run under to have this limit."""
    return ["unshare", "-r", "-U", "sh", "-c", LIMIT, "sh", name, str(limit)]


def send_and_read(home: Path, sender: str, to: str, message_id: str) -> None:
    """By hand, with `mv` alone; the relay has seen both when this returns."""
    inbox, name = home / "agents" / to / "inbox", f"{message_id}.msg"
    drop(home, sender, f"TO: {to}\n\nhi", name)
    until((inbox / name).exists)
    os.rename(inbox / name, inbox / ".read" / name)
    until(lambda: f"read by {to}" in relay("trace", message_id, home=home).stdout)


@pytest.mark.home("alice", "bob", "carol")
@pytest.mark.parametrize("case", CASES)
def test_what_inotify_does_not_watch_is_scanned(home: Path, case: str) -> None:
    name, limit, watcher, advice = CASES[case]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*limited(name, limit), "true"], capture_output=True).returncode
    ):
        pytest.skip("this machine lets nobody set limits in a namespace of their own")
    running = Relay(home)
    running.start(*limited(name, limit))
    try:
        for number, agent in enumerate(("alice", "bob", "carol")):
            other = "carol" if agent != "carol" else "alice"
            send_and_read(home, agent, other, f"100000000{number}-0{number}")
        said = log_of(home, "scan_instead")
        assert said and all(advice in line["event"] for line in said)
        status = status_of(home)
        assert status["watcher"] == watcher
        assert (status["unwatched"] > 0) == (watcher == "inotify")
    finally:
        assert running.stop() == 0


# -- few open files ------------------------------------------------------------------------


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
