"""Section 4 of an `.acomm` file: the messages of section 2 by key.

    u32 count, then for each index:  type u32 | length u64 | data
    data of channel, topic, sender, correlation:  u64 count, then  key | u64 count | ids u64...
    data of timestamp:                            u64 count, then  created_at u64 | id u64

An index is redundant: it is made from the messages, and never determines the content of a file.
Keys ascend (numbers by value, texts by their bytes), ids ascend. See docs/formats/acomm.md.
"""

from __future__ import annotations

import reprlib
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import zip_longest
from typing import Any, TypeVar

from relay.acomm.fields import U32, U64, Fault, Reader, tagged, text
from relay.acomm.model import Message

Ids = tuple[int, ...]
K = TypeVar("K", int, str)

MIN_INDEX = 12  # type and length
MIN_TIME_ENTRY = 16


class IndexType(IntEnum):
    """Keys of the indexes; the numbers on disk."""

    CHANNEL = 1
    TIMESTAMP = 2
    TOPIC = 3  # messages with a topic
    SENDER = 4
    CORRELATION = 5  # messages with a correlation id


# What a file has of them. By time: pairs (created_at, id); else ids by key.
Indexes = dict[IndexType, Any]


def build(messages: Iterable[Message]) -> Indexes:
    """The indexes of these messages, given in any order."""
    channel: dict[int, list[int]] = defaultdict(list)
    timestamp: list[tuple[int, int]] = []
    topic: dict[str, list[int]] = defaultdict(list)
    sender: dict[str, list[int]] = defaultdict(list)
    correlation: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        ident = message.id
        channel[message.channel_id].append(ident)
        timestamp.append((message.created_at, ident))
        sender[message.sender].append(ident)
        if message.topic is not None:
            topic[message.topic].append(ident)
        if message.correlation_id is not None:
            correlation[message.correlation_id].append(ident)
    return {
        IndexType.CHANNEL: _ordered(channel),
        IndexType.TIMESTAMP: tuple(sorted(timestamp)),
        IndexType.TOPIC: _ordered(topic),
        IndexType.SENDER: _ordered(sender),
        IndexType.CORRELATION: _ordered(correlation),
    }


def encode(indexes: Indexes) -> bytes:
    """Section 4 with these indexes, in the order of their types."""
    made: dict[int, bytes] = {}
    for kind, index in sorted(indexes.items()):
        if kind is IndexType.TIMESTAMP:
            flat = [number for entry in index for number in entry]
            data = U64.pack(len(index)) + struct.pack(f"<{len(flat)}Q", *flat)
        elif kind is IndexType.CHANNEL:
            data = _encode_keyed(index, U64.pack)
        else:
            data = _encode_keyed(index, lambda key: text("index key", key))
        made[kind] = data
    return U32.pack(len(made)) + tagged(made)


def decode(reader: Reader) -> Indexes:
    """The indexes of a section 4; types that are not known are skipped.

    Errors: FormatError for an inconsistent section; ``verify`` compares it with the messages.
    """
    found: Indexes = {}
    if reader.pos == reader.end:
        return found
    for _ in range(reader.count("index count", MIN_INDEX)):
        start = reader.pos
        kind = reader.u32("index type")
        length = reader.u64("index length")
        first = reader.skip(length, "index data")
        inner = Reader(reader.data, reader.path, first, reader.pos, base=reader.base)
        if kind not in list(IndexType):
            continue
        if kind in found:
            raise reader.fault(start, "each index type once", f"type {kind} twice")
        found[IndexType(kind)] = _decode_one(inner, IndexType(kind))
        inner.finish(f"index {kind}")
    reader.finish("section 4")
    return found


def verify(indexes: Indexes, messages: Iterable[Message]) -> Iterator[Fault]:
    """Compare the indexes with the messages: one fault for each index that differs.

    A missing index is not an error.
    """
    true = build(messages)
    for kind, have in sorted(indexes.items()):
        want = true[kind]
        if kind is not IndexType.TIMESTAMP:  # the order of keys counts as well
            have, want = tuple(have.items()), tuple(want.items())
        if have != want:
            pairs = enumerate(zip_longest(have, want))
            at, (found, expected) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            where = f"index {kind} ({kind.name.lower()}) entry {at}"
            yield where, f"{reprlib.repr(expected)} by section 2", reprlib.repr(found)


def _ordered(index: Mapping[K, list[int]]) -> dict[K, Ids]:
    return {key: tuple(sorted(index[key])) for key in sorted(index)}


def _encode_keyed(index: Mapping[K, Ids], key_bytes: Callable[[K], bytes]) -> bytes:
    parts = [U64.pack(len(index))]
    for key, ids in index.items():
        parts += (key_bytes(key), struct.pack(f"<{len(ids) + 1}Q", len(ids), *ids))
    return b"".join(parts)


def _decode_one(reader: Reader, kind: IndexType) -> object:
    if kind is IndexType.TIMESTAMP:
        count = reader.count("timestamp entries", MIN_TIME_ENTRY, wide=True)
        flat = _u64s(reader, 2 * count)
        return tuple(zip(flat[::2], flat[1::2], strict=True))
    if kind is IndexType.CHANNEL:
        return _decode_keyed(reader, reader.u64, 16)
    return _decode_keyed(reader, reader.text, 12)


def _decode_keyed(reader: Reader, read_key: Callable[[str], K], smallest: int) -> dict[K, Ids]:
    index: dict[K, Ids] = {}
    for _ in range(reader.count("index entries", smallest, wide=True)):
        start = reader.pos
        key = read_key("index key")
        if key in index:
            raise reader.fault(start, "each index key once", f"{key!r} twice")
        index[key] = _u64s(reader, reader.count("message ids", 8, wide=True))
    return index


def _u64s(reader: Reader, count: int) -> Ids:
    return struct.unpack_from(f"<{count}Q", reader.data, reader.skip(8 * count, "message ids"))
