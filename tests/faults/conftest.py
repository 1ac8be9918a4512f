"""Fixtures for faults of the system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.tracing import need_strace
from tests.procs import Relay, home_of


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    """A relay for alice and bob that is not started yet; it ends with the test."""
    need_strace()
    one = Relay(home_of(tmp_path / "home", "alice", "bob"))
    yield one
    if one.process is not None:
        one.kill()
