"""One Spark session for all tests of the audits: starting it takes as long as thirty of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.audit.class_archive import java_options
from tests.audit.home_builder import HomeBuilder
from tests.procs import project_of

# A command that gives way to everything else on the machine may never end beside a whole suite.
os.environ.setdefault("AGENT_RELAY_AUDIT_NICE", "0")
os.environ.setdefault("SPARK_SUBMIT_OPTS", java_options())
# The JVM that only writes Spark's command line ends within half a second.
os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.hookimpl(tryfirst=True)  # xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test beside this file may wait for a JVM: a session's, or one of its own."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            if "spark" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group("spark"))
            else:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A session with one thread and the settings of a run over a small home.

    Its workers start in a directory whose modules have the names of Python's own, and not by the
    Python that is set for another Spark.
    """
    from relay.audit.session import SMALL, spark_session

    os.environ["PYSPARK_PYTHON"] = "/nowhere"  # the session sets it anew
    with contextlib.chdir(project_of(tmp_path_factory.mktemp("project"))):
        session = spark_session("local[1]", SMALL)
    yield session
    session.stop()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[HomeBuilder]:
    """An empty home to be filled, without a store file."""
    builder = HomeBuilder(tmp_path / "home")
    yield builder
    builder.close()


@pytest.fixture(autouse=True)
def homes_are_sound() -> None:
    """Homes are put together by hand here, as far as a test needs them: no store is checked."""
