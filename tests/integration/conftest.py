"""A home with a relay in a process of its own, for tests of what somebody sees of one."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.base.config import Config, DetectionSettings
from tests.box import Box, MakeBox
from tests.procs import Relay, home_of


@pytest.fixture(params=["inotify", "scan"])
def any_box(request: pytest.FixtureRequest, make_box: MakeBox) -> Box:
    """A relay with alice and bob, once with inotify and once with scans: the same rules hold."""
    config = Config(detection=DetectionSettings(watcher=request.param))
    return make_box("alice", "bob", config=config)


@pytest.fixture
def private_files() -> Iterator[None]:
    """What the test makes is nobody else's to read: modes have tests of their own."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A home with alice and bob, or what the mark ``home`` says. Its path is short: it has a
    socket."""
    root = Path(tempfile.mkdtemp(prefix="relay-"))
    mark = request.node.get_closest_marker("home") or pytest.mark.home("alice", "bob").mark
    yield home_of(root / "home", *mark.args, **mark.kwargs)
    shutil.rmtree(root)


@pytest.fixture
def running(home: Path) -> Iterator[Relay]:
    """A relay that runs for ``home``, and is stopped at the end."""
    with Relay(home) as made:
        yield made


@pytest.fixture
def stopped(running: Relay) -> Iterator[int]:
    """The pid of a relay that SIGSTOP holds; it goes on afterwards."""
    pid = running.pid
    os.kill(pid, signal.SIGSTOP)
    yield pid
    os.kill(pid, signal.SIGCONT)


@pytest.fixture
def long_home(tmp_path: Path) -> Path:
    """Its path is longer than the address of a socket may be."""
    return home_of(tmp_path / ("long" * 30), "bob")


@pytest.fixture
def alice(home: Path) -> Iterator[Agent]:
    """alice, as the SDK has her."""
    with Agent("alice", home) as agent:
        yield agent


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the tiers that never ends is not waited for."""
    monkeypatch.setattr("relay.daemon.session.PATIENCE_S", 0)
