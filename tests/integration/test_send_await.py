"""Sent, and answered or not: ``relay send --wait answer`` as a person types it; the same words to
the SDK and to asyncio."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from agent_sdk import Agent, MessageError, NotRunning, Received, Refused, Timeout, aio
from tests.procs import PATIENCE_S, Relay, environment, inbox_of, relay, rows_of, until

pytestmark = [
    pytest.mark.shows("engine 7.12"),
    pytest.mark.home("alice", "bob", "carol"),
]

Answer = Callable[[Agent, Received], object]


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


def test_patience_is_no_deadline_for_the_recipient(running: Relay, home: Path) -> None:
    """Who waits a moment gives up; the other one has the time that the guide promises."""
    done = relay("send", "--wait", "answer=100ms", "bob", "--kind", "query", "which?", home=home)
    assert done.returncode == 4
    (owed,) = until(lambda: rows_of("open", home=home))
    assert datetime.fromisoformat(owed["due_at"]) - datetime.now(UTC) > timedelta(seconds=30)
    done = relay("send", "--due", "90m", "bob", "--kind", "query", "and?", home=home)
    assert done.returncode == 0
    with Agent("bob", home) as bob:
        first, second = bob.receive(PATIENCE_S), bob.receive(PATIENCE_S)
    assert first and second
    assert (first.headers.get("AWAIT"), second.headers.get("AWAIT")) == (None, "5400s")


def test_a_response_or_the_end_goes_to_stdout_progress_and_a_nack_to_stderr(
    running: Relay, home: Path
) -> None:
    with answering(home, lambda me, m: me.reply(m, "main\nat 4f2c1e9")):
        done = awaited(home, "bob", "--kind", "query", "which branch?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "main\nat 4f2c1e9\n", "")

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

    with answering(home, lambda me, m: me.nack(m, "frozen\x1b until\nMonday")):
        done = awaited(home, "bob", "--kind", "command", "deploy")
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == "relay: frozen\\x1b until Monday\n"


def test_of_several_the_first_answer_counts(running: Relay, home: Path) -> None:
    with answering(home, lambda me, m: me.reply(m, "I am"), "carol"):
        done = awaited(home, "*", "--kind", "query", "who is free?")
    assert (done.returncode, done.stdout) == (0, "I am\n")
    with Agent("bob", home) as bob, Agent("alice", home) as alice:
        assert bob.receive(PATIENCE_S) and alice.receive(PATIENCE_S)  # they have it as well


def test_time_over_says_how_far_it_came(running: Relay, home: Path) -> None:
    with answering(home, lambda me, m: me.ack(m, "in_progress"), "carol"):
        done = relay("send", "--wait", "answer=5s", "carol", "--kind", "command", "go", home=home)
    assert done.returncode == 4
    assert "within 5 s: in progress by carol for " in done.stderr.splitlines()[1]


def test_who_gives_up_waiting_is_told_what_was_sent(running: Relay, home: Path) -> None:
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


# -- the library -------------------------------------------------------------------------------


def test_a_message_that_nobody_reads(running: Relay, home: Path, alice: Agent) -> None:
    alice.send("bob", "hi", wait="none")
    alice.send("bob", "hi", wait="taken")
    sent = alice.send("bob", "hi", wait="delivered")
    assert sent in [path.stem for path in inbox_of(home, "bob")]
    with pytest.raises(Timeout, match="not read within 3 s: delivered to bob, not read"):
        alice.send("bob", "hi", wait="read=3s")
    for word in ("read", "done"):
        with pytest.raises(Timeout, match=f"not {word} within 0.1 s: delivered to bob") as late:
            alice.wait(sent, f"{word}=100ms")
        assert late.value.message_id == sent
    with pytest.raises(Timeout, match=r"no answer to .* came within 0.1 s"):
        alice.wait(sent, "answer=100ms")


def test_a_command_that_is_done_and_one_that_fails(
    running: Relay, home: Path, alice: Agent
) -> None:
    with answering(home, lambda me, m: me.ack(m, "completed", "shipped")):
        sent = alice.send("bob", "deploy", kind="command", wait="done")
    assert alice.wait(sent) is None and alice.wait(sent, "read") is None
    found = alice.wait(sent, "answer")
    assert found is not None and found.body == "completed\nshipped"
    with (
        answering(home, lambda me, m: me.nack(m, "frozen")),
        pytest.raises(Refused, match="failed by bob: frozen"),
    ):
        alice.send("bob", "deploy", kind="command", wait="done")


@pytest.mark.parametrize("is_asyncio", [False, True])
def test_an_answer_comes_after_progress(
    running: Relay, home: Path, alice: Agent, is_asyncio: bool
) -> None:
    told: list[str] = []
    sent = alice.send("bob", "deploy", kind="command")

    def answer(me: Agent, m: Received) -> None:
        me.ack(m, "in_progress")
        me.ack(m, "completed")

    def progress(one: Received) -> None:
        told.append(one.body)

    async def wait() -> Received | None:
        async with aio.Agent("alice", home) as agent:
            return await agent.wait(sent, "answer", progress=progress)

    with answering(home, answer):
        found = asyncio.run(wait()) if is_asyncio else alice.wait(sent, "answer", progress=progress)
    assert found is not None
    assert (found.body, found.re, told) == ("completed", sent, ["in_progress"])


def test_words_that_are_none(home: Path, alice: Agent) -> None:
    with pytest.raises(MessageError, match=r"^wait: 'seen' is not one of none, taken, delivered"):
        alice.send("bob", "hi", wait="seen")
    with pytest.raises(MessageError, match=r"^until: 'soon' is not a duration such as 500ms"):
        alice.wait("1795217558235885251-b4c3fe55973658c5", "read=soon")
    with pytest.raises(MessageError, match="`request` waits for the answer"):
        alice.send("bob", "hi", wait="answer")
    with pytest.raises(NotRunning):
        alice.send("bob", "hi", wait="taken")
    assert list((home / "agents" / "alice" / "outbox").glob("*.msg")) == []
