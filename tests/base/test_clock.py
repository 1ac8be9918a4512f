"""Durations and times as people write them, and every time that is printed as it is read again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.base.clock import (
    NS_PER_MS,
    NS_PER_S,
    duration_ms,
    elapsed,
    iso_time,
    later_time,
    local_time,
    parse_time,
)
from relay.cli.tables import clock_of, day_of

DURATIONS = """\
0          0
30         30000
500ms      500
10s        10000
10m        600000
10min      600000
5 min      300000
2h         7200000
1.5h       5400000
0.0001s    0
7d         604800000
"""


def test_durations() -> None:
    for line in DURATIONS.splitlines():
        text, ms = line[:11].strip(), int(line[11:])
        assert duration_ms(text) == ms, text
    assert (duration_ms("60000", "ms"), duration_ms("7", "d")) == (60_000, 604_800_000)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-1s", "1w", "1h30m", " 1s", "1  s", "1S", "²s", "nan", "1e3", "9" * 19],
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as 500ms, 10s, 10m, 2h or 7d"):
        duration_ms(text)


def test_a_duration_that_needs_a_unit_or_is_out_of_its_limits() -> None:
    with pytest.raises(ValueError, match="'7' is not a duration such as"):
        duration_ms("7", bare="")
    with pytest.raises(ValueError, match=r"'0s' is not a duration from 0\.001 to 60 s"):
        duration_ms("0s", least_ms=1, most_ms=60_000)


@given(st.integers(0, 10**18))
def test_a_span_that_is_printed_is_read(duration_ns: int) -> None:
    ms, unit = duration_ms(elapsed(duration_ns)), elapsed(duration_ns).split()[1]
    assert 0 <= duration_ns // NS_PER_MS - ms < duration_ms(f"1 {unit}")


@pytest.fixture(scope="module", autouse=True, params=["Europe/Berlin", "Australia/Lord_Howe"])
def _zone(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


REPEATED_NS = 1_792_891_800 * NS_PER_S  # 2026-10-25 02:30 in Berlin, for the second time


@given(
    st.integers(0, 4_000_000_000 * NS_PER_S)
    | st.integers(REPEATED_NS - 86_400 * NS_PER_S, REPEATED_NS + 86_400 * NS_PER_S),
    st.integers(-86_400, 86_400),
)
@example(REPEATED_NS, 0)
@example(REPEATED_NS - 3600 * NS_PER_S, 0)
@example(1_775_314_800 * NS_PER_S, 0)  # 2026-04-05 01:30 on Lord Howe Island: half an hour again
def test_a_time_that_is_printed_is_read_as_the_same_instant(at: int, later_s: int) -> None:
    now = max(0, at + later_s * NS_PER_S)

    def read(text: str, unit_ns: int) -> None:
        assert parse_time(text, now) == at // unit_ns * unit_ns, text

    shown = local_time(at, now)
    read(shown, (1 if shown.count(":") >= 2 and "-" not in shown[:5] else 60) * NS_PER_S)
    read(local_time(at, precise=True), NS_PER_MS)
    read(f"{day_of(at).partition(' ')[0]} {clock_of(at)}", NS_PER_MS)
    read(iso_time(at), 1000)
    read(iso_time(at)[:19] + "Z", NS_PER_S)


NOW = 1_795_701_909  # 2026-11-26 14:05:09Z


def at(text: str) -> str:
    return iso_time(parse_time(text, NOW * NS_PER_S))[:19]


def test_times_of_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    assert at("10m") == "2026-11-26T13:55:09"
    assert at("999999999d") == "1970-01-01T00:00:00"
    assert at("2026-07-26") == "2026-07-25T22:00:00"
    assert at("2026-11-26 14:05") == at("2026-11-26T14:05:00") == "2026-11-26T13:05:00"
    assert at("2026-11-26T14:05:09Z") == at("2026-11-26 14:05:09 UTC") == "2026-11-26T14:05:09"
    assert at("2026-11-26 14:05+05:30") == "2026-11-26T08:35:00"
    assert at("14:05:09.5") == at("14:05:09") == "2026-11-26T13:05:09"
    assert at("today") == at("2026-11-26 CET") == "2026-11-25T23:00:00"
    assert at("2026-11-26 UTC") == "2026-11-26T00:00:00"
    assert at("yesterday") == "2026-11-24T23:00:00"
    after_23_hours = parse_time("2026-03-30 12:00", NOW * NS_PER_S)
    assert iso_time(parse_time("yesterday", after_23_hours))[:19] == "2026-03-28T23:00:00"
    assert parse_time("9999-12-31") == 2**63 - 1 and at("0001-01-01") == "1970-01-01T00:00:00"


def test_the_next_time_of_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_time(text: str, now: str) -> str:
        return iso_time(later_time(text, parse_time(now)))[:19]

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    assert next_time("14:05", "2026-11-26 14:00") == "2026-11-26T13:05:00"
    assert next_time("14:05", "2026-11-26 15:00") == "2026-11-27T13:05:00"
    assert next_time("14:05", "2026-03-28 15:00") == "2026-03-29T12:05:00"  # a day of 23 hours
    assert next_time("14:05", "2026-10-24 15:00") == "2026-10-25T13:05:00"  # and one of 25
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    assert next_time("03:00Z", "2026-11-25 23:30") == "2026-11-27T03:00:00"  # it is the 26th there


@pytest.mark.parametrize(
    "text", ["", "5", "5x", "-5m", "soon", "25:00", "2026-13-01", "2026-11-26 14:05 CET", "CET"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time such as 10m, 14:05, 2026-11-26, "):
        parse_time(text)
