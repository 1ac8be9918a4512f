"""``relay ledger query``: reading the ledger by SQL."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base.errors import EXIT_OK, EXIT_PIPE_CLOSED, EXIT_STATE, EXIT_USAGE
from relay.base.home import LEDGER, Home
from tests.box import Box
from tests.procs import PATIENCE_S, environment, relay, until

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
HOSTILE = "char(27) || '[2J' || char(8238)"


def ask(box: Box, *words: str) -> str:
    """The output of a command that succeeds."""
    done = relay("ledger", *words, home=box.root)
    assert (done.returncode, done.stderr) == (EXIT_OK, "")
    return done.stdout


def began(box: Box, sql: str, *options: str) -> subprocess.Popen[bytes]:
    """A query in a process of its own, whose output nobody has read yet."""
    return subprocess.Popen(
        [sys.executable, "-m", "relay", "--home", str(box.root), "ledger", "query", sql, *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def refusal(box: Box, *words: str) -> str:
    """The one line that a wrong command is answered with."""
    done = relay("ledger", *words, home=box.root)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("relay: ").rstrip()


@pytest.mark.shows("ready 3.4")
def test_the_formats(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    sql = "SELECT agent_name, target, NULL AS none, x'00ff' AS bytes, 'a,b' AS text FROM messages"
    header, *rows = ask(box, "query", sql).splitlines()
    assert header.split() == ["agent_name", "target", "none", "bytes", "text"]
    assert [row.split() for row in rows] == [["alice", "bob", "X'00ff'", "a,b"]]
    assert ask(box, "query", sql, "--table") == ask(box, "query", sql)
    assert list(csv.reader(io.StringIO(ask(box, "query", sql, "--csv")))) == [
        header.split(),
        ["alice", "bob", "", "X'00ff'", "a,b"],
    ]
    assert json.loads(ask(box, "query", sql, "--json")) == {
        "agent_name": "alice",
        "target": "bob",
        "none": None,
        "bytes": {"$base64": True, "encoded": "AP8="},
        "text": "a,b",
    }


def test_special_values(box: Box) -> None:
    rows = ask(
        box, "query", "SELECT 1 AS n, 2 AS n, 9e999 AS much, CAST(x'ff' AS TEXT) AS t", "--json"
    )
    assert json.loads(rows) == {"n": 1, "n_2": 2, "much": "inf", "t": "\ufffd"}
    assert ask(box, "query", "SELECT 1e15 + 0.5 AS x, '007' AS y").splitlines()[1].split() == [
        "1000000000000000.5",
        "007",
    ]
    assert "\\x1b[2J\\u202e" in ask(box, "query", f"SELECT {HOSTILE}")
    line = ask(box, "query", f"SELECT {HOSTILE} AS x", "--json")
    assert line.rstrip().isprintable() and json.loads(line) == {"x": "\x1b[2J\u202e"}


def test_without_rows(box: Box) -> None:
    sql = "SELECT message_id FROM messages"
    assert ask(box, "query", sql).split()[0] == "message_id"
    assert ask(box, "query", sql, "--csv") == "message_id\n"
    assert ask(box, "query", sql, "--json") == ""


WRITING = (
    "DELETE FROM messages",
    "WITH one AS (SELECT 1) INSERT INTO audit_log (at) SELECT * FROM one",
    "EXPLAIN DELETE FROM messages",
    "CREATE TEMP TABLE more (x)",
    "ATTACH '{folder}/new.db' AS new",
    "VACUUM",
    "VACUUM INTO '{folder}/new.db'",
    "BEGIN IMMEDIATE",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA wal_checkpoint(TRUNCATE)",
    "PRAGMA writable_schema = 1",
)
WRONG = {
    " -- nothing": "expected a statement that reads, got an empty one",
    "SELEC 1": 'near "SELEC": syntax error',
    "SELECT 1; SELECT 2": "expected one statement, got several",
    "SELECT ?": "Incorrect number of bindings supplied",
    "SELECT zeroblob(2000000000)": "string or blob too big",
    "SELECT * FROM letters": (
        'no such table: letters; `relay --home HOME ledger query "select sql from sqlite_ma'
    ),
}


def test_a_statement_that_writes_is_refused(box: Box, tmp_path: Path) -> None:
    before = box.sql("SELECT count(*) FROM audit_log")
    for sql in WRITING:
        statement = sql.format(folder=tmp_path)
        answer = refusal(box, "query", statement)
        assert answer.startswith("expected a statement that reads, got ")
        assert statement[:30] in answer
        assert box.sql("SELECT count(*) FROM audit_log") == before
        assert not (tmp_path / "new.db").exists()


def test_a_statement_that_is_wrong(box: Box) -> None:
    for sql, answer in WRONG.items():
        assert refusal(box, "query", sql).startswith(answer.replace("HOME", str(box.root)))


def test_what_reads_is_run(box: Box) -> None:
    for sql in ("PRAGMA user_version", "PRAGMA table_info(messages)", "EXPLAIN SELECT 1"):
        assert ask(box, "query", sql)


@pytest.mark.parametrize("style", ["--json", "--csv", "--table"])
def test_an_endless_result_ends_with_the_pipe(box: Box, style: str) -> None:
    sql = ENDLESS.replace("SELECT i FROM", "SELECT i, hex(zeroblob(9999)) FROM")
    with began(box, sql, style) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(100)
        process.stdout.close()
        assert process.wait(PATIENCE_S) == EXIT_PIPE_CLOSED
        assert process.stderr.read() == b""


def test_interrupted_within_one_row(box: Box) -> None:
    """^C ends a statement that would never return its first row."""
    sql = ENDLESS.replace("SELECT i FROM", "SELECT count(*) FROM")
    with began(box, sql) as process:
        until(lambda: handles_no_interrupt(process.pid))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == -signal.SIGINT
        assert process.stderr is not None and process.stderr.read() == b""


def handles_no_interrupt(pid: int) -> bool:
    """Whether a Python process that has the ledger open left SIGINT to the kernel."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    is_open = "ledger.db" in Path(f"/proc/{pid}/maps").read_text()  # its -shm
    return is_open and not caught >> (signal.SIGINT - 1) & 1


def test_a_result_in_a_pager_holds_no_transaction(box: Box) -> None:
    """The WAL can be truncated while a pager shows the rows."""
    for _ in range(20):
        box.send("alice", "TO: bob\n\nhi")
    sql = "SELECT a.*, b.* FROM audit_log AS a, audit_log AS b"
    with began(box, sql) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # then the pipe is full
        box.send("alice", "TO: bob\n\nhi")
        with contextlib.closing(sqlite3.connect(box.path(LEDGER), timeout=0)) as db, db:
            assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        db.close()
        process.stdout.read()
        assert process.wait(PATIENCE_S) == EXIT_OK


def test_the_schema_is_a_query_too(box: Box) -> None:
    made = sqlite3.connect(":memory:")
    printed = ask(box, "query", "select sql from sqlite_master", "--json").splitlines()
    rows = map(json.loads, printed)
    own = [row["sql"] for row in rows if row["sql"] and "TABLE sqlite_" not in row["sql"]]
    made.executescript(";".join(own))
    names = "SELECT type, name FROM sqlite_master ORDER BY type, name"
    assert made.execute(names).fetchall() == box.sql(names)
    made.close()


def test_without_a_home_or_a_ledger(tmp_path: Path) -> None:
    Home.create(str(tmp_path / "home"), b"{}").close()
    done = relay("ledger", "query", "SELECT 1", home=tmp_path / "nowhere")
    assert done.returncode == EXIT_STATE
    done = relay("ledger", "query", "SELECT 1", home=tmp_path / "home")
    assert done.returncode == EXIT_STATE and "there is no ledger at" in done.stderr
