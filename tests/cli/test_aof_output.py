"""What `relay aof` tells beside damage: footer against manifest, reasons, flags, base_record."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from relay.cli import run
from relay.journal.format import FOOTER, crc64
from relay.journal.journal import Append, Journal
from relay.journal.manifest_format import MANIFEST_RECORD, ManifestRecord, ManifestType
from relay.journal.replay import chunk_path, read_manifest
from relay.journal.segment import SegmentPolicy, segment_path
from tests.fakes import FakeClock
from tests.journal.manifest_support import silent

pytestmark = pytest.mark.shows("journal 1.10")

Output = pytest.CaptureFixture[str]


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """One sealed segment and an active one, its writer gone."""
    path = tmp_path / f"{1:020d}"
    policy = SegmentPolicy(segment_bytes=1 << 16, slice_bytes=1 << 12)
    journal = Journal.open(str(path), 1, FakeClock(), policy, silent)
    journal.append([Append(b"x")])
    journal.commit()
    journal.raise_ext_id(7)
    journal.seal()
    journal.append([Append(b"y")])
    journal.commit()
    journal.close()
    return path


def said(*arguments: object, capsys: Output) -> tuple[int, str, str]:
    code = run(["aof", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("at", "value", "expected"),
    [
        (24, 8, "ext_id 7 by the manifest, found 8"),
        (32, 0, "flags 1 by the manifest, found 0"),
        (32, 9, "flags 1 by the manifest, found 9"),
    ],
)
def test_a_sealed_footer_is_compared_with_the_manifest(
    stream: Path, capsys: Output, at: int, value: int, expected: str
) -> None:
    assert said("check", stream, capsys=capsys)[0] == 0
    path = Path(segment_path(str(stream), 0))
    data = bytearray(path.read_bytes())
    begin = len(data) - FOOTER.size + at
    data[begin : begin + 8] = struct.pack("<Q", value)
    path.write_bytes(data)
    code, out, _ = said("check", stream, capsys=capsys)
    assert (code, out.splitlines()[0]) == (3, f"{path} at {begin}: expected {expected}")


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


def test_reason_codes_are_said_in_words(stream: Path, capsys: Output) -> None:
    codes = [
        (ManifestType.CompressionFailed, 1, "1 (permanent: the segment is corrupt)"),
        (ManifestType.UploadFailed, 2, "2 (authentication: the operator must act)"),
        (ManifestType.UploadFailed, 3, "3 (bucket or network unavailable)"),
        (ManifestType.HydrationFailed, 4, "4 (the Tier 2 object is missing)"),
        (ManifestType.HydrationFailed, 0, "0 (transient: retried)"),
        (ManifestType.CompressionFailed, 9, "9 (unknown)"),
    ]
    for kind, code, _ in codes:
        fields: dict[str, int | str | bytes] = {"reason_code": code}
        if kind is ManifestType.UploadFailed:
            fields["key"] = "k"
        add(stream, ManifestRecord(kind, 0, 0, 5, fields).encode())
    code, out, err = said("manifest-inspect", stream, capsys=capsys)
    assert (code, err) == (0, "")
    for line, (kind, _, words) in zip(out.splitlines()[-len(codes) :], codes, strict=True):
        assert kind.name in line and f"reason_code {words}" in line
    _, out, _ = said("manifest-inspect", stream, "--json", capsys=capsys)
    assert [json.loads(line)["reason_code"] for line in out.splitlines()[-len(codes) :]] == [
        code for _, code, _ in codes
    ]


def test_an_unknown_type_is_shown_with_its_flags(stream: Path, capsys: Output) -> None:
    payload = b"later"
    head = MANIFEST_RECORD.pack(99, 5, len(payload), 0, 0, 7, crc64(payload))
    add(stream, head + payload)
    _, out, _ = said("manifest-inspect", stream, capsys=capsys)
    assert "99" in out.splitlines()[-1] and "flags 5" in out.splitlines()[-1]
    code, _, err = said("manifest-inspect", stream, "--json", capsys=capsys)
    assert (code, err.endswith("1 records of unknown types: type 99 flags 5\n")) == (0, True)


@pytest.mark.parametrize("what", ["stream", "chunk"])
def test_a_wrong_base_record_is_warned_of(stream: Path, capsys: Output, what: str) -> None:
    path = Path(chunk_path(str(stream), 0))
    data = bytearray(path.read_bytes())
    data[24:32] = struct.pack("<Q", 3)
    path.write_bytes(data)
    code, out, err = said("manifest-inspect", path if what == "chunk" else stream, capsys=capsys)
    assert code == 3
    assert "SegmentOpened" in out  # its records are printed all the same
    assert err == f"{path} at 24: expected base_record 0, found 3\n"
