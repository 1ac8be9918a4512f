"""A lake keeps what jobs found: one that would read the same again is not run again."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from relay.audit import run
from relay.audit.extract import extracted, update
from relay.audit.jobs import JOBS
from relay.audit.jobs.sql_jobs import SQL_JOBS
from relay.audit.kept_results import KeptResults
from relay.audit.lake import default_name, open_lake
from relay.audit.snapshot import snapshot_home
from relay.base.errors import RelayError
from relay.base.home import LEDGER
from tests.audit.home_builder import HomeBuilder, stored_message
from tests.audit.printed import parquet, relay_audit
from tests.audit.second_engine import SecondEngine
from tests.box import Box
from tests.kills import Axe, Killed

TRAFFIC = JOBS["traffic"]
SOME = ("reconcile", "duplicates", "dead_letters", "latency")  # each is kept alike


def test_the_second_run_over_the_same_home_starts_no_jvm(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.sent("1-a")
    home.stored = [*home.stored, stored_message(9, "1-a")]
    home.write_store()
    lake = str(tmp_path / "lake")

    def audited(name: str) -> tuple[int, dict[str, Any], dict[str, list[str]]]:
        """The exit code, what was counted, and all rows."""
        out = tmp_path / name
        # Its files are young.
        words = ("run", *SOME, "--grace", "0", "--lake", lake, "--out", str(out))
        result = relay_audit(*words, home=home.path)
        jobs = json.loads((out / "summary.json").read_text())["jobs"]
        said = {name: (job["counts"], job["findings"], job["error"]) for name, job in jobs.items()}
        tables = {
            table: sorted(map(repr, parquet(out / table)))
            for name in SOME
            for table in JOBS[name].tables
        }
        tables["findings"] = sorted(map(repr, parquet(out / "findings")))
        return result.exit_code, said, tables

    first = audited("first")
    assert first[0] == 3 and first[2]["findings"]
    with monkeypatch.context() as patch:
        patch.setattr(run, "session", None)
        assert audited("second") == first
    home.sent("1-b")
    home.write_store()
    changed = audited("third")
    assert changed[1] != first[1] and changed[2]["reconcile"] != first[2]["reconcile"]


def changed(root: Path, sql: str) -> None:
    """The ledger is changed by hand."""
    with contextlib.closing(sqlite3.connect(root / LEDGER)) as db, db:
        db.execute(sql)


def _sent(box: Box) -> None:
    box.open()
    box.send("alice", "TO: bob\nKIND: command\n\nanother")
    box.flush()
    box.stop()


def _started(box: Box) -> None:
    box.open()
    box.stop()


def _file_gone(box: Box) -> None:
    for path in sorted(box.root.glob("archive/*/*/*.msg"))[:1]:
        path.unlink()


DEAD = "UPDATE deliveries SET state = 'dead' WHERE recipient = 'bob'"
CHANGES: dict[str, Callable[[Box], object]] = {
    "nothing": lambda box: None,
    "a message": _sent,
    "a start": _started,
    "a changed row": lambda box: changed(box.root, "UPDATE messages SET target = 'x' WHERE id = 1"),
    "a file is gone": _file_gone,
    "dead letters": lambda box: changed(box.root, DEAD),
}


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from((0, 1, 60, 3600, 86_400))),
        min_size=2,
        max_size=4,
    )
)
@pytest.mark.damages
def test_what_is_kept_is_what_would_be_judged_now(
    make_box: Callable[..., Box], tmp_path: Path, steps: list[tuple[str, int]]
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    box = make_box("alice", "bob", name=f"{root.name}/home")
    box.stop()
    _sent(box)
    kept: dict[str, tuple[str, dict[str, list[str]]]] = {}
    for number, (change, later_s) in enumerate((("nothing", 0), *steps)):
        CHANGES[change](box)
        box.clock.advance(later_s)
        (root / f"{number}").mkdir()
        snapshot = snapshot_home(str(box.root), str(root / f"{number}"), box.clock)
        results = KeptResults(*extracted(snapshot, str(root / "lake")), snapshot)
        with contextlib.closing(SecondEngine(snapshot, root / f"{number}" / "lake")) as engine:
            for job in SQL_JOBS:
                key = results._key(job)
                tables = engine.run(job.name).tables
                rows = {name: sorted(map(repr, tables[name])) for name in tables}
                if key is None or (job.name == "dead_letters" and any(rows.values())):
                    kept.pop(job.name, None)
                    continue
                if (before := kept.get(job.name)) is not None and before[0] == key:
                    assert before[1] == rows, (job.name, change)
                kept[job.name] = key, rows


def _fill(out: Path, n: int) -> None:
    """Tables as a run writes them."""
    shutil.rmtree(out, ignore_errors=True)
    for table in TRAFFIC.tables:
        (out / table).mkdir(parents=True)
        pq.write_table(pa.table({"n": [n, len(table)]}), out / table / "part-0.parquet")


def results_of(home: HomeBuilder, lake: Path, work: Path) -> KeptResults:
    """The results that a lake keeps of a home."""
    snapshot = home.snapshot(work)
    opened = open_lake(str(lake))
    made = update(opened, default_name(snapshot.home), snapshot)[0]
    return KeptResults(opened, made, snapshot)


def test_what_somebody_changed_in_the_lake_is_not_copied(home: HomeBuilder, tmp_path: Path) -> None:
    lake, out, copied = tmp_path / "lake", tmp_path / "out", tmp_path / "copied"
    home.sent("1-a")
    kept = results_of(home, lake, tmp_path / "one")
    _fill(out, 1)
    kept.keep([TRAFFIC], str(out))
    result = kept.of(TRAFFIC)
    assert result is not None
    path = next(iter(result.files.values()))
    (note,) = (lake / "judged").rglob("traffic.json")
    for elsewhere in ("../traffic/x.parquet", "/tmp/x.parquet", "x.parquet"):
        files = {elsewhere: path}
        note.write_text(json.dumps({"key": result.key, "files": files}))
        assert kept.of(TRAFFIC) is None
    (lake / path).write_bytes(b"")
    with pytest.raises(RelayError, match="is damaged: its SHA-256 is not that of its name"):
        kept.copy(result, str(copied))
    (lake / path).unlink()
    with pytest.raises(RelayError, match="was removed meanwhile"):
        kept.copy(result, str(copied))
    assert not copied.exists()


def test_killed_at_any_write_a_result_is_whole_or_not_there(
    home: HomeBuilder, tmp_path: Path
) -> None:
    lake, before, out = tmp_path / "lake", tmp_path / "before", tmp_path / "out"

    home.sent("1-a")
    old = results_of(home, lake, tmp_path / "one")
    _fill(out, 1)
    old.keep([TRAFFIC], str(out))
    home.sent("1-b")
    new = results_of(home, lake, tmp_path / "two")
    shutil.copytree(lake, before)
    assert new.of(TRAFFIC) is None
    _fill(out, 2)

    def killed_at(number: int) -> int:
        """Keep the new result in a copy of the lake; how many effects there were."""
        shutil.rmtree(lake)
        shutil.copytree(before, lake)
        with pytest.MonkeyPatch.context() as patch:
            axe = Axe(patch, tmp_path)
            axe.falls_at = number
            with contextlib.suppress(Killed):
                new.keep([TRAFFIC], str(out))
        return len(axe.effects)

    seen = set()
    for number in range(1, killed_at(0) + 1):
        killed_at(number)
        found = new.of(TRAFFIC)
        seen.add(found is None)
        for result in filter(None, (found, old.of(TRAFFIC))):
            copied = tmp_path / "copied"
            shutil.rmtree(copied, ignore_errors=True)
            new.copy(result, str(copied))
            n = 2 if result is found else 1
            assert {row["n"] for row in parquet(copied / "traffic")} == {n, len("traffic")}
        new.keep([TRAFFIC], str(out))
        found = new.of(TRAFFIC)
        assert found is not None
        there = {path.name for path in (lake / "judged").rglob("*.parquet")}
        assert there == {Path(path).name for path in found.files.values()}
    assert seen == {True, False}
