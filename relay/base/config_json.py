"""The JSON of ``config.json``: durations in its units, no key twice, and faults in plain words."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import msgspec

from relay.base.clock import whole
from relay.base.text import did_you_mean

_UNITS = {"ms": "ms", "s": "s", "days": "d"}  # by the end of a setting's name
_TYPES = {
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def parse(data: bytes) -> Any:
    """The values in a file. Errors: msgspec.DecodeError; ValueError; RecursionError."""
    tree = json.loads(data, object_pairs_hook=_section)
    msgspec.json.decode(data)  # it knows no NaN, and no text that is not Unicode
    return tree


def _section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file. Errors: ValueError for a key given twice, or an invalid duration."""
    found = {name: _in_its_unit(name, value) for name, value in pairs}
    if len(found) < len(pairs):
        words = [word for word, _ in pairs]
        twice = next(word for word in words if words.count(word) > 1)
        raise ValueError(f"{twice!r} is given twice: keep one")
    return found


def _in_its_unit(name: str, value: Any) -> Any:
    unit = _UNITS.get(name.removesuffix("_per_s").rpartition("_")[2])
    if unit is None or not isinstance(value, str):
        return value
    try:
        return whole(value, unit)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from exc


def fault(exc: Exception, settings: Collection[str]) -> str:
    """Describe a fault of the file by its line and column, or else by its setting."""
    if isinstance(exc, json.JSONDecodeError):
        return f"line {exc.lineno}, column {exc.colno}: {exc.msg[:1].lower()}{exc.msg[1:]}"
    if isinstance(exc, UnicodeDecodeError):
        return f"line {exc.object[: exc.start].count(10) + 1}: expected UTF-8 text"
    if isinstance(exc, RecursionError):
        return "expected settings, got values nested too deeply"
    rule, _, place = (text := str(exc)).partition(" - at `")
    where = place.rstrip("`").removeprefix("$").lstrip(".")
    if found := re.search("unknown field `(.*)`", rule):
        name = f"{where}.{found[1]}" if where else found[1]
        meant = did_you_mean(name, settings)
        return f"setting {name} does not exist{'; ' if meant else ''}{meant}"
    if where:
        plain = re.sub("`([^`]*)`", lambda found: _TYPES.get(found[1], found[1]), rule)
        return f"{where}: {plain[:1].lower()}{plain[1:]}"
    return text.replace("`", "")
