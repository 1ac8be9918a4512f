"""``relay inbox`` looks at an inbox without a relay, however much waits in it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.cli import run
from tests.agent_sdk.support import HandRelay

LARGE = "x" * 1_000_000


@pytest.fixture
def relay(tmp_path: Path) -> HandRelay:
    made = HandRelay(tmp_path / "home")
    Agent("bob", made.root).close()
    return made


def listed(relay: HandRelay, *words: str) -> int:
    return run(["--home", str(relay.root), "inbox", "--as", "bob", *words])


def test_a_large_inbox_needs_memory_for_what_is_shown(
    relay: HandRelay, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = [relay.deliver("bob", f"{number} {LARGE}", PRIORITY="3") for number in range(20)]
    sent.insert(0, relay.deliver("bob", "urgent", PRIORITY="0", sender="carol"))
    (relay.box("bob", "inbox") / "1706123456-ff.msg").write_bytes(b"no message")
    tracemalloc.start()
    try:
        assert listed(relay, "--limit", "2", "--json") == 0
        assert listed(relay, "--limit", "2", "--json", "--from", "bob") == 0
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    said = capsys.readouterr()
    shown = [json.loads(line)["id"] for line in said.out.splitlines()]
    assert shown == [sent[0], sent[1], sent[1], sent[2]]
    assert said.err.startswith("relay: 1706123456-ff.msg")
    counts = [line for line in said.err.splitlines() if "shows all" in line]
    assert counts == ["2 of 21; --limit 21 shows all", "2 of 20; --limit 20 shows all"]


def test_a_glimpse_of_a_text_is_no_megabyte(
    relay: HandRelay, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, too: who reads it is an agent."""
    relay.deliver("bob", f"{LARGE}\nmore")
    assert listed(relay) == 0
    assert capsys.readouterr().out.endswith(f"  {'x' * 1000}… …\n")
    assert listed(relay, "--wide") == 0
    assert capsys.readouterr().out.endswith(f"  {LARGE} …\n")
