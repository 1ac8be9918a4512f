"""Replay: where it starts, where it stops, what it says, and how damage is mended."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from relay.base.errors import RelayError
from relay.journal import manifest as manifests
from relay.journal import manifest_reader
from relay.journal.catalog import (
    encode_snapshot,
    read_snapshot,
    snapshot_ids,
    snapshot_path,
)
from relay.journal.manifest_format import (
    ChunkFlag,
    ManifestRecord,
    ManifestType,
    decode_chunk_header,
)
from relay.journal.manifest_reader import chunk_indexes, decode_chunk, load_chunk, read_manifest
from tests.disk import flip, killed_before
from tests.journal.manifest_support import (
    STREAM_1,
    begin,
    entries_of,
    opened,
    path_of,
    said,
    sealed,
    silent,
    stored,
)

RECORDS = [record for n in range(12) for record in (opened(n, n * 100), sealed(n, n * 100))]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four or five records; snapshots are taken by the tests."""
    monkeypatch.setattr(manifests, "CHUNK_CAPACITY", 64 + 300)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No snapshot when a chunk is full."""
    monkeypatch.setattr(manifests.Manifest, "_due", lambda _self: False)


@pytest.fixture
def stream(tmp_path: Path, by_hand: None) -> str:
    """Five chunks and more, without a snapshot."""
    folder = str(tmp_path / f"{1:020d}")
    manifest = begin(folder)
    for record in RECORDS:
        manifest.append(record)
    manifest.close()
    assert len(chunk_indexes(folder)) > 4 and not snapshot_ids(folder)
    return folder


def records_in(stream: str, index: int) -> list[ManifestRecord]:
    path = path_of(stream, index)
    return decode_chunk(load_chunk(path), path, index).records


# -- damage --------------------------------------------------------------------------------


def test_a_flipped_payload_ends_replay_at_the_record_before(stream: str) -> None:
    lines: list[str] = []
    path = path_of(stream, 2)
    before = len(records_in(stream, 0)) + len(records_in(stream, 1))
    flip(path, 64 + len(RECORDS[before].encode()) + 40)  # the second record's payload
    view = read_manifest(stream, lines.append)
    assert view.damaged
    assert view.catalog.entries == entries_of(RECORDS[: before + 1])
    assert len(lines) == 1
    assert re.fullmatch(
        rf"{path} at 48: expected chunk crc64 \w{{16}}, found \w{{16}}; "
        "replay stops there, 1 records of this chunk used",
        lines[0],
    )


@pytest.mark.shows("journal 3.2")
@pytest.mark.parametrize(
    ("at", "fault"),
    [
        (0, "at 0: expected magic 414f46324d4c4f47"),
        (8, "at 8: expected version 1, found 0"),
        (12, "at 12: expected header_len 64, found 65"),
        (16, "at 16: expected chunk_index 2, found 3"),
        (24, "at 24: expected base_record"),
        (40, "at 40: expected committed_len from 64 to"),
        (48, "at 48: expected chunk crc64"),
    ],
)
def test_each_field_of_a_chunks_header_is_verified(stream: str, at: int, fault: str) -> None:
    lines: list[str] = []
    path = path_of(stream, 2)
    flip(path, at)
    before = len(records_in(stream, 0)) + len(records_in(stream, 1))
    seen = manifest_reader.Replay(stream, lines.append).run()
    assert seen.damaged_from == 2 and len(seen.records) >= before
    assert seen.records == RECORDS[: len(seen.records)]
    assert lines[0].startswith(f"{path} {fault}")


def test_nothing_of_a_chunk_from_another_place_is_used(stream: str) -> None:
    elsewhere = bytearray(path_of(stream, 3).read_bytes())
    elsewhere[-1] ^= 1  # its last record is bad: those before it would pass for good
    path_of(stream, 2).write_bytes(elsewhere)
    before = len(records_in(stream, 0)) + len(records_in(stream, 1))
    view = read_manifest(stream, silent)
    assert view.damaged and view.records == RECORDS[:before]


@pytest.mark.parametrize("index", [0, 2])
def test_a_missing_chunk_ends_replay(stream: str, index: int) -> None:
    lines: list[str] = []
    before = sum(len(records_in(stream, n)) for n in range(index))
    path_of(stream, index).unlink()
    view = read_manifest(stream, lines.append)
    assert view.damaged and view.records == RECORDS[:before]
    assert lines == [f"{path_of(stream, index)}: this chunk is missing; replay stops before it"]


def test_segments_without_a_manifest_are_damage(tmp_path: Path) -> None:
    folder = tmp_path / f"{1:020d}"
    (folder / "segments").mkdir(parents=True)
    assert not read_manifest(str(folder), silent).damaged
    (folder / "segments" / f"{0:020d}.seg").write_bytes(b"")
    assert read_manifest(str(folder), silent).damaged
    manifest = begin(str(folder))
    assert manifest.damaged and manifest.entries() == []
    manifest.rebuild([opened(0)])
    manifest.close()
    again = begin(str(folder))
    assert not again.damaged and [entry.segment_id for entry in again.entries()] == [0]
    again.close()


# -- rebuilding ----------------------------------------------------------------------------


def damaged(stream: str) -> list[ManifestRecord]:
    """Damage chunk 2 of the stream; what is left of the records: before it, and behind it."""
    flip(path_of(stream, 2), 64 + 8)
    kept = [record for n in chunk_indexes(stream) if n != 2 for record in records_in(stream, n)]
    return kept


def test_rebuilding_takes_what_is_good_and_sets_the_rest_aside(stream: str) -> None:
    kept = damaged(stream)
    whole = {path.name: path.read_bytes() for path in Path(stream, "manifest").iterdir()}
    manifest = begin(stream)
    assert manifest.damaged
    with pytest.raises(RelayError, match="damaged; rebuild it first"):
        manifest.snapshot()
    missing = [record for record in RECORDS if record not in kept]
    manifest.rebuild(missing)
    assert not manifest.damaged
    assert manifest.catalog.entries == entries_of(RECORDS)
    manifest.append(opened(12, 1200))
    manifest.close()
    there = {path.name: path.read_bytes() for path in Path(stream, "manifest").iterdir()}
    for name, data in whole.items():  # nothing is gone; the newest took more
        assert there.get(name + ".bad", there.get(name, b""))[64:].startswith(data[64:])
    assert f"{2:020d}.mlog.bad" in there and f"{2:020d}.mlog" not in there
    again = begin(stream)
    assert not again.damaged and again.catalog.entries == entries_of([*RECORDS, opened(12, 1200)])
    again.close()


def test_records_before_the_rebuilding_do_not_hide_the_damage(stream: str) -> None:
    damaged(stream)
    for segment in (20, 21):
        manifest = begin(stream)
        assert manifest.damaged
        manifest.append(opened(segment, segment))
        manifest.close()
    newest = chunk_indexes(stream)[-1]
    assert records_in(stream, newest) == [opened(20, 20), opened(21, 21)]  # one chunk goes on
    manifest = begin(stream)
    manifest.rebuild([])
    assert {20, 21} <= manifest.catalog.entries.keys()
    manifest.close()


def test_killed_while_rebuilding_the_damage_is_found_again(stream: str, tmp_path: Path) -> None:
    damaged(stream)
    missing = RECORDS[8:16]
    damaged_still, number, was_killed = 0, 0, True
    while was_killed:
        folder = str(shutil.copytree(stream, tmp_path / str(number) / f"{1:020d}"))
        with killed_before(number + 1) as calls:
            begin(folder).rebuild(missing)
        was_killed = len(calls) > number
        number += 1
        manifest = begin(folder)
        if manifest.damaged:
            damaged_still += 1
            manifest.rebuild(missing)
        assert manifest.catalog.entries == entries_of(RECORDS)
        manifest.close()
    assert 10 < damaged_still < number


# -- snapshots -----------------------------------------------------------------------------


@pytest.mark.shows("journal 3.6")
def test_replay_starts_at_the_newest_good_snapshot(stream: str) -> None:
    manifest = begin(stream)
    assert manifest.snapshot() == 1
    manifest.append(opened(12, 1200))
    assert manifest.snapshot() == 2
    manifest.append(sealed(12, 1200))
    entries = manifest.entries()
    manifest.close()
    assert [r.name for r in read_manifest(stream, silent).records] == [
        "SnapshotMarker",
        "SealSegment",
    ]
    flip(Path(snapshot_path(stream, 2)), 40)
    lines: list[str] = []
    seen = manifest_reader.Replay(stream, lines.append).run()
    assert seen.snapshot is not None and seen.snapshot.snapshot_id == 1
    assert len(lines) == 1 and lines[0].endswith("this snapshot is not used")
    flip(Path(snapshot_path(stream, 1)), 40)
    whole = manifest_reader.Replay(stream, silent).run()
    assert whole.snapshot is None and len(whole.records) == len(RECORDS) + 4
    for each in (seen, whole):
        assert list(each.catalog.entries.values()) == entries and not each.damaged


def test_a_snapshot_names_its_position_in_a_marker(stream: str) -> None:
    manifest = begin(stream)
    manifest.snapshot()
    manifest.close()
    taken = read_snapshot(stream, 1)
    (marker,) = read_manifest(stream, silent).records
    assert marker.fields == {
        "chunk_index": taken.chunk_index,
        "chunk_offset": taken.chunk_offset,
        "snapshot_id": 1,
    }
    assert list(taken.entries) == list(read_manifest(stream, silent).catalog.entries.values())


def test_a_snapshot_behind_the_end_of_the_log_is_not_used(stream: str) -> None:
    lines: list[str] = []
    index = chunk_indexes(stream)[-1]
    os.makedirs(os.path.join(stream, "snapshot"), exist_ok=True)
    Path(snapshot_path(stream, 9)).write_bytes(encode_snapshot(index, 5000, []))
    view = read_manifest(stream, lines.append)
    assert view.records == RECORDS and not view.damaged
    assert f"chunk {index} at 5000 is not the end of a record" in lines[0]
    manifest = begin(stream)
    assert manifest.snapshot() == 10  # no id is used twice
    manifest.close()


@pytest.mark.parametrize("fault", ["damaged", "gone"])
def test_a_good_snapshot_counts_whatever_became_of_its_chunk(stream: str, fault: str) -> None:
    manifest = begin(stream)
    manifest.snapshot()
    manifest.close()
    if fault == "gone":
        shutil.rmtree(os.path.join(stream, "manifest"))
    else:
        flip(path_of(stream, chunk_indexes(stream)[-1]), 64 + 8)
    view = read_manifest(stream, silent)
    assert view.damaged and view.catalog.entries == entries_of(RECORDS)


def test_a_full_chunk_makes_a_snapshot_due(tmp_path: Path) -> None:
    folder = str(tmp_path / f"{1:020d}")
    manifest = begin(folder)
    for record in RECORDS[:10]:
        manifest.append(record)
    manifest.close()
    assert snapshot_ids(folder)


def test_job_ids_are_never_given_twice(tmp_path: Path) -> None:
    folder = str(tmp_path / f"{1:020d}")
    given: list[int] = []
    for _ in range(4):
        manifest = begin(folder)
        for _ in range(3):
            given.append(manifest.catalog.next_job_id)
            manifest.append(said(ManifestType.CompressionStarted, 0, job_id=given[-1]))
        manifest.snapshot()
        manifest.close()
    assert given[:3] == [1, 2, 3]
    assert len(set(given)) == 12 and given == sorted(given)


# -- chunks that are gone, or marked ---------------------------------------------------------


def test_chunks_before_the_last_two_snapshots_may_go(stream: str) -> None:
    manifest = begin(stream)
    newest = chunk_indexes(stream)[-1]
    manifest.snapshot()
    manifest.snapshot()
    entries = manifest.entries()
    for index in range(newest):
        os.unlink(path_of(stream, index))
    manifest.close()
    again = begin(stream)
    assert (again.entries(), again.damaged, chunk_indexes(stream)[0]) == (entries, False, newest)
    again.append(opened(50, 5000))
    again.close()
    assert stored(stream)[-1] == opened(50, 5000)


def test_a_chunk_that_an_earlier_version_marked_as_uploaded_is_read(stream: str) -> None:
    path = path_of(stream, 0)
    head = decode_chunk_header(path.read_bytes(), "it")
    head = head._replace(flags=ChunkFlag.SEALED | ChunkFlag.UPLOADED)
    path.write_bytes(head.encode() + path.read_bytes()[64:])
    assert read_manifest(stream, silent).records == RECORDS


# -- golden streams ------------------------------------------------------------------------


@pytest.mark.shows("journal 2.7", "journal 3.5")
def test_the_golden_stream_and_its_unknown_record() -> None:
    lines: list[str] = []
    view = read_manifest(str(STREAM_1), lines.append)
    assert not view.damaged and view.catalog.unknown == 1
    assert lines == [f"{STREAM_1}/manifest: 1 records of unknown types skipped: type 200 flags 1"]
    assert [
        (entry.segment_id, entry.base_offset, entry.end_offset, entry.sealed, int(entry.residency))
        for entry in view.catalog.entries.values()
    ] == [(0, 0, 2424, True, 7), (1, 2424, 3042, True, 1), (2, 3042, 3042, False, 1)]


def test_a_pruned_chunk_is_looked_for(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, failed = load_chunk, []

    def once(path: str) -> bytes:
        if not failed:
            failed.append(path)
            raise FileNotFoundError(path)
        return load(path)

    monkeypatch.setattr(manifest_reader, "load_chunk", once)
    assert read_manifest(stream, silent).records == RECORDS and failed


def test_a_half_written_header_is_read_again(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, torn = load_chunk, []
    lines: list[str] = []

    def once(path: str) -> bytes:
        data = load(path)
        if torn:
            return data
        torn.append(path)
        return data[:48] + bytes(8) + data[56:]

    monkeypatch.setattr(manifest_reader, "load_chunk", once)
    view = read_manifest(stream, lines.append)
    assert torn and not view.damaged and lines == [] and view.records == RECORDS


@pytest.mark.shows("journal 3.6")
@pytest.mark.parametrize("runs", ["one", "each of one record"])
def test_snapshots_bound_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str
) -> None:
    monkeypatch.setattr(manifests, "SNAPSHOT_EVERY", 5)
    monkeypatch.setattr(manifests, "CHUNK_CAPACITY", 256 << 10)
    folder = str(tmp_path / f"{1:020d}")
    manifest = begin(folder)
    for number, record in enumerate(RECORDS, 1):
        manifest.append(record)
        if runs != "one":
            manifest.close()
            manifest = begin(folder)
        assert len(read_manifest(folder, silent).records) <= 5 + 1  # a marker
        assert len(snapshot_ids(folder)) == min(number // 5, 2) or runs != "one"
    manifest.close()
    assert snapshot_ids(folder) == [3, 4] or runs != "one"
