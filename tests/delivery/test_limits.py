"""A token bucket: a burst at once, then so many a second; one episode is told once."""

from __future__ import annotations

import pytest

from relay.delivery.limits import CALM_NS, RateLimit
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("ready 4.5")


@pytest.fixture
def limit(clock: FakeClock) -> RateLimit:
    """Ten a second, thirty at once."""
    return RateLimit(10, 30, clock)


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


@pytest.mark.parametrize(("rate", "tokens"), [(1, 1), (10, 1), (200, 10), (100_000, 5_000)])
def test_a_fast_one_is_looked_at_twenty_times_a_second(rate: int, tokens: int) -> None:
    clock = FakeClock()
    limit = RateLimit(rate, 10_000, clock)
    limit.spend("alice", 10_000)
    clock.advance(limit.wait_ns("alice") / 1e9)
    assert limit.allowance("alice") == pytest.approx(tokens, abs=1)


def test_a_rate_above_the_burst_is_not_waited_for_in_vain() -> None:
    clock = FakeClock()
    limit = RateLimit(1_000_000, 1, clock)
    limit.spend("alice", 1)
    clock.advance(limit.wait_ns("alice") / 1e9)
    assert limit.allowance("alice") == 1


def test_an_episode_is_told_once_until_a_minute_was_calm(
    limit: RateLimit, clock: FakeClock
) -> None:
    limit.spend("alice", 30)
    for _ in range(50):
        limit.wait_ns("alice")
        clock.advance(1)
        limit.spend("alice", limit.allowance("alice"))
    assert limit.pop_new_alerts() == ["alice"]
    assert limit.pop_new_alerts() == []
    assert limit.limited == ["alice"]

    clock.advance(CALM_NS / 1e9)
    assert limit.limited == []
    limit.spend("alice", limit.allowance("alice"))
    limit.wait_ns("alice")
    assert limit.pop_new_alerts() == ["alice"]
    assert limit.limited_total == 2


def test_who_sends_nothing_costs_nothing(limit: RateLimit, clock: FakeClock) -> None:
    limit.spend("alice", 30)
    limit.spend("bob", 1)
    clock.advance(1)
    limit.sweep()
    assert list(limit._buckets) == ["alice"]
    clock.advance(10)
    limit.sweep()
    assert list(limit._buckets) == []
