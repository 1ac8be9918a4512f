"""A ledger whose rows or schema are not those of a relay is found."""

from __future__ import annotations

import sqlite3

import pytest

from relay.ledger import Ledger
from relay.ledger.check import check, check_file
from tests.ledger.support import record

DELIVERY = "INSERT INTO deliveries (message_id, recipient, state{0}) VALUES ('{2}', 'bob', {1})"


def told(path: str) -> list[str]:
    """The findings' text."""
    with sqlite3.connect(path) as db:
        found = [one.text for one in check(db, "it")]
    db.close()
    return found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DELETE FROM messages", "{0} > bob is a delivery without its message"),
        (
            "UPDATE messages SET status = 'completed'",
            "{0} is completed without a time of processing",
        ),
        ("UPDATE messages SET status = 'failed'", "{0} is failed without a reason"),
        ("UPDATE deliveries SET state = 'written'", "{0} > bob is written without a time"),
        ("UPDATE deliveries SET obligation = 'x'", "{0} > bob is an obligation that is not one"),
        ("UPDATE deliveries SET state = 'held'", "{0} > bob is held without a time of its next"),
        ("DROP TRIGGER audit_log_keeps_rows", "its schema lacks trigger audit_log_keeps_rows"),
        ("PRAGMA user_version = 99", "its schema is 99, this agent-relay supports"),
    ],
)
def test_a_change_by_hand_is_found(
    ledger: Ledger, ledger_path: str, change: str, problem: str
) -> None:
    (one,) = record(ledger, 1)
    ledger._db.execute(DELIVERY.format("", "'staged'", one))
    assert told(ledger_path) == []
    ledger._db.execute(change)
    (line,) = told(ledger_path)
    assert line.startswith(problem.format(one))
    errors, content = check_file(ledger_path)
    assert (len(errors), content) == (1, None)
