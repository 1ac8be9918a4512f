"""The words of ``relay send --wait``: the same to the SDK, to asyncio, to shells and to tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent, MessageError, NotRunning, Received, Refused, Timeout, aio
from tests.procs import PATIENCE_S, Relay, inbox_of

pytestmark = pytest.mark.home("alice", "bob")

Call = Callable[..., Any]


@pytest.fixture(params=["sync", "asyncio"])
def alice(request: pytest.FixtureRequest, home: Path) -> Call:
    """A call of alice's agent: ``alice("send", "bob", "hi")``."""

    async def ask(name: str, *arguments: object, **options: object) -> object:
        async with aio.Agent("alice", home) as agent:
            return await getattr(agent, name)(*arguments, **options)

    def call(name: str, *arguments: object, **options: object) -> object:
        if request.param == "asyncio":
            return asyncio.run(ask(name, *arguments, **options))
        with Agent("alice", home) as agent:
            return getattr(agent, name)(*arguments, **options)

    return call


def bob_does(home: Path, *acts: Callable[[Agent, Received], object]) -> ThreadPoolExecutor:
    """Take a message as bob and do this with it, meanwhile."""

    def work() -> None:
        with Agent("bob", home) as bob:
            for act in acts:
                message = bob.receive(PATIENCE_S)
                assert message is not None
                act(bob, message)

    threads = ThreadPoolExecutor()
    threads.submit(work)
    return threads


def test_a_message_that_nobody_reads(running: Relay, home: Path, alice: Call) -> None:
    alice("send", "bob", "hi", wait="none")
    alice("send", "bob", "hi", wait="taken")
    sent = alice("send", "bob", "hi", wait="delivered=10s")
    assert sent in [path.stem for path in inbox_of(home, "bob")]
    for word in ("read", "done"):
        with pytest.raises(Timeout, match=f"not {word} within 0.1 s: delivered to bob, not read"):
            alice("send", "bob", "hi", wait=f"{word}=100ms")
        with pytest.raises(Timeout, match=f"not {word} within 0.1 s: delivered to bob") as late:
            alice("wait", sent, f"{word}=100ms")
        assert late.value.message_id == sent
    with pytest.raises(Timeout, match=r"no answer to .* came within 0.1 s"):
        alice("wait", sent, "answer=100ms")


def test_a_command_that_is_read_and_done(running: Relay, home: Path, alice: Call) -> None:
    with bob_does(home, lambda me, it: me.ack(it, "completed", "shipped")):
        sent = alice("send", "bob", "deploy", kind="command", wait="done")
    assert alice("wait", sent) is None and alice("wait", sent, "read") is None
    assert alice("wait", sent, "answer").body == "completed\nshipped"


def test_a_command_that_fails_cannot_be_done(running: Relay, home: Path, alice: Call) -> None:
    with (
        bob_does(home, lambda me, it: me.nack(it, "frozen")),
        pytest.raises(Refused, match="failed by bob: frozen"),
    ):
        alice("send", "bob", "deploy", kind="command", wait="done")


def test_an_answer_comes_after_progress(running: Relay, home: Path, alice: Call) -> None:
    told: list[str] = []
    sent = alice("send", "bob", "deploy", kind="command")

    def answer(me: Agent, it: Received) -> None:
        me.ack(it, "in_progress")
        me.ack(it, "completed")

    with bob_does(home, answer):
        found = alice("wait", sent, "answer", progress=lambda one: told.append(one.body))
    assert (found.body, found.re, told) == ("completed", sent, ["in_progress"])


def test_words_that_are_none(home: Path, alice: Call) -> None:
    with pytest.raises(ValueError, match="'seen' is not one of none, taken, delivered, read, done"):
        alice("send", "bob", "hi", wait="seen")
    with pytest.raises(MessageError, match="`request` waits for the answer"):
        alice("send", "bob", "hi", wait="answer")
    with pytest.raises(NotRunning):
        alice("send", "bob", "hi", wait="taken")
    assert list((home / "agents" / "alice" / "outbox").glob("*.msg")) == []
