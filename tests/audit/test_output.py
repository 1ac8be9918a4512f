"""The folder of a run: one run's tables and their report, or no report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from relay.audit import jobs
from relay.audit.output import out_folder, write_page
from relay.audit.summary import JobReport, Report
from relay.base import fsio
from relay.base.errors import RelayError
from relay.base.home import Home
from tests.audit.home_builder import HomeBuilder
from tests.audit.printed import parquet, relay_audit
from tests.audit.report_data import write_table
from tests.integration.test_tail_and_top import screens, shape
from tests.procs import environment


def summary(**tables: list[str]) -> Report:
    """What a run of these jobs would say."""
    jobs = {name: JobReport(name, tables=of) for name, of in tables.items()}
    return Report("/home/you", "2026-01-31T09:30:00Z", 30.0, 7.0, [], jobs)


def publish(path: Path, word: str, **tables: list[str]) -> None:
    """A run that wrote this word into each of its tables."""
    with out_folder(str(path)) as folder:
        for names in tables.values():
            for name in names:
                write_table(Path(folder.tables), name, [{"word": word}])
        folder.publish(summary(**tables))


def words(path: Path) -> dict[str, str]:
    """Table -> its word."""
    return {
        entry.name: str(parquet(entry)[0]["word"])
        for entry in path.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    }


def test_tables_of_the_run_before_go_and_files_of_others_stay(tmp_path: Path) -> None:
    tmp_path = tmp_path / "out"
    publish(tmp_path, "old", reconcile=["reconcile"], gone=["gone"])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mine").mkdir()
    write_table(tmp_path / "mine", "x", [{"word": "mine"}])
    publish(tmp_path, "new", traffic=["traffic"])
    assert sorted(os.listdir(tmp_path)) == [
        ".lock",
        "mine",
        "notes.txt",
        "report.html",
        "summary.json",
        "traffic",
    ]
    assert parquet(tmp_path / "traffic") == [{"word": "new"}]
    assert list(json.loads((tmp_path / "summary.json").read_text())["jobs"]) == ["traffic"]


def test_until_it_is_published_the_run_before_is_whole(tmp_path: Path) -> None:
    tmp_path = tmp_path / "out"
    publish(tmp_path, "old", reconcile=["reconcile"])
    before = (tmp_path / "report.html").read_bytes()
    with pytest.raises(KeyboardInterrupt), out_folder(str(tmp_path)) as folder:
        write_table(Path(folder.tables), "reconcile", [{"word": "new"}])
        raise KeyboardInterrupt
    assert words(tmp_path) == {"reconcile": "old"}
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [".lock", "reconcile", "report.html", "summary.json"]


# Each case in a child of its own, of a process without threads: nothing of it is put in order.
KILLED = """
import json, os, sys
from pathlib import Path
from relay.base import fsio
from tests.audit.test_output import publish
real = {"rename": os.rename, "unlink": os.unlink}
def killed(path, step, nth):
    seen = 0
    def count(operation, *rest):
        nonlocal seen
        seen += operation == step
        if seen == nth:
            os._exit(9)
    def counted(operation):
        def call(*given, **named):
            count(operation)
            real[operation](*given, **named)
        return call
    fsio.fault, os.rename, os.unlink = count, counted("rename"), counted("unlink")
    publish(path, "new", reconcile=["reconcile"])
    os._exit(0)
for step in ("unlink", "rename", "create", "sync"):
    for nth in range(1, 20):
        path = Path(sys.argv[1]) / f"{step}{nth}"
        publish(path, "old", reconcile=["reconcile"], traffic=["traffic"])
        child = os.fork() or killed(path, step, nth)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([str(path), code]))
        if code == 0:
            break
"""


@pytest.mark.shows("audit 3.1")
def test_killed_at_any_step_no_report_speaks_of_other_tables(tmp_path: Path) -> None:
    # since Python 3.12 a fork beside threads, here those of pyarrow, is a warning
    command_line = [sys.executable, "-W", "ignore:::__main__", "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command_line, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for _, code in cases].count(0) == 4
    assert [code for _, code in cases].count(9) == len(cases) - 4 > 9
    spoke = set()
    for name, _ in cases:
        path = Path(name)
        there = words(path)
        told = json.loads((path / "summary.json").read_text()) if has(path, "summary") else {}
        word = "old" if "traffic" in told.get("jobs", {}) else "new"
        assert all(there[job] == word for job in told.get("jobs", {})), name
        assert told or not has(path, "report"), name
        spoke.add(word if told else "nothing")
        publish(path, "after", traffic=["traffic"])  # and the next run is as any other
        assert words(path) == {"traffic": "after"}
        assert [left for left in os.listdir(path) if left.startswith(".")] == [".lock"]
    assert spoke == {"old", "new", "nothing"}


def has(path: Path, name: str) -> bool:
    """True when the folder has the summary or the report."""
    return any(entry.stem == name for entry in path.glob(f"{name}.*") if ".tmp" not in entry.name)


def test_what_a_killed_run_left_goes(tmp_path: Path) -> None:
    (tmp_path / ".unfinished" / "reconcile").mkdir(parents=True)
    (tmp_path / ".lock").touch()
    publish(tmp_path, "new", traffic=["traffic"])
    assert sorted(os.listdir(tmp_path)) == [".lock", "report.html", "summary.json", "traffic"]


@pytest.mark.shows("audit 2.5")
def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with out_folder(str(tmp_path)) as folder:
        with pytest.raises(RelayError, match=f"another run writes into {tmp_path}"):
            publish(tmp_path, "second", traffic=["traffic"])
        write_table(Path(folder.tables), "traffic", [{"word": "first"}])
        folder.publish(summary(traffic=["traffic"]))
    assert words(tmp_path) == {"traffic": "first"}


def test_a_folder_of_something_else_is_refused_and_left(tmp_path: Path) -> None:
    """A home has a folder named as a table, with the mail of its agents, and a lock."""
    Home.create(str(tmp_path / "home")).close()
    (tmp_path / "damaged" / "agents").mkdir(parents=True)
    for name in ("ledger.db", ".lock"):  # its config.json was lost
        (tmp_path / "damaged" / name).touch()
    (tmp_path / "project" / "agents").mkdir(parents=True)
    (tmp_path / "project" / "agents" / "mine.md").touch()
    shutil.copytree(tmp_path / "project", tmp_path / "locked")
    for name in (".lock", "README", "summary.json"):
        (tmp_path / "locked" / name).touch()
    refused = {"home": "is a relay home", "damaged": "is a relay home"}
    refused |= dict.fromkeys(("project", "locked"), "has files of something else")
    for name, what in refused.items():
        path = tmp_path / name
        before = sorted(path.rglob("*"))
        with pytest.raises(RelayError, match=f"{path} {what}"):
            publish(path, "new", agents=["agents"])
        assert sorted(path.rglob("*")) == before


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    """The report before was removed, then the run ended: the link could not be synced."""
    (tmp_path / "monday").mkdir()
    (tmp_path / "latest").symlink_to("monday")
    publish(tmp_path / "latest", "new", traffic=["traffic"])
    assert words(tmp_path / "monday") == {"traffic": "new"}
    assert write_page(str(tmp_path / "latest")) == str(tmp_path / "monday/report.html")
    (tmp_path / "none").symlink_to("not-mounted")
    with pytest.raises(RelayError, match="none cannot be made"):
        publish(tmp_path / "none", "new", traffic=["traffic"])
    assert not (tmp_path / "not-mounted").exists()


def test_a_run_that_failed_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    for path, left in ((tmp_path / "new", None), (tmp_path, [".lock"])):
        with pytest.raises(ZeroDivisionError), out_folder(str(path)):
            raise ZeroDivisionError
        assert (os.listdir(path) if path.exists() else None) == left


def test_a_full_disk_is_one_line_and_leaves_no_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(operation: str, name: str) -> None:
        if operation == "write":
            raise OSError(28, "No space left on device", name)

    monkeypatch.setattr(fsio, "fault", full)
    with pytest.raises(RelayError, match=r"summary\.json cannot be made: No space left on device$"):
        publish(tmp_path / "out", "new", traffic=["traffic"])
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "traffic"]


def test_report_makes_the_page_again_without_spark(tmp_path: Path) -> None:
    publish(tmp_path, "new", traffic=["traffic"])
    page = tmp_path / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert relay_audit("report", str(tmp_path)).stdout == f"{page}\n"
    assert page.read_bytes() == before
    with pytest.raises(RelayError, match=r"summary\.json cannot be read: No such file"):
        relay_audit("report", str(tmp_path / "nowhere"))
    (tmp_path / "summary.json").write_text('{"home": 5}')
    with pytest.raises(RelayError, match=r"summary\.json is not a valid summary of an audit: "):
        relay_audit("report", str(tmp_path))


def test_a_run_shows_what_the_documents_show_and_writes_a_report_of_its_rows(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, waiting = "1795282741394303997-b7b5d219c917fdeb", "1795282741776018971-202acec26ccbc461"
    home.sent(lost)
    home.stored.clear()
    home.seen(waiting, sender="bob", to="alice")
    home.deliver(waiting, ("alice",), written_after_ms=None)
    home.finish(waiting)
    home.keep(waiting, sender="bob", to="alice")
    home.write_store()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "JOBS", {name: jobs.JOBS[name] for name in ("reconcile", "traffic")})
    result = relay_audit("run", "--home", home.path, "--out", "audits/today")
    assert result.exit_code == 3, result.output
    assert shape(result.stdout) == screens()["audit run --out audits/today"]
    page = (tmp_path / "audits" / "today" / "report.html").read_text()
    assert "2 findings: 1 error, 1 warning." in page
    assert f"<code>relay trace {lost}</code>" in page
    assert "1 pair, 1 message. The busiest: alice to bob" in page


def test_the_folder_is_private(tmp_path: Path) -> None:
    publish(tmp_path / "out", "new", traffic=["traffic"])
    for path in (tmp_path / "out", tmp_path / "out" / "report.html"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_table_of_a_summary_is_never_outside_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    out = tmp_path / "out"
    publish(out, "old", traffic=["traffic"])
    told = json.loads((out / "summary.json").read_text())
    told["jobs"]["traffic"]["tables"] = ["../outside", "..", str(outside)]
    (out / "summary.json").write_text(json.dumps(told))
    publish(out, "new", traffic=["traffic"])
    assert outside.is_dir()
