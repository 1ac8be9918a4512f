"""Section 256: state of the engine that version 1 of the file has no field for.

    tag 1 COUNTERS    next channel id, next message id, next subscription id, sequence: 4 u64
    tag 2 DELIVERIES  count u64; message ids u64; for each, u32, which of the lists is its own;
                      count of lists u32; each: count u32,
                      each: recipient str, state u8, attempt u32, due ms u64, queued bool, spent u32
    tag 3 DEAD        count u64; each: message id u64, at u64, last error str, list of recipient str
    tag 4 DUPLICATES  count u64; each: correlation id str, message id u64, recipient str,
                      expires ms u64
    tag 5 SETTINGS    count u64; each: channel id u64, max pending u64 (0 none), flush u8
    tag 6 HELD        count u64; each: message id u64
    tag 7 ARCHIVES    count u64; each: name str, then 7 u64: messages, first id, last id, first at,
                      last at, archived, size
    tag 8 LEAVING     count u64; each: message id u64
    tag 10 JOURNAL    stream id u64, logical offset u64, boot id str: what the file covers of it
    tag 11 OWED       count u64; each: message id u64, recipient str, due ms u64, reminders u32,
                      said str, since u64
    tag 12 LOST       count u64; each: at u64, lost ms i64

``sequence`` counts the events of the store's whole life; a file covers the events up to its own. A
file without these blocks opens all the same. Table: docs/formats/acomm.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import chain
from struct import Struct, pack, unpack_from
from typing import Any, NamedTuple

import msgspec

from relay.acomm.codec import TEXT, U32, U64, Codec, choice, record
from relay.acomm.fields import I64, Reader
from relay.acomm.model import (
    FLUSH_MODES,
    ArchiveInfo,
    ChannelSettings,
    Delivery,
    Obligation,
    StoreFile,
)

COUNTERS = 1
DELIVERIES = 2
DEAD = 3
DUPLICATES = 4
SETTINGS = 5
HELD = 6
ARCHIVES = 7
EVICTING = 8
JOURNAL = 10  # 9 is the archives'
OWED = 11
DOWNTIMES = 12
DuplicateKey = tuple[str, int, str]  # correlation id, message id, recipient


class DeadLetterInfo(NamedTuple):
    """A dead letter without its message."""

    at: int
    last_error: str
    recipients: tuple[str, ...]


class JournalPosition(NamedTuple):
    """A place in a journal: every event before it is in the store."""

    stream_id: int
    offset: int  # logical
    boot_id: str  # of the machine, when it was there, and numbers of the mounts


class Downtime(NamedTuple):
    """Time in which the store's owner did not run."""

    at: int  # Unix seconds: its end
    ms: int


class EngineState(NamedTuple):
    """Counters, deliveries, dead letters, the exactly-once set, settings, what is held, owed."""

    next_channel: int = 1
    next_message: int = 1
    next_subscription: int = 1
    sequence: int = 0
    deliveries: dict[int, dict[str, Delivery]] = {}  # noqa: RUF012 - never altered
    dead: dict[int, DeadLetterInfo] = {}  # noqa: RUF012
    duplicates: dict[DuplicateKey, int] = {}  # noqa: RUF012 - key -> expiry, Unix ms
    settings: dict[int, ChannelSettings] = {}  # noqa: RUF012 - by channel
    held: tuple[int, ...] = ()  # messages, ascending
    archives: tuple[ArchiveInfo, ...] = ()
    evicting: tuple[int, ...] = ()  # messages of the last archive still in the file
    journal: JournalPosition | None = None  # what the file covers, where there is a journal
    owed: dict[int, dict[str, Obligation]] = {}  # noqa: RUF012
    downtimes: tuple[Downtime, ...] = ()  # oldest first

    def encode(self) -> dict[int, bytes]:
        """The blocks by tag; same values, same bytes."""
        blocks = {
            COUNTERS: pack("<4Q", *self[:4]),
            DELIVERIES: _encode_deliveries(self.deliveries),
        }
        rows: dict[int, Collection[tuple[Any, ...]]] = {
            DEAD: sorted(self.dead.items()),
            DUPLICATES: sorted((*key, expires_ms) for key, expires_ms in self.duplicates.items()),
            SETTINGS: sorted(self.settings.items()),
            HELD: [(number,) for number in self.held],
            ARCHIVES: [(archive,) for archive in self.archives],
            EVICTING: [(number,) for number in self.evicting],
            OWED: [(n, *item) for n, known in sorted(self.owed.items()) for item in known.items()],
            DOWNTIMES: [(downtime,) for downtime in self.downtimes],
        }
        if self.journal is not None:
            blocks[JOURNAL] = _POSITION.encode("", self.journal)
        return blocks | {tag: _encode_rows(tag, rows[tag]) for tag in _ROWS if rows[tag]}

    @classmethod
    def decode(cls, blocks: dict[int, bytes]) -> EngineState:
        """The state in a file's blocks; missing blocks have their default.

        Errors: FormatError when a block is truncated or has an invalid value.
        """
        counters = _reader(blocks.get(COUNTERS, pack("<4Q", 1, 1, 1, 0)))
        channel, message, subscription, sequence = (counters.u64("counter") for _ in range(4))
        counters.finish("the block")
        rows = {tag: _read_rows(tag, blocks[tag]) if tag in blocks else [] for tag in _ROWS}
        owed: dict[int, dict[str, Obligation]] = {}
        for number, recipient, obligation in rows[OWED]:
            owed.setdefault(number, {})[recipient] = obligation
        return cls(
            channel,
            message,
            subscription,
            sequence,
            _read_deliveries(blocks[DELIVERIES]) if DELIVERIES in blocks else {},
            dict(rows[DEAD]),
            {(correlation, number, to): ms for correlation, number, to, ms in rows[DUPLICATES]},
            dict(rows[SETTINGS]),
            tuple(number for (number,) in rows[HELD]),
            tuple(archive for (archive,) in rows[ARCHIVES]),
            tuple(number for (number,) in rows[EVICTING]),
            _read_position(blocks[JOURNAL]) if JOURNAL in blocks else None,
            owed,
            tuple(downtime for (downtime,) in rows[DOWNTIMES]),
        )


class StoreSnapshot(NamedTuple):
    """A store at one instant, ready to be encoded in any thread."""

    values: StoreFile
    state: EngineState

    def file(self) -> StoreFile:
        """The values to be encoded."""
        return msgspec.structs.replace(self.values, engine_state=self.state.encode())


_MAX_PENDING = U64._replace(  # 0 for None
    encode=lambda field, value: U64.encode(field, value or 0),
    read=lambda reader, field: reader.u64(field) or None,
)
_I64 = Codec(lambda _, value: I64.pack(value), Reader.i64, 8)
_POSITION = record(JournalPosition)
_DELIVERY = record(Delivery, attempt=U32, spent=U32)
_DELIVERY_STRUCT = Struct("<BIQBI")  # the same
# The blocks that are a u64 count and rows, and the codecs of a row's values.
_ROWS: dict[int, tuple[Codec, ...]] = {
    DEAD: (U64, record(DeadLetterInfo)),
    DUPLICATES: (TEXT, U64, TEXT, U64),
    SETTINGS: (
        U64,
        record(ChannelSettings, max_pending=_MAX_PENDING, flush=choice(FLUSH_MODES)),
    ),
    HELD: (U64,),
    ARCHIVES: (record(ArchiveInfo),),
    EVICTING: (U64,),
    OWED: (U64, TEXT, record(Obligation, reminders=U32)),
    DOWNTIMES: (record(Downtime, ms=_I64),),
}


def _reader(data: bytes) -> Reader:
    return Reader(data, "section 256")


def _read_position(data: bytes) -> JournalPosition:
    reader = _reader(data)
    position: JournalPosition = _POSITION.read(reader, "")
    reader.finish("the block")
    return position


def _encode_rows(tag: int, rows: Collection[tuple[Any, ...]]) -> bytes:
    field = f"block {tag}"
    columns = [
        [codec.encode(field, value) for value in column]
        for codec, column in zip(_ROWS[tag], zip(*rows, strict=True), strict=True)
    ]
    packed = b"".join(chain.from_iterable(zip(*columns, strict=True)))
    return U64.encode(field, len(rows)) + packed


def _read_rows(tag: int, data: bytes) -> list[tuple[Any, ...]]:
    field, codecs, reader = f"block {tag}", _ROWS[tag], _reader(data)
    count = reader.count(f"count of {field}", sum(codec.least for codec in codecs), wide=True)
    reads = [codec.read for codec in codecs]
    rows = [tuple([read(reader, field) for read in reads]) for _ in range(count)]
    reader.finish("the block")
    return rows


def _encode_deliveries(deliveries: dict[int, dict[str, Delivery]]) -> bytes:
    """Encode by column: nearly all messages have one of a few distinct lists of deliveries."""
    ids = sorted(deliveries)
    lists: dict[bytes, int] = {}  # in the order of their first use
    seen: dict[int, int] = {}  # messages that came from one file share their lists
    which = []
    for message_id in ids:
        records = deliveries[message_id]
        number = seen.get(id(records))
        if number is None:
            number = lists.setdefault(_encode_list(records), len(lists))
            seen[id(records)] = number
        which.append(number)
    columns = pack(f"<Q{len(ids)}Q{len(ids)}I", len(ids), *ids, *which)
    return b"".join((columns, pack("<I", len(lists)), *lists))


def _encode_list(records: dict[str, Delivery]) -> bytes:
    parts = [pack("<I", len(records))]
    for recipient, delivery in records.items():
        fields = (
            delivery.state,
            delivery.attempt,
            delivery.due_ms,
            delivery.queued,
            delivery.spent,
        )
        parts.append(TEXT.encode("recipient", recipient) + _DELIVERY_STRUCT.pack(*fields))
    return b"".join(parts)


def deliveries_of(blocks: dict[int, bytes], number: int) -> dict[str, Delivery]:
    """The deliveries of one message in a file's blocks. Errors: FormatError."""
    if DELIVERIES not in blocks:
        return {}
    ids, which, lists = _split_deliveries(blocks[DELIVERIES])
    at = bisect_left(ids, number)
    return lists[which[at]] if at < len(ids) and ids[at] == number else {}


def _read_deliveries(data: bytes) -> dict[int, dict[str, Delivery]]:
    """Deliveries by message; equal ones share a dict, which is replaced, never changed."""
    ids, which, lists = _split_deliveries(data)
    return dict(zip(ids, map(lists.__getitem__, which), strict=True))


def _split_deliveries(
    data: bytes,
) -> tuple[Sequence[int], Sequence[int], Sequence[dict[str, Delivery]]]:
    """The messages, the list of each, and the lists."""
    reader = _reader(data)
    count = reader.count("count of messages", 12, wide=True)
    ids = unpack_from(f"<{count}Q", data, reader.skip(8 * count, "message ids"))
    start = reader.pos
    which = unpack_from(f"<{count}I", data, reader.skip(4 * count, "numbers of lists"))
    lists = reader.items("lists", 4, lambda _: _read_list(reader))
    if which and max(which) >= len(lists):
        raise reader.fault(start, f"numbers of lists below {len(lists)}", max(which))
    reader.finish("the block")
    return ids, which, lists


def _read_list(reader: Reader) -> dict[str, Delivery]:
    least = TEXT.least + _DELIVERY.least
    return dict(
        reader.items(
            "deliveries",
            least,
            lambda _: (reader.text("recipient"), _DELIVERY.read(reader, "delivery")),
        )
    )
