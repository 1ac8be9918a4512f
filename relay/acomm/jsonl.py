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
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

import msgspec

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    LabelledEnum,
    Message,
    MessageFilter,
    Metadata,
    MetadataValue,
    Retention,
    RetentionKind,
    SortField,
    SortOrder,
    StoreFile,
    Subscription,
)
from relay.base.errors import MessageError
from relay.base.text import json_line

I64_MIN, I64_MAX = -(2**63), 2**63 - 1
NOT_FINITE = ({"Float": "NaN"}, {"Float": "Infinity"}, {"Float": "-Infinity"})


class InvalidField(Exception):
    """A JSON value that is not valid for its field: the field's path and the rule."""

    def __init__(self, rule: str, field: str = "") -> None:
        super().__init__(f"{field}: {rule}" if field else rule)
        self.rule = rule
        self.field = field

    def inside(self, outer: str) -> InvalidField:
        """The same error with ``outer`` prepended to its path."""
        joint = "" if not self.field or self.field.startswith("[") else "."
        return InvalidField(self.rule, f"{outer}{joint}{self.field}")


class JsonCodec(NamedTuple):
    """Both directions of one type of value; ``load`` raises InvalidField."""

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


def record(cls: type[msgspec.Struct], **overrides: JsonCodec) -> JsonCodec:
    """An object with a key for every field of ``cls``; fields with a default may be missing.

    A field's type decides its codec, unless it is one of ``overrides``.
    """
    fields = msgspec.structs.fields(cls)
    codecs = {field.name: overrides.get(field.name) or codec_of(field.type) for field in fields}
    required = [field.name for field in fields if field.required]

    def dump(value: msgspec.Struct) -> dict[str, Any]:
        return {name: codec.dump(getattr(value, name)) for name, codec in codecs.items()}

    def load(row: Any) -> Any:
        if not isinstance(row, dict):
            raise _unexpected("an object", row)
        for name in row:
            if name not in codecs:
                raise InvalidField("is not a known field", name)
        for name in required:
            if name not in row:
                raise InvalidField("is missing", name)
        values = {}
        for name, value in row.items():
            try:
                values[name] = codecs[name].load(value)
            except InvalidField as exc:
                raise exc.inside(name) from None
        return cls(**values)

    return JsonCodec(dump, load)


def label(enum: type[LabelledEnum], absent: LabelledEnum | None = None) -> JsonCodec:
    """An enum member by the document's spelling; None is written as ``absent``."""
    members = {member.label: member for member in enum}

    def load(value: Any) -> LabelledEnum:
        if not isinstance(value, str) or value not in members:
            raise _unexpected(f"one of {', '.join(members)}", value)
        return members[value]

    return JsonCodec(
        lambda member: (member if absent is None or member is not None else absent).label, load
    )


def integer(most: int, least: int = 0) -> JsonCodec:
    """An integer from ``least`` to ``most``."""

    def load(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _unexpected(f"an integer from {least} to {most}", value)
        return value

    return JsonCodec(_as_it_is, load)


def opt(codec: JsonCodec) -> JsonCodec:
    """null for None."""
    return JsonCodec(
        lambda value: None if value is None else codec.dump(value),
        lambda value: None if value is None else codec.load(value),
    )


def many(codec: JsonCodec) -> JsonCodec:
    """A list for a tuple."""

    def load(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list):
            raise _unexpected("a list", values)
        loaded = []
        for number, value in enumerate(values):
            try:
                loaded.append(codec.load(value))
            except InvalidField as exc:
                raise exc.inside(f"[{number}]") from None
        return tuple(loaded)

    return JsonCodec(lambda values: [codec.dump(value) for value in values], load)


def _as_it_is(value: Any) -> Any:
    return value


def _unexpected(expected: str, found: object) -> InvalidField:
    text = json.dumps(found)
    return InvalidField(
        f"expected {expected}, got {text if len(text) <= 60 else text[:57] + '...'}"
    )


def _load_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _unexpected("true or false", value)
    return value


def _load_text(value: Any) -> str:
    if not isinstance(value, str):
        raise _unexpected("a text", value)
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can hold an unpaired surrogate, UTF-8 cannot
        raise _unexpected("a text without unpaired surrogates", value) from None
    return value


def _load_hex(value: Any) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise _unexpected("hex digits, two a byte", value) from None


def _dump_metadata(metadata: Metadata) -> dict[str, Any]:
    return {key: _dump_metadata_value(value) for key, value in metadata.items()}


def _dump_metadata_value(value: MetadataValue) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return {"Float": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}


def _load_metadata(row: Any) -> Metadata:
    if not isinstance(row, dict):
        raise _unexpected("an object", row)
    metadata: Metadata = {}
    for key, value in row.items():
        try:
            metadata[_load_text(key)] = _load_metadata_value(value)
        except InvalidField as exc:
            raise exc.inside(key) from None
    return metadata


def _load_metadata_value(value: Any) -> MetadataValue:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return _load_text(value)
    if isinstance(value, int):
        return int(integer(I64_MAX, I64_MIN).load(value))
    if isinstance(value, dict) and value in NOT_FINITE:
        return float(value["Float"])
    raise _unexpected("a text, number, true, false, null or a Float", value)


def _dump_retention(retention: Retention) -> Any:
    kind = retention.kind
    return kind.label if kind is RetentionKind.FOREVER else {kind.label: retention.amount}


def _load_retention(value: Any) -> Retention:
    if value == RetentionKind.FOREVER.label:
        return Retention()
    if isinstance(value, dict) and len(value) == 1:
        ((word, amount),) = value.items()
        kind = label(RetentionKind).load(word)
        if kind is not RetentionKind.FOREVER:
            return Retention(kind, U64.load(amount))
    raise _unexpected('"Forever" or an object with Duration, Count or Size', value)


def _dump_message(message: Message) -> dict[str, Any]:
    """The fields of a message, with ``content_hex`` instead of content that is not text."""
    row: dict[str, Any] = _MESSAGE_FIELDS.dump(message)
    if row["content"] is not None:
        return row
    names = ("content_hex" if name == "content" else name for name in row)
    return dict(zip(names, {**row, "content": message.content.hex()}.values(), strict=True))


def _load_message(row: Any) -> Message:
    if isinstance(row, dict) and "content_hex" in row:
        if "content" in row:
            raise InvalidField("cannot be combined with content", "content_hex")
        try:
            content = _load_hex(row["content_hex"])
        except InvalidField as exc:
            raise exc.inside("content_hex") from None
        row = {name: value for name, value in row.items() if name != "content_hex"}
        row["content"] = content
    message: Message = _MESSAGE_FIELDS.load(row)
    return message


def _dump_content(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _load_content(value: Any) -> bytes:
    return value if isinstance(value, bytes) else _load_text(value).encode()


U32 = integer(2**32 - 1)
U64 = integer(2**64 - 1)
_CODECS: dict[object, JsonCodec] = {
    int: U64,
    bool: JsonCodec(_as_it_is, _load_bool),
    str: JsonCodec(_as_it_is, _load_text),
    bytes: JsonCodec(bytes.hex, _load_hex),
    Metadata: JsonCodec(_dump_metadata, _load_metadata),
    Retention: JsonCodec(_dump_retention, _load_retention),
}


def codec_of(field_type: Any) -> JsonCodec:
    """The codec of values of this type."""
    if field_type in _CODECS:
        return _CODECS[field_type]
    if get_origin(field_type) is UnionType:
        return opt(codec_of(next(one for one in get_args(field_type) if one is not NoneType)))
    if get_origin(field_type) is tuple:
        return many(codec_of(get_args(field_type)[0]))
    return label(field_type) if issubclass(field_type, LabelledEnum) else record(field_type)


_CODECS[ChannelConfig] = record(ChannelConfig, max_participants=opt(U32), max_retries=U32)
_CODECS[MessageFilter] = record(
    MessageFilter,
    sort_by=label(SortField, SortField.CREATED_AT),
    sort_order=label(SortOrder, SortOrder.DESCENDING),
)
_MESSAGE_FIELDS = record(Message, content=JsonCodec(_dump_content, _load_content), retry_count=U32)
MESSAGE = JsonCodec(_dump_message, _load_message)
CHANNEL = record(Channel)
SUBSCRIPTION = record(Subscription)


class _HeaderLine(msgspec.Struct, frozen=True):
    created_at: int
    modified_at: int
    encrypted: bool = False


class _EngineStateLine(msgspec.Struct, frozen=True):
    tag: int
    data_hex: bytes


# The sections of records, in the order of the lines; each is a field of StoreFile.
_RECORDS: Mapping[str, JsonCodec] = {
    "channels": CHANNEL,
    "messages": MESSAGE,
    "subscriptions": SUBSCRIPTION,
    "dead_letters": MESSAGE,
    "archive": MESSAGE,
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
