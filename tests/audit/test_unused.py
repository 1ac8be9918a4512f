"""Audits of a home that has seen nothing need no Spark, and say what the jobs would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relay.audit import disk_usage, run, unused
from relay.audit.extract import extracted
from relay.audit.snapshot import HomeSnapshot, snapshot_home
from relay.base.errors import EXIT_FINDINGS
from tests.audit.printed import parquet, relay_audit
from tests.audit.second_engine import SQL_NAMES, SecondEngine, in_utc
from tests.box import Box


def frozen(box: Box, folder: Path) -> HomeSnapshot:
    """A snapshot of the home."""
    folder.mkdir()
    return snapshot_home(str(box.root), str(folder), box.clock)


def retire_some(box: Box) -> None:
    """Carol is retired, bob away, and alice was seen."""
    box.sql("UPDATE agents SET status = 'retired', changed_at = registered_at + 5000001999")
    box.sql("UPDATE agents SET status = 'active', changed_at = NULL WHERE name <> 'carol'")
    box.sql("UPDATE agents SET status = 'inactive', reason = 'left' WHERE name = 'bob'")
    box.sql("UPDATE agents SET last_seen_at = registered_at + 7000000999 WHERE name = 'alice'")


def test_the_tables_are_those_that_the_jobs_make(box: Box, tmp_path: Path) -> None:
    box.restart()
    retire_some(box)
    snapshot = frozen(box, tmp_path / "run")
    found = unused.tables_of(*extracted(snapshot, str(tmp_path / "lake")))
    assert found is not None
    compared: dict[str, list[str]] = {"findings": []}
    with contextlib.closing(SecondEngine(snapshot, tmp_path / "lake")) as engine:
        for job in SQL_NAMES:
            said = engine.run(job)
            assert said.findings == []
            compared |= {name: rows(theirs) for name, theirs in said.tables.items()}
    assert {name: rows(table.to_pylist()) for name, table in found.items()} == compared
    assert {row["agent"]: row["class"] for row in found["agents"].to_pylist()} == {
        **{name: "present" for name in ("alice", "operator")},
        **{name: "away" for name in ("bob", "carol")},
    }


def rows(table: list[dict[str, Any]]) -> list[str]:
    """Rows in one order."""
    return sorted(map(repr, in_utc(table)))


def test_no_jvm_is_started(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "session", None)
    out = tmp_path / "out"
    result = relay_audit("run", "--home", str(box.root), "--out", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "integrity: OK (journals 1, segments 1, stores 1)" in result.stdout.splitlines()
    assert {row["agent"] for row in parquet(out / "agents")} >= {"alice", "bob", "carol"}
    assert parquet(out / "findings") == [] == parquet(out / "reconcile")
    assert (out / "report.html").exists()
    assert out.stat().st_mode & 0o777 == 0o700


def _unnamed_attachment(box: Box) -> None:
    path = box.path("attachments", "aa", "a" * 64)
    path.parent.mkdir()
    path.write_text("x")


def _original(box: Box) -> None:
    path = box.path("archive", "2026-01-30", "bob", "1-a.msg")
    path.parent.mkdir(parents=True)
    path.write_text("TO: alice\n\nhi")


def _truncated(box: Box) -> None:
    (segment,) = box.path("journal").glob("*/segments/*.seg")
    with open(segment, "r+b") as file:
        file.seek(70)
        file.write(b"\xff" * 20)


NEEDS_JOBS: dict[str, Callable[[Box], object]] = {
    "a message": lambda box: box.send("alice", "TO: bob\n\nhi"),
    "a refusal": lambda box: box.send("alice", "no headers"),
    "a process": lambda box: box.sql(
        "INSERT INTO processes"
        " (name, state, cli, cwd, restart, requested_by, request_id, changed_at)"
        " VALUES ('bob', 'stuck', 'claude', '/', 'never', 'alice', '1-a', 1)"
    ),
    "a trigger that is gone": lambda box: box.sql("DROP TRIGGER audit_log_keeps_rows"),
    "a ledger ahead of the journal": lambda box: box.sql(
        "UPDATE orchestrator_state SET value = '999999999' WHERE key = 'journal'"
    ),
    "an original": _original,
    "an attachment": _unnamed_attachment,
    "damage": _truncated,
}


@pytest.mark.parametrize("what", NEEDS_JOBS)
def test_what_is_not_nothing_is_for_the_jobs(box: Box, tmp_path: Path, what: str) -> None:
    assert unused.tables_of(*extracted(frozen(box, tmp_path / "before"), None)) is not None
    box.flush()
    NEEDS_JOBS[what](box)
    box.flush()
    assert unused.tables_of(*extracted(frozen(box, tmp_path / "after"), None)) is None


def test_a_full_disk_is_found_without_a_jvm(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "session", None)
    monkeypatch.setattr(disk_usage, "measure_disk", lambda home: (1 << 40, 1 << 40, 1 << 20))
    out = tmp_path / "out"
    result = relay_audit("run", "--home", str(box.root), "--out", str(out))
    assert (result.exit_code, result.stderr) == (EXIT_FINDINGS, "")
    assert [row["check"] for row in parquet(out / "findings")] == ["capacity.below_floor"]
