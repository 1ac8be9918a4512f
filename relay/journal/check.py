"""Checking a stream: every chunk, snapshot and segment, and whether they agree. Reads only.

Inspectors yield the good records of one file, and collect ``findings``. Files may be written, and
copies of segments moved, at the same time: of a check counts what a second reading finds, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from relay.base import fsio
from relay.base.errors import FormatError, IntegrityError, RelayError
from relay.base.finding import Finding, Severity
from relay.journal.catalog import (
    Residency,
    SegmentEntry,
    load_snapshot,
    snapshot_ids,
    snapshot_path,
)
from relay.journal.format import (
    FOOTER,
    RECORD,
    SEGMENT_MAGIC,
    Footer,
    HeaderCrcs,
    Record,
    RecordFlag,
    SegmentFlag,
    SegmentHeader,
    claimed_length,
    crc64,
    decode_records,
    decode_segment_header,
    find_any_record,
    length_without_zeros,
)
from relay.journal.manifest_format import CHUNK_MAGIC, SNAPSHOT_MAGIC, ChunkHeader, ManifestRecord
from relay.journal.manifest_reader import (
    FIRST_MANIFEST_RECORD,
    MANIFEST,
    chunk_indexes,
    chunk_path,
    decode_chunk,
    load_chunk,
    salvage_chunk,
)
from relay.journal.segment import (
    FIRST_RECORD,
    WARM_SUFFIX,
    FileSource,
    SegmentSource,
    is_footer,
    read_footer,
    read_records,
    segment_files,
    segment_path,
    warm_path,
)

WHAT = "journal"
REPAIRED_BY = (
    "`relay journal move --to 0 SEGMENT` repairs a segment from another tier; else use a backup"
)
SALVAGED = "their events may still be in the store's files and archives"
TORN = "the next start sets it aside; nothing in it had been accepted"
_PIECE_BYTES = 1 << 20
_GAP = int(RecordFlag.GAP)  # an int: the & of flags takes three times as long, for every record


def _confirmed(path: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of two readings; the second is made only if the first finds something."""
    found = _read(path, look)
    again = _read(path, look) if found else []
    return [finding for finding in found if finding in again]


def _read(path: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one reading; an error that ends it is the last of them."""
    found: list[Finding] = []
    try:
        for finding in look():
            found.append(finding)
    except (RelayError, OSError) as exc:
        found.append(_of_error(exc, path))
    return found


class SegmentInspector:
    """A segment file in ``segments/`` or ``warm/``. Iterate ``records`` once, then read the rest.

    ``entry``: its entry in the catalog, if known. Errors of the constructor: FormatError for an
    invalid header, OSError, UnsafePath.
    """

    def __init__(self, path: str, entry: SegmentEntry | None = None) -> None:
        self.path = path
        self.entry = entry
        self.findings: list[Finding] = []
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
        """Every good record. After damage it continues at the next record whose offset fits."""
        end = self.base + (self.footer.durable_bytes if self.footer else self.size) - FIRST_RECORD
        for record in read_records(self.source, self.base, self.base, end, self._gap):
            self.count += 1
            if record.flags & _GAP:
                where = f"{self.path} at {self._at(record.offset)}"
                lost = f"the records of offsets [{record.offset}, {record.end}) are lost"
                found = f"{where}: {lost}; the rest was salvaged"
                self.findings.append(Finding(WHAT, where, found, SALVAGED))
            else:
                yield record

    def verify(self) -> None:
        """Verify the records, the footer, the checksum, and the entry in the catalog."""
        for _ in self.records():
            pass
        self.finish()

    def finish(self) -> None:
        """Verify the footer and the entry, once all ``records`` were read."""
        if self.footer is not None:
            self._verify_footer(self.footer)
        if self.entry is not None and self.entry.sealed:
            self._verify_entry(self.entry)

    def _at(self, offset: int) -> int:
        """The position of a record in the file."""
        return FIRST_RECORD + offset - self.base

    def _gap(self, begin: int, end: int, why: IntegrityError) -> None:
        """Report bytes that are not a good record: a torn tail, or damage; not zeros at the end,
        which are allocated ahead."""
        at, behind = self._at(begin), self._at(end)
        is_last = self.footer is None and behind >= self.size
        if not is_last:
            self._add(why, f"; offsets [{begin}, {end}) are lost", REPAIRED_BY)
            return
        rest = self.source.read_at(at, behind - at)
        if self.footer is None and not length_without_zeros(rest):
            return
        if self.source.read_at(at, behind - at) != rest:
            self.findings.append(_warning(f"{self.path} at {at}", "being written"))
        elif is_footer(rest, at):
            self.findings.append(_warning(f"{self.path} at {at}", "sealed, and not truncated yet"))
        else:
            self._add(why, f": a torn tail of {length_without_zeros(rest)} bytes", TORN)

    def _read_footer(self) -> Footer | None:
        """The footer of a sealed and truncated file."""
        if (footer := read_footer(self.source, self.size)) is not None:
            return footer
        # a segment that is sealed in the manifest has a footer, whatever its flags
        at = self.size - FOOTER.size
        if self.entry is None or not self.entry.sealed or at < FIRST_RECORD:
            return None
        footer = Footer(*FOOTER.unpack(self.source.read_at(at, FOOTER.size)))
        return footer if footer.durable_bytes == at else None

    def _find_base(self) -> int:
        """The stream offset of the first record, by the manifest or by the records themselves."""
        if self.entry is not None:
            return self.entry.base_offset
        first = self.source.read_at(FIRST_RECORD, RECORD.size)
        if len(first) < RECORD.size or not first.strip(b"\0") or is_footer(first, FIRST_RECORD):
            return 0
        claimed = int(RECORD.unpack(first)[2])
        piece = self.source.read_at(FIRST_RECORD, _PIECE_BYTES)
        if decode_records(piece, claimed, HeaderCrcs()) or claimed_length(piece, claimed) > len(
            piece
        ):
            return claimed
        placed = find_any_record(piece, 0, HeaderCrcs())  # the first record is damaged
        return placed[1] - placed[0] if placed else claimed

    def _verify_footer(self, footer: Footer) -> None:
        at = footer.durable_bytes
        if footer.record_count != self.count:
            self._report(at, f"record_count {self.count}", footer.record_count)
        crc = 0
        for begin in range(0, at, _PIECE_BYTES):
            crc = crc64(self.source.read_at(begin, min(_PIECE_BYTES, at - begin)), crc)
        if crc != footer.segment_crc64:
            self._report(at + 16, f"segment_crc64 {footer.segment_crc64:016x}", f"{crc:016x}")

    def _verify_entry(self, entry: SegmentEntry) -> None:
        """Compare a sealed segment with its entry in the catalog."""
        if self.footer is None:
            self._report(entry.durable_bytes, "the footer of a sealed segment", "none")
            return
        at, flags = self.footer.durable_bytes, self.footer.flags
        for name, place in (("durable_bytes", at), ("segment_crc64", at), ("ext_id", at + 24)):
            expected, found = getattr(entry, name), getattr(self.footer, name)
            if expected != found:
                self._report(place, f"{name} {expected} by the manifest", found)
        sealed = SegmentFlag.SEALED | (flags & (SegmentFlag.COMPACTED | SegmentFlag.PARTIAL))
        if flags != sealed:  # the manifest does not have the other two flags
            self._report(at + 32, f"flags {int(sealed)} by the manifest", flags)

    def _report(self, at: int, expected: str, found: object) -> None:
        self._add(IntegrityError(self.path, at, expected, found), "", REPAIRED_BY)

    def _add(self, exc: FormatError, suffix: str, advice: str) -> None:
        finding = Finding.of_error(WHAT, exc, advice=advice)
        self.findings.append(finding._replace(found=finding.found + suffix))


def _warning(where: str, text: str) -> Finding:
    return Finding(WHAT, where, f"{where}: {text}", severity=Severity.WARNING)


def _open(path: str) -> tuple[SegmentSource, int]:
    if not path.endswith(WARM_SUFFIX):
        file = FileSource(path)
        return file, file.size()
    from relay.journal.warm import WarmSegment

    warm = WarmSegment(path)
    return warm, warm.size


def file_kind(path: str) -> str:
    """``segment``, ``chunk`` or ``snapshot``, by the first bytes; a warm segment by its name.

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
    """A manifest chunk: its good records and its problems. Errors: OSError, UnsafePath."""

    def __init__(self, path: str, index: int | None = None, base: int | None = None) -> None:
        self.path = path
        self.findings: list[Finding] = []
        self.records: list[ManifestRecord] = []
        self.ends: list[int] = []
        self.next_record: int | None = None
        self.header: ChunkHeader | None = None  # None: the chunk is damaged
        try:
            data = load_chunk(path)
            # of a file that is checked alone, the index in its header
            expected = int.from_bytes(data[16:24], "little") if index is None else index
            chunk = decode_chunk(data, path, expected, base)
        except FormatError as exc:
            self.findings.append(_of_error(exc, path))
            self.records, self.ends = salvage_chunk(data, path)
            return
        self.header, self.records, self.ends = chunk.header, chunk.records, chunk.ends
        self.next_record = chunk.header.base_record + len(chunk.records)
        if chunk.torn_bytes:
            at = chunk.header.committed_len
            text = f"{chunk.torn_bytes} bytes after committed_len"
            self.findings.append(_warning(f"{path} at {at}", text))
        unknown = [record for record in chunk.records if not record.is_known]
        if unknown:
            kinds = sorted({f"type {record.type} flags {record.flags}" for record in unknown})
            text = f"{len(unknown)} records of unknown types: {', '.join(kinds)}"
            self.findings.append(_warning(path, text))


def check(path: str) -> Iterator[Finding]:
    """Check a stream's directory, or one file of it. Does not raise for damaged files."""
    if not os.path.isdir(path):
        yield from _confirmed(path, lambda: _check_file(path))
        return
    yield from check_manifest(path)
    with contextlib.suppress(RelayError, OSError):  # the check of the manifest reports it
        for number, (found, entry) in segment_files(path).items():
            for copy in dict.fromkeys((found, warm_path(path, number))):
                if copy and os.path.exists(copy):
                    yield from check_segment(copy, entry)


def check_manifest(stream_dir: str) -> list[Finding]:
    """Check a stream's manifest and snapshots, and that the segment files in them exist.

    Does not read the segments. Does not raise for damaged files.
    """
    return _confirmed(stream_dir, lambda: _check_catalog(stream_dir))


def _check_catalog(stream_dir: str) -> Iterator[Finding]:
    yield from _check_chunks(stream_dir)
    yield from _check_snapshots(stream_dir)
    yield from _check_entries(stream_dir)


def _of_error(exc: RelayError | OSError, path: str) -> Finding:
    return Finding.of_error(WHAT, exc, path, REPAIRED_BY)


def _check_file(path: str) -> Iterator[Finding]:
    kind = file_kind(path)
    if kind == "segment":
        yield from _check_segment(path, None)
    elif kind == "chunk":
        yield from ChunkInspector(path).findings
    else:
        load_snapshot(path)


def _check_chunks(stream_dir: str) -> Iterator[Finding]:
    """Check every chunk, and that none is missing between them."""
    there = chunk_indexes(stream_dir)
    if not there:
        where = os.path.join(stream_dir, MANIFEST)
        yield Finding(WHAT, where, "no chunk", REPAIRED_BY, expected="a manifest")
    next_record = 0 if there[:1] == [0] else None
    for number, index in enumerate(there):
        path = chunk_path(stream_dir, index)
        if number and index != there[number - 1] + 1:
            expected = f"chunk {there[number - 1] + 1} before it"
            yield Finding(WHAT, path, "none", REPAIRED_BY, expected=expected)
            next_record = None
        inspector = ChunkInspector(path, index, next_record)
        next_record = inspector.next_record
        yield from inspector.findings


def _check_snapshots(stream_dir: str) -> Iterator[Finding]:
    for snapshot_id in snapshot_ids(stream_dir):
        path = snapshot_path(stream_dir, snapshot_id)
        try:
            snapshot = load_snapshot(path, snapshot_id)
        except FileNotFoundError:
            continue  # removed meanwhile by its writer
        except (RelayError, OSError) as exc:
            yield _of_error(exc, path)
            continue
        chunk = chunk_path(stream_dir, snapshot.chunk_index)
        ends = [FIRST_MANIFEST_RECORD]
        if os.path.exists(chunk):
            ends += ChunkInspector(chunk).ends
        if snapshot.chunk_offset not in ends:
            position = f"chunk {snapshot.chunk_index} at {snapshot.chunk_offset}"
            yield _warning(path, f"{position} is not the end of a record")


def _check_entries(stream_dir: str) -> Iterator[Finding]:
    """Compare files and entries, and check that the offsets are contiguous."""
    behind: int | None = None  # expected base offset of the next segment
    for number, (path, entry) in segment_files(stream_dir).items():
        if entry is None:
            yield _warning(path, "this segment is not in the manifest")
            continue
        if behind is not None and entry.base_offset != behind:
            where = f"{stream_dir}: segment {number}"
            expected = f"base_offset {behind}"
            yield Finding(WHAT, where, str(entry.base_offset), REPAIRED_BY, expected=expected)
        behind = entry.end_offset if entry.sealed else None
        yield from _check_residency(stream_dir, entry)


def _check_residency(stream_dir: str, entry: SegmentEntry) -> Iterator[Finding]:
    """Check that an entry's files exist; one local copy is enough to read the segment."""
    copies = {
        Residency.TIER0: segment_path(stream_dir, entry.segment_id),
        Residency.TIER1: warm_path(stream_dir, entry.segment_id),
    }
    missing = {
        path: tier
        for tier, path in copies.items()
        if entry.residency & tier and not _may_exist(path)
    }
    if missing:
        is_whole = any(map(_may_exist, copies.values()))
        severity = Severity.WARNING if is_whole else Severity.ERROR
        for path, tier in missing.items():
            found = f"{path}: missing, but in the manifest as {str(tier.name).lower()}"
            yield Finding(WHAT, path, found, REPAIRED_BY, severity)


def _may_exist(path: str) -> bool:
    """False if the file does not exist; an unreadable one is reported elsewhere."""
    try:
        return fsio.exists(path)
    except OSError:
        return True


def check_segment(path: str, entry: SegmentEntry | None) -> list[Finding]:
    """Check one copy of a segment, and compare it with its entry. Does not raise for damaged
    files."""
    return _confirmed(path, lambda: _check_segment(path, entry))


def _check_segment(path: str, entry: SegmentEntry | None) -> list[Finding]:
    try:
        inspector = SegmentInspector(path, entry)
    except FileNotFoundError:
        return []  # sealed and evicted since the manifest was read
    try:
        inspector.verify()
    except (RelayError, OSError) as exc:
        inspector.findings.append(_of_error(exc, path))
    finally:
        inspector.close()
    return inspector.findings
