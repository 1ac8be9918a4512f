"""``relay mcp`` over stdio, with the official client of today and the previous one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from mcp import Client
from mcp_types import CallToolRequestParams

from relay.cli.hooks import id_of, progress_of, run_command
from relay.reach import mcp
from relay.reach.session import TOOLS, load_sessions
from relay.reach.tools import TOOLS as TABLE
from tests.procs import PROJECT, environment, relay, until
from tests.reach.calls import RELAY, call, deliver, over_stdio, read, reported, unread

MODES = ("legacy", "auto", "2026-07-28")
OLD_CLIENT = PROJECT / ".venv" / "mcp-1"


@pytest.mark.parametrize("mode", MODES)
async def test_a_conversation_over_stdio(served: Path, mode: str) -> None:
    async with Client(over_stdio(served), mode=mode) as client:
        sent = await call(client, "send", to="alice", body="are you there?", kind="query")
        assert sent.endswith("delivered to alice, not read yet")
        number = sent.partition(":")[0]
        relay("reply", "--as", "alice", number, "I am", home=served)
        text = await call(client, "inbox", wait_s=100)
        assert text.startswith("Message ")
        assert " from alice (response, " in text
        assert text.endswith("| I am")
        assert len(unread(served)) == 1
        assert "alice" in await call(client, "trace", id=number)
        while unread(served):  # the server may not have noted yet that its answer was written
            await call(client, "agents")
        (answer,) = read(served)
        steps = ""  # the evidence is the first call after it
        while "seen in the context of bob: action, mcp " not in steps:
            steps = await call(client, "trace", id=answer)
        assert "shown to bob: session mcp:" in steps
        assert "alice: active, unread 0, owes 0" in await call(client, "agents")


def test_a_line_that_is_no_request_gets_its_error(bobs_home: Path) -> None:
    """The client would wait for it until its own time is over."""
    lines: list[tuple[str, int | None, int]] = [
        ("not JSON", None, -32700),
        ('{"jsonrpc": "2.0", "id": 7, "method": ', None, -32700),
        ('{"jsonrpc": "2.0", "id": 7, "method": "\\ud800"}', 7, -32600),
        ('{"jsonrpc": "2.0", "id": 8, "method": "caf\udce9"}', 8, -32600),  # the byte E9
        ('{"jsonrpc": "2.0", "id": "%s", "method": 5}' % ("x" * 1_000_000), None, -32600),
        ("[" * 100_000, None, -32700),
        ('{"jsonrpc": "2.0", "id": null, "method": "tools/list"}', None, -32600),
        ('{"jsonrpc": "2.0", "id": 1.5, "method": "tools/list"}', None, -32600),
        ('{"jsonrpc": "2.0", "id": [9], "method": "tools/list"}', None, -32600),
    ]
    words = (*RELAY, "--home", str(bobs_home), "mcp")
    env = environment(AGENT_RELAY_NAME="bob")
    given = "".join(f"{line}\n" for line, _, _ in lines).encode(errors="surrogateescape")
    done = subprocess.run(words, input=given, env=env, capture_output=True, timeout=60)
    answers = done.stdout.splitlines()
    found = [(one["id"], one["error"]["code"]) for one in map(json.loads, answers)]
    assert found == [(number, code) for _, number, code in lines]
    assert all(len(one) < 200 for one in answers)


# -- waits --------------------------------------------------------------------------------------


async def test_a_wait_is_told_of_and_may_be_cancelled_and_the_end_is_evidence(
    bobs_home: Path,
) -> None:
    told: list[str | None] = []

    async def progress(done: float, total: float | None, text: str | None) -> None:
        told.append(text)

    async with Client(over_stdio(bobs_home)) as client:
        waits = asyncio.ensure_future(
            client.call_tool("inbox", {"wait_s": 100}, progress_callback=progress)
        )
        while not told:
            await asyncio.sleep(0.01)
        assert "bob: new" in await call(client, "agents")  # no relay has run
        assert not waits.done()
        first = deliver(bobs_home)
        assert (await waits).content[0].text.startswith(f"Message {first} ")
        assert set(told) == {"no message yet"}

        waits = asyncio.ensure_future(client.call_tool("inbox", {"wait_s": 30}))
        await call(client, "agents")
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await call(client, "agents")
        second = deliver(bobs_home)  # which the cancelled one has not taken
        assert (await call(client, "inbox")).startswith(f"Message {second} ")
        assert (unread(bobs_home), read(bobs_home)) == ([second], [first])
    assert (unread(bobs_home), read(bobs_home)) == ([], [first, second])
    assert [what for what, _ in reported(bobs_home)] == ["offered", "in_context"] * 2
    assert load_sessions(str(bobs_home), TOOLS) == []


async def test_calls_with_the_ids_7_and_text_7_are_two(bobs_home: Path) -> None:
    """The answer of one is written; what the other shows was shown to nobody yet."""
    server = mcp.ToolServer(str(bobs_home), "", run_command, progress_of, id_of)
    out, pipe = os.pipe()
    wire = mcp._Wire(pipe, server.session.written)
    numbers = []
    for call_id in (7, "7"):
        numbers.append(deliver(bobs_home))
        context: Any = SimpleNamespace(request_id=call_id)
        await server._call(context, CallToolRequestParams(name="inbox", arguments={}))
    await wire.write('{"id": "7", "result": {}}')
    await wire.flush()
    (session,) = load_sessions(str(bobs_home), TOOLS)
    printed = [session.offered[number]["printed"] for number in numbers]
    assert printed == [False, True]
    os.close(out)
    os.close(pipe)


# -- ends --


async def test_killed_after_it_has_shown_a_message_it_shows_it_again(bobs_home: Path) -> None:
    number = deliver(bobs_home)
    try:
        async with Client(over_stdio(bobs_home)) as client:
            await call(client, "inbox")
            kill(bobs_home)
    except* Exception:
        pass
    assert unread(bobs_home) == [number]
    async with Client(over_stdio(bobs_home)) as client:
        text = await call(client, "inbox")
        assert text.startswith(f"Message {number} from alice")
        assert "shown before, perhaps not seen: offer 2" in text
    assert [what for what, _ in reported(bobs_home)] == [
        "offered",
        "returned",
        "offered",
        "in_context",
    ]
    assert read(bobs_home) == [number]


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.reach.test_mcp_stdio import Client, call, over_stdio

async def main():
    async with Client(over_stdio(Path(sys.argv[1]))) as client:
        await call(client, "inbox")
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_what_a_client_saw_that_was_killed_is_shown_to_the_next_one(bobs_home: Path) -> None:
    """Its server reads the end of the connection, as of one that was closed."""
    number = deliver(bobs_home)
    done = subprocess.run([sys.executable, "-c", KILLED, str(bobs_home)], cwd=PROJECT)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not any(one.is_live for one in load_sessions(str(bobs_home), TOOLS)))
    assert unread(bobs_home) == [number]
    async with Client(over_stdio(bobs_home)) as client:
        assert "shown before, perhaps not seen: offer 2" in await call(client, "inbox")


def kill(root: Path) -> None:
    """End the server as the kernel does."""
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # another child has ended meanwhile
            if "mcp" in one.cmdline():
                one.send_signal(signal.SIGKILL)


# -- the previous client ------------------------------------------------------------------------

OLD = """
import asyncio, json, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main(root, env):
    server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:], env=env)
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        names = [one.name for one in (await session.list_tools()).tools]
        sent = await session.call_tool("send", {"to": "alice", "body": "from 1.x"})
        taken = await session.call_tool("inbox", {})
        bad = await session.call_tool("inbox", {"wait_s": "soon"})
        print(json.dumps([names, sent.content[0].text, taken.content[0].text, bad.isError]))

asyncio.run(main(None, json.loads(sys.stdin.readline())))
"""


@pytest.mark.skipif(
    not OLD_CLIENT.exists() and not os.environ.get("CI"), reason="scripts/venv installs it"
)
def test_a_client_of_version_1(bobs_home: Path) -> None:
    number = deliver(bobs_home)
    # -S: only what is in that folder, none of this environment's packages
    done = subprocess.run(
        [sys.executable, "-S", "-c", OLD, *RELAY, "--home", str(bobs_home), "mcp"],
        env={**os.environ, "PYTHONPATH": str(OLD_CLIENT)},
        input=json.dumps(environment(AGENT_RELAY_NAME="bob")) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names, sent, taken, is_error = json.loads(done.stdout)
    assert names == [*TABLE]
    assert "waits in the outbox" in sent
    assert taken.startswith(f"Message {number} from alice")
    assert is_error
