"""Types of values, each with its bytes in an `.acomm` file and its value in JSON lines.

A record is described once: its fields in the order of its class, by the codecs of their types.
``encode`` raises ValidationFailed for a value that does not fit its field, ``read`` FormatError,
``load`` InvalidField with the field's path. See docs/formats/acomm.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import msgspec

from relay.acomm import fields
from relay.acomm.fields import ABSENT, BYTE, PRESENT, Reader
from relay.acomm.model import (
    LabelledEnum,
    Metadata,
    MetadataValue,
    Retention,
    RetentionKind,
)

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


def _as_it_is(value: Any) -> Any:
    return value


class Codec(NamedTuple):
    """Both directions of one type of value, in bytes and in JSON."""

    encode: Callable[[str, Any], bytes]  # the field's name, for errors, and the value
    read: Callable[[Reader, str], Any]
    least: int  # bytes of the shortest value
    dump: Callable[[Any], Any] = _as_it_is
    load: Callable[[Any], Any] = _as_it_is


def unexpected(expected: str, found: object) -> InvalidField:
    """The error for a JSON value of another kind."""
    text = json.dumps(found)
    return InvalidField(
        f"expected {expected}, got {text if len(text) <= 60 else text[:57] + '...'}"
    )


def integer(most: int, least: int = 0) -> Callable[[Any], int]:
    """Load an integer from ``least`` to ``most``."""

    def load(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise unexpected(f"an integer from {least} to {most}", value)
        return value

    return load


def _load_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise unexpected("true or false", value)
    return value


def load_text(value: Any) -> str:
    """Load a text that UTF-8 can hold: JSON can hold an unpaired surrogate."""
    if not isinstance(value, str):
        raise unexpected("a text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise unexpected("a text without unpaired surrogates", value) from None
    return value


def load_hex(value: Any) -> bytes:
    """Load bytes from hex digits."""
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise unexpected("hex digits, two a byte", value) from None


def enum(kind: type[LabelledEnum], absent: LabelledEnum | None = None) -> Codec:
    """An enum member: a byte, and the document's spelling. None is written as ``absent``."""
    members = {member.label: member for member in kind}

    def load(value: Any) -> LabelledEnum:
        if not isinstance(value, str) or value not in members:
            raise unexpected(f"one of {', '.join(members)}", value)
        return members[value]

    def given(value: Any) -> LabelledEnum:
        return cast(LabelledEnum, absent if value is None else value)

    return Codec(
        lambda _, value: BYTE[given(value)],
        lambda reader, field: reader.enum(field, kind),
        1,
        lambda value: given(value).label,
        load,
    )


def choice(values: Sequence[object]) -> Codec:
    """One of these values, by its number."""

    def read(reader: Reader, field: str) -> object:
        number = reader.u8(field)
        if number >= len(values):
            raise reader.fault(reader.pos - 1, f"{field} 0-{len(values) - 1}", number)
        return values[number]

    return Codec(lambda _, value: BYTE[values.index(value)], read, 1)


def opt(codec: Codec) -> Codec:
    """A tag before the value, or null; None without one."""
    encode, read, _, dump, load = codec
    return Codec(
        lambda field, value: ABSENT if value is None else PRESENT + encode(field, value),
        lambda reader, field: reader.opt(field, lambda field: read(reader, field)),
        1,
        lambda value: None if value is None else dump(value),
        lambda value: None if value is None else load(value),
    )


def many(codec: Codec) -> Codec:
    """A tuple: a u32 count before the values, or a list."""
    encode, read, least, dump, load_one = codec

    def load(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list):
            raise unexpected("a list", values)
        loaded = []
        for number, value in enumerate(values):
            try:
                loaded.append(load_one(value))
            except InvalidField as exc:
                raise exc.inside(f"[{number}]") from None
        return tuple(loaded)

    return Codec(
        lambda field, values: (
            fields.U32.pack(len(values)) + b"".join([encode(field, value) for value in values])
        ),
        lambda reader, field: reader.items(field, least, lambda field: read(reader, field)),
        4,
        lambda values: [dump(value) for value in values],
        load,
    )


def record(cls: type, **overrides: Codec) -> Codec:
    """The fields of a Struct or NamedTuple; in JSON an object, without those that have a default.

    A field's type decides its codec, unless it is one of ``overrides``.
    """
    hints = get_type_hints(cls)
    codecs = {name: overrides.get(name) or codec_of(hint) for name, hint in hints.items()}
    required = [
        field.name
        for field in (msgspec.structs.fields(cls) if issubclass(cls, msgspec.Struct) else ())
        if field.required
    ]

    values_of = attrgetter(*codecs)
    encoders = [(name, codec.encode) for name, codec in codecs.items()]
    readers = [(name, codec.read) for name, codec in codecs.items()]

    def encode(_: str, value: Any) -> bytes:
        pairs = zip(encoders, values_of(value), strict=True)
        return b"".join([write(name, part) for (name, write), part in pairs])

    def read(reader: Reader, _: str) -> Any:
        return cls(*[read_one(reader, name) for name, read_one in readers])

    def dump(value: Any) -> dict[str, Any]:
        return {name: codec.dump(getattr(value, name)) for name, codec in codecs.items()}

    def load(row: Any) -> Any:
        if not isinstance(row, dict):
            raise unexpected("an object", row)
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

    return Codec(encode, read, sum(codec.least for codec in codecs.values()), dump, load)


def _dump_content(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _load_content(value: Any) -> bytes:
    """Load a text; bytes are those of ``content_hex``."""
    return value if isinstance(value, bytes) else load_text(value).encode()


def _dump_metadata(metadata: Metadata) -> dict[str, Any]:
    return {key: _dump_metadata_value(value) for key, value in metadata.items()}


def _dump_metadata_value(value: MetadataValue) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return {"Float": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}


def _load_metadata(row: Any) -> Metadata:
    if not isinstance(row, dict):
        raise unexpected("an object", row)
    metadata: Metadata = {}
    for key, value in row.items():
        try:
            metadata[load_text(key)] = _load_metadata_value(value)
        except InvalidField as exc:
            raise exc.inside(key) from None
    return metadata


def _load_metadata_value(value: Any) -> MetadataValue:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return load_text(value)
    if isinstance(value, int):
        return integer(I64_MAX, I64_MIN)(value)
    if isinstance(value, dict) and value in NOT_FINITE:
        return float(value["Float"])
    raise unexpected("a text, number, true, false, null or a Float", value)


def _encode_retention(field: str, retention: Retention) -> bytes:
    if retention.kind is RetentionKind.FOREVER:
        return BYTE[retention.kind]
    return BYTE[retention.kind] + fields.u64(f"{field} amount", retention.amount)


def _read_retention(reader: Reader, field: str) -> Retention:
    kind = reader.enum(field, RetentionKind)
    return Retention(kind, 0 if kind is RetentionKind.FOREVER else reader.u64(f"{field} amount"))


def _dump_retention(retention: Retention) -> Any:
    kind = retention.kind
    return kind.label if kind is RetentionKind.FOREVER else {kind.label: retention.amount}


def _load_retention(value: Any) -> Retention:
    if value == RetentionKind.FOREVER.label:
        return Retention()
    if isinstance(value, dict) and len(value) == 1:
        ((word, amount),) = value.items()
        kind = enum(RetentionKind).load(word)
        if kind is not RetentionKind.FOREVER:
            return Retention(kind, U64.load(amount))
    raise unexpected('"Forever" or an object with Duration, Count or Size', value)


U32 = Codec(fields.u32, Reader.u32, 4, load=integer(fields.U32_MAX))
U64 = Codec(fields.u64, Reader.u64, 8, load=integer(fields.U64_MAX))
TEXT = Codec(fields.text, Reader.text, 4, load=load_text)
NAME = Codec(fields.name, Reader.text, 4, load=load_text)  # of a channel or participant
TOPIC = Codec(fields.topic, Reader.text, 4, load=load_text)
BLOB = Codec(lambda _, value: fields.blob(value), Reader.blob, 4, bytes.hex, load_hex)
CONTENT = BLOB._replace(dump=_dump_content, load=_load_content)  # None if it is not a text
_CODECS: dict[object, Codec] = {
    int: U64,
    bool: Codec(lambda _, value: BYTE[value], Reader.boolean, 1, load=_load_bool),
    str: TEXT,
    bytes: BLOB,
    Metadata: Codec(
        lambda _, value: fields.encode_metadata(value),
        lambda reader, _: fields.read_metadata(reader),
        4,
        _dump_metadata,
        _load_metadata,
    ),
    Retention: Codec(_encode_retention, _read_retention, 1, _dump_retention, _load_retention),
}


def codec_of(hint: Any) -> Codec:
    """The codec of values of this type."""
    if hint in _CODECS:
        return _CODECS[hint]
    if get_origin(hint) is UnionType:
        return opt(codec_of(next(arg for arg in get_args(hint) if arg is not NoneType)))
    if get_origin(hint) is tuple:
        return many(codec_of(get_args(hint)[0]))
    return enum(hint) if issubclass(hint, LabelledEnum) else record(hint)
