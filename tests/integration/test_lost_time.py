"""Time-outs count the time that the relay runs: a jump of the clock, a sleep of the machine, or a
relay that is down gives nothing up by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relay.base.home import LEDGER
from relay.daemon import ledger_backup
from relay.delivery.eventlog import EventLog
from tests.box import Box
from tests.integration.test_owed import COMMAND, HALF_AN_HOUR, duty, of_kind, told
from tests.kills import killed_in

pytestmark = [pytest.mark.box("alice", "bob"), pytest.mark.shows("engine 7.2")]

AGAIN = COMMAND.replace("\n\n", "\nDELIVERY: at-least-once\n\n")
THREE_DAYS = 3 * 86_400


def jumps(box: Box, seconds: int) -> None:
    """The clock is set, or the machine slept: the monotonic one has not gone on."""
    box.clock.jump(seconds)


def is_down(box: Box, seconds: int) -> None:
    box.kill()
    box.clock.advance(seconds)
    box.open()


WAYS = pytest.mark.parametrize("lose", [jumps, is_down])


@WAYS
def test_what_waits_for_its_ack_has_its_attempts_all_the_same(box: Box, lose) -> None:  # type: ignore[no-untyped-def]
    sent = box.send("alice", AGAIN)
    lose(box, THREE_DAYS)
    box.tick(3)
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "1"
    assert box.states(sent) == {"bob": "written"}
    for pause_s in (1, 2, 4):
        box.after(61)
        box.after(pause_s)
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "4"
    box.after(61)
    (nack,) = box.nacks("alice")
    assert "no acknowledgment within 60 s, 4 attempts" in nack


@WAYS
def test_an_answer_has_the_rest_of_its_time(box: Box, lose) -> None:  # type: ignore[no-untyped-def]
    sent = box.send("alice", COMMAND)
    box.after(1000)
    lose(box, THREE_DAYS)
    box.tick(3)
    assert of_kind(box, "bob", "reminder") == []
    box.after(700)
    assert of_kind(box, "bob", "reminder") == []
    box.after(100)
    assert len(of_kind(box, "bob", "reminder")) == 1
    assert duty(box, sent)[:2] == ("open", 1)
    lose(box, THREE_DAYS)
    box.tick(3)
    assert len(told(box, "alice")) == 1
    ((due_at,),) = box.sql("SELECT due_at FROM deliveries WHERE message_id = ?", sent)
    assert 1700 < (due_at - box.clock.now_ns()) / 10**9 <= 1800


@WAYS
def test_what_is_held_is_not_given_up_by_age(box: Box, lose) -> None:  # type: ignore[no-untyped-def]
    with box.broken_inbox("bob"):
        sent = box.send("alice", "TO: bob\n\nhi")
        lose(box, THREE_DAYS)
        box.after(61)
        assert box.states(sent) == {"bob": "held"}
        assert box.nacks("alice") == []
        for _ in range(24):  # a day of its own
            box.after(3601)
        assert box.states(sent) == {"bob": "dead"}


def test_a_ttl_is_a_time_of_the_clock(box: Box) -> None:
    with box.broken_inbox("bob"):
        sent = box.send("alice", "TO: bob\nTTL: 3600\n\nhi")
        box.clock.jump(THREE_DAYS)
        box.after(61)
        assert box.states(sent) == {"bob": "expired"}


def test_a_clock_that_is_set_back_holds_nothing_up(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    again = box.send("alice", AGAIN)
    with box.broken_inbox("bob"):
        held = box.send("alice", "TO: bob\n\nheld")
        box.clock.jump(-THREE_DAYS)
        box.tick(2)
    box.after(61)
    box.after(2)
    assert box.states(held) == {"bob": "written"}
    assert box.inbox("bob")[again].headers["ATTEMPT"] == "2"
    box.after(1800)
    assert duty(box, sent)[:2] == ("open", 1)


def test_a_ledger_that_was_restored_from_last_week_moves_nothing(box: Box, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    ledger_backup.backup(box.home, kept)
    box.clock.advance(7 * 86_400)
    sent = box.send("alice", COMMAND)
    box.kill()
    ledger_backup.restore(box.home, kept)
    box.open()
    box.after(HALF_AN_HOUR + 1)
    assert len(of_kind(box, "bob", "reminder")) == 1 and duty(box, sent)[1] == 1


def test_killed_before_the_ledger_noted_it_no_time_is_lost_twice(box: Box) -> None:
    box.send("alice", COMMAND)
    box.tick()
    box.kill()
    ledger = box.path(LEDGER).read_bytes()
    box.clock.advance(THREE_DAYS)
    box.open()
    box.kill()
    box.path(LEDGER).write_bytes(ledger)  # as it stood before that start
    box.open()
    ((_, lost),) = [one for one in box.store.state.downtimes if one.ms > 60_000]
    assert THREE_DAYS * 1000 <= lost < (THREE_DAYS + 60) * 1000


def test_killed_before_a_delivery_was_in_the_journal_its_time_begins_at_the_start(
    box: Box,
) -> None:
    sent = box.drop("alice", COMMAND)
    with killed_in(EventLog, "end_turn"):
        box.tick()
    assert box.states(sent) == {"bob": "written"}  # in the ledger
    is_down(box, THREE_DAYS)
    box.after(HALF_AN_HOUR - 60)
    assert duty(box, sent) == ("open", 0, None)
    box.after(120)
    assert duty(box, sent) == ("open", 1, None)


def test_who_was_there_before_a_long_sleep_gets_the_first_broadcast_after_it(box: Box) -> None:
    box.send("bob", "TO: alice\n\nI am here")
    jumps(box, 8 * 86_400)
    for _ in range(3):
        box.after(31)
    sent = box.send("alice", "TO: *\n\ngood morning")
    assert box.states(sent)["bob"] == "written"


@WAYS
def test_before_the_first_message_no_time_counts_either(box: Box, lose) -> None:  # type: ignore[no-untyped-def]
    box.after(5)
    lose(box, 8 * 86_400)
    for _ in range(3):
        box.after(31)
    sent = box.send("alice", "TO: *\n\ngood morning")
    assert box.states(sent)["bob"] == "written"


def test_an_agent_whose_process_ended_before_a_sleep_has_its_five_minutes(box: Box) -> None:
    facts = {"pid": 4_194_304, "pid_start_ticks": 1, "started_at": box.clock.now_ns()}
    box.path("agents/bob/meta.json").write_text(json.dumps(facts))
    box.after(31)
    jumps(box, 3600)
    box.after(31)
    assert box.states(box.send("alice", "TO: bob\n\nhi")) == {"bob": "written"}
    for _ in range(10):
        box.after(31)
    box.send("alice", "TO: bob\n\nhi")
    assert "bob is terminated" in box.nacks("alice")[-1]


def test_a_laptop_that_sleeps_a_hundred_times_loses_nothing(box: Box) -> None:
    """A held delivery is given up after a day in which the relay ran, not after one asleep."""
    with box.broken_inbox("bob"):
        held = box.send("alice", "TO: bob\n\nheld")
        for _ in range(100):
            box.clock.jump(3600)
            box.tick()
        assert box.states(held) == {"bob": "held"}
    box.after(61)
    assert box.states(held) == {"bob": "written"}
