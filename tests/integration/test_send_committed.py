"""``relay send --wait taken``: its exit codes, and what is left in the outbox."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.errors import EXIT_OK, EXIT_STATE, EXIT_TIMEOUT
from relay.cli import run
from tests.procs import Relay, until


def send(home: Path, *options: str) -> int:
    return run(["--home", str(home), "send", "bob", "hi", "--as", "alice", *options])


def waiting(home: Path) -> list[str]:
    return [path.stem for path in (home / "agents" / "alice" / "outbox").glob("*.msg")]


def test_not_taken_in_time_it_waits_in_the_outbox(
    running: Relay, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.kill(running.pid, signal.SIGSTOP)
    try:
        assert send(home, "--wait", "taken=200ms") == EXIT_TIMEOUT
        said = capsys.readouterr()
        assert "it waits in the outbox: do not send it again" in said.err
        (sent,) = waiting(home)
    finally:
        os.kill(running.pid, signal.SIGCONT)
    inbox = home / "agents" / "bob" / "inbox"
    until((inbox / f"{sent}.msg").exists)


def test_without_a_relay_nothing_is_sent(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert send(home, "--wait", "taken") == EXIT_STATE
    assert "no relay is running" in capsys.readouterr().err
    assert waiting(home) == []


def test_m24_a_full_disk_is_said_before_it_is_waited_for(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [errno.ENOSPC]

    def fault(operation: str, _: str) -> None:
        if operation == "create" and left:
            raise OSError(left.pop(), "No space left on device")

    def sleep(_: float) -> None:
        assert capsys.readouterr().err == "relay: disk full, trying for 30 s\n"

    monkeypatch.setattr(fsio, "fault", fault)
    monkeypatch.setattr("agent_sdk.disk._sleep", sleep)
    assert send(home, "--wait", "none") == EXIT_OK
    assert capsys.readouterr().err == ""
    assert len(waiting(home)) == 1


def test_an_answer_that_waits_in_the_outbox_is_said_so(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELAY_NO_WAIT")
    said = ["--home", str(home), "ack", "1706123456-ab", "--as", "alice"]
    assert run(said) == EXIT_STATE
    line = f"relay: no relay is running for {home}: the message waits in the outbox\n"
    assert capsys.readouterr().err == line
