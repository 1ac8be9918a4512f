"""Killed before each effect of a save, a retirement and a welcome: it ends the same.

As in test_every_step.py: before each distinct effect, the first time that it happens when nobody
reads meanwhile, the last time when the recipients do.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Protocol

import pytest

from relay.base.home import LEDGER, META
from relay.base.message import MessageFile, parse_delivered
from tests.box import Box
from tests.kills import Axe, Effect, Killed, firsts, lasts

KEY = "start 1"


class Play(Protocol):
    """A scenario that is killed before the effect of that number; its effects until then."""

    def __call__(self, root: Path, falls_at: int, *, taking: bool) -> list[Effect]: ...


RETIRE = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.retire\nNAME: bob\nREASON: done"


def scenario(box: Box) -> None:
    """carol saves twice, bob is retired, alice writes to him, carol begins again."""
    box.drop("carol", "KIND: continuity\nACTION: save\n\none", "1000000001-01.msg")
    box.drop("carol", "KIND: continuity\nACTION: save\n\ntwo", "1000000002-02.msg")
    box.drop("carol", "KIND: continuity\nACTION: load\n\n", "1000000003-03.msg")
    box.drop("operator", RETIRE, "1000000004-04.msg")
    box.tick()
    box.drop("alice", "TO: bob\n\nlost?", "1000000005-05.msg")
    box.tick()
    assert box.dispatcher.notifier.send_resume_message("carol", KEY)
    box.flush()


def received(box: Box, agent: str) -> list[MessageFile]:
    """All that an agent ever got."""
    found = box.path("agents", agent, "inbox").glob("**/*.msg")
    return [parse_delivered(path.read_bytes()) for path in sorted(found)]


def check(box: Box) -> None:
    """Each thing once."""
    kept = sorted(box.path("continuity", "carol").iterdir())
    assert [path.name for path in kept] == [
        "00000001-1000000001-01.state",
        "00000002-1000000002-02.state",
    ]
    assert [path.read_text() for path in kept] == ["one", "two"]
    bodies = [m.body.decode() for m in received(box, "carol") if m.kind == "ack"]
    assert sorted(bodies) == [
        "completed saved as version 1 (3 bytes)\n",
        "completed saved as version 2 (3 bytes)\n",
        "completed version 2\ntwo",
    ]
    welcomes = [m for m in received(box, "carol") if m.kind == "notification"]
    assert [m.body.decode().rpartition("\n-----\n")[2] for m in welcomes] == ["two"]
    assert [m.body for m in received(box, "operator")] == [b"completed bob is retired\n"]
    assert box.sql("SELECT status, reason FROM agents WHERE name = 'bob'") == [("retired", "done")]
    (nack,) = received(box, "alice")
    assert b"bob is retired" in nack.body
    assert received(box, "bob") == []
    assert not list(box.path("agents").glob("*/inbox/.pending/*"))


def survive(root: Path, falls_at: int, *, taking: bool) -> list[Effect]:
    """Kill before that effect, start again, and look; the effects until then."""
    with pytest.MonkeyPatch.context() as patch:
        box = Box(root, "alice", "bob", "carol")
        axe = Axe(patch, root)
        axe.falls_at = falls_at
        with contextlib.suppress(Killed):
            scenario(box)
        effects = list(axe.effects)
        axe.falls_at = 0
        box.kill()
        if taking:
            for agent in ("alice", "carol", "operator"):
                for message_id in box.inbox(agent):
                    box.take(agent, message_id)
        box.clock.advance(1)
        box.open()
        box.clock.advance(31)
        box.tick(2)
        if not (box.path("agents", "alice", "outbox") / "1000000005-05.msg").exists():
            resend(box)
        assert box.dispatcher.notifier.send_resume_message(
            "carol", KEY
        )  # whoever starts it does so again
        box.flush()
        box.clock.advance(31)
        box.tick(2)
        check(box)
        box.kill()
    return effects


def resend(box: Box) -> None:
    """alice was killed with the relay before she wrote: she writes now."""
    if not box.sql("SELECT 1 FROM messages WHERE message_id = '1000000005-05'"):
        box.send("alice", "TO: bob\n\nlost?", "1000000005-05.msg")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("taking", [False, True], ids=["unread", "read"])
def test_killed_before_any_effect_of_a_life_it_ends_the_same(tmp_path: Path, taking: bool) -> None:
    assert kill_before_each(survive, tmp_path, taking=taking) > 40


def kill_before_each(play: Play, tmp_path: Path, *, taking: bool) -> int:
    """Play it whole, and killed before each distinct effect; how many effects it has."""
    effects = play(tmp_path / "whole", 0, taking=False)
    killed_at = {
        play(tmp_path / f"at-{number:03d}", number, taking=taking)[-1]
        for number in (lasts if taking else firsts)(effects)
    }
    assert killed_at == set(effects)
    return len(effects)


def come_back(root: Path, falls_at: int, *, taking: bool) -> list[Effect]:
    """bob is terminated, mail waits, a process of his registers; killed before that effect."""
    with pytest.MonkeyPatch.context() as patch:
        box = Box(root, "alice", "bob")
        unread = box.send("alice", "TO: bob\n\nwake up")
        with box.ledger.transaction():
            box.ledger.agents.set_status("bob", "terminated", "it ended", box.clock.now_ns())
        meta = {"pid": os.getpid(), "started_at": box.clock.now_ns()}
        box.path("agents", "bob", META).write_text(json.dumps(meta))
        axe = Axe(patch, root)
        axe.falls_at = falls_at
        with contextlib.suppress(Killed):
            box.clock.advance(31)
            box.tick(2)
        effects = list(axe.effects)
        axe.falls_at = 0
        box.kill()
        for message_id in box.inbox("bob") if taking else ():
            if message_id != unread:
                box.take("bob", message_id)
        box.clock.advance(1)
        box.open()
        box.clock.advance(31)
        box.tick(2)
        assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("active",)]
        kinds = [str(message.kind) for message in received(box, "bob")]
        assert sorted(kinds) == ["message", "notification"]
        box.kill()
    return effects


@pytest.mark.timeout(120)
@pytest.mark.parametrize("taking", [False, True], ids=["unread", "read"])
def test_killed_while_a_process_comes_back_it_is_greeted_once(tmp_path: Path, taking: bool) -> None:
    assert kill_before_each(come_back, tmp_path, taking=taking) > 10


def test_a_ledger_that_is_gone_learns_again_who_is_retired(tmp_path: Path) -> None:
    box = Box(tmp_path / "home", "alice", "bob", "carol")
    box.send("operator", RETIRE)
    box.send("operator", RETIRE.replace("bob", "carol"))
    box.send("carol", "TO: alice\n\nI am back")
    box.send("alice", RETIRE.replace("bob", "carol"))  # refused
    box.kill()
    for end in ("", "-wal", "-shm"):
        box.path(LEDGER + end).unlink(missing_ok=True)
    box.open()
    assert box.sql("SELECT name, status, reason FROM agents ORDER BY name") == [
        ("alice", "active", None),
        ("bob", "retired", "done"),
        ("carol", "active", None),
        ("operator", "active", None),
    ]
    box.send("alice", "TO: bob\n\nhi")
    assert any("bob is retired" in text for text in box.nacks("alice"))
    box.close()
