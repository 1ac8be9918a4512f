"""The ledger kept and put back, beside a relay that runs and where none does."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.base import fsio
from relay.base.errors import (
    AlreadyRunning,
    FormatError,
    LedgerBusy,
    LedgerError,
    UnsafePath,
    VersionError,
)
from relay.base.home import LEDGER, Home
from relay.daemon import ledger_backup
from relay.ledger import file as ledger_file
from tests.box import Box
from tests.disk import failing, hooked, killed_at, steps_of
from tests.ledger.support import Look
from tests.procs import Relay, relay, until


def ids(path: Path | str) -> set[str]:
    with Look(path) as look:
        found = {str(row[0]) for row in look.all("SELECT message_id FROM messages")}
    return found


def test_a_backup_is_of_one_instant_checked_and_its_owners_alone(box: Box, tmp_path: Path) -> None:
    sent = box.send("alice", "TO: bob\n\nbefore")
    target = tmp_path / "kept.db"
    content = ledger_backup.backup(box.home, str(target))
    box.send("alice", "TO: bob\n\nafter")
    assert content.counts["messages"] == 1 and ids(target) == {sent}
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert ledger_file.verify(str(target)) == content
    assert len(os.listdir(tmp_path)) == 2  # looking at it leaves nothing beside it


def test_a_file_that_is_there_stays_unless_forced(box: Box, tmp_path: Path) -> None:
    target = tmp_path / "kept.db"
    target.write_bytes(b"mine")
    with pytest.raises(LedgerError, match="exists already"):
        ledger_backup.backup(box.home, str(target))
    assert target.read_bytes() == b"mine"
    ledger_backup.backup(box.home, str(target), force=True)
    ledger_file.verify(str(target))


def test_through_a_link_the_file_that_it_names_is_replaced(box: Box, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    ledger_backup.backup(box.home, str(tmp_path / "link/kept.db"))
    (tmp_path / "latest.db").symlink_to("disk/kept.db")
    ledger_backup.backup(box.home, str(tmp_path / "latest.db"), force=True)
    assert (tmp_path / "latest.db").is_symlink()
    ledger_file.verify(str(tmp_path / "disk/kept.db"))


def test_neither_a_pipe_nor_a_database_in_use_is_replaced(box: Box, tmp_path: Path) -> None:
    """SQLite would read the WAL of the one before into the copy."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafePath, match="pipe is not a regular file"):
        ledger_backup.backup(box.home, str(tmp_path / "pipe"), force=True)
    with contextlib.closing(sqlite3.connect(tmp_path / "others.db")) as others:
        others.execute("PRAGMA journal_mode = WAL")
        others.execute("CREATE TABLE kept (x)")
        with pytest.raises(LedgerError, match="is a database in use"):
            ledger_backup.backup(box.home, str(tmp_path / "others.db"), force=True)
    assert sorted(os.listdir(tmp_path)) == ["home", "others.db", "pipe"]


@pytest.mark.parametrize("name", ["ledger.db", "ledger.db-wal"])
def test_the_ledger_is_not_copied_over_itself(box: Box, name: str) -> None:
    with pytest.raises(LedgerError, match="is the ledger itself"):
        ledger_backup.backup(box.home, str(box.path(name)), force=True)


def test_on_a_full_disk_nothing_is_left(box: Box, tmp_path: Path) -> None:
    with failing("write", ".tmp"), pytest.raises(OSError, match="No space"):
        ledger_backup.backup(box.home, str(tmp_path / "kept.db"))
    assert os.listdir(tmp_path) == ["home"]


def test_a_copy_that_is_not_the_ledger_gets_no_name(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.send("alice", "TO: bob\n\nhi")
    copy = ledger_file._copy

    def lossy(source: str, temp: str) -> ledger_file.LedgerContent:
        expected = copy(source, temp)
        with contextlib.closing(sqlite3.connect(temp, isolation_level=None)) as db:
            db.execute("DELETE FROM deliveries")
        return expected

    monkeypatch.setattr(ledger_file, "_copy", lossy)
    with pytest.raises(FormatError, match="1 deliveries"):
        ledger_backup.backup(box.home, str(tmp_path / "kept.db"))
    assert os.listdir(tmp_path) == ["home"]


def test_what_a_crash_left_of_a_backup_is_begun_again(box: Box, tmp_path: Path) -> None:
    (tmp_path / "kept.db.tmp").write_bytes(b"half a copy" * 1000)
    (tmp_path / "kept.db.tmp-journal").write_bytes(b"its journal")
    ledger_backup.backup(box.home, str(tmp_path / "kept.db"))
    assert sorted(os.listdir(tmp_path)) == ["home", "kept.db"]


def test_two_backups_to_one_name_do_not_mix(box: Box, tmp_path: Path) -> None:
    target = str(tmp_path / "kept.db")
    with ledger_file.temporary_copy(box.home.path(LEDGER), target):
        with pytest.raises(LedgerBusy, match="being written by another process"):
            ledger_backup.backup(box.home, target)
    ledger_backup.backup(box.home, target)


def test_the_writer_continues_while_a_large_ledger_is_copied(box: Box, tmp_path: Path) -> None:
    """Every slice of the copy lets the relay take a message: none of them is in the copy."""
    with Look(box.path(LEDGER)) as filler:
        filler.db.execute(
            "CREATE TABLE filler AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL "
            "SELECT i + 1 FROM n WHERE i < 3000) SELECT randomblob(4000) AS b FROM n"
        )
    sent: list[str] = []

    def between(operation: str, name: str) -> None:
        if operation == "write" and name.endswith("kept.db.tmp"):
            sent.append(box.send("alice", "TO: bob\n\nmeanwhile"))

    before = ids(box.path(LEDGER))
    with hooked(between):
        ledger_backup.backup(box.home, str(tmp_path / "kept.db"))
    assert len(sent) > 10 and set(sent) <= ids(box.path(LEDGER))
    assert ids(tmp_path / "kept.db") == before


# -- restore -------------------------------------------------------------------------------


def stopped(tmp_path: Path) -> tuple[Path, Path, list[str]]:
    """A home, a backup of its ledger, and the ids of what was sent before and after it."""
    made = Box(tmp_path / "home", "alice", "bob")
    first = made.send("alice", "TO: bob\n\nbefore")
    ledger_backup.backup(made.home, str(tmp_path / "kept.db"))
    second = made.send("alice", "TO: bob\n\nafter")
    made.close()
    return tmp_path / "home", tmp_path / "kept.db", [first, second]


def test_what_came_after_the_backup_is_told_again_from_the_journal(tmp_path: Path) -> None:
    home, kept, sent = stopped(tmp_path)
    with Home(str(home)) as opened:
        content, aside = ledger_backup.restore(opened, str(kept))
    assert content.counts["messages"] == 1
    assert ids(aside) == set(sent)
    assert ids(home / LEDGER) == {sent[0]}
    again = Box(home)
    assert {again.row(one)["status"] for one in sent} == {"archived"}
    assert all(again.states(one) == {"bob": "written"} for one in sent)
    assert again.bodies("bob") == ["before", "after"]
    again.close()


def test_not_while_a_relay_runs_or_somebody_reads(tmp_path: Path) -> None:
    home, kept, _ = stopped(tmp_path)
    with Home(str(home)) as opened:
        with fsio.locked(opened.path(".lock")), pytest.raises(AlreadyRunning):
            ledger_backup.restore(opened, str(kept))
        reader = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); "
                "d.execute('SELECT * FROM messages').fetchone(); print('open', flush=True); "
                "sys.stdin.read()",
                str(home / LEDGER),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert reader.stdout is not None and reader.stdout.readline() == b"open\n"
        with pytest.raises(LedgerBusy, match=f"pid {reader.pid} "):
            ledger_backup.restore(opened, str(kept))
        reader.communicate()
        ledger_backup.restore(opened, str(kept))


def test_a_damaged_newer_or_foreign_file_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    home, kept, _ = stopped(tmp_path)
    data = kept.read_bytes()
    damaged, newer, foreign = (tmp_path / name for name in ("damaged", "newer", "foreign"))
    damaged.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    newer.write_bytes(data)
    with contextlib.closing(sqlite3.connect(newer)) as db:
        db.execute("PRAGMA user_version = 99")
    with contextlib.closing(sqlite3.connect(foreign)) as db:
        db.execute("CREATE TABLE something (else_)")
    before = (home / LEDGER).read_bytes()
    names = sorted(os.listdir(home))
    with Home(str(home)) as opened:
        for path, error in (
            (damaged, (FormatError, LedgerError)),
            (newer, VersionError),
            (foreign, LedgerError),
            (tmp_path / "none", LedgerError),
            (tmp_path, LedgerError),
        ):
            with pytest.raises(error) as caught:  # type: ignore[call-overload]
                ledger_backup.restore(opened, str(path))
            assert "\n" not in str(caught.value)
    assert (home / LEDGER).read_bytes() == before
    assert set(os.listdir(home)) - {".lock"} == set(names)


def test_the_ledger_of_another_home_is_not_taken_by_mistake(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (home, _, _), (_, foreign, _) = stopped(tmp_path / "a"), stopped(tmp_path / "b")
    for number, path in enumerate((home / LEDGER, foreign)):
        with Look(path) as look:
            look.db.execute(
                f"INSERT OR REPLACE INTO orchestrator_state VALUES ('home_id', {number}, 0)"
            )
    before = (home / LEDGER).read_bytes()
    with Home(str(home)) as opened:
        with pytest.raises(LedgerError) as caught:
            ledger_backup.restore(opened, str(foreign))
        assert str(caught.value) == f"{foreign} is the ledger of another home"
        assert "--force" in caught.value.hint
        assert (home / LEDGER).read_bytes() == before
        ledger_backup.restore(opened, str(foreign), force=True)
    assert (home / LEDGER).read_bytes() != before


def test_starts_are_counted_on(tmp_path: Path) -> None:
    home, kept, _ = stopped(tmp_path)
    with Look(home / LEDGER) as look:
        look.db.execute("INSERT OR REPLACE INTO orchestrator_state VALUES ('epoch', '7', 0)")
    with Look(kept) as look:
        look.db.execute("INSERT OR REPLACE INTO orchestrator_state VALUES ('epoch', '3', 0)")
    with Home(str(home)) as opened:
        ledger_backup.restore(opened, str(kept))
    with Look(home / LEDGER) as look:
        assert look.one("SELECT value FROM orchestrator_state WHERE key = 'epoch'") == "7"


def test_a_ledger_that_is_no_database_is_set_aside_with_its_wal(tmp_path: Path) -> None:
    home, kept, sent = stopped(tmp_path)
    (home / LEDGER).write_bytes(b"no database" * 1000)
    (home / "ledger.db-wal").write_bytes(b"no wal")
    with Home(str(home)) as opened:
        _, aside = ledger_backup.restore(opened, str(kept))
    assert Path(aside).read_bytes() == b"no database" * 1000
    assert Path(aside + "-wal").read_bytes() == b"no wal"
    assert ids(home / LEDGER) == {sent[0]}


@pytest.mark.shows("ready 5.2")
def test_killed_at_any_step_of_a_restore(tmp_path: Path) -> None:
    home, kept, sent = stopped(tmp_path)
    with Home(str(home)) as opened:
        steps = steps_of(lambda: ledger_backup.restore(opened, str(kept)))
    os.rename(home / "ledger.db.before-restore", home / LEDGER)
    assert len(steps) >= 5
    for number in range(1, len(steps) + 1):
        killed_at(number, lambda: ledger_backup.restore(Home(str(home)), str(kept)))
        found = ids(home / LEDGER)
        assert found in ({sent[0]}, set(sent)), steps[number - 1]  # the one or the other, whole
        again = Box(home)  # the next start
        assert all(again.row(one)["status"] == "archived" for one in sent)
        assert again.bodies("bob") == ["before", "after"]
        again.close()


@pytest.mark.shows("ready 5.2")
def test_backup_more_messages_restore_start_beside_a_real_relay(
    running: Relay, home: Path, tmp_path: Path
) -> None:
    kept, inbox = tmp_path / "kept.db", home / "agents/bob/inbox"
    with Agent("alice", str(home)) as alice:
        sent = [alice.send("bob", f"number {number}") for number in range(50)]
        until(lambda: list(inbox.glob("*.msg")))  # the relay is in the middle of them
        done = relay("ledger", "backup", str(kept), "--json", home=home)
        assert done.returncode == 0, done.stderr
        assert 0 < json.loads(done.stdout)["rows"]["messages"]
        sent += [alice.send("bob", f"number {number}") for number in range(50, 100)]
    refused = relay("ledger", "restore", str(kept), home=home)
    assert refused.returncode == 5 and "a relay runs" in refused.stderr
    until(lambda: len(list(inbox.glob("*.msg"))) == len(sent))
    running.kill()
    done = relay("ledger", "restore", str(kept), home=home)
    assert done.returncode == 0, done.stderr
    running.start()
    with Look(home / LEDGER) as look:
        until(lambda: look.one("SELECT count(*) FROM messages WHERE status = 'archived'") == 100)
        assert look.one("SELECT count(*) FROM deliveries WHERE state = 'written'") == 100
    assert sorted(path.stem for path in inbox.glob("*.msg")) == sorted(sent)
    running.stop()
    done = relay("doctor", home=home)
    assert done.returncode == 0, done.stdout
