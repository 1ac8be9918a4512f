"""`relay dump`: golden files, live streams, damage; `relay build` makes a store again."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from relay.base import archive_pack
from relay.cli import run
from relay.journal.files import SegmentCheck
from relay.journal.format import crc64
from relay.journal.journal import Append
from relay.journal.manifest_format import MANIFEST_RECORD
from relay.journal.manifest_reader import chunk_path, read_manifest
from relay.journal.segment import segment_path
from relay.journal.warm import compress
from tests.box import Box
from tests.cli.conftest import open_journal
from tests.journal.manifest_support import FIXTURES, STREAM_1, STREAM_2, silent

pytestmark = pytest.mark.shows("journal 1.11")

BAD = FIXTURES / "bad"
Output = pytest.CaptureFixture[str]


def lines_of(*arguments: object, capsys: Output, code: int = 0) -> list[str]:
    assert run(["dump", *map(str, arguments)]) == code
    return capsys.readouterr().out.splitlines()


def payloads(path: Path, capsys: Output, code: int = 0) -> list[bytes]:
    rows = map(json.loads, lines_of(path, "--json", capsys=capsys, code=code))
    return [bytes.fromhex(row["payload_hex"]) for row in rows]


ALL = [b"%d-%d" % (n, i) for n in range(3) for i in range(4)]

# -- golden streams ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "beside"), [(STREAM_1, FIXTURES), (STREAM_2, FIXTURES / "stream-2")]
)
def test_the_golden_streams_print_what_stands_beside_them(
    path: Path, beside: Path, capsys: Output
) -> None:
    for part, file in ((path, "records"), (path / "manifest", "manifest")):
        expected = (beside / f"expected-{file}.jsonl").read_text().splitlines()
        assert lines_of(part, "--json", capsys=capsys) == expected


def test_a_snapshot_prints_its_entries(capsys: Output) -> None:
    path = STREAM_2 / "snapshot" / f"{1:020d}.snap"
    (line,) = lines_of(path, "--json", capsys=capsys)
    assert json.loads(line) == json.loads(
        (FIXTURES / "stream-2" / "expected-snapshot.json").read_text()
    )
    table = lines_of(path, capsys=capsys)
    assert len(table) == 3 and "residency tier1+tier2" in table[2]


@pytest.mark.parametrize(
    ("name", "left", "code"),
    [
        ("torn-tail.seg", [b"active", b"tail"], 3),
        ("flipped-record-header.seg", [b"tail"], 3),
        ("footer-crc.seg", [b"first", b"", b"odd"], 0),  # its records are good
    ],
)
def test_dump_steps_over_damage(name: str, left: list[bytes], code: int, capsys: Output) -> None:
    assert payloads(BAD / name, capsys, code)[:3] == left


# -- ledgers, search indexes, packed days ----------------------------------------------------


def test_a_ledger_is_dumped_table_by_table(box: Box, capsys: Output) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    path = box.path("ledger.db")
    rows = [json.loads(line) for line in lines_of(path, "--json", capsys=capsys)]
    (delivery,) = [
        row for row in rows if row["table"] == "deliveries" and row["recipient"] == "bob"
    ]
    assert (delivery["message_id"], delivery["state"]) == (sent, "written")
    (line,) = [line for line in lines_of(path, capsys=capsys) if line.startswith("deliveries ")]
    assert f"message_id {sent}, recipient bob, state written" in line


def test_a_packed_day_is_dumped_file_by_file(box: Box, capsys: Output) -> None:
    folder = box.path("archive", "2026-01-01", "alice")
    folder.mkdir(parents=True)
    (folder / "1767225600000000000-01.msg").write_text("TO: bob\n\nhi")
    *_, _ = archive_pack.pack(box.home, "2026-01-01")
    path = box.path("archive", "2026-01-01.tar.zst")
    (line,) = lines_of(path, "--json", capsys=capsys)
    name = "archive/2026-01-01/alice/1767225600000000000-01.msg"
    row = json.loads(line)
    assert (row["path"], row["bytes"], row["text"]) == (name, 11, "TO: bob\n\nhi")
    (line,) = lines_of(path, capsys=capsys)
    assert line.startswith("file ") and f"path {name}" in line and "bytes 11" in line


# -- streams of the journal ----------------------------------------------------------------


def test_a_compressed_segment_is_read_in_place(stream: Path, capsys: Output) -> None:
    entry = read_manifest(str(stream), silent).catalog.entries[0]
    (stream / "warm").mkdir()
    source, target = segment_path(str(stream), 0), stream / "warm" / f"{0:020d}.seg.zst"
    check = SegmentCheck(source, entry.durable_bytes, entry.segment_crc64)
    compress(source, str(target), check)
    os.rename(source, source + ".away")
    assert payloads(target, capsys) == ALL[:4]
    assert payloads(stream, capsys) == ALL
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    assert payloads(stream, capsys, code=3) == ALL[4:]


def test_a_segment_that_is_nowhere_is_named(stream: Path, capsys: Output) -> None:
    os.rename(segment_path(str(stream), 1), stream / "away")
    assert run(["dump", str(stream), "--json"]) == 3
    assert "segment 1: no copy on this machine" in capsys.readouterr().err


def test_a_record_that_becomes_whole_between_two_looks_is_no_damage(
    stream: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relay.journal.segment import FileSource

    read_at, torn = FileSource.read_at, []

    def half_written(self: FileSource, at: int, length: int) -> bytes:
        data = read_at(self, at, length)
        if at == 52 and len(data) > 100 and not torn and self.path.endswith("2.seg"):
            torn.append(at)
            return data[:70] + bytes(len(data) - 70)
        return data

    monkeypatch.setattr(FileSource, "read_at", half_written)
    assert payloads(stream, capsys) == ALL
    assert torn


def test_a_tail_that_grows_between_two_looks_is_being_written(
    stream: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relay.journal.segment import FileSource

    path = segment_path(str(stream), 2)
    at = 52 + 4 * (28 + 3)  # behind its records
    read_at, looks = FileSource.read_at, []

    def growing(self: FileSource, position: int, length: int) -> bytes:
        if self.path == path and position == at:
            looks.append(length)
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(b"half a record"[: len(looks)])
        return read_at(self, position, length)

    monkeypatch.setattr(FileSource, "read_at", growing)
    assert payloads(stream, capsys) == ALL
    assert looks


def test_payloads_for_people(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / f"{1:020d}"
    journal = open_journal(path)
    journal.append(
        [Append(b"\x82\xa1a\x01\xa1b\xa1\x1b"), Append(b"text\x07"), Append(b"\xff\xfe")]
    )
    journal.commit()
    journal.close()
    shown = [line.split("  ")[-1].strip() for line in lines_of(path, capsys=capsys)]
    assert shown == ["payload", r"{'a': 1, 'b': '\x1b'}", r"text\x07", "fffe"]


# -- manifests -----------------------------------------------------------------------------


def test_a_damaged_chunk_is_named_and_the_others_are_printed(
    tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / f"{1:020d}"
    shutil.copytree(STREAM_1, path)
    shutil.copy(BAD / "manifest-chunk-crc.mlog", path / "manifest" / f"{0:020d}.mlog")
    lines = lines_of(path / "manifest", "--json", capsys=capsys, code=3)
    expected = (FIXTURES / "expected-manifest.jsonl").read_text().splitlines()
    assert lines == expected[8:]


def said(*arguments: object, capsys: Output) -> tuple[int, str, str]:
    code = run(["dump", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def add(stream: Path, *records: bytes) -> None:
    """Records of another writer behind those of the manifest."""
    path = Path(chunk_path(str(stream), 0))
    data = path.read_bytes()
    end = int.from_bytes(data[40:48], "little")  # committed_len
    data = data[:end] + b"".join(records)
    header = bytearray(data[:64])
    header[32:48] = struct.pack("<QQ", len(data), len(data))
    header[48:56] = struct.pack("<Q", crc64(data[64:]))
    path.write_bytes(bytes(header) + data[64:])
    read_manifest(str(stream), lambda line: None)


def test_an_unknown_type_is_shown_with_its_flags(stream: Path, capsys: Output) -> None:
    payload = b"later"
    head = MANIFEST_RECORD.pack(99, 5, len(payload), 0, 0, 7, crc64(payload))
    add(stream, head + payload)
    _, out, _ = said(stream / "manifest", capsys=capsys)
    assert "99" in out.splitlines()[-1] and "flags 5" in out.splitlines()[-1]
    code, _, err = said(stream / "manifest", "--json", capsys=capsys)
    assert (code, err.endswith("1 records of unknown types: type 99 flags 5\n")) == (0, True)


@pytest.mark.parametrize("what", ["stream", "chunk"])
def test_a_wrong_base_record_is_warned_of(stream: Path, capsys: Output, what: str) -> None:
    path = Path(chunk_path(str(stream), 0))
    data = bytearray(path.read_bytes())
    data[24:32] = struct.pack("<Q", 3)
    path.write_bytes(data)
    code, out, err = said(path if what == "chunk" else stream / "manifest", capsys=capsys)
    assert code == 3
    assert "SegmentOpened" in out  # its records are printed all the same
    assert err == f"{path} at 24: expected base_record 0, found 3\n"
