"""The index of a relay's home has what a scan of its store finds, whatever happened to either."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base.config import Config, JournalSettings, StoreSettings
from relay.base.home import SEARCH
from relay.search.check import check
from relay.search.find import find
from relay.search.follow import Follower, behind
from relay.search.index import Index, SearchIndexBusy, SearchIndexDamaged
from tests.box import Box, MakeBox
from tests.search.support import asked, by_index, by_scan, follow, source

QUESTIONS = [
    *("", "number", "number 7", "1", "er", "Number", "from:alice", "from:bob", "to:bob number"),
    *("to:carol", "is:unread", "is:dead", "is:open", "to:bob is:unread", "has:attachment"),
    *("kind:command", "kind:ack kind:message", "channel:dm/alice/bob 3", "thread:t-1"),
    *("after:1h", "before:2020-01-01", '"mber 1"', "zzz", "deploy from:alice"),
]
ROLLING = Config(store=StoreSettings(roll_after_s=60, roll_messages=5))


def assert_equal(box: Box) -> None:
    for question in QUESTIONS:
        assert by_index(box, question) == by_scan(box, question), question
        assert by_index(box, question, 2) == by_scan(box, question, 2), question


def talk(box: Box, count: int = 12) -> None:
    """Messages of several kinds, some of them read and answered."""
    for number in range(count):
        text = "TO: bob\n\n" if number % 3 else "TO: *\nTHREAD: t-1\n\n"
        sent = box.send("alice", f"{text}number {number}")
        if number % 2:
            box.take("bob", sent)
    command = box.send("alice", "TO: bob\nKIND: command\n\ndeploy number 7")
    other = box.send("alice", "TO: bob\nKIND: command\n\ndeploy again")
    box.take("bob", command)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {command}\n\ncompleted number 1")
    box.take("bob", other)
    box.tick()


@pytest.mark.box("alice", "bob", "carol")
def test_from_the_journal(box: Box) -> None:
    talk(box)
    assert_equal(box)
    box.send("bob", "TO: alice\n\nnumber 99")
    assert by_index(box, "99") == ["number 99"]
    assert_equal(box)


@pytest.mark.box("alice", "bob", "carol", config=ROLLING)
def test_from_the_archives_the_checkpoint_and_the_journal(box: Box) -> None:
    talk(box)
    box.after(200, turns=6)
    box.flush()
    talk(box, 6)
    box.after(5000, turns=9)
    box.flush()
    assert box.store.state.archives
    box.send("alice", "TO: bob\n\nnumber 100")
    assert_equal(box)
    followed = by_index(box, "number")
    os.unlink(box.home.path(SEARCH))
    assert by_index(box, "number") == followed


@pytest.mark.box("alice", "bob", "carol")
@pytest.mark.damages  # behind the ledger's back
def test_a_dead_letter_that_is_deleted_leaves_the_index(box: Box) -> None:
    box.send("alice", "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\nnumber 1 for nobody")
    box.until_dead()
    assert by_index(box, "is:dead") == by_scan(box, "is:dead") == ["number 1 for nobody"]
    assert_equal(box)
    (dead,) = box.store.state.dead
    box.store.retries.discard(dead)
    box.events.commit()
    assert "number 1 for nobody" not in by_index(box, "number")
    assert_equal(box)


@pytest.mark.box("alice", "bob")
@pytest.mark.damages
@pytest.mark.parametrize(
    "content", [b"", b"no database " * 1000, b"SQLite format 3\0" + b"x" * 9000]
)
def test_a_damaged_file_is_filled_again(box: Box, content: bytes) -> None:
    talk(box, 4)
    follow(box).close()
    Path(box.home.path(SEARCH)).write_bytes(content)
    assert by_index(box, "number") == by_scan(box, "number")


@pytest.mark.box("alice", "bob")
def test_a_link_is_replaced_and_the_file_that_it_names_is_as_it_was(box: Box) -> None:
    talk(box, 4)
    other = box.root.parent / "other"
    other.touch()
    Path(box.home.path(SEARCH)).symlink_to(other)
    with pytest.raises(SearchIndexDamaged, match="is a symbolic link"):
        Index(box.home.path(SEARCH))
    assert by_index(box, "number") == by_scan(box, "number")
    assert other.read_bytes() == b""
    assert not Path(box.home.path(SEARCH)).is_symlink()


@pytest.mark.box("alice", "bob")
def test_one_of_another_version_is_filled_again(box: Box) -> None:
    talk(box, 4)
    follow(box).close()
    with contextlib.closing(sqlite3.connect(box.home.path(SEARCH))) as db, db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(
        SearchIndexDamaged, match="expected a search index of version 3, got version"
    ):
        Index(box.home.path(SEARCH))
    assert by_index(box, "number") == by_scan(box, "number")


@pytest.mark.box("alice", "bob")
def test_one_that_is_open_is_not_removed(box: Box) -> None:
    follow(box).close()
    with Index(box.home.path(SEARCH)), Index(box.home.path(SEARCH), writable=True) as index:
        with pytest.raises(SearchIndexBusy):
            index.begin_again()


@pytest.mark.box("alice", "bob")
def test_one_whose_lock_is_never_given_back_is_busy(box: Box) -> None:
    """As by a process that was stopped while it removed the index: a search waited for ever."""
    follow(box).close()
    with open(box.home.path("search.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for writable in (False, True):
            with pytest.raises(SearchIndexBusy, match="another process removes it"):
                Index(box.home.path(SEARCH), writable=writable)


@pytest.mark.box("alice", "bob")
@pytest.mark.parametrize("journal_mode", ["delete", "wal"])
def test_one_that_is_being_created_is_busy_and_sound(box: Box, journal_mode: str) -> None:
    """As its creator leaves it for a moment, or for good if it is killed there."""
    path = box.home.path(SEARCH)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"PRAGMA journal_mode = {journal_mode}")
    db.close()
    with pytest.raises(SearchIndexBusy, match="is being created"):
        Index(path)
    assert list(check(path)) == []
    follow(box).close()
    Index(path).close()


CUT_SHORT = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("CREATE TABLE t (x)")
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN")
db.executemany("INSERT INTO t VALUES (?)", [("x" * 4000,)] * 50)
os._exit(1)
"""


def test_one_whose_creation_was_cut_short_is_busy_and_sound(tmp_path: Path) -> None:
    """A reader cannot roll it back; the next writer does."""
    path = str(tmp_path / "search.db")
    subprocess.run([sys.executable, "-c", CUT_SHORT, path], check=False)
    assert Path(path + "-journal").stat().st_size
    with pytest.raises(SearchIndexBusy):
        Index(path)
    assert list(check(path)) == []


def test_another_history_of_the_home_is_recognized(make_box: MakeBox) -> None:
    """An index of a journal that was replaced, by a backup of another time, has wrong messages."""
    box = make_box("alice", "bob")
    box.send("alice", "TO: bob\n\nfirst history")
    follow(box).close()
    one = Path(box.home.path(SEARCH)).read_bytes()
    other = make_box("alice", "bob", name="other")
    other.send("alice", "TO: bob\n\nhistory of the other, longer than the first one of all")
    Path(other.home.path(SEARCH)).write_bytes(one)
    with Index(other.home.path(SEARCH)) as index:
        assert behind(index, source(other)) is None
    assert by_index(other, "history") == by_scan(other, "history") != []


PRUNED = Config(journal=JournalSettings(segment_bytes=4096, keep_age_s=1, compress_segments=False))


@pytest.mark.box("alice", "bob", config=PRUNED)
def test_the_journal_lost_its_beginning(box: Box) -> None:
    box.send("alice", "TO: bob\n\nnumber")
    follow(box).close()  # and then it does not follow for a long time
    box.send_many(40, flush_every=10)
    assert box.events.journal.first > 0
    assert len(by_index(box, "number")) == 41
    assert_equal(box)


@pytest.mark.box("alice", "bob")
def test_it_tells_how_far_it_is_behind(box: Box) -> None:
    talk(box, 2)
    with follow(box) as index:
        state = behind(index, source(box))
        assert state is not None and (state.messages, state.is_more) == (0, False)
        for number in range(3):
            box.send("alice", f"TO: bob\n\nnumber {number}")
        state = behind(index, source(box))
        assert state is not None and state.messages == 3 and state.since_ms


@pytest.mark.box("alice", "bob")
def test_two_fillers_at_once(box: Box) -> None:
    """A batch of one counts only where the other has not moved on meanwhile."""
    talk(box, 4)
    path = box.home.path(SEARCH)
    with Index(path, writable=True) as one, Index(path, writable=True) as two:
        first, second = Follower(one, source(box)), Follower(two, source(box))
        for _ in range(6):
            first.step()
            second.step()
        assert one.position() == two.position() != None  # noqa: E711
    assert_equal(box)


FILL = """
import sys
from relay.base.clock import Clock
from relay.base.config import load
from relay.base.home import SEARCH, Home
from relay.daemon.search_filler import source_of
from relay.search import follow
from relay.search.index import Index
follow.BATCH = follow.RECORDS = 3
with Home(sys.argv[1]) as home, Index(home.path(SEARCH), writable=True) as index:
    follower = follow.Follower(index, source_of(home, load(home), Clock(), None))
    while not follower.step().is_done:
        print("slice", flush=True)
"""


@pytest.mark.slow
@pytest.mark.box("alice", "bob", "carol", config=ROLLING)
def test_killed_at_any_slice(box: Box) -> None:
    talk(box)
    box.after(200, turns=6)
    box.flush()
    talk(box)
    for slices in range(1, 9):
        command = [sys.executable, "-c", FILL, str(box.root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(slices):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        if slices in (3, 8):
            assert_equal(box)
            os.unlink(box.home.path(SEARCH))


@pytest.mark.box("alice", "bob")
def test_the_disk_is_full(box: Box) -> None:
    """A batch that does not fit is rolled back, and the next attempt continues."""
    talk(box, 4)
    with follow(box) as index:
        pages = index.db.execute("PRAGMA page_count").fetchone()[0]
        index.db.execute(f"PRAGMA max_page_count = {pages}")
        body = "".join(map(chr, range(0x4E00, 0x5200))) * 9
        box.send("alice", f"TO: bob\n\n{body}")
        with pytest.raises(Exception, match="full"):
            Follower(index, source(box)).run(5)
        found = find(index, asked("number 1"), 9)
        assert found.entries
        index.db.execute("PRAGMA max_page_count = 1000000")
        assert Follower(index, source(box)).run(5)
    assert_equal(box)
