"""What others hear of an idle agent: who waits for its answer, and who asked for it."""

from __future__ import annotations

import os

import pytest

from relay.base.process_info import started_at
from relay.reach.report import STATE, write_report
from relay.reach.session import IDLE, WORKING, Session, load_session, remove_session, save_session
from tests.box import Box

ASK = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.notify_idle\nNAME: {}"


def has_session(box: Box, state: str = WORKING, agent: str = "bob") -> Session:
    """A running session of an agent: this process."""
    session = Session("claude", f"of-{agent}")
    session.agent, session.state, session.state_at = agent, state, box.clock.now_ns()
    session.pid, session.pid_start = os.getpid(), started_at(os.getpid())
    box.path("sessions").mkdir(mode=0o700, exist_ok=True)
    save_session(str(box.root), session)
    return session


def is_now(box: Box, state: str, *owes: str, agent: str = "bob") -> None:
    """The hook of an agent reports its state, and writes it into the session's file."""
    session = load_session(str(box.root), "claude", f"of-{agent}")
    assert session is not None
    session.state, session.state_at = state, box.clock.now_ns()
    save_session(str(box.root), session)
    line = {"what": STATE, "state": state, "owes": owes, "session": session.key}
    write_report(str(box.root), agent, [line | {"at": session.state_at}])
    box.tick()


def is_read(box: Box, kind: str = "command") -> str:
    """A message that bob has read; its id."""
    sent = box.send("alice", f"TO: bob\nKIND: {kind}\n\ndeploy")
    box.take("bob", sent)
    box.tick()
    return sent


def told(box: Box, agent: str = "alice") -> list[str]:
    """What the relay wrote to an agent: kind and first line."""
    return [f"{m.kind} {m.body.decode().splitlines()[0]}" for m in box.inbox(agent).values()]


# -- without an answer ---------------------------------------------------------------------------


def test_the_sender_hears_once_that_it_is_idle_and_has_not_answered(box: Box) -> None:
    has_session(box)
    asked = is_read(box)
    box.clock.advance(180)
    is_now(box, IDLE, asked)
    text = 'bob is idle and has not answered the command sent 3 min ago ("deploy"): it has read it'
    assert told(box) == [f"notification {text}"]
    (notice,) = box.inbox("alice").values()
    assert notice.headers["RE"] == asked
    for state in (WORKING, IDLE):
        is_now(box, state, asked)
    box.restart()
    is_now(box, IDLE, asked)
    assert len(told(box)) == 1


def test_a_state_is_believed_after_the_clock_was_set_back(box: Box) -> None:
    has_session(box)
    is_now(box, WORKING)
    box.clock.jump(-3600)
    asked = is_read(box)
    is_now(box, IDLE, asked)
    (text,) = told(box)
    assert text.startswith("notification bob is idle and has not answered the command")


def test_what_was_answered_meanwhile_is_not_told(box: Box) -> None:
    has_session(box)
    asked = is_read(box)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted")
    before = told(box)
    is_now(box, IDLE, asked, "1700000000000000000-ab")
    assert told(box) == before


def test_it_is_told_that_the_work_was_begun(box: Box) -> None:
    has_session(box)
    asked = is_read(box)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\nin_progress")
    is_now(box, IDLE, asked)
    assert told(box)[-1].endswith('sent 0 s ago ("deploy"): it began it 0 s ago')


def test_a_report_that_a_crash_lost_is_made_up_for_at_the_start(box: Box) -> None:
    has_session(box)
    unread = box.send("alice", "TO: bob\nKIND: command\n\nsoon")
    asked = is_read(box)
    box.kill()
    has_session(box, IDLE)  # its hooks write the file, whatever becomes of the report
    box.open()
    box.tick()
    assert [m.headers["RE"] for m in box.inbox("alice").values()] == [asked]
    assert unread in box.inbox("bob")


def test_without_a_report_it_is_found_in_the_file(box: Box) -> None:
    has_session(box)
    is_read(box)
    box.after(6)
    assert told(box) == []
    has_session(box, IDLE)
    box.after(6)
    assert len(told(box)) == 1
    later = is_read(box)  # it looked into its inbox: no prompt, no hook
    box.after(6)
    assert len(told(box)) == 1
    has_session(box, WORKING)
    box.after(6)
    has_session(box, IDLE)
    box.after(6)
    assert {m.headers["RE"] for m in box.inbox("alice").values()} >= {later}
    assert len(told(box)) == 2


def test_told_when_there_is_room_again(box: Box) -> None:
    has_session(box)
    asked = is_read(box)
    with box.broken_inbox("alice"):
        is_now(box, IDLE, asked)
    box.after(5)
    assert len(told(box)) == 1


# -- asked for -----------------------------------------------------------------------------------


def asks(box: Box, *lines: str, name: str = "bob") -> str:
    """alice asks to be told when an agent is idle; the id."""
    return box.send("alice", "\n".join([ASK.format(name), *lines]))


def test_answered_once_it_is_idle_with_the_message(box: Box) -> None:
    has_session(box, IDLE)
    sent = box.send("alice", "TO: bob\n\nhi")
    asked = asks(box, f"ID: {sent}")
    box.after(6)
    assert told(box) == []  # idle, and it has not read the message
    is_now(box, WORKING)
    box.take("bob", sent)
    box.after(6)
    assert told(box) == []
    is_now(box, IDLE)
    assert told(box) == [f"ack completed bob is idle and has read {sent}"]
    (ack,) = box.inbox("alice").values()
    assert ack.headers["RE"] == asked
    is_now(box, WORKING)
    is_now(box, IDLE)
    assert len(told(box)) == 1
    assert box.sql("SELECT count(*) FROM pending_operations WHERE completed_at IS NULL") == [(0,)]


def test_answered_at_once_if_it_is_idle_now(box: Box) -> None:
    has_session(box, IDLE)
    asks(box)
    assert told(box) == ["ack completed bob is idle"]


def test_a_state_that_was_not_reported_is_found_in_the_file(box: Box) -> None:
    has_session(box)
    asks(box)
    has_session(box, IDLE)
    assert told(box) == []
    box.after(6)
    assert told(box) == ["ack completed bob is idle"]


def test_given_up_in_time(box: Box) -> None:
    has_session(box)
    asks(box, "WITHIN: 90s")
    sent = box.send("alice", "TO: bob\n\nhi")
    asks(box, f"ID: {sent}", "WITHIN: 3m")
    box.after(60)
    assert told(box) == []
    box.after(31)
    assert told(box) == ["nack bob was not idle within 90 s"]
    box.after(91)
    assert f"nack bob has not read {sent} within 3 min" in told(box)
    assert len(told(box)) == 2


def test_told_when_its_session_ends_and_no_other_follows(box: Box) -> None:
    session = has_session(box)
    asks(box)
    remove_session(str(box.root), session)
    box.after(6)
    has_session(box)  # another one: it was /clear
    box.after(6)
    box.after(60)
    assert told(box) == []
    remove_session(str(box.root), session)
    box.after(6)
    box.after(11)
    assert told(box) == ["nack the session of bob has ended"]


def test_told_when_the_message_does_not_reach_it(box: Box) -> None:
    has_session(box, IDLE)
    bad = box.send("alice", "TO: bob\nKIND: wish\n\nhi")
    refused = asks(box, f"ID: {bad}")
    with box.broken_inbox("bob"):
        bounced = box.send("alice", "TO: bob\nTTL: 5\n\nhi")
        lost = asks(box, f"ID: {bounced}")
        box.after(6)
        box.after(6)
    other = box.send("carol", "TO: bob\n\nhi")
    foreign = asks(box, f"ID: {other}")
    answers = {m.headers["RE"]: m.body.decode() for m in box.inbox("alice").values()}
    assert answers[refused] == f"message {bad} was refused\n"
    assert answers[lost] == f"message {bounced} did not reach bob: it is expired\n"
    assert answers[foreign] == f"you have sent no message {other} to bob\n"


def test_a_request_before_its_message_waits_for_it(box: Box) -> None:
    has_session(box, IDLE)
    asks(box, "ID: 1700000000999999999-ab")
    box.after(6)
    assert told(box) == []
    box.send("alice", "TO: bob\n\nhi", "1700000000999999999-ab.msg")
    box.take("bob", "1700000000999999999-ab")
    box.after(6)
    assert told(box) == ["ack completed bob is idle and has read 1700000000999999999-ab"]


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        ("nobody", [], "there is no agent nobody: `relay agents` lists them"),
        ("carol", [], "carol has no running session whose hooks report to the relay"),
        ("#ci", [], "NAME '#ci' is not a valid agent name"),
        ("*", [], "NAME '*' is not a valid agent name"),
        ("bob", ["ID: ../x"], "ID '../x' is not a message id"),
        ("bob", ["WITHIN: soon"], "WITHIN: 'soon' is not a duration"),
        ("bob", ["WITHIN: 0s"], "WITHIN: '0s' is not a duration"),
        ("bob", ["WHEN: now"], "agent.notify_idle does not accept WHEN"),
    ],
)
def test_what_cannot_be_told_is_refused(box: Box, name: str, lines: list[str], said: str) -> None:
    has_session(box)
    asks(box, *lines, name=name)
    assert told(box)[0].startswith(f"nack {said}")


def test_a_session_that_has_ended_without_a_word_is_none(box: Box) -> None:
    session = has_session(box)
    session.pid_start = 1  # the pid is another process's now
    save_session(str(box.root), session)
    asks(box)
    assert told(box)[0].startswith("nack bob has no running session")
