"""The files of a journal as a job reads them: streams, segments, and records as Arrow batches.

    plan           on the driver: which segments, from which offset to which
    read_segment   in a worker: the records, in whatever tier the segment is by then

Reads only. A segment that is compressed, uploaded or evicted between the two is found in the
other tier; one that was pruned meanwhile is an error that says so. Damage is an error, or a row of
its own.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from relay.audit.sources.journal_columns import (
    GAP,
    SEALED,
    Marker,
    RecordRows,
    Row,
    decoder,
    in_batches,
    to_batch,
)
from relay.audit.temp_folders import temporary_folder
from relay.base import crypto
from relay.base.clock import NS_PER_MS, Clock
from relay.base.config import read_file
from relay.base.discovery import CONFIG
from relay.base.errors import (
    FormatError,
    IntegrityError,
    JournalError,
    RelayError,
    SealedStore,
    SegmentAway,
)
from relay.base.home import JOURNAL
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.format import (
    RECORD,
    SEGMENT_HEADER,
    RecordFlag,
    decode_segment_header,
)
from relay.journal.manifest_reader import read_manifest
from relay.journal.objects import ObjectStore, open_objects
from relay.journal.recover import TailKind, inspect_tail, is_zero
from relay.journal.segment import (
    FIRST_RECORD,
    SEGMENTS,
    WARM,
    FileSource,
    SegmentSource,
    read_records,
    segment_ids,
    segment_path,
    warm_name,
)
from relay.journal.warm import WarmSegment, dictionary_name, dictionary_of

STREAM_DIGITS = 20
_TRIES = 3  # after a roll, or a move to another tier
_PIECE_BYTES = 1 << 20


class SegmentPart(NamedTuple):
    """A part of a segment that one partition reads."""

    folder: str  # of the stream
    segment_id: int
    base: int  # logical offset of its first record
    start: int
    end: int
    lost_from: int = -1  # begin of a gap before ``start``; -1: none
    created_ms: int = 0


class ReadSettings(NamedTuple):
    """Settings for reading segments."""

    objects: str = ""  # of Tier 2; empty: none
    key_file: str = ""  # empty: it is not sealed
    permissive: bool = True
    is_followed: bool = False  # what is away or sealed now is an error: it may be there later

    @property
    def key(self) -> bytes | None:
        """The key, if there is one. Errors: KeyFileError."""
        return crypto.load_key(self.key_file) if self.key_file else None


class JournalDamage(NamedTuple):
    """A part of a stream that cannot be read."""

    folder: str
    segment_id: int | None
    offset: int | None
    end: int | None
    reason: str


class StreamPlan(NamedTuple):
    """The segments of a stream at the time of planning."""

    segments: list[SegmentPart]
    damage: list[JournalDamage]
    first: int  # the offset of the first record that is left
    end: int  # behind the last record


def find_streams(paths: Iterable[str]) -> list[str]:
    """The folders of the streams that paths name: a stream, a journal, a home, or a glob.

    A journal without streams gives none. Errors: RelayError for what is nothing of it.
    """
    found: list[str] = []
    for path in paths:
        matches = sorted(glob.glob(os.path.expanduser(path)))
        if not matches:
            raise RelayError(f"{path}: no such journal")
        for match in matches:
            found.extend(_streams_of(os.path.abspath(match)))
    return list(dict.fromkeys(found))


def _streams_of(path: str) -> list[str]:
    if os.path.isdir(os.path.join(path, JOURNAL)):  # a home
        path = os.path.join(path, JOURNAL)
    if _is_stream(path):
        return [path]
    if not os.path.isdir(path) or os.path.isfile(os.path.join(path, CONFIG)):
        raise RelayError(f"{path}: expected a journal, a stream of it, or a home with one")
    below = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    return [folder for folder in below if _is_stream(folder)]


def _is_stream(path: str) -> bool:
    name = os.path.basename(path)
    is_named = len(name) == STREAM_DIGITS and name.isdigit()
    return (is_named and os.path.isdir(path)) or os.path.isdir(os.path.join(path, SEGMENTS))


def home_settings(home: str) -> ReadSettings:
    """Read the settings of the journal in config.json; empty for a folder that is not a home.

    Errors: ConfigError.
    """
    config = read_file(os.path.join(home, CONFIG))
    objects, store = config.journal.objects, config.store
    if objects and "://" not in objects:
        objects = os.path.join(home, os.path.expanduser(objects))
    return ReadSettings(objects, os.path.join(home, store.key_file) if store.encrypt else "")


def plan(folder: str, start: int = 0, end: int | None = None, *, strict: bool = True) -> StreamPlan:
    """The segments of a stream with records of [start, end), in its present state.

    Without ``end`` up to the last whole record. Errors, when ``strict``: FormatError for a
    damaged manifest, and for damage in the segment that is written to; else they are in the
    plan, and what can be read is.
    """
    for _ in range(_TRIES):
        found = _plan(folder, start, strict)
        if found is not None:
            break
    else:
        raise JournalError(f"{folder}: segments change faster than they can be listed")
    if end is None:
        return found
    kept = [part._replace(end=min(part.end, end)) for part in found.segments if part.start < end]
    return found._replace(segments=kept, end=min(end, found.end))


def _plan(folder: str, start: int, strict: bool) -> StreamPlan | None:
    """Return None when a segment left Tier 0 meanwhile: the manifest has it now."""
    view = read_manifest(folder, lambda _: None)
    damage = []
    if view.damaged:
        reason = "; ".join(view.findings)
        if strict:
            raise JournalError(reason, hint="`relay doctor` says what to do")
        damage.append(JournalDamage(folder, None, None, None, reason))
    segments: list[SegmentPart] = []
    begins = [entry.base_offset for entry in view.catalog.entries.values()]
    first, last, at = min(begins, default=0), -1, max(start, min(begins, default=0))
    for entry in view.catalog.entries.values():
        if not entry.sealed:
            break
        last = entry.segment_id
        if entry.end_offset > at:
            span = (entry.base_offset, at, entry.end_offset)
            segments.append(_segment(folder, last, *span, entry.creation_ts_ms))
            at = entry.end_offset
    for number in [number for number in segment_ids(folder) if number > last]:
        if number > last + 1 and number not in view.catalog.entries and not view.damaged:
            return None  # those between were made, sealed and evicted since the manifest was read
        try:
            known = view.catalog.entries.get(number)
            base = None if known is None else known.base_offset
            written = _written(folder, number, base, at, strict, damage)
        except FileNotFoundError:
            return None
        last = number
        if written is not None and written.end > written.start:
            segments.append(written)
            at = written.end
    return StreamPlan(segments, damage, first, at)


def _segment(
    folder: str, number: int, base: int, at: int, end: int, created_ms: int
) -> SegmentPart:
    lost_from = at if base > at else -1
    return SegmentPart(folder, number, base, max(at, base), end, lost_from, created_ms)


def _written(
    folder: str, number: int, base: int | None, at: int, strict: bool, damage: list[JournalDamage]
) -> SegmentPart | None:
    """Read an unsealed segment's extent from its file; None while it has no record.

    Errors: FileNotFoundError, FormatError.
    """
    path = segment_path(folder, number)
    source = FileSource(path)
    try:
        head = source.read_at(0, FIRST_RECORD + RECORD.size)
        if not head[FIRST_RECORD:].strip(b"\0") or len(head) < FIRST_RECORD + RECORD.size:
            return None
        header = decode_segment_header(head[: SEGMENT_HEADER.size], path)
        if base is None:  # its file alone speaks of it
            base = int(RECORD.unpack(head[FIRST_RECORD:])[2])
        end, why = _end_of(source, path, base, max(at, base))
        if why is not None and strict:
            raise why
        if why is not None:  # up to the last good record, and not into the zeros behind it
            span = (base, end, base + source.size() - FIRST_RECORD)
            behind = [record.end for record in read_records(source, *span, lambda *_: None)]
            if behind:  # who reads up to there finds the gap
                end = behind[-1]
            else:
                damage.append(JournalDamage(folder, number, end, None, str(why)))
        return _segment(folder, number, base, at, end, header.creation_ts_ms)
    except FormatError as exc:
        if strict:
            raise
        damage.append(JournalDamage(folder, number, None, None, str(exc)))
        return None
    finally:
        source.close()


def _end_of(
    source: FileSource, path: str, base: int, start: int
) -> tuple[int, IntegrityError | None]:
    """Return the end of the whole records from ``start``, and the fault there: committed records
    behind it, or no record at ``start``.

    A reader may see an unfinished write: a fault that a second look does not show was one.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            end, fault = start, None
            try:
                behind = base + source.size() - FIRST_RECORD
                for record in read_records(source, base, start, behind):
                    end = record.end
            except IntegrityError as exc:
                fault = exc
            position = FIRST_RECORD + end - base
            if fault is None or is_zero(fd, position):
                return end, None
            found = inspect_tail(fd, base, os.pread(fd, FIRST_RECORD, 0), 0)
            if found.walk.position <= position and found.kind is not TailKind.DAMAGE:
                return end, None
            if found.walk.position == position:
                break
    finally:
        os.close(fd)
    return end, fault


@contextlib.contextmanager
def open_segment(segment: SegmentPart, objects: str) -> Iterator[SegmentSource]:
    """Open a segment in the nearest tier that has it; ``objects``: of Tier 2.

    Errors: SegmentAway, FormatError, ObjectError.
    """
    with contextlib.ExitStack() as cleanup:
        source = _find(segment, objects, cleanup)
        cleanup.callback(source.close)
        yield source


def _find(segment: SegmentPart, objects: str, cleanup: contextlib.ExitStack) -> SegmentSource:
    folder, number = segment.folder, segment.segment_id
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return FileSource(segment_path(folder, number))
        with contextlib.suppress(FileNotFoundError):
            return WarmSegment(os.path.join(folder, WARM, warm_name(number)))
        entry = read_manifest(folder, lambda _: None).catalog.entries.get(number)
        if entry is None:
            raise JournalError(
                f"segment {number} of {folder} was pruned before it was read: run it again"
            )
        if entry.residency == Residency.TIER2:
            return _download(entry, folder, objects, cleanup)
    raise JournalError(
        f"segment {number} of {folder} is in no tier; `relay check` lists the segments"
    )


def _download(
    entry: SegmentEntry, folder: str, objects: str, cleanup: contextlib.ExitStack
) -> SegmentSource:
    """Download a segment of Tier 2, as a file that lives as long as ``cleanup``."""
    if not objects:
        raise SegmentAway(
            f"segment {entry.segment_id} of {folder} is in Tier 2, and no object store is named:"
            " journal.objects in the home's config.json, or the option `objects`"
        )
    store = open_objects(objects)
    private = cleanup.enter_context(temporary_folder("segment"))
    path = os.path.join(private, warm_name(entry.segment_id))
    shown = f"{store.url}/{entry.key}"  # in messages
    _get(store, entry.key, path)
    try:
        needed = dictionary_of(path)
        if needed:
            name = dictionary_name(needed)
            _get(store, f"{os.path.dirname(entry.key)}/{name}", os.path.join(private, name))
        source = WarmSegment(path)
    except FormatError as exc:  # of the copy, which is removed
        raise FormatError(shown, exc.offset, exc.expected, exc.found) from exc
    source.path = shown
    return source


def _get(store: ObjectStore, key: str, path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        for piece in store.get(key)[1]:
            file.write(piece)


LOST = "records are lost here"
_GAP = int(RecordFlag.GAP)


def read_segment(
    segment: SegmentPart, schema: pa.Schema, settings: ReadSettings
) -> Iterator[pa.RecordBatch]:
    """Make columns of ``read_rows``. Errors: its own."""
    for rows in read_rows(segment, settings):
        yield to_batch(rows, schema)


def read_rows(segment: SegmentPart, settings: ReadSettings) -> Iterator[RecordRows]:
    """Read the records of a part of a segment; a gap before it in the stream comes first.

    When the settings are permissive, unreadable parts are gaps with the reason. Errors, when they
    are not: FormatError with file and place, SealedStore, JournalError for a segment that is gone.
    """
    rows = _PartReader(segment, settings).rows()
    return in_batches(segment.folder, segment.segment_id, rows)


def gap_rows(damage: Iterable[JournalDamage], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Make a row ``Gap``, as of now, of each part of a stream that a plan could not read."""
    now_ms = Clock().now_ns() // NS_PER_MS
    for damaged in damage:
        at = damaged.offset or 0
        row = (at, damaged.end or at, now_ms, Marker(GAP, damaged.reason))
        yield to_batch(RecordRows(damaged.folder, damaged.segment_id or 0, [row]), schema)


class _PartReader:
    """Reads one part of a segment."""

    def __init__(self, segment: SegmentPart, settings: ReadSettings) -> None:
        self._segment = segment
        self._settings = settings
        self._at_ms = segment.created_ms  # of a gap: that of the record before
        self._gaps: list[Row] = []  # found, not yielded yet

    def rows(self) -> Iterator[Row]:
        """Yield each record, and gaps in the place of lost ones."""
        segment, at = self._segment, self._segment.start
        if 0 <= segment.lost_from < at:
            yield segment.lost_from, at, self._at_ms, Marker(GAP, LOST)
        try:
            for row in self._records():
                at = row[1]
                yield row
        except OSError as exc:
            raise RelayError(f"{exc.filename or segment.folder}: {exc.strerror}") from exc
        except (FormatError, JournalError) as exc:
            is_away = self._settings.is_followed and isinstance(exc, JournalError)
            if is_away or not self._settings.permissive:
                raise
            self._lost(at, segment.end, exc)
        yield from self._gaps

    def _records(self) -> Iterator[Row]:
        segment, permissive = self._segment, self._settings.permissive
        key = self._settings.key
        with open_segment(segment, self._settings.objects) as source:
            decode_segment_header(source.read_at(0, FIRST_RECORD), source.path)
            decode = decoder(key, source.path)
            gap = self._lost if permissive else None
            for record in read_records(source, segment.base, segment.start, segment.end, gap):
                offset, at_ms, flags, payload = record
                gaps, self._gaps = self._gaps, []
                yield from gaps
                self._at_ms = at_ms
                try:
                    frame = Marker(GAP, LOST) if flags & _GAP else decode(payload, offset)
                except SealedStore:
                    if not permissive or self._settings.is_followed:
                        raise
                    frame = Marker(SEALED)
                except FormatError as exc:
                    if not permissive:
                        raise
                    self._lost(offset, record.end, exc)
                    continue
                yield offset, record.end, at_ms, frame

    def _lost(self, begin: int, end: int, why: Exception) -> None:
        self._gaps.append((begin, end, self._at_ms, Marker(GAP, str(why))))
