"""Fixtures for the tests of delivery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base.config import DetectionSettings, LimitSettings
from tests.delivery.support import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """The outbox of alice, and the intake that reads it."""
    made = Desk(tmp_path / "home", DetectionSettings(), LimitSettings())
    yield made
    made.home.close()
