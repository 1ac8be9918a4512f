"""What each kind of file is verified for, without Spark."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.acomm.model import ArchiveInfo, StoreFile
from relay.audit.extract import PartTask, read_task
from relay.audit.home_files import FileUnit, HomeSource, VerifiedFile, sources_of, verify
from relay.audit.lake import LakeManifest, LakePart
from relay.audit.snapshot import FrozenJournal, HomeSnapshot
from relay.audit.sources.journal_files import ReadSettings
from relay.audit.sources.ledger_rows import LedgerSnapshot
from relay.journal.tier_plan import JobKind
from tests.audit.home_builder import START_S
from tests.audit.journal_builder import JournalBuilder, delivered, sent

COMPRESS, UPLOAD = JobKind.COMPRESS, JobKind.UPLOAD
EVICT_TIER0, EVICT_TIER1 = JobKind.EVICT_TIER0, JobKind.EVICT_TIER1
STREAM = f"{1:020d}"


def sources(home: Path, *store_files: Path, objects: str = "") -> list[HomeSource]:
    """Everything that a home has."""
    stream = str(home / "journal" / STREAM)
    journal = FrozenJournal(
        {stream: 1 << 40} if os.path.isdir(stream) else {}, ReadSettings(objects)
    )
    files = tuple(str(file) for file in store_files)
    frozen = HomeSnapshot(str(home), "/copies", LedgerSnapshot("", 0), files, 0, 0, 0, journal)
    return list(sources_of(frozen))


def rows(home: Path, *store_files: Path, objects: str = "") -> dict[str, VerifiedFile]:
    """Every row of a home, by its path."""
    found = sources(home, *store_files, objects=objects)
    units = [unit for source in found for unit in source.units]
    return {row.path: row for unit in units for row in verify(str(home), unit)}


def wrong(found: dict[str, VerifiedFile]) -> dict[str, list[str]]:
    """Path -> problems, of those that have some."""
    return {path: row.problems for path, row in found.items() if row.problems}


def test_an_object_is_judged_by_what_its_store_says_of_it(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    builder = JournalBuilder(tmp_path / "home", objects=str(tmp_path / "o"))
    for number in range(3):
        builder.segment(sent(number), delivered(number))
    builder.checkpoint()
    for number in range(3):
        builder.move(number, COMPRESS, UPLOAD, EVICT_TIER0, EVICT_TIER1)
    assert builder.files() == [f"segments/{3:020d}.seg"]
    builder.close()
    keys = [f"{STREAM}/{number:020d}.seg.zst" for number in range(3)]
    there = rows(builder.root, objects=str(tmp_path / "o"))
    assert wrong(there) == {}
    assert {row.kind for row in there.values()} == {"journal", "segment", "object"}
    assert [(there[key].day, there[key].item) for key in keys] == [
        ("2026-01-31", f"{STREAM}/{number}") for number in range(3)
    ]
    not_asked = rows(builder.root)
    assert all("not checked" in not_asked[key].warnings[0] for key in keys)

    (tmp_path / "o" / keys[0]).unlink()
    short = tmp_path / "o" / keys[1]
    short.write_bytes(short.read_bytes()[:-1])
    found = wrong(rows(builder.root, objects=str(tmp_path / "o")))
    assert found.keys() == set(keys[:2])
    assert found[keys[0]] == ["missing, but the manifest has it in Tier 2"]
    assert "expected size and ETag" in found[keys[1]][0]


@pytest.mark.parametrize("size", [None, 40])
def test_an_object_whose_records_cannot_be_read_is_damaged(
    tmp_path: Path, size: int | None
) -> None:
    """Its size and its ETag may be as they were: its records were lost, and nobody said so."""
    (tmp_path / "o").mkdir()
    objects = str(tmp_path / "o")
    builder = JournalBuilder(tmp_path / "home", objects=objects)
    builder.segment(*(sent(number, os.urandom(99)) for number in range(3)))
    builder.checkpoint()
    builder.move(0, COMPRESS, UPLOAD, EVICT_TIER0, EVICT_TIER1)
    builder.close()

    def extracted(objects: str) -> tuple[LakePart, list[str]]:
        """The part of that segment, and the problems of the object's row."""
        found = sources(builder.root, objects=objects)
        (segment,) = [source for source in found if source.path.endswith("/0")]
        settings = ReadSettings(objects)
        task = PartTask(
            str(tmp_path / "lake"), "h", str(builder.root), settings, [segment], time.time_ns()
        )
        part = read_task(task)
        (file,) = [file for file in part.files if file.table == "files"]
        listed = pq.read_table(tmp_path / "lake" / file.path).to_pylist()
        (row,) = [row for row in listed if row["kind"] == "object"]
        return part, row["problems"]

    part, problems = extracted(objects)
    assert part.problems == part.lost == problems == []
    (stored,) = (tmp_path / "o").glob("*/*.seg.zst")
    whole = stored.read_bytes()
    altered = bytearray(whole)
    altered[30] ^= 0xFF
    stored.write_bytes(altered[:size])
    part, problems = extracted(objects)
    assert problems and stored.name in " ".join(part.problems)
    (line,) = part.lost  # with the object's path: its copy is removed
    assert line.startswith(f"{stored} at ")
    made = LakeManifest("", "", 0, [part])
    assert made.lost("/a/home") == [line]
    for line, shown in (("key file /k: gone", "key file /k: gone"), ("x: bad", "/a/home/x: bad")):
        made = LakeManifest("", "", 0, [LakePart("journal", {}, [], lost=[line])])
        assert made.lost("/a/home") == [shown]
    # What is away is said as well, and is no damage.
    stored.write_bytes(whole)
    part, problems = extracted("")
    assert "is in Tier 2, and no object store is named" in " ".join(part.problems)
    assert problems == []


def test_an_object_whose_store_is_away_is_not_called_damaged(tmp_path: Path) -> None:
    """`integrity` said that each had changed since it was written."""
    objects = tmp_path / "o"
    objects.mkdir()
    builder = JournalBuilder(tmp_path / "home", objects=str(objects))
    builder.segment(sent(1))
    builder.checkpoint()
    builder.move(0, COMPRESS, UPLOAD)
    builder.close()
    objects.rename(tmp_path / "away")
    (unit,) = [
        unit
        for source in sources(builder.root, objects=str(objects))
        for unit in source.units
        if unit.kind == "object"
    ]
    row, unread = verify(str(builder.root), unit)
    why = f"not checked: {objects}: no such directory"
    assert (row.kind, row.problems, row.warnings) == ("object", [], [why])
    assert row.item and row.sha256  # its day is as it was
    assert (unread.kind, unread.problems) == ("records", [why])  # who extracts is told


def test_a_segment_is_the_same_item_in_each_tier(tmp_path: Path) -> None:
    hot = JournalBuilder(tmp_path / "hot")
    warm = JournalBuilder(tmp_path / "warm")
    for builder in (hot, warm):
        builder.segment(sent(1), delivered(1))
        builder.checkpoint()
    warm.move(0, COMPRESS, EVICT_TIER0)
    for builder in (hot, warm):
        builder.close()
    told = [
        {(row.day, row.item, row.sha256) for row in rows(one.root).values() if row.item}
        for one in (hot, warm)
    ]
    assert told[0] == told[1] and len(told[0]) == 1
    assert any("warm/" in path for path in rows(warm.root))


def test_the_store_lists_its_archives(tmp_path: Path) -> None:
    notes = [
        ArchiveInfo(f"2026-01-30/{number:06d}.acomm", 1, 1, 1, START_S, START_S, 0, size)
        for number, size in ((1, 5), (2, 5), (3, 5))
    ]
    folder = tmp_path / "store" / "archive" / "2026-01-30"
    folder.mkdir(parents=True)
    (folder / "000001.acomm").write_bytes(b"12345")
    (folder / "000002.acomm").write_bytes(b"1234")
    state = EngineState(archives=tuple(notes)).encode()
    store = tmp_path / "store" / "relay.acomm"
    store_file.write(str(store), StoreFile(START_S, START_S, engine_state=state))
    assert wrong(rows(tmp_path, store)) == {
        "store/relay.acomm": [
            "store/archive/2026-01-30/000002.acomm: expected 5 bytes, found 4",
            "store/archive/2026-01-30/000003.acomm: missing, but the store lists it",
        ]
    }


def test_a_file_that_goes_meanwhile_is_no_fault(tmp_path: Path) -> None:
    shown = f"journal/{STREAM}/segments/{0:020d}.seg"
    unit = FileUnit("segment", str(tmp_path / shown), shown)
    (row,) = verify(str(tmp_path), unit)
    assert (row.path, row.problems, row.warnings) == (shown, [], ["gone since it was listed"])
