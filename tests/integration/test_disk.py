"""A full disk: messages wait in their outboxes and go on by themselves."""

from __future__ import annotations

import errno

import pytest

from relay.base import fsio
from tests.box import Box
from tests.disk import failing
from tests.ledger.support import statements


class FullDisk:
    """Fails every creation of a file whose name contains ``pattern``, while it is full.

    What is written into a segment was allocated before: a full disk takes that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pattern: str = "") -> None:
        self.pattern = pattern
        self.full = True
        monkeypatch.setattr(fsio, "fault", self)

    def __call__(self, operation: str, name: str) -> None:
        if self.full and operation in ("create", "write") and self.pattern in name:
            if operation == "write" and name.endswith(".seg"):
                return
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.shows("ready 1.6")
def test_a_message_waits_in_its_outbox_and_continues_by_itself(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    name = box.name()
    sent = box.send("alice", "TO: *\n\nhi", name)
    assert box.row(sent)["status"] == "pending"
    assert "No space left" in box.row(sent)["last_error"]
    assert box.outbox("alice") == [name]
    assert not list(box.path("agents").glob("*/inbox/.pending/*"))

    box.after(1, turns=1)
    assert box.row(sent)["retry_count"] == 2
    disk.full = False
    box.after(2, turns=1)
    assert box.states(sent) == {"bob": "written", "carol": "written", "operator": "written"}
    box.flush()
    assert box.row(sent)["status"] == "archived"
    assert box.stored() == [sent]  # numbered once


@pytest.mark.shows("ready 1.6")
def test_what_a_full_disk_postpones_is_one_transaction(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(files: int) -> int:
        for number in range(files):
            box.drop("alice", f"TO: bob\n\n{number}")
        return sum(one.startswith("BEGIN") for one in statements(box.ledger, box.tick))

    disk = FullDisk(monkeypatch)
    assert turn(100) == turn(10)
    assert box.sql("SELECT status, retry_count, count(*) FROM messages GROUP BY 1, 2") == [
        ("pending", 1, 110)
    ]
    disk.full = False
    box.after(60, turns=3)
    assert len(box.inbox("bob")) == 110


def test_a_refusal_waits_like_any_message(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    box.drop("alice", "TO: bob\n\nhi", "hello.msg")
    box.tick()
    assert box.inbox("alice") == {}
    disk.full = False
    box.after(1, turns=1)
    assert "hello.msg is not a valid message name" in box.nacks("alice")[0]


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
