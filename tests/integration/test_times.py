"""NOT-BEFORE: a message waits with the relay until its time, and is delivered once. TTL counts from
when it was sent: its id's time or its mtime, whichever is earlier."""

from __future__ import annotations

import os

import pytest

from relay.base.clock import NS_PER_S, iso_time
from tests.box import Box

DAY_S = 86_400


def test_it_is_held_until_its_time(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: query\nNOT-BEFORE: 10m\n\nready?")
    assert box.states(sent) == {"bob": "held"}
    ((reason, attempt, due_at),) = box.sql("SELECT last_error, attempt, due_at FROM deliveries")
    assert (reason, attempt) == (f"not before {iso_time(due_at)[:19]}Z, as its sender asked", 1)
    assert 595 * NS_PER_S < due_at - box.clock.now_ns() <= 600 * NS_PER_S
    box.after(590)
    assert box.inbox("bob") == {}  # nor a reminder of what it does not have
    box.after(15)
    assert list(box.inbox("bob")) == [sent]
    assert box.states(sent) == {"bob": "written"}
    assert box.sql("SELECT obligation FROM deliveries WHERE recipient = 'bob'") == [("open",)]
    past = box.send("alice", "TO: bob\nNOT-BEFORE: 2001-01-01T00:00Z\n\nhi")
    assert box.states(past) == {"bob": "written"}


def test_all_recipients_wait_and_a_day_more_is_no_failure(box: Box) -> None:
    """Deliveries that fail are given up after a day; one that waits for its time does not fail."""
    at = iso_time(box.clock.now_ns() + 3 * DAY_S * NS_PER_S)
    sent = box.send("alice", f"TO: *\nNOT-BEFORE: {at}\n\nin three days")
    assert box.states(sent) == dict.fromkeys(("bob", "carol", "operator"), "held")
    box.after(2 * DAY_S)
    assert box.states(sent) == dict.fromkeys(("bob", "carol", "operator"), "held")
    box.after(DAY_S + 5)
    assert box.states(sent) == dict.fromkeys(("bob", "carol", "operator"), "written")


def test_what_is_sent_at_least_once_has_all_its_attempts_after_days_of_waiting(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nDELIVERY: at-least-once\nNOT-BEFORE: 3d\n\nin three days")
    box.after(3 * DAY_S + 5)
    assert box.states(sent) == {"bob": "written"}
    box.until_dead()
    assert box.sql("SELECT attempt, last_error FROM deliveries WHERE recipient = 'bob'") == [
        (4, "no acknowledgment within 60 s, 4 attempts")
    ]


@pytest.mark.parametrize("has_a_ledger", [True, False])
def test_a_restart_delivers_nothing_early(box: Box, has_a_ledger: bool) -> None:
    sent = box.send("alice", "TO: bob\nNOT-BEFORE: 10m\n\nlater")
    box.kill()
    for suffix in ("", "-wal", "-shm") if not has_a_ledger else ():
        box.root.joinpath(f"ledger.db{suffix}").unlink(missing_ok=True)
    box.open()
    box.after(300)
    assert box.inbox("bob") == {} and box.states(sent) == {"bob": "held"}
    box.after(310)
    assert list(box.inbox("bob")) == [sent]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("TO: bob\nNOT-BEFORE: soon\n\nhi", "'soon' is not a duration like 10m, or a time before"),
        ("TO: bob\nNOT-BEFORE: 1000000d\n\nhi", "or a time before the year 2262"),
        ("TO: bob\nNOT-BEFORE: 9999-12-31T23:59Z\n\nhi", "or a time before the year 2262"),
        ("TO: __orchestrator__\nKIND: command\nNOT-BEFORE: 1h\n\nACTION: journal.seal", "at once"),
        ("TO: bob\nTTL: 60\nNOT-BEFORE: 10m\n\nhi", "its TTL of 60 s is over before NOT-BEFORE"),
    ],
)
def test_a_time_that_is_none_and_a_command_to_the_relay_are_refused(
    box: Box, text: str, rule: str
) -> None:
    box.send("alice", text)
    (nack,) = box.nacks("alice")
    assert "NOT-BEFORE" in nack and rule in nack


def test_a_channel_with_a_limit_takes_none(box: Box) -> None:
    """It would take the place of all that follow."""
    box.join("team", "alice", "bob")
    box.command("alice", "channel.config", "CHANNEL: team", "max_pending: 1")
    box.send("alice", "TO: #team\nNOT-BEFORE: 3d\n\nlater")
    assert "#team has max_pending, and would take no other message" in box.nacks("alice")[-1]
    assert box.sql("SELECT last_error_code FROM messages WHERE status = 'failed'") == [("channel",)]
    sent = box.send("alice", "TO: #team\n\nnow")
    assert box.states(sent) == {"bob": "written"}


def test_its_sender_hears_when_its_recipient_is_retired(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nNOT-BEFORE: 1d\n\nhi")
    box.command("operator", "agent.retire", "NAME: bob", "REASON: done")
    (told,) = box.bodies("alice")
    assert told.endswith(f"1 message of yours was not read, the first is {sent}\n")


# -- TTL -----------------------------------------------------------------------------------


def drop_at(box: Box, text: str, name: str, mtime_ns: int) -> str:
    """Send a file that was written then."""
    sent = box.drop("alice", text, name)
    os.utime(box.path("agents", "alice", "outbox", name), ns=(mtime_ns, mtime_ns))
    return sent


@pytest.mark.parametrize(("id_s", "mtime_s"), [(0, 5), (5, 0)])
def test_the_earlier_of_the_two_counts(box: Box, id_s: int, mtime_s: int) -> None:
    begin = box.clock.now_ns()
    box.clock.advance(max(id_s, mtime_s) + 1)
    name = f"{begin + id_s * NS_PER_S}-aa.msg"
    drop_at(box, "TO: bob\nTTL: 3\n\nquick", name, begin + mtime_s * NS_PER_S)
    box.tick()
    assert box.inbox("bob") == {} and "its TTL of 3 s" in box.nacks("alice")[0]


@pytest.mark.parametrize("name", ["1706123456789012345-a1b2c3d4.msg", "1000000001-01.msg"])
def test_an_id_from_an_example_says_nothing(box: Box, name: str) -> None:
    sent = drop_at(box, "TO: bob\nTTL: 3\n\nquick", name, box.clock.now_ns())
    box.tick()
    assert list(box.inbox("bob")) == [sent]


def test_times_to_come_give_nobody_more_time(box: Box) -> None:
    later = box.clock.now_ns() + 900 * NS_PER_S
    text = "TO: bob\nDELIVERY: at-least-once\nTTL: 50\n\nquick"
    sent = drop_at(box, text, f"{later}-aa.msg", later)
    box.tick()
    box.after(61)
    assert box.states(sent) == {"bob": "expired"}


def test_a_ttl_counts_while_no_relay_runs_and_may_have_a_unit(box: Box) -> None:
    """The file is delivered as it was written, or refused: no relay ran meanwhile."""
    now = box.clock.now_ns()
    sent = drop_at(box, "TO: bob\nTTL: 2min\n\nhi", f"{now}-aa.msg", now)
    late = drop_at(
        box, "TO: bob\nTTL: 1.5m\nDELIVERY: at-least-once\n\nquick", f"{now}-bb.msg", now
    )
    box.kill()
    box.clock.advance(100)
    box.open()
    box.tick()
    assert list(box.inbox("bob")) == [sent]
    assert box.inbox("bob")[sent].headers["TTL"] == "2min"
    assert "its TTL of 90 s passed before it could be delivered" in box.nacks("alice")[0]
    assert box.row(late)["status"] == "failed"
