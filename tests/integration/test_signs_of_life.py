"""What is to be seen of an agent's process at once: that it has ended, that it is silent.

Real processes, killed; the agents are Python with the SDK and shells that source relay.sh.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent, presence
from relay.base import process_info
from relay.base.clock import NS_PER_S
from relay.base.home import LEDGER, Home
from relay.ledger.file import open_readonly
from relay.views.agents import find_alerts
from tests.box import Box
from tests.procs import (
    PATIENCE_S,
    Relay,
    agents_of,
    environment,
    home_of,
    relay,
    rows_of,
    until,
)
from tests.shells import SHELLS, environment_of

WAITS = (
    "import sys\nfrom agent_sdk import Agent\n"
    "bob = Agent('bob', sys.argv[1])\nprint(1, flush=True)\nbob.receive()"
)


def line_of(home: Path, name: str, command: str = "agents") -> str:
    shown = relay(command, home=home).stdout.splitlines()
    (line,) = [line for line in shown if line.startswith(name)]
    return line


def meta(home: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((home / "agents" / name / "meta.json").read_text()))


def sql(home: Path, statement: str, *values: object) -> None:
    """Change the ledger by hand."""
    with contextlib.closing(sqlite3.connect(home / LEDGER)) as db, db:
        db.execute(statement, values)


def killed(process: subprocess.Popen[Any]) -> int:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    return process.pid


def test_a_process_that_was_killed_shows_at_once(running: Relay, home: Path) -> None:
    command = [sys.executable, "-c", WAITS, str(home)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"1\n"
    assert "has exited" not in line_of(home, "bob")
    assert agents_of(home)["bob"]["process_ended"] is None
    pid = killed(process)
    assert f"process {pid} has exited" in line_of(home, "bob")
    assert agents_of(home)["bob"]["process_ended"] == pid
    assert f"process {pid} has exited" in line_of(home, "bob", "top")
    status = relay("status", home=home)
    assert (status.returncode, f"process exited: bob (pid {pid})" in status.stdout) == (0, True)
    assert rows_of("status", home=home)[0]["ended"] == {"bob": pid}
    assert (
        agents_of(home)["bob"]["status"] == "active"
    )  # its mail may still be read: it bounces later


def test_who_has_mail_and_is_silent_is_shown_so(running: Relay, home: Path) -> None:
    assert relay("send", "bob", "are you there?", home=home).returncode == 0
    until(lambda: agents_of(home)["bob"]["unread"] == 1)
    assert agents_of(home)["bob"]["silent_s"] is None  # it may be busy
    assert "silent" not in line_of(home, "bob")
    assert running.stop() == 0
    hour_ago = time.time_ns() - 44 * 60 * NS_PER_S
    sql(home, "UPDATE deliveries SET written_at = ?, staged_at = ?", hour_ago, hour_ago)
    assert "silent 44 min" in line_of(home, "bob")
    assert 44 * 60 <= agents_of(home)["bob"]["silent_s"] < 46 * 60
    assert "silent 44 min" in line_of(home, "bob", "top")
    sql(home, "UPDATE deliveries SET state = 'read', obligation = 'open'")
    assert "silent 44 min" in line_of(home, "bob")  # read, and owes an answer
    sql(home, "UPDATE agents SET last_seen_at = ?", time.time_ns())
    assert "silent" not in line_of(home, "bob")


# -- shells that source relay.sh --------------------------------------------------------------


class Sourced:
    """A shell that runs a script file, sources relay.sh and then waits for a line."""

    def __init__(
        self, command: list[str], home: Path, folder: Path, name: str, script: str
    ) -> None:
        path = folder / "agent script.sh"
        path.write_text(f'. "$RELAY_SH"\n{script}\nprintf "there\\n"\nread -r go_on\n')
        self.process = subprocess.Popen(
            [*command, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_of(home, name),
        )
        assert self.process.stdout is not None
        while self.process.stdout.readline() not in (b"there\n", b""):
            pass

    def kill(self) -> int:
        """SIGKILL; the pid."""
        assert self.process.stderr is not None
        pid = killed(self.process)
        said = self.process.stderr.read()
        self.process.stderr.close()
        assert said == b""
        return pid


@pytest.fixture
def quiet(tmp_path: Path) -> Path:
    """A home whose relay does not run: files alone are looked at."""
    return home_of(tmp_path / "the home", "alice", "bob")


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest) -> list[str]:
    return SHELLS[request.param]


def test_a_shell_that_sends_is_registered(
    shell: list[str], running: Relay, home: Path, tmp_path: Path
) -> None:
    (home / "agents" / "bob" / "meta.json").write_text('{"role": "lead", "public_key": null}')
    one = Sourced(shell, home, tmp_path, "bob", "relay_send alice hello; relay_send alice again")
    found = meta(home, "bob")
    assert found["role"] == "lead" and "public_key" in found
    assert found["pid"] == one.process.pid
    assert process_info.runs(found["pid"], found["pid_start_ticks"]) and found["pid_start_ticks"]
    assert abs(found["started_at"] - time.time_ns()) < 60 * NS_PER_S
    assert found["unregisters"] is False
    assert (home / "agents" / "bob" / "meta.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(home / "agents" / "bob").count("meta.json") == 1
    assert not [name for name in os.listdir(home / "agents" / "bob") if ".tmp" in name]
    assert "has exited" not in line_of(home, "bob")
    pid = one.kill()
    assert f"process {pid} has exited" in line_of(home, "bob")


@pytest.mark.parametrize(
    "script", ['. "$RELAY_SH"; relay_send alice hi', 'sh "$RELAY_SH" send alice hi']
)
def test_a_single_command_is_not_the_agents_process(
    shell: list[str], quiet: Path, script: str
) -> None:
    """``sh -c``, as programs call tools, and relay.sh run: the agent lives on behind it."""
    done = subprocess.run(
        [*shell, "-c", script], env=environment_of(quiet, "bob"), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (quiet / "agents" / "bob" / "meta.json").exists()


def test_a_meta_json_that_is_not_flat_is_left_as_it_is(quiet: Path, tmp_path: Path) -> None:
    path = quiet / "agents" / "bob" / "meta.json"
    for there in (
        '{"tools": {"pid": 7}, "role": "member"}',
        '["a list"]',
        "no JSON",
        '{"pid": "seven"}',
        '{"note": "\\"pid\\": 7, x", "list": [1]}',
        "",
    ):
        path.write_text(there)
        Sourced(SHELLS["dash"], quiet, tmp_path, "bob", "relay_send alice hi").kill()
        assert path.read_text() == there


def test_what_else_is_in_meta_json_stays(shell: list[str], quiet: Path, tmp_path: Path) -> None:
    path = quiet / "agents" / "bob" / "meta.json"
    cases: list[tuple[str, dict[str, Any]]] = [
        ("{}", {}),
        ('{"pid": 4, "pid_start_ticks": null, "started_at": 1700000000000000000}', {}),
        ('{"role":"lead","pid":4,"pid_start_ticks":9}', {"role": "lead"}),
        ('{\n  "pid": 4,\n  "role": "lead",\n  "started_at": 17\n}\n', {"role": "lead"}),
        ('{"a": "x, \\"pid\\": 1,, y", "pid": 5 , "b": ""}', {"a": 'x, "pid": 1,, y', "b": ""}),
        ('{"unregisters": false, "my pid": 3, "é": "ü}"}', {"my pid": 3, "é": "ü}"}),
    ]
    for there, stays in cases:
        path.write_text(there)
        one = Sourced(shell, quiet, tmp_path, "bob", "relay_send alice hi")
        found = meta(quiet, "bob")
        assert found.pop("pid") == one.process.pid, there
        for name in ("pid_start_ticks", "pid_namespace", "started_at", "unregisters"):
            found.pop(name)
        assert found == stays
        one.kill()


def test_a_shell_killed_while_it_registers_leaves_meta_json_as_it_was(
    shell: list[str], box: Box, tmp_path: Path
) -> None:
    path = box.path("agents", "bob", "meta.json")
    path.write_text('{"role": "member"}')
    script = "mv() { kill -9 $$; sleep 1; }; relay_recv"  # after the write, before the rename
    one = Sourced(shell, box.root, tmp_path, "bob", script)
    one.kill()
    assert path.read_text() == '{"role": "member"}'
    assert os.listdir(path.parent).count("meta.json") == 1
    pending = box.path("agents", "bob", "outbox", ".pending")
    (left,) = os.listdir(pending)
    assert left.startswith("meta.json.") and left.endswith(".tmp")
    os.utime(pending / left, (1, 1))
    box.clock.advance(3660)  # of its ctime, which is the machine's
    box.tick(2)
    assert os.listdir(pending) == []


def test_a_shell_that_ended_bounces_nothing(box: Box, tmp_path: Path) -> None:
    """It cannot say whether it left in good order: its mail waits, as for one without a process."""
    one = Sourced(SHELLS["dash"], box.root, tmp_path, "bob", "relay_recv")
    box.tick(2)
    box.after(31)
    assert box.sql("SELECT pid FROM agents WHERE name = 'bob'") == [(one.process.pid,)]
    one.kill()
    for _ in range(20):
        box.after(31, turns=1)
    sent = box.send("alice", "TO: bob\n\nare you there?")
    assert box.states(sent) == {"bob": "written"}
    assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("active",)]
    with Home(str(box.root)) as home, contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        assert find_alerts(home, db, time.time_ns())["bob"].ended_pid == one.process.pid


def test_a_program_after_a_shell_is_registered_as_a_program(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home", "bob")
    Sourced(SHELLS["dash"], home, tmp_path, "bob", "relay_recv").kill()
    assert meta(home, "bob")["unregisters"] is False
    with Agent("bob", home):
        assert meta(home, "bob")["pid"] == os.getpid()
        assert "unregisters" not in meta(home, "bob")
    assert "pid" not in meta(home, "bob")


def test_of_two_processes_the_one_that_is_left_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_of(tmp_path / "home", "bob")
    monkeypatch.setattr(presence, "CHECK_S", 0.05)
    with Agent("bob", home) as bob:
        command = [sys.executable, "-c", WAITS, str(home)]
        other = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE)
        assert other.stdout is not None and other.stdout.readline()
        assert bob.receive(0) is None and meta(home, "bob")["pid"] == other.pid
        killed(other)
        until(lambda: bob.receive(0) is None and meta(home, "bob")["pid"] == os.getpid())
