"""Fixtures for the tests of the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sdk import Agent
from tests.agent_sdk.support import HandRelay


@pytest.fixture
def relay(tmp_path: Path) -> HandRelay:
    """A relay made by hand, whose home has no agents yet."""
    return HandRelay(tmp_path / "home")


@pytest.fixture
def alice(relay: HandRelay) -> Iterator[Agent]:
    """Alice, who is registered."""
    with Agent("alice", relay.root) as agent:
        yield agent


@pytest.fixture
def bob(relay: HandRelay) -> Iterator[Agent]:
    """Bob, who is registered."""
    with Agent("bob", relay.root) as agent:
        yield agent
