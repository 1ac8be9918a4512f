"""Manifest records and snapshots as JSON objects: what `relay aof` prints for programs.

Fields stand in disk order, bytes are hex under ``NAME_hex``, types are the source document's names.
"""

from __future__ import annotations

from typing import Any

from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.format import ManifestRecord
from relay.journal.snapshot import CatalogSnapshot


def manifest_row(record: ManifestRecord) -> dict[str, Any]:
    """One manifest record; an unknown type is its number, and its payload hex."""
    row: dict[str, Any] = {
        "type": record.name if record.is_known else record.type,
        "segment_id": record.segment_id,
        "logical_offset": record.logical_offset,
        "timestamp_ms": record.timestamp_ms,
    }
    for name, value in record.fields.items():
        if isinstance(value, bytes):
            row[f"{name}_hex"] = value.hex()
        else:
            row[name] = value
    return row


def snapshot_row(snapshot: CatalogSnapshot) -> dict[str, Any]:
    """A snapshot with its entries."""
    return {
        "snapshot_id": snapshot.snapshot_id,
        "chunk_index": snapshot.chunk_index,
        "chunk_offset": snapshot.chunk_offset,
        "entries": [entry_row(entry) for entry in snapshot.entries],
    }


def entry_row(entry: SegmentEntry) -> dict[str, Any]:
    """One entry of the catalog; residency is the list of its tiers' names."""
    row: dict[str, Any] = {name: getattr(entry, name) for name in entry.__struct_fields__}
    row["residency"] = tier_names(entry.residency)
    return row


def tier_names(residency: Residency) -> list[str]:
    """``["tier0", "tier2"]``."""
    return [str(tier.name).lower() for tier in Residency if tier in residency]
