"""Fields to packed little-endian bytes, each checked against what it can hold.

The other direction of reader.py. A value that does not fit is ``ValidationFailed`` with the
field's name; nothing is cut short. Source: FORMATS, opening paragraph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TypeVar

from relay.acomm.reader import U32, U64
from relay.base.errors import ValidationFailed

MAX_NAME_BYTES = 128  # of channels and participants
MAX_TOPIC_BYTES = 256
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

ABSENT, PRESENT = b"\0", b"\1"
BYTE = tuple(bytes([value]) for value in range(256))

T = TypeVar("T")


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
    """UTF-8 text behind its u32 byte length, of ``limit`` bytes at most."""
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise ValidationFailed(field, "half of a surrogate pair is not text") from None
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


def opt(value: T | None, write: Callable[[T], bytes]) -> bytes:
    """Tag 0 for None, else tag 1 and what ``write`` gives."""
    return ABSENT if value is None else PRESENT + write(value)


def items(values: Collection[T], write: Callable[[T], bytes]) -> bytes:
    """A u32 count, then what ``write`` gives for each."""
    return U32.pack(len(values)) + b"".join(map(write, values))
