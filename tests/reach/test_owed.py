"""What an agent hears when it stops with answers owed, from a real ledger."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from relay.base.clock import NS_PER_S
from relay.reach.owed import MOST_BLOCKS, MOST_TOLD, at_stop, report_state
from relay.reach.session import BLOCKED, IDLE, WORKING, Session
from tests.box import Box
from tests.reach.hooks import reports_of


class Bob:
    """A session of bob's agent CLI beside a relay in a box."""

    def __init__(self, box: Box, session_id: str = "s-1") -> None:
        self.box = box
        self.session = Session("claude", session_id)
        self.session.agent = "bob"

    def prompt(self) -> None:
        """A person, or the bell, gives a prompt."""
        self.session.begin_turn()

    def stop(self) -> str | None:
        """It wants to stop; the text that keeps it, or None."""
        text = at_stop(str(self.box.root), self.session, self.box.clock.now_ns())
        self.session.blocks += text is not None
        return text

    def is_asked(self, kind: str = "command", sender: str = "alice") -> str:
        """A command or query, sent and read by bob; its id."""
        sent = self.box.send(sender, f"TO: bob\nKIND: {kind}\n\ndeploy")
        self.box.take("bob", sent)
        self.box.tick()
        return sent

    def says(self, kind: str, asked: str, body: str) -> None:
        """Answer, and let the relay take it."""
        self.box.send("bob", f"TO: alice\nKIND: {kind}\nRE: {asked}\n\n{body}")


@pytest.fixture
def bob(box: Box, monkeypatch: pytest.MonkeyPatch) -> Bob:
    """His first session; its environment names him."""
    monkeypatch.setenv("AGENT_RELAY_NAME", "bob")
    return Bob(box)


def test_who_stops_hears_what_it_owes_twice_at_most(bob: Bob) -> None:
    asked = bob.is_asked()
    bob.box.clock.advance(12 * 60)

    heard = bob.stop()
    assert heard == (
        f"agent-relay: alice has waited 12 min for an answer to command {asked}: "
        f"`relay ack {asked} completed`, or `relay nack {asked} REASON`."
    )
    assert bob.stop() is None  # nothing changed since
    bob.prompt()
    assert bob.stop() == heard
    bob.prompt()
    assert bob.stop() is None  # it heard of it twice
    assert bob.session.told == {asked: MOST_TOLD}


def test_a_query_is_answered_by_a_reply_and_a_message_by_nothing(bob: Bob) -> None:
    bob.is_asked("message")
    assert bob.stop() is None
    asked = bob.is_asked("query")
    assert f"query {asked}: `relay reply {asked} ANSWER`" in (bob.stop() or "")


def test_an_answered_one_is_not_named_again(bob: Bob) -> None:
    first, second = bob.is_asked(), bob.is_asked()
    assert first in (bob.stop() or "")
    bob.says("ack", first, "completed")
    heard = bob.stop() or ""  # something changed: the other one is named again
    assert second in heard and first not in heard
    bob.says("nack", second, "no such branch")
    assert bob.stop() is None
    assert bob.session.told == {}


def test_no_more_than_three_stops_in_a_row_are_refused(bob: Bob) -> None:
    heard = []
    for _ in range(MOST_BLOCKS + 2):
        bob.is_asked()
        heard.append(bob.stop() is not None)
    assert heard == [True, True, True, False, False]
    bob.prompt()
    assert bob.stop() is not None


def test_what_it_was_not_shown_yet_is_not_named(bob: Bob) -> None:
    sent = bob.box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    assert bob.stop() is None
    bob.box.take("bob", sent)  # the relay does not know of it yet
    assert sent in (bob.stop() or "")


@pytest.mark.parametrize("answer", ["ack: completed", "nack: no", "response: main"])
def test_an_answer_that_waits_in_the_outbox_counts(bob: Bob, answer: str) -> None:
    asked = bob.is_asked()
    bob.box.stop()
    kind, _, body = answer.partition(": ")
    for end in ("\n", "\r\n"):
        text = f"TO: alice\nKIND: {kind}\nRE: {asked}\n\n".replace("\n", end)
        name = bob.box.drop("bob", text + body)
        assert bob.stop() is None
        os.remove(bob.box.path("agents", "bob", "outbox", f"{name}.msg"))
    bob.box.drop("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\nin_progress")
    assert asked in (bob.stop() or "")


def test_of_many_five_are_named_and_the_rest_counted(bob: Bob) -> None:
    for _ in range(7):
        bob.is_asked()
    lines = (bob.stop() or "").splitlines()
    assert len(lines) == 6
    assert lines[-1] == "2 more answers owed: `relay open --agent bob` lists all"


def test_no_relay_has_to_run(bob: Bob) -> None:
    asked = bob.is_asked()
    bob.box.stop()
    assert not bob.box.path("ledger.db-wal").exists()
    assert asked in (bob.stop() or "")
    assert asked in (Bob(bob.box, "s-2").stop() or "")  # another session hears of it, too


@pytest.mark.damages
@pytest.mark.parametrize("how", ["missing", "cut", "noise", "empty", "pipe", "folder", "no table"])
def test_a_ledger_that_cannot_be_used_owes_nothing(bob: Bob, how: str) -> None:
    bob.is_asked()
    bob.box.stop()
    path = bob.box.path("ledger.db")
    data = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "noise":
        path.write_bytes(os.urandom(8192))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "no table":
        sqlite3.connect(path).close()
    assert bob.stop() is None


def test_a_locked_ledger_owes_nothing(bob: Bob, tmp_path: Path) -> None:
    asked = bob.is_asked()
    bob.box.stop()
    path = bob.box.path("ledger.db")
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        assert bob.stop() is None
    other.close()
    assert asked in (bob.stop() or "")


def test_a_change_of_its_state_is_reported_once(bob: Bob) -> None:
    asked = bob.is_asked()
    for state in (WORKING, WORKING, BLOCKED, WORKING, IDLE, IDLE):
        report_state(str(bob.box.root), bob.session, state)
    at = bob.session.state_at
    assert abs(at - os.stat(bob.box.path("agents", "bob", "outbox")).st_mtime_ns) < 60 * NS_PER_S
    found = reports_of(bob.box.root, "bob")
    assert [one["state"] for one in found] == [WORKING, BLOCKED, WORKING, IDLE]
    last = {"what": "state", "session": "claude:s-1", "at": at, "state": "idle", "owes": [asked]}
    assert found[-1] == last


def test_a_mailbox_that_is_gone_disturbs_nothing(bob: Bob) -> None:
    bob.session.agent = "nobody"
    report_state(str(bob.box.root), bob.session, WORKING)
    assert bob.session.state == WORKING
    assert bob.stop() is None
