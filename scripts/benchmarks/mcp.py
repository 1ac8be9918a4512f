"""``mcp``: the official client over stdio, one call of `inbox` after the other.

``inbox``: a message waits, is taken, and the call before counts as its evidence. ``wake``: rename
into the inbox -> the answer of a call that waits. Floor: a call with arguments that are not valid,
which does nothing but travel.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp import Client, StdioServerParameters

from relay.base.home import Home
from scripts.benchmarks.common import fresh_root, make_home, message, note, percentile, report

WARM_UP = 5


def run(base: str | None, *, calls: int) -> None:
    """Run the case and print its line."""
    root = fresh_root(base)
    note(f"mcp: {calls} calls in {root}")
    home, (agent,) = make_home(root, 1)
    bare, taken, woken = asyncio.run(_measure(home, agent, calls))
    home.close()
    report(
        case="mcp",
        calls=calls,
        inbox_p50_ms=_ms(taken, 0.5),
        inbox_p99_ms=_ms(taken, 0.99),
        wake_p50_ms=_ms(woken, 0.5),
        wake_p99_ms=_ms(woken, 0.99),
        bare_p50_ms=_ms(bare, 0.5),
        ratio_to_bare_p50=round(percentile(taken, 0.5) / percentile(bare, 0.5), 2),
    )


async def _measure(
    home: Home, agent: str, calls: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of calls that do nothing, that take a message, and from a rename to its answer."""
    bare, taken, woken = [], [], []
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "relay", "--home", home.root, "mcp"],
        env={**os.environ, "AGENT_RELAY_NAME": agent},
    )
    async with Client(server) as client:
        for _ in range(WARM_UP + calls):
            bare.append(await _timed(client, {"limit": 0}))
            _deliver(home, agent)
            taken.append(await _timed(client, {}))
            waits = asyncio.ensure_future(client.call_tool("inbox", {"wait_s": 30}))
            await asyncio.sleep(0.02)
            began = time.perf_counter()
            _deliver(home, agent)
            await waits
            woken.append(time.perf_counter() - began)
    return bare[WARM_UP:], taken[WARM_UP:], woken[WARM_UP:]


async def _timed(client: Client, arguments: dict[str, object]) -> float:
    began = time.perf_counter()
    await client.call_tool("inbox", arguments)
    return time.perf_counter() - began


def _deliver(home: Home, agent: str) -> None:
    name = f"{time.time_ns()}-00000000.msg"
    inbox = Path(home.path("agents", agent, "inbox"))
    (inbox / ".pending" / name).write_bytes(message(agent))
    os.rename(inbox / ".pending" / name, inbox / name)


def _ms(values: list[float], share: float) -> float:
    return round(1000 * percentile(values, share), 2)
