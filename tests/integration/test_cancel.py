"""``message.cancel``: a message that was not read yet is taken back."""

from __future__ import annotations

import shutil

import pytest

from relay.base.config import Config, DeliverySettings
from relay.reach.report import OFFERED, write_report
from relay.reach.session import Session, save_session
from tests.box import Box, MakeBox
from tests.disk import failing

ORDER = "TO: bob\nKIND: command\n\ndeploy"


def reason(box: Box, message_id: str, recipient: str = "bob") -> str | None:
    query = "SELECT last_error FROM deliveries WHERE message_id = ? AND recipient = ?"
    return box.sql(query, message_id, recipient)[0][0]


def test_who_has_not_read_it_does_not_get_to_read_it(box: Box) -> None:
    one = box.send("alice", ORDER)
    box.command("alice", "message.cancel", f"ID: {one}")
    assert box.inbox("bob") == {} and box.states(one) == {"bob": "expired"}
    assert reason(box, one) == "cancelled by alice"
    assert box.acks("alice") == [f"completed message {one} is cancelled: bob did not read it\n"]
    assert not list(box.path("agents/bob/inbox/.pending").iterdir())
    owed = "SELECT obligation, due_at FROM deliveries WHERE message_id = ?"
    assert box.sql(owed, one) == [("given_up", None)]
    for _ in range(4):
        box.after(600)
    assert box.inbox("bob") == {} and box.nacks("alice") == []  # nobody is reminded


def test_who_has_read_it_is_named(box: Box) -> None:
    box.join("team", "alice", "bob", "carol")
    one = box.send("alice", "TO: #team\n\nlunch at noon")
    box.take("bob", one)
    box.command("alice", "message.cancel", f"ID: {one}")
    assert box.acks("alice")[-1] == (
        f"completed message {one} is cancelled: carol did not read it; bob has read it\n"
    )
    box.flush()
    assert box.states(one) == {"bob": "read", "carol": "expired"}


def test_what_a_sticky_channel_keeps_for_nobody_yet_is_not_taken_back(box: Box) -> None:
    """It says so, and what it says to do keeps it from those who come later."""
    box.join("team", "alice")
    box.command("alice", "channel.config", "CHANNEL: team", "sticky_messages: true")
    one = box.send("alice", "TO: #team\n\nlunch at noon")
    box.command("alice", "message.cancel", f"ID: {one}")
    assert box.nacks("alice") == [
        f"message {one} is not cancelled: nobody has it yet, and #team keeps it for those who "
        "come later: `relay channel config team sticky_messages=false` ends that\n"
    ]
    box.command("alice", "channel.config", "CHANNEL: team", "sticky_messages: false")
    box.join("team", "bob")
    assert one not in box.inbox("bob")
    box.send("bob", "TO: #team\nKIND: leave")
    two = box.send("alice", "TO: #team\n\nlunch at one")
    box.command("alice", "message.cancel", f"ID: {two}")
    assert f"message {two} is not cancelled: it had no recipients\n" in box.nacks("alice")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("taken", "bob has read it"),
        ("removed", "it was removed from the inbox of bob, and not seen in .read"),
    ],
)
def test_when_it_has_left_every_inbox_nothing_is_cancelled(box: Box, how: str, why: str) -> None:
    one = box.send("alice", ORDER)
    if how == "taken":
        box.take("bob", one)
    else:
        box.path("agents/bob/inbox", f"{one}.msg").unlink()
    box.command("alice", "message.cancel", f"ID: {one}")  # before the relay has seen that
    box.after(2)
    box.command("alice", "message.cancel", f"ID: {one}")  # and after
    assert box.nacks("alice") == 2 * [f"message {one} is not cancelled: {why}\n"]
    box.flush()
    assert box.states(one) == {"bob": "read"}


def test_only_its_sender_the_operator_and_the_lead_cancel_it(make_box: MakeBox) -> None:
    box = make_box("alice", "bob", "operator")
    one = box.send("alice", ORDER)
    box.command("bob", "message.cancel", f"ID: {one}")
    assert box.nacks("bob") == [
        f"message {one} can be cancelled only by alice who sent it, operator and the lead, "
        "not by bob\n"
    ]
    assert box.states(one) == {"bob": "written"}
    box.command("operator", "message.cancel", f"ID: {one}")
    assert reason(box, one) == "cancelled by operator"
    assert box.nacks("alice") == ["not delivered to bob: cancelled by operator\n"]


def test_an_unknown_id_is_refused(box: Box) -> None:
    box.command("alice", "message.cancel", "ID: 1700000000000000099-99")
    box.command("alice", "message.cancel", "ID: it")
    assert sorted(box.nacks("alice")) == [
        "ID 'it' is not a message id\n",
        "message 1700000000000000099-99 is not in the live store: it does not exist, waits in an "
        "outbox, or is in an archive; `relay trace 1700000000000000099-99` shows it\n",
    ]


def test_a_message_that_is_held_is_never_delivered(box: Box) -> None:
    with box.broken_inbox("bob"):
        one = box.send("alice", ORDER)
        assert box.states(one) == {"bob": "held"}
        box.command("alice", "message.cancel", f"ID: {one}")
    box.after(120)
    box.after(120)
    assert box.inbox("bob") == {} and box.states(one) == {"bob": "expired"}


def test_sent_and_cancelled_in_one_batch_it_is_not_delivered(box: Box) -> None:
    one = box.drop("alice", ORDER)
    text = f"TO: __orchestrator__\nKIND: command\n\nACTION: message.cancel\nID: {one}"
    box.drop("alice", text)
    box.tick()
    assert box.inbox("bob") == {} and box.states(one) == {"bob": "expired"}
    assert box.acks("alice") == [f"completed message {one} is cancelled: bob did not read it\n"]


def test_attempts_end_with_it(box: Box) -> None:
    one = box.send("alice", "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\ndeploy")
    box.after(61)
    box.command("alice", "message.cancel", f"ID: {one}")
    box.until_dead()
    assert box.inbox("bob") == {} and box.states(one) == {"bob": "expired"}
    assert box.nacks("alice") == []


def shown(box: Box, message_id: str, session: str = "claude:0089") -> None:
    """A hook of bob's has printed it, and reports that."""
    offer = {"what": OFFERED, "ids": [message_id], "after": "Stop", "offer": 1}
    at = box.clock.now_ns()
    write_report(str(box.root), "bob", [{"session": session, "at": at, **offer}])


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_session_is_shown_is_not_taken_back(box: Box, is_known: bool) -> None:
    """Nor is it when the hook and the sender write at the same time."""
    one = box.send("alice", ORDER)
    shown(box, one)
    if is_known:
        box.tick()
    box.command("alice", "message.cancel", f"ID: {one}")
    assert list(box.inbox("bob")) == [one] and box.acks("alice") == []
    said = f"message {one} is not cancelled: a session of bob is being shown it\n"
    assert box.nacks("alice") == [said]


def test_what_a_session_was_shown_that_has_ended_is_taken_back(box: Box) -> None:
    one = box.send("alice", ORDER)
    session = Session("claude", "0089")
    session.agent, session.pid, session.pid_start = "bob", 4_194_304, 1
    box.path("sessions").mkdir(exist_ok=True)
    save_session(str(box.root), session)
    shown(box, one, session.key)
    box.tick()
    box.command("alice", "message.cancel", f"ID: {one}")
    assert box.inbox("bob") == {} and box.states(one) == {"bob": "expired"}


def test_what_is_given_up_and_may_be_read_is_named_so(box: Box) -> None:
    one = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\ndeploy")
    box.until_dead()
    box.command("alice", "message.cancel", f"ID: {one}")
    (said,) = [text for text in box.nacks("alice") if "not cancelled" in text]
    assert "bob may have it in the inbox, and it is given up: no acknowledgment" in said
    assert list(box.inbox("bob")) == [one]


@pytest.mark.box("alice", "bob", config=Config(delivery=DeliverySettings(give_up_after_s=10)))
def test_a_dead_letter_that_waits_for_its_channel_again_is_taken_back(box: Box) -> None:
    with box.broken_inbox("bob"):
        one = box.send("alice", ORDER)
        for _ in range(20):
            box.after(2)
    assert box.states(one) == {"bob": "dead"}
    box.command("operator", "channel.pause", "CHANNEL: dm/alice/bob")
    box.command("operator", "dead.replay", f"ID: {one}")
    box.command("alice", "message.cancel", f"ID: {one}")
    assert box.acks("alice") == [f"completed message {one} is cancelled: bob did not read it\n"]
    box.command("operator", "channel.resume", "CHANNEL: dm/alice/bob")
    box.after(2)
    assert box.inbox("bob") == {} and box.states(one) == {"bob": "expired"}


def test_who_joins_a_sticky_channel_later_does_not_get_it(box: Box) -> None:
    box.command("alice", "channel.create", "CHANNEL: news", "TYPE: group", "sticky_messages: true")
    box.join("news", "alice", "bob")
    one = box.send("alice", "TO: #news\n\nall is well")
    box.command("alice", "message.cancel", f"ID: {one}")
    box.join("news", "carol")
    box.tick()
    assert "all is well" not in "".join(box.bodies("carol"))


def test_an_inbox_out_of_reach_keeps_it(box: Box) -> None:
    one = box.send("alice", ORDER)
    with box.broken_inbox("bob"):
        box.command("alice", "message.cancel", f"ID: {one}")
        assert box.nacks("alice")[0].startswith(
            f"message {one} is not cancelled: the inbox of bob cannot be written: "
        )
    assert list(box.inbox("bob")) == [one]


def test_on_a_full_disk_it_is_cancelled_at_once_and_answered_later(box: Box) -> None:
    one = box.send("alice", ORDER)
    with failing("create"):
        box.command("alice", "message.cancel", f"ID: {one}")
        assert box.inbox("bob") == {} and not list(box.path("agents/bob/inbox/.pending").iterdir())
    box.after(2)
    assert box.states(one) == {"bob": "expired"} and reason(box, one) == "cancelled by alice"
    assert box.acks("alice") == [f"completed message {one} is cancelled: bob did not read it\n"]


def test_one_whose_mailbox_vanished_is_cancelled_and_was_not_read(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    with failing("create"):
        shutil.rmtree(box.path("agents/bob"))
        box.home.make_agent("bob")
        for _ in range(3):
            box.after(31)
        assert box.states(sent) == {"bob": "held"}
        box.command("alice", "message.cancel", f"ID: {sent}")
    for _ in range(3):
        box.after(61)
    assert box.states(sent) == {"bob": "expired"} and box.inbox("bob") == {}
