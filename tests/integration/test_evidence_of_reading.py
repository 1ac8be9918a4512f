"""What is called read, and on what evidence: a file in .read was taken, one that is gone otherwise
was removed, and what vanished with its mailbox was read by nobody and is delivered again."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from relay.base.clock import NS_PER_S
from relay.base.watcher import WatchEvents
from tests.box import Box
from tests.crash.plays import Play
from tests.procs import rows_of

HI = "TO: bob\n\nhi"
RETIRE = "agent.retire"


def read(box: Box, message_id: str) -> tuple[str, str | None]:
    """State and read_how of bob's delivery."""
    query = "SELECT state, read_how FROM deliveries WHERE message_id = ? AND recipient = 'bob'"
    ((state, how),) = box.sql(query, message_id)
    return state, how


def attempts(box: Box) -> dict[str, str]:
    """Body -> ATTEMPT of what stands in bob's inbox."""
    return {m.body.decode(): m.headers["ATTEMPT"] for m in box.inbox("bob").values()}


def said(box: Box) -> list[str]:
    return [line["event"] for line in box.log if line.get("action") == "mailbox_vanished"]


def inbox(box: Box, *parts: str) -> Path:
    return box.path("agents", "bob", "inbox", *parts)


def test_taken_and_removed_are_two_things(any_box: Box) -> None:
    taken, removed = (any_box.send("alice", HI) for _ in range(2))
    any_box.after(1.1)
    any_box.take("bob", taken)
    any_box.remove("bob", removed)
    any_box.tick()
    assert read(any_box, taken) == ("read", "taken")  # at once
    assert read(any_box, removed) == ("written", None)  # its mailbox may be going, too
    any_box.after(1.1)
    assert read(any_box, removed) == ("read", "removed")
    (row,) = rows_of("list", "is:removed", home=any_box.root)
    assert row["id"] == removed


def test_removed_after_the_clock_was_set_back_it_does_not_come_again(box: Box) -> None:
    sent = box.send("alice", HI)
    box.clock.jump(-3600)
    box.remove("bob", sent)
    os.utime(inbox(box), ns=(box.clock.now_ns(),) * 2)  # as the kernel does, by its clock
    box.after(1.1)
    box.after(1.1)
    assert read(box, sent) == ("read", "removed")


def test_removed_in_the_second_of_its_delivery_where_times_are_whole_seconds(box: Box) -> None:
    second = box.clock.now_ns() // NS_PER_S * NS_PER_S
    box.clock.advance((second + NS_PER_S - box.clock.now_ns() + 300_000_000) / NS_PER_S)
    sent = box.send("alice", HI)
    box.remove("bob", sent)
    os.utime(inbox(box), ns=(box.clock.now_ns() // NS_PER_S * NS_PER_S,) * 2)
    box.after(1.1)
    box.after(1.1)
    assert read(box, sent) == ("read", "removed")


def test_one_that_is_removed_is_looked_up_alone_however_many_wait(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = [box.send("alice", HI) for _ in range(5)]
    box.after(1.1)
    box.remove("bob", first)
    box.tick()

    def all_of_them(_: str) -> dict[str, int]:
        raise AssertionError("10,000 that wait take 10 ms")

    monkeypatch.setattr(box.ledger.deliveries, "unread", all_of_them)
    box.after(1.1)
    assert read(box, first) == ("read", "removed")


def test_taken_and_answered_in_one_batch_it_was_taken(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\ngo")
    box.take("bob", sent)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted")
    assert read(box, sent) == ("acked", "taken")


def test_a_mailbox_that_vanished_has_read_nothing(any_box: Box) -> None:
    old = any_box.send("alice", "TO: bob\n\nold")
    any_box.after(1.1)
    any_box.take("bob", old)
    any_box.tick()
    sent = [any_box.send("alice", f"TO: bob\n\n{n}") for n in range(3)]
    any_box.after(1.1)
    shutil.rmtree(any_box.path("agents", "bob"))
    any_box.after(1.1)
    any_box.after(1.1)
    assert {read(any_box, one) for one in sent} == {("written", None)}

    any_box.home.make_agent("bob")
    any_box.after(1.1)
    assert attempts(any_box) == {"0": "2", "1": "2", "2": "2"}
    assert said(any_box) == [
        "3 unread messages vanished with the mailbox of bob: "
        "delivered again, or back to their senders where it is retired"
    ]
    any_box.after(31)
    assert len(said(any_box)) == 1
    assert read(any_box, old) == ("read", "taken")
    any_box.take("bob", sent[0])
    any_box.tick()
    assert read(any_box, sent[0]) == ("read", "taken")


def test_files_that_go_one_by_one_before_their_mailbox_were_not_read(box: Box) -> None:
    """As `rm -r` does it, and the relay looks in between."""
    sent = box.send("alice", HI)
    inbox(box, f"{sent}.msg").unlink()
    box.tick()
    box.clock.advance(0.5)
    shutil.rmtree(box.path("agents", "bob"))
    box.after(1.1)
    assert read(box, sent) == ("written", None)
    box.home.make_agent("bob")
    box.after(1.1)
    assert attempts(box) == {"hi": "2"}


def test_another_inbox_in_its_place_is_seen_before_the_next_scan(box: Box) -> None:
    """Two renames, of which no watch tells: what is taken out of the new one was read."""
    first, second = box.send("alice", "TO: bob\n\n1"), box.send("alice", "TO: bob\n\n2")
    strange = box.send("alice", "TO: carol\n\nnot bob's")
    shutil.copy(box.path("agents/carol/inbox", f"{strange}.msg"), inbox(box))
    box.after(31)
    for one in (first, strange):
        box.remove("bob", one)
    box.tick()
    new = box.path("tmp", "new")
    (new / ".pending").mkdir(parents=True)
    (new / ".read").mkdir()
    os.rename(inbox(box), box.path("tmp", "old"))
    os.rename(new, inbox(box))
    box.after(1.1)
    assert attempts(box) == {"1": "2", "2": "2"}
    box.remove("bob", second)
    box.after(1.1)
    box.after(1.1)
    assert read(box, second) == ("read", "removed") and attempts(box) == {"1": "2"}


def test_of_a_retired_agent_it_goes_back_to_its_sender(box: Box) -> None:
    sent = box.send("alice", HI)
    box.command("operator", RETIRE, "NAME: bob", "REASON: done here")
    shutil.rmtree(box.path("agents", "bob"))
    box.after(1.1)
    box.after(31)
    assert box.states(sent) == {"bob": "bounced"}
    assert "done here" in box.nacks("alice")[0]


def test_whose_mailbox_is_gone_already_may_be_retired(box: Box) -> None:
    """It is the one way to give its senders their mail back, as `relay doctor` says."""
    sent = box.send("alice", HI)
    shutil.rmtree(box.path("agents", "bob"))
    box.after(1.1)
    for name in ("bob", "nobody"):
        box.command("operator", RETIRE, f"NAME: {name}")
    box.after(31)
    assert box.states(sent) == {"bob": "bounced"}
    assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("retired",)]
    assert [text for text in box.nacks("operator") if "there is no agent" in text] == [
        "there is no agent nobody: `relay agents` lists them\n"
    ]


def replaced(box: Box) -> None:
    """Bob's mailbox is gone, and then another one is there."""
    shutil.rmtree(box.path("agents", "bob"))
    box.after(1.1)
    box.home.make_agent("bob")


def test_it_counts_whatever_was_promised(box: Box) -> None:
    """Exactly-once, too: what stood in a mailbox that is gone happened to nobody."""
    box.send("alice", "TO: bob\nDELIVERY: exactly-once\n\nonce")
    replaced(box)
    box.after(1.1)
    assert attempts(box) == {"once": "2"}


def test_long_done_in_the_store_it_is_made_again_from_its_original(box: Box) -> None:
    sent = box.send("alice", HI)
    box.flush()
    box.clock.advance(90_000)
    for _ in range(3):
        box.flush()
    assert box.store.messages.find_by_relay_id(sent) is None
    replaced(box)
    box.after(1.1)
    assert attempts(box) == {"hi": "2"}


def test_so_is_what_the_store_has_archived(box: Box) -> None:
    sent = box.send("alice", HI)
    box.store.archives.archive(
        box.store.messages.find_by_relay_id(sent).id
    )  # as a channel's retention does
    replaced(box)
    box.after(1.1)
    assert attempts(box) == {"hi": "2"}
    box.restart()
    box.after(1.1)
    assert attempts(box) == {"hi": "2"}
    assert box.store.messages.incomplete() == {}  # nothing is left open that no one settles


def test_the_time_for_an_answer_begins_when_it_is_there_again(box: Box) -> None:
    """Nobody is reminded of what it does not have, nor a minute after it has it."""
    sent = box.send("alice", "TO: bob\nKIND: command\n\ngo")
    box.after(1700)
    replaced(box)
    inbox(box, ".pending").rmdir()
    inbox(box, ".pending").symlink_to(box.path("tmp"))
    box.after(1.1)
    box.after(1700)
    assert box.states(sent) == {"bob": "held"}
    inbox(box, ".pending").unlink()
    for _ in range(20):
        box.after(60)
    assert attempts(box) == {"go": "2"}  # the command, and no reminder
    assert [m.kind for m in box.inbox("alice").values()] == []
    box.after(1800)
    assert [m.kind for m in box.inbox("bob").values()] == ["command", "reminder"]


def test_an_inbox_put_back_from_an_older_copy_has_read_nothing(box: Box, tmp_path: Path) -> None:
    before = [box.send("alice", f"TO: bob\n\nbefore {n}") for n in range(2)]
    box.take("bob", before[0])
    box.tick()
    old = tmp_path / "old"
    shutil.copytree(box.path("agents"), old, symlinks=True)
    later = [box.send("alice", f"TO: bob\n\nlater {n}") for n in range(3)]
    box.take("bob", later[0])
    box.tick()
    box.kill()
    shutil.rmtree(box.path("agents"))
    shutil.copytree(old, box.path("agents"), symlinks=True)
    box.open()
    box.after(2)
    box.after(2)
    assert attempts(box) == {"before 1": "1", "later 1": "2", "later 2": "2"}
    assert len(said(box)) == 1 and said(box)[0].startswith("2 unread")


def test_so_has_one_that_was_put_back_in_place(box: Box) -> None:
    """As rsync does it: the same directory, its content and times of before."""
    box.send("alice", HI)
    status = os.stat(inbox(box))
    sent = box.send("alice", "TO: bob\n\nlater")
    inbox(box, f"{sent}.msg").unlink()
    hour_ns = 3600 * 10**9
    os.utime(inbox(box), ns=(status.st_atime_ns, status.st_mtime_ns - hour_ns))
    box.after(1.1)
    box.after(1.1)
    assert attempts(box) == {"hi": "1", "later": "2"}


def test_the_copy_of_a_stopped_home_is_as_the_home_was(tmp_path: Path) -> None:
    box = Box(tmp_path / "home", "alice", "bob")
    sent = [box.send("alice", f"TO: bob\n\n{n}") for n in range(2)]
    box.take("bob", sent[0])
    box.close()
    shutil.copytree(tmp_path / "home", tmp_path / "copy", symlinks=True)
    copy = Box(tmp_path / "copy")
    copy.after(31)
    assert attempts(copy) == {"1": "1"} and said(copy) == []
    assert copy.states(sent[0]) == {"bob": "read"}
    copy.close()


def test_what_is_read_while_no_relay_runs_is_read(box: Box) -> None:
    taken, removed = (box.send("alice", HI) for _ in range(2))
    box.kill()
    box.take("bob", taken)
    box.remove("bob", removed)
    box.open()
    box.after(1.1)
    assert (read(box, taken), read(box, removed)) == (("read", "taken"), ("read", "removed"))


def test_a_dead_letter_that_is_read_says_so(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\ndeploy")
    box.until_dead()
    assert read(box, sent) == ("dead", None)
    box.take("bob", sent)
    box.tick()
    assert read(box, sent) == ("dead", "taken")
    log = "SELECT new_status FROM audit_log WHERE recipient = 'bob' ORDER BY id DESC LIMIT 2"
    assert box.sql(log) == [("read",), ("dead",)]
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted late, but done")
    assert read(box, sent) == ("acked", "taken")


def test_one_that_vanished_with_its_mailbox_was_removed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = time.time_ns() - 7200 * 10**9  # the inbox that is made is the younger one
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: before)
        box = Box(tmp_path / "home", "alice", "bob")
    dead = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\ngo")
    for _ in range(12):
        box.after(61)
    assert read(box, dead) == ("dead", None)
    shutil.rmtree(box.path("agents", "bob"))
    box.after(1.1)
    box.home.make_agent("bob")
    for _ in range(4):
        box.after(31)
    assert read(box, dead) == ("dead", None)
    box.restart()
    for _ in range(2):
        box.after(31)
    assert read(box, dead) == ("dead", None)
    box.close()


def test_killed_at_any_step_what_vanished_of_a_retired_agent_goes_back_once(
    tmp_path: Path,
) -> None:
    """Before each effect of the turns in which a mailbox is found to be another one."""

    def vanished(root: Path) -> Box:
        box = Box(root, "alice", "bob")
        box.send("alice", HI)
        box.command("operator", RETIRE, "NAME: bob", "REASON: done here")
        shutil.rmtree(box.path("agents", "bob"))
        box.dispatcher.tick(WatchEvents(agents_changed=True))
        box.home.make_agent("bob")
        return box

    def check(box: Box) -> None:
        box.after(1.1)
        box.after(31)
        assert box.sql("SELECT state FROM deliveries WHERE recipient = 'bob'") == [("bounced",)]
        assert len(box.nacks("alice")) == 1

    play = Play(vanished, lambda box: box.after(1.1), check)
    assert play.kill_before_each(tmp_path, taking=False) > 5


def test_a_file_that_an_agent_puts_into_its_own_inbox_and_takes_is_no_event(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.tick()
    before = box.store.sequence
    for _ in range(3):
        inbox(box, "1700000000000000099-ab.msg").write_bytes(b"FROM: alice\n\nmade up")
        box.tick()
        box.take("bob", "1700000000000000099-ab")
        box.after(2)
    assert box.store.sequence == before
