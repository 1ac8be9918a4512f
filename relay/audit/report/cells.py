"""Values as a person reads them: thousands divided, times in UTC, nothing without an end.

What comes out is text: the template escapes it, whoever has written it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date, datetime

MOST_TEXT = 160  # characters of a cell
NOTHING = "–"
# A column's unit, by the end of its name.
UNITS = (("_ms", "ms"), ("_ns", "ns"), ("_s", "s"), ("bytes", "bytes"), ("_percent", "%"))
# unit, its milliseconds, and from where on the next is used
_DURATIONS = (("ms", 1.0, 1e3), ("s", 1e3, 6e4), ("min", 6e4, 3.6e6), ("h", 3.6e6, 8.64e7))
_OTHER = re.compile(r"[^A-Za-z0-9_.-]")
# C0 and C1 controls, and what turns the direction of the text around it.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def cell(value: object) -> str:
    """A value as text, of bounded length."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) < 1e15 else f"{value:.3g}"
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return shortened(value[:MOST_TEXT].hex())
    if isinstance(value, Mapping):
        return shortened("; ".join(f"{name}: {of}" for name, of in value.items()))
    if isinstance(value, list | tuple):
        return shortened(_pairs(value))
    return shortened(str(value))


def moment(value: datetime) -> str:
    """``2026-01-31 09:30:00Z``, with what there is below a second."""
    text = value.replace(tzinfo=None).isoformat(sep=" ")
    return (text.rstrip("0") if "." in text else text) + "Z"


def shortened(text: str) -> str:
    """The text on one line, without characters that nobody sees, and with an end."""
    seen = _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))
    return seen if len(seen) <= MOST_TEXT else seen[: MOST_TEXT - 1] + "…"


def duration_ms(value: float) -> str:
    """``0.5 ms``, ``850 ms``, ``1.2 s``, ``3 min``, ``2 h``, ``10 d``."""
    unit, length = next(
        ((unit, length) for unit, length, most in _DURATIONS if abs(value) < most), ("d", 8.64e7)
    )
    digits = f"{value / length:,.1f}" if abs(value / length) < 100 else f"{value / length:,.0f}"
    return f"{digits.removesuffix('.0')} {unit}" if abs(value) >= 0.1 else f"{value:.2g} ms"


def unit_of(column: str) -> str:
    """The unit that a column's name speaks of; empty when it has none."""
    return next((unit for ending, unit in UNITS if column.endswith(ending)), "")


def slug(*parts: str) -> str:
    """An id for an anchor."""
    return "-".join(_OTHER.sub("_", part) for part in parts)


def is_number(value: object) -> bool:
    """True for what stands at the right of its column."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pairs(value: Iterable[object]) -> str:
    """A map, as Arrow gives it: a list of pairs; or a plain list."""
    shown = [
        f"{part[0]}: {part[1]}" if isinstance(part, tuple) and len(part) == 2 else str(part)
        for part in value
    ]
    return "; ".join(shown)
