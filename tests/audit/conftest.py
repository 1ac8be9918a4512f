"""One Spark session for all tests of the audits: starting it takes as long as thirty of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.audit.home_builder import HomeBuilder

# Starting a JVM takes longer than a test may; ten times as long beside a whole suite.
TIMEOUT_S = 240
# A command that gives way to everything else on the machine does not end in that time, either.
os.environ.setdefault("AGENT_RELAY_AUDIT_NICE", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test beside this file may wait for a JVM."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def spark() -> Iterator[object]:
    """A session with one thread, one shuffle partition, no adaptive planning and no compiler.

    To write and compile Java for each plan takes longer than to go through a test's few rows
    without; plans are the same. Runs in a process of their own do compile.
    """
    from relay.audit.session import spark_session

    session = spark_session(
        "local[1]",
        "tests",
        {
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        },
    )
    yield session
    session.stop()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[HomeBuilder]:
    """An empty home to be filled, without a store file."""
    builder = HomeBuilder(tmp_path / "home")
    yield builder
    builder.close()
