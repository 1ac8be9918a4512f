"""The clock, which is passed to everything that needs the time; durations and times as text."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
LATEST_NS, LATEST_YEAR = 2**63 - 1, 2262  # more does not fit into a column

MOST_MS = (10**18 - 1) * 1000  # 18 digits of seconds
UNIT_NAMES = {"ms": "milliseconds", "s": "seconds", "d": "days"}  # of settings
UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"([0-9]{1,18})(?:[.]([0-9]{1,9}))? ?(ms|s|m|min|h|d)?")
EPOCH = datetime.fromtimestamp(0, UTC)
_DAY = len("2026-11-26")

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
    """The machine's clock; tests pass a fake one.

    ``now_ns``: Unix time, UTC, nanoseconds. It may jump; order never depends on it.
    ``monotonic_ns``: nanoseconds that only grow, for deadlines.
    """

    # the C functions themselves: a turn of the loop asks them some thirty times
    now_ns: Callable[[], int] = staticmethod(time.time_ns)
    monotonic_ns: Callable[[], int] = staticmethod(time.monotonic_ns)

    def monotonic_at(self, at_ns: int) -> int:
        """The monotonic time at which it will be ``at_ns`` (Unix); of a past one, now."""
        return self.monotonic_ns() + max(0, at_ns - self.now_ns())


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


def duration_ms(text: str, bare: str = "s", least_ms: int = 0, most_ms: int = MOST_MS) -> int:
    """Milliseconds of ``500ms``, ``10s``, ``10m``, ``10min``, ``2h``, ``7d``, ``1.5h``.

    ``bare``: the unit of a number without one; empty: it must have one. Errors: ValueError.
    """
    match = _DURATION.fullmatch(text)
    unit = match and (match[3] or bare)
    if not (match and unit):
        raise ValueError(f"{text[:60]!r} is not a duration such as 500ms, 10s, 10m, 2h or 7d")
    whole, part = match[1], match[2] or ""
    found = int(whole + part) * UNIT_MS[unit] // int(10 ** len(part))
    if not least_ms <= found <= most_ms:
        limits = f"from {least_ms / 1000:,.15g} to {most_ms / 1000:,.15g} s"
        raise ValueError(f"{text[:60]!r} is not a duration {limits}")
    return found


def whole(text: str, unit: str) -> int:
    """A duration as a number of ``unit``, in which a bare number is. Errors: ValueError."""
    number, rest = divmod(duration_ms(text, unit), UNIT_MS[unit])
    if rest:
        raise ValueError(f"{text[:60]!r} is not a whole number of {UNIT_NAMES[unit]}")
    return number


def parse_time(text: str, now_ns: int | None = None) -> int:
    """Unix nanoseconds of a time, at least 0: of everything that ``local_time`` and others print.

    ``10m``: so long ago; ``today`` and ``yesterday``: their midnight; ``14:05:09``: today;
    ``2026-11-26``, ``2026-11-26 14:05``: local time, unless ``Z``, ``UTC`` or an offset follows.
    Errors: ValueError.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    with contextlib.suppress(ValueError):
        return max(0, now_ns - duration_ms(text, bare="") * NS_PER_MS)
    today = datetime.fromtimestamp(now_ns // NS_PER_S).date()
    known = {"today": str(today), "yesterday": str(today - timedelta(days=1))}
    iso = f"{today} {text}" if text[2:3] == ":" else known.get(text, text)
    day, _, zone = iso.rpartition(" ")
    if zone in time.tzname and len(day) == _DAY:
        iso = day  # the line above the times of a day
    elif zone == "UTC":
        iso = f"{day}T00Z" if len(day) == _DAY else f"{day}Z"
    try:
        at = datetime.fromisoformat(iso)
    except ValueError as exc:
        forms = "10m, 14:05, 2026-11-26, '2026-11-26 14:05', 2026-11-26T14:05Z or yesterday"
        raise ValueError(f"{text[:60]!r} is not a time such as {forms}") from exc
    if not EPOCH.year <= at.year < LATEST_YEAR:
        return 0 if at.year < EPOCH.year else LATEST_NS
    return max(0, (at.astimezone(UTC) - EPOCH) // timedelta(microseconds=1) * 1000)


def later_time(text: str, now_ns: int) -> int:
    """Unix nanoseconds of a time to come: ``10m`` from now, the next ``14:05``, or a date as above.

    Errors: ValueError.
    """
    with contextlib.suppress(ValueError):
        return min(now_ns + duration_ms(text, bare="") * NS_PER_MS, LATEST_NS)
    at, day = parse_time(text, now_ns), datetime.fromtimestamp(now_ns // NS_PER_S).date()
    while at < now_ns and text[2:3] == ":":  # a day may have 23 hours, and be another elsewhere
        day += timedelta(days=1)
        at = parse_time(f"{day} {text}")
    return at


def local_time(at_ns: int, now_ns: int | None = None, *, precise: bool = False) -> str:
    """A time for people, in their zone: ``14:03:05`` of today, else ``2026-11-20 14:03``.

    ``precise``: with day and milliseconds. In the second of two equal hours it has its offset.
    """
    at = datetime.fromtimestamp(at_ns // NS_PER_S)
    now = datetime.fromtimestamp(time.time() if now_ns is None else now_ns // NS_PER_S)
    is_today = at.date() == now.date()
    at = at.replace(microsecond=at_ns // 1000 % 1_000_000)
    shown = at.astimezone() if at.fold else at
    if precise:
        return shown.isoformat(" ", "milliseconds")
    if is_today:
        return shown.isoformat(" ", "seconds")[_DAY + 1 :]
    return shown.isoformat(" ", "minutes")


def ttl_note(sent_at: str | None, ttl: str | None) -> str:
    """``its TTL ended 5 min ago`` of a delivered message that is read too late; else empty."""
    try:
        began = datetime.fromisoformat(sent_at or "").timestamp()
        late_s = int(time.time() - began) - duration_ms(ttl or "") // 1000
    except (ValueError, OverflowError):
        return ""
    return f"its TTL ended {elapsed(late_s * NS_PER_S)} ago" if late_s > 0 else ""


def elapsed(duration_ns: int) -> str:
    """A time span for people: ``3 s``, ``5 min``, ``2 h``, ``4 d``."""
    seconds = max(0, duration_ns // NS_PER_S)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
