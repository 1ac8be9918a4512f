"""``relay send --wait answer``: sent, and answered or not, as a person types it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from agent_sdk import Agent, Received
from tests.procs import PATIENCE_S, environment, home_of, relay

pytestmark = [pytest.mark.timeout(60), pytest.mark.shows("engine 7.12")]

Answer = Callable[[Agent, Received], object]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A relay that runs, with alice, bob and carol."""
    root = home_of(tmp_path / "home", "alice", "bob", "carol")
    assert relay("up", home=root).returncode == 0
    yield root
    relay("down", home=root)


@contextmanager
def answering(home: Path, answer: Answer, agent: str = "bob") -> Iterator[None]:
    """While inside, ``agent`` takes a message and does this with it."""

    def work() -> None:
        with Agent(agent, home) as me:
            message = me.receive(PATIENCE_S)
            assert message is not None
            answer(me, message)

    with ThreadPoolExecutor() as threads:
        done = threads.submit(work)
        yield
        done.result(PATIENCE_S)


def awaited(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return relay("send", "--wait", "answer", *arguments, home=home)


def test_the_response_is_printed(home: Path) -> None:
    with answering(home, lambda me, m: me.reply(m, "main\nat 4f2c1e9")):
        done = awaited(home, "bob", "--kind", "query", "which branch?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "main\nat 4f2c1e9\n", "")


def test_patience_is_no_deadline_for_the_recipient(home: Path) -> None:
    """Who waits a moment gives up; the other one has the time that the guide promises."""
    done = relay("send", "--wait", "answer=100ms", "bob", "--kind", "query", "which?", home=home)
    assert done.returncode == 4
    owed = json.loads(relay("open", "--json", home=home).stdout)
    assert datetime.fromisoformat(owed["due_at"]) - datetime.now(UTC) > timedelta(seconds=30)
    done = relay("send", "--due", "90m", "bob", "--kind", "query", "and?", home=home)
    assert done.returncode == 0
    with Agent("bob", home) as bob:
        first, second = bob.receive(10), bob.receive(10)
    assert first and second
    assert (first.headers.get("AWAIT"), second.headers.get("AWAIT")) == (None, "5400s")


def test_progress_goes_to_stderr_and_the_end_to_stdout(home: Path) -> None:
    def answer(me: Agent, m: Received) -> None:
        me.ack(m)
        me.ack(m, "in_progress", "half\x1b way")
        me.ack(m, "completed", "shipped")

    with answering(home, answer):
        done = awaited(home, "bob", "--kind", "command", "deploy")
    assert (done.returncode, done.stdout) == (0, "completed\nshipped\n")
    assert done.stderr.splitlines() == [
        "relay: bob: received",
        "relay: bob: in_progress half\\x1b way",
    ]


def test_a_nack_is_the_error(home: Path) -> None:
    with answering(home, lambda me, m: me.nack(m, "frozen\x1b until\nMonday")):
        done = awaited(home, "bob", "--kind", "command", "deploy")
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == "relay: frozen\\x1b until Monday\n"


def test_of_several_the_first_answer_counts(home: Path) -> None:
    with answering(home, lambda me, m: me.reply(m, "I am"), "carol"):
        done = awaited(home, "*", "--kind", "query", "who is free?")
    assert (done.returncode, done.stdout) == (0, "I am\n")
    with Agent("bob", home) as bob, Agent("alice", home) as alice:
        assert bob.receive(10) and alice.receive(10)  # they have it as well


def test_time_over_says_how_far_it_came(home: Path) -> None:
    done = relay("send", "--wait", "answer=200ms", "alice", "--kind", "query", "hello?", home=home)
    assert (done.returncode, done.stdout) == (4, "")
    assert "within 0.2 s: delivered to alice, not read yet; `relay --home " in done.stderr
    assert done.stderr.count("\n") == 1

    with answering(home, lambda me, m: me.ack(m, "in_progress"), "carol"):
        done = relay("send", "--wait", "answer=2s", "carol", "--kind", "command", "go", home=home)
    assert done.returncode == 4
    assert "within 2 s: in progress by carol for " in done.stderr.splitlines()[1]


def test_who_gives_up_waiting_is_told_what_was_sent(home: Path) -> None:
    words = ("send", "--as", "bob", "--wait", "answer=1m", "alice", "--kind", "query", "hello?")
    with (
        Agent("alice", home) as alice,
        subprocess.Popen(
            [sys.executable, "-m", "relay", "--home", str(home), *words],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as waiting,
    ):
        asked = alice.receive(PATIENCE_S)
        assert asked is not None and waiting.stderr is not None
        alice.ack(asked, "in_progress")
        assert waiting.stderr.readline() == "relay: alice: in_progress\n"  # so it waits
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=PATIENCE_S)
    assert (waiting.returncode, out) == (130, "")
    shown = f"`relay --home {home} trace {asked.id}` shows it"
    assert err == f"relay: stopped waiting for the answer to {asked.id}; {shown}\n"


def test_without_a_relay_it_is_sent_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELAY_NO_WAIT")
    home = home_of(tmp_path / "home", "bob")
    done = awaited(home, "bob", "hello")
    assert done.returncode == 5
    assert "it waits in the outbox: no relay is running" in done.stderr
    (sent,) = (home / "agents" / "operator" / "outbox").glob("*.msg")
    assert done.stdout == f"{sent.stem}\n"
    monkeypatch.setenv("RELAY_NO_WAIT", "1")
    assert awaited(home, "bob", "hello").returncode == 5


def test_a_time_that_is_none(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home")
    for time in ("soon", "0", "0s", "-1s", "1w"):
        done = relay("send", f"--wait=answer={time}", "bob", "hello", home=home)
        assert done.returncode == 2 and "is not a duration" in done.stderr, time
