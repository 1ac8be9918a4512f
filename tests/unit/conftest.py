"""A store of its own for each test, and the clock that it goes by; a stream with its journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relay.engine.commstore import CommStore
from relay.journal.plan import TierPolicy
from relay.ledger import Ledger
from tests import tiers_support
from tests.fakes import FakeClock
from tests.unit.aof2_support import Stream
from tests.unit.comm_support import NOW_S
from tests.unit.ledger_support import Look


@pytest.fixture
def clock() -> FakeClock:
    """Stands at NOW_S."""
    return FakeClock(NOW_S * 10**9)


@pytest.fixture
def store(clock: FakeClock) -> CommStore:
    """Empty."""
    return CommStore(clock)


@pytest.fixture
def ledger_path(tmp_path: Path) -> str:
    """Where ``ledger`` is."""
    return str(tmp_path / "ledger.db")


@pytest.fixture
def ledger(ledger_path: str) -> Iterator[Ledger]:
    """Empty; sound at the end."""
    opened = Ledger.open(ledger_path)
    yield opened
    assert opened._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    opened.close()


@pytest.fixture
def look(ledger: Ledger, ledger_path: str) -> Iterator[Look]:
    """Somebody who looks into the ledger meanwhile."""
    reader = Look(ledger_path)
    yield reader
    reader.close()


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    """A stream that has no journal yet; those opened are closed."""
    made = Stream(tmp_path)
    yield made
    made.crash()


@pytest.fixture
def make_stream(tmp_path: Path) -> Iterator[Callable[..., tiers_support.Stream]]:
    """Streams that are closed at the end."""
    made: list[tiers_support.Stream] = []

    def build(
        policy: TierPolicy = tiers_support.AT_ONCE, store: object = None
    ) -> tiers_support.Stream:
        made.append(tiers_support.Stream(tmp_path, policy, store))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for stream in made:
        stream.close()


@pytest.fixture
def tier2(tmp_path: Path) -> tiers_support.FaultyObjects:
    """Tier 2 in a directory."""
    return tiers_support.FaultyObjects(tmp_path / "tier2")
