"""Own checks: SQL files as jobs, and each that cannot be used as one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from relay.audit import own_checks
from relay.audit.jobs import JOBS
from relay.base.errors import InvalidName, RelayError
from relay.base.home import Home
from tests.audit.home_builder import HomeBuilder
from tests.audit.journal_builder import JournalBuilder, sent
from tests.audit.printed import parquet, relay_audit
from tests.audit.test_spark_errors import PATIENCE_S
from tests.procs import environment

WARNING = "-- severity: warning\n"
LARGE = """\
-- Messages of the largest files
-- severity: warning
-- advice: ask their sender to attach a file
WITH large AS (SELECT * FROM messages WHERE file_size >= 100) -- bytes
SELECT message_id, agent_name AS Agent, target AS route, file_path AS path, file_size AS size,
  last_error AS `why.not`
FROM large WHERE message_id <> '1-a' ORDER BY 1;
"""
# Name -> (file, what is said); every one is of its own kind.
BROKEN = {
    "no_severity": ("-- Nothing\nSELECT 1", "severity: expected error or warning, got nothing"),
    "severity": ("-- severity: bad\nSELECT 1", "severity: expected error or warning, got bad"),
    "empty": (WARNING, "expected a SELECT, got nothing"),
    "drop": (f"{WARNING}DROP TABLE x", "expected a SELECT, got DROP"),
    "insert": (f"{WARNING}/* a */ (INSERT INTO x SELECT 1)", "expected a SELECT, got INSERT"),
    "with_insert": (f"{WARNING}WITH y AS (SELECT 1) INSERT INTO x SELECT 1", "line 2: "),
    "two": (f"{WARNING}SELECT 1; DROP TABLE x", "line 2: "),
    "typo": (f"{WARNING}SELECT 1\nFORM messages WHERE", "line 3: Syntax error at or near "),
    "table": (f"{WARNING}SELECT 1\nFROM mesages", "line 3: The table or view `mesages` cannot "),
    "column": (f"{WARNING}SELECT nothing FROM messages", "line 2: A column, variable, or "),
    "without_job": (f"{WARNING}SELECT * FROM result_acks", "result_acks needs the job acks "),
    "at_work": (f"{WARNING}SELECT CAST(message_id AS INT) FROM messages", "Spark: "),
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[HomeBuilder]:
    """A home with a folder for own checks; its mode is 700."""
    Home.create(str(tmp_path / "home"), b"{}").close()
    builder = HomeBuilder(tmp_path / "home")
    (builder.root / "audit.d").mkdir()
    yield builder
    builder.close()


def put(home: HomeBuilder, name: str, text: str) -> Path:
    """Write a file of ``audit.d``."""
    path = home.root / "audit.d" / f"{name}.sql"
    path.write_text(text)
    return path


def test_rows_are_findings_and_broken_checks_are_a_line_each(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    for name in ("1-a", "1-b", "1-c"):
        home.sent(name)
    home.write_store()
    put(home, "large", LARGE)
    put(home, "none", "-- severity: error\nSELECT 1 FROM messages WHERE false")
    put(home, "busy", "-- severity: error\nSELECT sender AS agent, messages FROM result_traffic")
    put(home, "bytes", "-- severity: error\nSELECT unhex('61ff') AS message_id, unhex('fe') AS raw")
    more = tmp_path / "more"
    more.mkdir()
    text = """\
-- severity: error
SELECT s.relay_id AS message_id, decode(s.content, 'utf-8') AS body, count(j.event) AS records
FROM store_messages AS s LEFT JOIN journal AS j ON s.relay_id = j.relay_id GROUP BY ALL"""
    (more / "body.sql").write_text(text)
    for name, (broken, _) in BROKEN.items():
        put(home, name, broken)
    out = tmp_path / "out"
    run = ("run", "traffic", "own", "--checks", str(more), "--json", "--out", str(out))
    result = relay_audit(*run, home=home.path)

    assert result.exit_code == 1
    lines = dict(line.split(": could not run: ", 1) for line in result.stderr.splitlines())
    assert set(lines) == {f"own.{name}" for name in BROKEN}
    for name, (_, said) in BROKEN.items():
        assert lines[f"own.{name}"].startswith(f"{home.root}/audit.d/{name}.sql: {said}"), name
    summary = json.loads(result.stdout)
    jobs = summary["jobs"]
    assert jobs["traffic"]["error"] is None
    assert jobs["own.large"]["findings"] == {"own.large": 2}
    assert (jobs["own.large"]["warnings"], jobs["own.large"]["counts"]) == (2, {"rows": 2})
    assert jobs["own.large"]["advice"] == "ask their sender to attach a file"
    assert jobs["own.none"]["findings"] == {}

    found = {row["check"]: row for row in parquet(out / "findings") if row["message_id"] != "1-c"}
    assert set(found) == {"own.large", "own.busy", "own.body", "own.bytes"}
    # Bytes that are no text: they had ended the run, and nothing of it was written.
    assert found["own.bytes"]["message_id"] == "a\ufffd"
    assert found["own.bytes"]["detail"] == [("raw", "\ufffd")]
    large = found["own.large"]
    assert (large["message_id"], large["agent"], large["route"]) == ("1-b", "alice", "bob")
    assert large["path"] == "archive/2026-01-31/alice/1-b.msg"
    assert large["detail"] == [("size", "100")]  # what is NULL is left out
    assert (found["own.busy"]["agent"], found["own.busy"]["detail"]) == (
        "alice",
        [("messages", "3")],
    )
    assert dict(found["own.body"]["detail"]) == {"body": "hello", "records": "0"}
    page = (out / "report.html").read_text()
    assert "2 rows: Messages of the largest files" in page
    assert "ask their sender to attach a file" in page
    assert spark.catalog.listTables() == []  # no view is left in the session


def test_over_a_damaged_journal_none_is_called_fine(spark: SparkSession, home: HomeBuilder) -> None:
    journal = JournalBuilder(home.root)
    (first,) = journal.say(sent(1))
    journal.say(sent(2))
    journal.close()
    (path,) = (journal.dir / "segments").iterdir()
    data = bytearray(path.read_bytes())
    data[52 + first + 40] ^= 1
    path.write_bytes(data)
    home.write_store()
    put(home, "odd", f"{WARNING}SELECT relay_id AS message_id FROM journal WHERE event = 'Odd'")
    done = relay_audit("run", "own.odd", "--home", home.path)
    assert done.exit_code == 1
    assert "own.odd: not all read (rows 0)" in done.stdout.splitlines()
    assert done.stderr.startswith(f"not read: {path} at 52: expected crc32")
    strict = relay_audit("run", "own.odd", "--strict", "--home", home.path)
    assert strict.exit_code == 1 and "own.odd: could not run: " in strict.stderr


def test_all_run_without_names_and_few_with_them(home: HomeBuilder, tmp_path: Path) -> None:
    for name in ("a", "b"):
        put(home, name, f"{WARNING}SELECT 1")
    (home.root / "audit.d" / "notes.txt").write_text("")
    more = tmp_path / "more"
    more.mkdir()
    (more / "c.sql").write_text(f"{WARNING}SELECT 1")

    def chosen(*names: str, folder: str | None = None) -> list[str]:
        return [job.name for job in own_checks.select(home.path, folder, names)]

    assert chosen() == ["own.a", "own.b"]
    assert chosen("traffic") == []
    assert chosen("own") == ["own.a", "own.b"]
    assert chosen("traffic", "own.b") == ["own.b"]
    assert chosen("traffic", folder=str(more)) == ["own.c"]
    with pytest.raises(InvalidName, match=r"unknown job own\.bb: there is no file") as caught:
        chosen("own.bb")
    assert caught.value.hint == "did you mean own.b?"
    with pytest.raises(InvalidName, match="unknown job own: there is no file for it in "):
        own_checks.select(str(tmp_path), None, ("own",))


def test_list_shows_them_with_their_descriptions(home: HomeBuilder) -> None:
    put(home, "large", LARGE)
    put(home, "bare", f"{WARNING}SELECT 1")
    put(home, "drop", f"{WARNING}DROP TABLE x")
    lines = relay_audit("list", "--home", home.path).stdout.splitlines()
    assert not [line for line in lines if "_" in line.partition(" ")[2]]  # words, no identifiers
    assert lines[len(JOBS) :] == [
        "own.bare      bare",
        "own.drop      cannot run: expected a SELECT, got DROP",
        "own.large     Messages of the largest files",
    ]


def reason(home: HomeBuilder, name: str, folder: Path | None = None) -> str:
    """Tell why the job of a file cannot run."""
    job = own_checks.find(home.path, str(folder) if folder else None)[name]
    with pytest.raises(RelayError) as caught:
        job.make(None)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_file_or_home_of_others_is_refused(
    home: HomeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(home, "mine", f"{WARNING}SELECT 1")
    os.symlink(path, path.with_name("link.sql"))
    assert "is not a regular file but a link" in reason(home, "own.link")
    os.link(path, tmp_path / "twice.sql")
    assert "has 2 hard links" in reason(home, "own.mine")
    (tmp_path / "twice.sql").unlink()
    put(home, "two words", f"{WARNING}SELECT 1")
    assert reason(home, "own.two_words") == "its name may have letters, digits, - and _ only"
    put(home, "latin", "").write_bytes(WARNING.encode() + b"SELECT '\xe9'")
    assert reason(home, "own.latin") == "not UTF-8 text"
    more = tmp_path / "more"
    more.mkdir()
    (more / "mine.sql").write_text(f"{WARNING}SELECT 2")
    assert reason(home, "own.mine", more) == f"{path} has the same name"
    home.root.chmod(0o755)
    assert reason(home, "own.mine") == "the home is open to other users, mode 755"
    home.root.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert reason(home, "own.mine") == f"the home belongs to user {os.getuid()}"
    (more / "mine.sql").rename(more / "other.sql")
    assert f"user {os.getuid()}" in reason(home, "own.other", more)


# In a process of its own: what ends Spark would end that of all tests.
LIMITED = """
import sys
from relay.audit import run
from relay.cli import main
run.OWN_LIMIT_S = int(sys.argv.pop(1))
main(["audit", "run", "own", "--master", "local[1]", "--json", *sys.argv[1:]])
"""


def run_own(home: HomeBuilder, tmp_path: Path, limit_s: int) -> tuple[dict[str, Any], list[str]]:
    """The jobs of a run, and the lines of stderr."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit_s), "--home", home.path],
        env=environment(SPARK_DRIVER_MEMORY="512m"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)["jobs"], done.stderr.splitlines()


def test_a_check_that_ends_spark_or_never_ends_is_blamed_and_the_next_ones_run(
    home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a")
    home.write_store()
    words = "SELECT repeat(CAST(id AS STRING), 2000000000) AS w FROM range(1)"
    put(home, "b_hungry", f"{WARNING}{words}")
    pause = "java_method('java.lang.Thread', 'sleep', id % 2 + 10)"  # milliseconds a row
    long = f"SELECT id FROM range(10000000) WHERE {pause} = 'never'"
    path = put(home, "c_long", f"{WARNING}{long}")
    for name in ("a_before", "d_behind"):
        put(home, name, f"{WARNING}SELECT message_id FROM messages")
    jobs, lines = run_own(home, tmp_path, 30)
    hungry, ended = lines
    assert hungry == (
        f"own.b_hungry: could not run: {home.root}/audit.d/b_hungry.sql: Spark ran out of memory: "
        "SPARK_DRIVER_MEMORY is 512m; SPARK_DRIVER_MEMORY=8g gives it more; fewer jobs need less"
    )
    said = f"own.c_long: could not run: {path}: it was cancelled after 30 s; make it read less: "
    assert ended.startswith(said)
    assert {name: job["warnings"] for name, job in jobs.items()} == {
        "own.a_before": 1,
        "own.b_hungry": 0,
        "own.c_long": 0,
        "own.d_behind": 1,
    }
