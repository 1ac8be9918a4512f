"""The journal: append, commit, roll, read and follow."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.errors import IntegrityError, SegmentAway
from relay.journal.catalog import Residency
from relay.journal.format import FOOTER, RECORD, Footer, RecordFlag
from relay.journal.journal import Append, JournalReader
from relay.journal.manifest_format import ManifestType
from relay.journal.manifest_reader import read_manifest
from relay.journal.segment import FIRST_RECORD, FileSource, segment_ids
from tests.disk import failing, flip, hooked
from tests.journal.support import Stream, payloads, put
from tests.power import Cut, Power

# --- appending, committing, reading


@pytest.mark.shows("journal 1.3")
def test_offsets_are_known_at_once_and_records_read_once_committed(stream: Stream) -> None:
    journal = stream.open()
    assert journal.append([Append(b"odd"), Append(b""), Append(b"four")]) == [0, 31, 59]
    assert (journal.end, journal.durable) == (91, 0)
    assert payloads(journal) == []
    assert journal.commit() == 91
    assert payloads(journal) == [b"odd", b"", b"four"]
    assert payloads(journal, 59) == [b"four"]
    assert payloads(journal, 60) == payloads(journal, 91) == []
    assert payloads(journal, 7) == [b"", b"four"]  # no record begins there


def test_what_opening_found_is_durable(stream: Stream, tmp_path: Path) -> None:
    """A killed process may have written without syncing; who reads it afterwards acts on it."""
    journal = stream.open()
    power = Power(tmp_path)
    journal.append([Append(b"written, not synced")])
    with failing("sync", ".seg", errno.EIO), pytest.raises(OSError):
        journal.commit()
    stream.crash()
    with hooked(power):
        found = payloads(stream.open())
    left = power.cut(tmp_path.parent / (tmp_path.name + "-after"), Cut.OLD, random.Random(1))
    power.close()
    after = Stream(left)
    assert payloads(after.open()) == found == [b"written, not synced"]
    after.crash()


def test_times_and_flags_come_back(stream: Stream) -> None:
    journal = stream.open()
    journal.append([Append(b"a", flags=1)])
    stream.clock.advance(5)
    journal.append([Append(b"b", flags=2)])
    journal.commit()
    first, second = journal.read()
    assert (first.at_ms, first.flags) == (1_780_000_000_000, 1)
    joined = RecordFlag.JOINED  # no sync was between them
    assert (second.at_ms, second.flags) == (1_780_000_005_000, 2 | joined)


# --- rolling and sealing


@pytest.mark.shows("journal 1.6")
def test_a_full_segment_rolls_and_no_record_spans_two(stream: Stream) -> None:
    journal = stream.open()
    given = [bytes([65 + number]) * 1_000 for number in range(10)]
    put(journal, *given)  # one batch over four segments
    assert segment_ids(stream.folder) == [0, 1, 2, 3]
    assert payloads(journal) == given
    for number in range(3):
        data = stream.path(number).read_bytes()
        footer = Footer(*FOOTER.unpack(data[-FOOTER.size :]))
        assert footer.durable_bytes == len(data) - FOOTER.size
        assert len(data) <= stream.policy.segment_bytes
        entry = journal.manifest.catalog.entries[number]
        assert (entry.segment_crc64, entry.sealed) == (footer.segment_crc64, True)
    stream.crash()
    assert payloads(stream.open()) == given
    assert stream.warned == []


def test_a_record_that_no_segment_takes_has_one_of_its_own(stream: Stream) -> None:
    journal = stream.open()
    given = [b"before", b"x" * 10_000, b"after"]
    put(journal, *given)
    assert stream.path(1).stat().st_size == FIRST_RECORD + RECORD.size + 10_000 + FOOTER.size
    assert payloads(journal) == given
    stream.crash()
    assert payloads(stream.open()) == given


@pytest.mark.shows("journal 1.6")
def test_an_old_segment_rolls_and_an_empty_one_never(stream: Stream) -> None:
    journal = stream.open()
    stream.clock.advance(10 * 86_400)
    assert not journal.roll_if_due()
    put(journal, b"first")  # the age counts from here
    stream.clock.advance(86_399)
    assert not journal.roll_if_due()
    stream.crash()
    journal = stream.open()  # it is as old after an opening
    assert not journal.roll_if_due()
    stream.clock.advance(1)
    assert journal.roll_if_due()
    assert segment_ids(stream.folder) == [0, 1]
    stream.clock.advance(10 * 86_400)
    assert not journal.roll_if_due()
    journal.seal()
    assert segment_ids(stream.folder) == [0, 1]


def test_an_old_segment_stays_while_the_disk_has_no_room_for_the_next(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = stream.open()
    put(journal, b"first")
    stream.clock.advance(86_400)
    monkeypatch.setattr("relay.journal.journal.measure_disk", lambda path: (1_000, 999, 1))
    assert not journal.roll_if_due()
    put(journal, b"second")  # it goes on
    monkeypatch.undo()
    assert journal.roll_if_due()


@pytest.mark.shows("journal 1.7")
def test_a_seal_says_the_highest_message_id_and_the_watermark(stream: Stream) -> None:
    journal = stream.open(epoch=3)
    journal.append([Append(b"a", ext_id=7), Append(b"b", ext_id=9), Append(b"c", ext_id=8)])
    journal.commit()
    journal.note_checkpoint(29)
    journal.seal()
    records = read_manifest(stream.folder, pytest.fail).records
    opened, note, sealed, following = records
    assert opened.fields == {"base_offset": 0, "epoch": 3}
    assert (note.type, note.fields["schema_id"]) == (ManifestType.CustomEvent, 1)
    assert sealed.fields["ext_id"] == 9 and sealed.fields["coordinator_watermark"] == 29
    assert sealed.logical_offset == following.logical_offset == 87
    assert following.fields == {"base_offset": 87, "epoch": 3}


@pytest.mark.shows("journal 1.4")
def test_zeros_are_written_ahead_and_off_the_path_of_commits(stream: Stream) -> None:
    journal = stream.open()
    size = stream.path().stat().st_size
    assert size == FIRST_RECORD + 1_024
    put(journal, b"x" * 500)
    assert stream.path().stat().st_size == size  # the commit allocated nothing
    assert journal.preallocate() and not journal.preallocate()
    assert stream.path().stat().st_size == size + 1_024
    journal.reserve(3_000)
    assert stream.path().stat().st_size >= FIRST_RECORD + 528 + 3_000


@pytest.mark.shows("journal 1.5")
def test_of_the_room_that_is_asked_for_so_much_is_made_ahead(stream: Stream) -> None:
    stream.policy = stream.policy._replace(ahead_bytes=5_000)
    journal = stream.open()
    journal.reserve(1 << 40)
    assert stream.path().stat().st_size == FIRST_RECORD + 5_000


@pytest.mark.shows("journal 1.5")
def test_a_full_disk_gets_its_room_back(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = stream.open()
    size = stream.path().stat().st_size
    write_at, written = fsio.write_at, []

    def filling(fd: int, data: bytes, offset: int, name: str) -> None:
        if written:
            raise OSError(errno.ENOSPC, "no space left")
        written.append(write_at(fd, data, offset, name))

    monkeypatch.setattr(fsio, "write_at", filling)
    with pytest.raises(OSError):
        journal.reserve(3 << 20)
    assert written and stream.path().stat().st_size == size
    monkeypatch.undo()
    put(journal, b"x" * 2_000)
    assert payloads(journal) == [b"x" * 2_000]


# --- following from elsewhere


@pytest.mark.shows("journal 1.8")
def test_a_reader_follows_the_tail_over_rolls(stream: Stream) -> None:
    journal = stream.open()
    reader = JournalReader(stream.folder, warn=pytest.fail)
    at, seen, given = 0, [], []
    for number in range(60):
        batch = [bytes([number]) * (number * 7 % 400), b""]
        put(journal, *batch)
        given += batch
        if number % 3 == 0:
            for record in reader.read(at):
                seen.append(record.payload)
                at = record.end
            assert seen == given
    assert len(segment_ids(stream.folder)) > 2
    assert payloads(JournalReader(stream.folder)) == given
    assert list(reader.read(journal.end)) == []


@pytest.mark.shows("journal 1.8")
def test_a_reader_takes_whole_records_only(stream: Stream) -> None:
    journal = stream.open()
    put(journal, b"whole")
    data = stream.path().read_bytes()
    put(journal, b"half of it is there")
    after = stream.path().read_bytes()
    reader = JournalReader(stream.folder)
    for cut in range(33 + FIRST_RECORD, 33 + FIRST_RECORD + 47):
        stream.path().write_bytes(after[:cut] + data[cut:])
        assert payloads(reader) == [b"whole"]
    stream.path().write_bytes(after)
    assert payloads(reader) == [b"whole", b"half of it is there"]


def test_a_reader_names_damage_in_a_sealed_segment(stream: Stream) -> None:
    journal = stream.open()
    put(journal, b"one", b"two", b"three")
    journal.seal()
    flip(stream.path(), FIRST_RECORD + 31 + 30)
    with pytest.raises(IntegrityError, match=r"0\.seg at 83: expected crc32 \w+, found \w+"):
        payloads(JournalReader(stream.folder))
    # The writer reads on, and says once what is missing.
    assert payloads(journal) == payloads(journal) == [b"one", b"three"]
    assert len(stream.warned) == 1 and "[31, 62) are lost" in stream.warned[0]


def test_what_was_pruned_is_no_gap(stream: Stream) -> None:
    journal = stream.open()
    put(journal, b"one")
    journal.seal()
    second, _ = put(journal, b"two", b"three")
    journal.seal()
    for kept in (second, journal.end):
        number = journal.manifest.entries()[0].segment_id
        size = stream.path(number).stat().st_size
        journal.manifest.record(
            ManifestType.LocalEvicted, number, journal.first, reclaimed_bytes=size
        )
        stream.path(number).unlink()
        reader = JournalReader(stream.folder, warn=stream.warned.append)
        assert journal.first == reader.first() == kept
        expected = [b"two", b"three"] if kept == second else []
        for start in (0, kept - 1, kept):
            assert payloads(journal, start) == payloads(reader, start) == expected
    assert stream.warned == []


def test_a_gap_in_the_middle_is_told_of(stream: Stream) -> None:
    journal = stream.open()
    put(journal, b"one")
    journal.seal()
    begin, _ = put(journal, b"two", b"three")
    journal.seal()
    put(journal, b"four")
    journal.manifest.record(ManifestType.LocalEvicted, 1, begin, reclaimed_bytes=0)
    stream.path(1).unlink()
    reader = JournalReader(stream.folder, warn=stream.warned.append)
    assert payloads(journal) == payloads(reader) == [b"one", b"four"]
    assert [f"[{begin}, " in line and "are lost" in line for line in stream.warned] == [True] * 2


def test_an_evicted_segment_is_fetched_or_named(stream: Stream, tmp_path: Path) -> None:
    journal = stream.open()
    put(journal, b"one")
    journal.seal()
    put(journal, b"two")
    journal.manifest.record(ManifestType.CompressionDone, 0, 0, compressed_bytes=1, dictionary_id=0)
    journal.manifest.record(ManifestType.LocalEvicted, 0, 0, reclaimed_bytes=123)
    assert journal.manifest.catalog.entries[0].residency == Residency.TIER1
    away = str(shutil.move(stream.path(0), tmp_path / "away"))
    with pytest.raises(SegmentAway, match="segment 0 is only in TIER1"):
        payloads(journal)
    with pytest.raises(SegmentAway, match="segment 0 is only in TIER1"):
        payloads(JournalReader(stream.folder))
    found = journal.read(fetch=lambda entry: FileSource(away))
    assert [record.payload for record in found] == [b"one", b"two"]


def test_a_follower_is_not_misled_by_an_eviction(stream: Stream, tmp_path: Path) -> None:
    journal = stream.open()
    reader = JournalReader(stream.folder, warn=pytest.fail)
    put(journal, b"one")
    journal.seal()
    put(journal, b"two")
    assert payloads(reader) == [b"one", b"two"]
    put(journal, b"three")
    journal.seal()
    put(journal, b"four")
    journal.manifest.record(
        ManifestType.CompressionDone, 1, 31, compressed_bytes=1, dictionary_id=0
    )
    journal.manifest.record(ManifestType.LocalEvicted, 1, 31, reclaimed_bytes=156)
    shutil.move(stream.path(1), tmp_path / "away")
    with pytest.raises(SegmentAway, match="segment 1 is only in TIER1"):
        payloads(reader, 62)


def test_an_eviction_while_reading_is_no_gap(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = stream.open()
    put(journal, b"one")
    reader = JournalReader(stream.folder, warn=pytest.fail)
    assert payloads(reader) == [b"one"]
    journal.seal()
    put(journal, b"two")
    shutil.move(stream.path(0), tmp_path / "away")  # between the look at it and the listing
    monkeypatch.setattr(JournalReader, "_load", lambda reader: None)
    monkeypatch.setattr(JournalReader, "_were_evicted", lambda reader, last, number: True)
    assert payloads(reader) == []  # nothing behind it, and nothing said to be lost
