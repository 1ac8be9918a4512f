"""Killed before each effect of a cancellation: the message is read, or taken back, never both."""

from __future__ import annotations

from pathlib import Path

from tests.box import Box
from tests.crash.plays import UNREAD_OR_READ, Play

MESSAGE = "1700000000000000001-01"
REQUEST = "1700000000000000002-02"


def commanded(root: Path) -> Box:
    box = Box(root, "alice", "bob")
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy", f"{MESSAGE}.msg")
    box.flush()
    return box


def cancelled(box: Box) -> None:
    text = f"TO: __orchestrator__\nKIND: command\n\nACTION: message.cancel\nID: {MESSAGE}"
    box.drop("alice", text, f"{REQUEST}.msg")
    box.tick()
    box.flush()


def check(box: Box) -> None:
    """Read by whoever took it meanwhile, else taken back."""
    was_taken = box.path("agents/bob/inbox/.read", f"{MESSAGE}.msg").exists()
    box.after(31)
    box.flush()
    (found,) = box.sql(
        "SELECT state, read_how, last_error FROM deliveries WHERE message_id = ?", MESSAGE
    )
    if was_taken:
        assert found == ("read", "taken", None)
        assert box.nacks("alice") == [f"message {MESSAGE} is not cancelled: bob has read it\n"]
    else:
        assert found == ("expired", None, "cancelled by alice")
        said = f"completed message {MESSAGE} is cancelled: bob did not read it\n"
        assert box.acks("alice") == [said]
    assert box.inbox("bob") == {}
    assert not list(box.path("agents/bob/inbox/.pending").iterdir())


@UNREAD_OR_READ
def test_killed_before_any_effect_it_is_read_or_taken_back(tmp_path: Path, taking: bool) -> None:
    play = Play(commanded, cancelled, check, readers=("bob",))
    assert play.kill_before_each(tmp_path, taking=taking) > 6
