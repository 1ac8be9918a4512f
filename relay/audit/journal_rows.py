"""The records of a part of a segment as Arrow batches; damage fails, or is a row of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from relay.audit import journal_files
from relay.audit.journal_columns import GAP, SEALED, Marker, Rows, decoder, to_batch
from relay.audit.journal_files import Damage, Segment
from relay.base import keyfile
from relay.base.errors import FormatError, JournalError, RelayError, SealedStore
from relay.journal.format import RecordFlag, decode_segment_header
from relay.journal.segment import FIRST_RECORD, read_records

BATCH_ROWS = 10_000
LOST = "the records that stood here are lost"
_GAP = int(RecordFlag.GAP)

Row = tuple[int, int, int, Any]  # offset, end, milliseconds, frame
Damaged = Callable[[Damage], object]


class Settings(NamedTuple):
    """What reading needs to know beside the segments."""

    objects: Mapping[str, str]  # by stream
    key_file: str | None
    permissive: bool


def read_segment(
    segment: Segment,
    schema: pa.Schema,
    settings: Settings,
    damaged: Damaged = lambda damage: None,
) -> Iterator[pa.RecordBatch]:
    """The records of a part of a segment; what the stream lacks before it comes first, as a gap.

    Where the settings are permissive, what cannot be read is a gap with the reason, and
    ``damaged`` hears of it. Errors, where they are not: FormatError with file and place,
    SealedStore, JournalError for a segment that is gone.
    """
    rows = Rows(segment.folder, segment.segment_id)
    for row in _Part(segment, settings, damaged).rows(schema.names):
        rows.add(*row)
        if len(rows) >= BATCH_ROWS:
            yield to_batch(rows, schema)
            rows = Rows(segment.folder, segment.segment_id)
    if len(rows):
        yield to_batch(rows, schema)


class _Part:
    """One part of a segment on its way through."""

    def __init__(self, segment: Segment, settings: Settings, damaged: Damaged) -> None:
        self._segment = segment
        self._settings = settings
        self._damaged = damaged
        self._at_ms = segment.created_ms  # of a gap: that of the record before
        self._gaps: list[Row] = []  # found, and not given yet

    def rows(self, columns: Iterable[str]) -> Iterator[Row]:
        """Each record, and what takes the place of one."""
        segment, at = self._segment, self._segment.start
        if 0 <= segment.lost_from < at:
            yield segment.lost_from, at, self._at_ms, Marker(GAP, LOST)
        try:
            for row in self._records(columns):
                at = row[1]
                yield row
        except OSError as exc:
            raise RelayError(f"{exc.filename or segment.folder}: {exc.strerror}") from exc
        except (FormatError, JournalError) as exc:
            if not self._settings.permissive:
                raise
            self._lost(at, segment.end, exc)
        yield from self._gaps

    def _records(self, columns: Iterable[str]) -> Iterator[Row]:
        segment, permissive = self._segment, self._settings.permissive
        key = keyfile.load(self._settings.key_file) if self._settings.key_file else None
        objects = self._settings.objects.get(segment.folder, "")
        with journal_files.open_at(segment, objects) as source:
            decode_segment_header(source.read_at(0, FIRST_RECORD), source.path)
            decode = decoder(columns, key, source.path)
            gap = self._lost if permissive else None
            for record in read_records(source, segment.base, segment.start, segment.end, gap):
                offset, at_ms, flags, payload = record
                if self._gaps:
                    yield from self._taken_gaps()
                self._at_ms = at_ms
                try:
                    frame = Marker(GAP, LOST) if flags & _GAP else decode(payload, offset)
                except SealedStore:
                    if not permissive:
                        raise
                    frame = Marker(SEALED)
                except FormatError as exc:
                    if not permissive:
                        raise
                    self._lost(offset, record.end, exc)
                    continue
                yield offset, record.end, at_ms, frame

    def _lost(self, begin: int, end: int, why: Exception) -> None:
        segment = self._segment
        self._gaps.append((begin, end, self._at_ms, Marker(GAP, str(why))))
        self._damaged(Damage(segment.folder, segment.segment_id, begin, end, str(why)))

    def _taken_gaps(self) -> list[Row]:
        found, self._gaps = self._gaps, []
        return found
