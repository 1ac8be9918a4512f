"""Projects in which the hooks of agent CLIs are installed."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from relay.cli import hooks, run

THEIRS = """{
    "model": "opus",
    "hooks": {
        "Stop": [{"matcher": "", "hooks": [{"type": "command", "command": "say done"}]}],
        "PreToolUse": [{"matcher": "Bash", "hooks": [{"type": "command", "command": "relay hook"}]}]
    },
    "permissions": {"allow": ["Bash(ls:*)"]},
    "new-in-2030": [1.5, null, {"ä": "\\u2028"}]
}
"""
RELAY = "/opt/relay tools/relay"


def install(root: Path, vendor: str, *words: str) -> Path:
    """A project with the hooks of ``relay hooks install``, whose session is bob."""
    project = root.parent / "project"
    project.mkdir()
    program = str(Path(sys.executable).with_name("relay"))
    command = ["hooks", "install", vendor, "--project", "--home", str(root), "--as", "bob", *words]
    with (
        contextlib.chdir(project),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(hooks, "relay_command", lambda: [program]),
    ):
        assert run(command) == 0
    return project


class Done(NamedTuple):
    """What a command printed, and its exit status."""

    output: str
    exit_code: int


def relay(*words: str) -> Done:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = run(["hooks", *words])
    return Done(said.getvalue(), status)


def theirs(project: Path, text: str = THEIRS, name: str = ".claude/settings.local.json") -> Path:
    path = project / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def commands(path: Path, event: str) -> list[str]:
    return [entry["command"] for entry in entries(path, event)]


def entries(path: Path, event: str) -> list[dict[str, Any]]:
    """Ours and others, also of the sets of agy."""
    found = json.loads(path.read_text())
    sets = [found["hooks"]] if "hooks" in found else list(found.values())
    groups = [group for one in sets for group in one.get(event, [])]
    return [entry for group in groups for entry in group.get("hooks", [group])]
