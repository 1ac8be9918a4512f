"""Fixtures for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from relay.base.home import HOME_VARIABLE
from tests.box import HOMES, Box

# The same examples each time, and no clock in the verdict.
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("steady")

# Under nohup, or in the background of a script, both are ignored, and so they would be by all
# that the tests start and end.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def no_real_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test touches ~/.agent-relay, whatever it calls."""
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    monkeypatch.delenv("AGENT_RELAY_NAME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "no-runtime"))  # no socket goes there


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """What a killed box held is given back, as the system does with a process."""
    yield
    while HOMES:
        HOMES.pop().close()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A relay in a box with alice, bob and carol; its ledger is sound at the end."""
    made = Box(tmp_path / "home", "alice", "bob", "carol")
    yield made
    assert made.sql("PRAGMA integrity_check") == [("ok",)]
    made.close()
