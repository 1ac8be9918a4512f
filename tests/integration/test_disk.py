"""A full disk: messages wait in their outboxes and go on by themselves."""

from __future__ import annotations

import pytest

from tests.box import Box
from tests.disk import failing
from tests.ledger.support import statements


@pytest.mark.shows("ready 1.6")
def test_a_message_waits_in_its_outbox_and_continues_by_itself(box: Box) -> None:
    name = box.name()
    with failing("create"):
        sent = box.send("alice", "TO: *\n\nhi", name)
        assert box.row(sent)["status"] == "pending"
        assert "No space left" in box.row(sent)["last_error"]
        assert box.outbox("alice") == [name]
        assert not list(box.path("agents").glob("*/inbox/.pending/*"))
        box.after(1, turns=1)
        assert box.row(sent)["retry_count"] == 2
    box.after(2, turns=1)
    assert box.states(sent) == {"bob": "written", "carol": "written", "operator": "written"}
    box.flush()
    assert box.row(sent)["status"] == "archived"
    assert box.stored() == [sent]  # numbered once


@pytest.mark.shows("ready 1.6")
def test_what_a_full_disk_postpones_is_one_transaction(box: Box) -> None:
    def turn(files: int) -> int:
        for number in range(files):
            box.drop("alice", f"TO: bob\n\n{number}")
        return sum(one.startswith("BEGIN") for one in statements(box.ledger, box.tick))

    with failing("create"):
        assert turn(100) == turn(10)
    assert box.sql("SELECT status, retry_count, count(*) FROM messages GROUP BY 1, 2") == [
        ("pending", 1, 110)
    ]
    box.after(60, turns=3)
    assert len(box.inbox("bob")) == 110


def test_a_rename_that_finds_no_room_leaves_no_copy_in_pending(box: Box) -> None:
    """The attempt is held, durably, before its copy goes; a later answer may end it for good."""
    sent = box.send("alice", "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\ndo")
    with failing("rename", f"{sent}.msg"):
        box.after(61)
        box.after(1)
        assert box.states(sent) == {"bob": "held"}
        assert not list(box.path("agents/bob/inbox/.pending").iterdir())
        box.restart()
        assert box.states(sent) == {"bob": "held"}
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\nSTATUS: completed\n\ndone")
    box.after(61)
    assert not list(box.path("agents/bob/inbox/.pending").iterdir())
    assert box.states(sent) == {"bob": "acked"}
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "1"


def test_retries_and_notices_pause_and_are_made_when_there_is_room(box: Box) -> None:
    with box.broken_inbox("bob"):
        held = box.send("alice", "TO: bob\n\nheld")
    silent = box.send("alice", "TO: carol\nDELIVERY: at-least-once\n\nsilent")
    box.take("carol", silent)
    with failing("create"):
        box.after(62)
        assert box.states(held) == {"bob": "held"}
        box.after(30)
    box.after(2)
    assert box.states(held) == {"bob": "written"}
    assert box.inbox("carol")[silent].headers["ATTEMPT"] == "2"
    logged = [line["event"] for line in box.log if line["event"].startswith("Retries and notices")]
    *refused, again = logged  # a line for each reason, not for each of 92 tries
    assert [line.partition(": ")[2] for line in refused] == [
        f"inbox of {name}: No space left on device" for name in ("bob", "carol")
    ]
    assert again == "Retries and notices are written again"
