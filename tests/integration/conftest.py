"""A home with a relay in a process of its own, for tests of what somebody sees of one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.procs import Relay, home_of


@pytest.fixture
def home() -> Iterator[Path]:
    """A home with a short path: it has a socket."""
    root = Path(tempfile.mkdtemp(prefix="relay-", dir="/tmp"))
    yield home_of(root / "home", "alice", "bob")
    shutil.rmtree(root)


@pytest.fixture
def running(home: Path) -> Iterator[Relay]:
    """A relay that runs, and is down at the end."""
    made = Relay(home)
    made.start()
    yield made
    if made.process is not None:
        made.kill()
