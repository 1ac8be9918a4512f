"""The unit that has the system start the relay: what stands in it, and where."""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relay import cli
from relay.base.errors import UnsafePath
from relay.base.home import Home, tag_of
from relay.cli.service import NoService, service_of, write_unit


def linux(home: str) -> str:
    return service_of(home, {"HOME": "/home/a"}, "linux").text.decode()


def test_the_unit_says_what_the_relay_needs() -> None:
    found = service_of("/home/a/.agent-relay", {"HOME": "/home/a"}, "linux", "/usr/bin/python3")
    assert found.path == "/home/a/.config/systemd/user/agent-relay.service"
    for line in (
        "Type=notify",
        'ExecStart="/usr/bin/python3" "-P" "-m" "relay.daemon" "--home" "/home/a/.agent-relay"',
        "ExecReload=/bin/kill -HUP $MAINPID",
        "Restart=on-failure",
        "KillMode=process",  # agents go on
        "TimeoutStopSec=30",
        "WatchdogSec=60",
        "WantedBy=default.target",
    ):
        assert line in found.text.decode().splitlines()


def test_nothing_in_a_path_is_expanded() -> None:
    (line,) = re.findall("ExecStart=.*", linux('/h/%n $HOME "x" \\y'))
    assert line.endswith('"--home" "/h/%%n $$HOME \\"x\\" \\\\y"')


@pytest.mark.parametrize("home", ["relative", "/a\nExecStart=/bin/sh", "/a\0b"])
def test_a_path_that_no_unit_can_have_is_refused(home: str) -> None:
    with pytest.raises(NoService, match="is not an absolute path"):
        linux(home)


def test_launchd_has_a_list_of_its_own() -> None:
    home = "/Users/it's a/.agent-relay"
    found = service_of(home, {"HOME": "/Users/it's a"}, "darwin", "/usr/bin/python3")
    assert found.path == "/Users/it's a/Library/LaunchAgents/local.agent-relay.plist"
    job = plistlib.loads(found.text)
    assert job["ProgramArguments"][-3:] == ["relay.daemon", "--home", home]
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["AbandonProcessGroup"] is True
    assert "'/Users/it'\\''s a/Library" in found.start[0]


def test_elsewhere_there_is_none() -> None:
    with pytest.raises(NoService, match="not supported on win32"):
        service_of("/h", {"HOME": "/"}, "win32")


def test_a_pipe_in_the_place_of_the_unit_is_not_waited_for(tmp_path: Path) -> None:
    found = service_of(str(tmp_path / "home"), {"HOME": str(tmp_path)}, "linux")
    os.makedirs(os.path.dirname(found.path))
    os.mkfifo(found.path)
    with pytest.raises(UnsafePath, match="is not a regular file"):
        write_unit(found)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("folder", ["home", 'a % $PATH "home"'])
def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path, folder: str) -> None:
    found = service_of(str(tmp_path / folder), {"HOME": str(tmp_path)}, "linux")
    write_unit(found)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", found.path],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "warning"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze cannot work here: {done.stderr}")
    said = [line for line in done.stderr.splitlines() if "agent-relay" in line]
    assert (said, done.returncode) == ([], 0)


# -- the commands --------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The relay home that a person has by default."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "platform", "linux")
    Home.create(str(tmp_path / ".agent-relay"), b"{}").close()
    return tmp_path / ".agent-relay"


@pytest.fixture
def other(home: Path) -> Path:
    """Another home of the same person."""
    Home.create(str(home.parent / 'the "other" home'), b"{}").close()
    return home.parent / 'the "other" home'


def run(home: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.run(["--home", str(home), "service", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_installed_printed_and_removed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / "agent-relay.service"
    code, said = run(home, capsys, "install")
    assert code == 0 and said.startswith(f"wrote {unit}; now run\n  systemctl --user daemon-reload")
    assert unit.stat().st_mode & 0o777 == 0o600
    assert run(home, capsys, "install", "--print") == (0, unit.read_text())
    assert run(home, capsys, "install")[1].startswith("unchanged: ")
    unit.write_text("[Unit]\n")
    assert run(home, capsys, "install")[1].startswith("wrote ")
    assert run(home, capsys, "uninstall")[0] == 0
    assert not unit.exists()
    code, said = run(home, capsys, "uninstall")
    assert (code, said) == (1, f"relay: there is no {unit}; nothing was installed for {home}\n")


def test_a_link_in_its_place_is_not_followed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / "agent-relay.service"
    unit.parent.mkdir(parents=True)
    target = tmp_path / "precious"
    target.write_text("mine")
    unit.symlink_to(target)
    code, said = run(home, capsys, "install")
    assert code == 1 and "is a link" in said and said.count("\n") == 1
    assert target.read_text() == "mine"


def test_what_is_enabled_is_disabled_before_its_file_goes(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(home, capsys, "install")[0] == 0
    folder = tmp_path / "config" / "systemd" / "user"
    link = folder / "default.target.wants" / "agent-relay.service"
    link.parent.mkdir()
    link.symlink_to(folder / "agent-relay.service")  # as `systemctl --user enable` does
    code, said = run(home, capsys, "uninstall")
    assert (code, said) == (
        5,
        "relay: agent-relay.service is enabled; first `systemctl --user disable --now"
        " agent-relay.service`, then `relay service uninstall`\n",
    )
    assert units(home) == ["agent-relay.service", "default.target.wants"]
    link.unlink()
    assert run(home, capsys, "uninstall")[0] == 0
    assert units(home) == ["default.target.wants"]


# -- one a home ----------------------------------------------------------------------------


def units(home: Path) -> list[str]:
    folder = home.parent / "config" / "systemd" / "user"
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_two_homes_have_two_units(
    home: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(home, capsys, "install")[0] == 0
    code, said = run(other, capsys, "install")
    own = f"agent-relay-{tag_of(str(other))}.service"
    assert code == 0 and f"systemctl --user enable --now {own}" in said
    assert units(home) == [own, "agent-relay.service"]
    code, said = run(home, capsys, "uninstall")
    assert code == 0 and "systemctl --user stop agent-relay.service" in said
    assert units(home) == [own]
    assert run(home, capsys, "uninstall")[0] == 1
    assert units(home) == [own]
    code, said = run(other, capsys, "uninstall")
    assert code == 0 and f"systemctl --user stop {own}" in said


def test_a_relative_configuration_directory_is_passed_over(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd does: https://specifications.freedesktop.org/basedir-spec."""
    monkeypatch.chdir(home.parent)
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    assert run(home, capsys, "install")[0] == 0
    assert (home.parent / ".config/systemd/user/agent-relay.service").exists()
