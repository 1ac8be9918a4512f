"""Opening the ledger: schema, settings, versions, modes, and what is no ledger."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest

from relay.base.errors import EXIT_FAILED, LedgerBusy, LedgerError, VersionError
from relay.ledger import ledger as ledger_module
from relay.ledger import schema as schema_module
from relay.ledger.file import SCHEMA_VERSION, open_readonly
from relay.ledger.ledger import Ledger
from relay.ledger.schema import schema_sql
from tests.box import descriptors_below
from tests.ledger.support import Look, record

pytestmark = pytest.mark.shows("ready 1.2")


# -- schema --------------------------------------------------------------------------------


def test_an_id_is_never_used_again(ledger: Ledger) -> None:
    record(ledger, 1, 2)
    ledger._db.execute("DELETE FROM messages")
    record(ledger, 3)
    assert ledger._db.execute("SELECT id FROM messages").fetchall() == [(3,)]


def test_a_status_outside_the_five_is_refused(ledger: Ledger) -> None:
    record(ledger, 1)
    for sql in (
        "UPDATE messages SET status = 'done'",
        "INSERT INTO deliveries (message_id, recipient, state) VALUES ('a', 'b', 'sent')",
    ):
        with pytest.raises(LedgerError, match="CHECK"):
            ledger._db.execute(sql)


def test_there_is_one_schema_and_the_package_has_it() -> None:
    top = Path(__file__).parents[2] / "schema.sql"
    assert schema_sql() == top.read_text()


def test_the_schema_is_whole_or_none(ledger_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = schema_sql()
    monkeypatch.setattr(schema_module, "schema_sql", lambda: whole + "CREATE TABLE agents (a);")
    with pytest.raises(LedgerError, match="agents already exists"):
        Ledger.open(ledger_path)
    monkeypatch.undo()
    with Look(ledger_path) as look:
        assert look.all("SELECT name FROM sqlite_master") == []
        assert look.one("PRAGMA user_version") == 0
    Ledger.open(ledger_path).close()


# -- settings of appendix B ----------------------------------------------------------------


def test_the_settings_of_appendix_b_are_in_force(ledger_path: str) -> None:
    Path(ledger_path).write_bytes(b"")  # left by a crash, it becomes a ledger
    opened = Ledger.open(ledger_path)
    normal, memory = 1, 2
    for pragma, value in (
        *(("journal_mode", "wal"), ("synchronous", normal), ("foreign_keys", 1)),
        *(("busy_timeout", 5000), ("cache_size", -2000), ("temp_store", memory)),
    ):
        assert opened._db.execute(f"PRAGMA {pragma}").fetchone() == (value,), pragma
    opened.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], indirect=True)
def test_the_files_are_private_and_closed_they_are_one(ledger_path: str, umask: int) -> None:
    folder = Path(ledger_path).parent

    def modes() -> dict[str, int]:
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}

    with contextlib.closing(Ledger.open(ledger_path)) as opened:
        record(opened, 1)
        names = ("ledger.db", "ledger.db-wal", "ledger.db-shm")
        assert modes() == dict.fromkeys(names, 0o600)
    os.chmod(ledger_path, 0o644)
    Ledger.open(ledger_path).close()
    assert modes() == {"ledger.db": 0o600}


# -- what is no ledger, or not ours to write -----------------------------------------------


def one_line(error: LedgerError | VersionError, path: str) -> str:
    text = str(error)
    assert text.startswith(path)
    assert "\n" not in text
    assert error.hint
    return text


def test_a_newer_version_is_refused_and_left_alone(ledger_path: str) -> None:
    Ledger.open(ledger_path).close()
    with Look(ledger_path) as look:
        look.db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = Path(ledger_path).read_bytes()
    with pytest.raises(VersionError) as caught:
        Ledger.open(ledger_path)
    assert f"expected user_version <= {SCHEMA_VERSION}, found {SCHEMA_VERSION + 1}" in one_line(
        caught.value, ledger_path
    )
    assert Path(ledger_path).read_bytes() == before
    assert Path(ledger_path).read_bytes()[60:64] == (SCHEMA_VERSION + 1).to_bytes(4, "big")
    assert caught.value.offset == 60


@pytest.mark.parametrize("read", [Ledger.open, open_readonly])
def test_a_file_that_is_no_database_is_refused_and_left_alone(read: type, ledger_path: str) -> None:
    data = b"this is no database at all" * 1000
    Path(ledger_path).write_bytes(data)
    with pytest.raises(LedgerError) as caught:
        read(ledger_path)
    assert descriptors_below(Path(ledger_path).parent) == []
    assert "not a database" in one_line(caught.value, ledger_path)
    assert caught.value.exit_code == EXIT_FAILED
    assert Path(ledger_path).read_bytes() == data
    assert os.listdir(os.path.dirname(ledger_path)) == ["ledger.db"]


def test_another_databases_tables_are_left_alone(ledger_path: str) -> None:
    with Look(ledger_path) as look:
        look.db.execute("CREATE TABLE messages (mine)")
        with pytest.raises(LedgerError, match="messages already exists"):
            Ledger.open(ledger_path)
        assert look.all("SELECT name FROM sqlite_master") == [("messages",)]


def test_a_directory_or_a_missing_one_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for path in (str(tmp_path / "d"), str(tmp_path / "nowhere" / "ledger.db")):
        with pytest.raises(LedgerError) as caught:
            Ledger.open(path)
        one_line(caught.value, path)
        assert not isinstance(caught.value, LedgerBusy)


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_taken_away_under_the_connection_is_noticed(ledger_path: str, replace: bool) -> None:
    opened = Ledger.open(ledger_path)
    opened.check_file()
    os.rename(ledger_path, ledger_path + ".old")
    if replace:
        Path(ledger_path).write_bytes(b"")
    with pytest.raises(LedgerError) as caught:
        opened.check_file()
    assert "was removed or replaced" in one_line(caught.value, ledger_path)
    os.rename(ledger_path + ".old", ledger_path)
    opened.check_file()
    opened.close()


# -- another writer ------------------------------------------------------------------------


def test_a_lock_held_by_another_writer_is_said_in_one_line(
    ledger_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "BUSY_TIMEOUT_MS", 1)
    ours = Ledger.open(ledger_path)
    other = Look(ledger_path)
    other.db.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusy) as caught:
        record(ours, 1)
    assert str(caught.value) == f"{ledger_path}: database is locked"
    assert "writer" in caught.value.hint
    assert list(ours.open_rows(9)) == []

    other.db.execute("COMMIT")
    record(ours, 1)
    assert len(list(ours.open_rows(9))) == 1
    other.close()
    ours.close()


def test_a_new_ledger_waits_for_nobody_forever(
    ledger_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "BUSY_TIMEOUT_MS", 1)
    with Look(ledger_path) as other:
        other.db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerBusy) as caught:
            Ledger.open(ledger_path)
    assert "locked" in one_line(caught.value, ledger_path)


# -- readers -------------------------------------------------------------------------------


def test_a_readers_connection_cannot_write(ledger: Ledger, ledger_path: str) -> None:
    (one,) = record(ledger, 1)
    reader = open_readonly(ledger_path)
    (row,) = reader.execute("SELECT * FROM messages").fetchall()
    assert row["message_id"] == one
    with pytest.raises(LedgerError, match="readonly"):
        reader.execute("DELETE FROM messages")
    reader.close()


def test_where_there_is_no_ledger_none_is_made(ledger_path: str) -> None:
    with pytest.raises(LedgerError, match="there is no ledger at") as caught:
        open_readonly(ledger_path)
    assert caught.value.hint.startswith("`relay up` creates it, from the journal")
    assert not os.path.exists(ledger_path)


@pytest.mark.parametrize("name", ["a b", "100%", "what?", "#1", "é"])
def test_a_path_may_have_any_character(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir()
    opened = Ledger.open(str(path / "ledger.db"))
    record(opened, 1)
    reader = open_readonly(str(path / "ledger.db"))
    assert reader.execute("SELECT count(*) FROM messages").fetchone()[0] == 1
    reader.close()
    opened.close()


def test_a_ledger_on_a_read_only_disk_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    Ledger.open(str(path)).close()
    monkeypatch.setattr(os, "access", lambda *_: False)  # what a read-only mount says
    with contextlib.closing(open_readonly(str(path))) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone()[0] == 0
        assert os.listdir(tmp_path) == ["ledger.db"]  # no -shm was needed


def test_a_ledger_on_a_full_disk_is_read_as_it_is(
    ledger_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No -shm can be filled; what SQLite left of one that it tried to make is in nobody's use."""
    full = os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    ledger = Ledger.open(ledger_path)
    record(ledger, 1)
    with contextlib.closing(open_readonly(ledger_path)) as db:  # a relay has it: its WAL counts
        assert db.execute("SELECT count(*) FROM messages").fetchone()[0] == 1
    ledger.close()
    Path(ledger_path + "-wal").touch()
    Path(ledger_path + "-shm").write_bytes(b"...")
    with contextlib.closing(open_readonly(ledger_path)) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone()[0] == 1
    assert Path(ledger_path + "-shm").read_bytes() == b"..."
