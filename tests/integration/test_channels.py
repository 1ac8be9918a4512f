"""What a channel keeps back, and what it hands to newcomers, through files."""

from __future__ import annotations

import pytest

from tests.box import Box
from tests.procs import relay, rows_of

pytestmark = pytest.mark.shows("engine 7.9")


@pytest.fixture
def box(box: Box) -> Box:
    """Alice, who owns channel team, and bob are its members."""
    box.join("team", "alice", "bob")
    return box


def configure(box: Box, *settings: str) -> None:
    """As the owner of the channel."""
    before = set(box.inbox("alice"))
    box.command("alice", "channel.config", "CHANNEL: team", *settings)
    (answer,) = (m for name, m in box.inbox("alice").items() if name not in before)
    assert answer.kind == "ack", answer.body


def from_team(box: Box, agent: str) -> list[str]:
    return [m.body.decode() for m in box.inbox(agent).values() if m.headers.get("CHANNEL")]


def test_what_is_held_back_at_its_ttl_is_told_of_then(box: Box) -> None:
    configure(box, "max_pending: 1")
    box.send("alice", "TO: #team\nDELIVERY: at-least-once\n\nfirst")
    sent = box.send("alice", "TO: #team\nTTL: 5\n\nsecond")
    assert set(box.states(sent).values()) == {"held"}
    box.after(4)
    assert set(box.states(sent).values()) == {"held"}
    box.after(1.5)
    assert set(box.states(sent).values()) == {"expired"}
    assert box.nacks("alice")[0].startswith(
        "not delivered to bob: its TTL of 5 s passed before its channel released it"
    )


def test_beyond_max_pending_messages_wait_and_continue_in_order(box: Box) -> None:
    configure(box, "max_pending: 2")
    sent = [box.send("alice", f"TO: #team\nKIND: command\n\n{number}") for number in range(4)]
    assert from_team(box, "bob") == ["0", "1"]
    assert box.states(sent[2]) == {"bob": "held"}
    (shown,) = rows_of("channel", "show", "team", home=box.root)
    assert shown["pending"] == sent[:2]
    ids = ", ".join(one.partition("-")[2][:8] for one in sent[:2])
    assert f"pending      {ids}\n" in relay("channel", "show", "team", home=box.root).stdout
    ((error,),) = box.sql("SELECT last_error FROM deliveries WHERE message_id = ?", sent[2])
    assert error == "the channel has as many pending messages as max_pending allows"
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent[0]}\n\ncompleted")
    assert from_team(box, "bob") == ["0", "1", "2"]
    assert box.states(sent[2]) == {"bob": "written"}
    box.restart()
    assert from_team(box, "bob") == ["0", "1", "2"]
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent[1]}\n\ncompleted")
    assert from_team(box, "bob") == ["0", "1", "2", "3"]
    assert box.nacks("alice") == []
    box.flush()
    assert {box.row(one)["status"] for one in sent} == {"archived"}


def test_a_long_wait_does_not_spin(box: Box) -> None:
    configure(box, "max_pending: 1")
    for number in range(2):
        box.send("alice", f"TO: #team\nKIND: command\n\n{number}")
    box.after(59)
    box.after(2)
    assert from_team(box, "bob") == ["0"]
    assert box.deadline > box.clock.monotonic_ns()


def test_a_newcomer_gets_what_a_sticky_channel_has(box: Box) -> None:
    configure(box, "sticky_messages: true")
    sent = box.send("alice", "TO: #team\n\nwelcome, whoever comes")
    box.flush()
    box.join("team", "carol")
    assert from_team(box, "carol") == ["welcome, whoever comes"]
    assert box.states(sent) == {"bob": "written", "carol": "written"}
    box.join("team", "carol")
    assert from_team(box, "carol") == ["welcome, whoever comes"]


def test_a_copy_owed_before_a_crash_is_delivered_after_it(box: Box) -> None:
    configure(box, "sticky_messages: true")
    box.send("alice", "TO: #team\n\nwelcome")
    box.flush()
    channel = box.store.channels.find_by_name("team")
    assert channel is not None
    box.store.channels.join(channel.id, "carol")  # in the store's file, nothing else is done
    box.flusher.flush()
    box.restart()
    box.tick(2)
    assert from_team(box, "carol") == ["welcome"]
