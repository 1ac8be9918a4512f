"""The relay as a process, through the command line a person types."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base.fsio import lock_owner
from tests.procs import PATIENCE_S, environment, log_of, relay, rows_of, until


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home with a space in its path; whatever runs for it is down at the end."""
    root = tmp_path / "relay home"
    assert relay("init", home=root).returncode == 0
    yield root
    relay("down", home=root)


def test_a_second_relay_is_refused_with_the_pid_of_the_first(home: Path) -> None:
    pid = rows_of("up", home=home)[0]["pid"]
    for arguments in (["up"], ["up", "--foreground"]):
        second = relay(*arguments, home=home)
        assert second.returncode == 5
        assert f"its pid is {pid}" in second.stderr
        assert second.stderr.count("\n") == 1
    assert rows_of("status", home=home)[0]["pid"] == pid


def test_who_removes_the_lock_file_lets_no_second_relay_run(home: Path) -> None:
    pid = rows_of("up", home=home)[0]["pid"]
    (home / ".lock").unlink()
    second = relay("up", home=home)
    assert second.returncode == 5 and f"its pid is {pid}" in second.stderr
    assert relay("ledger", "rebuild", home=home).returncode == 5
    (home / ".lock").unlink(missing_ok=True)  # the second one made it
    relay("register", "bob", home=home)
    relay("send", "--wait", "none", "bob", "hi", home=home)  # a turn of the loop
    until(lambda: lock_owner(str(home / ".lock")) == pid)
    assert rows_of("status", home=home)[0]["pid"] == pid
    assert (home / ".lock").read_text() == f"{pid}\n\n"
    assert log_of(home, "lock_made")
    assert relay("down", home=home).returncode == 0
    assert (home / ".lock").read_text() == ""


def test_a_setting_that_is_wrong_is_named(home: Path) -> None:
    (home / "config.json").write_text('{"limits": {"batch_files": 0}}')
    up = relay("up", home=home)
    assert up.returncode == 2
    assert "config.json: limits.batch_files: expected" in up.stderr
    assert up.stderr.count("\n") == 1


def test_no_home_no_traceback(tmp_path: Path) -> None:
    for command in (["up"], ["down"], ["status"], ["agents"], ["inbox"], ["send", "a", "b"]):
        done = relay(*command, home=tmp_path / "nowhere")
        assert done.returncode == 5, command
        assert "there is no relay home" in done.stderr
        assert f"`relay --home {tmp_path / 'nowhere'} init`" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.damages
def test_a_damaged_store_is_named_and_left_as_it_is(home: Path) -> None:
    store = home / "store" / "relay.acomm"
    store.write_bytes(b"ACOMM001" + b"\0" * 200)
    up = relay("up", home=home)
    assert up.returncode == 3
    assert str(store) in up.stderr and "expected" in up.stderr
    assert store.read_bytes() == b"ACOMM001" + b"\0" * 200


@pytest.mark.parametrize("module", ["relay.ledger.schema", "relay.audit.lake_columns"])
def test_files_of_the_package_are_read_as_utf_8_in_any_locale(module: str) -> None:
    code = f"import {module} as found; getattr(found, 'schema_sql', str)()"
    locale = environment(PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=locale, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def start(home: Path) -> subprocess.Popen[str]:
    """A relay as systemd starts it; ready when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-m", "relay.daemon", "--home", str(home)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any("ready" in line for line in process.stderr)
    return process


def test_a_start_makes_the_folder_of_the_logs(home: Path) -> None:
    (home / "logs").rmdir()
    process = start(home)
    try:
        assert (home / "logs").stat().st_mode & 0o777 == 0o700
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def test_a_relay_whose_home_is_removed_ends_and_a_new_one_has_it_alone(home: Path) -> None:
    process = start(home)
    while home.exists():  # what it makes meanwhile is removed, too
        subprocess.run(["rm", "-rf", str(home)], capture_output=True, check=False)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 5  # systemd does not start it again
    assert said.splitlines()[-1] == (
        f"relay: {home} was removed while the relay was running; `relay init` makes a new one"
    )
    assert "Traceback" not in said

    assert relay("init", home=home).returncode == 0
    pid = rows_of("up", home=home)[0]["pid"]
    assert rows_of("status", home=home)[0]["pid"] == pid


def test_one_whose_home_is_elsewhere_leaves_another_in_its_place_alone(
    home: Path, tmp_path: Path
) -> None:
    """And goes on when its own is back."""
    process = start(home)
    try:
        home.rename(tmp_path / "elsewhere")
        assert relay("init", home=home).returncode == 0
        files = sorted(str(path) for path in home.rglob("*"))
        log = tmp_path / "elsewhere/logs/relay.log"
        until(lambda: log.read_text().count("was moved away while the relay ran") > 1)
        assert sorted(str(path) for path in home.rglob("*")) == files
        assert "Traceback" not in log.read_text()

        shutil.rmtree(home)
        (tmp_path / "elsewhere").rename(home)
        relay("register", "bob", home=home)
        assert relay("send", "bob", "hi", home=home).returncode == 0
        until(lambda: list((home / "agents/bob/inbox").glob("*.msg")))
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
