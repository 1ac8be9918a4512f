"""Content patterns: RE2 refuses what it cannot match in linear time and bounded memory."""

from __future__ import annotations

import pytest

from relay.acomm.model import ChannelType, MessageFilter
from relay.base.errors import ValidationFailed
from tests.engine.support import channel_of, new_store, send

pytestmark = pytest.mark.shows("engine 2.7")

INVALID = [
    "(((a{100}){100}){100}){100}",
    "(a{2000}){2000}",
    "\\p{L}{900}" * 9,
    "(",
    "a(?=b)",
    r"(a)\1",
    "\ud800",
]


@pytest.mark.parametrize("pattern", INVALID)
def test_a_pattern_that_is_invalid_or_too_large_is_refused(pattern: str) -> None:
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
        r"\(error\)",
        r"x\{2}",
        "(?:" * 6 + "2" + ")+" * 6,
    ):
        assert len(store.search(pattern)) == 1, pattern
