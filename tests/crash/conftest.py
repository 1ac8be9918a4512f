"""The tests of this folder are slow: each kills its work again and again, in hundreds of homes.

In memory (scripts/test) thousands of syncs wait for no disk. A kill takes nothing of what was
written, and where the power goes ``tests.power`` knows what was synced.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # they are put in their order by what is said here
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them all as slow."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
