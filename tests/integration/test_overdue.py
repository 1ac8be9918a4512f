"""At least once, and no acknowledgment comes: delivered again with the next ATTEMPT, then dead."""

from __future__ import annotations

import errno

import pytest

from relay.base.clock import iso_time
from tests.box import Box
from tests.disk import failing
from tests.procs import rows_of

pytestmark = pytest.mark.shows("engine 7.3", "ready 1.6")

COMMAND = "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\ndeploy"


def attempt(box: Box, agent: str, message_id: str) -> str:
    return box.inbox(agent)[message_id].headers["ATTEMPT"]


def test_the_schedule(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    for number, pause_s in ((2, 1), (3, 2), (4, 4)):
        box.take("bob", sent)  # bob reads it, and says nothing
        box.after(60)
        assert box.states(sent) == {"bob": "read"}
        box.after(pause_s)
        assert box.states(sent) == {"bob": "written"}
        assert attempt(box, "bob", sent) == str(number)
    box.after(60)
    assert box.states(sent) == {"bob": "dead"}
    ((attempts, error),) = box.sql("SELECT attempt, last_error FROM deliveries WHERE state='dead'")
    assert (attempts, error) == (4, "no acknowledgment within 60 s, 4 attempts")
    (nack,) = box.nacks("alice")
    assert nack == (
        "not acknowledged by bob: no acknowledgment within 60 s, 4 attempts; "
        f"`relay dead replay {sent}` tries it again, `relay dead discard {sent}` lets it go; "
        "only operator and the lead may do either\n"
    )
    listed = rows_of("dead", "list", home=box.root)  # it is in the file at once
    assert [row["id"] for row in listed] == [sent]
    box.after(10_000)
    assert len(box.inbox("alice")) == 1


def test_what_the_relay_says_of_it_bears_the_time_at_which_it_is_said(box: Box) -> None:
    box.send("alice", COMMAND)
    box.until_dead()
    ended_ns = box.clock.now_ns()
    ((message_id, nack),) = box.inbox("alice").items()
    assert nack.headers["SENT"] == iso_time(ended_ns)
    query = "SELECT discovered_at FROM messages WHERE message_id = ?"
    assert box.sql(query, message_id) == [(ended_ns,)]
    (shown,) = rows_of("list", "kind:nack", home=box.root)
    assert shown["at"] == iso_time(ended_ns)[:19] + "Z"


def test_one_that_still_stands_in_the_inbox_is_one_file(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    box.after(60)
    box.after(1)
    assert list(box.inbox("bob")) == [sent]
    assert attempt(box, "bob", sent) == "2"


@pytest.mark.shows("engine 7.4")
def test_a_late_ack_takes_it_back(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    box.until_dead()
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted after lunch")
    assert box.states(sent) == {"bob": "acked"}
    assert box.store.retries.dead_letters() == []
    assert [m.body for m in box.inbox("alice").values() if m.kind == "ack"] == [
        b"completed after lunch"
    ]
    assert box.nacks("bob") == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC])
def test_read_while_its_further_attempt_is_held_it_is_awaited_again(box: Box, code: int) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\ndo")
    with failing("create", f"{sent}.msg", code):
        box.after(61)
        box.after(1)
        assert box.states(sent) == {"bob": "held"}
        box.take("bob", sent)
        box.tick()
    for _ in range(8):
        box.after(120)
    assert box.states(sent) == {"bob": "dead"}
    assert len(box.nacks("alice")) == 1


def test_a_replayed_dead_letter_that_waits_is_not_called_discarded_by_a_start(box: Box) -> None:
    box.join("team", "alice", "bob")
    sent = box.send("alice", "TO: #team\nKIND: command\nDELIVERY: at-least-once\n\ndo")
    box.until_dead()
    box.command("alice", "channel.pause", "CHANNEL: team")
    box.command("operator", "dead.replay", f"ID: {sent}")
    box.restart()
    assert box.sql("SELECT discarded_at FROM deliveries WHERE message_id = ?", sent) == [(None,)]


def test_an_ack_after_a_discard_takes_it_back(box: Box) -> None:
    box.join("team", "bob", "carol", "alice")
    sent = box.send("alice", "TO: #team\nDELIVERY: at-least-once\n\ndo")
    box.until_dead()
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted")
    box.command("operator", "dead.discard", f"ID: {sent}")
    box.send("carol", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted")
    assert box.sql(
        "SELECT DISTINCT state, discarded_at FROM deliveries WHERE message_id = ?", sent
    ) == [("acked", None)]


def test_a_discard_counts_for_those_that_were_given_up_by_then(box: Box) -> None:
    """In the ledger, and in one that is made of the journal, which the end of a test compares."""
    box.join("team", "bob", "carol", "alice")
    with box.broken_inbox("bob"):
        sent = box.send("alice", "TO: #team\nDELIVERY: at-least-once\n\ndo")
        box.after(60)
    while box.states(sent)["carol"] != "dead":
        box.after(10)
    assert box.states(sent)["bob"] == "written"
    box.command("operator", "dead.discard", f"ID: {sent}")
    while box.states(sent)["bob"] != "dead":
        box.after(10)
    query = "SELECT recipient, discarded_at IS NULL FROM deliveries WHERE message_id = ? ORDER BY 1"
    assert box.sql(query, sent) == [("bob", 1), ("carol", 0)]
    first = box.sql("SELECT discarded_at FROM deliveries WHERE recipient = 'carol'")
    box.command("operator", "dead.discard", f"ID: {sent}")
    assert box.sql("SELECT discarded_at FROM deliveries WHERE recipient = 'carol'") == first
    assert box.sql(query, sent) == [("bob", 0), ("carol", 0)]
