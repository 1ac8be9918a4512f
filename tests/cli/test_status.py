"""``relay status``: its numbers are those that the lists have."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from relay.cli import cli
from tests.box import Box


def run(box: Box, *args: str) -> str:
    """What a command prints, in this process."""
    done = CliRunner().invoke(cli, ["--home", str(box.root), *args])
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def status_text(box: Box) -> str:
    """What a person sees."""
    return run(box, "status")


def status(box: Box) -> dict[str, Any]:
    """What programs get."""
    facts: dict[str, Any] = json.loads(run(box, "status", "--json"))
    return facts


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
    listed = [json.loads(line)["id"] for line in run(box, "failed", "--json").splitlines()]
    assert {several, asked, lost} < {*listed} and not {cancelled, gone} & {*listed}
    assert status(box)["failed"] == len(listed)
