"""``relay hooks``: into the settings of agent CLIs, and out of them again."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
from pathlib import Path
from typing import NamedTuple

import pytest

from relay.base.errors import EXIT_USAGE
from relay.cli import hooks, run
from relay.reach.session import FOLDER, Session, save_session
from relay.reach.vendors import VENDORS

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


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and a home directory of a user beside it."""
    folder = tmp_path / "project"
    for one in (folder, tmp_path / "user"):
        one.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setattr(hooks, "relay_command", lambda: [RELAY])
    return folder


class Done(NamedTuple):
    """What a command printed, and its exit status."""

    output: str
    exit_code: int


def relay(*words: str) -> Done:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = run(["hooks", *words])
    return Done(said.getvalue(), status)


def theirs(project: Path, text: str = THEIRS) -> Path:
    path = project / ".claude/settings.json"
    path.parent.mkdir()
    path.write_text(text)
    return path


def commands(path: Path, event: str) -> list[str]:
    groups = json.loads(path.read_text())["hooks"][event]
    return [entry["command"] for group in groups for entry in group["hooks"]]


def test_what_was_there_stays_and_comes_back_alone(project: Path) -> None:
    """Order, unknown keys and a command that looks like ours; the copy is the file as it was."""
    path = theirs(project)
    path.chmod(0o640)
    done = relay("install", "claude")
    assert done.output == f"claude: installed in {path}\n"
    after = json.loads(path.read_text())
    before = json.loads(THEIRS)
    assert list(after) == list(before)
    assert after["new-in-2030"] == before["new-in-2030"]
    assert after["hooks"]["PreToolUse"] == before["hooks"]["PreToolUse"]
    assert after["hooks"]["Stop"][0] == before["hooks"]["Stop"][0]
    assert commands(path, "SessionStart") == [f"'{RELAY}' hook claude SessionStart"]
    assert commands(path, "Stop")[1:] == [
        f"'{RELAY}' hook claude Stop",
        f"'{RELAY}' bell --rewake",
    ]
    assert path.with_name("settings.json.before-relay").read_text() == THEIRS
    assert stat.S_IMODE(path.stat().st_mode) == 0o640

    assert relay("remove", "claude").exit_code == 0
    assert json.loads(path.read_text()) == before
    assert list(json.loads(path.read_text())["hooks"]) == ["Stop", "PreToolUse"]


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_vendor_has_its_events_and_its_unit_of_time(project: Path, vendor: str) -> None:
    relay("install", vendor)
    path = project / VENDORS[vendor].project_file
    found = json.loads(path.read_text())["hooks"]
    assert tuple(found) == VENDORS[vendor].events
    (entry, *_) = found["SessionStart"][0]["hooks"]
    assert entry["timeout"] == (10_000 if vendor == "gemini" else 10)
    relay("remove", vendor)
    assert not path.exists()  # it was made by the installation


def test_again_changes_nothing_and_other_options_replace_ours(project: Path) -> None:
    path = theirs(project)
    relay("install", "claude")
    first = path.read_bytes()
    assert "has them already" in relay("install", "claude").output
    assert path.read_bytes() == first
    relay("install", "claude", "--as", "bob", "--home", "/srv/relay")
    assert commands(path, "SessionStart") == [
        f"'{RELAY}' hook claude SessionStart --home /srv/relay --as bob"
    ]
    assert commands(path, "Stop")[2] == f"'{RELAY}' bell --rewake --home /srv/relay"


def test_a_dry_run_shows_the_change_and_makes_none(project: Path) -> None:
    path = theirs(project)
    done = relay("install", "claude", "--dry-run")
    assert f'+                        "command": "\'{RELAY}\' hook claude Stop",' in done.output
    assert path.read_text() == THEIRS
    assert [one.name for one in path.parent.iterdir()] == ["settings.json"]


def test_the_users_settings_are_others(project: Path, tmp_path: Path) -> None:
    relay("install", "codex", "--user")
    assert (tmp_path / "user/.codex/hooks.json").exists()
    assert not list(project.iterdir())


def test_the_mcp_server_is_registered_where_each_vendor_looks(project: Path) -> None:
    config = project / ".codex/config.toml"
    config.parent.mkdir()
    config.write_text('model = "o5"  # the best\n[mcp_servers.other]\ncommand = "x"')
    before = config.read_text()
    relay("install", "--mcp")
    server = {"command": RELAY, "args": ["mcp"]}
    for name in (".mcp.json", ".gemini/settings.json"):
        assert json.loads((project / name).read_text())["mcpServers"] == {"agent-relay": server}
    assert config.read_text() == (
        f'{before}\n# >>> agent-relay >>>\n[mcp_servers.agent-relay]\ncommand = "{RELAY}"\n'
        'args = ["mcp"]\n# <<< agent-relay <<<\n'
    )
    again = config.read_text()
    relay("install", "codex", "--mcp")
    assert config.read_text() == again
    relay("remove")
    assert config.read_text() == f"{before}\n"
    assert not (project / ".mcp.json").exists() and not (project / ".gemini/settings.json").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n  // a comment\n  "a": 1\n}', "expected JSON without comments"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ("[1]", "expected the file to be a JSON object, got [1]"),
        ('{"hooks": []}', "expected hooks to be an object, got []"),
        ('{"hooks": {"Stop": {}}}', "expected hooks.Stop to be a list, got {}"),
        ('{"hooks": {"Stop": ["x"]}}', "expected hooks.Stop[0] to be an object with a list"),
        ('{"hooks": {"Stop": [{"hooks": [1]}]}}', "expected hooks.Stop[0].hooks to be a list of"),
        ("\x1b[31m", "expected JSON without comments"),
    ],
)
def test_a_file_that_is_not_understood_is_left_alone(project: Path, text: str, says: str) -> None:
    path = theirs(project, text)
    for verb in ("install", "remove"):
        done = relay(verb, "claude")
        (line,) = done.output.splitlines()
        assert done.exit_code == EXIT_USAGE
        assert says in line and str(path) in line and "it was left as it is" in line
        assert "\x1b" not in line
    assert path.read_text() == text
    assert says in relay("status", "claude").output


def test_toml_that_is_not_understood_is_left_alone(project: Path) -> None:
    config = project / ".codex/config.toml"
    config.parent.mkdir()
    for text in ("= 1", '[mcp_servers.agent-relay]\ncommand = "mine"\n'):
        config.write_text(text)
        done = relay("install", "codex", "--mcp")
        assert done.exit_code == EXIT_USAGE and "it was left as it is" in done.output
        assert config.read_text() == text


def test_a_symbolic_link_stays_one(project: Path, tmp_path: Path) -> None:
    path = theirs(project)
    kept = tmp_path / "dotfiles.json"
    path.rename(kept)
    path.symlink_to(kept)
    relay("install", "claude")
    assert path.is_symlink() and "hook claude Stop" in kept.read_text()
    path.unlink()
    path.symlink_to(path.name)
    assert "it was left as it is" in relay("install", "claude").output


def test_a_file_that_is_not_ours_to_write_is_left_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = theirs(project)
    path.chmod(0o440)
    assert f"{path} is read-only; it was left as it is" in relay("install", "claude").output
    path.chmod(0o640)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert f"{path} belongs to user" in relay("install", "claude").output
    assert path.read_text() == THEIRS


def test_a_fifo_in_its_place_is_not_waited_for(project: Path) -> None:
    path = project / ".claude/settings.json"
    path.parent.mkdir()
    os.mkfifo(path)
    assert f"{path} is not a regular file" in relay("install", "claude").output


def test_the_status_says_when_a_hook_last_fired(project: Path, tmp_path: Path) -> None:
    assert "claude  project  not installed\n" in relay("status").output
    relay("install", "claude", "codex")
    said = relay("status", "claude", "codex").output
    assert "claude  project  installed and never seen to fire\n" in said
    assert "never seen to fire: open `/hooks` in Codex and approve them" in said
    root = project / ".agent-relay"
    (root / FOLDER).mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    (root / "config.json").write_text("{}")
    session = Session("claude", "s-1")
    session.seen_at, session.event = 1, "Stop"
    save_session(str(root), session)
    (line, _) = relay("status", "claude").output.splitlines()[1:]
    assert line.startswith("claude  project  installed, last fired ") and line.endswith("(Stop)")


def test_unknown_vendors_and_names_are_one_line(project: Path) -> None:
    assert "'claud' is not one of" in relay("install", "claud").output
    assert "agent name 'a b' is not a valid name" in relay("install", "--as", "a b").output
    assert not list(project.iterdir())


def test_the_doctor_says_that_hooks_never_fired(project: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run(["init", "--here"])
        relay("install", "codex")
        run(["doctor"])
    path = project / ".codex/hooks.json"
    assert f"the hooks of codex in {path} were never seen to fire" in said.getvalue()
