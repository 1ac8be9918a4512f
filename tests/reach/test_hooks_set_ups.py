"""``relay hooks`` beside hooks of an earlier version, of the other scope, or by hand."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from relay.base.errors import EXIT_USAGE
from relay.cli import run
from tests.reach.projects import THEIRS, commands, relay, theirs

pytestmark = pytest.mark.usefixtures("project")


def test_hooks_that_an_earlier_version_put_into_the_shared_file_are_moved(project: Path) -> None:
    old = json.loads(THEIRS)
    old["hooks"]["Stop"].append(
        {"hooks": [{"type": "command", "command": "/venv/bin/relay hook claude Stop"}]}
    )
    path = theirs(project, json.dumps(old, indent=4), ".claude/settings.json")
    said = relay("status", "claude").output
    assert "an earlier version wrote them: `relay hooks install claude` renews them" in said
    own = path.with_name("settings.local.json")
    done = relay("install", "claude")
    assert done.output == f"claude: installed in {own}\nclaude: moved from {path}\n"
    assert json.loads(path.read_text()) == json.loads(THEIRS)
    assert len(commands(own, "Stop")) == 2
    assert "earlier version" not in relay("status", "claude").output
    assert relay("install", "claude").output == f"claude: {own} has them already\n"


@pytest.mark.parametrize("first", ["--user", "--project"])
def test_hooks_of_the_user_and_of_a_project_do_not_both_run(project: Path, first: str) -> None:
    second = {"--user": "--project", "--project": "--user"}[first]
    relay("install", "claude", first)
    done = relay("install", "claude", second)
    (line,) = done.output.splitlines()
    assert done.exit_code == EXIT_USAGE
    assert "would run twice; nothing was installed" in line
    assert f"`relay hooks remove claude {first}`" in line
    relay("remove", "claude", first)
    assert relay("install", "claude", second).exit_code == 0


TAKES = "relay --home /x inbox --take --timeout 300 >&2"
COMMAND = f'[ -n "$AGENT_RELAY_NAME" ] && {TAKES} && exit 2; exit 0'
ENTRY = {"type": "command", "timeout": 330, "command": COMMAND}
BY_HAND = json.dumps({"hooks": {"Stop": [{"hooks": [ENTRY]}]}})


@pytest.mark.parametrize("more", [(), ("--user",), ("--mcp",)])
@pytest.mark.parametrize(
    "name",
    [".claude/settings.json", ".claude/settings.local.json", "../user/.claude/settings.json"],
)
def test_a_hook_by_hand_that_takes_messages_is_named_and_nothing_is_installed(
    project: Path, name: str, more: tuple[str, ...]
) -> None:
    path = theirs(project, BY_HAND, name)
    done = relay("install", *more)
    (line,) = done.output.splitlines()
    assert done.exit_code == EXIT_USAGE
    assert "a hook of Stop runs `relay inbox --take`" in line and path.name in line
    assert "nothing was installed" in line and "remove that hook" in line
    assert path.read_text() == BY_HAND
    assert not (project / ".codex").exists() and not (project / ".mcp.json").exists()


def test_the_doctor_says_what_status_says_of_hooks(project: Path) -> None:
    """A hook by hand that came later, and hooks that were never seen to fire."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run(["init", "--here"])
        relay("install", "claude", "codex")
        theirs(project, BY_HAND, ".claude/settings.json")
        run(["doctor"])
    told = "a hook of Stop runs `relay inbox --take`, so a message comes twice"
    assert told in said.getvalue() and told in relay("status", "claude").output
    path = project / ".codex/hooks.json"
    assert f"the hooks of codex in {path} were never seen to fire" in said.getvalue()
