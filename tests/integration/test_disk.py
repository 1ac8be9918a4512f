"""A full disk: what is accepted waits for its inbox, and goes on by itself."""

from __future__ import annotations

from typing import Any

import pytest

from relay.base.errors import StoreFull
from relay.delivery import retry
from tests.box import Box
from tests.disk import failing
from tests.ledger.support import statements
from tests.process_support import end, registered


@pytest.mark.shows("ready 1.6")
def test_a_message_is_held_and_delivered_when_there_is_room(box: Box) -> None:
    with failing("create"):
        sent = box.send("alice", "TO: *\n\nhi")
        assert box.states(sent) == dict.fromkeys(("bob", "carol", "operator"), "held")
        assert box.sql("SELECT DISTINCT last_error FROM deliveries") == [
            ("the disk takes no file: No space left on device",)
        ]
        assert not list(box.path("agents").glob("*/inbox/.pending/*"))
        events = box.store.sequence
        for pause_s in (1, 2, 3):
            box.after(pause_s, turns=1)
        assert box.store.sequence == events  # the journal grows by no try
    box.after(7, turns=1)
    assert box.states(sent) == {"bob": "written", "carol": "written", "operator": "written"}
    box.flush()
    assert box.row(sent)["status"] == "archived"
    assert box.stored() == [sent]  # numbered once


@pytest.mark.shows("ready 1.6")
def test_what_a_full_disk_holds_is_one_transaction(box: Box) -> None:
    def turn(files: int) -> int:
        for number in range(files):
            box.drop("alice", f"TO: bob\n\n{number}")
        return sum(one.startswith("BEGIN") for one in statements(box.ledger, box.tick))

    with failing("create"):
        assert turn(100) == turn(10)
    assert box.sql("SELECT state, count(*) FROM deliveries GROUP BY 1") == [("held", 110)]
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


def test_retries_and_notices_pause_while_the_store_takes_none(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\ngo")
    box.take("bob", sent)

    def full(*_: object, **__: object) -> None:
        raise StoreFull("the store is full")

    with monkeypatch.context() as patch:
        patch.setattr(box.store.messages, "accept", full)
        box.after(1801)
        box.after(30)
        assert box.bodies("alice") == []
    box.after(2)
    assert [m.kind for m in box.inbox("bob").values()] == ["reminder"]
    logged = [line["event"] for line in box.log if line["event"].startswith("Retries and notices")]
    assert logged == [  # once, and not with each of thirty tries
        "Retries and notices cannot be written, trying again: the store is full",
        "Retries and notices are written again",
    ]


def test_what_is_held_is_read_once_and_not_with_each_look_for_room(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    render = retry.render_retry

    def counted(*args: Any) -> bytes:
        rendered.append(args[2].message_id)
        return render(*args)

    monkeypatch.setattr(retry, "render_retry", counted)
    with failing("create"):
        sent = box.send("alice", "TO: bob\n\nhi")
        for _ in range(60):
            box.after(1, turns=1)
        assert rendered == [sent]
    box.after(61)
    assert box.states(sent) == {"bob": "written"}


def test_that_a_process_ended_is_told_when_there_is_room(box: Box) -> None:
    process = registered(box, "bob")
    box.after(31)
    sent = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\nin_progress")
    box.after(31)
    with failing("create"):
        end(process)
        for seconds in (31, 6, 6):
            box.after(seconds)
    box.after(6)
    (told,) = [m for m in box.inbox("alice").values() if m.kind == "notification"]
    assert told.headers["RE"] == sent
    assert told.body.startswith(f"process {process.pid} of bob ended; ".encode())
