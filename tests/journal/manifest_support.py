"""Golden streams of AOF2, records of every type, and disks that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from relay.journal import manifest_format
from relay.journal.catalog import Catalog, SegmentEntry
from relay.journal.manifest import Manifest
from relay.journal.manifest_format import Field, ManifestRecord, ManifestType
from relay.journal.manifest_reader import chunk_indexes, chunk_path, decode_chunk, load_chunk
from tests.fakes import FakeClock

FIXTURES = Path(__file__).parents[1] / "fixtures" / "aof2"
STREAM_1 = FIXTURES / "stream" / f"{1:020d}"
STREAM_2 = FIXTURES / "stream-2" / f"{2:020d}"
NOW_S = 1_780_000_000


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def silent(line: str) -> None:
    """A warn for tests that look at what became of it instead."""


def stored(stream_dir: str | Path) -> list[ManifestRecord]:
    """Every record in the chunks of a stream, but the markers of snapshots."""
    found: list[ManifestRecord] = []
    for index in chunk_indexes(str(stream_dir)):
        path = chunk_path(str(stream_dir), index)
        found += decode_chunk(load_chunk(path), path, index).records
    return [record for record in found if record.type != ManifestType.SnapshotMarker]


def begin(stream: str) -> Manifest:
    """Open it, as the journal does."""
    return Manifest.open(stream, 1, FakeClock(NOW_S * 10**9), silent)


def path_of(stream: str | Path, index: int) -> Path:
    """Where a chunk is."""
    return Path(chunk_path(str(stream), index))


def entries_of(records: list[ManifestRecord]) -> dict[int, SegmentEntry]:
    """What the records come to."""
    catalog = Catalog()
    for record in records:
        catalog.apply(record)
    return dict(catalog.entries)


# -- records -------------------------------------------------------------------------------


def opened(segment: int, base: int = 0, at_ms: int = 1) -> ManifestRecord:
    """SegmentOpened."""
    fields: dict[str, Field] = {"base_offset": base, "epoch": 1}
    return ManifestRecord(ManifestType.SegmentOpened, segment, base, at_ms, fields)


def sealed(segment: int, base: int = 0, durable: int = 152, at_ms: int = 2) -> ManifestRecord:
    """SealSegment of a segment with ``durable - 52`` bytes of records."""
    fields: dict[str, Field] = {
        "durable_bytes": durable,
        "segment_crc64": 7,
        "ext_id": 9,
        "coordinator_watermark": base,
        "flush_failure": 0,
    }
    return ManifestRecord(ManifestType.SealSegment, segment, base + durable - 52, at_ms, fields)


def said(kind: ManifestType, segment: int, at_ms: int = 3, **fields: Field) -> ManifestRecord:
    """Any other record."""
    return ManifestRecord(kind, segment, 0, at_ms, fields)


U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
KEYS = st.text(max_size=40)
_INTEGERS = {"B": U8, "H": U16, "I": U32, "Q": U64}
_BYTES = {
    "key_len": ("key", KEYS),
    "etag_len": ("etag", st.text(max_size=16)),
    "blob_len": ("blob", st.binary(max_size=60)),
}
_FIELDS: dict[ManifestType, dict[str, st.SearchStrategy[Any]]] = {
    kind: dict(
        _BYTES.get(name, (name, _INTEGERS[code]))
        for code, name in zip(layout.format[1:], names, strict=True)
    )
    for kind, (layout, names) in manifest_format._PAYLOADS.items()
}
assert _FIELDS.keys() == set(ManifestType)


def _of_kind(kind: int, segments: st.SearchStrategy[int]) -> st.SearchStrategy[ManifestRecord]:
    known = kind in set(ManifestType)
    fields = _FIELDS[ManifestType(kind)] if known else {"payload": st.binary(max_size=60)}
    return st.builds(
        ManifestRecord, st.just(kind), segments, U64, U64, st.fixed_dictionaries(fields), U16
    )


def any_record(segments: st.SearchStrategy[int] = U64) -> st.SearchStrategy[ManifestRecord]:
    """Records of every type, and of types of later versions."""
    kinds = [*map(int, ManifestType), 16, 200, 0xFFFF]
    return st.sampled_from(kinds).flatmap(lambda kind: _of_kind(kind, segments))


# -- disks that fail -----------------------------------------------------------------------
