"""``import agent_sdk`` stays light: counted in modules, for a time depends on the machine."""

from __future__ import annotations

import re
import subprocess
import sys
from inspect import getdoc, isasyncgenfunction, iscoroutinefunction, signature
from pathlib import Path

ROOT = Path(__file__).parents[2]

HEAVY = {
    "asyncio", "click", "ctypes", "dataclasses", "inspect", "json", "logging", "msgspec", "pathlib",
    "psutil", "rich", "socket", "sqlite3", "subprocess", "tempfile", "threading", "watchdog",
}  # fmt: skip
RELAY = {
    "relay", "relay.base", "relay.base.names", "relay.base.clock", "relay.base.errors",
    "relay.base.discovery", "relay.base.fsio", "relay.base.home", "relay.base.message",
    "relay.base.process_info", "relay.base.text",
}  # fmt: skip
MOST_MODULES = 70  # 52 in Python 3.11

PROGRAM = """
import sys
before = set(sys.modules)
import agent_sdk
print(*sorted(set(sys.modules) - before))
"""


def test_import_is_light() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(ended.stdout.split())
    assert not loaded & HEAVY
    assert {name for name in loaded if name.partition(".")[0] == "relay"} == RELAY
    assert len(loaded) <= MOST_MODULES, sorted(loaded)


def test_every_public_call_is_in_the_guide() -> None:
    from agent_sdk import Agent

    guide = (ROOT / "docs" / "sdk.md").read_text()
    script = (ROOT / "agent_sdk" / "relay.sh").read_text()
    calls = {name for name in vars(Agent) if name[0] != "_"} - {"close", "home"}
    calls |= set(re.findall(r"^(relay_[a-z]+)\(\)", script, re.MULTILINE))
    assert {name for name in calls if f"`{name}" not in guide} == set()


def test_the_agent_for_asyncio_says_the_same_of_every_call() -> None:
    from agent_sdk import Agent, aio

    for name, call in vars(Agent).items():
        if name[0] != "_" and name != "home":
            twin = vars(aio.Agent)[name]
            said = str(signature(call)).replace("'Iterator", "'AsyncIterator")
            assert str(signature(twin)) == said, name
            assert name == "close" or getdoc(twin) == getdoc(call), name
            assert iscoroutinefunction(twin) or isasyncgenfunction(twin), name
