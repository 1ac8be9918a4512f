"""Killed before each effect of a request and its answer, and of a notice: each is sent once."""

from __future__ import annotations

from pathlib import Path

from relay.reach.owed import report_state
from relay.reach.session import IDLE, save_session
from tests.box import Box
from tests.crash.plays import UNREAD_OR_READ, Play, received
from tests.reach.test_idle_notices import ASK, has_session

COMMAND = "1700000000000000001-01"
REQUEST = "1700000000000000002-02"


def scenario(box: Box) -> None:
    """alice waits for bob, who has read her command and is idle without an answer."""
    request = f"{ASK.format('bob')}\nID: {COMMAND}"
    box.drop("alice", request, f"{REQUEST}.msg")
    box.tick()
    report_state(str(box.root), has_session(box), IDLE)
    box.tick()
    box.flush()


def check(box: Box) -> None:
    """One notice and one answer, and nothing is waited for."""
    box.after(31, turns=2)
    box.flush()
    found = {str(one.kind): one for one in received(box, "alice")}
    assert len(received(box, "alice")) == 2
    assert found["notification"].headers["RE"] == COMMAND
    assert b"bob is idle and has not answered the command" in found["notification"].body
    assert found["ack"].headers["RE"] == REQUEST
    assert found["ack"].body == f"completed bob is idle and has read {COMMAND}\n".encode()
    assert not list(box.path("agents", "bob", "outbox").glob("*.report"))
    assert box.sql("SELECT count(*) FROM pending_operations WHERE completed_at IS NULL") == [(0,)]


def asked(root: Path) -> Box:
    """bob has read a command."""
    box = Box(root, "alice", "bob")
    has_session(box)
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy", f"{COMMAND}.msg")
    box.take("bob", COMMAND)
    box.tick()
    return box


def idle(box: Box) -> None:
    session = has_session(box)
    session.state, session.state_at = IDLE, box.clock.now_ns()
    save_session(str(box.root), session)
    box.clock.advance(1)


@UNREAD_OR_READ
def test_killed_before_any_effect_each_is_sent_once(tmp_path: Path, taking: bool) -> None:
    play = Play(asked, scenario, check, idle, readers=("alice",))
    assert play.kill_before_each(tmp_path, taking=taking) > 15
