"""Calls of the tools of `relay mcp`, and what they leave in a home."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp_types import CallToolRequestParams, CallToolResult

from relay.cli.hooks import id_of, progress_of, run_command
from relay.reach.mcp import Context, ToolServer
from tests.procs import environment
from tests.reach.hooks import put, reports_of

RELAY = (sys.executable, "-m", "relay")


class InMemory(ToolServer):
    """A server whose answers are with the client as soon as they are made."""

    async def _call(self, ctx: Context, params: CallToolRequestParams) -> CallToolResult:
        result = await super()._call(ctx, params)
        if not result.is_error:
            self.session.written(ctx.request_id)
        return result


def server_of(root: Path, name: str = "") -> ToolServer:
    """A server in this process."""
    return InMemory(str(root), name, run_command, progress_of, id_of)


def over_stdio(root: Path, name: str = "bob") -> StdioServerParameters:
    """`relay mcp` in a process of its own, as a client starts it."""
    env = environment(AGENT_RELAY_NAME=name)
    return StdioServerParameters(
        command=RELAY[0], args=[*RELAY[1:], "--home", str(root), "mcp"], env=env
    )


async def call(client: Client, tool: str, /, **arguments: Any) -> str:
    """The text of an answer that is not an error."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.content[0].text


async def refusal(client: Client, tool: str, /, **arguments: Any) -> str:
    """The text of an error."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    assert "\n" not in result.content[0].text
    return result.content[0].text


def deliver(root: Path, body: str = "hello", agent: str = "bob", **headers: str) -> str:
    """A message is delivered; its id."""
    name = f"{time.time_ns()}-0000002a"
    fields = {"FROM": "alice", "TO": agent, "KIND": "message", "ID": name, **headers}
    head = "".join(f"{key}: {value}\n" for key, value in fields.items())
    return put(root, agent, f"{head}\n{body}", name)


def unread(root: Path, agent: str = "bob") -> list[str]:
    """The ids in an inbox."""
    return sorted(one.stem for one in (root / "agents" / agent / "inbox").glob("*.msg"))


def read(root: Path, agent: str = "bob") -> list[str]:
    """The ids in its .read."""
    return sorted(one.stem for one in (root / "agents" / agent / "inbox" / ".read").glob("*.msg"))


def reported(root: Path, agent: str = "bob") -> list[tuple[str, list[str]]]:
    """What reports say, oldest first."""
    return [(one["what"], one["ids"]) for one in reports_of(root, agent)]
