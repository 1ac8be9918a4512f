"""What the loop counts: values by size, steps by their time, and whether one lasts too long."""

from __future__ import annotations

import pytest

from relay.base.metrics import NEVER_STUCK, SECONDS, STAGES, START, WAIT, Histogram, Metrics
from tests.box import Box
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("ready 3.1")


def test_a_value_counts_in_the_first_bucket_that_takes_it() -> None:
    times = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0, -3.0):
        times.observe(value)
    read = times.read()
    assert read.counts == (3, 2, 1)  # -3: a clock that was set back
    assert (read.number, read.total) == (6, 14.0)


@pytest.mark.parametrize(("share", "bound"), [(0.0, 1.0), (0.5, 1.0), (0.6, 2.0), (0.9, None)])
def test_a_quantile_is_the_bound_above_it(share: float, bound: float | None) -> None:
    times = Histogram((1.0, 2.0))
    for value in (1, 1, 1, 2, 9, 9):
        times.observe(value)
    assert times.read().quantile(share) == bound
    assert Histogram((1.0,)).read().quantile(0.5) is None


def test_a_step_is_timed_when_the_next_begins_and_waiting_is_not() -> None:
    clock = FakeClock()
    metrics = Metrics(clock)
    for step, seconds in (("stage", 2), ("commit", 0.001), (WAIT, 60), ("stage", 0)):
        metrics.begin(step)
        clock.advance(seconds)
    metrics.begin(WAIT)
    assert metrics.stages["stage"].read().total == pytest.approx(2)
    assert metrics.stages["stage"].read().number == 2
    assert metrics.stages["commit"].read().counts[SECONDS.index(0.001)] == 1
    assert sum(times.read().number for times in metrics.stages.values()) == 3


def test_only_work_can_be_stuck() -> None:
    clock = FakeClock()
    metrics = Metrics(clock)
    clock.advance(1000)
    assert metrics.stuck_s() == (START, 0.0)
    for step in NEVER_STUCK:
        metrics.begin(step)
        clock.advance(1000)
        assert metrics.stuck_s() == (step, 0.0)
    metrics.begin("commit")
    clock.advance(7)
    assert metrics.stuck_s() == ("commit", 7.0)


def test_a_batch_goes_through_every_stage(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    passed = {name for name, times in box.dispatcher.metrics.stages.items() if times.read().number}
    assert passed == set(STAGES)
    assert box.dispatcher.metrics.at[0] == "processes"  # the last step of a turn


def test_what_becomes_of_messages_is_counted(box: Box) -> None:
    metrics = box.dispatcher.metrics
    box.drop("alice", "TO: *\n\nto bob, carol and the operator")
    asked = box.drop("alice", "TO: bob\nKIND: command\nAWAIT: 60\n\ndo it")
    box.drop("alice", "TO: nobody\n\nlost")
    box.drop("carol", "no message")
    box.tick()
    assert (metrics.accepted, metrics.refused) == (2, 2)
    assert metrics.written == 3 + 1 + 2  # two nacks
    assert metrics.batch_files.read().total == 4
    box.take("bob", asked)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted")
    assert (metrics.read, metrics.acked, metrics.accepted) == (1, 1, 3)
    assert metrics.delivery_s.read().number == 3


def test_attempts_and_dead_letters_are_counted(box: Box) -> None:
    metrics = box.dispatcher.metrics
    box.send("alice", "TO: bob\nKIND: command\nAWAIT: 1\n\ndo it")
    for _ in range(60):
        box.after(61, turns=1)
    assert metrics.again > 0
    assert metrics.dead == 1


def test_a_delivery_that_cannot_be_made_counts_as_held(box: Box) -> None:
    inbox = box.path("agents", "bob", "inbox")
    inbox.rename(box.path("tmp", "away"))
    inbox.write_text("no directory")
    box.send("alice", "TO: bob\n\nhi")
    assert box.dispatcher.metrics.held == 1
    assert box.dispatcher.metrics.written == 0
    inbox.unlink()
    box.path("tmp", "away").rename(inbox)


def test_a_batch_is_a_line_with_its_first_ids_and_no_word_of_what_is_said(box: Box) -> None:
    sent = [box.drop("alice", "TO: bob\n\nsecret words") for _ in range(12)]
    box.tick()
    (line,) = (line for line in box.log if line.get("action") == "deliver_batch")
    assert (line["files"], line["deliveries"], line["refused"]) == (12, 12, 0)
    assert line["first_ids"] == sent[:8]
    assert not [
        line for line in box.log if line.get("action") == "deliver_message"
    ]  # only at debug
    assert "secret" not in str(box.log)
