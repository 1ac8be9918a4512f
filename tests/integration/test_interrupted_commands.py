"""What commands say when they are interrupted, and of a relay that runs and does not serve."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base.home import Home, lock_holder
from relay.daemon import process
from tests.procs import PROJECT, Relay, environment, inbox_of, relay, status_of, until

INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "relay.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from relay.__main__ import main
main()
"""


INTERRUPTED_WAIT = """
import select
def interrupt(*_):
    raise KeyboardInterrupt
select.select = interrupt
from relay.cli import main
main()
"""


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_interrupted_before_the_command_is_loaded() -> None:
    done = python(INTERRUPTED_IMPORT, "status")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupted_start_says_that_it_goes_on(home: Path) -> None:
    done = python(INTERRUPTED_WAIT, "--home", str(home), "up")
    assert (done.returncode, done.stdout) == (130, "")
    said = r"relay: the relay, pid (\d+), goes on starting; `.*down` ends it\n"
    match = re.fullmatch(said, done.stderr)
    assert match is not None, done.stderr
    with Home(str(home)) as opened:
        until(lambda: lock_holder(opened) == int(match[1]))
    until(lambda: status_of(home).get("ready"))
    assert relay("init", home=home).stdout.endswith(f"its relay is running, pid {match[1]}\n")
    assert relay("down", home=home).returncode == 0


def test_a_start_that_fails_at_once_names_the_file_that_says_why(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('no such library')")
    done = subprocess.run(
        [sys.executable, "-m", "relay", "--home", home, "up"],
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    said = "the relay exited before it was ready: ImportError: no such library; see logs/relay.err"
    assert said in done.stderr
    assert "no such library" in (home / "logs" / "relay.err").read_text()


def test_a_start_without_memory_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(process, "run_daemon", full)
    read_fd, write_fd = os.pipe()
    words = ["relay.daemon", "--home", str(home), "--ready-fd", str(write_fd)]
    monkeypatch.setattr(sys, "argv", words)
    assert process.main() == 1
    os.close(write_fd)
    with os.fdopen(read_fd) as said:
        assert said.read().startswith("1\nMemoryError\nfree memory, or raise the limit")


def test_a_relay_that_does_not_serve(running: Relay, home: Path) -> None:
    """`status` and `up` say why, and exit with 5."""
    away = home.with_name("away")
    home.rename(away)
    remedy = "was moved away while the relay ran; move it back, or stop this relay"
    until(lambda: remedy in relay("status", home=away).stdout)
    assert relay("status", home=away).returncode == 5
    facts = status_of(away)
    assert (facts["healthy"], facts["ready"]) == (True, False)
    assert any("not serving, will retry: " in reason for reason in facts["reasons"])
    up = relay("up", home=away)
    assert up.returncode == 5
    assert f"its pid is {running.pid}: not serving; retrying: {home}" in up.stderr
    away.rename(home)
    until(lambda: status_of(home).get("ready"))
    until(lambda: relay("status", home=home).returncode == 0)


@pytest.mark.home("alice", "bob", detection={"scan_interval_s": 1})
def test_sent_while_the_ledger_is_gone(running: Relay, home: Path) -> None:
    for path in home.glob("ledger.db*"):
        path.unlink()
    done = relay("send", "--as", "alice", "bob", "hi", home=home)
    assert done.returncode == 0, done.stderr
    until(lambda: len(inbox_of(home, "bob")) == 1)
    until(lambda: relay("trace", done.stdout.strip(), home=home).returncode == 0)


def test_status_names_the_start_of_the_process_and_of_its_session(
    running: Relay, home: Path
) -> None:
    def facts() -> dict[str, str]:
        return json.loads(relay("status", "--json", home=home).stdout)

    before = facts()
    (home / "config.json").write_text('{"store": {"checkpoint_ms": 60}}')
    os.kill(running.pid, signal.SIGHUP)
    until(lambda: facts()["session_at"] > before["session_at"])
    assert facts()["started_at"] == before["started_at"] <= before["session_at"]


def test_an_interrupted_attachment_leaves_no_copy(home: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    with open(big, "wb") as file:
        file.truncate(1 << 29)
    words = ["--home", str(home), "send", "--as", "alice", "bob", "see", "--attach", str(big)]
    soon = "import relay.cli.request; relay.cli.request.ATTACH_S = 0.1; relay.cli.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", soon, *words], env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "relay: copying 1 attachment into the home\n"
    until(lambda: list((home / "attachments").rglob("*.tmp")))
    process.terminate()
    assert process.wait() == 143
    process.stderr.close()
    assert not list((home / "attachments").rglob("*.tmp"))
