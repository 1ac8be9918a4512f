"""Store files as Arrow batches: the bytes, their SHA-256, then the columns that are wanted.

All that can fail is done before the first batch: a file gives all of its rows, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from relay.acomm import container, store_file
from relay.acomm.codec import Codec
from relay.acomm.columns import Columns
from relay.acomm.container import MAX_FILE_BYTES, Flag, SectionType
from relay.acomm.engine_state import EngineState
from relay.acomm.fields import U64, Reader
from relay.acomm.model import Channel, StoreFile, Subscription
from relay.acomm.records import CHANNEL, SUBSCRIPTION
from relay.acomm.sections import read_blocks, split
from relay.audit.lake_columns import TABLES, batch_of, with_bucket
from relay.audit.sources.acomm_messages import (
    FROM_RECORDS,
    LAST_SECOND,
    MICROS,
    MessageTable,
    decoded_table,
)
from relay.audit.sources.bucket_files import is_remote, read_object
from relay.base.errors import FormatError

Row = tuple[object, ...]
_CHANNELS, _SUBSCRIPTIONS = SectionType.CHANNELS, SectionType.SUBSCRIPTIONS
MESSAGE_SECTIONS = ("messages", "dead_letters", "archive")
BATCH_ROWS = 20_000  # from 10,000 to 50,000 it makes no difference


def batches(path: str, sections: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read columns of sections of a file; of several, those of MESSAGE_SECTIONS.

    Errors: FormatError, RelayError, OSError, before the first row.
    """
    file = _OpenFile(path, path)
    with _faults_of(file, path):
        if sections[0] not in MESSAGE_SECTIONS:
            rows = file.tables().tables[f"store_{sections[0]}"]
            yield from (batch.select(schema.names) for batch in rows)
            return
        ready = [part for name in sections if (part := file.messages(name, schema)) is not None]
    for part in ready:
        yield from part.batches(schema)


@contextlib.contextmanager
def _faults_of(file: _OpenFile, path: str) -> Iterator[None]:
    """Give a fault inside of a section the file's name, and its version's."""
    try:
        yield
    except FormatError as exc:
        if exc.path:
            raise container.as_version_error(file.header, exc) from None
        raise FormatError(path, exc.offset, exc.expected, exc.found) from None
    except pa.ArrowException as exc:
        raise FormatError(path, 0, "columns in section 257 that hold together", exc) from None


def read_bytes(path: str) -> bytes:
    """Read a file, here or in an object store. Errors: ``store_file.read_bytes``'s."""
    if is_remote(path):
        return read_object(path, MAX_FILE_BYTES)
    return store_file.read_bytes(path)


class _Messages(NamedTuple):
    """The messages of one section, and their columns but for FROM_RECORDS."""

    table: MessageTable
    arrays: dict[str, pa.Array]

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        cut = [field.name for field in schema if field.name in FROM_RECORDS]
        for start in range(0, self.table.count, BATCH_ROWS):
            numbers = range(start, min(start + BATCH_ROWS, self.table.count))
            found = self.table.from_records(cut, numbers)
            for name, array in self.arrays.items():
                found[name] = array.slice(start, len(numbers))
            arrays = [found[field.name] for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class _OpenFile:
    """A file with a verified checksum; rows name it ``shown``. Sections are unpacked on demand."""

    def __init__(self, path: str, shown: str) -> None:
        self._path = path
        self._shown = shown
        self._data = read_bytes(path)
        self.header, entries = container.open_frame(self._data, path)
        self._entries = {entry.kind: entry for entry in entries if entry.length}
        self._store: StoreFile | None = None

    def messages(self, section: str, schema: pa.Schema) -> _Messages | None:
        """Make the columns of a section's messages; None without any."""
        table = self._table(section)
        if not table.count:
            return None
        arrays = {}
        for field in schema:
            if field.name not in FROM_RECORDS:
                array = table.column(field.name)
                arrays[field.name] = array if array.type == field.type else array.cast(field.type)
        if any(field.name in FROM_RECORDS for field in schema):
            # So that their faults show now.
            table.from_records(["content", "signature"], range(0))
        return _Messages(table, arrays)

    def tables(self) -> StoreRows:
        """Read the rows of every section, each once."""
        shown = self._shown
        columns = TABLES["store_messages"]
        plain = columns.remove(0)
        state = EngineState.decode(read_blocks(self._section(SectionType.ENGINE_STATE)))
        parts = [self.messages("messages", plain)]
        # What has no messages is not decoded.
        if self.header.message_count > sum(part.table.count for part in parts if part is not None):
            parts.append(self.messages("archive", plain))
        if self.header.dead_letter_count:
            parts.append(self.messages("dead_letters", plain))
        messages = []
        relay_ids: dict[int, str | None] = {}
        for batch in (batch for part in parts if part for batch in part.batches(plain)):
            messages.append(with_bucket(columns, batch, "relay_id"))
            if state.deliveries:
                numbers = map(int, batch.column("id").to_pylist())
                relay_ids.update(zip(numbers, batch.column("relay_id").to_pylist(), strict=True))
        deliveries = [
            (
                *(shown, number, relay_ids.get(number), recipient, delivery.state.label),
                _at_ms(delivery.due_ms),
            )
            for number, of_message in state.deliveries.items()
            for recipient, delivery in of_message.items()
        ]
        channels = [_channel(shown, channel) for channel in self._records(_CHANNELS, CHANNEL)]
        subscriptions = [
            _subscription(shown, subscription)
            for subscription in self._records(_SUBSCRIPTIONS, SUBSCRIPTION)
        ]
        columns = TABLES["store_deliveries"]
        delivered = batch_of(deliveries, columns.remove(0))
        found = {
            "store_messages": messages,
            "store_deliveries": [with_bucket(columns, delivered, "relay_id")],
            "store_channels": [batch_of(channels, TABLES["store_channels"])],
            "store_subscriptions": [batch_of(subscriptions, TABLES["store_subscriptions"])],
        }
        return StoreRows(found, len(self._data), hashlib.sha256(self._data).hexdigest())

    def _section(self, kind: SectionType) -> Reader | None:
        """Return a reader of a section, unpacked; None without it."""
        entries = [self._entries[kind]] if kind in self._entries else []
        return split(self._data, self._path, self.header, entries).get(kind)

    def _records(self, kind: SectionType, codec: Codec) -> list[Any]:
        reader = self._section(kind)
        if reader is None:
            return []
        name = f"section {kind}"
        found = [codec.read(reader, "") for _ in range(reader.count(name, 1, wide=True))]
        reader.finish(name)
        return found

    def _table(self, section: str) -> MessageTable:
        sealed = bool(self.header.flags & Flag.ENCRYPTED)
        if section == "messages" and SectionType.COLUMNS in self._entries:
            source = Columns.open(self._plain(SectionType.COLUMNS))
            self._compare_count(source.count)
            cutter = _ContentReader(self)
            return MessageTable(
                self._shown, section, source, sealed, cutter.contents, cutter.signatures
            )
        if self._store is None:
            self._store = store_file.decode(self._data, self._path)
        return decoded_table(
            self._shown, section, getattr(self._store, section), self._store.channels, sealed
        )

    def raw(self, kind: SectionType) -> bytes:
        """Unpack a section of messages."""
        reader = self._plain(kind)
        if self.header.flags & Flag.COMPRESSED:
            return container.unpack_envelope(reader, f"section {kind}").data
        return self._data[reader.pos : reader.end]

    def _plain(self, kind: SectionType) -> Reader:
        entry = self._entries[kind]
        return Reader(self._data, self._path, entry.offset, entry.offset + entry.length)

    def _compare_count(self, count: int) -> None:
        """Check that columns and header have the same number of messages."""
        if SectionType.ARCHIVE in self._entries:
            count += int(U64.unpack_from(self.raw(SectionType.ARCHIVE))[0])
        if (known := self.header.message_count) != count:
            expected = f"{known} messages in section 257 as the header counts"
            raise FormatError(self._path, 24, expected, count)


class _ContentReader:
    """Reads contents and signatures from the records of section 2, which is unpacked on demand."""

    def __init__(self, file: _OpenFile) -> None:
        self._file = file
        self._raw = b""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._record_ends: list[int] = []
        self._signature_sizes: list[int] = []

    def contents(self, table: MessageTable, numbers: range) -> list[bytes]:
        """Of the messages with these numbers."""
        self._open(table)
        part = slice(numbers.start, numbers.stop)
        raw, starts, ends = self._raw, self._starts[part], self._ends[part]
        return [raw[a:b] for a, b in zip(starts, ends, strict=True)]

    def signatures(self, table: MessageTable, numbers: range) -> list[bytes | None]:
        """Of the messages with these numbers; a signature is what a record ends with."""
        self._open(table)
        if not self._signature_sizes:
            return [None] * len(numbers)
        sizes, ends, raw = self._signature_sizes, self._record_ends, self._raw
        return [
            raw[ends[n] + 1 - sizes[n] : ends[n]] if sizes[n] else None  # the size is one too many
            for n in numbers
        ]

    def _open(self, table: MessageTable) -> None:
        if self._raw:
            return
        raw = self._file.raw(SectionType.MESSAGES)
        starts, ends, record_ends = (places.to_pylist() for places in table.content_positions())
        count = int(U64.unpack_from(raw)[0]) if len(raw) >= U64.size else 0
        if count != table.count or record_ends[-1:] != [len(raw)]:
            expected = f"records of {len(raw)} bytes, as section 2 holds, in section 257"
            raise FormatError("", 0, expected, record_ends[-1:])
        if self._file.header.flags & Flag.HAS_SIGNATURES:
            self._signature_sizes = table.signature_sizes().to_pylist()
        self._raw, self._starts, self._ends, self._record_ends = raw, starts, ends, record_ends


class StoreRows(NamedTuple):
    """The rows of a store file, from one pass over it."""

    tables: dict[str, list[pa.RecordBatch]]  # of the lake
    size: int
    sha256: str


def read_tables(path: str, shown: str) -> StoreRows:
    """Read the rows of every section of a file, whose checksum is verified; ``shown`` names it.

    Errors: FormatError, RelayError, OSError.
    """
    file = _OpenFile(path, shown)
    with _faults_of(file, path):
        return file.tables()


# -- sections without messages ----------------------------------------------------------


def _at(seconds: int | None) -> int | None:
    """Convert to microseconds; NULL after the last time that Spark has."""
    return seconds * MICROS if seconds is not None and seconds <= LAST_SECOND else None


def _at_ms(millis: int) -> int | None:
    """Convert to microseconds; NULL for none, and after the last time that Spark has."""
    return millis * 1000 if 0 < millis <= LAST_SECOND * 1000 else None


def _channel(path: str, channel: Channel) -> Row:
    """A row of store_channels."""
    return (
        *(path, channel.id, channel.name, channel.channel_type.label, channel.owner),
        [participant.id for participant in channel.participants],
        *(channel.config.delivery.label, channel.config.ack_timeout, channel.config.max_retries),
        *(
            channel.state.label,
            _at(channel.created_at),
            _at(channel.modified_at),
            channel.message_count,
        ),
        *(channel.description, list(channel.tags)),
    )


def _subscription(path: str, subscription: Subscription) -> Row:
    """A row of store_subscriptions."""
    return (
        *(
            path,
            subscription.id,
            subscription.channel_id,
            subscription.subscriber,
            subscription.topic_pattern,
        ),
        *(subscription.match_mode.label, _at(subscription.created_at), subscription.active),
    )
