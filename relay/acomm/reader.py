"""A cursor over packed little-endian bytes: strict, and exact about where a fault lies.

Every method reads one field, moves on, and raises ``FormatError`` (path, offset, expected,
found) when the bytes are not what they must be. Nothing is allocated from a count or a length
before it is known to fit what is left. Source: FORMATS, opening paragraph.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import TypeVar

from relay.base.errors import FormatError

U32 = Struct("<I")
U64 = Struct("<Q")
I64 = Struct("<q")
F64 = Struct("<d")

T = TypeVar("T")
E = TypeVar("E", bound=IntEnum)


def shown(data: bytes) -> str:
    """Bytes for an error line: as text where they are printable ASCII, else in hex."""
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
        """Pass over ``size`` bytes and give the position of the first.

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
        return int(U64.unpack_from(self.data, self.skip(8, field))[0])

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
        """Bytes behind their u32 length."""
        size = self.u32(f"length of {field}")
        start = self.skip(size, field)
        return self.data[start : self.pos]

    def text(self, field: str) -> str:
        """UTF-8 text behind its u32 byte length; the fault's offset is the first bad byte's."""
        size = self.u32(f"length of {field}")
        start = self.skip(size, field)
        try:  # a view: a long text is not there twice
            return str(memoryview(self.data)[start : self.pos], "utf-8")
        except UnicodeDecodeError as exc:
            bad = self.data[start + exc.start : start + exc.end]
            raise self.fault(start + exc.start, f"{field} in UTF-8", shown(bad)) from None

    def opt(self, field: str, read: Callable[[str], T]) -> T | None:
        """What ``read`` gives, or None where the tag says absent."""
        tag = self.u8(f"tag of {field}")
        if tag > 1:
            raise self.fault(self.pos - 1, f"tag of {field} 0 or 1", tag)
        return read(field) if tag else None

    def count(self, field: str, smallest: int, *, wide: bool = False) -> int:
        """A count of items of at least ``smallest`` bytes each, which fit what is left.

        It is a u32, or a u64 when ``wide``.
        """
        start = self.pos
        value = self.u64(field) if wide else self.u32(field)
        room = (self.end - self.pos) // smallest
        if value > room:
            raise self.fault(start, f"{field} of at most {room}, as many as can fit", value)
        return value

    def items(self, field: str, smallest: int, read: Callable[[str], T]) -> tuple[T, ...]:
        """A list: its u32 count, then what ``read`` gives, at least ``smallest`` bytes each."""
        return tuple([read(field) for _ in range(self.count(f"count of {field}", smallest))])

    def finish(self, what: str) -> None:
        """Make sure that nothing is left over."""
        if self.pos != self.end:
            raise self.fault(self.pos, f"end of {what}", f"{self.end - self.pos} more bytes")
