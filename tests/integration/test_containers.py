"""Containers and sandboxes: the same home, and a PID namespace of their own.

From inside no process outside is visible, and a pid from inside is another process's outside. Where
the machine allows no such namespace, there is nothing to be seen here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.base.home import LEDGER, Home
from relay.base.process_info import pid_namespace
from relay.ledger.file import open_readonly
from relay.views.agents import find_alerts
from tests.box import Box
from tests.landlock import MISSING
from tests.procs import PATIENCE_S, PROJECT, Relay, environment, relay, rows_of, until
from tests.shells import SHELLS, environment_of

NAMESPACES = (["-p"], ["-U", "-r", "-p"])  # as root, or as a user where the machine allows that
OUTSIDE = "outside this container or sandbox"
RECEIVES = (
    "import sys\nfrom agent_sdk import Agent\n"
    "bob = Agent('bob', sys.argv[1])\nprint(1, flush=True)\nbob.receive()"
)


@pytest.fixture(scope="module")
def enter() -> list[str]:
    """The command that runs another one in a PID namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed: no container can be made")
    for kind in NAMESPACES:
        command = ["unshare", *kind, "-f", "--mount-proc", "--kill-child"]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    pytest.skip("this machine lets nobody make a PID namespace")


@contextlib.contextmanager
def agent_in(enter: list[str], argv: list[str], env: dict[str, str]) -> Iterator[None]:
    """An agent that runs in a container, which is killed at the end."""
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*enter, *argv], env=env, **streams) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        yield
        process.kill()


def registered(box: Box) -> dict[str, Any]:
    """What bob's meta.json says."""
    return dict(json.loads(box.path("agents", "bob", "meta.json").read_text()))


def test_from_inside_a_relay_is_seen_and_used_and_gets_no_signal(
    running: Relay, home: Path, enter: list[str]
) -> None:
    def inside(*words: str) -> tuple[int, str]:
        argv = [*enter, sys.executable, "-m", "relay", "--home", str(home), *words]
        done = subprocess.run(
            argv, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        return done.returncode, done.stdout + done.stderr

    code, said = inside("status")
    assert (code, said.splitlines()[0]) == (0, f"the relay is running, {OUTSIDE}")
    assert f"a relay is running, {OUTSIDE}" in inside("where")[1]
    assert inside("send", "bob", "hello", "--as", "alice", "--wait", "delivered")[0] == 0
    assert inside("prune")[0] == 0  # asks the relay, which answers

    code, said = inside("down")
    assert (code, said) == (
        1,
        f"relay: the relay, {OUTSIDE}, gets no signal from here; run `relay --home {home} down` "
        "where it was started\n",
    )
    code, said = inside("config", "set", "disk.low_percent", "99")
    assert f"the relay, {OUTSIDE}, gets no signal from here; its next start uses it" in said
    assert rows_of("status", home=home)[0]["pid"] == running.pid


def test_a_relay_inside_is_asked_and_stopped_from_outside(home: Path, enter: list[str]) -> None:
    inside = Relay(home)
    inside.start(*enter)
    try:  # its pid in .lock is that inside
        assert (home / ".lock").read_text().split() == ["1"]
        assert relay("prune", home=home).stdout == "nothing has expired\n"
        assert relay("config", "set", "disk.low_percent", "99", home=home).returncode == 0
        assert relay("down", home=home).returncode == 0
    finally:
        inside.kill()


@pytest.mark.parametrize("kind", ["sdk", "shell"])
def test_an_agent_inside_is_not_held_for_dead(
    box: Box, enter: list[str], kind: str, tmp_path: Path
) -> None:
    argv, env = [sys.executable, "-c", RECEIVES, str(box.root)], environment()
    if kind == "shell":
        script = tmp_path / "agent.sh"
        script.write_text('. "$RELAY_SH"\nrelay_recv\nprintf "1\\n"\nread -r go_on\n')
        argv, env = [*SHELLS["dash"], str(script)], environment_of(box.root, "bob")
    with agent_in(enter, argv, env):
        box.tick(2)
        found = registered(box)
        assert found["pid"] == 1 and found["pid_namespace"] not in (0, pid_namespace())
    for _ in range(20):  # longer than agents.dead_after_s
        box.after(31, turns=1)
    sent = box.send("alice", "TO: bob\n\nare you there?")
    assert box.states(sent) == {"bob": "written"}
    assert box.sql("SELECT status, pid FROM agents WHERE name = 'bob'") == [("active", None)]
    with Home(str(box.root)) as home, contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        alert = find_alerts(home, db, time.time_ns()).get("bob")
        assert alert is None or alert.ended_pid is None


def test_who_was_terminated_and_registers_inside_gets_its_mail(box: Box, enter: list[str]) -> None:
    gone = {"pid": os.getpid(), "pid_start_ticks": 1, "started_at": box.clock.now_ns()}
    box.path("agents", "bob", "meta.json").write_text(json.dumps(gone))
    for _ in range(20):
        box.after(31, turns=1)
    assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("terminated",)]
    back = gone | {"pid_namespace": 1, "started_at": box.clock.now_ns()}
    box.path("agents", "bob", "meta.json").write_text(json.dumps(back))
    for _ in range(20):
        box.after(31, turns=1)
    assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("active",)]


MOVES = """
from agent_sdk import Agent
with Agent("alice", "{home}") as alice, Agent("bob", "{home}") as bob:
    sent = alice.send("bob", "hello", wait="taken")
    many = alice.send_many([{{"to": "bob", "body": "one"}}, {{"to": "bob", "body": "two"}}])
    got = [bob.receive(30) for _ in range(3)]
    assert [one.id for one in got] == [sent, *many]
"""


def test_where_no_file_moves_to_another_directory_a_copy_does(running: Relay, home: Path) -> None:
    """As in the sandbox of an agent CLI on Linux before 5.19: Landlock knew no such right."""
    sandbox = [sys.executable, str(PROJECT / "tests" / "landlock.py"), str(home)]
    argv = [*sandbox, sys.executable, "-c", MOVES.format(home=home)]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode == MISSING:
        pytest.skip("this kernel has no Landlock")
    assert (done.returncode, done.stderr) == (0, "")
    assert relay("send", "alice", "hi", "--as", "bob", "--wait", "delivered", home=home).stdout
    argv = [*sandbox, sys.executable, "-m", "relay", "--home", str(home), "inbox", "--take"]
    done = subprocess.run(
        [*argv, "--as", "alice"], env=environment(), capture_output=True, text=True, check=False
    )
    assert "| hi" in done.stdout
    for agent in ("alice", "bob"):
        assert os.listdir(home / "agents" / agent / "outbox") == [".pending"]
        assert set(os.listdir(home / "agents" / agent / "inbox")) == {".pending", ".read"}
    until(lambda: all(row["status"] == "read" for row in rows_of("list", home=home)))
