"""Times of rows, as people and programs read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relay.base.clock import elapsed, iso_time, local_time, parse_time


def ago(at_ns: int | None, now_ns: int) -> str:
    """Format the time since then, like ``3 s``, ``5 min``, ``2 h``, ``4 d``."""
    if at_ns is None:
        return "never"
    return elapsed(now_ns - at_ns)


def when(at_ns: int | None) -> str | None:
    """Format a time as ISO 8601; None stays None."""
    return None if at_ns is None else iso_time(at_ns)


def local_iso(text: str | None) -> str | None:
    """Format an ISO 8601 time as ``local_time`` does; None stays None."""
    if text is None:
        return None
    return local_time(parse_time(text))


def with_iso_times(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the times of a row to ISO 8601: the values ``at`` and ``…_at`` at any depth."""

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, int) and (name == "at" or name.endswith("_at")):
            return when(value)
        if isinstance(value, Mapping):
            return with_iso_times(value)
        if isinstance(value, list):
            return [shown("", item) for item in value]
        return value

    return {name: shown(name, value) for name, value in facts.items()}
