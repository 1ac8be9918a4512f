"""Rows of a ledger: consistent snapshots, every table as it is; the format `relay_ledger`."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType

from relay.audit import formats, lake_columns
from relay.audit.formats import LedgerSource
from relay.audit.session import explained
from relay.audit.sources.ledger_rows import read_rows, take_snapshot
from relay.base.clock import Clock
from relay.base.errors import LedgerError, RelayError, VersionError
from relay.base.home import Home
from relay.base.incidents import RefusalCode
from relay.daemon.ledger_backup import backup
from relay.ledger.schema import schema_sql
from tests.audit import ledger_writer
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.fakes import FakeClock
from tests.procs import environment, home_of


@pytest.fixture
def snapshot(home: HomeBuilder, tmp_path: Path) -> str:
    """A snapshot of a ledger with a row in every table."""
    home.sent("1-a", at_ns=START_NS + 1_999)
    home.seen("1-b")
    ledger = home.ledger
    ledger.add_rejections(
        [("alice", "x.msg", 1, 2, "its id is taken", "1-nack", START_NS, RefusalCode.ID_TAKEN)]
    )
    ledger.agents.register("alice", START_NS, 4711)
    ledger.set_state("epoch", "3", START_NS)
    ledger.agents.add_security_event("not_a_regular_file", "alice", "agents/x", "a link", START_NS)
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute(
            "INSERT INTO pending_operations (operation_type, payload, created_at) "
            "VALUES ('spawn', '{}', ?)",
            (START_NS,),
        )
        db.execute("INSERT INTO attachment_refs VALUES ('ab', '1-a', ?)", (START_NS,))
        db.execute(
            "INSERT INTO processes (name, state, cli, cwd, restart, requested_by, request_id, "
            "changed_at) VALUES ('w', 'idle', 'sh', '/', 'never', 'alice', '1-a', ?)",
            (START_NS,),
        )
        db.execute(
            "INSERT INTO offers (message_id, recipient, offer, session, state, offered_at) "
            "VALUES ('1-a', 'bob', 1, 'claude:1', 'offered', ?)",
            (START_NS,),
        )
        db.execute(
            "INSERT INTO rings VALUES ('bob', ?, 'claude:1', 'command', 1, 'ok')", (START_NS,)
        )
    return take_snapshot(str(home.root / "ledger.db"), str(tmp_path / "s.db"), Clock()).path


def rows_of(path: str, table: str, *columns: str) -> list[dict[str, Any]]:
    """The rows of a table, or columns of it."""
    known = lake_columns.LEDGER[table]
    wanted = pa.schema([known.field(name) for name in columns]) if columns else known
    return pa.Table.from_batches(read_rows(path, table, wanted), wanted).to_pylist()


@pytest.mark.shows("audit 1.16")
def test_schemas_are_those_of_schema_sql() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(schema_sql())
        names = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = {name for (name,) in names if not name.startswith("sqlite_")}
        assert set(formats.LEDGER) == tables
        for table, schema in formats.LEDGER.items():
            columns = db.execute(f"PRAGMA table_info({table})").fetchall()
            assert schema.names == [column[1] for column in columns], table
            for field, (_, name, kind, not_null, _, key) in zip(schema, columns, strict=True):
                always = bool(not_null) or (kind == "INTEGER" and bool(key))
                assert field.nullable is not always, f"{table}.{name}"
                assert isinstance(field.dataType, StringType) is (kind == "TEXT"), name


@pytest.mark.shows("audit 1.10")
def test_every_table_is_read_as_it_is(spark: SparkSession, snapshot: str) -> None:
    counts = {}
    for table, schema in formats.LEDGER.items():
        frame = spark.read.format("relay_ledger").option("table", table).load(snapshot)
        assert frame.schema.names == schema.names
        with contextlib.closing(sqlite3.connect(snapshot)) as db:
            (expected,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        counts[table] = (len(frame.collect()), expected)
    assert all(found == expected > 0 for found, expected in counts.values()), counts


def test_values_keep_their_types_and_nulls(snapshot: str) -> None:
    rows = {row["message_id"]: row for row in rows_of(snapshot, "messages")}
    done, new = rows["1-a"], rows["1-b"]
    assert done["discovered_at"] == datetime(2026, 1, 31, 9, 30, 0, 1, UTC)
    assert (done["file_mtime_ns"], done["status"]) == (START_NS + 1_999, "archived")
    assert (new["processed_at"], new["last_error"], new["retry_count"]) == (None, None, 0)
    (delivery,) = rows_of(snapshot, "deliveries", "ack_status", "recipient")
    assert tuple(delivery.values()) == (None, "bob")


def test_nulls_longer_than_what_types_are_guessed_from(home: HomeBuilder, tmp_path: Path) -> None:
    with home.ledger.transaction():
        for number in range(1500):
            home.ledger.agents.add_security_event("late", None, None, None, number)  # type: ignore[arg-type]
        home.ledger.agents.add_security_event("late", "alice", "p", "d", START_NS)
    taken = take_snapshot(str(home.root / "ledger.db"), str(tmp_path / "s.db"), Clock())
    rows = rows_of(taken.path, "security_events", "agent", "at")
    named = [row for row in rows if row["agent"] is not None]
    assert named == [{"agent": "alice", "at": datetime(2026, 1, 31, 9, 30, tzinfo=UTC)}]
    assert len(rows) == 1501


def _messages_in(path: str) -> int:
    with contextlib.closing(sqlite3.connect(path)) as ledger:
        return int(ledger.execute("SELECT count(*) FROM messages").fetchone()[0])


def test_a_ledger_that_is_written_to_is_read_at_one_instant(
    home: HomeBuilder, tmp_path: Path
) -> None:
    path = str(home.root / "ledger.db")
    home.close()
    writer = subprocess.Popen(
        [sys.executable, ledger_writer.__file__, path],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        sizes: list[list[int]] = []
        for number in range(3):
            while sizes and _messages_in(path) == sizes[-1][0]:
                assert writer.poll() is None
            taken = take_snapshot(path, str(tmp_path / f"{number}.db"), Clock())
            tables = ("messages", "deliveries")
            sizes.append([len(rows_of(taken.path, table, "message_id")) for table in tables])
            assert writer.poll() is None
    finally:
        writer.kill()
        writer.communicate()
    for messages_, deliveries_ in sizes:
        assert messages_ == deliveries_ and messages_ % ledger_writer.GROUP == 0
    assert sizes[0] < sizes[1] < sizes[2]  # the writer went on after each


def test_a_snapshot_is_private_and_says_when(home: HomeBuilder, tmp_path: Path) -> None:
    clock = FakeClock(START_NS)
    taken = take_snapshot(str(home.root / "ledger.db"), str(tmp_path / "s.db"), clock)
    assert taken.taken_ns == START_NS
    assert os.stat(taken.path).st_mode & 0o077 == 0
    assert sorted(os.listdir(tmp_path)) == ["home", "s.db"]


def test_names_that_a_uri_would_misread(tmp_path: Path) -> None:
    builder = HomeBuilder(tmp_path / "50% #1? x")
    builder.seen("1-a")
    path = str(builder.root / "ledger.db")
    taken = take_snapshot(path, str(builder.root / "s?#.db"), Clock())
    builder.close()
    assert len(rows_of(taken.path, "messages")) == 1


def test_what_cannot_be_taken(home: HomeBuilder, tmp_path: Path) -> None:
    path = str(home.root / "ledger.db")
    with pytest.raises(LedgerError, match="there is no ledger at"):
        take_snapshot(str(tmp_path / "none.db"), str(tmp_path / "s.db"), Clock())
    with pytest.raises(LedgerError, match=r"cannot make a snapshot of"):
        take_snapshot(path, str(tmp_path / "nowhere" / "s.db"), Clock())
    (tmp_path / "text.db").write_text("this is no database, and long enough to be sure of it")
    with pytest.raises(LedgerError, match=r"text\.db"):
        take_snapshot(str(tmp_path / "text.db"), str(tmp_path / "s.db"), Clock())
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(VersionError, match="found 99"):
        take_snapshot(path, str(tmp_path / "s2.db"), Clock())


def test_a_wrong_table_is_one_line(spark: SparkSession, snapshot: str) -> None:
    with pytest.raises(RelayError, match=r"^table: expected one of messages, "), explained():
        spark.read.format("relay_ledger").option("table", "letters").load(snapshot).collect()


def test_one_ledger_is_read_at_a_time(snapshot: str) -> None:
    source = LedgerSource({"paths": json.dumps([snapshot, "b.db"])})
    with pytest.raises(RelayError, match=r"expected one ledger, got 2: .*, b\.db"):
        source.reader(source.schema())


def test_other_files_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for path, line in (
        (str(tmp_path / "text"), "is not a SQLite file"),
        (str(tmp_path / "none"), "No such file or directory"),
    ):
        with pytest.raises(RelayError, match=line), explained():
            spark.read.format("relay_ledger").load(path).collect()


@pytest.mark.shows("audit 1.10")
def test_a_ledger_in_use_is_read_at_one_instant(spark: SparkSession, home: HomeBuilder) -> None:
    path = str(home.root / "ledger.db")

    def count(table: str, word: str = "") -> int:
        reader = spark.read.format("relay_ledger").option("table", table)
        return reader.option("snapshot", word).load(path).count()

    home.sent("1-a")
    assert count("messages") == 1
    home.sent("1-b")
    home.sent("1-c")
    # of all tables that the application reads, and of another word now
    assert (count("messages"), count("deliveries")) == (1, 1)
    assert (count("messages", "later"), count("deliveries", "later")) == (3, 3)
    there = [name for name in sorted(os.listdir(home.root)) if "." in name]
    assert there == ["ledger.db", "ledger.db-shm", "ledger.db-wal"]


@pytest.mark.shows("audit 1.10")
def test_a_backup(tmp_path: Path) -> None:
    with Home(str(home_of(tmp_path / "home", "alice"))) as opened:
        home = HomeBuilder(tmp_path / "home")
        home.sent("1-a")
        backup(opened, str(tmp_path / "kept.db"))
        home.close()
    assert [row["message_id"] for row in rows_of(str(tmp_path / "kept.db"), "messages")] == ["1-a"]
    assert "kept.db-wal" not in os.listdir(tmp_path)


@pytest.mark.parametrize("wrong", ["file_size = 'large'", "discovered_at = 1.5"])
def test_another_type_in_a_column_of_numbers_is_one_line(
    home: HomeBuilder, tmp_path: Path, wrong: str
) -> None:
    home.seen("1-a")
    path = str(home.root / "ledger.db")
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE messages SET {wrong}")
    taken = take_snapshot(path, str(tmp_path / "s.db"), Clock())
    with pytest.raises(RelayError) as caught:
        rows_of(taken.path, "messages")
    assert str(caught.value).startswith(f"{taken.path}, table messages: ")
    assert "\n" not in str(caught.value)
