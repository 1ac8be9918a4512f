"""What `relay agents`, `agents show` and `top` say of agents whose CLI has sessions."""

from __future__ import annotations

import time

import pytest

from relay.base.clock import NS_PER_S, local_time
from relay.reach import session as sessions
from relay.reach.session import BLOCKED, FAILING, IDLE, WORKING, Session, load_session, save_session
from relay.views.attention import attention
from tests.box import Box
from tests.procs import relay, rows_of
from tests.reach.test_idle_notices import has_session
from tests.terminals import lines_in_a_terminal


@pytest.fixture
def busy(box: Box) -> Box:
    """alice works, bob is idle and owes two answers, carol is blocked; dave's session is gone."""
    box.home.make_agent("dave")
    box.home.make_agent("eve")
    for name, state in (("alice", WORKING), ("bob", IDLE), ("carol", BLOCKED), ("dave", IDLE)):
        changed(box, has_session(box, state, name))
    gone = has_session(box, IDLE, "dave")
    gone.pid_start = 1
    changed(box, gone)
    for text in ("deploy", "roll back"):
        sent = box.send("alice", f"TO: bob\nKIND: command\n\n{text}")
        box.take("bob", sent)
    box.send("bob", "TO: __orchestrator__\nKIND: status\n\nreviewing the change to the parser")
    box.tick()
    return box


def changed(box: Box, session: Session, **facts: object) -> None:
    """Change the file of a session that was seen a minute ago."""
    session.seen_at = time.time_ns() - 60 * NS_PER_S
    session.state_at = session.seen_at
    for name, value in facts.items():
        setattr(session, name, value)
    save_session(str(box.root), session)


def seen(box: Box, agent: str) -> str:
    """When the session of an agent was seen, as it is shown."""
    session = load_session(str(box.root), "claude", f"of-{agent}")
    assert session is not None
    return local_time(session.seen_at)


def test_a_terminal_shows_what_each_does(busy: Box) -> None:
    lines = lines_in_a_terminal(busy.root, 120, "agents")
    shown = {line.split()[0]: line for line in lines}
    assert shown["alice"].endswith("  working")
    assert shown["bob"].endswith("  idle and owes 2; reviewing the change to the parser")
    assert f"  blocked on a person since {seen(busy, 'carol')}" in shown["carol"]
    assert shown["dave"].endswith(f"  not seen since {seen(busy, 'dave')}")
    assert shown["eve"].endswith("  -")
    page = lines_in_a_terminal(busy.root, 120, "agents show bob")
    assert "  note      idle and owes 2; reviewing the change to the parser" in page
    assert any(line.startswith("  session   claude:of-bob, seen 6") for line in page)


def test_the_same_in_json(busy: Box) -> None:
    found = {row["name"]: row for row in rows_of("agents", home=busy.root)}
    assert {name: row["state"] for name, row in found.items()} == {
        "alice": "working",
        "bob": "idle",
        "carol": "blocked",
        "dave": "unseen",
        "eve": None,
        "operator": None,
    }
    bob = found["bob"]
    assert (bob["owed"], bob["session"]) == (2, "claude:of-bob")
    assert bob["state_since"] == bob["session_seen_at"] < bob["last_seen_at"]
    assert found["eve"]["owed"] == 0
    (page,) = rows_of("agents", "show", "bob", home=busy.root)
    assert page["state"] == "idle" and page["owed"] == 2


def test_an_error_that_ended_a_turn_is_said(busy: Box) -> None:
    changed(busy, has_session(busy, FAILING, "alice"), error="rate limit")
    (alice,) = [
        line for line in relay("agents", home=busy.root).stdout.splitlines() if "alice" in line
    ]
    assert alice.endswith(f"  failing: rate limit, since {seen(busy, 'alice')}")
    found = {row["name"]: row["state_error"] for row in rows_of("agents", home=busy.root)}
    assert (found["alice"], found["bob"]) == ("rate limit", None)


def test_who_is_woken_and_reads_nothing_waits_for_a_person(
    busy: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "is_ringing", lambda *_: True)
    sent = busy.send("alice", "TO: bob\n\nhi")
    busy.tick()
    changed(busy, has_session(busy, IDLE, "bob"), woken=3, woken_for=[sent])

    def items() -> list[str]:
        return [one.what for one in attention(busy.home) if one.key == "bell:bob"]

    said = "1 message unread, and it was woken 3 times, and read nothing"
    assert items() == [f"{said}: it is not woken until it reads"]
    busy.take("bob", sent)
    busy.tick()
    assert items() == []


def test_who_works_and_gave_no_sign_for_long_is_not_seen(busy: Box) -> None:
    session = has_session(busy, WORKING, "alice")
    session.seen_at = time.time_ns() - 601 * NS_PER_S
    save_session(str(busy.root), session)
    (alice,) = [row for row in rows_of("agents", home=busy.root) if row["name"] == "alice"]
    assert alice["state"] == "unseen"
    session.state = IDLE  # one that waits at its prompt is idle, however long
    save_session(str(busy.root), session)
    (alice,) = [row for row in rows_of("agents", home=busy.root) if row["name"] == "alice"]
    assert alice["state"] == "idle"


def test_a_session_that_has_ended_is_not_seen_since(busy: Box) -> None:
    changed(busy, has_session(busy, "ended"), pid=0)
    (bob,) = [row for row in rows_of("agents", home=busy.root) if row["name"] == "bob"]
    assert bob["state"] == "ended"
    assert (
        f"  not seen since {seen(busy, 'bob')}; reviewing" in relay("agents", home=busy.root).stdout
    )


def test_the_session_that_runs_counts(busy: Box) -> None:
    old = Session("codex", "old")
    old.agent, old.state, old.seen_at = "bob", BLOCKED, time.time_ns()
    save_session(str(busy.root), old)
    (bob,) = [row for row in rows_of("agents", home=busy.root) if row["name"] == "bob"]
    assert (bob["state"], bob["session"]) == ("idle", "claude:of-bob")


@pytest.mark.parametrize("text", ["no json", "[]", '{"session_id": 3}'])
def test_damaged_sessions_are_left_out(busy: Box, text: str) -> None:
    busy.path("sessions", "claude-of-bob.json").write_text(text)
    busy.path("sessions", "claude-x.json").write_text(
        '{"harness": "claude", "session_id": "x", "agent": ["eve"], "pid": "1", "state_at": {}}'
    )
    found = {row["name"]: row["state"] for row in rows_of("agents", home=busy.root)}
    assert (found["bob"], found["eve"]) == (None, None)
    busy.dispatcher.idle.check_soon()
    busy.tick()
