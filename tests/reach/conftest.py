"""Fixtures of the tests of sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relay.base.home import LEDGER, Home
from relay.base.process_info import started_at
from relay.cli import hooks as cli_hooks
from relay.ledger.ledger import Ledger
from relay.reach import mcp, tool_session
from tests.procs import PATIENCE_S, Relay, home_of
from tests.reach import bells, projects
from tests.reach.hooks import Cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A home without a relay; alice and bob have mailboxes."""
    with Home.create(str(tmp_path / "home"), b"{}") as home:
        for name in ("alice", "bob"):
            home.make_agent(name)
    return tmp_path / "home"


@pytest.fixture
def start_cli(root: Path) -> Iterator[Callable[..., Cli]]:
    """Start agent CLIs in that home; they are killed at the end."""
    running: list[Cli] = []

    def start(
        session_id: str = "s-1", vendor: str = "claude", root: Path = root, **env: str
    ) -> Cli:
        running.append(Cli(root, session_id, vendor, **env))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.die()


@pytest.fixture
def claude(start_cli: Callable[..., Cli]) -> Cli:
    """A session of Claude Code as the agent bob, with a transcript, that has begun."""
    cli = start_cli(AGENT_RELAY_NAME="bob")
    cli.transcript.touch()
    cli.start()
    return cli


@pytest.fixture
def blind(start_cli: Callable[..., Cli]) -> Cli:
    """The same without a transcript."""
    cli = start_cli(AGENT_RELAY_NAME="bob")
    cli.start()
    return cli


@pytest.fixture
def bobs_home(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home; calls of this process are bob's."""
    monkeypatch.setenv("AGENT_RELAY_NAME", "bob")
    Ledger.open(str(root / LEDGER)).close()
    return root


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with a relay; calls of this process are bob's."""
    monkeypatch.setenv("AGENT_RELAY_NAME", "bob")
    for patience in ("WAIT_S", "RECORDED_S"):  # for the relay's word, in this process
        monkeypatch.setattr(mcp, patience, PATIENCE_S)
    home = home_of(tmp_path / "home", "alice", "bob")
    with Relay(home):
        yield home


@pytest.fixture
def bob(tmp_path: Path) -> Iterator[bells.Cli]:
    """Bob is a session of claude that waits at its prompt."""
    with bells.cli(tmp_path / "home") as made:
        yield made


@pytest.fixture
def inbox(bob: bells.Cli, tmp_path: Path) -> bells.Inbox:
    """Claude's socket, which takes every text."""
    return bob.inbox(tmp_path / "inbox.sock")


@pytest.fixture
def tools_of_claude(claude: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of tools in this process is a child of that session."""
    process = (claude.process.pid, started_at(claude.process.pid))
    monkeypatch.setattr(tool_session, "agent_process", lambda: process)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and a home directory of a user beside it."""
    folder = tmp_path / "project"
    for one in (folder, tmp_path / "user"):
        one.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setattr(cli_hooks, "relay_command", lambda: [projects.RELAY])
    return folder
