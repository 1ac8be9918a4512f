"""Spawn and release with a real relay and real processes: what a crash of it does to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.procs import Relay, relay, rows_of, until

pytestmark = pytest.mark.home(spawn={"grace_s": 1})


def members(home: Path) -> list[psutil.Process]:
    """The living processes that were started as the agent w of this home."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if process.status() != psutil.STATUS_ZOMBIE and (
                environ.get("AGENT_RELAY_NAME"),
                environ.get("AGENT_RELAY_DIR"),
            ) == ("w", str(home)):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def nothing_is_left(home: Path) -> Iterator[None]:
    """Whatever the test has started is ended."""
    yield
    for process in members(home):
        process.kill()


@pytest.mark.usefixtures("nothing_is_left")
def test_a_relay_that_is_killed_takes_it_over_again(running: Relay, home: Path) -> None:
    words = ("spawn", "w", "--cli", "sh", "--cwd", "/", "--restart", "always", "--prompt")
    done = relay(*words, "sleep 1000 & sleep 1000", home=home)
    pid = int(done.stdout.split("pid ")[1])
    for end in (running.kill, running.stop):  # neither a crash nor `relay down` ends it
        until(lambda: len(members(home)) == 3)
        end()
        assert len(members(home)) == 3
        told = "relay: the states are those last seen: no relay is running"
        assert relay("ps", home=home).stderr.startswith(told)
        running.start()
    until(lambda: rows_of("ps", home=home)[0]["pid"] == pid)
    assert rows_of("ps", home=home)[0]["state"] == "starting"
    assert relay("ps", home=home).stderr == ""
    again = relay(*words, "true", home=home)
    assert (again.returncode, f"w is already running, pid {pid}" in again.stderr) == (6, True)
    assert relay("release", "w", home=home).stdout.startswith("released w: it ended")
    assert members(home) == []
