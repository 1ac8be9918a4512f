"""A ledger of an earlier schema, changed in one step; and one that was changed by hand, found."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base.errors import LedgerError
from relay.ledger import file as ledger_file
from relay.ledger.check import check, check_file
from relay.ledger.file import SCHEMA_VERSION
from relay.ledger.ledger import Ledger
from relay.ledger.schema import STEPS
from tests.disk import failing, killed_at, steps_of
from tests.ledger.support import Look, record

pytestmark = pytest.mark.shows("ready 5.2")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "ledger"
OLD = list(STEPS)  # versions that are migrated


@pytest.fixture(params=OLD)
def old(request: pytest.FixtureRequest) -> int:
    """A version of the schema that there was."""
    return int(request.param)


@pytest.fixture
def path(tmp_path: Path, old: int) -> str:
    """A ledger as that version left it, its last writer killed: rows are in its WAL."""
    path = str(tmp_path / "ledger.db")
    fill(path, old)
    return path


def schema_file(old: int) -> Path:
    return FIXTURES / f"schema-v{old}.sql"


def fill(path: str, old: int) -> None:
    writer = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode = WAL")
db.executescript(open(sys.argv[2]).read())
for n in range(30):
    db.execute("INSERT INTO messages (message_id, agent_name, direction, file_path, file_size, "
        "file_mtime_ns, discovered_at) VALUES (?, 'alice', 'outbox', 'x', 1, 2, 3)", (str(n),))
db.execute("INSERT INTO agents (name, registered_at, note) VALUES ('alice', 7, 'here')")
db.execute("INSERT INTO deliveries (message_id, recipient, state) VALUES ('1', 'bob', 'written')")
db.execute("INSERT INTO security_events (at, kind) VALUES (5, 'not_a_regular_file')")
db.execute("UPDATE messages SET status = 'processing'")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", writer, path, str(schema_file(old))], check=False)
    assert done.returncode == -signal.SIGKILL
    assert os.path.getsize(path + "-wal") > 0


def schema(path: str) -> list[tuple[str, str, str]]:
    """Every table, index, trigger and view, its text without comments and spaces."""
    with Look(path) as look:
        found = look.all("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    plain = [(kind, name, re.sub(r"--[^\n]*", "", sql)) for kind, name, sql in found]
    return sorted((kind, name, re.sub(r"\s+", "", sql)) for kind, name, sql in plain)


def rows(path: str, since: int) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table that version ``since`` had, in its columns."""
    old = sqlite3.connect(":memory:")
    old.executescript(schema_file(since).read_text())
    look, found = Look(path), {}
    for (table,) in old.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        names = ", ".join(row[1] for row in old.execute(f"PRAGMA table_info({table})"))
        found[table] = look.all(f"SELECT {names} FROM {table} ORDER BY 1, 2")
    look.close()
    old.close()
    return found


def version(path: str) -> int:
    with Look(path) as look:
        return int(look.one("PRAGMA user_version"))


def test_a_migrated_ledger_is_fresh_with_its_rows(path: str, old: int, tmp_path: Path) -> None:
    before = rows(path, old)
    assert len(before["messages"]) == 30 and len(before["audit_log"]) == 60
    Ledger.open(path).close()
    fresh = str(tmp_path / "fresh.db")
    Ledger.open(fresh).close()
    assert schema(path) == schema(fresh)
    assert version(path) == SCHEMA_VERSION
    assert rows(path, old) == before


def test_what_a_row_of_before_does_not_say_is_not_known(path: str) -> None:
    ledger = Ledger.open(path)
    codes = ledger._db.execute("SELECT DISTINCT last_error_code FROM messages").fetchall()
    discards = ledger._db.execute("SELECT discarded_at FROM deliveries").fetchall()
    assert codes == discards == [(None,)]
    ledger.close()


def test_every_version_from_the_oldest_on_has_a_step() -> None:
    assert list(STEPS) == list(range(ledger_file.OLDEST_VERSION, SCHEMA_VERSION))


@pytest.mark.parametrize("old", [4], indirect=True)
def test_a_ledger_of_a_preview_is_one_line_and_left_as_it_is(tmp_path: Path, old: int) -> None:
    path = tmp_path / "ledger.db"
    Ledger.open(str(path)).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {old}")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="of a preview of agent-relay: its schema is 4") as told:
        Ledger.open(str(path))
    assert told.value.hint.startswith("`relay ledger rebuild` makes it from the journal")
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["ledger.db"]
    assert told_by_check(str(path)) == ["schema 4, of a preview of agent-relay"]


def test_it_is_copied_first_whole_once_and_for_its_owner_alone(path: str, old: int) -> None:
    before = rows(path, old)
    Ledger.open(path).close()
    copy = f"{path}.v{old}.bak"
    assert version(copy) == old and rows(copy, old) == before
    assert stat.S_IMODE(os.stat(copy).st_mode) == 0o600
    assert sorted(os.listdir(os.path.dirname(path))) == ["ledger.db", f"ledger.db.v{old}.bak"]
    os.unlink(copy)
    Ledger.open(path).close()
    assert not os.path.exists(copy)


def test_a_copy_of_another_content_is_kept(path: str, old: int) -> None:
    Path(f"{path}.v{old}.bak").write_bytes(b"mine")
    Ledger.open(path).close()
    assert Path(f"{path}.v{old}.bak").read_bytes() == b"mine"
    assert version(f"{path}.v{old}.bak.1") == old


def test_without_room_for_the_copy_nothing_is_changed(path: str, old: int) -> None:
    with failing("write", ".bak.tmp"), pytest.raises(OSError, match="No space"):
        Ledger.open(path)
    assert version(path) == old
    assert not [name for name in os.listdir(os.path.dirname(path)) if "bak" in name]


def test_a_damaged_one_is_named_and_left_as_it_is(path: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'agents'").fetchone()
    data = bytearray(Path(path).read_bytes())
    data[(root - 1) * 4096 : root * 4096] = bytes(4096)
    Path(path).write_bytes(data)
    with pytest.raises(Exception, match=r"ledger\.db"):
        Ledger.open(path)
    assert Path(path).read_bytes() == bytes(data)


def test_killed_at_any_step_it_is_old_or_new(tmp_path: Path, path: str, old: int) -> None:
    first = Path(path)
    before = rows(path, old)
    parts = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    steps = steps_of(lambda: Ledger.open(str(first)).close())
    assert len(steps) > 8 and ("sql", "COMMIT") in steps
    fresh = schema(str(first))
    for number in range(1, len(steps) + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in parts:
            if not name.endswith("-shm"):
                (folder / name).write_bytes(parts[name])
        path = str(folder / "ledger.db")
        killed_at(number, lambda path=path: Ledger.open(path).close())  # type: ignore[misc]
        assert version(path) == old and rows(path, old) == before, steps[number - 1]
        Ledger.open(path).close()  # the next start
        assert version(path) == SCHEMA_VERSION and rows(path, old) == before
        assert schema(path) == fresh
        names = sorted(os.listdir(folder))
        assert names == ["ledger.db", f"ledger.db.v{old}.bak"], (steps[number - 1], names)
        assert rows(f"{path}.v{old}.bak", old) == before


def test_a_failed_step_is_undone(path: str, old: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from relay.ledger import schema

    wrong = schema.STEPS[old] + "CREATE TABLE agents (a);\n"
    monkeypatch.setitem(schema.STEPS, old, wrong)
    with pytest.raises(LedgerError, match="agents already exists"):
        Ledger.open(path)
    assert version(path) == old
    assert ledger_file.verify(f"{path}.v{old}.bak").version == old


def told_by_check(path: str) -> list[str]:
    """What a check of the file finds."""
    errors, _ = check_file(path)
    return [one.found for one in errors]


DELIVERY = "INSERT INTO deliveries (message_id, recipient, state{0}) VALUES ('{2}', 'bob', {1})"


def told(path: str) -> list[str]:
    """The findings' text."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        found = [one.text for one in check(db, "it")]
    db.close()
    return found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DELETE FROM messages", "{0} > bob is a delivery without its message"),
        (
            "UPDATE messages SET status = 'completed'",
            "{0} is completed without a time of processing",
        ),
        ("UPDATE messages SET status = 'failed'", "{0} is failed without a reason"),
        ("UPDATE deliveries SET state = 'written'", "{0} > bob is written without a time"),
        ("UPDATE deliveries SET obligation = 'x'", "{0} > bob is an obligation that is not one"),
        (
            "UPDATE deliveries SET state = 'held'; UPDATE messages SET status = 'archived', "
            "processed_at = 1",
            "{0} > bob is held without a time of its next",
        ),
        (
            "UPDATE deliveries SET due_at = x'00'",
            "due_at is X'00', expected INTEGER, in the row of deliveries where message_id = '{0}'",
        ),
        ("UPDATE messages SET last_error = x'00'", "last_error is X'00', expected TEXT"),
        (
            "INSERT INTO agents (name, registered_at, public_key) VALUES ('bob', 1, 'soon')",
            "the key of bob is not 64 hex digits",
        ),
        (
            "INSERT INTO agents (name, registered_at, mailbox) VALUES ('bob', 1, '7:soon')",
            "the mailbox of bob is not an inode and a time",
        ),
        (
            "INSERT INTO orchestrator_state VALUES ('epoch', 'soon', 1)",
            "epoch of orchestrator_state is not a number",
        ),
        ("DROP TRIGGER audit_log_keeps_rows", "its schema lacks trigger audit_log_keeps_rows"),
        ("PRAGMA user_version = 99", "its schema is 99, this agent-relay supports"),
    ],
)
def test_a_change_is_found(ledger: Ledger, ledger_path: str, change: str, problem: str) -> None:
    (one,) = record(ledger, 1)
    ledger._db.execute(DELIVERY.format("", "'staged'", one))
    assert told(ledger_path) == []
    for statement in change.split("; "):
        ledger._db.execute(statement)
    (line,) = told(ledger_path)
    assert line.startswith(problem.format(one))
    errors, content = check_file(ledger_path)
    assert (len(errors), content) == (1, None)
