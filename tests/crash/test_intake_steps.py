"""Killed between any two effects of what intake refuses by itself: told once, kept once."""

from __future__ import annotations

import os
from pathlib import Path

from tests.box import Box
from tests.crash.plays import Play

NAME = "1000000001-01.msg"


def left(box: Box) -> None:
    """A message that its writer left in .pending, an hour later."""
    box.path("agents", "alice", "outbox", ".pending", NAME).write_text("TO: bob\n\na long report")
    box.after(3700)


def check_left(box: Box) -> None:
    """It is refused once, and its file is kept."""
    kept = [path.name for path in box.path("archive").glob("*/alice/rejected/*")]
    assert kept == [NAME]
    (nack,) = box.nacks("alice")
    assert "found in .pending" in nack
    assert len(box.sql("SELECT 1 FROM rejections")) == 1
    assert os.listdir(box.path("agents", "alice", "outbox", ".pending")) == []
    assert box.inbox("bob") == {}


def twice(box: Box) -> None:
    """Looked at after this start, and after another one."""
    box.tick(2)
    check_left(box)
    box.kill()
    box.clock.advance(3601)
    box.open()
    box.tick(2)
    check_left(box)


def test_killed_before_any_effect_it_ends_the_same(tmp_path: Path) -> None:
    play = Play(
        before=lambda root: Box(root, "alice", "bob"),
        act=left,
        check=twice,
        meanwhile=lambda box: box.clock.advance(3601),
    )
    assert play.kill_before_each(tmp_path, taking=False) > 10
