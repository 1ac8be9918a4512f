"""What the tests of the delivery share."""

from __future__ import annotations

import pytest

from relay.engine.engine import Engine
from tests.engine.support import relay_engine
from tests.fakes import FakeClock


@pytest.fixture
def store(clock: FakeClock) -> Engine:
    """Empty."""
    return relay_engine(clock)
