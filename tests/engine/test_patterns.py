"""Content patterns are bounded before they are compiled: their compiler knows no limit."""

from __future__ import annotations

import pytest

from relay.acomm.model import ChannelType, MessageFilter
from relay.base.errors import ValidationFailed
from relay.engine import patterns
from tests.engine.support import channel_of, new_store, send

pytestmark = pytest.mark.shows("engine 2.7")

DEEP = 40
TOO_LARGE = [
    "(" * DEEP + "a" + ")+" * DEEP,
    "(" * DEEP + "a" + "){1,50}" * DEEP,
    "(?:" * DEEP + "a" + ")+?" * DEEP,
    "(((a{100}){100}){100}){100}",
    "(a{2000}){2000}",
    "a{99999999999}",
    "(?x)" + "(" * DEEP + "a" + ") # twice\n +" * DEEP,
    "(" * DEEP + "a" + ")(?#twice)+" * DEEP,
    "(" * DEEP + "a[]{}()]" + "){2}" * DEEP,
    "a|" * 50_000,
]


@pytest.mark.parametrize("pattern", TOO_LARGE)
def test_a_pattern_that_would_take_all_memory_is_refused(pattern: str) -> None:
    store = new_store()
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    for ask in (
        lambda: store.search(pattern),
        lambda: store.subscribe(channel.id, "b", "#", MessageFilter(content_pattern=pattern)),
    ):
        with pytest.raises(ValidationFailed) as caught:
            ask()
        assert caught.value.field == "content_pattern"
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("deploy", 6),
        ("[a-z]{3}", 3),
        (r"\d{4}-\d{2}", 7),
        ("(ab)+", 6),
        ("(ab)*?", 3),
        ("(a{3}b){2}", 10),
        ("a{2,}", 3),
        ("a{0,9}", 1),
        ("a{,9}", 1),
        ("a{b}", 4),
        ("[]a]{2}", 2),
        (r"\({2}", 2),
        ("(?#any)a", 1),
        (")", 1),
    ],
)
def test_parts_are_counted_as_they_would_be_written_out(pattern: str, parts: int) -> None:
    assert patterns.count_parts(pattern) == parts


def test_what_people_ask_for_is_found() -> None:
    store = new_store()
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    send(store, channel, "a", content="2026-01-31 build 4711 failed: (error) x{2}")
    for pattern in (
        r"\d{4}-\d{2}-\d{2}",
        r"(?i)\bFAILED\b",
        r"build (?P<number>\d+)",
        r"^(\S+\s+){2,}",
        r"[^a-z]{1,200}build",
        r"(?x) build \s+ \d+  # and its number",
        r"\(error\)",
        r"x\{2}",
        "(?:" * 6 + "2" + ")+" * 6,
    ):
        assert len(store.search(pattern)) == 1, pattern
