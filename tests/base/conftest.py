"""Fixtures for the tests of what everything else stands on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base import fsio
from tests.box import descriptors_below


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    """A descriptor of tmp_path; the test may not leave another one open."""
    fd = fsio.open_dir(str(tmp_path))
    yield fd
    os.close(fd)
    assert descriptors_below(tmp_path) == []
