"""`relay aof`: golden streams, damage, live streams, and one clear line for anything else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from relay.cli import run
from relay.cli.common import plural
from relay.journal.files import SegmentCheck
from relay.journal.journal import Append, Journal
from relay.journal.replay import read_manifest
from relay.journal.segment import SegmentPolicy, segment_path
from relay.journal.warm import Dictionaries, compress
from tests.fakes import FakeClock
from tests.journal.manifest_support import FIXTURES, STREAM_1, STREAM_2, silent

pytestmark = pytest.mark.shows("journal 1.11")

BAD = FIXTURES / "bad"
Output = pytest.CaptureFixture[str]


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Two sealed segments and an active one, its writer gone."""
    path = tmp_path / f"{1:020d}"
    journal = open_journal(path)
    for n in range(3):
        journal.append([Append(b"%d-%d" % (n, i)) for i in range(4)])
        journal.commit()
        if n < 2:
            journal.seal()
    journal.close()
    return path


def open_journal(path: Path) -> Journal:
    policy = SegmentPolicy(segment_bytes=1 << 16, slice_bytes=1 << 12)
    return Journal.open(str(path), 1, FakeClock(), policy, silent)


def lines_of(*arguments: str, capsys: Output, code: int = 0) -> list[str]:
    assert run(["aof", *arguments]) == code
    return capsys.readouterr().out.splitlines()


def payloads(path: Path, capsys: Output, code: int = 0) -> list[bytes]:
    rows = map(json.loads, lines_of("dump", str(path), "--json", capsys=capsys, code=code))
    return [bytes.fromhex(row["payload_hex"]) for row in rows]


ALL = [b"%d-%d" % (n, i) for n in range(3) for i in range(4)]

# -- golden streams ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "beside"), [(STREAM_1, FIXTURES), (STREAM_2, FIXTURES / "stream-2")]
)
def test_the_golden_streams_print_what_stands_beside_them(
    path: Path, beside: Path, capsys: Output
) -> None:
    for command, file in (("dump", "records"), ("manifest-inspect", "manifest")):
        expected = (beside / f"expected-{file}.jsonl").read_text().splitlines()
        assert lines_of(command, str(path), "--json", capsys=capsys) == expected
    assert lines_of("check", str(path), capsys=capsys) == ["OK"]


def test_a_snapshot_prints_its_entries(capsys: Output) -> None:
    path = str(STREAM_2 / "snapshot" / f"{1:020d}.snap")
    (line,) = lines_of("manifest-inspect", path, "--json", capsys=capsys)
    assert json.loads(line) == json.loads(
        (FIXTURES / "stream-2" / "expected-snapshot.json").read_text()
    )
    table = lines_of("manifest-inspect", path, capsys=capsys)
    assert len(table) == 3 and "tier1+tier2" in table[2]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("torn-tail.seg", "at 118: expected crc32 0234843c, found 1669b614: a torn tail"),
        ("flipped-record-header.seg", "offsets [3042, 3076) are lost"),
        ("footer-crc.seg", "at 2492: expected segment_crc64 0000000000000000, found"),
        ("manifest-chunk-crc.mlog", "at 48: expected chunk crc64"),
        ("manifest-version-9.mlog", "at 8: expected version 1, found 9"),
    ],
)
def test_check_names_the_fault_of_each_bad_file(name: str, problem: str, capsys: Output) -> None:
    before = (BAD / name).read_bytes()
    line, total = lines_of("check", str(BAD / name), capsys=capsys, code=3)
    assert problem in line and line.startswith(str(BAD / name))
    assert total == "1 error found"
    assert (BAD / name).read_bytes() == before


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


# -- streams of the journal ----------------------------------------------------------------


def test_a_stream_is_ok_closed_and_while_it_is_written(stream: Path, capsys: Output) -> None:
    assert lines_of("check", str(stream), capsys=capsys) == ["OK"]
    assert payloads(stream, capsys) == ALL
    journal = open_journal(stream)
    journal.append([Append(b"more")])
    journal.commit()
    assert lines_of("check", str(stream), capsys=capsys) == ["OK"]
    assert payloads(stream, capsys) == [*ALL, b"more"]
    journal.close()


def test_a_compressed_segment_is_read_in_place(stream: Path, capsys: Output) -> None:
    entry = read_manifest(str(stream), silent).catalog.entries[0]
    (stream / "warm").mkdir()
    source, target = segment_path(str(stream), 0), stream / "warm" / f"{0:020d}.seg.zst"
    check = SegmentCheck(source, entry.durable_bytes, entry.segment_crc64)
    compress(source, str(target), check, Dictionaries(str(stream / "warm")))
    os.rename(source, source + ".away")
    assert payloads(target, capsys) == ALL[:4]
    assert payloads(stream, capsys) == ALL
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    assert payloads(stream, capsys, code=3) == ALL[4:]
    assert lines_of("check", str(stream), capsys=capsys, code=3)[-1] != "OK"


def test_a_segment_that_is_nowhere_is_named(stream: Path, capsys: Output) -> None:
    os.rename(segment_path(str(stream), 1), stream / "away")
    lines = lines_of("check", str(stream), capsys=capsys, code=3)
    path = segment_path(str(stream), 1)
    assert lines == [f"{path}: missing, but in the manifest as tier0", "1 error found"]
    assert run(["aof", "dump", str(stream), "--json"]) == 3
    assert "segment 1: no copy on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("at", [60, 90, -45, -20])
def test_a_flipped_byte_anywhere_in_a_sealed_segment_is_found(
    stream: Path, at: int, capsys: Output
) -> None:
    path = Path(segment_path(str(stream), 1))
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    lines = lines_of("check", str(stream), capsys=capsys, code=3)
    assert all(str(path) in line for line in lines[:-1]) and len(lines) > 1
    assert lines[-1] == f"{plural(len(lines) - 1, 'error')} found"
    (row,) = lines_of("check", str(stream), "--json", capsys=capsys, code=3)
    assert json.loads(row)["problems"] == lines[:-1]


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
    shown = [line.split("  ")[-1].strip() for line in lines_of("dump", str(path), capsys=capsys)]
    assert shown == ["payload", r"{'a': 1, 'b': '\x1b'}", r"text\x07", "fffe"]


# -- anything else -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "dump", "manifest-inspect"])
def test_what_is_no_stream_is_one_line(command: str, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "x.seg").write_bytes(b"no segment")
    (tmp_path / "empty").mkdir()
    for name in ("missing", "x.seg", "empty"):
        assert run(["aof", command, str(tmp_path / name)]) != 0
        out, err = capsys.readouterr()
        text = out.splitlines()[:1] + err.splitlines()
        assert len(text) == 1 and str(tmp_path / name) in text[0]


def test_the_wrong_kind_of_file_says_which_command_takes_it(capsys: Output) -> None:
    assert run(["aof", "dump", str(STREAM_1 / "manifest" / f"{0:020d}.mlog")]) == 1
    assert "is a chunk; `relay aof manifest-inspect` prints it" in capsys.readouterr().err
    assert run(["aof", "manifest-inspect", str(STREAM_1 / "segments" / f"{0:020d}.seg")]) == 1
    assert "is a segment; `relay aof dump` prints it" in capsys.readouterr().err


def test_a_damaged_chunk_is_named_and_the_others_are_printed(
    tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / f"{1:020d}"
    shutil.copytree(STREAM_1, path)
    shutil.copy(BAD / "manifest-chunk-crc.mlog", path / "manifest" / f"{0:020d}.mlog")
    lines = lines_of("manifest-inspect", str(path), "--json", capsys=capsys, code=3)
    expected = (FIXTURES / "expected-manifest.jsonl").read_text().splitlines()
    assert lines == expected[8:]
