"""Fixtures for the tests of delivery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base.config import DetectionSettings, LimitSettings
from relay.engine.engine import Engine
from tests.delivery.planning import Table
from tests.delivery.support import Desk
from tests.engine.support import relay_engine
from tests.fakes import FakeClock


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """The outbox of alice, and the intake that reads it."""
    made = Desk(tmp_path / "home", DetectionSettings(), LimitSettings())
    yield made
    made.home.close()


@pytest.fixture
def store(clock: FakeClock) -> Engine:
    """Empty."""
    return relay_engine(clock)


@pytest.fixture
def table() -> Table:
    """An empty store, and plans for it."""
    return Table()
