"""A permission request is answered by the operator through the relay, or by the vendor's dialog."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.harness import Harness
from tests.procs import Relay, relay, rows_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
VENDORS = ("claude", "codex")


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer as people do, who hear what becomes of it."""
    monkeypatch.delenv("RELAY_NO_WAIT", raising=False)


def installed(root: Path, vendor: str, seconds: int = 60) -> Path:
    """A project whose session is bob, and asks the operator for so long."""
    project = root.parent / "project"
    project.mkdir()
    path = Path(sys.executable).with_name("relay")
    words = [path, "hooks", "install", vendor, "--project", "--home", root, "--as", "bob"]
    subprocess.run(
        [*words, "--approvals", f"{max(10, seconds)}s"],
        cwd=project,
        check=True,
        capture_output=True,
    )
    if seconds < 10:  # quicker than anybody may set it
        for file in project.rglob("*.json"):
            file.write_text(file.read_text().replace("--ask 10", f"--ask {seconds}"))
    return project


@contextmanager
def asking(cli: Harness, command: str) -> Iterator[list[str]]:
    """A tool call that waits for its permission meanwhile; then what was decided."""
    decided: list[str] = []
    thread = threading.Thread(target=lambda: decided.append(cli.ask(command)))
    thread.start()
    try:
        yield decided
    finally:
        thread.join(60)


def waiting(home: Path) -> list[dict[str, Any]]:
    done = relay("attention", "--json", home=home)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in rows if row["kind"] == "permission"]


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize(
    ("verb", "words", "decision"),
    [
        ("approve", (), "allow"),
        ("deny", ("not on\na Friday",), "deny: the operator answered no: not on a Friday"),
    ],
)
def test_the_answer_in_time_decides(
    root: Path, vendor: str, verb: str, words: tuple[str, ...], decision: str
) -> None:
    with Relay(root), Harness(vendor, installed(root, vendor)) as cli:
        cli.start()
        with asking(cli, "rm -rf build") as decided:
            until(lambda: waiting(root))
            (row,) = waiting(root)
            assert row["who"] == "bob"
            assert row["what"] == "bob asks for permission: Bash rm -rf build (yes, no)"
            assert row["command"] == f"relay approve {row['id']}"
            assert relay(verb, row["id"], *words, home=root).returncode == 0
        assert decided == [decision]
        assert cli.errors() == []
        assert waiting(root) == []
        second = relay("approve", row["id"], home=root)
        assert second.returncode == 6 and "was answered by operator at" in second.stderr
        (trace,) = rows_of("trace", row["id"], home=root)  # what was asked, and the answer
        assert trace["from"] == "bob" and trace["deliveries"][0]["answer_text"] in ("yes", "no")


def test_without_an_answer_the_dialog_asks_and_nothing_waits_any_more(root: Path) -> None:
    with Relay(root), Harness("claude", installed(root, "claude", 1)) as cli:
        cli.start()
        with asking(cli, "make") as decided:
            until(lambda: waiting(root))
            (row,) = waiting(root)
        assert decided == ["dialog"]
        assert cli.errors() == []
        assert waiting(root) == []
        late = relay("approve", row["id"], home=root)
        assert late.returncode != 0
        assert (
            rows_of("inbox", "--as", "bob", home=root) == []
        )  # nothing is said to the model later


def test_a_question_that_was_read_and_not_answered_decides_nothing_later(root: Path) -> None:
    with Relay(root), Harness("claude", installed(root, "claude", 3)) as cli:
        cli.start()
        with asking(cli, "make") as decided:
            until(lambda: waiting(root))
            (row,) = waiting(root)
            assert relay("inbox", "--take", home=root).returncode == 0
        assert decided == ["dialog"]
        assert waiting(root) == []
        late = relay("approve", row["id"], home=root)
        assert late.returncode == 6
        assert "no longer waits: the agent's own dialog asks now" in late.stderr


def test_a_session_that_is_killed_while_it_waits_loses_nothing(root: Path) -> None:
    """The vendor kills its hooks: the question is in the list until its time is over."""
    with Relay(root), Harness("claude", installed(root, "claude", 8)) as cli:
        cli.start()
        thread = threading.Thread(target=lambda: cli.ask("make"))
        thread.start()
        until(lambda: waiting(root))
        cli._runner.close()
        thread.join(20)
        until(lambda: waiting(root) == [], patience_s=20)
        assert relay("doctor", home=root).returncode == 0


def test_without_a_relay_the_dialog_asks_at_once(root: Path) -> None:
    with Harness("claude", installed(root, "claude")) as cli:
        with Relay(root):
            cli.start()
        began = time.monotonic()
        assert cli.ask("make") == "dialog"
        assert time.monotonic() - began < 30
        assert cli.errors() == []


def test_the_first_answer_decides_for_all(root: Path) -> None:
    """Yes and no at the same time: one of them, and the other one hears of it."""
    with Relay(root), Harness("claude", installed(root, "claude")) as cli:
        cli.start()
        with asking(cli, "make") as decided:
            until(lambda: waiting(root))
            (row,) = waiting(root)
            words = [[sys.executable, "-m", "relay", "--home", str(root)]] * 2
            both = [
                subprocess.Popen([*line, verb, row["id"]], stderr=subprocess.PIPE)
                for line, verb in zip(words, ("approve", "deny"), strict=True)
            ]
            for one in both:
                one.communicate(timeout=30)
        codes = [one.returncode for one in both]
        assert sorted(codes) == [0, 6]
        assert decided == ["allow" if codes[0] == 0 else "deny: the operator answered no"]


def test_they_come_out_of_the_settings_as_they_went_in(root: Path) -> None:
    project = installed(root, "claude")
    file = project / ".claude/settings.local.json"
    asked = json.loads(file.read_text())["hooks"]["PermissionRequest"]
    assert [len(one["hooks"]) for one in asked] == [2]
    path = Path(sys.executable).with_name("relay")
    subprocess.run(
        [path, "hooks", "remove", "claude"], cwd=project, check=True, capture_output=True
    )
    assert not file.exists()


def test_a_hook_that_is_ended_withdraws_its_question_and_says_nothing(root: Path) -> None:
    with Relay(root), Harness("claude", installed(root, "claude")) as cli:
        cli.start()
        path = Path(sys.executable).with_name("relay")
        words = [path, "hook", "claude", "PermissionRequest", "--home", root, "--ask", "60"]
        facts = {"session_id": cli.session_id, "tool_name": "Bash", "cwd": str(cli.cwd)}
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        with subprocess.Popen(words, **pipes) as hook:  # type: ignore[call-overload]
            hook.stdin.write(json.dumps(facts).encode())
            hook.stdin.close()
            until(lambda: waiting(root))
            hook.terminate()
            assert (hook.stdout.read(), hook.stderr.read()) == (b"", b"")
            assert hook.wait(20) == 0
        assert waiting(root) == []
