"""The log's file: rotated by size, whoever writes, whatever the disk does."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pexpect
import pytest

from relay.base import fsio, logs
from relay.base.logs import Log, make_log
from tests.procs import PATIENCE_S


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mebibyte is a kilobyte here."""
    monkeypatch.setattr(logs, "MIB", 1000)
    monkeypatch.setattr(logs, "TRY_AGAIN_BYTES", 500)


def open_log(path: Path, keep_files: int = 2, level: str = "info") -> Log:
    return make_log(level, str(path), max_mib=1, keep_files=keep_files)


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def write(log: Log, first: int, last: int) -> None:
    for number in range(first, last):
        log("A line of about a hundred bytes", action="test", n=number, fill="x" * 20)


@pytest.mark.shows("ready 5.3")
def test_full_files_move_on_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "relay.log"
    write(open_log(path), 0, 60)
    names = ["relay.log", "relay.log.1", "relay.log.2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    kept = [n for name in reversed(names) for n in numbers(tmp_path / name)]
    assert kept == list(range(kept[0], 60)) and kept[0] > 0
    for name in names:
        assert (tmp_path / name).stat().st_size <= 1000
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_what_was_written_before_a_restart_counts(tmp_path: Path) -> None:
    path = tmp_path / "relay.log"
    for number in range(20):
        write(open_log(path), number, number + 1)
    assert (tmp_path / "relay.log.1").exists()
    assert path.stat().st_size <= 1000


def test_a_line_longer_than_a_file_is_written_whole(tmp_path: Path) -> None:
    log = open_log(tmp_path / "relay.log")
    log("short", n=1)
    log("long", n=2, fill="x" * 3000)
    log("short", n=3)
    assert numbers(tmp_path / "relay.log.2") == [1]
    assert numbers(tmp_path / "relay.log.1") == [2]
    assert numbers(tmp_path / "relay.log") == [3]


def test_a_failed_rotation_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "relay.log"
    log = open_log(path)

    def refuse(operation: str, name: str) -> None:
        raise OSError(28, os.strerror(28), name)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "fault", refuse)
        write(log, 0, 12)
    assert numbers(path) == list(range(12))
    write(log, 12, 24)
    assert (tmp_path / "relay.log.1").exists()
    kept = [
        n for name in (".2", ".1", "") if (p := Path(f"{path}{name}")).exists() for n in numbers(p)
    ]
    assert kept == list(range(24))


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "relay.log"
    log = open_log(path, keep_files=1000)
    threads = [threading.Thread(target=write, args=(log, 50 * n, 50 * n + 50)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [n for file in tmp_path.iterdir() for n in numbers(file)]
    assert sorted(found) == list(range(200))


def test_settings_change_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "relay.log"
    log = open_log(path)
    log("not shown", level="debug", n=0)
    log.set("debug", 1000, 3)
    write(log, 1, 40)
    log("shown", level="debug", n=40)
    assert numbers(path) == list(range(1, 41))


@pytest.mark.shows("ready 5.3")
def test_killed_in_the_middle_of_a_rotation_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "relay.log"
    write(open_log(path), 0, 10)
    before = {p.name for p in tmp_path.iterdir()}
    assert before == {"relay.log", "relay.log.1"}
    os.rename(path, tmp_path / "relay.log.2")  # as far as it came
    write(open_log(path), 10, 11)
    assert numbers(path) == [10]
    assert numbers(tmp_path / "relay.log.1")[0] == 0
    assert {p.name for p in tmp_path.iterdir()} == {"relay.log", "relay.log.1", "relay.log.2"}


def test_a_terminal_gets_sentences(tmp_path: Path) -> None:
    """A file and a pipe get JSON."""
    code = (
        "from relay.base.logs import make_log\n"
        "log = make_log('info', None)\n"
        "log('Ready', action='ready', epoch=3, first_ids=['1-a'])\n"
        "log('bob is \\x1b[31mslow', level='warning')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: log('It failed', level='error', exc_info=True)\n"
    )
    command = [sys.executable, "-c", code]
    env = os.environ | {"TZ": "Europe/Berlin"}
    shown = pexpect.run(shlex.join(command), PATIENCE_S, env=env).decode().splitlines()
    assert [line[21:] for line in shown[:3]] == [
        "Ready (epoch 3)",
        "warning: bob is \\x1b[31mslow",
        "error: It failed",
    ]
    assert shown[-1] == "ZeroDivisionError: division by zero"
    time.strptime(shown[0][:19], "%Y-%m-%d %H:%M:%S")
    piped = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr
    assert [json.loads(line)["level"] for line in piped.splitlines()] == [
        *("info", "warning", "error")
    ]
