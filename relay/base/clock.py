"""The clock, which is passed to everything that needs the time."""

from __future__ import annotations

import time
from datetime import datetime
from functools import lru_cache

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Identifier of this boot of the machine; no other boot has the same."""
    try:
        with open(BOOT_ID) as file:
            return file.read().strip()
    except OSError:  # no Linux
        import psutil

        return f"booted at {int(psutil.boot_time())}"


class Clock:
    """The machine's clock; tests pass a fake one."""

    def now_ns(self) -> int:
        """Unix time, UTC, nanoseconds. It may jump; order never depends on it."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """Nanoseconds that only grow: for deadlines."""
        return time.monotonic_ns()


def iso_time(at_ns: int) -> str:
    """ISO 8601 in UTC with microseconds: ``2026-01-31T09:30:00.000001Z``."""
    seconds, rest_ns = divmod(at_ns, NS_PER_S)
    return f"{_second(seconds)}.{rest_ns // 1000:06d}Z"


def iso_date(at_ns: int) -> str:
    """The day in UTC: ``2026-01-31``; the name of an archive folder."""
    return _second(at_ns // NS_PER_S).partition("T")[0]


@lru_cache(maxsize=16)  # the messages of a batch have the same second
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def ttl_note(sent_at: str | None, ttl: str | None) -> str:
    """``its TTL ended 5 min ago`` of a delivered message that is read too late; else empty."""
    try:
        began, seconds = datetime.fromisoformat(sent_at or "").timestamp(), int(ttl or "")
    except (ValueError, OverflowError):
        return ""
    late_s = int(time.time() - began) - seconds
    return f"its TTL ended {elapsed(late_s * NS_PER_S)} ago" if late_s > 0 else ""


def elapsed(duration_ns: int) -> str:
    """A time span for people: ``3 s``, ``5 min``, ``2 h``, ``4 d``."""
    seconds = max(0, duration_ns // NS_PER_S)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
