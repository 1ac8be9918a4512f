"""Killed before each effect of a request and its answer, and of a notice: each is sent once."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from relay.reach.owed import report_state
from relay.reach.session import IDLE, save_session
from tests.box import Box
from tests.crash.test_agent_steps import kill_before_each, received
from tests.kills import Axe, Effect, Killed
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
    found = {str(one.kind): one for one in received(box, "alice")}
    assert len(received(box, "alice")) == 2
    assert found["notification"].headers["RE"] == COMMAND
    assert b"bob is idle and has not answered the command" in found["notification"].body
    assert found["ack"].headers["RE"] == REQUEST
    assert found["ack"].body == f"completed bob is idle and has read {COMMAND}\n".encode()
    assert not list(box.path("agents", "bob", "outbox").glob("*.report"))
    assert box.sql("SELECT count(*) FROM pending_operations WHERE completed_at IS NULL") == [(0,)]


def survive(root: Path, falls_at: int, *, taking: bool) -> list[Effect]:
    """Kill before that effect, start again, and look; the effects until then."""
    with pytest.MonkeyPatch.context() as patch:
        box = Box(root, "alice", "bob")
        session = has_session(box)
        box.send("alice", "TO: bob\nKIND: command\n\ndeploy", f"{COMMAND}.msg")
        box.take("bob", COMMAND)
        box.tick()
        axe = Axe(patch, root)
        axe.falls_at = falls_at
        with contextlib.suppress(Killed):
            scenario(box)
        effects = list(axe.effects)
        axe.falls_at = 0
        box.kill()
        for message_id in box.inbox("alice") if taking else ():
            box.take("alice", message_id)
        session.state, session.state_at = IDLE, box.clock.now_ns()
        save_session(str(box.root), session)
        box.clock.advance(1)
        box.open()
        box.clock.advance(31)
        box.tick(2)
        box.flush()
        check(box)
        box.kill()
    return effects


@pytest.mark.timeout(120)
@pytest.mark.parametrize("taking", [False, True], ids=["unread", "read"])
def test_killed_before_any_effect_each_is_sent_once(tmp_path: Path, taking: bool) -> None:
    assert kill_before_each(survive, tmp_path, taking=taking) > 15
