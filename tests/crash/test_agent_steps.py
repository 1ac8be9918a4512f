"""Killed before each effect of a save, a retirement and a welcome: it ends the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from relay.base.config import Config, StoreSettings
from relay.base.home import LEDGER, META
from tests.box import Box
from tests.crash.plays import UNREAD_OR_READ, Play, received

KEY = "start 1"


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


def begun_again(box: Box) -> None:
    """After the next start alice and carol go on."""
    box.after(31, turns=2)
    if not (box.path("agents", "alice", "outbox") / "1000000005-05.msg").exists():
        resend(box)
    assert box.dispatcher.notifier.send_resume_message(
        "carol", KEY
    )  # whoever starts it does so again
    box.flush()
    box.after(31, turns=2)
    check(box)


def resend(box: Box) -> None:
    """alice was killed with the relay before she wrote: she writes now."""
    if not box.sql("SELECT 1 FROM messages WHERE message_id = '1000000005-05'"):
        box.send("alice", "TO: bob\n\nlost?", "1000000005-05.msg")


@UNREAD_OR_READ
def test_killed_before_any_effect_of_a_life_it_ends_the_same(tmp_path: Path, taking: bool) -> None:
    play = Play(
        before=lambda root: Box(root, "alice", "bob", "carol"),
        act=scenario,
        check=begun_again,
        meanwhile=lambda box: box.clock.advance(1),
        readers=("alice", "carol", "operator"),
    )
    assert play.kill_before_each(tmp_path, taking=taking) > 40


UNREAD = "1000000001-01"


def terminated(root: Path) -> Box:
    """bob is terminated, mail waits, a process of his registers."""
    box = Box(root, "alice", "bob")
    box.send("alice", "TO: bob\n\nwake up", f"{UNREAD}.msg")
    with box.ledger.transaction():
        box.ledger.agents.set_status("bob", "terminated", "it ended", box.clock.now_ns())
    meta = {"pid": os.getpid(), "started_at": box.clock.now_ns()}
    box.path("agents", "bob", META).write_text(json.dumps(meta))
    return box


def half_a_minute(box: Box) -> None:
    box.after(31, turns=2)


def check_greeted(box: Box) -> None:
    half_a_minute(box)
    assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("active",)]
    kinds = [str(message.kind) for message in received(box, "bob")]
    assert sorted(kinds) == ["message", "notification"]


@UNREAD_OR_READ
def test_killed_while_a_process_comes_back_it_is_greeted_once(tmp_path: Path, taking: bool) -> None:
    def read(box: Box) -> None:
        for message_id in box.inbox("bob") if taking else ():
            if message_id != UNREAD:
                box.take("bob", message_id)
        box.clock.advance(1)

    play = Play(terminated, half_a_minute, check_greeted, read)
    assert play.kill_before_each(tmp_path, taking=taking) > 10


@pytest.mark.parametrize("hours", [0, 8])  # then the commands are in an archive
def test_a_ledger_that_is_gone_learns_again_who_is_retired(tmp_path: Path, hours: int) -> None:
    config = Config(store=StoreSettings(roll_messages=1))
    box = Box(tmp_path / "home", "alice", "bob", "carol", config=config)
    box.send("operator", RETIRE)
    box.send("operator", RETIRE.replace("bob", "carol"))
    box.send("carol", "TO: alice\n\nI am back")
    box.send("alice", RETIRE.replace("bob", "carol"))  # refused
    for _ in range(hours):
        box.after(3600)
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
