"""A store as JSON lines, one object per line, from which the file can be built again.

    {"section": "header", "created_at": 1780000000, "modified_at": 1780000009}
    {"section": "channels", "id": 1, "name": "team", "channel_type": "Group", ...}
    {"section": "messages", ...}  then subscriptions, dead_letters, archive, engine_state

Fields have the names of the values; enums have the document's spelling; signatures are hex.
Content that is not UTF-8 is written as ``content_hex``. A retention is ``"Forever"`` or
``{"Count": 100}``; a float that JSON cannot represent is ``{"Float": "NaN"}``.
``from_lines(to_lines(store))`` equals ``store``, with its records in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from relay.acomm.codec import U32, Codec, InvalidField, load_hex, record
from relay.acomm.model import Message, StoreFile
from relay.acomm.records import CHANNEL, MESSAGE, SUBSCRIPTION
from relay.base.errors import MessageError
from relay.base.text import json_line


def _dump_message(message: Message) -> dict[str, Any]:
    """The fields of a message, with ``content_hex`` instead of content that is not text."""
    row: dict[str, Any] = MESSAGE.dump(message)
    if row["content"] is not None:
        return row
    names = ("content_hex" if name == "content" else name for name in row)
    return dict(zip(names, {**row, "content": message.content.hex()}.values(), strict=True))


def _load_message(row: Any) -> Message:
    if isinstance(row, dict) and "content_hex" in row:
        if "content" in row:
            raise InvalidField("cannot be combined with content", "content_hex")
        try:
            content = load_hex(row["content_hex"])
        except InvalidField as exc:
            raise exc.inside("content_hex") from None
        row = {name: value for name, value in row.items() if name != "content_hex"}
        row["content"] = content
    message: Message = MESSAGE.load(row)
    return message


_MESSAGE = MESSAGE._replace(dump=_dump_message, load=_load_message)


class _HeaderLine(msgspec.Struct, frozen=True):
    created_at: int
    modified_at: int
    encrypted: bool = False


class _EngineStateLine(msgspec.Struct, frozen=True):
    tag: int
    data_hex: bytes


# The sections of records, in the order of the lines; each is a field of StoreFile.
_RECORDS: Mapping[str, Codec] = {
    "channels": CHANNEL,
    "messages": _MESSAGE,
    "subscriptions": SUBSCRIPTION,
    "dead_letters": _MESSAGE,
    "archive": _MESSAGE,
}
_SECTIONS = {
    "header": record(_HeaderLine),
    **_RECORDS,
    "engine_state": record(_EngineStateLine, tag=U32),
}
SECTIONS = tuple(_SECTIONS)


def to_lines(store: StoreFile, section: str | None = None) -> Iterator[str]:
    """The lines of a store without line feeds; only those of ``section`` if given."""
    for name in SECTIONS:
        if section is None or section == name:
            for row in _rows(store, name):
                yield json_line({"section": name, **row})


def from_lines(lines: Iterable[str]) -> StoreFile:
    """The store that lines describe: the header first, then records of any section.

    Fields that have a default may be omitted; empty lines are skipped.
    Errors: MessageError with the number of the first wrong line, and the field in it.
    """
    header: _HeaderLine | None = None
    records: dict[str, list[Any]] = {name: [] for name in _RECORDS}
    blocks: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            name, value = _load(line)
            if (name == "header") is (header is not None):
                raise InvalidField("the header must be the first line, and occur once", "section")
            if isinstance(value, _HeaderLine):
                header = value
            elif isinstance(value, _EngineStateLine):
                if value.tag in blocks:
                    raise InvalidField(f"{value.tag} is given twice", "tag")
                blocks[value.tag] = value.data_hex
            else:
                records[name].append(value)
        except InvalidField as exc:
            raise MessageError(str(exc), line=number) from None
    if header is None:
        raise MessageError("the input is empty: the first line must be the header")
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
        line.encode()  # bytes that are not UTF-8 are read as unpaired surrogates
        row = json.loads(line)
    except UnicodeEncodeError:
        raise InvalidField("not UTF-8") from None
    except json.JSONDecodeError as exc:
        raise InvalidField(f"not JSON, {exc.msg} at column {exc.colno}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting
        raise InvalidField("not JSON that can be read") from None
    if not isinstance(row, dict):
        raise InvalidField("expected an object")
    name = row.pop("section", None)
    if not isinstance(name, str) or name not in _SECTIONS:
        raise InvalidField(f"expected one of {', '.join(SECTIONS)}", "section")
    return name, _SECTIONS[name].load(row)
