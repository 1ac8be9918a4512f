"""A segment of the journal in one pass: its rows in the lake's tables, and its faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from relay.audit.lake_columns import MOVED, TABLES, with_bucket
from relay.audit.sources.journal_columns import (
    GAP,
    SEALED,
    RecordRows,
    decoder,
    in_batches,
    to_batch,
)
from relay.audit.sources.journal_files import LOST, ReadSettings, SegmentPart, read_rows
from relay.base.errors import RelayError
from relay.journal.catalog import SegmentEntry
from relay.journal.check import SegmentInspector

_LISTED = pa.field("deliveries", pa.list_(MOVED))
# What is read for each table; the buckets are made later.
_SENT = TABLES["journal_sent"].remove(0)
_RECORDS = TABLES["journal_records"]
_MOVES = pa.schema(
    [*(column for column in TABLES["journal_moves"] if column.name not in MOVED.names), _LISTED]
)
SENT = "MessageSent"
NO_KEY = "records are sealed, and no key opens them"


class SegmentRows(NamedTuple):
    """The rows of a segment, from one pass over it."""

    tables: dict[str, list[pa.RecordBatch]]  # of the lake
    is_sound: bool  # every byte of the file here was verified; else it was not
    lost: list[str]  # why records could not be read, a line each


def read_part(
    part: SegmentPart, shown: str, settings: ReadSettings, path: str, entry: SegmentEntry | None
) -> SegmentRows:
    """Read a part of a segment; ``shown`` names its stream, ``path`` is a file of it here.

    A sound file is read once. Of a damaged one, what can be read is, and each lost part is a
    record Gap. Errors: RelayError, OSError when nothing of it can be read.
    """
    if path and part.lost_from < 0:
        found = _inspected(part, shown, settings, path, entry)
        if found is not None:
            return SegmentRows(found, True, [])
    tables = _tables(read_rows(part, settings._replace(permissive=True)), shown)
    others = pa.Table.from_batches(tables["journal_records"], _RECORDS).select(["event", "reason"])
    events = [(row["event"], row["reason"]) for row in others.to_pylist()]
    lost = [reason for event, reason in events if event == GAP and reason != LOST]
    if any(event == SEALED for event, _ in events):
        lost.append(f"{part.folder}: {NO_KEY}")
    return SegmentRows(tables, False, lost)


def _inspected(
    part: SegmentPart, shown: str, settings: ReadSettings, path: str, entry: SegmentEntry | None
) -> dict[str, list[pa.RecordBatch]] | None:
    """Read a sound file, and verify it on the way; None for any other."""
    try:
        with contextlib.closing(SegmentInspector(path, entry)) as inspector:
            decode = decoder(settings.key, path)
            rows = (
                (record.offset, record.end, record.at_ms, decode(record.payload, record.offset))
                for record in inspector.records()
                if part.start <= record.offset < part.end
            )
            tables = _tables(in_batches(part.folder, part.segment_id, rows), shown)
            inspector.finish()
    except (RelayError, OSError):
        return None  # its faults are found by who reads it once more
    return None if inspector.findings else tables


def _tables(every: Iterable[RecordRows], shown: str) -> dict[str, list[pa.RecordBatch]]:
    """Make each column only of the records of its table."""
    found: dict[str, list[pa.RecordBatch]] = {
        "journal_sent": [], "journal_moves": [], "journal_records": []
    }  # fmt: skip
    for rows in every:
        rows.stream = shown
        is_sent = [event.type == SENT for event in rows.events]
        sent = to_batch(rows.where(is_sent), _SENT)
        moved = to_batch(rows, _MOVES)
        has_moves = moved.column(_LISTED.name).is_valid().to_pylist()
        is_other = [not (sent or moved) for sent, moved in zip(is_sent, has_moves, strict=True)]
        found["journal_sent"].append(with_bucket(TABLES["journal_sent"], sent, "relay_id"))
        found["journal_moves"].append(_moves(moved))
        found["journal_records"].append(to_batch(rows.where(is_other), _RECORDS))
    return found


def _moves(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Make a row of each delivery that a record is about."""
    lists = batch.column(_LISTED.name)
    of = pc.list_parent_indices(lists)
    flat = pc.list_flatten(lists)
    own = dict(zip(MOVED.names, flat.flatten(), strict=True))
    columns = TABLES["journal_moves"]
    arrays = [
        own[field.name] if field.name in own else batch.column(field.name).take(of)
        for field in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
