"""The tests of this folder are slow: each kills its work again and again, in hundreds of homes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEMORY = "/dev/shm"
WANTED_BYTES = 1 << 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them all as slow."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)


def memory() -> str | None:
    """A folder in memory, where the machine has one with room."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return None
    return MEMORY if found.f_bavail * found.f_frsize > WANTED_BYTES else None


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, if there is room: a kill takes nothing of what was written, and where the
    power goes ``tests.power`` knows what was synced. Thousands of syncs wait for no disk."""
    made = Path(tempfile.mkdtemp(prefix="relay-crash-", dir=memory()))
    yield made
    shutil.rmtree(made, ignore_errors=True)
