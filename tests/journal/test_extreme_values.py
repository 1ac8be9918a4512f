"""Numbers and names at the end of 64 bits, each vouched for by a right checksum: one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.base.errors import FormatError
from relay.cli import run
from relay.journal.format import Footer, SegmentFlag, SegmentHeader, crc64
from relay.journal.format import encode_record as record_of
from relay.journal.manifest import Manifest
from relay.journal.manifest_format import ManifestRecord, ManifestType
from relay.journal.manifest_reader import chunk_path, decode_chunk, load_chunk
from relay.journal.segment import FIRST_RECORD, FileSource, segment_path
from tests.journal.manifest_support import opened, said, sealed
from tests.journal.support import Stream, payloads, put

HIGHEST = 2**64 - 1


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    """A sealed segment and an active one."""
    made = Stream(tmp_path)
    journal = made.open()
    put(journal, b"one", b"two")
    journal.seal()
    put(journal, b"three")
    made.crash()
    return made


def told(stream: Stream, *records: ManifestRecord) -> None:
    """The manifest has these as well."""
    manifest = Manifest.open(stream.folder, 1, stream.clock, lambda line: None)
    manifest.append(*records)
    manifest.close()


def files(stream: Stream) -> dict[str, bytes]:
    folder = Path(stream.folder)
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ((opened(HIGHEST, 500),), "segment_id of segment"),
        ((opened(2, HIGHEST),), "end_offset of segment 2"),
        ((opened(2, 500), sealed(2, 500, durable=2**63 + 5)), "end_offset of segment 2"),
        ((opened(2, 500, at_ms=HIGHEST),), "creation_ts_ms of segment 2"),
    ],
)
def test_a_manifest_behind_which_nothing_fits_is_refused(
    stream: Stream, records: tuple[ManifestRecord, ...], says: str
) -> None:
    told(stream, *records)
    before = files(stream)
    with pytest.raises(FormatError, match=says) as caught:
        stream.open()
    assert "\n" not in str(caught.value)
    assert files(stream) == before


@pytest.mark.parametrize("number", ["9" * 20, "²" * 20, "٣" * 20])
def test_a_name_that_is_no_number_of_64_bits_is_a_strangers(stream: Stream, number: str) -> None:
    for folder, suffix in (
        ("segments", ".seg"),
        ("manifest", ".mlog"),
        ("manifest", ".mlog.bad"),
        ("snapshot", ".snap"),
    ):
        Path(stream.folder, folder, number + suffix).write_bytes(b"not ours")
    journal = stream.open()
    assert payloads(journal) == [b"one", b"two", b"three"]
    put(journal, b"four")
    journal.manifest.snapshot()
    assert run(["check", stream.folder]) == 0


def test_a_segment_at_the_end_of_all_offsets_is_looked_at_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = 2**64 - 100
    body = SegmentHeader(1, 0, 5).encode() + record_of(base, 5, 0, b"one")
    body += b"\xff" * 40  # and no record behind it
    footer = Footer(1, len(body), crc64(body), 0, SegmentFlag.SEALED)
    path = tmp_path / f"{0:020d}.seg"
    path.write_bytes(body + footer.encode())
    for command in ("check", "dump"):
        assert run([command, str(path)]) == 3
        assert f"{path} at {FIRST_RECORD + 31}: " in "".join(capsys.readouterr())


def test_a_segment_that_claims_to_be_huge_takes_no_memory(stream: Stream) -> None:
    """The bytes that are asked for are never more than the file has."""
    source = FileSource(segment_path(stream.folder, 0))
    try:
        assert source.read_at(0, 2**62) == Path(source.path).read_bytes()
        assert source.read_at(2**70, 2**62) == b""
    finally:
        source.close()


def test_jobs_are_counted_on_from_the_last_number(stream: Stream) -> None:
    told(stream, said(ManifestType.CompressionStarted, 0, job_id=2**32 - 1))
    journal = stream.open()
    number = journal.manifest.catalog.next_job_id
    told_next = said(ManifestType.CompressionStarted, 0, job_id=number)
    journal.manifest.append(told_next)
    assert number == 0


def test_a_key_that_no_snapshot_holds_does_not_end_the_stream(stream: Stream) -> None:
    """Another writer may have one; it is in the manifest, and stays there."""
    long = said(ManifestType.UploadDone, 0, key="k" * 400, etag="e").encode()
    path = chunk_path(stream.folder, 0)
    data = load_chunk(path)
    head = decode_chunk(data, path, 0).header
    body = data[64 : head.committed_len] + long
    end = 64 + len(body)
    head = head._replace(tail_offset=end, committed_len=end, chunk_crc64=crc64(body))
    Path(path).write_bytes(head.encode() + body)
    journal = stream.open()
    journal.manifest._since_snapshot = 5_000
    journal.note_checkpoint(0)
    assert any("cannot write a snapshot of the manifest" in line for line in stream.warned)
    assert payloads(journal) == [b"one", b"two", b"three"]
