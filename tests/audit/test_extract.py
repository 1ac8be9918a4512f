"""`relay audit extract`: rows of a home in a lake, without Spark."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relay.audit import extract as extracting
from relay.audit import lake, lake_columns
from relay.audit.extract import Extracted, extract
from relay.base.clock import Clock
from relay.base.errors import RelayError
from relay.base.names import new_message_id
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.journal_builder import JournalBuilder, sent
from tests.box import Box
from tests.kills import Effect, firsts, killed_on_a_copy, lasts
from tests.procs import environment, project_of, until

NAME = "a home"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A home with messages in store, journal, archive and ledger, and its relay."""
    made = Box(tmp_path / "box", "alice", "bob")
    try:
        made.tick()
        for number in range(5):
            made.drop("alice", f"TO: bob\n\nhello {number}")
        made.drop("alice", "TO: nobody\n\nhi")
        made.after(60)
        yield made
    finally:
        made.close()


def run(root: Path, where: Path, **options: Any) -> Extracted:
    """Extract a home into a lake."""
    return extract(str(root), str(where), Clock(), name=NAME, **options)


def read(where: Path, table: str, name: str = NAME) -> list[dict[str, Any]]:
    """The rows of a table, by the manifest's files."""
    opened = lake.open_lake(str(where))
    made = lake.read_manifest(opened, lake.home_id(name))
    assert made is not None
    files = [one.path for one in made.files() if one.table == table]
    return [row for path in files for row in pq.read_table(where / path).to_pylist()]


def everything(where: Path, name: str = NAME) -> dict[str, list[str]]:
    """All rows, but for what is of the time of the extract."""
    found = {}
    for table in lake_columns.TABLES:
        rows = read(where, table, name)
        for row in rows:
            for column in ("read_at", "snapshot_at", "observed_until", "free_bytes", "changed_at"):
                if table in ("files", "home", "originals"):
                    row.pop(column, None)
        found[table] = sorted(map(str, rows)) if table != "usage" else []
    return found


def test_two_processes_read_what_one_reads(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(box.root, tmp_path / "one")
    monkeypatch.setattr(extracting, "FEW_BYTES", 0)
    monkeypatch.setattr(extracting, "PART_BYTES", 1)
    monkeypatch.chdir(project_of(tmp_path / "project"))
    run(box.root, tmp_path / "two")
    assert everything(tmp_path / "two") == everything(tmp_path / "one")


def end(_: object) -> None:
    """What the kernel does to a process where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_ends_changes_nothing(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(box.root, tmp_path / "lake")
    before = everything(tmp_path / "lake")
    box.send("alice", "TO: bob\n\none more")
    monkeypatch.setattr(extracting, "FEW_BYTES", 0)
    monkeypatch.setattr(extracting, "_read_or_explain", end)
    with pytest.raises(RelayError, match="a process of the extract ended; the lake is as it was"):
        run(box.root, tmp_path / "lake")
    assert everything(tmp_path / "lake") == before


def contents(where: Path) -> set[str]:
    """The files of the manifest, which are named by their content; but for what has times."""
    made = lake.read_manifest(lake.open_lake(str(where)), lake.home_id(NAME))
    assert made is not None
    return {one.path for one in made.files() if one.table not in ("files", "home", "usage")}


def paths(where: Path) -> set[str]:
    """All files of a lake."""
    return {str(path.relative_to(where)) for path in where.rglob("*") if path.is_file()}


def test_rows_are_those_of_ledger_store_journal_and_folders(box: Box, tmp_path: Path) -> None:
    done = run(box.root, tmp_path / "lake")
    assert done.problems == []
    with contextlib.closing(sqlite3.connect(box.root / "ledger.db")) as db:
        for table in lake_columns.LEDGER:
            (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert len(read(tmp_path / "lake", f"ledger_{table}")) == count, table
        of_ledger = dict(db.execute("SELECT message_id, checksum FROM messages"))
    assert len(of_ledger) == 7  # five, the refused one and the answer to it
    sent = {row["relay_id"]: row["checksum"] for row in read(tmp_path / "lake", "journal_sent")}
    stored = {row["relay_id"]: row["checksum"] for row in read(tmp_path / "lake", "store_messages")}
    originals = {row["message_id"]: row["checksum"] for row in read(tmp_path / "lake", "originals")}
    assert len(sent) == 6
    assert sent.items() <= of_ledger.items()
    assert sent.items() <= stored.items()
    assert len(sent.items() & originals.items()) == 5
    moves = read(tmp_path / "lake", "journal_moves")
    assert sum(row["event"] == "MessageSent" and row["recipient"] == "bob" for row in moves) == 5
    assert {row["event"] for row in read(tmp_path / "lake", "journal_records")} >= {"Start"}
    files = read(tmp_path / "lake", "files")
    assert {row["kind"] for row in files} >= {"store", "journal", "segment"}
    assert not [row for row in files if row["problems"]]
    (home,) = read(tmp_path / "lake", "home")
    assert home["name"] == NAME
    assert 0 < home["follows"] <= home["journal_end"]


def test_rows_of_one_message_are_in_one_bucket() -> None:
    ids = pa.array([new_message_id(START_NS), f"{START_NS}-aa", "odd", "", None, "9" * 19 + "-x"])
    days = lake_columns.buckets_of(ids).to_pylist()
    assert days[:2] == ["2026-01-31"] * 2
    assert all(day.startswith("h") and 0 <= int(day[1:]) < 16 for day in days[2:])
    assert lake_columns.buckets_of(pa.array(["odd"])).to_pylist() == days[2:3]


def test_what_is_in_the_lake_is_not_read_again(box: Box, tmp_path: Path) -> None:
    where = tmp_path / "lake"
    box.stop()
    first = run(box.root, where)
    assert first.read == first.sources
    before, names = everything(where), paths(where)
    second = run(box.root, where)
    assert second.read == 2 < second.sources  # the live store, and the journal's catalog
    assert everything(where) == before
    same = {"files", "home", "homes", "usage"}
    assert {one for one in names if one.split("/")[0] not in same} == {
        one for one in paths(where) if one.split("/")[0] not in same
    }


@pytest.mark.shows("audit 1.7")
def test_only_what_is_new_is_read(box: Box, tmp_path: Path) -> None:
    where = tmp_path / "lake"
    run(box.root, where)
    box.drop("alice", "TO: bob\n\nanother")
    box.tick()
    run(box.root, where)
    whole = tmp_path / "whole"
    run(box.root, whole)
    assert everything(where) == everything(whole)
    assert len(read(where, "journal_sent")) == 7


@pytest.mark.parametrize("damage", ["shorter", "deleted", "version", "manifest gone"])
def test_what_is_not_as_the_manifest_says_is_made_again(
    damage: str, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "lake"
    box.stop()
    run(box.root, where)
    before = everything(where)
    (path,) = (where / "journal_sent").rglob("*.parquet")
    if damage == "shorter":
        os.truncate(path, 10)
    elif damage == "deleted":
        path.unlink()
    elif damage == "version":
        monkeypatch.setattr(lake, "EXTRACTOR", 0)
    else:
        shutil.rmtree(where / "homes")
    done = run(box.root, where)
    assert done.read > 2
    if damage != "version":
        assert everything(where) == before


def test_killed_at_any_write_the_lake_is_the_old_one_or_the_new(box: Box, tmp_path: Path) -> None:
    where, kept = tmp_path / "lake", tmp_path / "kept"
    box.stop()
    run(box.root, kept)
    old = contents(kept)
    box.open()
    box.drop("alice", "TO: bob\n\nanother")
    box.tick()
    box.stop()

    def killed_at(number: int) -> list[Effect]:
        """Extract into a copy of the old lake; the effects until then."""
        return killed_on_a_copy(kept, where, number, lambda: run(box.root, where))

    effects = killed_at(0)
    new, rows = contents(where), everything(where)
    assert new != old
    seen = []
    for number in sorted({*firsts(effects), *lasts(effects)}):
        assert killed_at(number)[-1] == effects[number - 1]
        seen.append(contents(where))
        run(box.root, where)
        assert contents(where) == new
        made = lake.read_manifest(lake.open_lake(str(where)), lake.home_id(NAME))
        named = {one.path for one in made.files()} if made is not None else set()
        assert {one for one in paths(where) if not one.startswith("homes/")} == named
    assert everything(where) == rows
    assert len(seen) > 20 and seen[0] == old and seen[-1] == new
    assert all(one in (old, new) for one in seen)


def test_what_was_away_for_one_extract_is_read_by_the_next(
    home: HomeBuilder, tmp_path: Path
) -> None:
    where = tmp_path / "lake"
    journal = JournalBuilder(home.root)
    journal.segment(sent(1))
    journal.say(sent(2))
    journal.close()
    (away,) = (journal.dir / "segments").glob("*0.seg")
    away.rename(tmp_path / "away")
    assert extract(home.path, str(where), Clock(), name=NAME).problems
    (tmp_path / "away").rename(away)
    assert extract(home.path, str(where), Clock(), name=NAME).problems == []
    assert len(read(where, "journal_sent")) == 2


def test_an_error_of_the_ledger_names_the_home_s_and_not_the_copy(
    home: HomeBuilder, tmp_path: Path
) -> None:
    home.seen("1-a")
    home.write_store()
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute("UPDATE messages SET file_size = 'large'")
    with pytest.raises(RelayError) as caught:
        extract(home.path, str(tmp_path / "lake"), Clock(), name=NAME)
    assert str(caught.value).startswith(f"{home.path}/ledger.db, table messages: ")


def test_two_homes_do_not_touch_each_other(box: Box, tmp_path: Path, home: HomeBuilder) -> None:
    where = tmp_path / "lake"
    home.sent("1-a")
    home.write_store()
    run(box.root, where)
    before = everything(where)
    done = extract(home.path, str(where), Clock(), name="another")
    assert done.problems == []
    assert everything(where) == before
    assert [row["message_id"] for row in read(where, "ledger_messages", "another")] == ["1-a"]
    other = Box(tmp_path / "other")
    with contextlib.closing(other), pytest.raises(RelayError) as refused:
        run(other.root, where)
    assert str(refused.value) == f"the lake has another home under the name {NAME}"
    assert everything(where) == before
    ids = sorted(lake.home_id(name) for name in (NAME, "another"))
    assert lake.homes_of(lake.open_lake(str(where))) == ids


def flip(path: Path, at: int) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_a_damaged_file_is_named_and_the_rest_is_read(home: HomeBuilder, tmp_path: Path) -> None:
    where = tmp_path / "lake"
    for name in ("1-a", "1-b"):
        home.sent(name)
    home.write_store()
    kept = home.root / "store" / "archive" / "2026-01-31"
    kept.mkdir(parents=True)
    for name in ("whole.acomm", "damaged.acomm"):
        shutil.copy(home.root / "store" / "relay.acomm", kept / name)
    flip(kept / "damaged.acomm", 200)
    with pytest.raises(RelayError, match="damaged"):
        run(home.root, where, strict=True)
    assert not (where / "homes" / f"{lake.home_id(NAME)}.json").exists()
    for _ in range(2):  # what is known is said again
        done = run(home.root, where)
        (problem,) = done.problems
        assert problem.startswith("store/archive/2026-01-31/damaged.acomm at ")
    rows = read(where, "store_messages")
    assert {row["file"] for row in rows} == {
        "store/relay.acomm",
        "store/archive/2026-01-31/whole.acomm",
    }
    (bad,) = [row for row in read(where, "files") if row["problems"]]
    assert (bad["path"], bad["kind"]) == ("store/archive/2026-01-31/damaged.acomm", "archive")
    shutil.copy(kept / "whole.acomm", kept / "damaged.acomm")
    assert run(home.root, where).problems == []


def test_a_damaged_segment_loses_its_damaged_part_alone(box: Box, tmp_path: Path) -> None:
    box.stop()
    (path,) = (box.root / "journal").rglob("*.seg")
    whole = run(box.root, tmp_path / "whole")
    assert whole.problems == []
    sent = read(tmp_path / "whole", "journal_sent")
    place = path.read_bytes().index(b"hello 2")
    flip(path, place)
    done = run(box.root, tmp_path / "lake")
    assert any("journal/" in line for line in done.problems)
    left = read(tmp_path / "lake", "journal_sent")
    assert len(left) == len(sent) - 1
    records = read(tmp_path / "lake", "journal_records")
    assert [row["event"] for row in records].count("Gap") == 1


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own that cannot import Spark."""
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from relay.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "audit", "extract", *args],
        capture_output=True,
        text=True,
        env=environment(AGENT_RELAY_AUDIT_NICE="0"),
        check=False,
    )


def test_the_command_needs_no_spark_and_exits_1_for_damage(
    home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a")
    home.write_store()
    where = str(tmp_path / "lake")
    done = command("--home", home.path, "--lake", where, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["problems"] == []
    flip(home.root / "store" / "relay.acomm", 100)
    done = command("--homes", f"{home.path}*", "--lake", where)
    assert done.returncode == 1
    assert done.stderr.startswith("relay: store/relay.acomm at ")
    assert "sources" in done.stdout
    done = command("--home", home.path, "--lake", where, "--strict")
    assert done.returncode == 1
    done = command("--homes", str(tmp_path / "none*"), "--lake", where)
    assert done.returncode == 1
    assert "no homes" in done.stderr
    done = command("--home", home.path, "--lake", "")
    assert (done.returncode, "it is empty" in done.stderr) == (2, True)


def test_a_home_that_is_not_there_does_not_stop_the_next_one(
    home: HomeBuilder, tmp_path: Path
) -> None:
    homes = tmp_path / "homes"
    homes.write_text(f"# of this machine\n{tmp_path}/none\n\n{home.path}\n")
    done = command("--homes", str(homes), "--lake", str(tmp_path / "lake"))
    assert done.returncode == 1
    said = f"relay: {tmp_path}/none: there is no relay home at {tmp_path}/none"
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert f"{home.path}: read " in done.stdout
    homes.write_bytes(b"\xff\n")
    done = command("--homes", str(homes), "--lake", str(tmp_path / "lake"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"relay: {homes}: expected UTF-8 text, a home a line (")


@pytest.mark.parametrize(
    ("lake", "said"),
    [
        ("a-file", "a-file: expected a directory, or a place for a new one"),
        ("a-file/below", "a-file/below: expected a directory, or a place for a new one"),
        ("a-link", "a-link: expected a directory, or a place for a new one"),
        ("http://host/lake", "http://host/lake: expected a directory or s3://bucket/prefix"),
    ],
)
def test_what_is_not_a_lake_is_named_and_left(
    home: HomeBuilder, tmp_path: Path, lake: str, said: str
) -> None:
    (tmp_path / "a-file").write_text("mine")
    (tmp_path / "a-link").symlink_to("/nonexistent/place")
    where = lake if "://" in lake else str(tmp_path / lake)
    before = sorted(os.listdir(tmp_path))
    done = command("--home", home.path, "--lake", where)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("relay: ") and said in done.stderr
    assert done.stderr.count("\n") == 1 and sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "a-file").read_text() == "mine"


def test_a_home_whose_relay_runs(tmp_path: Path) -> None:
    from tests.audit.real_homes import new_home, people, running

    root, where = new_home(tmp_path / "home"), tmp_path / "lake"
    with running(root), people(root) as (alice, _, _):
        alice.send("bob", "first")
        until(lambda: len(rows_of(root)) == 1, "the first is archived")
        assert run(root, where).problems == []
        assert len(read(where, "ledger_messages")) == 1
        alice.send("bob", "second")
        until(lambda: len(rows_of(root)) == 2, "the second, too")
        assert run(root, where).problems == []
    assert run(root, where).problems == []
    ids = {row["message_id"] for row in read(where, "ledger_messages")}
    assert ids == {row["relay_id"] for row in read(where, "store_messages")}
    assert ids == {row["relay_id"] for row in read(where, "journal_sent")}
    assert ids == {row["message_id"] for row in read(where, "originals")}


def rows_of(root: Path) -> list[Any]:
    """The archived messages of a ledger."""
    with contextlib.closing(sqlite3.connect(root / "ledger.db")) as db:
        return db.execute("SELECT 1 FROM messages WHERE status = 'archived'").fetchall()
