"""``relay hooks``: into the settings of agent CLIs, and out of them again."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

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
    assert after["hooks"]["PreToolUse"][:1] == before["hooks"]["PreToolUse"]
    assert after["hooks"]["PreToolUse"][1]["matcher"] == "Bash"
    assert after["hooks"]["Stop"][0] == before["hooks"]["Stop"][0]
    assert commands(path, "SessionStart") == [f"'{RELAY}' hook claude SessionStart || exit 0"]
    assert commands(path, "Stop")[1:] == [
        f"'{RELAY}' hook claude Stop || exit 0",
        f"'{RELAY}' bell --rewake ; [ $? -eq 77 ] && exit 2 ; exit 0",
    ]
    assert path.with_name(f"{path.name}.before-relay").read_text() == THEIRS
    assert stat.S_IMODE(path.stat().st_mode) == 0o640

    assert relay("remove", "claude").exit_code == 0
    assert path.read_text() == THEIRS
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_what_was_changed_meanwhile_stays(project: Path) -> None:
    path = theirs(project)
    relay("install", "claude")
    relay("install", "claude", "--as", "bob")
    assert path.with_name(f"{path.name}.before-relay").read_text() == THEIRS
    text = path.read_text()
    path.write_text(text.replace('"opus"', '"sonnet"'))
    relay("remove", "claude")
    after = json.loads(THEIRS) | {"model": "sonnet"}
    assert json.loads(path.read_text()) == after
    assert list(json.loads(path.read_text())["hooks"]) == ["Stop", "PreToolUse"]
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", [None, "{}\n"])
def test_nothing_is_left_of_what_was_not_there(project: Path, text: str | None) -> None:
    if text is not None:
        theirs(project, text)
    (project / "notes").write_text("mine")
    before = {one: one.is_file() and one.read_text() for one in project.rglob("*")}
    relay("install", "--mcp", "--approvals", "60s")
    asked = json.loads((project / ".claude/settings.local.json").read_text())["hooks"]
    assert [len(one["hooks"]) for one in asked["PermissionRequest"]] == [2]
    assert relay("remove").exit_code == 0
    assert {one: one.is_file() and one.read_text() for one in project.rglob("*")} == before


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_vendor_has_its_events_and_its_unit_of_time(project: Path, vendor: str) -> None:
    relay("install", vendor)
    path = project / VENDORS[vendor].project_file
    (found,) = json.loads(path.read_text()).values()
    assert list(found) == list(VENDORS[vendor].events)
    (entry, *_) = entries(path, next(iter(found)))
    assert entry["timeout"] == (10_000 if vendor == "gemini" else 10)
    relay("remove", vendor)
    assert not path.parent.exists()  # it was made by the installation


def test_the_sets_of_others_stay_as_they_are_in_agys_file(project: Path) -> None:
    """It drops the whole file for a key that is no set: ours is a set, and nothing else."""
    text = """{
  "lint": {"enabled": false, "PostToolUse": [{"matcher": "*", "hooks": [{"command": "lint"}]}]},
  "say": {"Stop": [{"type": "command", "command": "say done", "timeout": 5}]}
}
"""
    path = theirs(project, text, ".agents/hooks.json")
    relay("install", "agy")
    after = json.loads(path.read_text())
    assert list(after) == ["lint", "say", "agent-relay"]
    assert after["agent-relay"]["Stop"] == [
        {"type": "command", "command": f"'{RELAY}' hook agy Stop || exit 0", "timeout": 10}
    ]
    assert "installed and never seen to fire" in relay("status", "agy").output
    after["agent-relay"]["Stop"].append({"command": "mine"})
    path.write_text(json.dumps(after))
    relay("remove", "agy")
    left = json.loads(text) | {"agent-relay": {"Stop": [{"command": "mine"}]}}
    assert json.loads(path.read_text()) == left
    for bad in ('{"a": []}', '{"a": {"Stop": {}}}', '{"a": {"Stop": ["x"]}}'):
        path.write_text(bad)
        assert "it was left as it is" in relay("install", "agy").output
        assert path.read_text() == bad


def test_again_changes_nothing_and_other_options_replace_ours(project: Path) -> None:
    path = theirs(project)
    relay("install", "claude")
    first = path.read_bytes()
    assert "has them already" in relay("install", "claude").output
    assert path.read_bytes() == first
    relay("install", "claude", "--as", "bob", "--home", "/srv/relay")
    assert commands(path, "SessionStart") == [
        f"'{RELAY}' hook claude SessionStart --home /srv/relay --as bob || exit 0"
    ]
    assert commands(path, "Stop")[2].startswith(f"'{RELAY}' bell --rewake --home /srv/relay ; ")


def test_a_dry_run_shows_the_change_and_makes_none(project: Path) -> None:
    path = theirs(project)
    done = relay("install", "claude", "--dry-run")
    added = f'+                        "command": "\'{RELAY}\' hook claude Stop || exit 0",'
    assert added in done.output
    assert path.read_text() == THEIRS
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_dry_run_says_in_a_sentence_what_each_hook_does(project: Path, vendor: str) -> None:
    said = relay("install", vendor, "--dry-run").output.splitlines()
    said = said[: said.index(next(one for one in said if one.startswith("---")))]
    assert [one.split()[2].rstrip(":") for one in said] == [
        event
        for event in VENDORS[vendor].events
        for _ in range(1 + ((vendor, event) == ("claude", "Stop")))
    ]
    assert all(len(one.split()) > 5 and one.endswith(".") for one in said)
    assert not list(project.iterdir())


def test_the_mcp_server_is_registered_where_each_vendor_looks(project: Path) -> None:
    config = project / ".codex/config.toml"
    config.parent.mkdir()
    config.write_text('model = "o5"  # the best\n[mcp_servers.other]\ncommand = "x"')
    before = config.read_text()
    relay("install", "--mcp")
    server = {"command": RELAY, "args": ["mcp"]}
    for name in (".mcp.json", ".gemini/settings.json", ".agents/mcp_config.json"):
        assert json.loads((project / name).read_text())["mcpServers"] == {"agent-relay": server}
    assert config.read_text() == (
        f'{before}\n# >>> agent-relay >>>\n[mcp_servers.agent-relay]\ncommand = "{RELAY}"\n'
        'args = ["mcp"]\n# <<< agent-relay <<<\n'
    )
    again = config.read_text()
    relay("install", "codex", "--mcp")
    assert config.read_text() == again
    relay("remove")
    assert config.read_text() == before
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
        assert "correct the file, and try again" in line
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


def test_a_symbolic_link_of_the_user_stays_one(project: Path, tmp_path: Path) -> None:
    path = theirs(tmp_path / "user", name=".claude/settings.json")
    kept = tmp_path / "dotfiles.json"
    path.rename(kept)
    path.symlink_to(kept)
    relay("install", "claude", "--user")
    assert path.is_symlink() and "hook claude Stop" in kept.read_text()
    relay("remove", "claude", "--user")
    assert path.is_symlink() and kept.read_text() == THEIRS
    path.unlink()
    path.symlink_to(path.name)
    assert "it was left as it is" in relay("install", "claude", "--user").output


@pytest.mark.parametrize("link", ["file", "folder", "dangling", "former"])
def test_a_link_does_not_lead_an_installation_out_of_the_project(
    project: Path, tmp_path: Path, link: str
) -> None:
    """It may have come with a clone."""
    outside = theirs(tmp_path / "user", name=".claude/settings.json")
    if link == "former":
        ours = {"Stop": [{"hooks": [{"type": "command", "command": "relay hook claude Stop"}]}]}
        outside = theirs(tmp_path / "other", json.dumps({"hooks": ours}), "settings.json")
    path = project / ".claude/settings.local.json"
    if link == "folder":
        (project / ".claude").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").mkdir()
    else:
        path.parent.mkdir()
        name = path.with_name("settings.json") if link == "former" else path
        name.symlink_to(tmp_path / "none/x.json" if link == "dangling" else outside)
    before = {one: one.is_file() and one.read_text() for one in tmp_path.rglob("*")}
    done = relay("install", "claude")
    assert done.exit_code == EXIT_USAGE
    (line,) = done.output.splitlines()
    assert str(project / ".claude/settings.") in line and "outside of the project" in line
    assert "--user" in line
    assert {one: one.is_file() and one.read_text() for one in tmp_path.rglob("*")} == before


def test_half_of_a_surrogate_pair_stays_what_it_is(tmp_path: Path) -> None:
    path = theirs(tmp_path / "user", '{"a": "\\ud800", "b": "é"}', ".claude/settings.json")
    assert relay("install", "claude", "--user").exit_code == 0
    after = json.loads(path.read_text())
    assert (after["a"], after["b"]) == ("\ud800", "é")
    relay("remove", "claude", "--user")
    assert path.read_text() == '{"a": "\\ud800", "b": "é"}'


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_however_relay_ends_no_hook_decides_by_that(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    """2 is also the status of a wrong option, or of a relay that does not know the command."""
    program = tmp_path / "relay"
    monkeypatch.setattr(hooks, "relay_command", lambda: [str(program)])
    relay("install")
    lines = [
        command
        for vendor in VENDORS.values()
        for event in vendor.events
        for command in commands(project / vendor.project_file, event)
    ]
    script = 'for line in "$@"; do (eval "$line") 2>/dev/null; echo $?; done'
    for status in (127, 0, 1, 2, 75, 77, 126, 130):  # 127: there is no such program
        if status != 127:
            program.write_text(f"#!/bin/sh\nexit {status}\n")
            program.chmod(0o755 if status != 126 else 0o644)
        done = subprocess.run([shell, "-c", script, shell, *lines], stdout=subprocess.PIPE)
        for command, ended in zip(lines, done.stdout.split(), strict=True):
            is_woken = "bell --rewake" in command and status == 77
            assert ended == (b"2" if is_woken else b"0"), (status, command)


# -- several set-ups ----------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("is_venv", "in_path", "words"),
    [
        (False, "bin", ["relay"]),
        (True, "bin", ["BIN/relay"]),  # a virtual environment: not in every PATH
        (False, "other", ["BIN/relay"]),  # another program
        (False, "", ["BIN/relay"]),
    ],
)
def test_the_command_is_relay_where_that_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_venv: bool, in_path: str, words: list[str]
) -> None:
    monkeypatch.undo()
    for name in ("bin", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "relay").write_text("#!/bin/sh\n")
        (tmp_path / name / "relay").chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin/relay")])
    monkeypatch.setenv("PATH", str(tmp_path / in_path) if in_path else "/nowhere")
    monkeypatch.setattr(sys, "prefix", str(tmp_path) if is_venv else "/usr")
    assert [hooks.relay_command()[0].replace(str(tmp_path / "bin"), "BIN")] == words


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
    path.unlink()
    os.mkfifo(path)  # which is not waited for
    assert f"{path} is not a regular file" in relay("install", "claude").output


def test_where_one_file_cannot_be_written_none_is(project: Path) -> None:
    config = theirs(project, "a = 1\n", ".codex/config.toml")
    config.chmod(0o440)
    done = relay("install", "--mcp")
    assert done.exit_code == EXIT_USAGE and f"{config} is read-only" in done.output
    assert [one.name for one in project.rglob("*")] == [".codex", "config.toml"]


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
