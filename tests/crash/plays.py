"""A piece of work that is killed before each of its distinct effects, and always ends the same.

Every write, rename and transaction of the work is recorded (``tests.kills``). Before each distinct
one of them the box is killed, opened again and looked at: the first time that it happens when
nobody reads meanwhile, the last time when the recipients do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from relay.base.message import MessageFile, parse_delivered
from tests.box import Box
from tests.kills import Axe, Effect, Killed, firsts, lasts

UNREAD_OR_READ = pytest.mark.parametrize("taking", [False, True], ids=["unread", "read"])


class Play(NamedTuple):
    """What is there, what is interrupted, what happens while no relay runs, and how it ends."""

    before: Callable[[Path], Box]
    act: Callable[[Box], None]
    check: Callable[[Box], None]  # the next start has been made
    meanwhile: Callable[[Box], None] = lambda box: None
    readers: Iterable[str] = ()  # who reads meanwhile, when the recipients do

    def run(self, root: Path, falls_at: int = 0, *, taking: bool = False) -> list[Effect]:
        """Killed before the effect of that number, 0 for behind the last; the effects until it."""
        with pytest.MonkeyPatch.context() as patch:
            box = self.before(root)
            axe = Axe(patch, box.root)
            box.spawner.step = axe.step  # type: ignore[attr-defined]
            axe.falls_at = falls_at
            with contextlib.suppress(Killed):
                self.act(box)
            effects = list(axe.effects)
            axe.falls_at = 0
            box.kill()
            for agent in self.readers if taking else ():
                for message_id in box.inbox(agent):
                    box.take(agent, message_id)
            self.meanwhile(box)
            box.open()
            self.check(box)
            box.kill()
        return effects

    def kill_before_each(self, tmp_path: Path, *, taking: bool) -> int:
        """Run it whole, and killed before each distinct effect; how many effects it has."""
        effects = self.run(tmp_path / "whole")
        killed_at = {
            self.run(tmp_path / f"at-{number:03d}", number, taking=taking)[-1]
            for number in (lasts if taking else firsts)(effects)
        }
        assert killed_at == set(effects)
        return len(effects)


def received(box: Box, agent: str) -> list[MessageFile]:
    """All that an agent ever got."""
    found = box.path("agents", agent, "inbox").glob("**/*.msg")
    return [parse_delivered(path.read_bytes()) for path in sorted(found)]
