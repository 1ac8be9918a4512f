"""The format `aof2` as a stream: every record once, wherever it was stopped, or a clear line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from relay.audit.schemas import formats, subset
from relay.audit.session import explained
from relay.audit.sources.journal_files import ReadSettings
from relay.audit.sources.journal_source import Aof2StreamReader
from relay.base import fsio
from relay.base.errors import JournalError, JournalPruned, RelayError
from relay.journal.plan import JobKind
from tests.audit.journal_builder import JournalBuilder, delivered, sent

pytestmark = pytest.mark.shows("audit 1.14")

ALL = ReadAllAvailable()
SCHEMA = subset(formats.JOURNAL, ["offset"], "the journal")


@pytest.fixture
def journal(tmp_path: Path) -> JournalBuilder:
    """A segment of two messages, sealed, and one that is written to."""
    builder = JournalBuilder(tmp_path / "home")
    builder.segment(sent(1), sent(2))
    builder.say(sent(3))
    return builder


def reader(journal: JournalBuilder, *, start: str = "first", most: int = 0) -> Aof2StreamReader:
    settings = ReadSettings({}, None, False)
    return Aof2StreamReader([str(journal.root)], start, most, settings, SCHEMA)


def between(stream: Aof2StreamReader, start: dict[str, int], end: dict[str, int]) -> list[int]:
    return [
        offset
        for partition in stream.partitions(start, end)
        for batch in stream.read(partition)
        for offset in batch.column(0).to_pylist()
    ]


def test_from_one_offset_to_the_next_over_rolls_and_tiers(journal: JournalBuilder) -> None:
    stream = reader(journal)
    at = stream.initialOffset()
    assert at == {journal.path: 0}
    seen: list[int] = []
    wrote: list[int] = []
    for number in range(4, 9):
        wrote += journal.say(sent(number), delivered(number))
        if number % 2:
            journal.journal.seal()
            journal.tiers.set_safe_offset(journal.journal.end)
            sealed = max(journal.journal.manifest.catalog.entries) - 1
            journal.move(sealed, JobKind.COMPRESS, JobKind.EVICT_TIER0)
        end = stream.latestOffset(at, ALL)
        assert end == {journal.path: journal.journal.end}
        seen += between(stream, at, end)
        assert between(stream, end, end) == []
        at = end
    assert seen[3:] == wrote
    assert len(seen) == len(set(seen)) == 13


def test_a_limit_is_kept_to_the_record(journal: JournalBuilder) -> None:
    stream = reader(journal, most=2)
    at, sizes = stream.initialOffset(), []
    assert stream.getDefaultReadLimit() == ReadMaxRows(2)
    while (end := stream.latestOffset(at, ReadMaxRows(2))) != at:
        sizes.append(len(between(stream, at, end)))
        at = end
    assert sizes == [2, 1] and at == {journal.path: journal.journal.end}


def test_whole_records_alone(journal: JournalBuilder) -> None:
    before = reader(journal).latestOffset({}, ALL)
    begin = before[journal.path]
    journal.say(sent(4), sent(5))
    active = journal.dir / "segments" / f"{1:020d}.seg"
    whole = active.read_bytes()
    base = journal.journal.manifest.catalog.entries[1].base_offset
    for cut in (40, 100, 200):  # a write that is seen half done
        data = bytearray(whole)
        last = 52 + journal.journal.end - base
        data[last - cut : last] = bytes(cut)
        active.write_bytes(data)
        end = reader(journal).latestOffset(before, ALL)
        assert begin < end[journal.path] < journal.journal.end
    active.write_bytes(whole)
    end = reader(journal).latestOffset(before, ALL)
    assert end == {journal.path: journal.journal.end}


def test_damage_where_the_relay_writes_is_a_gap_and_nothing_behind_it_is_missed(
    journal: JournalBuilder,
) -> None:
    first, *_ = journal.say(sent(4), sent(5))
    journal.say(sent(6))
    active = journal.dir / "segments" / f"{1:020d}.seg"
    data = bytearray(active.read_bytes())
    data[52 + first - journal.journal.manifest.catalog.entries[1].base_offset + 40] ^= 1
    active.write_bytes(data)
    lenient = ReadSettings({}, None, True)
    stream = Aof2StreamReader([str(journal.root)], "first", 0, lenient, SCHEMA)
    at = stream.initialOffset()
    end = stream.latestOffset(at, ALL)
    assert end == {journal.path: journal.journal.end}
    assert first in between(stream, at, end)  # as a gap
    wrote = journal.say(sent(7))
    assert between(stream, end, stream.latestOffset(end, ALL)) == wrote


def test_what_is_told_is_durable(journal: JournalBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(fsio, "fault", lambda *call: calls.append(call))
    journal.say(sent(4))
    calls.clear()
    reader(journal).latestOffset({}, ALL)
    assert calls == [("sync", str(journal.dir / "segments" / f"{1:020d}.seg"))]


def test_from_the_end(journal: JournalBuilder) -> None:
    stream = reader(journal, start="end")
    at = stream.initialOffset()
    (offset,) = journal.say(sent(4))
    assert between(stream, at, stream.latestOffset(at, ALL)) == [offset]


def test_all_that_there_is_now(journal: JournalBuilder) -> None:
    stream = reader(journal)
    stream.prepareForTriggerAvailableNow()
    end = journal.journal.end
    journal.segment(sent(4))
    at = stream.latestOffset(stream.initialOffset(), ALL)
    assert at == {journal.path: end} == stream.latestOffset(at, ALL)


def test_a_relay_that_was_never_started(tmp_path: Path) -> None:
    (tmp_path / "home" / "journal").mkdir(parents=True)
    stream = Aof2StreamReader(
        [str(tmp_path / "home")], "end", 0, ReadSettings({}, None, False), SCHEMA
    )
    at = stream.initialOffset()
    assert at == {} == stream.latestOffset(at, ALL)
    journal = JournalBuilder(tmp_path / "home")
    wrote = journal.say(sent(1))
    assert between(stream, at, stream.latestOffset(at, ALL)) == wrote


def test_what_was_pruned_is_not_passed_over(journal: JournalBuilder) -> None:
    journal.segment(sent(4))
    journal.tiers.set_safe_offset(journal.journal.end)
    journal.move(0, JobKind.PRUNE)
    line = rf"{journal.path}: the records from offset 0 to \d+ were pruned before they were read"
    with pytest.raises(JournalPruned, match=line):
        reader(journal).latestOffset({journal.path: 0}, ALL)
    with pytest.raises(JournalPruned, match=line):  # planned before, read after
        reader(journal).partitions({journal.path: 0}, {journal.path: journal.journal.end})
    first = journal.journal.first
    assert reader(journal).initialOffset() == {journal.path: first} and first > 0


def test_a_checkpoint_of_another_journal(journal: JournalBuilder) -> None:
    end = journal.journal.end
    with pytest.raises(JournalError, match=f"is at offset {end + 1}, but the journal ends at"):
        reader(journal).latestOffset({journal.path: end + 1}, ALL)
    with pytest.raises(RelayError, match="expected logical_offset"):  # no record begins there
        reader(journal).latestOffset({journal.path: end - 5}, ALL)


def test_a_query_goes_on_where_it_was(
    spark: SparkSession, journal: JournalBuilder, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")

    def run(most: str = "2") -> None:
        stream = spark.readStream.format("aof2").option("max_records", most)
        frame = stream.load(str(journal.root)).select("offset", "relay_id")
        writer = frame.writeStream.format("parquet").option("path", out).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        with explained():
            query.awaitTermination()

    run()
    journal.segment(sent(4), delivered(4))
    journal.say(sent(5))
    run()
    rows = spark.read.parquet(out).orderBy("offset").collect()
    wanted = ["1-1", "1-2", "1-3", "1-4", None, "1-5"]
    assert [row["relay_id"] for row in rows] == wanted


def test_a_journal_that_begins_anew_under_a_checkpoint(
    spark: SparkSession, journal: JournalBuilder, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        frame = spark.readStream.format("aof2").load(str(journal.root)).select("offset")
        writer = frame.writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        with explained():
            query.awaitTermination()

    run()
    shutil.rmtree(journal.dir)
    JournalBuilder(journal.root).say(sent(1))
    with pytest.raises(RelayError, match="it is another one, or was restored; begin with a new"):
        run()
