"""``relay spawn``, ``release`` and ``ps`` as a person types them, and the SDK's calls."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from agent_sdk import Agent, MessageError, Refused
from agent_sdk.requests import spawn_headers
from relay.agents.requests import parse_env
from relay.agents.run_files import rotate
from relay.base.home import Home
from relay.cli.processes import LogFile, release
from tests.procs import PATIENCE_S, home_of, relay, rows_of, until
from tests.terminals import lines_in_a_terminal, terminal


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One relay for all of them, with alice."""
    root = home_of(tmp_path_factory.mktemp("spawn") / "home", "alice")
    assert relay("up", home=root).returncode == 0
    yield root
    for row in listed(root):
        relay("release", row["name"], "--timeout", str(PATIENCE_S), home=root)
    relay("down", home=root)


def listed(home: Path, *options: str) -> list[dict[str, Any]]:
    return rows_of("ps", *options, home=home)


def test_started_listed_and_released(home: Path, tmp_path: Path) -> None:
    script = "echo $AGENT_RELAY_NAME $TOKEN; sleep 1000"
    options = ["--cwd", str(tmp_path), "--env", "TOKEN=a,b", "--env", "X=1"]
    ran = relay("spawn", "one", "--cli", "sh", "--prompt", script, *options, home=home)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("started one, pid ")
    pid = int(ran.stdout.split()[-1])
    until(lambda: (home / "logs" / "one.log").read_text() == "one a,b\n")

    (row,) = until(lambda: [row for row in listed(home) if row["name"] == "one"])
    assert (row["state"], row["pid"], row["cwd"]) == ("starting", pid, str(tmp_path))
    table = relay("ps", home=home).stdout.splitlines()
    assert table[0].split()[:4] == ["NAME", "STATE", "PID", "CLI"]
    assert any(line.split()[:4] == ["one", "starting", str(pid), "sh"] for line in table[1:])

    ran = relay("release", "one", "--reason", "done", "--json", home=home)
    answer = json.loads(ran.stdout)
    assert answer["answer"] == "released one: it was ended by SIGTERM"
    until(lambda: "one" not in [row["name"] for row in listed(home)])
    (row,) = [row for row in listed(home, "--all") if row["name"] == "one"]
    assert (row["state"], row["pid"], row["exit_code"]) == ("released", None, -15)


def test_a_release_waits_for_a_process_that_ignores_sigterm(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SIGKILL comes after 10 s, which was the time that the release waited."""
    waited: list[float] = []
    monkeypatch.setattr(
        "relay.cli.processes._ask", lambda *_, timeout_s, **__: waited.append(timeout_s)
    )
    for more in ([], ["--timeout", "3s"]):
        release.main(["one", "--home", str(home), *more], standalone_mode=False)
    config, before = home / "config.json", (home / "config.json").read_text()
    config.write_text('{"spawn": {"grace_s": 50}}')
    release.main(["one", "--home", str(home)], standalone_mode=False)
    config.write_text("{")
    release.main(["one", "--home", str(home)], standalone_mode=False)
    config.write_text(before)
    assert waited == [20, 3, 60, 10]


def test_output_is_shown_from_its_end_and_as_it_comes(home: Path) -> None:
    """Also when the file has been rotated: copied to NAME.log.1, and cut."""
    script = "seq 1 5; read -r line < go; printf 'six\\033[2J\\nse'; read -r line < on; echo ven"
    go, on = home / "go", home / "on"  # one each: a read may begin before the last writer's close
    for fifo in (go, on):
        os.mkfifo(fifo)
    relay("spawn", "talker", "--cli", "sh", "--prompt", script, "--cwd", str(home), home=home)
    log = home / "logs" / "talker.log"
    until(lambda: log.read_text() == "1\n2\n3\n4\n5\n")
    assert relay("logs", "talker", "-n", "2", home=home).stdout == "4\n5\n"
    view = terminal(home, "logs", "talker", "-n", "1", "--follow")
    view.expect("5\r\n")
    go.write_text("\n")
    view.expect_exact("six\\x1b[2J\r\n")
    until(lambda: log.read_text().endswith("se"))
    shown = relay("logs", "talker", "-n", "1", home=home).stdout
    assert shown == "six\x1b[2J\nse"  # as it is in a pipe
    rotate(Home(str(home)), "talker", 1 << 20)
    on.write_text("\n")
    view.expect_exact("seven\r\n")
    view.sendintr()
    view.expect(pexpect.EOF)
    assert relay("logs", "talker", home=home).stdout == "1\n2\n3\n4\n5\nsix\x1b[2J\nseven\n"


def test_a_home_that_was_restored_is_followed(tmp_path: Path) -> None:
    root = home_of(tmp_path / "home")
    (root / "logs" / "one.log").write_text("before\n")
    file = LogFile(str(root), "one.log")
    assert file.last(1) == [b"before\n"]
    root.rename(tmp_path / "home.before-restore")
    home_of(root)
    (root / "logs" / "one.log").write_text("after\n")
    assert [*file.read()] == [b"after\n"]


def test_whose_output_there_is_none_of(home: Path) -> None:
    done = relay("logs", "alice", home=home)
    assert done.returncode == 1
    assert "the relay has no output of alice; it has that of processes started by" in done.stderr
    assert "did you mean alice?" in relay("logs", "alise", home=home).stderr
    assert relay("logs", "../relay", home=home).returncode == 2


def test_the_relays_own_log_is_sentences_on_a_terminal(home: Path) -> None:
    first = relay("logs", "-n", "1000", home=home).stdout.splitlines()[0]
    assert json.loads(first)["event"] == "Ready"  # in a pipe as it was written
    shown = "\n".join(lines_in_a_terminal(home, 100, "logs -n 1000"))
    assert re.search(r"\d\d:\d\d:\d\d  Ready \(epoch 1, watcher inotify\)$", shown, re.M)


def test_the_prompt_from_standard_input(home: Path, tmp_path: Path) -> None:
    words = ("spawn", "two", "--cli", "sh", "--prompt", "-", "--cwd", str(tmp_path))
    ran = relay(*words, home=home, stdin="NAME=x\necho from stdin\nexit 4\n")
    assert ran.returncode == 0
    until(lambda: [r["exit_code"] for r in listed(home, "--all") if r["name"] == "two"] == [4])
    assert (home / "logs" / "two.log").read_text() == "from stdin\n"


def test_what_is_refused_is_one_line(home: Path) -> None:
    for options, code, said in (
        (["--env", "PATH=hunter2"], 6, "PATH may not be set"),
        (["--env", "hunter2"], 2, "number 1: expected KEY=VALUE"),
        (["--as", "alice"], 6, "spawn is for lead, operator"),
        (["--env", "A=b,C=hunter2"], 2, "cannot be sent"),
    ):
        ran = relay("spawn", "w", "--cli", "sh", "--prompt", "x", *options, home=home)
        assert (ran.returncode, ran.stdout) == (code, ""), options
        assert said in ran.stderr and "Traceback" not in ran.stderr
        assert "hunter2" not in ran.stderr
        assert "w" not in [row["name"] for row in listed(home, "--all")]


def test_the_sdk_asks_and_hears(home: Path, tmp_path: Path) -> None:
    with Agent("operator", home) as me:
        sent = me.spawn("three", "sh", "exit 5", cwd=tmp_path, env={"A": "1"}, timeout_s=PATIENCE_S)
        while (heard := me.receive(PATIENCE_S)) is not None and heard.re != sent:
            pass
        assert heard is not None
        assert (heard.kind, heard.body) == ("notification", "three exited with code 5\n")
        with pytest.raises(Refused, match="the relay has no process ghost"):
            me.release("ghost", timeout_s=PATIENCE_S)


def test_what_could_not_be_read_back_is_not_sent() -> None:
    headers = spawn_headers("w", "sh", None, {"A": "x,y", "B": ""}, None)
    assert headers == {"NAME": "w", "CLI": "sh", "ENV": "A=x,y,B="}
    assert parse_env(headers["ENV"]) == [("A", "x,y"), ("B", "")]
    for name, value in (("A", "b\nc"), ("A", " hunter"), ("A", "b,C=d"), ("A-B", "x"), ("", "x")):
        with pytest.raises(MessageError) as caught:
            spawn_headers("w", "sh", None, {name: value}, None)
        assert value == "x" or value not in str(caught.value)
