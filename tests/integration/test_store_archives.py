"""The relay's live store holds what is active; the rest is found in store/archive."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3

import pytest

from relay.acomm import store_file
from relay.base.config import Config, StoreSettings
from relay.journal.journal import Journal
from relay.journal.manifest_format import ARCHIVE_ROLLED
from tests.box import Box
from tests.procs import relay, rows_of

CONFIG = Config(store=StoreSettings(roll_after_s=60, roll_messages=3))

pytestmark = [
    pytest.mark.box("alice", "bob", config=CONFIG),
    pytest.mark.shows("engine 7.10", "ready 2.4"),
]


def rolled(box: Box) -> None:
    """An hour later: everything that is final has left."""
    box.flush()
    for _ in range(3):
        box.after(100, turns=8)
    box.flush()


def archives(box: Box) -> list[str]:
    return sorted(path.name for path in box.path("store", "archive").glob("*/*"))


def test_final_messages_leave_and_are_found(box: Box) -> None:
    for number in range(4):
        box.send("alice", f"TO: bob\nTHREAD: t-1\n\nmessage {number}")
    command = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    rolled(box)
    assert archives(box) == ["000001.acomm"]
    assert set(box.store.state.relay_ids) >= {command}
    assert len(box.store.state.messages) == 1
    assert len(rows_of("list", home=box.root)) == 5
    assert len(rows_of("thread", "t-1", home=box.root)) == 4
    assert "message 2" in relay("search", "message 2", home=box.root).stdout


def long_ago(box: Box) -> str:
    """What bob has received and not completed, and by now is in an archive."""
    asked = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\nlong work")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\nreceived")
    for number in range(3):
        box.send("alice", f"TO: bob\n\n{number}")
    rolled(box)
    return asked


def test_a_late_answer_finds_what_it_answers(box: Box) -> None:
    asked = long_ago(box)
    assert box.store.messages.find_by_relay_id(asked) is None
    done = box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted at last")
    assert box.inbox("alice")[done].body == b"completed at last"
    assert box.nacks("bob") == []
    assert box.sql(
        "SELECT state, ack_status, read_at < acked_at, answer_id, answer_text "
        "FROM deliveries WHERE message_id = ? AND recipient = 'bob'",
        asked,
    ) == [("acked", "completed", 1, done, "at last")]


@pytest.mark.box("alice", "bob", config=Config(store=StoreSettings(roll_after_s=60)))
@pytest.mark.parametrize("is_written", [False, True], ids=["while it is written", "behind that"])
def test_a_late_answer_to_what_is_rolled_just_now_owes_what_the_store_still_has(
    box: Box, is_written: bool
) -> None:
    """An ack of a query that was given up: a response is owed again, unless the query leaves."""
    asked = box.send("alice", "TO: bob\nKIND: query\n\nwhich?")
    for _ in range(3):
        box.after(61)
    assert box.sql("SELECT obligation FROM deliveries WHERE message_id = ?", asked) == [
        ("given_up",)
    ]
    box.take("bob", asked)
    box.clock.advance(90_000)
    roller, state = box.dispatcher._roller, box.store.state
    for _ in range(20):
        box.tick()
        if state.evicting if is_written else roller._writing:
            break
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted")
    owed = {"bob"} if not is_written else set()
    number = state.relay_ids.get(asked, 0)
    assert set(box.store.obligations.of(number)) == owed
    assert box.sql(
        "SELECT state, obligation FROM deliveries WHERE message_id = ? AND recipient = 'bob'", asked
    ) == [("acked", "open" if owed else "given_up")]
    assert (number in state.messages) == bool(owed)
    if owed:
        assert archives(box) == []
        box.send("bob", f"TO: alice\nKIND: response\nRE: {asked}\n\nthe second")
        rolled(box)
    assert box.store.messages.find_by_relay_id(asked) is None and archives(box)


@pytest.mark.box("alice", "bob", config=Config(store=StoreSettings(roll_after_s=60)))
def test_what_comes_again_as_it_is_rolled_is_not_owed_for_ever(box: Box) -> None:
    """Its mailbox vanished unread: the store, which would remind of it, has it no longer."""
    asked = box.send("alice", "TO: bob\nKIND: query\n\nwhich?")
    for _ in range(3):
        box.after(61)
    box.clock.advance(90_000)
    while not box.store.state.evicting:
        box.tick()
    shutil.rmtree(box.path("agents", "bob"))
    box.home.make_agent("bob")
    box.after(31)
    assert asked in box.inbox("bob")
    query = "SELECT attempt, obligation FROM deliveries WHERE message_id = ?"
    assert box.sql(query, asked) == [(2, "given_up")]


def test_what_nobody_knows_is_refused_without_reading_an_archive(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        box.send("alice", f"TO: bob\nTHREAD: t-1\n\n{number}")
    rolled(box)
    assert archives(box) == ["000001.acomm"]
    monkeypatch.setattr(store_file, "read_bytes", None)
    box.send("bob", f"TO: alice\nKIND: nack\nRE: {'1' * 19}-00000000\n\nno")
    box.send("bob", "TO: alice\nKIND: ack\nTHREAD: t-2\n\nno")
    said = " ".join(box.nacks("bob"))
    assert "does not name a message" in said and "THREAD t-2 has 0 messages" in said


@pytest.mark.damages
def test_a_damaged_archive_refuses_the_answer_that_needs_it_and_nothing_else(box: Box) -> None:
    asked = long_ago(box)
    (path,) = box.path("store", "archive").glob("*/*.acomm")
    os.truncate(path, 100)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted")
    (nack,) = box.nacks("bob")
    assert "cannot be looked up" in nack and "000001.acomm" in nack
    box.send("alice", "TO: bob\n\nstill here")
    assert "still here" in box.bodies("bob")


def test_a_rolled_message_whose_row_was_never_completed_is_not_delivered_again(box: Box) -> None:
    """As after a crash long ago: its file is in the outbox again, its row open."""
    sent = [box.send("alice", f"TO: bob\n\nmessage {number}") for number in range(4)]
    for one in sent:
        box.take("bob", one)
    rolled(box)
    assert box.store.messages.find_by_relay_id(sent[0]) is None
    box.kill()
    (original,) = box.path("archive").glob(f"*/alice/{sent[0]}.msg")
    original.rename(box.path("agents", "alice", "outbox", f"{sent[0]}.msg"))
    with contextlib.closing(sqlite3.connect(box.path("ledger.db"))) as db, db:
        db.execute("UPDATE messages SET status = 'processing' WHERE message_id = ?", (sent[0],))
    box.open()
    box.tick()
    assert box.inbox("bob") == {}
    assert box.sql("SELECT status FROM messages WHERE message_id = ?", sent[0]) == [("archived",)]
    assert box.store.messages.find_by_relay_id(sent[0], include_archived=True) is not None


def test_a_note_of_an_archive_that_cannot_be_written_ends_no_batch(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the journal has is accepted; the manifest gets its note with the next commit."""
    add_event, tried, noted = Journal.add_event, list[int](), list[int]()

    def full(journal: Journal, schema_id: int, blob: bytes) -> None:
        if schema_id == ARCHIVE_ROLLED:
            tried.append(schema_id)
            if len(tried) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            noted.append(schema_id)
        add_event(journal, schema_id, blob)

    monkeypatch.setattr(Journal, "add_event", full)
    for number in range(4):
        box.send("alice", f"TO: bob\n\nmessage {number}")
    rolled(box)
    assert len(tried) == 2 and len(archives(box)) == len(noted) == 1
    assert box.states(box.send("alice", "TO: bob\n\nnext")) == {"bob": "written"}
