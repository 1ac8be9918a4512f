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
    "float": "a number with a fraction or exponent",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object, {…}",
}
_TWICE = object()  # the value of a key that is given twice


def parse(data: bytes) -> Any:
    """The values in a file. Errors: ValueError; RecursionError."""
    return _in_units(json.loads(data, object_pairs_hook=_section))


def _section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        found[name] = _TWICE if name in found else value
    return found


def _in_units(tree: Any, place: str = "") -> Any:
    """The values, durations in their units. Errors: ValueError for one of them, a key twice."""
    if not isinstance(tree, dict):
        return tree
    found = {}
    for key, value in tree.items():
        name = f"{place}.{key}" if place else key
        if value is _TWICE:
            raise ValueError(f"{name} is given twice: keep one")
        found[key] = _in_units(_in_its_unit(name, value), name)
    return found


def _in_its_unit(name: str, value: Any) -> Any:
    unit = _UNITS.get(name.removesuffix("_per_s").rpartition("_")[2])
    if unit is None or not isinstance(value, str):
        return value
    try:
        return whole(value, unit)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from exc


def fault(exc: Exception, tree: Any, settings: Collection[str]) -> str:
    """Describe a fault of the file by its line and column, or else by its setting.

    ``tree``: its values, where it could be parsed.
    """
    if isinstance(exc, json.JSONDecodeError):
        what = exc.msg.removesuffix(" at")  # here
        return f"line {exc.lineno}, column {exc.colno}: {what[:1].lower()}{what[1:]}"
    if isinstance(exc, UnicodeDecodeError):
        return f"line {exc.object[: exc.start].count(10) + 1}: expected UTF-8 text"
    if isinstance(exc, RecursionError):
        return "expected settings, got values nested too deeply"
    rule, _, place = str(exc).partition(" - at `")
    where = place.rstrip("`").removeprefix("$").lstrip(".")
    if found := re.search("unknown field `(.*)`", rule):
        name = f"{where}.{found[1]}" if where else found[1]
        meant = did_you_mean(name, settings)
        return f"setting {name} does not exist{'; ' if meant else ''}{meant}"
    if not isinstance(exc, msgspec.ValidationError):
        return rule
    plain = re.sub("`([^`]*)`", lambda found: _TYPES.get(found[1], found[1]), rule)
    where, value = _found_at(tree, where)
    if ", got" not in plain:
        plain += f", got {value!s:.40}"
    return (f"{where}: " if where else "") + plain[:1].lower() + plain[1:]


def _found_at(tree: Any, where: str) -> tuple[str, Any]:
    """The place of a fault, with the key that msgspec leaves out, and the value there."""
    above, is_unnamed, below = where.partition("[...]")
    for key in re.findall(r"[^.\[\]]+", above):
        tree = tree[int(key) if isinstance(tree, list) else key]
    if not is_unnamed:
        return where, tree
    name = next(name for name, words in tree.items() if not _is_words(words))
    return f"{above}.{name}{below}", tree[name]


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)
