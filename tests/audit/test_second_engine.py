"""Jobs in SQL say the same in another engine where the clock went back, which no history has."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from pyspark.sql import SparkSession

from relay.audit.jobs import JOBS
from relay.audit.jobs.sql_files import FINDINGS, SHARED, statements
from relay.audit.lake_columns import RESULTS
from relay.audit.run import RunRequest, run_audit
from relay.audit.snapshot import snapshot_home
from relay.base.home import LEDGER
from scripts.cluster.one_run import StandingClock
from scripts.history.make import History
from tests.audit.printed import parquet
from tests.audit.second_engine import SQL_NAMES, in_utc, says
from tests.audit.test_history import PATIENT, given

BACKWARDS = (
    "UPDATE messages SET discovered_at = discovered_at - 3600000000000 WHERE id % 50 = 0",
    "UPDATE deliveries SET written_at = written_at - 8000000000 WHERE message_id LIKE '%a0'",
    "UPDATE messages SET file_mtime_ns = file_mtime_ns + 7000000000 WHERE id % 90 = 0",
)


@PATIENT
def test_both_engines_say_the_same(spark: SparkSession, tmp_path: Path) -> None:
    History(str(tmp_path / "home"), given(2)).make()
    with contextlib.closing(sqlite3.connect(tmp_path / "home" / LEDGER)) as db, db:
        for change in BACKWARDS:
            db.execute(change)
    clock = StandingClock(time.time_ns())
    request = RunRequest(str(tmp_path / "home"), ("ordering",), out=str(tmp_path / "out"))
    report, _ = run_audit(request, clock)
    assert len(report.jobs["ordering"].findings) == 4
    (tmp_path / "run").mkdir()
    theirs = says("ordering", snapshot_home(request.home, str(tmp_path / "run"), clock))
    for name, rows in theirs.tables.items():
        ours = in_utc(parquet(tmp_path / "out" / name))
        assert sorted(map(repr, rows)) == sorted(map(repr, ours)), name
    found = parquet(tmp_path / "out" / "findings")
    assert theirs.found == sorted(
        [(row["check"], row["severity"], row["message_id"], row["agent"]) for row in found], key=str
    )


def test_each_table_of_the_results_is_a_statement_of_a_job() -> None:
    tables = [name for job in JOBS.values() for name in job.tables]
    assert sorted([*tables, "findings", "own_check"]) == sorted(RESULTS)
    for job in SQL_NAMES:
        assert job == next(iter(JOBS[job].tables))
        found = {one.name for one in statements(job) if one.kind == FINDINGS}
        classes = JOBS[job].header.checks.keys()
        assert found - {"class"} <= classes if "class" in found else found == classes


def test_no_two_files_give_a_view_the_same_name() -> None:
    files = (*SQL_NAMES, SHARED)
    names = [one.name for file in files for one in statements(file) if one.kind != FINDINGS]
    assert len(names) == len(set(names))
