"""`relay audit` from end to end: what is printed, what is written, and how it exits."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from relay.audit import run
from relay.audit.jobs import JOBS
from relay.audit.jobs.job import Tables
from relay.audit.lake_columns import FINDING
from relay.audit.lake_tables import Inputs
from relay.base.errors import HomeMissing, LedgerError, RelayError
from relay.cli import audit as command
from tests.audit.home_builder import HomeBuilder, stored_message
from tests.audit.printed import parquet, relay_audit
from tests.audit.test_reconcile import EXPECTED
from tests.procs import environment


@pytest.mark.shows("audit 2.8")
def test_a_clean_home_exits_0_and_a_second_run_replaces_the_first(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a")
    once = home.stored
    home.stored = [*once, stored_message(9, "1-a")]
    home.write_store()
    out = str(tmp_path / "out")
    assert relay_audit("run", "duplicates", "--out", out, home=home.path).exit_code == 3
    assert len(parquet(Path(out) / "findings")) == 1
    home.stored = once
    home.write_store()
    result = relay_audit("run", "duplicates", "--out", out, home=home.path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert any(line.startswith("duplicates: OK") for line in result.stdout.splitlines())
    assert parquet(Path(out) / "findings") == [] == parquet(Path(out) / "duplicates")


def test_json_is_all_of_stdout_and_the_commands_home_wins(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a")
    home.write_store()
    result = relay_audit("run", "traffic", "--json", "--home", home.path, home="/nowhere")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["jobs"]["traffic"]["counts"] == {"pairs": 1, "messages": 1, "bytes": 100}
    assert list(summary["jobs"]) == ["traffic"]
    assert summary["snapshot_at"].endswith("Z")


@pytest.mark.shows("audit 2.8")
def test_a_damaged_file_is_one_line_and_other_jobs_go_on(
    spark: SparkSession, home: HomeBuilder
) -> None:
    home.sent("1-a")
    path = Path(home.write_store())
    path.write_bytes(path.read_bytes()[:-50])
    wanted = ("duplicates", "threads", "integrity", "traffic")
    result = relay_audit("run", "--strict", *wanted, home=home.path)
    assert result.exit_code == 1
    errors = result.stderr.splitlines()
    assert [line.split(f": could not run: {path} at ")[0] for line in errors] == [
        "duplicates",
        "threads",
    ]
    assert "integrity: 1 finding (1 error)" in result.stdout.splitlines()
    assert "traffic: OK (pairs 1, messages 1, 100 bytes)" in result.stdout.splitlines()


@pytest.mark.shows("audit 2.8")
def test_of_a_damaged_file_the_rest_is_read_and_what_was_not_is_named(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a")
    path = Path(home.write_store())
    path.write_bytes(path.read_bytes()[:-50])
    out = tmp_path / "out"
    words = ("run", "duplicates", "traffic", "--out", str(out))
    result = relay_audit(*words, home=home.path)
    assert result.exit_code == 1
    first, hint = result.stderr.splitlines()
    assert first.startswith(f"not read: {path} at ") and "footer magic" in first
    assert hint == "the rest was read; put copies from a backup in their place"
    assert "duplicates: not all read (no data)" in result.stdout.splitlines()
    assert "traffic: OK (pairs 1, messages 1, 100 bytes)" in result.stdout.splitlines()
    (lost,) = json.loads((out / "summary.json").read_text())["lost"]
    assert lost == first.removeprefix("not read: ")
    page = (out / "report.html").read_text()
    assert "First: 1 part of store and journal could not be read. <code>relay check</code>" in page
    assert f"<dt>Not read</dt><dd>{path} at " in page


def test_a_job_that_the_system_fails_is_one_line_and_other_jobs_go_on(
    spark: SparkSession, home: HomeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(inputs: Inputs) -> Tables:
        os.listdir(os.path.join(inputs.snapshot.home, "ledger.db"))
        raise AssertionError

    home.sent("1-a")
    home.write_store()
    monkeypatch.setitem(JOBS, "acks", dataclasses.replace(JOBS["acks"], make=make))
    result = relay_audit("run", "acks", "traffic", home=home.path)
    assert result.exit_code == 1
    failed = f"acks: could not run: {home.root / 'ledger.db'}: Not a directory"
    assert result.stderr.splitlines() == [failed]
    assert "traffic: OK (pairs 1, messages 1, 100 bytes)" in result.stdout.splitlines()


def test_a_lake_that_cannot_be_made_is_the_error_of_each_job(
    home: HomeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.sent("1-a")
    home.write_store()
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(run, "session", None)  # no Java is started
    wanted = ("reconcile", "traffic", "capacity")
    result = relay_audit("run", *wanted, "--lake", str(tmp_path / "file"), home=home.path)
    assert result.exit_code == 1
    said = f"could not run: {tmp_path / 'file'}: expected a directory, or a place for a new one"
    assert result.stderr.splitlines() == [f"{job}: {said}" for job in wanted[:2]]
    assert any(line.startswith("capacity: OK (") for line in result.stdout.splitlines())


def test_an_archive_that_is_damaged_is_named(spark: SparkSession, home: HomeBuilder) -> None:
    home.write_store()
    path = Path(home.write_store("store/archive/2026-01-30/000001.acomm"))
    path.write_bytes(b"ACOMM001")
    result = relay_audit("run", "reconcile", "--strict", home=home.path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"reconcile: could not run: {path} at 0: expected at least 136")


def test_a_home_that_is_not_whole_is_one_line(home: HomeBuilder, tmp_path: Path) -> None:
    with pytest.raises(HomeMissing, match=r"there is no relay home at /nowhere$"):
        relay_audit("run", home="/nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HomeMissing, match="it has neither config"):
        relay_audit("run", home=str(tmp_path / "empty"))
    (tmp_path / "empty/config.json").write_text("{}")
    with pytest.raises(LedgerError, match=r"there is no ledger at .*/empty/ledger\.db$"):
        relay_audit("run", home=str(tmp_path / "empty"))
    (home.root / "store").rmdir()
    with pytest.raises(RelayError, match=f"{home.path} has no store$"):
        relay_audit("run", home=home.path)
    with pytest.raises(RelayError, match="unknown job letters: expected one of reconcile, "):
        relay_audit("run", "letters", home=home.path)


def test_out_that_cannot_be_made_is_said_before_spark_starts(
    home: HomeBuilder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RelayError, match="file/out cannot be made: Not a directory"):
        relay_audit("run", "--out", str(tmp_path / "file" / "out"), home=home.path)


@pytest.mark.shows("audit 2.7")
def test_list_names_every_job() -> None:
    lines = relay_audit("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(JOBS)
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("arguments", [("list",), ("run",)])
def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(command, "NEEDED", ("pyspark_is_not_here",))
    with pytest.raises(RelayError, match="audits need pyspark_is_not_here") as caught:
        relay_audit(*arguments)
    assert "pip install '.[audit]'" in caught.value.hint


def test_the_command_line_is_there_before_spark_is() -> None:
    words = "import sys, relay.cli.audit; print({'pyspark', 'pyarrow'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", words], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.shows("audit 1.16")
def test_the_document_names_every_job_class_and_column() -> None:
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    tables = [schema for job in JOBS.values() for schema in job.tables.values()]
    for schema in (*tables, FINDING):
        assert [name for name in schema.names if f"`{name}`" not in text] == []
    assert [name for name in set(EXPECTED.values()) if f"| `{name}` |" not in text] == []
    assert [name for name in JOBS if f"## {name}\n" not in text] == []
