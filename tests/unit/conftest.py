"""A store of its own for each test, and the clock that it goes by; a stream with its journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.comm.engine import CommStore
from tests.fakes import FakeClock
from tests.unit.aof2_support import Stream
from tests.unit.comm_support import NOW_S


@pytest.fixture
def clock() -> FakeClock:
    """Stands at NOW_S."""
    return FakeClock(NOW_S * 10**9)


@pytest.fixture
def store(clock: FakeClock) -> CommStore:
    """Empty."""
    return CommStore(clock)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    """A stream that has no journal yet; those opened are closed."""
    made = Stream(tmp_path)
    yield made
    made.crash()
