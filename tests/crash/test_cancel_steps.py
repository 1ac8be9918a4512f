"""Killed before each effect of a cancellation: the message is read, or taken back, never both."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.box import Box
from tests.crash.test_agent_steps import kill_before_each
from tests.kills import Axe, Effect, Killed

MESSAGE = "1700000000000000001-01"
REQUEST = "1700000000000000002-02"


def survive(root: Path, falls_at: int, *, taking: bool) -> list[Effect]:
    """Kill before that effect; bob reads what is in his inbox, if ``taking``; start again."""
    with pytest.MonkeyPatch.context() as patch:
        box = Box(root, "alice", "bob")
        box.send("alice", "TO: bob\nKIND: command\n\ndeploy", f"{MESSAGE}.msg")
        box.flush()
        axe = Axe(patch, root)
        axe.falls_at = falls_at
        text = f"TO: __orchestrator__\nKIND: command\n\nACTION: message.cancel\nID: {MESSAGE}"
        with contextlib.suppress(Killed):
            box.drop("alice", text, f"{REQUEST}.msg")
            box.tick()
            box.flush()
        effects = list(axe.effects)
        axe.falls_at = 0
        box.kill()
        was_there = MESSAGE in box.inbox("bob")
        if taking and was_there:
            box.take("bob", MESSAGE)
        box.open()
        box.after(31)
        box.flush()
        ((state, how, why),) = box.sql(
            "SELECT state, read_how, last_error FROM deliveries WHERE message_id = ?", MESSAGE
        )
        if taking and was_there:
            assert (state, how, why) == ("read", "taken", None)
            assert box.nacks("alice") == [f"message {MESSAGE} is not cancelled: bob has read it\n"]
        else:
            assert (state, how, why) == ("expired", None, "cancelled by alice")
            said = f"completed message {MESSAGE} is cancelled: bob did not read it\n"
            assert box.acks("alice") == [said]
        assert box.inbox("bob") == {}
        assert not list(box.path("agents/bob/inbox/.pending").iterdir())
        box.kill()
    return effects


@pytest.mark.parametrize("taking", [False, True], ids=["unread", "read"])
def test_killed_before_any_effect_it_is_read_or_taken_back(tmp_path: Path, taking: bool) -> None:
    assert kill_before_each(survive, tmp_path, taking=taking) > 6
