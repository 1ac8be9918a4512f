"""One store file to Arrow batches: verified first, then as little of it decoded as is asked for.

Order: the bytes and their SHA-256; the columns of section 257, or the indexes of section 4, say
whether any message is wanted; then the columns asked for, of the messages that are wanted. All
that can fail is done before the first batch: a file gives all of its rows, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from relay.acomm import codec, container, envelope, indexes
from relay.acomm.columns import Columns
from relay.acomm.container import MAX_FILE_BYTES, Flag, Header, SectionType
from relay.acomm.engine_state import EngineState
from relay.acomm.model import StoreFile
from relay.acomm.reader import U64, Reader
from relay.acomm.records import read_channel
from relay.audit import paths
from relay.audit.acomm_arrow import CUT, MessageTable, of_messages
from relay.audit.acomm_columns import MESSAGE_SECTIONS, Rows, rows
from relay.audit.acomm_filters import Condition, may_have, rows_of
from relay.base.errors import FormatError, ObjectError, RelayError

BATCH_ROWS = 20_000  # from 10,000 to 50,000 it makes no difference


class Wanted(NamedTuple):
    """What is asked of each file."""

    sections: tuple[str, ...]
    conditions: tuple[Condition, ...]


class Damage(NamedTuple):
    """Why a file could not be read."""

    reason: str
    offset: int | None  # of the fault; None where there is none to tell
    size: int | None  # of the file


def batches(path: str, wanted: Wanted, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file. Errors: FormatError, RelayError or OSError, before the first of them."""
    if wanted.sections[0] not in MESSAGE_SECTIONS:
        store = codec.decode(read_bytes(path), path)
        yield from to_batches(rows(store, wanted.sections[0], path), schema)
        return
    file = _Opened(path)
    try:
        ready = [one for name in wanted.sections for one in file.chosen(name, wanted, schema)]
    except FormatError as exc:
        if exc.path:
            raise container.of_version(file.header, exc) from None
        raise FormatError(path, exc.offset, exc.expected, exc.found) from None
    except pa.ArrowException as exc:
        raise FormatError(path, 0, "columns in section 257 that hold together", exc) from None
    for one in ready:
        yield from one.batches(schema)


def damage(path: str) -> Damage | None:
    """What is wrong with a file that no section of it can be read, or None.

    More is looked at than a scan needs: every record, and the state of the deliveries.
    """
    size = None
    try:
        data = read_bytes(path)
        size = len(data)
        EngineState.decode(codec.decode(data, path, warn=lambda _: None).engine_state)
    except FormatError as exc:
        return Damage(f"expected {exc.expected}, found {exc.found}", exc.offset, size)
    except OSError as exc:
        return Damage(exc.strerror or str(exc), None, size)
    except ObjectError:
        raise  # of an object store that does not answer no file is to blame
    except RelayError as exc:
        return Damage(str(exc), None, size)
    return None


def read_bytes(path: str) -> bytes:
    """The bytes of a file, here or in an object store. Errors: of ``acomm.read_bytes``; those of
    ``paths.read_bytes``."""
    if paths.is_remote(path):
        return paths.read_bytes(path, MAX_FILE_BYTES)
    return codec.read_bytes(path)


def to_batches(section: Rows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows of values as Arrow batches, a column at a time."""
    for start in range(0, len(section.values), BATCH_ROWS):
        chunk = section.values[start : start + BATCH_ROWS]
        arrays = []
        for field in schema:
            value_of = section.columns[field.name]
            arrays.append(pa.array([value_of(row) for row in chunk], field.type))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Chosen(NamedTuple):
    """The messages of one section that are wanted, and their columns but for CUT."""

    table: MessageTable
    numbers: Sequence[int]
    arrays: dict[str, pa.Array]

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        cut = [field.name for field in schema if field.name in CUT]
        for start in range(0, len(self.numbers), BATCH_ROWS):
            numbers = self.numbers[start : start + BATCH_ROWS]
            found = self.table.cut(cut, numbers)
            for name, array in self.arrays.items():
                found[name] = array.slice(start, len(numbers))
            arrays = [found[field.name] for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Opened:
    """A file whose checksum was found right; sections come out of their envelopes when needed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data = read_bytes(path)
        self.header, entries = container.open_frame(self._data, path)
        self._entries = {entry.kind: entry for entry in entries if entry.length}
        self._store: StoreFile | None = None

    def chosen(self, section: str, wanted: Wanted, schema: pa.Schema) -> Iterator[_Chosen]:
        """The section's messages that are wanted; nothing when there are none."""
        table = self._table(section, wanted.conditions)
        if table is None or not table.count:
            return
        found = rows_of(table, wanted.conditions)
        if found is not None and not len(found):
            return
        arrays = {}
        for field in schema:
            if field.name not in CUT:
                array = table.column(field.name)
                array = array if found is None else array.take(found)
                arrays[field.name] = array if array.type == field.type else array.cast(field.type)
        numbers = range(table.count) if found is None else found.to_pylist()
        if any(field.name in CUT for field in schema):
            table.cut(["content", "signature"], ())  # what can go wrong with them does so now
        yield _Chosen(table, numbers, arrays)

    def _table(self, section: str, conditions: Iterable[Condition]) -> MessageTable | None:
        sealed = bool(self.header.flags & Flag.ENCRYPTED)
        if section == "messages" and SectionType.COLUMNS in self._entries:
            source = Columns.open(self._plain(SectionType.COLUMNS))
            self._compare_count(source.count)
            cutter = _Cutter(self)
            return MessageTable(
                self._path, section, source, sealed, cutter.contents, cutter.signatures
            )
        if section == "messages" and not self._may_have(list(conditions)):
            return None
        if self._store is None:
            self._store = codec.decode(self._data, self._path)
        return of_messages(
            self._path, section, getattr(self._store, section), self._store.channels, sealed
        )

    def raw(self, kind: SectionType) -> bytes:
        """A section of messages out of its envelope."""
        reader = self._plain(kind)
        if self.header.flags & Flag.COMPRESSED:
            return envelope.unpack(reader, f"section {kind}").data
        return self._data[reader.pos : reader.end]

    def _plain(self, kind: SectionType) -> Reader:
        entry = self._entries[kind]
        return Reader(self._data, self._path, entry.offset, entry.offset + entry.length)

    def _compare_count(self, count: int) -> None:
        """Make sure that columns and header speak of the same messages."""
        if SectionType.ARCHIVE in self._entries:
            count += int(U64.unpack_from(self.raw(SectionType.ARCHIVE))[0])
        _same(self._path, "messages in section 257 as the header counts", self.header, count)

    def _may_have(self, conditions: Sequence[Condition]) -> bool:
        """What the indexes say; their channels have names in section 1."""
        if not conditions or SectionType.INDEXES not in self._entries:
            return True
        try:
            found = indexes.decode(self._plain(SectionType.INDEXES))
        except FormatError:  # an aid that is no use keeps nobody from reading the messages
            return True
        channels = []
        if SectionType.CHANNELS in self._entries:
            reader = self._plain(SectionType.CHANNELS)
            channels = [read_channel(reader) for _ in range(reader.count("channels", 1, wide=True))]
        return may_have(found, channels, conditions)


def _same(path: str, what: str, header: Header, count: int) -> None:
    if header.message_count != count:
        raise FormatError(path, 24, f"{header.message_count} {what}", count)


class _Cutter:
    """Contents and signatures out of the records of section 2, which is unpacked when asked."""

    def __init__(self, file: _Opened) -> None:
        self._file = file
        self._raw = b""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._record_ends: list[int] = []
        self._signature_sizes: list[int] = []

    def contents(self, table: MessageTable, numbers: Sequence[int]) -> list[bytes]:
        """Of the messages with these numbers."""
        self._open(table)
        raw, starts, ends = self._raw, self._starts, self._ends
        if isinstance(numbers, range):
            part = slice(numbers.start, numbers.stop)
            return [raw[a:b] for a, b in zip(starts[part], ends[part], strict=True)]
        return [raw[starts[number] : ends[number]] for number in numbers]

    def signatures(self, table: MessageTable, numbers: Sequence[int]) -> list[bytes | None]:
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
        starts, ends, record_ends = (places.to_pylist() for places in table.content_places())
        count = int(U64.unpack_from(raw)[0]) if len(raw) >= U64.size else 0
        if count != table.count or record_ends[-1:] != [len(raw)]:
            expected = f"records of {len(raw)} bytes, as section 2 holds, in section 257"
            raise FormatError("", 0, expected, record_ends[-1:])
        if self._file.header.flags & Flag.HAS_SIGNATURES:
            self._signature_sizes = table.signature_sizes().to_pylist()
        self._raw, self._starts, self._ends, self._record_ends = raw, starts, ends, record_ends
