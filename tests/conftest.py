"""Fixtures for every test."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from relay.base.discovery import HOME_VARIABLE
from relay.commstore.store import CommStore
from relay.journal.tier_plan import TierPolicy
from relay.ledger.ledger import Ledger
from tests import forks
from tests.box import BOXES, Box, MakeBox
from tests.engine.support import NOW_S
from tests.fakes import FakeClock
from tests.journal import tiers_support
from tests.journal.support import Stream
from tests.ledger.support import Look
from tests.sound import findings_of, homes_below

# The same examples each time, and no clock in the verdict.
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("steady")

# The processes of the tests load what another one has compiled, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["RELAY_NO_WAIT"] = "1"  # what sends does not wait for the relay; tests of that unset it

forks.be_patient()  # the SDK in this process, too

# Under nohup, or in the background of a script, both are ignored, and so they would be by all
# that the tests start and end.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# A test is quick unless it is slow by its mark, or its file uses one of these.
PROCESSES = {
    *("multiprocessing", "pexpect", "subprocess", "pyspark.sql.session"),
    *("tests.forks", "tests.procs", "tests.shells", "tests.reach.calls", "tests.faults.tracing"),
}


NUMBERS = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--quick``: see scripts/test."""
    parser.addoption("--quick", action="store_true", help="only tests without processes")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    asyncio.run(pyfuncitem.function(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes what takes long begins first, so that all of them end together.

    Tests of the night run only where ``-m`` says so.
    """
    left_out = [
        item
        for item in items
        if (item.get_closest_marker("nightly") and "nightly" not in config.option.markexpr)
        or (config.option.quick and not _is_quick(item))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)
    gc.freeze()  # each collection would look through all tests and modules again


def _turn(item: pytest.Item) -> int:
    """Tests with a shared session or relay are first, one process each; then slow ones."""
    marks = {mark.name for mark in item.iter_markers()}
    return 0 if "xdist_group" in marks else 1 if "slow" in marks else 2


def _is_quick(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    used = (
        {
            getattr(one, "__module__", None) or one.__name__
            for one in vars(module).values()
            if hasattr(one, "__name__")
        }
        if module
        else set()
    )
    return not (item.get_closest_marker("slow") or used & PROCESSES)


@pytest.fixture
def tmp_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A directory of the test's own, which is removed unless it fails.

    Pytest's own looks through what the tests before it left, to number it: with thousands of tests
    that takes longer than many of them.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(NUMBERS)}"
    path.mkdir(mode=0o700)
    failed = request.session.testsfailed
    yield path
    if request.session.testsfailed == failed:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_real_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test touches ~/.agent-relay, whatever it calls, or one above the directory of the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    monkeypatch.delenv("AGENT_RELAY_NAME", raising=False)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """What a killed box held is given back, as the system does with a process."""
    yield
    while BOXES:
        BOXES.pop().give_back()


@pytest.fixture(autouse=True)
def homes_are_sound(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """The stores of every home below ``tmp_path`` are valid and agree when a test ends.

    Except homes that a test damages on purpose, which ``@pytest.mark.damages`` says.
    """
    yield
    if request.node.get_closest_marker("damages") is None:
        assert [line for home in homes_below(tmp_path) for line in findings_of(home)] == []


@pytest.fixture
def make_box(tmp_path: Path) -> Iterator[MakeBox]:
    """Boxes below tmp_path; those that still run at the end are stopped."""
    made: list[Box] = []

    def make(*agents: str, name: str = "home", kind: type[Box] = Box, **options: Any) -> Box:
        made.append(kind(tmp_path / name, *agents, **options))
        return made[-1]

    yield make
    for box in made:
        box.close()


@pytest.fixture
def box(request: pytest.FixtureRequest, make_box: MakeBox) -> Box:
    """A relay in a box with alice, bob and carol, or what the mark ``box`` says."""
    mark = request.node.get_closest_marker("box")
    if mark is None:
        return make_box("alice", "bob", "carol")
    return make_box(*mark.args, **mark.kwargs)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sends waits for the relay, as outside of the tests."""
    monkeypatch.delenv("RELAY_NO_WAIT")


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The test has the umask that its parameter says."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


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
