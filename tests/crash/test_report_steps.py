"""Killed before each effect of a report: it is recorded once, and its file is gone."""

from __future__ import annotations

from pathlib import Path

from relay.reach.report import IN_CONTEXT, OFFERED, RING, write_report
from tests.box import Box
from tests.crash.plays import UNREAD_OR_READ, Play

MESSAGE = "1700000000000000001-01"


def scenario(box: Box) -> None:
    """bob is rung, shown a message, and has seen it."""
    one = {"session": "claude:0089"}
    at = box.clock.now_ns()
    write_report(
        str(box.root),
        "bob",
        [
            one | {"what": RING, "at": at, "rung": "command", "messages": 1, "result": "ok"},
            one | {"what": OFFERED, "at": at, "ids": [MESSAGE], "after": "Stop", "offer": 1},
            one | {"what": IN_CONTEXT, "at": at + 1, "ids": [MESSAGE], "how": "it acted"},
        ],
    )
    box.tick()


def check(box: Box) -> None:
    box.after(31, turns=2)
    assert box.sql("SELECT offer, state, evidence FROM offers") == [(1, "in_context", "it acted")]
    assert box.sql("SELECT rung, result FROM rings") == [("command", "ok")]
    assert not [one for one in box.path("agents/bob/outbox").iterdir() if one.is_file()]


def commanded(root: Path) -> Box:
    box = Box(root, "alice", "bob")
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy", f"{MESSAGE}.msg")
    return box


@UNREAD_OR_READ
def test_killed_before_any_effect_it_is_recorded_once(tmp_path: Path, taking: bool) -> None:
    play = Play(commanded, scenario, check, readers=("bob",))
    assert play.kill_before_each(tmp_path, taking=taking) > 4
