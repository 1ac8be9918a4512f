"""``relay guide``, and the agents that get it before their prompt."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path

import click
import pytest

from agent_sdk import Agent
from relay.agents.guide import TOOLS, guide
from relay.cli import cli as command_line
from tests.procs import PATIENCE_S, PROJECT, Relay, relay, until

FAKE = """#!/bin/sh
printf '%s\\n' "$@" > "$0.new" && mv "$0.new" "$0.args"
echo "I am $AGENT_RELAY_NAME in $AGENT_RELAY_DIR"
"""


def examples(page: str) -> list[str]:
    """The indented lines of a page, without their explanations."""
    lines = re.findall(r"^    (\S.*)$", page, re.MULTILINE)
    return [re.split(r"  +", line)[0] for line in lines]


def check_command(line: str) -> None:
    """Parse a command of a page as the command line does; usage errors are raised."""
    words = shlex.split(line)
    assert words.pop(0) == "relay"
    if words[0] == "--home":
        del words[:2]
    above = click.Context(command_line, **command_line.context_settings)
    command = command_line.get_command(above, words[0])
    assert command is not None, line
    command.make_context(words[0], words[1:], parent=above)


def test_the_guide_is_one_page_about_this_agent(home: Path) -> None:
    """It names agent and home, and fits a screen."""
    shown = relay("guide", "--as", "bob", "--for", "claude", home=home).stdout
    assert shown.startswith(f"# You are bob, an agent of the relay in {home}\n")
    for tool in TOOLS:
        page = guide("bob", str(home), tool)
        assert len(page.splitlines()) <= 60 and "{" not in page, tool


def test_without_a_name_it_is_for_every_agent_with_one_in_its_environment(home: Path) -> None:
    """A page in a repository's CLAUDE.md is read by several agents; none becomes the operator."""
    shown = relay("guide", home=home).stdout
    assert shown.startswith(f"# You are an agent of the relay in {home}\n")
    assert "Your name is the value of the variable AGENT_RELAY_NAME" in shown
    assert "--as" not in shown and "operator of" not in shown


@pytest.mark.parametrize(("name", "home_words"), [("bob", "--home '/a home' "), (None, "")])
def test_its_commands_are_those_of_the_command_line(
    name: str | None, home_words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --home where the agent would not find the home without it."""
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    lines = examples(guide(name, "/a home", command=f"relay {home_words}".strip()))
    assert len(lines) > 10
    for line in lines:
        assert line.startswith(f"relay {home_words}")
        check_command(line)


def test_its_functions_are_those_of_the_sdk() -> None:
    """relay.sh and agent_sdk have what the pages for shells and Python use."""
    script = (PROJECT / "agent_sdk" / "relay.sh").read_text()
    used = set(re.findall(r"^    (relay_\w+)", guide("bob", "/h", "sh"), re.MULTILINE))
    assert used and used <= set(re.findall(r"^(relay_\w+)\(\)", script, re.MULTILINE))
    page = re.findall(r"^    (.*)$", guide(None, "/h", "python"), re.MULTILINE)
    tree = ast.parse("\n".join(page))
    methods = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "me"
    }
    assert {"send", "query"} < methods and all(hasattr(Agent, name) for name in methods)


def test_an_invalid_name_is_refused(home: Path) -> None:
    """Nothing is printed that an agent could be given."""
    shown = relay("guide", "--as", "a b", home=home)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "'a b' is not a valid" in shown.stderr


def arguments_of(cli: str, fakes: Path) -> str:
    """The arguments with which a fake was started."""
    file = fakes / f"{cli}.args"
    until(file.exists)
    return file.read_text()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that write down their arguments, first in the PATH of the relay."""
    for cli in ("claude", "codex"):
        (tmp_path / cli).write_text(FAKE)
        (tmp_path / cli).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_a_started_agent_is_told_before_its_task(fakes: Path, running: Relay, home: Path) -> None:
    """The preset's argv holds the page, then the task."""
    for cli, before in (("claude", "-p"), ("codex", "exec")):
        with Agent("operator", home) as operator:
            operator.spawn(
                f"my-{cli}", cli, "Review what alice sends.", cwd=fakes, timeout_s=PATIENCE_S
            )
        page = guide(f"my-{cli}", "$AGENT_RELAY_DIR", cli)
        told = f"{page}\n# Your task\n\nReview what alice sends."
        assert arguments_of(cli, fakes) == f"{before}\n{told}\n"
