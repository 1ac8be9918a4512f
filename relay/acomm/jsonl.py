"""A store as JSON lines: one object a line, to be read, compared, and built into a file again.

    {"section": "header", "created_at": 1780000000, "modified_at": 1780000009}
    {"section": "channels", "id": 1, "name": "team", "channel_type": "Group", ...}
    {"section": "messages", ...}  then subscriptions, dead_letters, archive, engine_state

Every field of a value is there by its name; enums are the document's words; signatures are
hex. Content that is no UTF-8 stands as ``content_hex``. A retention is ``"Forever"`` or
``{"Count": 100}``, a float that JSON has no number for is ``{"Float": "NaN"}``.
``from_lines(to_lines(store))`` equals ``store``, with its records in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from relay.acomm.json_kinds import BOOL, CHANNEL, HEX, MESSAGE, SUBSCRIPTION, U32, U64, Kind, Wrong
from relay.acomm.json_kinds import record as fields_of
from relay.acomm.model import StoreFile
from relay.base.errors import MessageError
from relay.base.text import json_line


class _Header(msgspec.Struct, frozen=True):
    created_at: int
    modified_at: int
    encrypted: bool = False


class _Block(msgspec.Struct, frozen=True):
    tag: int
    data_hex: bytes


# The sections of records, in the order of the lines; each is a field of StoreFile.
_RECORDS: Mapping[str, Kind] = {
    "channels": CHANNEL,
    "messages": MESSAGE,
    "subscriptions": SUBSCRIPTION,
    "dead_letters": MESSAGE,
    "archive": MESSAGE,
}
_HEADER = fields_of(_Header, created_at=U64, modified_at=U64, encrypted=BOOL)
_BLOCK = fields_of(_Block, tag=U32, data_hex=HEX)
_KINDS = {"header": _HEADER, **_RECORDS, "engine_state": _BLOCK}
SECTIONS = tuple(_KINDS)


def to_lines(store: StoreFile, section: str | None = None) -> Iterator[str]:
    """The lines of a store without line feeds; of one of SECTIONS alone when it is named."""
    for name in SECTIONS:
        if section is None or section == name:
            for row in _rows(store, name):
                yield json_line({"section": name, **row})


def from_lines(lines: Iterable[str]) -> StoreFile:
    """The store that lines describe: the header first, then records of any section.

    Fields that have a default may be left out; empty lines are passed over.
    Errors: MessageError with the number of the first wrong line, and the field in it.
    """
    header: _Header | None = None
    records: dict[str, list[Any]] = {name: [] for name in _RECORDS}
    blocks: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            name, value = _load(line)
            if (name == "header") is (header is not None):
                raise Wrong("the header is the first line, and that one alone", "section")
            if isinstance(value, _Header):
                header = value
            elif isinstance(value, _Block):
                if value.tag in blocks:
                    raise Wrong(f"{value.tag} is there already", "tag")
                blocks[value.tag] = value.data_hex
            else:
                records[name].append(value)
        except Wrong as exc:
            raise MessageError(str(exc), line=number) from None
    if header is None:
        raise MessageError("no line; the first is the header")
    groups: dict[str, Any] = {name: tuple(values) for name, values in records.items()}
    return StoreFile(
        header.created_at,
        header.modified_at,
        engine_state=blocks,
        encrypted=header.encrypted,
        **groups,
    )


def _rows(store: StoreFile, section: str) -> Iterator[dict[str, Any]]:
    if section == "header":
        row = {"created_at": store.created_at, "modified_at": store.modified_at}
        yield {**row, "encrypted": True} if store.encrypted else row
    elif section == "engine_state":
        for tag in sorted(store.engine_state):
            yield {"tag": tag, "data_hex": store.engine_state[tag].hex()}
    else:
        yield from map(_RECORDS[section].dump, getattr(store, section))


def _load(line: str) -> tuple[str, Any]:
    """The section that a line names, and the value in it."""
    try:
        line.encode()  # bytes that were no UTF-8 come as half surrogate pairs
        row = json.loads(line)
    except UnicodeEncodeError:
        raise Wrong("not UTF-8") from None
    except json.JSONDecodeError as exc:
        raise Wrong(f"not JSON, {exc.msg} at column {exc.colno}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting
        raise Wrong("not JSON that can be read") from None
    if not isinstance(row, dict):
        raise Wrong("expected an object")
    name = row.pop("section", None)
    if not isinstance(name, str) or name not in _KINDS:
        raise Wrong(f"expected one of {', '.join(SECTIONS)}", "section")
    return name, _KINDS[name].load(row)
