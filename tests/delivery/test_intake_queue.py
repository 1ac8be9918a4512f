"""Who is looked at next, in turn and within its rate: a burst at once, then so many a second."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from relay.delivery import intake_queue
from relay.delivery.intake_queue import Hint, IntakeQueue
from relay.delivery.limits import CALM_NS, RateLimit
from tests.fakes import FakeClock


class Desk:
    """A Waiting with its clock."""

    def __init__(self, rate: int = 1_000_000, burst: int = 1_000_000) -> None:
        self.clock = FakeClock()
        self.limit = RateLimit(rate, burst, self.clock)
        self.waiting = IntakeQueue(self.limit, self.clock)

    def add(self, agent: str, *numbers: int, paid: bool = False) -> None:
        for number in numbers:
            self.waiting.add(agent, f"{number:04d}.msg", renamed=True, counted=paid)

    def pick(self, most: int) -> list[str]:
        return [f"{hint.agent}{int(hint.file_name[:4])}" for hint in self.waiting.pop_batch(most)]


def test_what_fits_is_taken_in_the_order_of_discovery() -> None:
    desk = Desk()
    desk.add("b", 1)
    desk.add("a", 1)
    desk.add("b", 2)
    assert desk.pick(10) == ["b1", "a1", "b2"]
    assert not desk.waiting.is_busy and len(desk.waiting) == 0


def test_a_large_backlog_holds_up_nobody_else() -> None:
    desk = Desk()
    desk.add("a", *range(1000))
    desk.add("b", 1, 2)
    desk.add("c", 1)
    picked = desk.pick(10)
    assert picked == ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "b1", "b2", "c1"]


def test_who_has_nothing_waiting_comes_before_a_backlog_and_starves_none() -> None:
    desk = Desk()
    for agent in "abcdefgh":
        desk.add(agent, *range(100))
    desk.pick(8)
    desk.add("x", 1)
    assert "x1" in desk.pick(2)
    served = []
    for number in range(50):  # somebody new in each batch, who would take all of it
        desk.add(f"n{number}", *range(10))
        served += desk.pick(4)
    assert {one[0] for one in served} >= set("abcdefgh")


def test_a_batch_does_not_go_through_all_too_many_outboxes() -> None:
    desk = Desk()
    for agent in range(1000):
        desk.add(f"a{agent:04d}-", *range(20))
    assert len({hint.agent for hint in desk.waiting.pop_batch(256)}) == 16


def test_with_more_agents_than_places_everybody_has_a_turn() -> None:
    desk = Desk()
    for agent in "abcdef":
        desk.add(agent, 1, 2)
    assert [desk.pick(4) for _ in range(3)] == [
        ["a1", "b1", "c1", "d1"],
        ["a2", "b2", "e1", "f1"],
        ["c2", "d2", "e2", "f2"],
    ]


def test_over_its_rate_an_agent_waits_and_the_others_do_not() -> None:
    desk = Desk(rate=10, burst=3)
    desk.add("a", *range(6))
    desk.add("b", 1)
    assert desk.pick(10) == ["a0", "a1", "a2", "b1"]
    assert [alert.incident.agent for alert in desk.limit.alerts] == ["a"]
    assert not desk.waiting.is_busy
    assert desk.pick(10) == []
    due = desk.waiting.due_ns()
    assert due is not None and due > desk.clock.monotonic_ns()
    desk.add("b", 2)
    assert desk.waiting.due_ns() == 0
    assert desk.pick(10) == ["b2"]
    desk.clock.advance(0.2)
    assert desk.pick(10) == ["a3", "a4"]
    desk.clock.advance(1)
    assert desk.pick(10) == ["a5"]
    assert desk.waiting.due_ns() is None


def test_what_was_taken_before_costs_no_token() -> None:
    desk = Desk(rate=10, burst=1)
    desk.add("a", 1, 2, paid=True)
    desk.add("a", 3, 4)
    assert desk.pick(10) == ["a1", "a2", "a3"]


def test_too_many_files_are_left_in_the_outbox_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake_queue, "MOST_FILES", 4)
    desk = Desk()
    desk.add("a", *range(10))
    assert len(desk.waiting) == 4
    assert desk.waiting.agents_to_rescan() == []
    assert desk.pick(2) == ["a0", "a1"]
    assert desk.waiting.agents_to_rescan() == ["a"]
    assert desk.waiting.agents_to_rescan() == []


def test_a_later_one_has_its_place_again() -> None:
    desk = Desk()
    desk.add("a", 1, 2)
    first, _ = desk.waiting.pop_batch(10)
    desk.waiting.defer(replace(first, due_ns=desk.clock.monotonic_ns() + 10**9))
    assert len(desk.waiting) == 1 and desk.pick(10) == []
    desk.add("a", 3)
    desk.clock.advance(1)
    assert desk.pick(10) == ["a1", "a3"]


def test_what_is_held_waits_for_the_one_that_is_being_written() -> None:
    desk = Desk()
    desk.add("a", 1, 2)
    desk.add("b", 1)
    first, other, second = desk.waiting.pop_batch(10)
    assert (first.file_name, other.agent) == ("0001.msg", "a")
    desk.waiting.block_agent(replace(first, due_ns=desk.clock.monotonic_ns() + 10**8))
    desk.waiting.requeue(other)
    desk.waiting.requeue(second)
    assert desk.pick(10) == ["b1"] and not desk.waiting.is_busy
    assert desk.waiting.due_ns() == desk.clock.monotonic_ns() + 10**8
    desk.clock.advance(0.1)
    assert desk.pick(10) == ["a1", "a2"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20)), max_size=60),
    st.integers(1, 7),
    st.integers(1, 5),
)
def test_every_file_is_picked_once_in_order(
    added: list[tuple[str, int]], most: int, burst: int
) -> None:
    desk = Desk(rate=100, burst=burst)
    for agent, number in added:
        desk.add(agent, number)
    assert len(desk.waiting) == len(set(added))
    picked: list[Hint] = []
    for _ in range(10_000):
        if not len(desk.waiting):
            break
        picked += desk.waiting.pop_batch(most)
        desk.clock.advance(0.01)
    assert len({(hint.agent, hint.file_name) for hint in picked}) == len(picked)
    assert len(picked) == len(set(added))
    for agent in "abc":
        numbers = [hint.file_name for hint in picked if hint.agent == agent]
        assert all(one < other for one, other in pairwise(numbers))


@pytest.fixture
def limit(clock: FakeClock) -> RateLimit:
    """Ten a second, thirty at once."""
    return RateLimit(10, 30, clock)


@pytest.mark.shows("ready 4.5")
def test_a_burst_at_once_then_so_many_a_second(limit: RateLimit, clock: FakeClock) -> None:
    assert limit.allowance("alice") == 30
    limit.spend("alice", 30)
    assert limit.allowance("alice") == 0
    clock.advance(0.5)
    assert limit.allowance("alice") == 5
    clock.advance(3600)
    assert limit.allowance("alice") == 30
    assert limit.allowance("bob") == 30


def test_who_waits_is_due_when_a_token_is_there(limit: RateLimit, clock: FakeClock) -> None:
    limit.spend("alice", 30)
    wait_ns = limit.wait_ns("alice")
    clock.advance((wait_ns - 1_000_000) / 1e9)
    assert limit.allowance("alice") == 0
    clock.advance(0.001)
    assert limit.allowance("alice") == 1


@pytest.mark.parametrize(
    ("rate", "burst", "tokens"),
    [
        *((1, 10_000, 1), (10, 10_000, 1), (200, 10_000, 10), (100_000, 10_000, 5_000)),
        (1_000_000, 1, 1),  # a rate above the burst is not waited for in vain
    ],
)
def test_a_fast_one_is_looked_at_twenty_times_a_second(rate: int, burst: int, tokens: int) -> None:
    clock = FakeClock()
    limit = RateLimit(rate, burst, clock)
    limit.spend("alice", burst)
    clock.advance(limit.wait_ns("alice") / 1e9)
    assert limit.allowance("alice") == pytest.approx(tokens, abs=1)


def test_an_episode_is_told_once(limit: RateLimit, clock: FakeClock) -> None:
    limit.spend("alice", 30)
    for _ in range(50):
        limit.wait_ns("alice")
        clock.advance(1)
        limit.spend("alice", limit.allowance("alice"))
    assert [alert.incident.agent for alert in limit.alerts] == ["alice"]
    clock.advance(CALM_NS / 1e9)
    limit.spend("alice", limit.allowance("alice"))
    limit.wait_ns("alice")
    assert [alert.incident.agent for alert in limit.alerts] == ["alice", "alice"]


def test_who_sends_nothing_costs_nothing(limit: RateLimit, clock: FakeClock) -> None:
    limit.spend("alice", 30)
    limit.spend("bob", 1)
    clock.advance(1)
    limit.sweep()
    assert list(limit._buckets) == ["alice"]
    clock.advance(10)
    limit.sweep()
    assert list(limit._buckets) == []
