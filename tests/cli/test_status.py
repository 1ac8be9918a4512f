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
