"""docs/formats/aof2.md says what the Structs say."""

from __future__ import annotations

import re
from enum import IntFlag
from struct import Struct

import pytest

from relay.journal import format as bytes_of
from relay.journal import manifest, manifest_format
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.format import (
    FOOTER,
    RECORD,
    SEGMENT_HEADER,
    Footer,
    RecordFlag,
    SegmentFlag,
    SegmentHeader,
)
from relay.journal.manifest_format import (
    CHUNK_HEADER,
    MANIFEST_RECORD,
    SNAPSHOT_ENTRY,
    SNAPSHOT_HEADER,
    ChunkFlag,
    ChunkHeader,
    ManifestType,
    Reason,
)
from tests.documents import read_page, tables

DOCS = read_page("formats/aof2.md")
CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
SIZES = {"B": 1, "H": 2, "I": 4, "Q": 8}


def plain(struct: Struct) -> str:
    """Its format with every number written out: ``<QIQQQQQ`` for ``<QIQQQ2Q``."""
    return re.sub(r"(\d+)([BHIQ])", lambda m: m[2] * int(m[1]), struct.format)


@pytest.mark.shows("journal 1.1")
@pytest.mark.parametrize(
    ("heading", "struct", "fields"),
    [
        (
            "Segment header",
            SEGMENT_HEADER,
            ("magic", "version", *SegmentHeader._fields, "reserved", "reserved"),
        ),
        ("Record header", RECORD, None),
        ("Segment footer", FOOTER, Footer._fields),
        ("Chunk header", CHUNK_HEADER, ("magic", "version", "header_len", *ChunkHeader._fields)),
        ("Manifest record header", MANIFEST_RECORD, None),
        ("Snapshot header", SNAPSHOT_HEADER, None),
        ("Snapshot entry", SNAPSHOT_ENTRY, None),
    ],
)
def test_a_table_is_its_struct(
    heading: str, struct: Struct, fields: tuple[str, ...] | None
) -> None:
    *rows, total = tables(DOCS, heading)[0]
    offset, packed = 0, "<"
    for at, size, kind, name, _ in rows:
        assert int(at) == offset and name
        code = CODES.get(kind, f"{size}s")
        assert SIZES.get(code, int(size)) == int(size)
        packed += code
        offset += int(size)
    assert fields is None or [row[3] for row in rows] == list(fields)
    assert packed == plain(struct)
    assert (int(total[0]), total[4]) == (struct.size, "total")


def test_an_entry_has_the_fields_of_its_value() -> None:
    beside = {"zero", "key_len", "etag_len"}
    rows = [row[3] for row in tables(DOCS, "Snapshot entry")[0][:-1]]
    assert [name for name in rows if name not in beside] == list(SegmentEntry.__struct_fields__)
    tiers = ", ".join(f"{n} {tier.name}" for n, tier in enumerate(Residency))
    assert f"bits: {tiers}" in tables(DOCS, "Snapshot entry")[0][7][4]


@pytest.mark.parametrize(
    ("heading", "magic", "version"),
    [
        ("Segment header", bytes_of.SEGMENT_MAGIC, bytes_of.SEGMENT_VERSION),
        ("Chunk header", manifest_format.CHUNK_MAGIC, manifest_format.CHUNK_VERSION),
        ("Snapshot header", manifest_format.SNAPSHOT_MAGIC, manifest_format.SNAPSHOT_VERSION),
    ],
)
def test_the_magics_and_versions(heading: str, magic: int, version: int) -> None:
    first, second, *_ = tables(DOCS, heading)[0]
    assert f"`0x{magic:X}`" in first[4]
    assert f"`{magic.to_bytes(8, 'little').decode()}`" in first[4]
    assert second[4] == str(version)


@pytest.mark.parametrize(
    ("heading", "flags"),
    [("Record header", RecordFlag), ("Segment footer", SegmentFlag), ("Chunk header", ChunkFlag)],
)
def test_the_flags_are_written_out(heading: str, flags: type[IntFlag]) -> None:
    rows = {row[1]: 1 << int(row[0]) for row in tables(DOCS, heading)[1]}
    assert rows == {str(flag.name): flag.value for flag in flags}


@pytest.mark.shows("journal 3.1")
def test_every_record_type_and_its_payload() -> None:
    rows = tables(DOCS, "Manifest record types")[0]
    assert [(int(row[0]), row[1]) for row in rows] == [(k.value, k.name) for k in ManifestType]
    for kind, row in zip(ManifestType, rows, strict=True):
        layout, names = manifest_format._PAYLOADS[kind]
        cells = [cell.split() for cell in row[2].split(", ")]
        numbers = [cell for cell in cells if len(cell) == 2]
        assert [name for name, _ in numbers] == list(names)
        assert "<" + "".join(CODES[code] for _, code in numbers) == plain(layout)
        texts = [name.removesuffix("_len") for name in names if name.endswith("_len")]
        assert [cell[0] for cell in cells if len(cell) == 1] == texts


def test_the_numbers_stand_in_the_text() -> None:
    text = " ".join(DOCS.split())
    assert f"At most {manifest_format.CHUNK_CAPACITY:,} bytes" in text
    assert f"after {manifest.SNAPSHOT_EVERY:,} records" in text
    assert ", ".join(f"{reason.value} {reason.name}" for reason in Reason) in text
    assert f"at most {manifest_format.MAX_KEY_BYTES} |" in DOCS
    assert f"at most {manifest_format.MAX_ETAG_BYTES} |" in DOCS
