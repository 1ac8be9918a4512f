"""Spawn and release with a real relay and real processes: what a crash of it does to them."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agent_sdk import Agent, Received, Refused
from tests.procs import Relay, home_of, until

pytestmark = pytest.mark.timeout(60)


class Desk:
    """The operator's, beside a relay that runs."""

    def __init__(self, root: Path) -> None:
        self.home = home_of(root / "home")
        self.work = root / "work"
        self.work.mkdir()
        config = {"spawn": {"grace_s": 1}, "store": {"checkpoint_ms": 50}}
        (self.home / "config.json").write_text(json.dumps(config))
        self.relay = Relay(self.home)
        self.relay.start()
        self.me = Agent("operator", self.home)

    def spawn(self, name: str, prompt: str, *lines: str) -> int:
        """The pid that the relay answers with."""
        fields = "".join(f"{line}\n" for line in lines)
        body = f"NAME: {name}\nCLI: sh\nWORKING_DIR: {self.work}\n{fields}PROMPT: {prompt}"
        answer = self.me.request("__orchestrator__", body, 20, kind="spawn")
        return int(answer.body.split("pid ")[1])

    def release(self, name: str) -> str:
        return self.me.request("__orchestrator__", f"NAME: {name}", 20, kind="release").body

    def hear(self) -> Received:
        message = self.me.receive(20)
        assert message is not None
        return message

    def row(self, name: str) -> dict[str, object]:
        with sqlite3.connect(f"file:{self.home}/ledger.db?mode=ro", uri=True) as db:
            db.row_factory = sqlite3.Row
            row = db.execute("SELECT * FROM processes WHERE name = ?", (name,)).fetchone()
        db.close()
        return dict(row) if row else {}

    def end(self) -> None:
        self.me.close()
        if self.relay.process is not None:
            self.relay.stop()
        for path in self.home.glob("agents/*"):
            kill_all(self.home, path.name)


def members(home: Path, name: str) -> list[psutil.Process]:
    """The living processes that were started as this agent of this home."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if process.status() != psutil.STATUS_ZOMBIE and (
                environ.get("AGENT_RELAY_NAME"),
                environ.get("AGENT_RELAY_DIR"),
            ) == (name, str(home)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_all(home: Path, name: str) -> None:
    for process in members(home, name):
        process.kill()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.end()


def test_a_relay_that_is_killed_takes_it_over_again(desk: Desk) -> None:
    pid = desk.spawn("w", "sleep 1000 & sleep 1000", "RESTART: always")
    for end in (desk.relay.kill, desk.relay.stop):  # neither a crash nor `relay down` ends it
        until(lambda: len(members(desk.home, "w")) == 3)
        end()
        assert len(members(desk.home, "w")) == 3
        desk.relay.start()
    until(lambda: desk.row("w").get("pid") == pid)
    assert desk.row("w")["state"] == "starting"
    with pytest.raises(Refused, match=f"w is already running, pid {pid}"):
        desk.spawn("w", "true")
    assert desk.release("w").startswith("completed released w: it ended")
    assert members(desk.home, "w") == []


def test_ended_while_no_relay_ran_it_is_started_again(desk: Desk) -> None:
    pid = desk.spawn("w", "sleep 1000", "RESTART: on-failure", "ENV: SECRET=hunter2")
    desk.relay.kill()
    kill_all(desk.home, "w")
    until(lambda: not members(desk.home, "w"))
    desk.relay.start()
    assert desk.hear().body.startswith("w ended, its exit code is not known; it will be restarted")
    assert desk.hear().body.startswith("w was restarted, pid ")
    (process,) = [p for p in members(desk.home, "w") if os.getsid(p.pid) == p.pid]
    assert process.pid != pid
    until(lambda: desk.row("w")["pid"] == process.pid)  # noted right after it is said
    assert process.environ()["SECRET"] == "hunter2"


def test_what_ignores_sigterm_is_killed_with_all_it_started(desk: Desk) -> None:
    desk.spawn("w", "trap '' TERM; sh -c \"trap '' TERM; sleep 1000\" & sleep 1000; sleep 1000")
    until(lambda: len(members(desk.home, "w")) >= 3)
    assert desk.release("w") == "completed released w: it was ended by SIGKILL\n"
    assert members(desk.home, "w") == []


def test_killed_between_the_fork_and_the_note_it_is_found(desk: Desk) -> None:
    """The worst instant: it runs, and nobody wrote down that it does."""
    pid = desk.spawn("w", "sleep 1000")
    desk.relay.kill()
    with sqlite3.connect(desk.home / "ledger.db") as db:  # as if it had not been noted
        db.execute("DELETE FROM processes")
        db.execute("UPDATE pending_operations SET completed_at = NULL")
    db.close()
    desk.relay.start()
    until(lambda: desk.row("w").get("pid") == pid)
    assert len([p for p in members(desk.home, "w") if os.getsid(p.pid) == p.pid]) == 1
    assert desk.me.receive(0) is None  # its answer was said once
