"""``relay watch`` shows what the session of an agent does, beside its messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.harness import Harness
from tests.procs import Relay, relay, rows_of
from tests.reach.projects import install


@pytest.mark.slow
@pytest.mark.parametrize("vendor", ["claude", "codex"])
def test_prompts_tool_calls_and_messages_are_lines_in_order_of_time(
    root: Path, vendor: str
) -> None:
    with Relay(root), Harness(vendor, install(root, vendor)) as cli:
        cli.start()
        cli.prompt("look at the build", {"run": "make \x1b[31mall"})
        relay("send", "--as", "alice", "bob", "is it red?", "--wait", "delivered", home=root)
        done = relay("watch", "bob", "--no-follow", home=root)
        rows = rows_of("watch", "bob", "--no-follow", home=root)
    assert done.returncode == 0, done.stderr
    steps = [row["event"] for row in rows]
    assert steps.index("prompt") < steps.index("tool") < steps.index("delivered")
    tool = next(row for row in rows if row["event"] == "tool")
    assert "make" in tool["text"]
    assert "look at the build" in done.stdout and "alice -> bob" in done.stdout
    assert "\x1b" not in done.stdout


def test_an_agent_without_a_session_has_its_messages(root: Path) -> None:
    with Relay(root):
        relay("send", "--as", "alice", "bob", "hello", "--wait", "delivered", home=root)
        done = relay("watch", "bob", "--no-follow", home=root)
    assert "no session of bob has a transcript; its messages are shown" in done.stderr
    assert "alice -> bob" in done.stdout
    wrong = relay("watch", "bbo", "--no-follow", home=root)
    assert wrong.returncode == 1 and "did you mean bob?" in wrong.stderr
