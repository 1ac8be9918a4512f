"""``relay status``: its numbers are those that the lists have."""

from __future__ import annotations

from typing import Any

from tests.box import Box
from tests.procs import relay, rows_of


def status(box: Box) -> dict[str, Any]:
    """What programs get."""
    (facts,) = rows_of("status", home=box.root, exit_code=5)  # no relay is running
    return facts


def status_text(box: Box) -> str:
    """What a person sees."""
    return relay("status", home=box.root).stdout


def test_messages_are_counted_whatever_their_numbers(box: Box) -> None:
    """A row that a crash rolled back has used up its number."""
    box.send("alice", "TO: bob\n\none")
    with box.ledger.transaction():
        box.ledger._db.execute("UPDATE sqlite_sequence SET seq = seq + 3 WHERE name = 'messages'")
    box.send("alice", "TO: bob\n\ntwo")
    assert box.sql("SELECT max(id) FROM messages") == [(5,)]
    assert status(box)["messages"] == 2


def test_what_failed_is_one_number(box: Box) -> None:
    """Status counts what `relay failed` lists, whatever it is that failed, and points to it."""
    assert (status(box)["failed"], "what failed" in status_text(box)) == (0, False)
    taken = box.send("alice", "TO: bob\n\nhi")
    box.send("bob", "TO: alice\n\nanother", f"{taken}.msg")
    assert status(box)["failed"] == 1
    assert "failed` lists what failed, and why" in status_text(box)
    box.send("alice", "TO: bob\n\nhi", "hello.msg")
    box.send("alice", "TO: bbo\n\ntypo?")
    box.command("operator", "dead.discard", "ID: 1-a")  # refused by a nack
    cancelled = box.send("alice", "TO: bob\nKIND: command\n\nlater")
    box.send("alice", f"TO: __orchestrator__\nKIND: command\n\nACTION: cancel\nID: {cancelled}")
    several = box.send("alice", "TO: *\nKIND: command\n\ndeploy")
    box.send("bob", f"TO: alice\nKIND: nack\nRE: {several}\n\nno such branch")
    asked = box.send("alice", "TO: carol\nKIND: query\n\nwhich?")
    lost, gone = (box.send("alice", f"TO: bob\nDELIVERY: at-least-once\n\n{n}") for n in "ab")
    box.until_dead()
    box.command("operator", "dead.discard", f"ID: {gone}")
    box.flush()
    listed = [row["id"] for row in rows_of("failed", home=box.root)]
    assert {several, asked, lost} < {*listed} and not {cancelled, gone} & {*listed}
    assert status(box)["failed"] == len(listed)
