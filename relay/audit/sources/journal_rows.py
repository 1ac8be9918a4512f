"""A segment of the journal in one pass: its rows in the lake's tables, and its faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from relay.audit import lake_columns
from relay.audit.lake_columns import NUMBER, TEXT, U64
from relay.audit.sources.journal_columns import SEALED, RecordRows, decoder, to_batch
from relay.audit.sources.journal_files import (
    BATCH_ROWS,
    ReadSettings,
    SegmentPart,
    read_segment,
)
from relay.base import crypto
from relay.base.errors import RelayError
from relay.journal.catalog import SegmentEntry
from relay.journal.check import SegmentInspector

_DELIVERY = pa.struct([("number", U64), ("recipient", TEXT), ("attempt", NUMBER)])
_TYPES = {"segment": NUMBER, "number": U64, "deliveries": pa.list_(_DELIVERY)}
_TABLES = ("journal_sent", "journal_moves", "journal_records")
_NOT_READ = ("bucket", "recipient", "attempt")  # made of others
COLUMNS = pa.schema(
    [
        pa.field(name, kind)
        for name, kind in {
            **{
                field.name: field.type
                for table in _TABLES
                for field in lake_columns.TABLES[table]
                if field.name not in _NOT_READ
            },
            **_TYPES,
        }.items()
    ]
)
SENT = "MessageSent"
NO_KEY = "records are sealed, and no key opens them"


class SegmentRows(NamedTuple):
    """The rows of a segment, from one pass over it."""

    tables: dict[str, list[pa.RecordBatch]]  # of the lake
    is_sound: bool  # every byte of the file here was verified; else it was not
    lost: list[str]  # why records could not be read, a line each


def read_part(
    part: SegmentPart,
    shown: str,
    settings: ReadSettings,
    local: str = "",
    entry: SegmentEntry | None = None,
) -> SegmentRows:
    """Read a part of a segment; ``shown`` names its stream, ``local`` is a file of it here.

    A sound file is read once. Of a damaged one, what can be read is, and each lost part is a
    record Gap. Errors: RelayError, OSError when nothing of it can be read.
    """
    if local and part.lost_from < 0:
        found = _inspected(part, settings, local, entry)
        if found is not None:
            return SegmentRows(_tables(iter(found), shown), True, [])
    lost: list[str] = []
    lenient = settings._replace(permissive=True)
    every = read_segment(part, COLUMNS, lenient, lambda damage: lost.append(damage.reason))
    tables = _tables(every, shown)
    if any(SEALED in batch.column("event").to_pylist() for batch in tables["journal_records"]):
        lost.append(f"{part.folder}: {NO_KEY}")
    return SegmentRows(tables, False, lost)


def _inspected(
    part: SegmentPart, settings: ReadSettings, path: str, entry: SegmentEntry | None
) -> list[pa.RecordBatch] | None:
    """Read a sound file, and verify it on the way; None for any other."""
    key = crypto.load_key(settings.key_file) if settings.key_file else None
    batches = []
    rows = RecordRows(part.folder, part.segment_id)
    try:
        inspector = SegmentInspector(path, entry)
        try:
            decode = decoder(COLUMNS.names, key, path)
            for record in inspector.records():
                offset, at_ms, _, payload = record
                if not part.start <= offset < part.end:
                    continue
                rows.add(offset, record.end, at_ms, decode(payload, offset))
                if len(rows) >= BATCH_ROWS:
                    batches.append(to_batch(rows, COLUMNS))
                    rows = RecordRows(part.folder, part.segment_id)
            inspector.finish()
        finally:
            inspector.close()
    except (RelayError, OSError):
        return None  # its faults are found by who reads it once more
    return None if inspector.findings else [*batches, to_batch(rows, COLUMNS)]


def _tables(batches: Iterator[pa.RecordBatch], shown: str) -> dict[str, list[pa.RecordBatch]]:
    found: dict[str, list[pa.RecordBatch]] = {table: [] for table in _TABLES}
    for batch in batches:
        at = batch.schema.get_field_index("stream")
        batch = batch.set_column(at, "stream", pa.repeat(pa.scalar(shown), len(batch)))
        is_sent = pc.equal(batch.column("event"), SENT)
        has_moves = pc.is_valid(batch.column("deliveries"))
        sent = batch.filter(is_sent)
        columns = lake_columns.JOURNAL_SENT
        found["journal_sent"].append(lake_columns.with_bucket(columns, sent, "relay_id"))
        found["journal_moves"].append(_moves(batch))
        columns = lake_columns.JOURNAL_RECORDS
        others = batch.filter(pc.invert(pc.or_(is_sent, has_moves)))
        found["journal_records"].append(others.select(columns.names).cast(columns))
    return found


def _moves(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Make a row of each delivery that a record is about."""
    lists = batch.column("deliveries")
    of = pc.list_parent_indices(lists)
    flat = pc.list_flatten(lists)
    own = dict(zip(_DELIVERY.names, flat.flatten(), strict=True))
    columns = lake_columns.JOURNAL_MOVES
    arrays = [
        own[field.name] if field.name in own else batch.column(field.name).take(of)
        for field in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
