"""A store of its own for each test, and the clock that it goes by."""

from __future__ import annotations

import pytest

from relay.comm.engine import CommStore
from tests.fakes import FakeClock
from tests.unit.comm_support import NOW_S


@pytest.fixture
def clock() -> FakeClock:
    """Stands at NOW_S."""
    return FakeClock(NOW_S * 10**9)


@pytest.fixture
def store(clock: FakeClock) -> CommStore:
    """Empty."""
    return CommStore(clock)
