"""Messages of a store file as Arrow arrays, a column at a time, from the columns of section 257.

A file without that section is decoded, and the same columns are made in memory. Only contents,
their checksums and signatures need the records; where the file has columns, those are cut out of
the records' bytes, and the records are not decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import count, repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from relay.acomm import columns
from relay.acomm.columns import (
    BEFORE_CONTENT,
    FIRST_METADATA_BLOCK,
    ColumnBlock,
    Columns,
    TextColumn,
)
from relay.acomm.fields import (
    META_BOOLEAN,
    META_FLOAT,
    META_INTEGER,
    META_NULL,
    META_STRING,
    U64,
    Reader,
)
from relay.acomm.model import Channel, Message, MessageStatus, MessageType, Priority
from relay.acomm.records import ENCRYPTION_BYTES
from relay.audit import lake_columns
from relay.base.errors import FormatError
from relay.engine.messages import KIND_OF

LAST_SECOND = 253_402_300_799  # 9999-12-31T23:59:59Z: Spark's times end there
MICROS = 1_000_000
CODES = {1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32()}
LABELS = {
    "message_type": (ColumnBlock.MESSAGE_TYPE, MessageType),
    "priority": (ColumnBlock.PRIORITY, Priority),
    "status": (ColumnBlock.STATUS, MessageStatus),
}
FROM_RECORDS = frozenset(("content", "checksum", "signature"))  # columns that need the records


class MessageTable:
    """The messages of one section of one file; each array is made on demand.

    ``contents`` and ``signatures`` give those of the messages with these numbers.
    Errors: FormatError for columns that do not hold together.
    """

    def __init__(
        self,
        path: str,
        section: str,
        source: Columns,
        sealed: bool,
        contents: Callable[[MessageTable, range], Sequence[bytes]],
        signatures: Callable[[MessageTable, range], Sequence[bytes | None]],
    ) -> None:
        self.count = source.count
        self._source = source
        self._contents = contents
        self._signatures = signatures
        self._sealed = sealed
        self._fixed: dict[str, tuple[object, pa.DataType]] = {
            "file": (path, pa.string()),
            "section": (section, pa.string()),
            "sealed": (sealed, pa.bool_()),
        }
        self._arrays: dict[str, pa.Array] = {}

    def column(self, name: str) -> pa.Array:
        """Return a column of all messages; not one of FROM_RECORDS."""
        if name in self._fixed:
            return pa.repeat(pa.scalar(*self._fixed[name]), self.count)
        if name not in self._arrays:
            array = getattr(self, f"_{name}")() if name not in LABELS else self._label(name)
            if len(array) != self.count:
                raise FormatError("", 0, f"{self.count} values of {name}", len(array))
            self._arrays[name] = array
        return self._arrays[name]

    def from_records(self, names: Sequence[str], numbers: range) -> dict[str, pa.Array]:
        """Return columns of FROM_RECORDS, of the messages with these numbers."""
        found: dict[str, pa.Array] = {}
        if "content" in names or ("checksum" in names and not self._sealed):
            contents = self._contents(self, numbers)
            if "content" in names:
                found["content"] = pa.array(contents, pa.binary())
            if "checksum" in names and not self._sealed:
                sums = [hashlib.sha256(content).hexdigest() for content in contents]
                found["checksum"] = pa.array(sums, pa.string())
        if "checksum" in names and self._sealed:
            # the ledger's checksum is of the plain text, which is sealed
            found["checksum"] = pa.nulls(len(numbers), pa.string())
        if "signature" in names:
            found["signature"] = pa.array(self._signatures(self, numbers), pa.binary())
        return found

    def content_positions(self) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Return, of each record, begin and end of its content, and the end of the record."""
        content, rest = (
            self._numbers(ColumnBlock.CONTENT_SIZE),
            self._numbers(ColumnBlock.REST_SIZE),
        )
        behind = pc.add(pc.add(self._sender_sizes(), content), rest)
        ends = pc.add(pc.cumulative_sum(pc.add(behind, BEFORE_CONTENT)), U64.size)
        content_ends = pc.subtract(ends, rest)
        return pc.subtract(content_ends, content), content_ends, ends

    def signature_sizes(self) -> pa.Array:
        """Return 0 for no signature, else its size plus 1."""
        return self._numbers(ColumnBlock.SIGNATURE_SIZE)

    def _block(self, tag: int) -> Reader:
        return self._source.block(tag)

    def _numbers(self, tag: int) -> pa.Array:
        """A block of u32."""
        return _array(self._block(tag), pa.uint32(), self.count).cast(pa.uint64())

    def _deltas(self, tag: int) -> pa.Array:
        return pc.cumulative_sum(_array(self._block(tag), pa.uint64(), self.count))

    def _optional(self, tag: int, since: pa.Array | None = None) -> pa.Array:
        reader = self._block(tag)
        present = _array(reader, pa.uint8(), self.count, whole=False)
        values = _array(reader, pa.uint64(), self.count)
        if since is not None:
            values = pc.add(values, since)
        return pc.if_else(pc.equal(present, 1), values, pa.scalar(None, pa.uint64()))

    def _label(self, name: str) -> pa.Array:
        tag, kind = LABELS[name]
        labels = pa.array([member.label for member in kind])
        return labels.take(_array(self._block(tag), pa.uint8(), self.count))

    @cached_property
    def _created(self) -> pa.Array:
        return self._deltas(ColumnBlock.CREATED_AT)

    def _id(self) -> pa.Array:
        return self._deltas(ColumnBlock.ID).cast(lake_columns.U64)

    def _created_at(self) -> pa.Array:
        return _times(self._created)

    def _delivered_at(self) -> pa.Array:
        return _times(self._optional(ColumnBlock.DELIVERED_AT, self._created))

    def _acknowledged_at(self) -> pa.Array:
        return _times(self._optional(ColumnBlock.ACKNOWLEDGED_AT, self._created))

    def _ttl_s(self) -> pa.Array:
        return self._optional(ColumnBlock.TTL).cast(lake_columns.U64)

    def _retry_count(self) -> pa.Array:
        return self._numbers(ColumnBlock.RETRY_COUNT).cast(pa.int64())

    def _content_size(self) -> pa.Array:
        sizes = self._numbers(ColumnBlock.CONTENT_SIZE).cast(pa.int64())
        return pc.subtract(sizes, ENCRYPTION_BYTES) if self._sealed else sizes

    @cached_property
    def _sender_texts(self) -> tuple[pa.Array, pa.Array | None, TextColumn]:
        texts = columns.read_texts(self._block(ColumnBlock.SENDER), self.count)
        return _texts(texts), _codes(texts.width, texts.codes, less=1), texts

    def _sender(self) -> pa.Array:
        values, codes, _ = self._sender_texts
        return values if codes is None else values.take(codes)

    def _sender_sizes(self) -> pa.Array:
        _, codes, texts = self._sender_texts
        sizes = pa.array(texts.sizes, pa.uint64())
        return sizes if codes is None else sizes.take(codes)

    def _topic(self) -> pa.Array:
        return self._optional_texts(ColumnBlock.TOPIC)

    def _correlation_id(self) -> pa.Array:
        return self._optional_texts(ColumnBlock.CORRELATION_ID)

    def _optional_texts(self, tag: int) -> pa.Array:
        texts = columns.read_texts(self._block(tag), self.count)
        codes = _codes(texts.width, texts.codes)
        values = _texts(texts)
        return values if codes is None else pa.concat_arrays([_NO_TEXT, values]).take(codes)

    @cached_property
    def _channels(self) -> tuple[list[int], list[str | None], pa.Array]:
        reader = self._block(ColumnBlock.CHANNEL)
        ids, names, rest = columns.read_channels(reader)
        inner = Reader(bytes(rest), "")
        width, codes = columns.read_codes(inner, self.count)
        inner.finish("channels")
        return ids, names, _codes(width, codes)

    def _channel(self) -> pa.Array:
        return pa.array(self._channels[1], pa.string()).take(self._channels[2])

    def _channel_id(self) -> pa.Array:
        ids = pa.array(self._channels[0], pa.uint64()).cast(lake_columns.U64)
        return ids.take(self._channels[2])

    @cached_property
    def _lanes(self) -> MetadataColumns:
        return MetadataColumns(self._source)

    def _metadata(self) -> pa.Array:
        return self._lanes.maps()

    def _relay_id(self) -> pa.Array:
        return self._lanes.texts("relay_id")

    def _to(self) -> pa.Array:
        return self._lanes.texts("to")

    def _kind(self) -> pa.Array:
        kinds = pa.array([KIND_OF.get(member) for member in MessageType], pa.string())
        usual = kinds.take(_array(self._block(ColumnBlock.MESSAGE_TYPE), pa.uint8(), self.count))
        return pc.coalesce(self._lanes.texts("kind"), usual)

    def _created_ns(self) -> pa.Array:
        return self._lanes.integers("created_ns")


class MetadataColumns:
    """The metadata of all messages: the values of each key and type, by message."""

    def __init__(self, source: Columns) -> None:
        self._source = source
        found = columns.read_metadata_shapes(source.block(ColumnBlock.METADATA), source.count)
        self._lanes, self._shapes = found.lanes, ((), *found.shapes)
        codes = _codes(found.width, found.codes)
        self._rows: list[int] = [] if codes is None else codes.to_pylist()
        if len(self._rows) != source.count or max(self._rows, default=0) >= len(self._shapes):
            raise FormatError("", 0, "a shape of metadata for each message", "another number")
        self._held = [0] * len(self._lanes)  # values in each lane
        for code in self._rows:
            for lane in self._shapes[code]:
                self._held[lane] += 1

    def maps(self) -> pa.Array:
        """Return maps of key to text, NULL for a message without metadata."""
        values, place = self._all(range(len(self._lanes)))
        keys: list[int] = []
        items: list[int] = []
        offsets: list[int | None] = []
        placed = [tuple(place[lane] for lane in shape) for shape in self._shapes]
        for code in self._rows:
            offsets.append(len(keys) if code else None)
            keys += self._shapes[code]
            items += map(next, placed[code])
        offsets.append(len(keys))
        names = pa.array([key for key, _ in self._lanes], pa.string())
        return pa.MapArray.from_arrays(
            pa.array(offsets, pa.int32()),
            names.take(pa.array(keys, pa.uint32())),
            values.take(pa.array(items, pa.uint64())),
        )

    def texts(self, key: str) -> pa.Array:
        """Return the values of a key as text; other types as JSON."""
        lanes = [number for number, (name, _) in enumerate(self._lanes) if name == key]
        return self._spread(lanes)

    def integers(self, key: str) -> pa.Array:
        """Return the values of a key that are integers."""
        wanted = (key, META_INTEGER)
        lanes = [number for number, lane in enumerate(self._lanes) if lane == wanted]
        return self._spread(lanes).cast(pa.int64())

    def _spread(self, lanes: Sequence[int]) -> pa.Array:
        """Spread the texts of lanes to their messages; a message is in at most one of them."""
        if not lanes:
            return pa.nulls(len(self._rows), pa.string())
        values, place = self._all(lanes)
        if len(lanes) == 1 and self._held[lanes[0]] == len(self._rows) == len(values):
            return values
        none = repeat(None)
        of_shape: list[Iterator[Any]] = [
            next((place[lane] for lane in shape if lane in place), none) for shape in self._shapes
        ]
        return values.take(pa.array([next(of_shape[code]) for code in self._rows], pa.uint64()))

    def _all(self, lanes: Sequence[int]) -> tuple[pa.Array, dict[int, Iterator[int]]]:
        """Return the texts of these lanes in a row, and an iterator of positions for each lane."""
        place: dict[int, Iterator[int]] = {}
        parts = [_NO_TEXT]
        first = 1
        for lane in lanes:
            if self._lanes[lane][1] == META_NULL:
                place[lane] = repeat(0)
                continue
            parts.append(self._text_values(lane))
            place[lane] = count(first)
            first += len(parts[-1])
        if len(parts) == 2 and len(lanes) == 1:
            return parts[1], {lanes[0]: count()}
        return pa.concat_arrays(parts), place

    def _text_values(self, lane: int) -> pa.Array:
        (_, tag), held = self._lanes[lane], self._held[lane]
        reader = self._source.block(FIRST_METADATA_BLOCK + lane)
        if tag == META_INTEGER:
            return _array(reader, pa.int64(), held).cast(pa.string())
        if tag == META_STRING:
            texts = columns.read_texts(reader, held)
            values, codes = _texts(texts), _codes(texts.width, texts.codes, less=1)
            return values if codes is None else values.take(codes)
        if tag == META_FLOAT:
            floats = _array(reader, pa.float64(), held).to_pylist()
            return pa.array([json.dumps(value) for value in floats], pa.string())
        if tag == META_BOOLEAN:
            return pa.array(["false", "true"]).take(_array(reader, pa.uint8(), held))
        raise FormatError("", 0, "metadata tag 0-4", tag)


def decoded_table(
    path: str,
    section: str,
    messages: Sequence[Message],
    channels: Sequence[Channel],
    sealed: bool,
) -> MessageTable:
    """Make the table of decoded messages."""
    # Contents are not cut out of these records: a record ends with its content.
    sizes = [BEFORE_CONTENT + len(m.sender.encode()) + len(m.content) for m in messages]
    return MessageTable(
        path,
        section,
        Columns.of(messages, sizes, channels),
        sealed,
        lambda _, numbers: [messages[number].content for number in numbers],
        lambda _, numbers: [messages[number].signature for number in numbers],
    )


_NO_TEXT = pa.nulls(1, pa.string())


def _times(seconds: pa.Array) -> pa.Array:
    """Convert to microseconds; NULL after the last time that Spark has."""
    known = pc.less_equal(seconds, pa.scalar(LAST_SECOND, pa.uint64()))
    kept = pc.if_else(known, seconds, pa.scalar(None, pa.uint64())).cast(pa.int64())
    return pc.multiply(kept, MICROS).cast(lake_columns.TIME)


def _array(reader: Reader, kind: pa.DataType, length: int, whole: bool = True) -> pa.Array:
    """Read fixed-width values of a block: all of it, when ``whole``; without a second copy."""
    size = length * kind.bit_width // 8
    start = reader.skip(size, f"{length} values")
    if whole:
        reader.finish("a column block")
    data = reader.data if size == len(reader.data) else reader.data[start : reader.pos]
    return pa.Array.from_buffers(kind, length, [None, pa.py_buffer(data)])


def _codes(width: int, codes: memoryview, less: int = 0) -> pa.Array | None:
    """Read codes, each smaller by ``less``; None for width 0."""
    if not width:
        return None
    kind = CODES[width]
    array = pa.Array.from_buffers(kind, len(codes) // width, [None, pa.py_buffer(bytes(codes))])
    return pc.subtract_checked(array, pa.scalar(less, kind)) if less else array


def _texts(texts: TextColumn) -> pa.Array:
    """Return each text once. Errors: pa.ArrowInvalid for bytes that are not UTF-8."""
    sizes = pa.array(texts.sizes, pa.uint32()) if texts.number else pa.array([], pa.uint32())
    ends = pc.cumulative_sum(sizes.cast(pa.int64())).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    data = pa.py_buffer(bytes(texts.data))
    array = pa.Array.from_buffers(pa.string(), texts.number, [None, offsets.buffers()[1], data])
    array.validate(full=True)
    return array
