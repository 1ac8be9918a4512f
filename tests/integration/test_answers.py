"""ack and nack in all their effects: on the delivery, on the timer, on who is told."""

from __future__ import annotations

from tests.box import Box

COMMAND = "TO: bob\nKIND: command\nAWAIT: 5s\n\ndeploy"


def answer(box: Box, agent: str, asked: str, body: str, kind: str = "ack") -> str:
    return box.send(agent, f"TO: alice\nKIND: {kind}\nRE: {asked}\n\n{body}")


def delivery(box: Box, asked: str, agent: str = "bob") -> tuple[str, str | None, int]:
    ((state, said, attempt),) = box.sql(
        "SELECT state, ack_status, attempt FROM deliveries WHERE message_id = ? AND recipient = ?",
        asked,
        agent,
    )
    return state, said, attempt


def heard(box: Box, agent: str) -> list[str]:
    """Kinds and bodies of what has come, oldest first."""
    return [f"{m.kind}: {m.body.decode()}" for m in box.inbox(agent).values()]


def test_each_word_of_an_ack_is_noted_and_reaches_who_asked(box: Box) -> None:
    asked = box.send("alice", COMMAND)
    for word in ("received", "in_progress half way", "completed\nall green"):
        answer(box, "bob", asked, word)
        assert delivery(box, asked) == ("acked", word.split()[0], 1)
    assert heard(box, "alice") == [
        "ack: received",
        "ack: in_progress half way",
        "ack: completed\nall green",
    ]
    assert {one.headers["RE"] for one in box.inbox("alice").values()} == {asked}
    box.after(3600)
    assert delivery(box, asked) == ("acked", "completed", 1)  # no timer runs any more
    assert box.nacks("alice") == []


def test_a_nack_is_failed_and_not_tried_again(box: Box) -> None:
    asked = box.send("alice", COMMAND)
    answer(box, "bob", asked, "no such branch", "nack")
    assert delivery(box, asked) == ("acked", "failed", 1)
    assert heard(box, "alice") == ["nack: no such branch"]
    box.after(3600)
    assert delivery(box, asked) == ("acked", "failed", 1)
    assert list(box.store.retries.dead_letters()) == []


def test_the_last_word_counts(box: Box) -> None:
    asked = box.send("alice", COMMAND)
    answer(box, "bob", asked, "it broke", "nack")
    answer(box, "bob", asked, "completed at the second try")
    assert delivery(box, asked) == ("acked", "completed", 1)


def test_the_same_ack_again_is_noted_once_and_delivered_as_another_message(box: Box) -> None:
    asked = box.send("alice", COMMAND)
    first = answer(box, "bob", asked, "completed")
    answer(box, "bob", asked, "completed")
    assert delivery(box, asked) == ("acked", "completed", 1)
    assert heard(box, "alice") == ["ack: completed"] * 2
    # the very same file: a duplicate, put away
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted", f"{first}.msg")
    assert len(box.inbox("alice")) == 2
    assert box.nacks("bob") == []
