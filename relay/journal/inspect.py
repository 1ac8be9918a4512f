"""Looking at one file of a stream: a segment, a chunk, a snapshot. Reads only.

What is good is given, what is wrong is a line in ``problems``, what is only worth knowing one in
``warnings``. A file that its writer is busy with is no fault: what looks wrong is looked at again
before it is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from relay.base.errors import FormatError, IntegrityError, RelayError
from relay.journal import chunk as chunks
from relay.journal import snapshot as snapshots
from relay.journal.catalog import SegmentEntry
from relay.journal.format import (
    CHUNK_MAGIC,
    FOOTER,
    RECORD,
    SEGMENT_MAGIC,
    SNAPSHOT_MAGIC,
    ChunkHeader,
    Footer,
    ManifestRecord,
    RecordFlag,
    SegmentFlag,
    SegmentHeader,
    crc64,
    decode_segment_header,
)
from relay.journal.records import (
    HeaderCrcs,
    Record,
    claimed_length,
    decode_records,
    length_without_zeros,
)
from relay.journal.segment import FIRST_RECORD, FileSource, read_records

T = TypeVar("T")
WARM_SUFFIX = ".seg.zst"
_PIECE_BYTES = 1 << 20
_GAP = int(RecordFlag.GAP)  # asked of every record: a flag's own & takes three times as long
_TRIES = 5  # of a file that changes while it is read


class SizedSource(Protocol):
    """The bytes of a segment, and how many there are."""

    path: str

    def read_at(self, at: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end."""

    def close(self) -> None:
        """Give back what it holds."""


def read_stable(load: Callable[[], bytes], read: Callable[[bytes], T]) -> T:
    """What ``read`` makes of a file. One that fails it is loaded again while it changes.

    Errors: what ``read`` raises for bytes that stay the same.
    """
    data = load()
    for _ in range(_TRIES):
        try:
            return read(data)
        except FormatError:
            before, data = data, load()
            if data == before:
                break
    return read(data)


class SegmentInspector:
    """A segment file in ``segments/`` or ``warm/``. Iterate ``records`` once, then read the rest.

    ``entry``: what the manifest says of it, where it is known. Errors of making one: FormatError
    for a header that is no segment's, OSError, UnsafePath.
    """

    def __init__(self, path: str, entry: SegmentEntry | None = None) -> None:
        self.path = path
        self.entry = entry
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.count = 0
        self.source, self.size = _open(path)
        try:
            head = self.source.read_at(0, FIRST_RECORD)
            self.header: SegmentHeader = decode_segment_header(head, path)
            self.footer = self._read_footer()
            self.base = self._find_base()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self.source.close()

    def records(self) -> Iterator[Record]:
        """Every good record. Behind damage it goes on at the next one whose offset fits."""
        for record in self._walk():
            self.count += 1
            if record.flags & _GAP:
                self.problems.append(
                    f"{self.path} at {self._at(record.offset)}: the records of offsets "
                    f"[{record.offset}, {record.end}) are lost; the rest was salvaged"
                )
            else:
                yield record

    def _walk(self) -> Iterator[Record]:
        """Records, with those that stand for lost ones. What is not whole is read once more: a
        writer may have been in the middle of it."""
        at, base = self.base, self.base
        end = base + (self.footer.durable_bytes if self.footer else self.size) - FIRST_RECORD
        while at < end:
            try:
                for record in read_records(self.source, base, at, end):
                    yield record
                    at = record.end
            except IntegrityError:
                pass  # read once more from there, and then it is damage
            else:
                return
            for record in read_records(self.source, base, at, end, self._gap):
                yield record
                at = record.end
                break
            else:
                return

    def verify(self) -> None:
        """Go through everything: records, footer, the whole's checksum, the manifest's facts."""
        for _ in self.records():
            pass
        if self.footer is not None:
            self._verify_footer(self.footer)
        if self.entry is not None and self.entry.sealed:
            self._verify_entry(self.entry)

    def _at(self, offset: int) -> int:
        """Where a record lies in the file."""
        return FIRST_RECORD + offset - self.base

    def _gap(self, begin: int, end: int, why: IntegrityError) -> None:
        """Something that is no good record: the zeros ahead, a torn tail, or damage."""
        at, behind = self._at(begin), self._at(end)
        is_last = self.footer is None and behind >= self.size
        if not is_last:
            self.problems.append(f"{why}; offsets [{begin}, {end}) are lost")
            return
        rest = self.source.read_at(at, behind - at)
        if not rest.strip(b"\0"):
            return
        if self.source.read_at(at, behind - at) != rest:
            self.warnings.append(f"{self.path} at {at}: being written")
        elif _seals(rest, at):
            self.warnings.append(f"{self.path} at {at}: sealed, and not cut off yet")
        else:
            length = length_without_zeros(rest)
            self.problems.append(f"{why}: a torn tail of {length} bytes")

    def _read_footer(self) -> Footer | None:
        """The footer of a file that is sealed and cut."""
        at = self.size - FOOTER.size
        data = self.source.read_at(at, FOOTER.size) if at >= FIRST_RECORD else b""
        if _seals(data, at):
            return Footer(*FOOTER.unpack(data))
        # what the manifest has as sealed has a footer there, whatever its flags say
        is_sealed = self.entry is not None and self.entry.sealed and len(data) == FOOTER.size
        footer = Footer(*FOOTER.unpack(data)) if is_sealed else None
        return footer if footer is not None and footer.durable_bytes == at else None

    def _find_base(self) -> int:
        """The stream offset of the first record: by the manifest, or by the records themselves."""
        if self.entry is not None:
            return self.entry.base_offset
        first = self.source.read_at(FIRST_RECORD, RECORD.size)
        if len(first) < RECORD.size or not first.strip(b"\0") or _seals(first, FIRST_RECORD):
            return 0
        claimed = int(RECORD.unpack(first)[2])
        piece = self.source.read_at(FIRST_RECORD, _PIECE_BYTES)
        if next(decode_records(piece, claimed, HeaderCrcs()), None) or claimed_length(
            piece, claimed
        ) > len(piece):
            return claimed
        return _base_behind_damage(piece, claimed)

    def _verify_footer(self, footer: Footer) -> None:
        at = footer.durable_bytes
        if footer.record_count != self.count:
            self._wrong(at, f"record_count {self.count}", footer.record_count)
        crc = 0
        for begin in range(0, at, _PIECE_BYTES):
            crc = crc64(self.source.read_at(begin, min(_PIECE_BYTES, at - begin)), crc)
        if crc != footer.segment_crc64:
            self._wrong(at + 16, f"segment_crc64 {footer.segment_crc64:016x}", f"{crc:016x}")

    def _verify_entry(self, entry: SegmentEntry) -> None:
        """A sealed segment against what the manifest says of it."""
        if self.footer is None:
            self._wrong(entry.durable_bytes, "the footer of a sealed segment", "none")
            return
        at, flags = self.footer.durable_bytes, self.footer.flags
        for name, place in (("durable_bytes", at), ("segment_crc64", at), ("ext_id", at + 24)):
            expected, found = getattr(entry, name), getattr(self.footer, name)
            if expected != found:
                self._wrong(place, f"{name} {expected} by the manifest", found)
        sealed = SegmentFlag.SEALED | (flags & (SegmentFlag.COMPACTED | SegmentFlag.PARTIAL))
        if flags != sealed:  # the other two the manifest has nothing of
            self._wrong(at + 32, f"flags {int(sealed)} by the manifest", flags)

    def _wrong(self, at: int, expected: str, found: object) -> None:
        self.problems.append(str(IntegrityError(self.path, at, expected, found)))


def _open(path: str) -> tuple[SizedSource, int]:
    if not path.endswith(WARM_SUFFIX):
        file = FileSource(path)
        return file, file.size()
    from relay.journal.dictionaries import Dictionaries
    from relay.journal.warm import WarmSegment

    warm = WarmSegment(path, Dictionaries(os.path.dirname(path)))
    return warm, warm.size


def _seals(data: bytes, at: int) -> bool:
    """Whether a footer of the records in front of it stands at the start of ``data``."""
    if len(data) < FOOTER.size:
        return False
    footer = Footer(*FOOTER.unpack_from(data))
    return footer.durable_bytes == at and bool(footer.flags & SegmentFlag.SEALED)


def _base_behind_damage(piece: bytes, claimed: int) -> int:
    """Where the first record's header is damaged: what the next good record says of the base."""
    for at in range(1, len(piece) - RECORD.size):
        length, _, offset = RECORD.unpack_from(piece, at)[:3]
        if at + RECORD.size + length > len(piece) or offset < at:
            continue
        if next(decode_records(piece[at : at + RECORD.size + length], offset, HeaderCrcs()), None):
            return int(offset) - at
    return claimed


def file_kind(path: str) -> str:
    """``segment``, ``chunk`` or ``snapshot``, by its first bytes; a warm segment by its name.

    Errors: FormatError for anything else, OSError, UnsafePath.
    """
    if path.endswith(WARM_SUFFIX):
        return "segment"
    source = FileSource(path)
    try:
        magic = source.read_at(0, 8)
    finally:
        source.close()
    kinds = {SEGMENT_MAGIC: "segment", CHUNK_MAGIC: "chunk", SNAPSHOT_MAGIC: "snapshot"}
    kind = kinds.get(int.from_bytes(magic, "little"))
    if kind is None:
        expected = "the magic of a segment, a manifest chunk or a snapshot"
        raise FormatError(path, 0, expected, magic.hex() or "no bytes")
    return kind


class ChunkInspector:
    """A manifest chunk: its good records, and what is wrong. Errors: OSError, UnsafePath."""

    def __init__(self, path: str, index: int | None = None, base: int | None = None) -> None:
        self.path = path
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.records: list[ManifestRecord] = []
        self.ends: list[int] = []
        self.next_record: int | None = None
        self.header: ChunkHeader | None = None  # None: the chunk is damaged
        try:
            chunk = read_stable(
                lambda: chunks.load_chunk(path),
                lambda data: chunks.decode_chunk(data, path, _index(data, index), base),
            )
        except FormatError as exc:
            self.problems.append(str(exc))
            self.records, self.ends = chunks.salvage_chunk(chunks.load_chunk(path), path)
            return
        self.header, self.records, self.ends = chunk.header, chunk.records, chunk.ends
        self.next_record = chunk.header.base_record + len(chunk.records)
        if chunk.torn_bytes:
            at = chunk.header.committed_len
            self.warnings.append(f"{path} at {at}: {chunk.torn_bytes} bytes behind committed_len")
        unknown = [record for record in chunk.records if not record.is_known]
        if unknown:
            kinds = sorted({f"type {record.type} flags {record.flags}" for record in unknown})
            self.warnings.append(
                f"{path}: {len(unknown)} records of unknown types: {', '.join(kinds)}"
            )


def _index(data: bytes, index: int | None) -> int:
    """The index that a chunk must have; of a file by itself, the one it says."""
    return int.from_bytes(data[16:24], "little") if index is None else index


def load_snapshot(path: str, snapshot_id: int = 0) -> snapshots.CatalogSnapshot:
    """A snapshot file by its path. Errors: FormatError and its kind, OSError, UnsafePath."""
    data = chunks.load_chunk(path)
    return snapshots.decode_snapshot(data, path, snapshot_id)


def describe_error(exc: RelayError | OSError, path: str) -> str:
    """One line that names the file."""
    if isinstance(exc, RelayError):
        return str(exc)
    return f"{path}: {exc.strerror or exc}"
