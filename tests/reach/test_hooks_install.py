"""``relay hooks``: into the settings of agent CLIs, and out of them again."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from relay.base.errors import EXIT_STATE, EXIT_USAGE, SettingsError
from relay.base.home import Home
from relay.cli import hooks
from relay.reach import settings_file
from relay.reach.session import FOLDER, Session, save_session
from relay.reach.settings import Scope
from relay.reach.vendors import VENDORS
from tests.reach.projects import RELAY, THEIRS, commands, entries, relay, theirs

pytestmark = pytest.mark.usefixtures("project")


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


@pytest.mark.parametrize("text", [None, "{}\n", ""])
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
def test_a_folder_that_was_empty_stays(project: Path, vendor: str) -> None:
    folder = (project / VENDORS[vendor].project_file).parent
    folder.mkdir()
    relay("install", vendor, "--mcp")
    assert relay("install", vendor, "--mcp", "--as", "bob").exit_code == 0
    assert relay("remove", vendor).exit_code == 0
    assert list(project.rglob("*")) == [folder]


EMPTY = {
    "claude": '{"a":1,"hooks":{}, "mcpServers":{}}',
    "codex": '{"hooks":{"Stop":[],"mine":[]}}',
    "gemini": '{"hooks":{"AfterTool":[]},"mcpServers":{}}',
    "agy": '{"agent-relay":{"Stop":[]},"mine":{}}',
}


@pytest.mark.parametrize("vendor", EMPTY)
def test_empty_places_for_hooks_and_servers_are_there_again(project: Path, vendor: str) -> None:
    paths = [theirs(project, EMPTY[vendor], VENDORS[vendor].project_file)]
    if vendor in ("claude", "agy"):
        paths.append(theirs(project, '{"mcpServers": {}}', VENDORS[vendor].mcp_project_file))
    before = [path.read_text() for path in paths]
    assert relay("install", vendor, "--mcp").exit_code == 0
    assert [path.read_text() for path in paths] != before
    relay("remove", vendor)
    assert [path.read_text() for path in paths] == before


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
    home = project.parent / "home"
    Home.create(str(home)).close()
    relay("install", "claude", "--as", "bob", "--home", str(home))
    assert commands(path, "SessionStart") == [
        f"'{RELAY}' hook claude SessionStart --home {home} --as bob || exit 0"
    ]
    assert commands(path, "Stop")[2].startswith(f"'{RELAY}' bell --rewake --home {home} ; ")


@pytest.mark.parametrize("name", ["none", "project"])
def test_a_home_that_is_none_is_refused(project: Path, name: str) -> None:
    """Its hooks would pass over every message, and say nothing."""
    done = relay("install", "claude", "--home", str(project.parent / name))
    (line,) = done.output.splitlines()
    assert done.exit_code == EXIT_STATE
    assert f"{project.parent / name}" in line and "relay home" in line
    assert not list(project.iterdir())


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
        ('{"a": NaN}', "NaN is not a number"),
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


def test_a_number_that_json_cannot_have_is_not_written(project: Path) -> None:
    """Python reads 1e999 as an infinity, and would write what no agent CLI can read."""
    path = theirs(project, '{"a": 1e999}')
    done = relay("install", "claude")
    assert done.exit_code == EXIT_USAGE and "it was left as it is" in done.output
    assert path.read_text() == '{"a": 1e999}'


def test_tables_that_codex_put_before_the_last_comment_stay(project: Path) -> None:
    """It adds those of a project that is trusted at the end, but before a comment there."""
    config = theirs(project, 'model = "o5"\n', ".codex/config.toml")
    relay("install", "codex", "--mcp")
    trusted = '# by me\n[projects."/x"]\ntrust_level = "trusted"\n'
    last = "# <<< agent-relay <<<\n"
    config.write_text(config.read_text().replace(last, f"\n{trusted}{last}"))
    relay("install", "codex", "--mcp", "--as", "bob")
    found = tomllib.loads(config.read_text())
    assert found["projects"] == {"/x": {"trust_level": "trusted"}}
    assert found["mcp_servers"]["agent-relay"]["args"] == ["mcp", "--as", "bob"]
    relay("remove", "codex")
    assert config.read_text() == f'model = "o5"\n{trusted}'


@pytest.mark.parametrize(
    "server",
    [
        # `claude mcp add agent-relay --env AGENT_RELAY_NAME=alice -- relay mcp` of the documents
        {"command": "relay", "args": ["mcp"], "env": {"AGENT_RELAY_NAME": "alice"}},
        None,
        [],
    ],
)
def test_an_mcp_server_that_was_added_by_hand_stays(project: Path, server: object) -> None:
    text = json.dumps({"mcpServers": {"agent-relay": server}})
    path = theirs(project, text, ".mcp.json")
    done = relay("install", "claude", "--mcp")
    assert done.exit_code == EXIT_USAGE and f"{path} has an MCP server agent-relay" in done.output
    assert relay("install", "claude").exit_code == relay("remove", "claude").exit_code == 0
    assert path.read_text() == text


def test_a_change_by_another_program_meanwhile_is_not_written_over(project: Path) -> None:
    path = theirs(project)
    (change,) = Scope(VENDORS["claude"], str(project), is_user=False).installation(
        [RELAY], [], mcp=False
    )
    path.write_text('{"model": "sonnet"}')
    with pytest.raises(SettingsError, match="changed by another program"):
        settings_file.write(change)
    assert path.read_text() == '{"model": "sonnet"}'
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_hooks_of_the_home_directory_are_one_set_up(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the file of the project is that of the user."""
    monkeypatch.setenv("HOME", str(project))
    relay("install", "codex")
    assert "run twice" not in relay("status", "codex").output


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


@pytest.mark.parametrize(
    ("environment", "in_path", "words"),
    [
        ("", "bin", ["relay"]),
        ("pyvenv.cfg", "bin", ["BIN/relay"]),  # a virtual environment: not in every PATH
        ("conda-meta", "bin", ["BIN/relay"]),
        ("", "other", ["BIN/relay"]),  # another program
        ("", "", ["BIN/relay"]),
    ],
)
def test_the_command_is_relay_where_that_is_enough(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: str,
    in_path: str,
    words: list[str],
) -> None:
    monkeypatch.undo()
    for name in ("bin", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "relay").write_text("#!/bin/sh\n")
        (tmp_path / name / "relay").chmod(0o755)
    (tmp_path / environment).mkdir(exist_ok=True)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin/relay")])
    monkeypatch.setenv("PATH", str(tmp_path / in_path) if in_path else "/nowhere")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    is_base = environment != "pyvenv.cfg"  # one of conda is whole
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path) if is_base else "/usr")
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
    path.unlink()
    path.mkdir()
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
