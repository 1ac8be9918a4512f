"""Section 257 of an `.acomm` file: the fields of section 2, column by column.

    u64 count of messages, then for each block:  tag u32 | length u64 | envelope of its data

With it a few fields of many messages are read without parsing every record, and each content is
located. Like an index it is redundant: made from the messages, compared with them by `relay
check`, and ignored when values are read. Equal messages give equal bytes: texts and shapes are in
the order of their first use. See docs/formats/acomm.md, "COLUMNS", docs/decisions/0015-columns.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from relay.acomm import container
from relay.acomm.fields import (
    BYTE,
    META_BOOLEAN,
    META_FLOAT,
    META_INTEGER,
    META_NULL,
    META_STRING,
    U32,
    U32_MAX,
    U64,
    Fault,
    Reader,
    tagged,
    text,
)
from relay.acomm.model import Channel, Message
from relay.acomm.records import encode_message
from relay.base.errors import FormatError, ValidationFailed

FIRST_METADATA_BLOCK = 32
# Bytes of a record before the content, without the sender's text.
BEFORE_CONTENT = 25
U64_MASK = 2**64 - 1
# Number of values packed at once, which bounds the time other threads wait.
PACKED = 8_192

TAG_OF: dict[type, int] = {
    str: META_STRING,
    int: META_INTEGER,
    float: META_FLOAT,
    bool: META_BOOLEAN,
    type(None): META_NULL,
}
_CODES: dict[int, Literal["B", "H", "I"]] = {1: "B", 2: "H", 4: "I"}  # of texts, by width
LANE_CODES = {META_INTEGER: "q", META_FLOAT: "d", META_BOOLEAN: "B"}


class ColumnBlock(IntEnum):
    """Tags of the blocks; from FIRST_METADATA_BLOCK on, one metadata column each."""

    ID = 1
    MESSAGE_TYPE = 2
    SENDER = 3
    CHANNEL = 4
    CONTENT_SIZE = 5
    TOPIC = 6
    CORRELATION_ID = 7
    PRIORITY = 8
    METADATA = 9
    CREATED_AT = 10
    DELIVERED_AT = 11
    ACKNOWLEDGED_AT = 12
    TTL = 13
    STATUS = 14
    RETRY_COUNT = 15
    SIGNATURE_SIZE = 16
    REST_SIZE = 17


class Columns:
    """The blocks of a section 257, each unpacked from its envelope on first use.

    Errors: FormatError, on opening for blocks that do not fit the section, on ``block`` for an
    envelope. ``verify`` compares them with the messages.
    """

    def __init__(
        self,
        count: int,
        blocks: Mapping[int, Callable[[], Reader]],
        metadata: Callable[[], Mapping[int, bytes]] = dict,
    ) -> None:
        self.count = count
        self._blocks = blocks
        self._metadata = metadata  # the blocks of metadata, of messages in memory

    @classmethod
    def open(cls, reader: Reader) -> Columns:
        """The section in ``reader``."""
        count = reader.u64("count of section 257")
        found = reader.blocks("column block")

        def unpack(tag: int) -> Reader:
            block = found[tag]
            again = Reader(block.data, block.path, block.pos, block.end)
            return container.unpack_envelope(again, f"column block {tag}")

        return cls(count, {tag: partial(unpack, tag) for tag in found})

    @classmethod
    def of(
        cls, messages: Sequence[Message], sizes: Sequence[int], channels: Iterable[Channel]
    ) -> Columns:
        """The columns of messages in memory with these record sizes; each is made on first use."""

        def reader(make: Callable[[], bytes]) -> Callable[[], Reader]:
            return lambda: Reader(make(), "", where=" in columns")

        makers = _block_builders(messages, sizes, channels)
        blocks = {tag: reader(make) for tag, make in makers.items()}
        return cls(len(messages), blocks, cache(lambda: _metadata(messages)))

    def tags(self) -> frozenset[int]:
        """The tags of the blocks present."""
        return frozenset(self._blocks)

    def block(self, tag: int) -> Reader:
        """A reader of a block's data. Errors: FormatError when it is missing."""
        if tag in self._blocks:
            return self._blocks[tag]()
        made = self._metadata().get(tag)
        if made is None:
            raise FormatError("", 0, f"column block {tag} in section 257", "none")
        return Reader(made, "", where=" in columns")


class TextColumn(NamedTuple):
    """Distinct texts, their sizes, and a code for each row."""

    number: int
    sizes: memoryview  # u32 each
    data: memoryview
    width: int  # bytes of a code; 0: no codes, one text per row
    codes: memoryview  # 0 absent, else 1 + the index of the text


MetadataColumn = tuple[str, int]  # the values of one key and one type in all metadata


class MetadataShapes(NamedTuple):
    """The metadata columns in which each message has a value."""

    lanes: tuple[MetadataColumn, ...]
    shapes: tuple[tuple[int, ...], ...]  # lanes, in the order of the keys
    width: int
    codes: memoryview  # 0 no metadata, else 1 + the index of the shape


def encode(messages: Sequence[Message], sizes: Sequence[int], channels: Iterable[Channel]) -> bytes:
    """The section of messages whose records have these sizes, in the order of section 2."""
    made = build(messages, sizes, channels)
    packed = {tag: container.pack_envelope(data) for tag, data in made.items()}
    return U64.pack(len(messages)) + tagged(packed)


def build(
    messages: Sequence[Message], sizes: Sequence[int], channels: Iterable[Channel]
) -> dict[int, bytes]:
    """The data of each block, by tag."""
    made = {tag: make() for tag, make in _block_builders(messages, sizes, channels).items()}
    made.update(_metadata(messages))
    return {tag: made[tag] for tag in sorted(made)}


def _block_builders(
    messages: Sequence[Message], sizes: Sequence[int], channels: Iterable[Channel]
) -> dict[int, Callable[[], bytes]]:
    """Functions that make the data of each block except metadata."""

    def rests() -> list[int]:
        return [
            size - BEFORE_CONTENT - len(m.sender.encode()) - len(m.content)
            for size, m in zip(sizes, messages, strict=True)
        ]

    def signed() -> list[int]:
        return [0 if m.signature is None else len(m.signature) + 1 for m in messages]

    def since(times: Sequence[int | None]) -> bytes:
        return _opt_u64s(times, [m.created_at for m in messages])

    return {
        ColumnBlock.ID: lambda: _deltas([m.id for m in messages]),
        ColumnBlock.MESSAGE_TYPE: lambda: bytes([m.message_type for m in messages]),
        ColumnBlock.SENDER: lambda: _texts([m.sender.encode() for m in messages]),
        ColumnBlock.CHANNEL: lambda: _channels([m.channel_id for m in messages], channels),
        ColumnBlock.CONTENT_SIZE: lambda: _packed("I", [len(m.content) for m in messages]),
        ColumnBlock.TOPIC: lambda: _opt_texts([m.topic for m in messages]),
        ColumnBlock.CORRELATION_ID: lambda: _opt_texts([m.correlation_id for m in messages]),
        ColumnBlock.PRIORITY: lambda: bytes([m.priority for m in messages]),
        ColumnBlock.CREATED_AT: lambda: _deltas([m.created_at for m in messages]),
        ColumnBlock.DELIVERED_AT: lambda: since([m.delivered_at for m in messages]),
        ColumnBlock.ACKNOWLEDGED_AT: lambda: since([m.acknowledged_at for m in messages]),
        ColumnBlock.TTL: lambda: _opt_u64s([m.ttl for m in messages], [0] * len(messages)),
        ColumnBlock.STATUS: lambda: bytes([m.status for m in messages]),
        ColumnBlock.RETRY_COUNT: lambda: _packed("I", [m.retry_count for m in messages]),
        ColumnBlock.SIGNATURE_SIZE: lambda: _packed("I", signed()),
        ColumnBlock.REST_SIZE: lambda: _packed("I", rests()),
    }


def verify(
    columns: Columns, messages: Sequence[Message], channels: Iterable[Channel]
) -> Iterator[Fault]:
    """Compare the columns with the messages: one fault for each block that differs."""
    where = "section 257"
    if columns.count != len(messages):
        yield where, f"{len(messages)} messages as in section 2", str(columns.count)
        return
    try:
        sizes = [len(encode_message(m, U32_MAX)) for m in messages]
        true = build(messages, sizes, channels)
    except ValidationFailed as exc:
        yield where, "messages of section 2 that can be encoded", str(exc)
        return
    for tag, data in true.items():
        name = (
            ColumnBlock(tag).name.lower()
            if tag < FIRST_METADATA_BLOCK
            else f"lane {tag - FIRST_METADATA_BLOCK}"
        )
        where = f"column block {tag} ({name})"
        try:
            reader = columns.block(tag)
        except FormatError as exc:
            yield where, str(exc.expected), str(exc.found)
            continue
        found = reader.data[reader.pos : reader.end]
        if found != data:
            pairs = enumerate(zip(found, data, strict=False))
            at = next(
                (n for n, (byte, other) in pairs if byte != other), min(len(found), len(data))
            )
            yield where, "the values of section 2", f"others from byte {at} of {len(data)} on"


def locate(columns: Columns, number: int) -> tuple[int, int] | None:
    """Begin and end of a message's record in section 2; None if the columns lack it.

    Errors: FormatError.
    """

    def numbers(tag: int, code: Literal["I", "Q"]) -> memoryview[int]:
        reader = columns.block(tag)
        return _cut(reader, columns.count * struct.calcsize(code), "values").cast(code)

    deltas = numbers(ColumnBlock.ID, "Q")
    ids = list(accumulate(deltas, lambda before, delta: (before + delta) & U64_MASK))
    if number not in ids:
        return None
    row = ids.index(number)
    senders = read_texts(columns.block(ColumnBlock.SENDER), columns.count)
    codes = senders.codes.cast(_CODES[senders.width]) if senders.width else None
    contents, rests = numbers(ColumnBlock.CONTENT_SIZE, "I"), numbers(ColumnBlock.REST_SIZE, "I")

    def size(first: int, end: int) -> int:
        texts = [code - 1 for code in codes[first:end]] if codes else range(first, end)
        fixed = BEFORE_CONTENT * (end - first)
        return (
            fixed
            + sum([senders.sizes[text] for text in texts])
            + sum(contents[first:end])
            + sum(rests[first:end])
        )

    begin = U64.size + size(0, row)
    return begin, begin + size(row, row + 1)


def read_texts(reader: Reader, rows: int) -> TextColumn:
    """The texts of ``rows`` rows. Errors: FormatError when they do not fill the block."""
    count = reader.count("count of texts", 4)
    sizes = _cut(reader, 4 * count, "sizes of texts").cast("I")
    data = _cut(reader, sum(sizes), "texts")
    start = reader.pos
    width, codes = read_codes(reader, rows)
    if not width and count != rows:
        raise reader.fault(start, f"texts for {rows} messages", count)
    reader.finish("texts")
    return TextColumn(count, sizes, data, width, codes)


def read_codes(reader: Reader, rows: int) -> tuple[int, memoryview]:
    """The width of the codes in bytes and the codes; none for width 0. Errors: FormatError."""
    width = reader.u8("width of codes")
    if width not in (0, 1, 2, 4):
        raise reader.fault(reader.pos - 1, "width of codes 0, 1, 2 or 4", width)
    return width, _cut(reader, width * rows, "codes")


def read_metadata_shapes(reader: Reader, rows: int) -> MetadataShapes:
    """The block METADATA. Errors: FormatError."""
    lanes = reader.items(
        "lanes", 5, lambda _: (reader.text("metadata key"), reader.u8("metadata tag"))
    )
    start = reader.pos
    shapes = reader.items(
        "shapes", 4, lambda _: reader.items("lanes of a shape", 4, lambda _: reader.u32("lane"))
    )
    if any(lane >= len(lanes) for shape in shapes for lane in shape):
        raise reader.fault(start, f"lanes of shapes below {len(lanes)}", "one above")
    width, codes = read_codes(reader, rows)
    reader.finish("metadata shapes")
    return MetadataShapes(lanes, shapes, width, codes)


def read_channels(reader: Reader) -> tuple[list[int], list[str | None], memoryview]:
    """Ids and names of the channels in use, and the bytes of the codes, width first."""
    count = reader.count("count of channels", 9)
    ids = list(_cut(reader, 8 * count, "channel ids").cast("Q"))
    names = [reader.opt("channel name", reader.text) for _ in range(count)]
    return ids, names, memoryview(reader.data)[reader.pos : reader.end]


def _cut(reader: Reader, size: int, what: str) -> memoryview:
    start = reader.skip(size, what)
    return memoryview(reader.data)[start : reader.pos]


def _packed(code: str, values: Sequence[Any]) -> bytes:
    parts = [values[at : at + PACKED] for at in range(0, len(values), PACKED)]
    return b"".join([struct.pack(f"<{len(part)}{code}", *part) for part in parts])


def _deltas(values: Sequence[int]) -> bytes:
    return _packed("Q", [(b - a) & U64_MASK for a, b in pairwise((0, *values))])


def _opt_u64s(values: Sequence[int | None], since: Sequence[int]) -> bytes:
    present = bytes([value is not None for value in values])
    pairs = zip(values, since, strict=True)
    return present + _packed("Q", [0 if v is None else (v - s) & U64_MASK for v, s in pairs])


def _coded(codes: Sequence[int], most: int) -> bytes:
    width, code = (1, "B") if most < 256 else (2, "H") if most < 65_536 else (4, "I")
    return BYTE[width] + _packed(code, codes)


def _texts(values: Sequence[bytes]) -> bytes:
    """A text column without absent values: distinct texts, or one per row if few repeat."""
    numbers: dict[bytes, int] = {}
    codes = [numbers.setdefault(value, len(numbers) + 1) for value in values]
    if 2 * len(numbers) > len(values):
        return _joined(values) + BYTE[0]
    return _joined(list(numbers)) + _coded(codes, len(numbers))


def _opt_texts(values: Sequence[str | None]) -> bytes:
    numbers: dict[str, int] = {}
    codes = [
        0 if value is None else numbers.setdefault(value, len(numbers) + 1) for value in values
    ]
    return _joined([value.encode() for value in numbers]) + _coded(codes, len(numbers))


def _joined(values: Sequence[bytes]) -> bytes:
    sizes = _packed("I", [len(value) for value in values])
    return b"".join((U32.pack(len(values)), sizes, *values))


def _channels(of_messages: Sequence[int], channels: Iterable[Channel]) -> bytes:
    names = {channel.id: channel.name for channel in channels}
    numbers: dict[int, int] = {}
    codes = [numbers.setdefault(ident, len(numbers)) for ident in of_messages]
    known = [names.get(ident) for ident in numbers]
    named = [b"\0" if name is None else b"\1" + text("channel", name) for name in known]
    ids = _packed("Q", list(numbers))
    return b"".join((U32.pack(len(numbers)), ids, *named, _coded(codes, len(numbers))))


def _metadata(messages: Sequence[Message]) -> dict[int, bytes]:
    """The block of the shapes, and one of values for each lane that has any."""
    lanes: dict[tuple[str, int], list[Any]] = {}
    shapes: dict[tuple[tuple[str, int], ...], int] = {}
    # Keys and types as in memory: the shape of each combination is computed once.
    known: dict[tuple[object, ...], tuple[int, tuple[Callable[[Any], None], ...]]] = {}
    codes = []
    for message in messages:
        metadata = message.metadata
        if metadata is None:
            codes.append(0)
            continue
        seen = (*metadata, *map(type, metadata.values()))
        found = known.get(seen)
        if found is None:
            kinds = [(key, TAG_OF[type(value)]) for key, value in metadata.items()]
            shape = tuple(sorted(kinds))
            for lane in shape:
                lanes.setdefault(lane, [])
            code = shapes.setdefault(shape, len(shapes) + 1)
            found = known[seen] = code, tuple(lanes[lane].append for lane in kinds)
        codes.append(found[0])
        for append, value in zip(found[1], metadata.values(), strict=True):
            append(value)
    numbers = {lane: number for number, lane in enumerate(lanes)}
    parts = [U32.pack(len(lanes))]
    parts += [text("metadata key", key) + BYTE[tag] for key, tag in lanes]
    parts.append(U32.pack(len(shapes)))
    for shape in shapes:
        parts.append(U32.pack(len(shape)) + _packed("I", [numbers[lane] for lane in shape]))
    blocks = {int(ColumnBlock.METADATA): b"".join((*parts, _coded(codes, len(shapes))))}
    for (_, tag), number in numbers.items():
        if tag != META_NULL:
            values = list(lanes.values())[number]
            blocks[FIRST_METADATA_BLOCK + number] = _lane_values(tag, values)
    return blocks


def _lane_values(tag: int, values: Sequence[Any]) -> bytes:
    if tag == META_STRING:
        return _texts([value.encode() for value in values])
    return _packed(LANE_CODES[tag], values)
