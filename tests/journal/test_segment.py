"""Segments: golden bytes, walking and finding records, and what a broken one is found to be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.journal.format import (
    FOOTER,
    RECORD,
    Footer,
    HeaderCrcs,
    Record,
    RecordFlag,
    SegmentFlag,
    decode_records,
    decode_segment_header,
    encode_record,
    encode_records,
    find_record,
    scan,
)
from relay.journal.journal import Journal, JournalReader
from relay.journal.recover import walk
from relay.journal.segment import (
    FIRST_RECORD,
    ActiveSegment,
    FileSource,
    SegmentPolicy,
    read_records,
)
from tests.fakes import FakeClock
from tests.journal.manifest_support import FIXTURES, STREAM_1, STREAM_2, json_lines


def expected(path: Path) -> list[Record]:
    return [
        Record(r["logical_offset"], r["append_ts_ms"], r["flags"], bytes.fromhex(r["payload_hex"]))
        for r in json_lines(path)
    ]


def stream_of(tmp_path: Path, *segments: Path) -> str:
    """A stream that has these files as its segments, and no manifest."""
    folder = tmp_path / f"{1:020d}" / "segments"
    folder.mkdir(parents=True, exist_ok=True)
    for source in segments:
        number = decode_segment_header(source.read_bytes(), str(source)).segment_id
        shutil.copy(source, folder / f"{number:020d}.seg")
    return str(folder.parent)


@pytest.mark.shows("journal 1.1")
@pytest.mark.parametrize(
    ("stream", "rows"),
    [
        (STREAM_1, FIXTURES / "expected-records.jsonl"),
        (STREAM_2, FIXTURES / "stream-2" / "expected-records.jsonl"),
    ],
    ids=["1", "2"],
)
def test_the_golden_streams_read_as_they_must(stream: Path, rows: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stream, tmp_path / stream.name)
    shutil.rmtree(copy / "snapshot", ignore_errors=True)  # stream 2's speaks of another stream
    assert list(JournalReader(str(copy)).read()) == expected(rows)


GOLDEN_FILES = sorted(FIXTURES.glob("stream*/*/segments/*.seg"))


@pytest.mark.parametrize(
    "golden", GOLDEN_FILES, ids=lambda path: f"{path.parts[-3][-1]}-{path.stem[-1]}"
)
def test_the_same_records_give_the_same_file(golden: Path, tmp_path: Path) -> None:
    there = golden.read_bytes()
    header = decode_segment_header(there, str(golden))
    source = FileSource(str(golden))
    base = RECORD.unpack_from(there, FIRST_RECORD)[2]
    found = walk(source._fd, base, header.encode())
    records = list(read_records(source, base, base, base + found.position - FIRST_RECORD))
    source.close()

    stream_of(tmp_path)
    made = ActiveSegment.create(str(tmp_path / f"{1:020d}"), header, base, FIRST_RECORD)
    for record in records:
        made.write(encode_record(*record), 1)
    if len(there) == found.position + FOOTER.size:
        footer = Footer(*FOOTER.unpack(there[-FOOTER.size :]))
        made.ext_id = footer.ext_id
        assert made.seal(SegmentFlag(footer.flags)) == footer
    else:
        made.extend(len(there))
        made.close()
    assert Path(made.path).read_bytes() == there


@pytest.mark.shows("journal 2.3", "journal 2.6")
@pytest.mark.parametrize(
    ("name", "covered", "kept", "said", "aside"),
    [
        ("torn-tail", 0, 2, "a torn tail, kept in", ".torn"),
        ("torn-tail", 7_087, 2, "damage; 2 records salvaged", ".bad"),  # a checkpoint covers it
        ("flipped-record-header", 0, 1, "1 records salvaged, lost offsets: [3042, 3076)", ".bad"),
        ("footer-crc", 0, 4, "expected segment_crc64", ""),
    ],
)
def test_a_broken_segment_is_told_kept_aside_and_good_from_then_on(
    tmp_path: Path, name: str, covered: int, kept: int, said: str, aside: str
) -> None:
    broken = (FIXTURES / "bad" / f"{name}.seg").read_bytes()
    folder = stream_of(tmp_path, FIXTURES / "bad" / f"{name}.seg")
    (path,) = Path(folder, "segments").iterdir()
    policy = SegmentPolicy(slice_bytes=512)
    warned: list[str] = []
    journal = Journal.open(folder, 1, FakeClock(), policy, warned.append, covered=covered)
    payloads = [record.payload for record in journal.read()]
    journal.close()
    assert len(payloads) == kept
    assert said in next(line for line in warned if ".seg" in line and "begins at" not in line)
    assert any("are lost" in line for line in warned) is (aside == ".bad")
    end = FIRST_RECORD + sum(RECORD.size + len(payload) for payload in payloads)
    if aside == ".torn":
        assert Path(f"{path}.torn").read_bytes() == broken[end:].rstrip(b"\0")
        assert path.read_bytes() == broken[:end].ljust(len(broken), b"\0")
    elif aside:
        assert Path(f"{path}.bad").read_bytes() == broken
    else:
        assert path.read_bytes() == broken  # reported, and not erased
    again: list[str] = []
    journal = Journal.open(folder, 1, FakeClock(), policy, again.append)
    assert [record.payload for record in journal.read()] == payloads
    assert not [line for line in again if "lost" not in line]
    journal.close()


@given(st.lists(st.binary(max_size=80), max_size=12), st.integers(0, 1 << 40))
def test_encoding_scanning_and_decoding_agree(payloads: list[bytes], base: int) -> None:
    starts = HeaderCrcs()
    given = [(payload, len(payload) % 4, 0) for payload in payloads]
    pieces, offsets, end = encode_records(given, base, 7, starts)
    data = b"".join(pieces)
    records = [
        Record(at, 7, flags | (RecordFlag.JOINED if number else 0), one)
        for number, (at, (one, flags, _)) in enumerate(zip(offsets, given, strict=True))
    ]
    assert data == b"".join(encode_record(*record) for record in records)
    assert end == base + len(data)
    assert scan(data + bytes(100), len(data) + 100, base, starts) == (len(data), len(records))
    assert decode_records(data, base, starts) == records


@given(
    st.binary(max_size=300),
    st.one_of(st.integers(1, 1 << 18), st.integers(0, 1 << 50)),
    st.integers(0, 500),
    st.binary(max_size=40),
)
def test_a_record_is_found_anywhere(junk: bytes, shift: int, zeros: int, payload: bytes) -> None:
    front = junk + bytes(zeros)
    record = encode_record(shift + len(front), 1, 0, payload)
    assert find_record(front + record + junk, 0, shift, HeaderCrcs()) == len(front)
    assert find_record(front + record[:-1], 0, shift, HeaderCrcs()) == -1 or not record[-1]
    moved = encode_record(shift + len(front) + 1, 1, 0, payload)  # it is another position's
    assert find_record(front + moved, 0, shift, HeaderCrcs()) == -1


@pytest.mark.shows("journal 1.2")
def test_one_flipped_bit_anywhere_is_seen() -> None:
    record = encode_record(0, 1_780_000_000_000, 1, b"payload")
    for bit in range(8 * len(record)):
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << bit % 8
        assert scan(flipped, len(flipped), 0, HeaderCrcs()) == (0, 0)


def test_a_good_record_in_another_place_is_none() -> None:
    """What an older write left there must not come back to life."""
    record = encode_record(100, 1, 0, b"payload")
    assert scan(record, len(record), 100, HeaderCrcs()) == (len(record), 1)
    assert scan(record, len(record), 99, HeaderCrcs()) == (0, 0)
    assert decode_records(record, 101, HeaderCrcs()) == []
