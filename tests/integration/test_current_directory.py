"""Modules of the current directory, such as queue.py, are not taken for the relay's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relay.reach import bell
from tests.procs import environment, project_of, relay, status_of, until
from tests.reach.bells import cli

RELAY = Path(sys.executable).with_name("relay")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are run in a project of somebody's."""
    monkeypatch.chdir(project_of(tmp_path / "project"))


def test_a_relay_starts(home: Path) -> None:
    assert relay("up", home=home).stderr == ""
    assert os.readlink(f"/proc/{status_of(home)['pid']}/cwd") == "/"  # it may be removed
    assert relay("down", home=home).returncode == 0


def test_the_page_is_served(home: Path) -> None:
    words = [RELAY, "--home", home, "web"]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        assert page.stdout.readline().startswith("http://127.0.0.1:")
        page.send_signal(signal.SIGINT)


def test_a_bell_is_started(tmp_path: Path) -> None:
    with cli(tmp_path / "home") as bob:
        assert bell.start(str(bob.root), bob.session)
        memory = until(lambda: (one := bob.memory) and one.rungs and one)
        os.kill(memory.pid, signal.SIGTERM)
