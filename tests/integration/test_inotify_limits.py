"""A real relay where the kernel gives no more inotify: it scans, serves, and names the sysctl.

The limits are set in a user namespace of its own; where the machine allows none, there is
nothing to be seen here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.procs import Relay, drop, log_of, relay, status_of, until

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
