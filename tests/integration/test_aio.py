"""``agent_sdk.aio`` with a relay that runs: nothing blocks, nothing taken is lost."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from agent_sdk import Refused, RelayError, Timeout, aio
from tests.box import open_descriptors
from tests.procs import PATIENCE_S, Relay


async def test_an_answer_goes_to_the_task_that_waits_for_it(running: Relay, home: Path) -> None:
    """While another task of the same agent receives all else."""
    got: list[str] = []
    async with aio.Agent("alice", home) as alice, aio.Agent("bob", home) as bob:

        async def listen() -> None:
            async for message in alice.messages():
                got.append(message.body)

        listener = asyncio.create_task(listen())
        asked = asyncio.create_task(alice.query("bob", "which?", PATIENCE_S))
        question = await bob.receive(PATIENCE_S)
        assert question is not None
        await bob.send("alice", "by the way")
        await bob.reply(question, "main")
        response = await asked
        while not got:
            await asyncio.sleep(0.01)
        listener.cancel()
    assert (response.body, got) == ("main", ["by the way"])


async def test_a_cancelled_receive_has_taken_nothing(running: Relay, home: Path) -> None:
    """However often it is cancelled, each message comes once."""
    got = []
    async with aio.Agent("alice", home) as alice, aio.Agent("bob", home) as bob:
        for number in range(20):
            waiting = asyncio.create_task(bob.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                if message := await waiting:  # it was there before the cancellation
                    got.append(message.body)
            await alice.send("bob", str(number), wait=0)
        while len(got) < 20:
            message = await asyncio.wait_for(bob.receive(PATIENCE_S), PATIENCE_S)
            assert message is not None
            got.append(message.body)
        assert await bob.receive(0) is None
    assert sorted(got, key=int) == [str(number) for number in range(20)]


async def test_a_cancelled_query_leaves_its_answer_to_those_who_receive(
    running: Relay, home: Path
) -> None:
    """It was kept from them as long as the query waited."""
    async with aio.Agent("alice", home) as alice, aio.Agent("bob", home) as bob:
        asked = asyncio.create_task(alice.query("bob", "which?", PATIENCE_S))
        question = await bob.receive(PATIENCE_S)
        assert question is not None
        asked.cancel()
        received = asyncio.create_task(alice.receive(PATIENCE_S))
        await bob.reply(question, "main")
        answer = await received
        assert answer is not None
        assert (answer.body, answer.re) == ("main", question.id)


async def test_refused_and_no_answer(running: Relay, home: Path) -> None:
    """The errors of the agent without asyncio; a nack of the recipient, too."""
    async with aio.Agent("alice", home) as alice, aio.Agent("bob", home) as bob:
        with pytest.raises(Timeout, match=r"no response to .* came within 0.05 s"):
            await alice.query("bob", "which?", 0.05)
        asked = asyncio.create_task(alice.query("bob", "again?", PATIENCE_S))
        assert await bob.receive(PATIENCE_S) is not None
        question = await bob.receive(PATIENCE_S)
        assert question is not None
        await bob.nack(question, "no such repository")
        with pytest.raises(Refused, match="no such repository"):
            await asked


async def test_a_refusal_is_the_senders_though_another_task_receives(
    running: Relay, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nack of ``send`` and of every call that waits for the relay."""
    monkeypatch.delenv("RELAY_NO_WAIT")
    got: list[str] = []
    async with aio.Agent("alice", home) as alice:

        async def listen() -> None:
            async for message in alice.messages():
                got.append(message.body)

        listener = asyncio.create_task(listen())
        for _ in range(5):
            with pytest.raises(Refused, match="there is no agent bbo"):
                await alice.send("bbo", "hi")
        with pytest.raises(Refused, match="not for alice"):
            await alice.release("nobody", timeout_s=PATIENCE_S)
        with pytest.raises(TypeError, match="did you mean ttl_s"):
            await alice.send("bob", "hi", ttl=1)  # type: ignore[call-arg]
        listener.cancel()
    assert got == []


async def test_requests_to_the_relay(running: Relay, home: Path) -> None:
    """Channels, saved state, attachments; an ack before the last one is progress."""
    async with aio.Agent("alice", home) as alice, aio.Agent("bob", home) as bob:
        await asyncio.gather(
            alice.join("team", timeout_s=PATIENCE_S), bob.join("team", timeout_s=PATIENCE_S)
        )
        assert await alice.save_state("one") == 1
        assert await alice.load_state() == "one"
        assert [one.version for one in await alice.saved_states()] == [1]
        assert await bob.open_attachment(await alice.attach(b"data")) == b"data"
        steps: list[str] = []
        sent: list[str] = []
        asked = asyncio.create_task(
            alice.request(
                "bob",
                "deploy",
                PATIENCE_S,
                on_sent=sent.append,
                progress=lambda ack: steps.append(ack.body),
            )
        )
        command = await bob.receive(PATIENCE_S)
        assert command is not None
        await bob.ack(command, "in_progress", wait=PATIENCE_S)
        await bob.ack(command, "completed", "took 12 s")
        assert (await asked).body == "completed\ntook 12 s"
        assert [command.id] == sent
        assert steps == ["in_progress"]


async def test_closing_ends_what_waits(running: Relay, home: Path) -> None:
    """It says so, then and later."""
    before = open_descriptors()
    alice = aio.Agent("alice", home)
    waiting = asyncio.create_task(alice.receive())
    await asyncio.sleep(0.05)
    await alice.close()
    await alice.close()
    for call in (waiting, alice.send("bob", "hi"), alice.receive(0), alice.attach(b"data")):
        with pytest.raises(RelayError, match=r"^this Agent is closed$"):
            await call
    assert open_descriptors() == before


async def test_two_tasks_may_wait_for_one_answer(running: Relay, home: Path) -> None:
    """One gets it, in whatever order their waits end; what is left of the other waits on."""
    async with aio.Agent("alice", home) as alice, aio.Agent("bob", home) as bob:
        sent = await alice.send("bob", "which?", kind="query")
        short = asyncio.create_task(alice.wait(sent, "answer=200ms"))
        listener = asyncio.create_task(alice.receive())
        long = asyncio.create_task(alice.wait(sent, f"answer={PATIENCE_S}s"))
        with pytest.raises(Timeout):
            await short
        question = await bob.receive(PATIENCE_S)
        assert question is not None
        await bob.reply(question, "main")
        answer = await long
        assert answer is not None and answer.body == "main"
        assert not listener.done()
        listener.cancel()


async def test_a_call_while_it_closes_gets_the_error(running: Relay, home: Path) -> None:
    """What was begun is finished; a second close waits for it, too."""
    alice = aio.Agent("alice", home)
    async with aio.Agent("bob", home) as bob:
        begun = asyncio.create_task(alice.send("bob", "before"))
        await asyncio.sleep(0)
        closing = [asyncio.create_task(alice.close()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RelayError, match="this Agent is closed"):
            await alice.send("bob", "after")
        await asyncio.gather(*closing)
        assert begun.done() and await begun
        message = await bob.receive(PATIENCE_S)
        assert message is not None and message.body == "before"
