"""The ledger follows the journal, also where a delivery takes a way of its own."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from relay.base.config import Config, JournalSettings, StoreSettings
from relay.base.home import LEDGER
from relay.ledger.file import LEFTOVERS
from tests.box import Box, MakeBox
from tests.disk import failing, hooked
from tests.procs import relay
from tests.sound import findings_of

SOON = replace(Config().delivery, give_up_after_s=60)


def row(box: Box, sent: str) -> tuple[object, ...]:
    """Of bob's delivery: state, attempt and times."""
    columns = "state, attempt, staged_at, written_at, read_at, due_at"
    query = f"SELECT {columns} FROM deliveries WHERE message_id = ? AND recipient = 'bob'"
    (found,) = box.sql(query, sent)
    return found


def team(box: Box, *settings: str) -> None:
    box.join("team", "alice", "bob")
    box.command("alice", "channel.config", "CHANNEL: team", *settings)


def renew(box: Box) -> None:
    """Bob's mailbox is gone, and another one is there."""
    box.after(1.1)
    shutil.rmtree(box.path("agents", "bob"))
    box.after(1.1)
    box.after(1.1)
    box.home.make_agent("bob")


def no_delivery(operation: str, path: str) -> None:
    """No file can be renamed into an inbox."""
    if operation == "rename" and path.startswith("17") and path.endswith(".msg"):
        raise OSError(errno.EACCES, "no", path)


@pytest.mark.parametrize(
    ("code", "ends", "later"),
    [(errno.EACCES, "dead", "dead"), (errno.ENOSPC, "held", "written")],
    ids=["given up", "waits for the disk"],
)
@pytest.mark.box("alice", "bob", config=Config(delivery=SOON))
def test_what_is_archived_in_the_store_is_given_up_or_waits_for_the_disk(
    box: Box, code: int, ends: str, later: str
) -> None:
    """However long; and that the ledger alone has its further attempt is no fault."""
    team(box, "retention: count 1")
    sent = [box.send("alice", f"TO: #team\n\n{number}") for number in range(3)]
    renew(box)
    with failing("create", sent[0], code):
        for _ in range(10):
            box.after(20)
    assert row(box, sent[0])[0] == ends
    assert findings_of(box.root) == []
    box.after(61)
    assert row(box, sent[0])[0] == later


def test_what_waited_for_the_disk_is_tried_once_whatever_its_age(make_box: MakeBox) -> None:
    limits = replace(Config().limits, batch_files=2)
    box = make_box("alice", "bob", config=Config(limits=limits, delivery=SOON))
    with failing("create"):
        sent = [box.drop("alice", f"TO: bob\n\n{number}") for number in range(8)]
        for _ in range(10):
            box.after(30)
        box.kill()
    box.open()
    for _ in range(3):
        box.after(60)
    assert {row(box, one)[0] for one in sent} == {"written"}


def test_so_is_what_a_start_delivers_before_intake_goes_on(make_box: MakeBox) -> None:
    box = make_box("alice", "bob", config=Config(delivery=SOON))
    with failing("create"):
        sent = box.send("alice", "TO: bob\n\nhi")
        for _ in range(5):
            box.after(30)
    box.kill()
    box.disk.used_mib = 99_999
    box.open()
    box.after(60)
    assert row(box, sent)[0] == "written"


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_late_answer_counts_whatever_became_of_the_file(make_box: MakeBox, is_gone: bool) -> None:
    """Given up unread and rolled out of the store: no event speaks of it any more."""
    config = Config(store=StoreSettings(roll_after_s=60, roll_messages=1))
    box = make_box("alice", "bob", config=config)
    sent = box.send("alice", "TO: bob\nKIND: command\n\ngo")
    for seconds in (1801,) * 4 + (100,) * 4:
        box.after(seconds, turns=8)
    if is_gone:
        renew(box)
    done = box.drop("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted")
    box.after(1.1)
    assert (sent in box.inbox("bob")) is not is_gone
    columns = "state, ack_status, read_at = acked_at, answer_id, obligation, due_at"
    assert box.sql(f"SELECT {columns} FROM deliveries WHERE message_id = ?", sent) == [
        ("acked", "completed", 1, done, "answered", None)
    ]
    box.after(1)  # and the reminders come again, which have no file of their own
    kinds = sorted(one.kind for one in box.inbox("bob").values())
    assert kinds == ["reminder"] * 2 if is_gone else ["command", "reminder", "reminder"]


def test_a_ledger_of_before_gets_the_read_of_the_attempt_that_was_read(
    box: Box, tmp_path: Path
) -> None:
    sent = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\ngo")
    box.take("bob", sent)
    box.after(1)
    with hooked(no_delivery):
        box.after(60)
        box.after(1)
    assert row(box, sent)[:2] == ("held", 2)
    before = str(tmp_path / "before.db")
    with contextlib.closing(sqlite3.connect(before)) as copy:
        with contextlib.closing(sqlite3.connect(box.path(LEDGER))) as db:
            db.backup(copy)
    box.after(2)
    box.after(3)
    box.take("bob", sent)
    box.after(1)
    live = row(box, sent)
    box.kill()
    for end in LEFTOVERS:
        box.path(LEDGER + end).unlink(missing_ok=True)
    shutil.copy(before, box.path(LEDGER))
    box.open()
    assert row(box, sent) == live and live[0] == "read"


def test_what_is_tried_again_and_again_is_as_old_as_its_first_attempt(make_box: MakeBox) -> None:
    box = make_box("alice", "bob", config=Config(delivery=SOON))
    with hooked(no_delivery):
        sent = box.send("alice", "TO: bob\n\nhi")
        first = row(box, sent)[2]
        for _ in range(30):
            box.after(5)
    assert row(box, sent)[:3] == ("dead", 1, first)
    box.stop()
    assert findings_of(str(box.root)) == []


def test_a_read_of_a_message_that_no_ledger_knows_makes_no_row(make_box: MakeBox) -> None:
    """The ledger is lost, and the journal of that time is pruned."""
    journal = JournalSettings(segment_bytes=4096, keep_age_s=1, compress_segments=False)
    box = make_box("alice", "bob", config=Config(journal=journal))
    first = box.send("alice", "TO: bob\n\nfirst")
    box.send_many(40, 10)
    assert box.tiers.entries()[0].base_offset > 0
    box.kill()
    for end in ("", *LEFTOVERS):
        box.path(LEDGER + end).unlink(missing_ok=True)
    box.open()
    box.tick()
    box.take("bob", first)
    box.after(2)
    assert box.sql("SELECT 1 FROM deliveries WHERE message_id = ?", first) == []


def test_a_copy_for_a_new_member_is_due_although_the_reply_waits(box: Box) -> None:
    team(box, "sticky_messages: true")
    sent = box.send("alice", "TO: #team\n\nwelcome")
    with failing("create"):
        box.join("team", "carol")
        box.after(1)
    box.after(60)
    assert box.states(sent)["carol"] == "written"


def test_the_reply_to_a_command_waits_for_the_disk_and_comes_once(box: Box) -> None:
    with failing("create"):
        box.command("alice", "channel.create", "CHANNEL: ci", "TYPE: pubsub")
        held = "SELECT due_at IS NULL FROM deliveries WHERE recipient = 'alice'"
        assert box.sql(held) == [(0,)]
        assert "held" not in relay("doctor", home=box.root).stdout
    box.after(1)
    box.after(5)
    (reply,) = box.bodies("alice")
    assert reply.startswith("completed created the PubSub channel ci")
    assert box.outbox("alice") == []


def test_a_nul_in_an_answer_does_not_end_its_text(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\nhi")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\nSTATUS: completed\n\ndone \x00 more")
    query = "SELECT answer_text FROM deliveries WHERE recipient = 'bob'"
    assert box.sql(query) == [("done \ufffd more",)]


def test_a_dead_letter_that_is_taken_and_discarded_at_once_was_read(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\ngo")
    box.until_dead()
    box.take("bob", sent)
    discard = f"ACTION: dead.discard\nID: {sent}"
    box.drop("operator", f"TO: __orchestrator__\nKIND: command\n\n{discard}")
    box.after(2)
    assert row(box, sent)[4] is not None


def test_what_is_answered_before_it_arrives_was_written_all_the_same(box: Box) -> None:
    asked = box.drop("alice", "TO: bob\nKIND: command\n\ngo")
    box.drop("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted")
    box.tick(2)
    state, _, staged_at, written_at, *_ = row(box, asked)
    assert state == "acked" and asked in box.inbox("bob")
    assert staged_at is not None and written_at is not None


def test_a_message_that_waits_for_the_disk_is_said_to_wait_for_it(box: Box) -> None:
    with failing("create"):
        sent = box.send("alice", "TO: bob\n\nhi")
        said = relay("trace", sent, home=box.root).stdout.splitlines()
        assert "held: the disk takes no file: No space left on device" in said[1]
        assert "takes no file" in relay("attention", home=box.root).stdout
        assert "held" not in relay("doctor", home=box.root).stdout
    box.after(5)
    lines = relay("trace", sent, home=box.root).stdout.splitlines()
    assert lines[-1].split() == ["not", "yet", "read", "by", "bob"]
    tail = relay("tail", "--limit", "9", "--no-follow", home=box.root).stdout
    assert [line.split()[1] for line in tail.splitlines()] == ["new", "held", "delivered"]


@pytest.mark.parametrize("turns", [0, 1], ids=["in one batch", "in two"])
def test_what_is_read_after_the_clock_was_set_back_was_read_once(box: Box, turns: int) -> None:
    """The read is older than the delivery, but not of an attempt before it."""
    sent = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.clock.jump(-3600)
    box.take("bob", sent)
    read_at = box.clock.now_ns()
    box.tick(turns)
    box.clock.advance(1)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\nin_progress")
    assert (row(box, sent)[0], row(box, sent)[4]) == ("acked", read_at + (1 - turns) * 10**9)


@pytest.mark.parametrize("left", ["zeros", "not renamed", "nothing", "read"])
def test_a_further_attempt_of_what_left_the_store_survives_a_power_cut(box: Box, left: str) -> None:
    """No event speaks of it, and no checkpoint has synced its file."""
    team(box, "retention: count 1")
    sent, *_ = [box.send("alice", f"TO: #team\n\n{number}") for number in range(3)]
    renew(box)
    box.after(61)
    assert row(box, sent)[:2] == ("written", 2)
    box.kill()
    file = box.path("agents", "bob", "inbox", f"{sent}.msg")
    if left == "zeros":
        file.write_bytes(bytes(file.stat().st_size))
        box.clock.jump(-3600)  # what the start removes would count as read: its inbox changed later
    elif left == "nothing":
        file.unlink()
    else:
        file.rename(file.parent / {"not renamed": ".pending", "read": ".read"}[left] / file.name)
    box.boot = "boot-2"
    box.open()
    box.after(2)
    assert row(box, sent)[:2] == (("read", 2) if left == "read" else ("written", 3))
    assert (sent in box.inbox("bob")) == (left != "read")
    assert not list(box.path("agents", "bob", "inbox", ".pending").glob("*.msg"))
