"""A value in the ledger that is not of its column's type, set by hand: every command names it."""

from __future__ import annotations

import shlex

import pytest

from relay.base.errors import EXIT_FINDINGS, LedgerError
from tests.box import Box
from tests.procs import relay

pytestmark = pytest.mark.damages


@pytest.mark.parametrize(
    ("change", "commands", "said"),
    [
        ("deliveries SET due_at = 'soon'", "list; open; unread", "due_at is 'soon'"),
        ("deliveries SET staged_at = x'00'", "trace {id}", "staged_at is X'00'"),
        ("messages SET discovered_at = 1.5", "show {id}; trace {id}", "discovered_at is 1.5"),
        ("deliveries SET written_at = 'x'", "agents; status", "written_at is 'x'"),
    ],
)
def test_a_value_set_by_hand_is_named_by_the_command_that_meets_it(
    box: Box, change: str, commands: str, said: str
) -> None:
    sent = box.send("alice", "TO: bob\nKIND: query\n\nwhich branch?")
    box.flush()
    box.stop()
    table, _, _ = change.partition(" ")
    box.sql(f"UPDATE {change} WHERE message_id = ?", sent)
    for command in commands.format(id=sent).split("; "):
        done = relay(*shlex.split(command), home=box.root)
        row = f", expected INTEGER, in the row of {table} where "
        assert done.stderr.startswith(f"relay: {box.root}/ledger.db: {said}{row}"), command
        assert f"message_id = '{sent}'" in done.stderr and "sqlite3; or make all" in done.stderr
        assert done.stderr.count("\n") == 1 and done.returncode == LedgerError.exit_code
    found = relay("doctor", home=box.root)
    assert said in found.stdout and found.returncode == EXIT_FINDINGS
    assert relay("ledger", "rebuild", home=box.root).returncode == 0
    for command in commands.format(id=sent).split("; "):
        assert "expected INTEGER" not in relay(*shlex.split(command), home=box.root).stderr


def test_a_relay_that_meets_one_says_so(box: Box) -> None:
    """Of a table that no journal has: a rebuild would take it over."""
    box.flush()
    box.stop()
    box.sql("UPDATE agents SET last_seen_at = 'soon' WHERE name = 'bob'")
    done = relay("up", home=box.root)
    said = "last_seen_at is 'soon', expected INTEGER, in the row of agents where name = 'bob'"
    advice = "stop the relay, and set it right with sqlite3"
    assert done.stderr == f"relay: {box.root}/ledger.db: {said}; {advice}\n"
    assert done.returncode == LedgerError.exit_code
    assert box.path("logs", "relay.err").read_bytes() == b""
    box.sql("UPDATE agents SET last_seen_at = NULL")
    assert relay("doctor", home=box.root).returncode == 0


def test_another_error_is_one(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    from relay.cli import run
    from relay.views import trace

    def fails(*_: object) -> None:
        raise TypeError("a fault of the program")

    monkeypatch.setattr(trace, "resolve_id", fails)
    with pytest.raises(TypeError, match="a fault of the program"):
        run(["--home", str(box.root), "trace", "ab"])
