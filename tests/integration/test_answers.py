"""ack and nack in all their effects: on the delivery, on the timer, on who is told."""

from __future__ import annotations

import pytest

from relay.acomm.model import MessageStatus
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


@pytest.mark.parametrize("word", ["received", "in_progress"])
def test_the_first_word_stops_the_timer(box: Box, word: str) -> None:
    asked = box.send("alice", COMMAND)
    answer(box, "bob", asked, word)
    box.after(3600)
    assert delivery(box, asked) == ("acked", word, 1)
    stored = box.store.messages.find_by_relay_id(asked)
    assert stored is not None and stored.status is MessageStatus.ACKNOWLEDGED


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


def test_of_a_group_each_answers_for_itself(box: Box) -> None:
    box.join("team", "alice", "bob", "carol")
    asked = box.send("alice", "TO: #team\nKIND: command\nAWAIT: 5s\n\ndeploy")
    answer(box, "bob", asked, "completed")
    assert delivery(box, asked, "bob") == ("acked", "completed", 1)
    assert delivery(box, asked, "carol")[0] == "written"
    box.after(6)
    box.after(2)
    assert delivery(box, asked, "bob") == ("acked", "completed", 1)
    assert delivery(box, asked, "carol")[2] == 2  # carol is asked again, bob is not
    answer(box, "carol", asked, "too late", "nack")
    assert delivery(box, asked, "carol")[:2] == ("acked", "failed")
    assert "ack: completed" not in heard(box, "carol")  # it is alice's alone


@pytest.mark.parametrize(("kind", "said"), [("ack", "received"), ("nack", "failed")])
def test_a_thread_is_enough_where_one_message_awaits(box: Box, kind: str, said: str) -> None:
    asked = box.send("alice", "TO: bob\nKIND: command\nTHREAD: t-1\n\ndeploy")
    box.send("bob", f"TO: alice\nKIND: {kind}\nTHREAD: t-1\n\n")
    assert delivery(box, asked)[:2] == ("acked", said)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("KIND: ack\nRE: 1234567890-\n\n", "does not name a message"),
        ("KIND: nack\nTHREAD: nobody\n\nno", "THREAD nobody has 0 messages that await an answer"),
        ("KIND: ack\n\n", "needs RE"),
    ],
)
def test_an_answer_to_nothing_is_refused(box: Box, text: str, says: str) -> None:
    box.send("bob", f"TO: alice\n{text}")
    (nack,) = box.nacks("bob")
    assert says in nack
    assert box.inbox("alice") == {}


def test_a_text_that_asked_for_nothing_cannot_be_acked(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    answer(box, "bob", sent, "completed")
    assert "does not expect an acknowledgment" in box.nacks("bob")[0]
    assert delivery(box, sent)[:2] == ("written", None)


def test_who_answers_is_there(box: Box) -> None:
    asked = box.send("alice", COMMAND)
    box.clock.advance(1)
    answer(box, "bob", asked, "received")
    ((seen,),) = box.sql("SELECT last_seen_at FROM agents WHERE name = 'bob'")
    assert seen == box.clock.now_ns()
