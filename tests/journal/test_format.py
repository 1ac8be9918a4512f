"""The bytes of AOF2: golden files, records there and back, fuzz, and the page that says them."""

from __future__ import annotations

import json
from enum import IntFlag
from pathlib import Path
from struct import Struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.base.errors import FormatError, IntegrityError, VersionError
from relay.cli.dump import manifest_row, snapshot_row
from relay.journal import format as bytes_of
from relay.journal import manifest, manifest_format
from relay.journal.catalog import (
    CatalogSnapshot,
    Residency,
    SegmentEntry,
    decode_snapshot,
    encode_snapshot,
)
from relay.journal.format import (
    FOOTER,
    RECORD,
    SEGMENT_HEADER,
    Footer,
    RecordFlag,
    SegmentFlag,
    SegmentHeader,
    crc64,
)
from relay.journal.manifest_format import (
    CHUNK_HEADER,
    MANIFEST_RECORD,
    SNAPSHOT_ENTRY,
    SNAPSHOT_HEADER,
    ChunkFlag,
    ChunkHeader,
    ManifestRecord,
    ManifestType,
    Reason,
    decode_manifest_record,
)
from relay.journal.manifest_reader import FIRST_MANIFEST_RECORD, decode_chunk, salvage_chunk
from tests.documents import CODES, fields_of, plain, read_page, tables
from tests.journal.manifest_support import (
    FIXTURES,
    STREAM_1,
    STREAM_2,
    U32,
    U64,
    any_record,
    json_lines,
)

CHUNKS = [
    (STREAM_1 / "manifest" / f"{0:020d}.mlog", 0),
    (STREAM_1 / "manifest" / f"{1:020d}.mlog", 1),
    (STREAM_2 / "manifest" / f"{0:020d}.mlog", 0),
]
SNAPSHOT = STREAM_2 / "snapshot" / f"{1:020d}.snap"


def test_the_checksum_is_crc64_nvme() -> None:
    assert f"{crc64(b'123456789'):X}" == "AE8B14860A799888"
    assert crc64(b"6789", crc64(b"12345")) == crc64(b"123456789")


# -- golden files --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "beside"),
    [(CHUNKS[:2], FIXTURES), (CHUNKS[2:], FIXTURES / "stream-2")],
    ids=["stream", "stream-2"],
)
def test_the_golden_manifests_are_right(files: list[tuple[Path, int]], beside: Path) -> None:
    rows: list[dict[str, object]] = []
    for path, index in files:
        rows += map(manifest_row, decode_chunk(path.read_bytes(), str(path), index).records)
    expected = json_lines(beside / "expected-manifest.jsonl")
    assert rows == expected
    assert [list(row) for row in rows] == [list(row) for row in expected]  # fields in order


@pytest.mark.parametrize(("path", "index"), CHUNKS, ids=["0", "1", "stream-2"])
def test_the_same_values_give_the_same_chunk(path: Path, index: int) -> None:
    data = path.read_bytes()
    read = decode_chunk(data, "it", index)
    again = read.header.encode() + b"".join(record.encode() for record in read.records)
    assert again == data[: read.header.committed_len]
    assert not any(data[read.header.committed_len :])
    assert read.torn_bytes == 0


def test_the_golden_snapshot_there_and_back() -> None:
    data = SNAPSHOT.read_bytes()
    read = decode_snapshot(data, str(SNAPSHOT), 1)
    expected = json.loads((FIXTURES / "stream-2" / "expected-snapshot.json").read_text())
    assert snapshot_row(read) == expected
    assert encode_snapshot(read.chunk_index, read.chunk_offset, read.entries) == data


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("manifest-chunk-crc.mlog", IntegrityError, "at 48: expected chunk crc64 "),
        ("manifest-version-9.mlog", VersionError, "at 8: expected version 1, found 9"),
    ],
)
def test_the_bad_chunks_are_refused_for_their_fault(
    name: str, fault: type[FormatError], says: str
) -> None:
    path = FIXTURES / "bad" / name
    with pytest.raises(fault) as caught:
        decode_chunk(path.read_bytes(), str(path), 0)
    assert str(caught.value).startswith(f"{path} {says}")


def test_a_flipped_record_header_is_known_by_the_chunks_checksum_alone() -> None:
    # The golden fault: logical_offset of record 0. Its payload's crc is right, so no record counts.
    data = (FIXTURES / "bad" / "manifest-chunk-crc.mlog").read_bytes()
    record, _ = decode_manifest_record(data, FIRST_MANIFEST_RECORD, len(data), "it")
    assert record.logical_offset == 1
    assert salvage_chunk(data, "it") == ([], [])


# -- there and back ------------------------------------------------------------------------


@pytest.mark.shows("journal 3.1")
@given(any_record())
def test_a_manifest_record_there_and_back(record: ManifestRecord) -> None:
    data = record.encode()
    assert decode_manifest_record(b"--" + data + b"--", 2, 2 + len(data), "it") == (
        record,
        2 + len(data),
    )


@given(any_record())
def test_any_byte_missing_is_an_error(record: ManifestRecord) -> None:
    data = record.encode()
    for size in range(len(data)):
        with pytest.raises(FormatError):
            decode_manifest_record(data[:size], 0, size, "it")


@given(any_record(), st.data())
def test_a_flipped_payload_byte_is_found(record: ManifestRecord, data: st.DataObject) -> None:
    whole = bytearray(record.encode())
    head = manifest_format.MANIFEST_RECORD.size
    if len(whole) == head:
        return
    at = data.draw(st.integers(head, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(IntegrityError) as caught:
        decode_manifest_record(bytes(whole), 0, len(whole), "it")
    assert (caught.value.path, caught.value.offset) == ("it", head)


ENTRIES = st.lists(
    st.builds(
        SegmentEntry,
        *[U64] * 7,
        st.integers(0, 7).map(Residency),
        st.booleans(),
        U32,
        st.text(max_size=46),  # up to 4 bytes a character
        st.text(max_size=16),
    ),
    unique_by=lambda entry: entry.segment_id,
    max_size=5,
).map(lambda entries: sorted(entries, key=lambda entry: entry.segment_id))


@given(ENTRIES, U64, U64)
def test_a_snapshot_there_and_back(entries: list[SegmentEntry], index: int, offset: int) -> None:
    data = encode_snapshot(index, offset, reversed(entries))
    read = decode_snapshot(data, "it", 3)
    assert read == CatalogSnapshot(3, index, offset, tuple(entries))
    assert len(data) == 32 + 320 * len(entries) + 8


def test_a_key_that_no_entry_holds_is_refused_before_it_is_written() -> None:
    fits = SegmentEntry(0, 0, key="k" * 184, etag="e" * 64)
    assert decode_snapshot(encode_snapshot(0, 64, [fits]), "it", 1).entries == (fits,)
    for wrong in (SegmentEntry(0, 0, key="k" * 185), SegmentEntry(0, 0, etag="é" * 33)):
        with pytest.raises(ValueError, match="segment 0: key or etag is too long"):
            encode_snapshot(0, 64, [wrong])


# -- damage --------------------------------------------------------------------------------

CHUNK = CHUNKS[0][0].read_bytes()


def resealed(data: bytes) -> bytes:
    """A chunk whose checksum is right whatever stands in it."""
    end = int.from_bytes(data[40:48], "little")
    return data[:48] + crc64(data[64:end]).to_bytes(8, "little") + data[56:]


def refused(data: bytes) -> None:
    """It is read, or refused in one line that names file and offset."""
    for read in (lambda: decode_chunk(data, "it", 0), lambda: decode_snapshot(data, "it", 0)):
        try:
            read()
        except FormatError as exc:
            assert str(exc).startswith("it at ") and "\n" not in str(exc)
    salvage_chunk(data, "it")


def test_a_tail_in_front_of_what_is_committed_is_a_fault() -> None:
    end = int.from_bytes(CHUNK[40:48], "little")
    wrong = CHUNK[:32] + (end - 1).to_bytes(8, "little") + CHUNK[40:]
    with pytest.raises(FormatError, match=f"it at 32: expected tail_offset of {end} and more"):
        decode_chunk(wrong, "it", 0)


@pytest.mark.parametrize("value", [0x00, 0x01, 0x7F, 0xFF])
def test_every_byte_of_a_chunk_overwritten(value: int) -> None:
    for at in range(len(CHUNK)):
        damaged = CHUNK[:at] + bytes([value]) + CHUNK[at + 1 :]
        refused(damaged)
        refused(resealed(damaged))


def test_every_flipped_bit_of_what_counts_in_a_chunk_is_found() -> None:
    free = range(32, 40), range(56, 64)  # tail_offset may be higher; flags are not checked
    for at in range(len(CHUNK)):
        damaged = CHUNK[:at] + bytes([CHUNK[at] ^ 1 << at % 8]) + CHUNK[at + 1 :]
        if any(at in part for part in free):
            continue
        with pytest.raises(FormatError):
            decode_chunk(damaged, "it", 0, 0)


def test_every_flipped_bit_of_a_snapshot_is_found() -> None:
    data = SNAPSHOT.read_bytes()
    for at in range(len(data)):
        with pytest.raises(FormatError):
            decode_snapshot(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :], "it", 1)


def test_a_file_cut_short_is_never_taken() -> None:
    data = SNAPSHOT.read_bytes()
    for size in range(len(data)):
        with pytest.raises(FormatError):
            decode_snapshot(data[:size], "it", 1)
    for size in range(len(CHUNK)):
        with pytest.raises(FormatError):
            decode_chunk(CHUNK[:size], "it", 0)


@settings(max_examples=300)
@given(st.binary(max_size=400), st.sampled_from([0, 12, 32, 64]))
def test_any_bytes_behind_a_good_beginning(rest: bytes, kept: int) -> None:
    for good in (CHUNK, SNAPSHOT.read_bytes()):
        refused(good[:kept] + rest)
        refused(resealed(good[:64] + rest) if len(rest) > 8 else rest)
    snapshot = SNAPSHOT.read_bytes()[:32] + rest.ljust(640, b"\xff")[:640]
    refused(snapshot + crc64(snapshot).to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("at", "value", "expected"),
    [
        (88, 8, "residency to 7"),
        (89, 2, "sealed to 1"),
        (90, 1, "zeros"),
        (96, 185, "key_len to 184"),
        (98, 65, "etag_len to 64"),
        (100, 1, "zeros"),
        (32, 1, "a segment after 1"),
    ],
)
def test_a_value_outside_its_field_is_named(at: int, value: int, expected: str) -> None:
    data = bytearray(SNAPSHOT.read_bytes()[:-8])
    data[at] = value
    with pytest.raises(FormatError, match=expected) as caught:
        decode_snapshot(bytes(data) + crc64(bytes(data)).to_bytes(8, "little"), "it", 1)
    assert not isinstance(caught.value, IntegrityError)


DOCS = read_page("formats/aof2.md")


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
    named = fields_of(DOCS, heading, struct)
    assert fields is None or named == list(fields)


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
