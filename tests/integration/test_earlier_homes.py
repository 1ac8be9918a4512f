"""Homes that an earlier version left, one stopped and one killed, go on with today's relay: what
was delivered stays, nothing comes twice, and what an old row does not say is not made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.base.home import LEDGER
from relay.ledger.file import SCHEMA_VERSION
from tests.ledger.support import Look
from tests.procs import Relay, earlier_home, relay, rows_of, until


@pytest.fixture(params=["stopped", "killed"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return earlier_home(request.param, tmp_path)


def files(home: Path) -> dict[str, list[str]]:
    """Agent -> the messages that it has, taken or not."""
    return {
        agent.name: sorted(path.stem for path in agent.glob("inbox/**/*.msg"))
        for agent in (home / "agents").iterdir()
    }


def rows(home: Path) -> dict[tuple[str, str], tuple[str, int, bool]]:
    """(message id, recipient) -> state, attempt, and whether it was read."""
    with Look(str(home / LEDGER)) as look:
        query = "SELECT message_id, recipient, state, attempt, read_at IS NOT NULL FROM deliveries"
        found = {(row[0], row[1]): (row[2], row[3], bool(row[4])) for row in look.all(query)}
    return found


def obligations(home: Path) -> set[tuple[str, str]]:
    """(message id, recipient) of the answers that are owed."""
    with Look(str(home / LEDGER)) as look:
        query = "SELECT message_id, recipient FROM deliveries WHERE obligation = 'open'"
        return {(row[0], row[1]) for row in look.all(query)}


def test_an_earlier_home_continues(home: Path) -> None:
    had, were, owed = files(home), rows(home), obligations(home)
    assert len(owed) == 3
    with Relay(home):
        sent = relay("send", "--as", "alice", "bob", "hello, today", home=home).stdout.strip()
        until(lambda: (sent, "bob") in rows(home))
        until(lambda: rows(home)[sent, "bob"][0] == "written")
    have, are = files(home), rows(home)
    for agent, messages in had.items():
        new = [one for one in have[agent] if one not in messages]
        assert [one for one in have[agent] if one in messages] == messages  # once each, as before
        assert all(one == sent or is_the_relays(home, one) for one in new)
    assert obligations(home) >= owed
    for key, (state, attempt, was_read) in were.items():
        now, attempts, is_read = are[key]
        assert is_read or not was_read
        assert now == state or (state, now) == ("written", "dead"), key  # nobody answered
        assert attempts >= attempt

    with Look(str(home / LEDGER)) as look:
        assert look.one("PRAGMA user_version") == SCHEMA_VERSION
    for message_id, _ in were:
        outcome = rows_of("trace", message_id, home=home)[0]["outcome"]
        assert outcome and "not seen in .read" not in outcome
    said = relay("doctor", home=home).stdout.splitlines()
    doctor = [line for line in said if "disk" not in line]
    assert doctor == ["OK"], doctor


def is_the_relays(home: Path, message_id: str) -> bool:
    with Look(str(home / LEDGER)) as look:
        query = "SELECT agent_name FROM messages WHERE message_id = ?"
        return look.all(query, message_id) == [("__orchestrator__",)]
