"""Fields of packed little-endian bytes: a strict reader, and the functions that write them.

``Reader`` reads one field at a time and raises ``FormatError`` (path, offset, expected, found) for
bytes that are not valid; nothing is allocated from a count or length before it is known to fit
what is left. A value that does not fit its field is ``ValidationFailed`` with the field's name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import TypeVar

from relay.acomm.model import Metadata, MetadataValue
from relay.base.errors import FormatError, ValidationFailed

U32 = Struct("<I")
U64 = Struct("<Q")
I64 = Struct("<q")
F64 = Struct("<d")

T = TypeVar("T")
E = TypeVar("E", bound=IntEnum)
Fault = tuple[str, str, str]  # where in a file, what was expected, what was found


def shown(data: bytes) -> str:
    """Bytes for an error message: as text if they are printable ASCII, else in hex."""
    if not data:
        return "nothing"
    if all(0x20 < byte < 0x7F for byte in data):
        return data.decode("ascii")
    return "0x" + data.hex()


class Reader:
    """Reads fields of ``data[start:end]``, for one caller on one thread.

    ``base`` is added to the offsets of faults, for a piece cut out of a file; ``where`` is
    added to what was expected, for bytes whose offsets are not the file's (a section that was
    compressed). The bytes themselves are neither copied nor changed.
    """

    __slots__ = ("base", "data", "end", "path", "pos", "where")

    def __init__(
        self,
        data: bytes,
        path: str,
        start: int = 0,
        end: int | None = None,
        *,
        base: int = 0,
        where: str = "",
    ) -> None:
        self.data = data
        self.path = path
        self.pos = start  # start <= pos <= end <= len(data), always
        self.end = len(data) if end is None else end
        self.base = base
        self.where = where

    def fault(self, pos: int, expected: object, found: object) -> FormatError:
        """The error for a fault at ``pos``, to be raised by the caller."""
        return FormatError(self.path, self.base + pos, f"{expected}{self.where}", found)

    def skip(self, size: int, field: str) -> int:
        """Skip ``size`` bytes; returns the position of the first.

        Errors: FormatError when fewer are left.
        """
        start = self.pos
        if size > self.end - start:
            raise self.fault(start, f"{field} of {size} bytes", f"{self.end - start} bytes left")
        self.pos = start + size
        return start

    def u8(self, field: str) -> int:
        """One byte."""
        return self.data[self.skip(1, field)]

    def u32(self, field: str) -> int:
        """An unsigned 32 bit integer."""
        return int(U32.unpack_from(self.data, self.skip(4, field))[0])

    def u64(self, field: str) -> int:
        """An unsigned 64 bit integer."""
        start = self.pos
        if start + 8 > self.end:
            self.skip(8, field)
        self.pos = start + 8
        value: int = U64.unpack_from(self.data, start)[0]
        return value

    def i64(self, field: str) -> int:
        """A signed 64 bit integer."""
        return int(I64.unpack_from(self.data, self.skip(8, field))[0])

    def f64(self, field: str) -> float:
        """A 64 bit float; every bit pattern is one."""
        return float(F64.unpack_from(self.data, self.skip(8, field))[0])

    def boolean(self, field: str) -> bool:
        """A bool: 0 or 1, nothing else."""
        value = self.u8(field)
        if value > 1:
            raise self.fault(self.pos - 1, f"{field} 0 or 1", value)
        return value == 1

    def enum(self, field: str, kind: type[E]) -> E:
        """A member of ``kind``, whose values run from 0 without a gap."""
        value = self.u8(field)
        if value >= len(kind):
            raise self.fault(self.pos - 1, f"{field} 0-{len(kind) - 1}", value)
        return kind(value)

    def blob(self, field: str) -> bytes:
        """Bytes prefixed by their u32 length."""
        size = self.u32(f"length of {field}")
        start = self.skip(size, field)
        return self.data[start : self.pos]

    def text(self, field: str) -> str:
        """UTF-8 text prefixed by its u32 byte length; a fault has the first bad byte's offset."""
        start = self.pos + 4
        if start > self.end:
            self.skip(4, f"length of {field}")
        self.pos = start
        self.skip(U32.unpack_from(self.data, start - 4)[0], field)
        try:  # a view, to avoid a second copy of a long text
            return str(memoryview(self.data)[start : self.pos], "utf-8")
        except UnicodeDecodeError as exc:
            bad = self.data[start + exc.start : start + exc.end]
            raise self.fault(start + exc.start, f"{field} in UTF-8", shown(bad)) from None

    def opt(self, field: str, read: Callable[[str], T]) -> T | None:
        """The result of ``read``, or None if the tag says absent."""
        tag = self.u8(f"tag of {field}")
        if tag > 1:
            raise self.fault(self.pos - 1, f"tag of {field} 0 or 1", tag)
        return read(field) if tag else None

    def count(self, field: str, smallest: int, *, wide: bool = False) -> int:
        """A count of items of at least ``smallest`` bytes each, checked against the bytes left.

        It is a u32, or a u64 when ``wide``.
        """
        start = self.pos
        value = self.u64(field) if wide else self.u32(field)
        room = (self.end - self.pos) // smallest
        if value > room:
            raise self.fault(start, f"{field} of at most {room}, as many as can fit", value)
        return value

    def items(self, field: str, smallest: int, read: Callable[[str], T]) -> tuple[T, ...]:
        """A list: its u32 count, then the results of ``read``, at least ``smallest`` bytes each."""
        return tuple([read(field) for _ in range(self.count(f"count of {field}", smallest))])

    def blocks(self, name: str) -> dict[int, Reader]:
        """The blocks up to the end, by tag: tag u32, length u64, data."""
        found: dict[int, Reader] = {}
        while self.pos < self.end:
            start = self.pos
            tag = self.u32(f"tag of a {name}")
            if tag in found:
                raise self.fault(start, f"{name} {tag} once", "it twice")
            first = self.skip(self.u64(f"length of a {name}"), f"{name} {tag}")
            found[tag] = Reader(self.data, self.path, first, self.pos)
        return found

    def finish(self, what: str) -> None:
        """Make sure that nothing is left over."""
        if self.pos != self.end:
            raise self.fault(self.pos, f"end of {what}", f"{self.end - self.pos} more bytes")


MAX_NAME_BYTES = 128  # of channels and participants
MAX_TOPIC_BYTES = 256
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

ABSENT, PRESENT = b"\0", b"\1"
BYTE = tuple(bytes([value]) for value in range(256))


def u32(field: str, value: int) -> bytes:
    """An unsigned 32 bit integer."""
    if not 0 <= value <= U32_MAX:
        raise ValidationFailed(field, f"{value} is outside 0-{U32_MAX}")
    return U32.pack(value)


def u64(field: str, value: int) -> bytes:
    """An unsigned 64 bit integer."""
    if not 0 <= value <= U64_MAX:
        raise ValidationFailed(field, f"{value} is outside 0-{U64_MAX}")
    return U64.pack(value)


def text(field: str, value: str, limit: int = U32_MAX) -> bytes:
    """UTF-8 text prefixed by its u32 byte length, at most ``limit`` bytes."""
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise ValidationFailed(field, "an unpaired surrogate is not valid text") from None
    if len(raw) > limit:
        raise ValidationFailed(field, f"above {limit} bytes", len(raw))
    return U32.pack(len(raw)) + raw


# A store has few names and topics, and writes each of them with every message.
@lru_cache(maxsize=4096)
def name(field: str, value: str) -> bytes:
    """A channel's or participant's name, 128 bytes at most."""
    return text(field, value, MAX_NAME_BYTES)


@lru_cache(maxsize=4096)
def topic(field: str, value: str) -> bytes:
    """A topic or topic pattern, 256 bytes at most."""
    return text(field, value, MAX_TOPIC_BYTES)


def tagged(by_tag: Mapping[int, bytes]) -> bytes:
    """Blocks in the order given: tag u32, length u64, data."""
    parts: list[bytes] = []
    for tag, data in by_tag.items():
        parts += (u32("tag", tag), U64.pack(len(data)), data)
    return b"".join(parts)


def blob(value: bytes) -> bytes:
    """Bytes prefixed by their u32 length."""
    return U32.pack(len(value)) + value


# A longer text is rare, and its length may be wrong: it is read field by field.
MAX_FAST_TEXT = 1024
BOOLEANS = (False, True)
MIN_METADATA_ENTRY = 5
META_STRING, META_INTEGER, META_FLOAT, META_BOOLEAN, META_NULL = range(5)
TAGGED_I64 = Struct("<Bq")
TAGGED_F64 = Struct("<Bd")


def encode_metadata(metadata: Metadata) -> bytes:
    """Metadata by key in byte order (UTF-8 sorts as its code points do)."""
    parts = [U32.pack(len(metadata))]
    for key in sorted(metadata):
        cached = _key(key) if len(key) <= MAX_NAME_BYTES else text("metadata key", key)
        parts += (cached, _metadata_value(key, metadata[key]))
    return b"".join(parts)


def read_metadata(reader: Reader) -> Metadata:
    """Metadata in the order stored. A key given twice is a fault: one value would be lost."""
    metadata: Metadata = {}
    for _ in range(reader.count("metadata entries", MIN_METADATA_ENTRY)):
        start = reader.pos
        key = reader.text("metadata key")
        if key in metadata:
            raise reader.fault(start, "each metadata key once", f"{key!r} twice")
        metadata[key] = _read_metadata_value(reader)
    return metadata


# A store has few keys, and writes each of them with every message.
@lru_cache(maxsize=4096)
def _key(key: str) -> bytes:
    return text("metadata key", key)


def _metadata_value(key: str, value: MetadataValue) -> bytes:
    if isinstance(value, str):
        return BYTE[META_STRING] + text("metadata value", value)
    if value is None:
        return BYTE[META_NULL]
    if isinstance(value, bool):  # before int, which a bool is as well
        return bytes((META_BOOLEAN, value))
    if isinstance(value, float):
        return TAGGED_F64.pack(META_FLOAT, value)
    try:
        return TAGGED_I64.pack(META_INTEGER, value)
    except struct.error:
        raise ValidationFailed(f"metadata {key}", f"{value} does not fit 64 bits") from None


def _read_metadata_value(reader: Reader) -> MetadataValue:
    tag = reader.u8("metadata tag")
    if tag == META_STRING:
        return reader.text("metadata value")
    if tag == META_INTEGER:
        return reader.i64("metadata value")
    if tag == META_FLOAT:
        return reader.f64("metadata value")
    if tag == META_BOOLEAN:
        return reader.boolean("metadata value")
    if tag == META_NULL:
        return None
    raise reader.fault(reader.pos - 1, "metadata tag 0-4", tag)


def read_metadata_fast(data: bytes, pos: int) -> tuple[Metadata, int]:
    """Metadata at ``pos`` and its end; on any exception call ``read_metadata`` instead."""
    metadata: Metadata = {}
    (count,) = U32.unpack_from(data, pos)
    pos += 4
    for _ in range(count):
        end = pos + 5 + data[pos]
        key, tag = _key_and_tag(data[pos:end])
        if tag == META_STRING:
            (size,) = U32.unpack_from(data, end)
            if size > MAX_FAST_TEXT:
                raise IndexError
            pos = end + 4 + size
            metadata[key] = data[end + 4 : pos].decode()
        elif tag == META_INTEGER:
            pos = end + 8
            (metadata[key],) = I64.unpack_from(data, end)
        elif tag == META_FLOAT:
            pos = end + 8
            (metadata[key],) = F64.unpack_from(data, end)
        elif tag == META_BOOLEAN:
            pos = end + 1
            metadata[key] = BOOLEANS[data[end]]
        elif tag == META_NULL:
            pos = end
            metadata[key] = None
        else:
            raise IndexError
    if len(metadata) != count:
        raise IndexError
    return metadata, pos


# A store has few keys, each of them in nearly every message.
@lru_cache(maxsize=4096)
def _key_and_tag(head: bytes) -> tuple[str, int]:
    """Key and tag of an entry whose key is shorter than 256 bytes."""
    (size,) = U32.unpack_from(head)
    if size + 5 != len(head):
        raise IndexError
    return head[4:-1].decode(), head[-1]
