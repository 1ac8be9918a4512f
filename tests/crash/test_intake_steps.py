"""Killed between any two effects of what intake refuses by itself: told once, kept once.

The same way as test_every_step.py: every write, rename and transaction is recorded, and the box is
killed before each distinct one of them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.box import Box
from tests.kills import Axe, Effect, Killed, firsts

NAME = "1000000001-01.msg"


def left(box: Box) -> None:
    """A message that its writer left in .pending, an hour later."""
    box.path("agents", "alice", "outbox", ".pending", NAME).write_text("TO: bob\n\na long report")
    box.clock.advance(3700)
    box.tick(3)


def check_left(box: Box) -> None:
    """It is refused once, and its file is kept."""
    kept = [path.name for path in box.path("archive").glob("*/alice/rejected/*")]
    assert kept == [NAME]
    (nack,) = box.nacks("alice")
    assert "found in .pending" in nack
    assert len(box.sql("SELECT 1 FROM rejections")) == 1
    assert os.listdir(box.path("agents", "alice", "outbox", ".pending")) == []
    assert box.inbox("bob") == {}


SCENARIOS = {"left": (left, check_left)}


def survive(root: Path, name: str, falls_at: int = 0) -> list[Effect]:
    """Kill before the given effect, start again, and look; the effects until then."""
    act, check_end = SCENARIOS[name]
    with pytest.MonkeyPatch.context() as patch:
        box = Box(root, "alice", "bob")
        axe = Axe(patch, root)
        axe.falls_at = falls_at
        with contextlib.suppress(Killed):
            act(box)
        effects, axe.falls_at = list(axe.effects), 0
        box.kill()
        for _ in range(2):
            box.clock.advance(3601)
            box.open()
            box.tick(2)
            check_end(box)
            box.kill()
    return effects


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_before_any_effect_it_ends_the_same(tmp_path: Path, name: str) -> None:
    effects = survive(tmp_path / "whole", name)
    assert len(effects) > 10
    killed_at = {
        survive(tmp_path / f"at-{number:03d}", name, number)[-1] for number in firsts(effects)
    }
    assert killed_at == set(effects)
