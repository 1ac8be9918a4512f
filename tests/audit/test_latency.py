"""The latency job: stages, hours that were slow, and what is nobody's fault."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from relay.base.names import ORCHESTRATOR
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.ledger_rows import (
    DAY,
    HOUR,
    MS,
    TICK,
    S,
    delivery,
    insert,
    message,
)

pytestmark = pytest.mark.shows("audit 2.1")

BEGIN = START_NS - 6 * HOUR + TICK  # 03:30 of that day


def hour(number: int) -> int:
    """A time within the hour of that number."""
    return BEGIN + number * HOUR


def send(home: HomeBuilder, message_id: str, at_ns: int, after_ms: float, **of: object) -> None:
    """One message, accepted after 1 ms and written ``after_ms`` behind its discovery."""
    insert(home, "messages", [message(message_id, at_ns)])
    insert(home, "deliveries", [delivery(message_id, at_ns + MS, after_ms - 1, **of)])


def send_many(home: HomeBuilder, number: int, times_ms: list[float]) -> None:
    """A message for each time, all in one hour."""
    at = hour(number)
    ids = [f"{number}-{n}" for n in range(len(times_ms))]
    insert(home, "messages", [message(one, at) for one in ids])
    pairs = zip(ids, times_ms, strict=True)
    insert(home, "deliveries", [delivery(one, at + MS, ms - 1) for one, ms in pairs])


def test_each_stage_has_its_percentiles_by_hour_and_route(
    home: HomeBuilder,
) -> None:
    at = hour(0)
    insert(home, "messages", [message(f"1-{n}", at) for n in range(1, 101)])
    rows = []
    for n in range(1, 101):
        row = delivery(f"1-{n}", at + 2 * MS, n - 2)
        read = at + n * MS + 10 * S
        rows.append({**row, "state": "acked", "read_at": read, "acked_at": read + 7 * MS})
    insert(home, "deliveries", rows)
    said = home.says("latency")

    hours = {row["stage"]: row for row in said.tables["latency"]}
    assert set(hours) == {"accepted", "written", "inbox", "read", "acked"}
    times = ("deliveries", "p50_ms", "p90_ms", "p99_ms", "max_ms")
    assert [hours["inbox"][name] for name in times] == [100, 50.0, 90.0, 99.0, 100.0]
    assert [hours["accepted"][name] for name in times] == [100, 2.0, 2.0, 2.0, 2.0]
    assert [hours["written"][name] for name in times] == [99, 49.0, 89.0, 98.0, 98.0]
    assert [hours["read"][name] for name in times] == [100, *[10_000.0] * 4]
    assert [hours["acked"][name] for name in times] == [100, *[7.0] * 4]
    assert {row["hour"].hour for row in hours.values()} == {3}
    routes = {row["stage"]: row for row in said.tables["latency_routes"]}
    assert {(row["sender"], row["recipient"]) for row in routes.values()} == {("alice", "bob")}
    assert [routes["inbox"][name] for name in times] == [100, 50.0, 90.0, 99.0, 100.0]
    slowest = said.tables["latency_slowest"]
    assert [row["message_id"] for row in slowest[:3]] == ["1-100", "1-99", "1-98"]
    # Written 1 ms before it was staged: the clock was put back.
    assert said.counts == {"deliveries": 100, "slow": 0, "negative": 1}
    assert said.findings == []


def test_a_slow_message_is_found_and_what_waited_for_a_reason_is_not(
    home: HomeBuilder,
) -> None:
    at = hour(0)
    send(home, "1-quick", at, 5)
    send(home, "1-slow", at, 6_000)
    send(home, "1-slower", at, 7_000)
    send(home, "1-old", at - 8 * DAY, 60_000)
    send(home, "2-again", at, 60_000, attempt=2)
    send(home, "2-made-again", at, 60_000, written_at=(at // S + 60) * S)
    send(home, "2-not-yet", at, 60_000, state="held", written_at=None)
    insert(home, "messages", [message("2-put-off", at, retry_count=1)])
    insert(home, "deliveries", [delivery("2-put-off", at + MS, 60_000)])
    insert(home, "messages", [message("2-held", at, processed_at=at + S)])
    insert(home, "deliveries", [delivery("2-held", at + 60 * S, 1)])
    insert(home, "messages", [message("2-answer", at, agent_name=ORCHESTRATOR)])
    insert(home, "deliveries", [delivery("2-answer", at + 60 * S, 1)])
    send(home, "2-backwards", at, -50)
    said = home.says("latency")

    assert said.found == [("latency.slow", "warning", "1-slower", "alice")]
    detail = said.findings[0]["detail"]
    assert (detail["slow"], detail["deliveries"], detail["max_ms"]) == (2, 3, 7000.0)
    # The clock went back for one message: for its way from the commit and for the whole of it.
    assert said.counts == {"deliveries": 4, "slow": 3, "negative": 2}
    slowest = [row["message_id"] for row in said.tables["latency_slowest"]]
    assert slowest == ["1-old", "1-slower", "1-slow", "1-quick"]


def test_an_hour_far_above_the_others_is_found(
    home: HomeBuilder,
) -> None:
    usual = [5.0] * 98 + [20.0] * 2
    for number in range(4):
        send_many(home, number, usual)
    send_many(home, 4, [5.0] * 98 + [400.0] * 2)
    send_many(home, 5, [5.0] * 9 + [4_000.0])  # too few to speak of an hour
    said = home.says("latency")
    assert said.found == [("latency.slow_hour", "warning", None, None)]
    detail = said.findings[0]["detail"]
    assert detail["hour"] == datetime(2026, 1, 31, 7, tzinfo=UTC)
    assert (detail["p99_ms"], detail["median_p99_ms"]) == (400.0, 20.0)


def test_hours_that_are_all_alike_or_next_to_nothing_are_not(
    home: HomeBuilder,
) -> None:
    for number in range(4):
        send_many(home, number, [2.0] * 100)
    send_many(home, 4, [50.0] * 100)  # 25 times the others, and still quick
    assert home.says("latency").findings == []
