"""Histories of a relay's weeks: a sound one gives no findings; in one where known things went
wrong each of them is found, and nothing else is.

Which check is to find a fault stands beside the fault, in scripts/history/faults.py; what it is
about (message, agent, route, file) is on the list that was made with the history.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from relay.audit.jobs import JOBS
from relay.audit.run import RunRequest, run_audit
from relay.audit.snapshot import snapshot_home
from relay.base.clock import NS_PER_S
from relay.base.errors import EXIT_FINDINGS
from scripts.cluster.one_run import StandingClock
from scripts.history.__main__ import make_faulty
from scripts.history.faults import BY_NAME, Planted, chosen
from scripts.history.make import Given, History
from tests.audit.second_engine import SQL_NAMES, SecondEngine, in_utc

pytestmark = pytest.mark.shows("audit 2.2")

MESSAGES, AGENTS, DAYS = 800, 8, 2
IN_FAULTY = 3_000  # hours with enough in them to be judged
PATIENCE_S = 1200  # every job there is, where other things go on
PATIENT = pytest.mark.timeout(PATIENCE_S)
READABLE = "rows,files"  # faults that leave every file to be read
UNREADABLE = "damage"
NEED_FILES = ("reconcile", "duplicates", "dead_letters", "acks", "threads")
AGE_NS = 300 * NS_PER_S  # of the end at least: older than the grace
NOON_NS, DAY_NS = 43_200 * NS_PER_S, 86_400 * NS_PER_S


def given(seed: int, messages: int = MESSAGES) -> Given:
    """A small history that ended last noon: its days are as long whenever it is made."""
    ended = time.time_ns() - AGE_NS - NOON_NS
    return Given(messages, AGENTS, DAYS, ended - ended % DAY_NS + NOON_NS, seed)


def findings(out: Path) -> list[dict[str, object]]:
    """What a run found, of all jobs."""
    return (
        ds.dataset(out / "findings", format="parquet", partitioning="hive").to_table().to_pylist()
    )


def is_about(found: dict[str, object], fault: Planted) -> bool:
    """True when a finding speaks of what the fault was planted at."""
    if found["check"] not in (*fault.checks, *fault.also):
        return False
    if fault.message_id is not None and found["message_id"] is not None:
        return found["message_id"] == fault.message_id
    return None in (fault.agent, found["agent"]) or found["agent"] == fault.agent


class Looked(NamedTuple):
    """A history, and what one run made of it."""

    root: Path  # its home, and the run's out
    now_ns: int  # when that was
    planted: list[Planted]
    found: list[dict[str, object]]


@pytest.fixture(scope="module")
def faulty(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Looked:
    """Every fault that leaves all files readable, and what one run of all jobs finds."""
    root = tmp_path_factory.mktemp("faulty")
    planted = make_faulty(root / "home", given(2, IN_FAULTY), chosen(READABLE))
    request = RunRequest(str(root / "home"), out=str(root / "out"))
    now_ns = time.time_ns()
    report, _ = run_audit(request, StandingClock(now_ns))
    assert {name: job.error for name, job in report.jobs.items() if job.error} == {}
    assert report.exit_code == EXIT_FINDINGS
    return Looked(root, now_ns, planted, findings(root / "out"))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    """Files that are passed over, and what integrity finds, and the jobs that need them."""
    root = tmp_path_factory.mktemp("damaged")
    planted = make_faulty(root / "home", given(4), chosen(UNREADABLE))
    clock = StandingClock(time.time_ns())
    with contextlib.closing(second_engine(root, clock)) as engine:
        said = {job: engine.run(job) for job in ("integrity", *NEED_FILES)}
    classes = Counter(row["class"] for row in said["reconcile"].tables["reconcile"])
    assert classes["not_checked"] > 0 and classes["not_checked"] + classes["delivered"] == MESSAGES
    found = [row for one in said.values() for row in one.findings]
    return Looked(root, clock.now_ns(), planted, found)


def second_engine(root: Path, clock: StandingClock) -> SecondEngine:
    """The other engine, over the rows of the home in a folder."""
    folder = root / "second"
    folder.mkdir()
    return SecondEngine(snapshot_home(str(root / "home"), str(folder), clock), folder / "lake")


def test_a_sound_history_gives_no_findings(tmp_path: Path) -> None:
    History(str(tmp_path / "home"), given(1)).make()
    with contextlib.closing(second_engine(tmp_path, StandingClock(time.time_ns()))) as engine:
        said = {job: engine.run(job) for job in SQL_NAMES}
    assert {job: one.findings for job, one in said.items() if one.findings} == {}
    assert said["traffic"].counts["messages"] > MESSAGES  # and the answers


@PATIENT
@pytest.mark.parametrize("name", sorted(chosen(READABLE)))
def test_each_planted_fault_is_found(faulty: Looked, name: str) -> None:
    require_found(faulty, name)


@PATIENT
@pytest.mark.parametrize("name", sorted(chosen(UNREADABLE)))
def test_each_damaged_file_is_found(damaged: Looked, name: str) -> None:
    require_found(damaged, name)


@pytest.mark.shows("audit 2.4")
@PATIENT
@pytest.mark.parametrize("of", ["faulty", "damaged"])
def test_nothing_but_the_planted_faults_is_found(
    of: str, spark: SparkSession, request: pytest.FixtureRequest
) -> None:
    looked_at: Looked = request.getfixturevalue(of)
    planted = looked_at.planted
    assert [f for f in looked_at.found if not any(is_about(f, one) for one in planted)] == []


def require_found(history: Looked, name: str) -> None:
    """Each fault of this name has a finding of its check."""
    found = history.found
    mine = [one for one in history.planted if one.fault == name]
    assert mine, f"{name} was not planted"
    for one in mine:
        hits = [f for f in found if f["check"] in one.checks and is_about(f, one)]
        assert hits, f"{one} was not found among {sorted({str(f['check']) for f in found})}"


@pytest.fixture(scope="module")
def engine(faulty: Looked) -> Iterator[SecondEngine]:
    """The other engine, over the same rows."""
    made = second_engine(faulty.root, StandingClock(faulty.now_ns))
    yield made
    made.close()


@PATIENT
@pytest.mark.parametrize("job", SQL_NAMES)
def test_the_second_engine_says_the_same(faulty: Looked, engine: SecondEngine, job: str) -> None:
    theirs = engine.run(job)
    for name, rows in theirs.tables.items():
        ours = in_utc(ds.dataset(faulty.root / "out" / name).to_table().to_pylist())
        assert sorted(map(repr, rows)) == sorted(map(repr, ours)), name
    found = [
        (row["check"], row["severity"], row["message_id"], row["agent"])
        for row in faulty.found
        if row["job"] == job
    ]
    assert theirs.found == sorted(found, key=str)


def test_every_fault_is_looked_for() -> None:
    assert chosen(READABLE) | chosen(UNREADABLE) == set(BY_NAME)
    assert {check.partition(".")[0] for f in BY_NAME.values() for check in f.checks} <= set(JOBS)


def test_the_list_of_faults_says_what_and_where(tmp_path: Path) -> None:
    planted = make_faulty(tmp_path / "home", given(3), chosen("lost,attachment_gone,archive_byte"))
    by_name = {one.fault: one for one in planted}
    assert set(by_name) == {"lost", "attachment_gone", "archive_byte"}
    assert not (tmp_path / "home" / str(by_name["attachment_gone"].path)).exists()
    assert (tmp_path / "home" / str(by_name["archive_byte"].path)).exists()
    assert by_name["lost"].checks == ("reconcile.missing",)
    json.dumps([one._asdict() for one in planted])
