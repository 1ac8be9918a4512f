"""Fixtures for faults of the system."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.tracing import need_strace
from tests.procs import Relay, home_of


@pytest.fixture
def relay() -> Iterator[Relay]:
    """A relay for alice and bob that is not started yet; it ends with the test. Its home has a
    short path, and so a socket."""
    need_strace()
    root = Path(tempfile.mkdtemp(prefix="relay-"))
    one = Relay(home_of(root / "home", "alice", "bob"))
    yield one
    if one.process is not None:
        one.kill()
    shutil.rmtree(root)
