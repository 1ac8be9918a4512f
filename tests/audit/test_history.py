"""Histories of a relay's weeks: a sound one gives no findings; in one where known things went
wrong each of them is found, and nothing else is.

Which check is to find a fault stands beside the fault, in scripts/history/faults.py; what it is
about (message, agent, route, file) is on the list that was made with the history.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from relay.audit.jobs import JOBS
from relay.audit.run import Request, run_audit
from relay.clock import NS_PER_S, Clock
from relay.errors import EXIT_FINDINGS, EXIT_OK
from scripts.history.__main__ import make_faulty
from scripts.history.faults import BY_NAME, Planted, chosen
from scripts.history.make import Given, History

MESSAGES, AGENTS, DAYS = 3_000, 8, 2  # hours with enough in them to be judged
PATIENT = pytest.mark.timeout(300)  # every job there is, over thousands of messages
AGE_NS = 300 * NS_PER_S  # of the end: older than the grace


def given(seed: int) -> Given:
    """A small history that ended just now."""
    return Given(MESSAGES, AGENTS, DAYS, time.time_ns() - AGE_NS, seed)


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
    return True


@pytest.fixture(scope="module")
def faulty(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[Planted], list[dict[str, object]]]]:
    """Every fault that leaves all files readable: (what was planted, what was found)."""
    root = tmp_path_factory.mktemp("faulty")
    planted = make_faulty(root / "home", given(2), chosen("rows,files"))
    report, _ = run_audit(Request(str(root / "home"), out=str(root / "out")), Clock())
    assert {name: job.error for name, job in report.jobs.items() if job.error} == {}
    assert report.exit_code == EXIT_FINDINGS
    yield planted, findings(root / "out")


@PATIENT
def test_a_sound_history_gives_no_findings(spark: SparkSession, tmp_path: Path) -> None:
    History(str(tmp_path / "home"), given(1)).make()
    report, examples = run_audit(Request(str(tmp_path / "home")), Clock())
    assert {name: job.verdict for name, job in report.jobs.items() if job.error} == {}
    assert [found for one in examples.values() for found in one.findings] == []
    assert report.exit_code == EXIT_OK
    assert report.jobs["reconcile"].counts["delivered"] == MESSAGES


@PATIENT
@pytest.mark.parametrize("name", sorted(chosen("rows,files")))
def test_each_planted_fault_is_found(
    faulty: tuple[list[Planted], list[dict[str, object]]], name: str
) -> None:
    planted, found = faulty
    mine = [one for one in planted if one.fault == name]
    assert mine, f"{name} was not planted"
    if BY_NAME[name].checks[0].partition(".")[0] not in JOBS:
        pytest.skip("its job is not there yet")
    for one in mine:
        hits = [f for f in found if f["check"] in one.checks and is_about(f, one)]
        assert hits, f"{one} was not found among {sorted({str(f['check']) for f in found})}"


@PATIENT
def test_nothing_but_the_planted_faults_is_found(
    faulty: tuple[list[Planted], list[dict[str, object]]],
) -> None:
    planted, found = faulty
    unasked = [f for f in found if not any(is_about(f, one) for one in planted)]
    assert unasked == []


def test_the_list_of_faults_says_what_and_where(tmp_path: Path) -> None:
    planted = make_faulty(tmp_path / "home", given(3), chosen("lost,attachment_gone,archive_byte"))
    by_name = {one.fault: one for one in planted}
    assert set(by_name) == {"lost", "attachment_gone", "archive_byte"}
    assert not (tmp_path / "home" / str(by_name["attachment_gone"].path)).exists()
    assert (tmp_path / "home" / str(by_name["archive_byte"].path)).exists()
    assert by_name["lost"].checks == ("reconcile.missing",)
    json.dumps([one._asdict() for one in planted])
