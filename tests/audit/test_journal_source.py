"""The format `aof2`: every record once, in whatever tier, and damage named."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from relay.acomm.model import (
    ArchiveInfo,
    Channel,
    ChannelType,
    Delivery,
    DeliveryState,
    Origin,
    Participant,
)
from relay.audit import formats
from relay.audit.formats import subset
from relay.audit.own_checks import VIEWS
from relay.audit.session import explained
from relay.audit.sources import journal_columns, journal_files
from relay.base import crypto
from relay.base.errors import RelayError
from relay.base.names import sha256_hex
from relay.engine import events
from relay.engine.events import EventRecord
from relay.journal.tier_plan import JobKind
from tests.audit.home_builder import START_NS, START_S, HomeBuilder
from tests.audit.journal_builder import JournalBuilder, delivered, sent
from tests.audit.source_rows import rows_of
from tests.s3_server import BUCKET, s3_server

SENT_AT = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
COMPRESS, UPLOAD, PRUNE = JobKind.COMPRESS, JobKind.UPLOAD, JobKind.PRUNE
EVICT_TIER0, EVICT_TIER1 = JobKind.EVICT_TIER0, JobKind.EVICT_TIER1


Rows = list[dict[str, Any]]


def read(path: str, *columns: str, **options: str) -> Rows:
    return rows_of(formats.Aof2Source, path, columns, **options)


def offsets(rows: Rows) -> list[int]:
    return [row["offset"] for row in rows]


def gaps(rows: Rows) -> Rows:
    return [row for row in rows if row["event"] == "Gap"]


def records(rows: Rows) -> Rows:
    return [row for row in rows if row["event"] != "Gap"]


@pytest.fixture
def journal(tmp_path: Path) -> JournalBuilder:
    """Three sealed segments of two messages, and one that is written to."""
    builder = JournalBuilder(tmp_path / "home")
    for number in (1, 3, 5):
        builder.segment(sent(number), sent(number + 1, b"x" * 300))
    builder.say(delivered(1))
    return builder


def test_each_column_has_a_maker() -> None:
    assert set(journal_columns._COLUMNS) == set(formats.JOURNAL.names)


def of_every_kind() -> list[events.Event]:
    origin = Origin("eve", "agents/eve/outbox/x.msg", 9, 1, 7, "cd", "text", "bob", START_NS)
    channel = Channel(9, "c", ChannelType.GROUP, "alice")
    note = ArchiveInfo("2026-01-31/000001.acomm", 1, 1, 1, START_S, START_S, 0, 10)
    return [
        sent(2**63 + 1, b"hello"),
        delivered(1),
        events.DeliveriesMoved(
            1,
            ("bob", "eve"),
            DeliveryState.ACKNOWLEDGED,
            START_S,
            1_769_851_800_500,
            2,
            "completed",
        ),
        events.DeliveriesStaged(((1, "bob", 1), (2, "bob", 3)), START_S),
        events.DeliveriesAdded("eve", (1, 2), START_S),
        events.FileRefused("1-x", origin, "its id is taken", "1-nack", False, False, START_S),
        events.FileRefused("", origin, "no name", "1-nack2", False, True, START_S),
        events.MessageReceived(1, "bob", START_S),
        events.DeliveryTimed(1, "bob", Delivery(DeliveryState.WAITING, 2), START_S),
        events.DeadLettered(1, ("bob",), "no answer", START_S),
        events.MessagesArchived((1, 2), START_S),
        events.Rolled(note, (1,), START_S),
        events.DuplicateNoted(("c-1", 4, "bob"), 0),
        events.ChannelCreated(channel),
        events.ParticipantJoined(9, Participant("bob"), START_S),
        events.ParticipantLeft(9, "bob", START_S),
        events.MessagesEvicted(3, START_S),
    ]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_event_as_a_row(spark: SparkSession, tmp_path: Path) -> None:
    builder = JournalBuilder(tmp_path)
    builder.start(epoch=3)
    builder.say(*of_every_kind())
    builder.checkpoint()
    frame = spark.read.format("aof2").load(builder.path)
    rows = frame.orderBy("offset").collect()
    assert frame.rdd.getNumPartitions() == 1
    assert [row["event"] for row in rows[1:-1]] == [
        type(e).__struct_config__.tag for e in of_every_kind()
    ]
    start, first, *_, checkpoint = rows
    assert (start["event"], start["epoch"], start["boot_id"]) == ("Start", 3, "boot-1")
    assert (checkpoint["event"], checkpoint["covers"]) == ("Checkpoint", checkpoint["offset"])
    assert (first["stream"], first["segment"], first["at"]) == (
        builder.path,
        0,
        SENT_AT.replace(tzinfo=None),
    )
    assert first["end"] == rows[2]["offset"] and first["sequence"] == 0
    assert first["number"] == Decimal(2**63 + 1) and first["numbers"] == 1
    assert (first["relay_id"], first["sender"], first["to"]) == (f"1-{2**63 + 1}", "alice", "bob")
    assert first["checksum"] == sha256_hex(b"hello") and first["content_size"] == 5
    assert (first["message_type"], first["state"], first["held"]) == ("Text", "Sent", False)
    assert (first["created_ns"], first["correlation_id"]) == (START_NS, "c-1")
    assert (first["file_checksum"], first["channel_id"]) == ("ab", 1)
    flip(builder.dir / "segments" / f"{0:020d}.seg", 52 + 40)
    with pytest.raises(RelayError, match=r"seg at 52: expected crc32"), explained():
        spark.read.format("aof2").load(builder.path).collect()
    lenient = spark.read.format("aof2").option("mode", "permissive").load(builder.path)
    assert lenient.where("event = 'Gap'").count() == 1


def pair(number: int, recipient: str, attempt: int | None) -> dict[str, object]:
    return {"number": number, "recipient": recipient, "attempt": attempt}


def test_what_events_are_about(tmp_path: Path) -> None:
    builder = JournalBuilder(tmp_path)
    builder.say(*of_every_kind())
    names = ["number", "numbers", "recipients", "state", "attempt", "reason", "message_numbers"]
    rows = read(builder.path, "event", "deliveries", *names)
    found = {
        (row["event"], index): tuple(row[name] for name in names) for index, row in enumerate(rows)
    }
    moved = (1, 1, ["bob", "eve"], "Acknowledged", 2, None, [1])
    assert found["DeliveriesMoved", 2] == moved
    assert found["DeliveriesStaged", 3] == (None, 2, ["bob"], "Staged", None, None, [1, 2])
    assert found["DeliveriesAdded", 4] == (None, 2, ["eve"], "Sent", None, None, [1, 2])
    assert found["FileRefused", 5] == (None, None, None, None, None, "its id is taken", None)
    assert found["MessageReceived", 7] == (1, 1, ["bob"], "Received", None, None, [1])
    assert found["DeliveryTimed", 8] == (1, 1, ["bob"], "Waiting", 2, None, [1])
    assert found["DeadLettered", 9] == (1, 1, ["bob"], "Dead", None, "no answer", [1])
    assert found["Rolled", 11] == (1, 1, None, None, None, None, [1])
    assert found["DuplicateNoted", 12] == (4, 1, ["bob"], None, None, None, [4])
    pairs = [row["deliveries"] for row in rows]
    assert pairs[3] == [pair(1, "bob", 1), pair(2, "bob", 3)]
    assert pairs[2] == [pair(1, "bob", 2), pair(1, "eve", 2)]
    assert pairs[4] == [pair(1, "eve", None), pair(2, "eve", None)] and pairs[5] is None


def test_refused_files_and_the_rest(tmp_path: Path) -> None:
    builder = JournalBuilder(tmp_path)
    builder.say(*of_every_kind())
    names = ["relay_id", "sender", "answer_id", "said", "due_at", "archive", "channel_id"]
    rows = read(builder.path, *names)
    assert [rows[5][name] for name in names[:3]] == ["1-x", "eve", "1-nack"]
    assert [rows[6][name] for name in names[:3]] == [None, "eve", "1-nack2"]
    assert rows[2]["said"] == "completed"
    assert rows[2]["due_at"] == datetime(2026, 1, 31, 9, 30, 0, 500_000, UTC)
    assert rows[11]["archive"] == "2026-01-31/000001.acomm"
    assert [rows[i]["channel_id"] for i in (0, 13, 14, 15)] == [1, 9, 9, 9]


def test_a_partition_a_segment_and_a_frozen_end(journal: JournalBuilder) -> None:
    assert len(read(journal.path)) == 7
    source = formats.Aof2Source({"path": journal.path})
    assert len(source.reader(source.schema()).partitions()) == 4
    frozen = {journal.path: journal.journal.end}
    journal.segment(sent(7))
    assert len(read(journal.path)) == 8
    assert len(read(journal.path, until=json.dumps(frozen))) == 7
    assert len(read(journal.path, until=json.dumps({journal.path: 0}))) == 0


def test_paths(journal: JournalBuilder, tmp_path: Path) -> None:
    for path in (journal.root, journal.dir.parent, journal.dir, tmp_path / "ho*"):
        assert len(read(str(path))) == 7, path
    (tmp_path / "empty" / "journal").mkdir(parents=True)
    assert len(read(str(tmp_path / "empty"))) == 0
    with pytest.raises(RelayError, match=r"none: no such journal"):
        read(str(tmp_path / "none"))
    with pytest.raises(RelayError, match="expected a journal, a stream of it"):
        read(__file__)


def spread(builder: JournalBuilder) -> list[int]:
    """Segments that are in Tier 0, in Tier 1, in Tier 2 alone; and one that is written to."""
    found: list[int] = []
    for number in range(3):
        found += builder.segment(*(sent(number * 10 + n, os.urandom(99)) for n in range(3)))
    found += builder.say(delivered(1))
    builder.tiers.set_safe_offset(builder.journal.end)
    builder.move(1, COMPRESS, EVICT_TIER0)
    builder.move(2, COMPRESS, UPLOAD, EVICT_TIER0, EVICT_TIER1)
    return found


@pytest.mark.shows("audit 1.12")
def test_each_tier_is_read_alike(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    builder = JournalBuilder(tmp_path / "home", objects=str(tmp_path / "objects"))
    wrote = spread(builder)
    names = (".seg", ".seg.zst")
    assert [
        f"{folder}/{number:020d}{names[folder == 'warm']}"
        for folder, number in (("segments", 0), ("segments", 3), ("warm", 1))
    ] == builder.files()
    with pytest.raises(RelayError, match="is in Tier 2, and no object store"):
        read(builder.path)
    assert offsets(read(builder.path, objects=str(tmp_path / "objects"))) == wrote
    config = {"journal": {"objects": str(tmp_path / "objects")}}
    (builder.root / "config.json").write_text(json.dumps(config))
    assert offsets(read(builder.path)) == wrote
    assert len(builder.files()) == 3  # nothing was hydrated


@pytest.mark.shows("audit 1.12")
def test_tier_2_in_s3_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as url:
        for name, value in (
            ("AWS_ENDPOINT_URL", url),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        where = f"s3://{BUCKET}/here"
        builder = JournalBuilder(tmp_path / "home", objects=where)
        wrote = spread(builder)
        # The workers of the session that tests share have the environment it began with.
        schema = subset(formats.JOURNAL, ["offset"], "the journal")
        reader = formats.Aof2Source({"path": builder.path, "objects": where}).reader(schema)
        found = [
            offset
            for partition in reader.partitions()
            for batch in reader.read(partition)
            for offset in batch.column(0).to_pylist()
        ]
    assert found == wrote


@pytest.mark.shows("audit 1.12")
def test_a_segment_that_moves_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    where = str(tmp_path / "objects")
    builder = JournalBuilder(tmp_path / "home", objects=where)
    wrote = [*builder.segment(sent(1)), *builder.segment(sent(2)), *builder.say(sent(3))]
    schema = subset(formats.JOURNAL, ["offset"], "the journal")
    reader = formats.Aof2Source({"path": builder.path, "objects": where}).reader(schema)
    builder.journal.seal()
    builder.segment(sent(4))
    builder.tiers.set_safe_offset(builder.journal.end)
    builder.move(0, COMPRESS, EVICT_TIER0)
    builder.move(2, COMPRESS, UPLOAD, EVICT_TIER0, EVICT_TIER1)
    first, second, third = reader.partitions()
    found = [b.column(0).to_pylist() for one in (first, second, third) for b in reader.read(one)]
    assert found == [[offset] for offset in wrote]
    builder.move(0, PRUNE)
    with pytest.raises(RelayError, match=r"segment 0 of .* was pruned before it was read"):
        list(reader.read(first))


@pytest.mark.shows("audit 1.13")
def test_damage_fails_the_job_or_is_a_row(journal: JournalBuilder) -> None:
    wrote = offsets(read(journal.path))
    damaged = journal.dir / "segments" / f"{1:020d}.seg"
    flip(damaged, 52 + 40)
    with pytest.raises(RelayError, match=rf"{damaged} at 52: expected crc32"):
        read(journal.path)
    found = read(journal.path, mode="permissive")
    assert offsets(found) == wrote
    (gap,) = gaps(found)
    assert (gap["stream"], gap["segment"], gap["at"]) == (journal.path, 1, SENT_AT)
    assert (gap["offset"], gap["end"]) == (wrote[2], wrote[3])
    assert gap["reason"].startswith(f"{damaged} at 52: expected crc32")


def test_a_segment_that_is_gone(journal: JournalBuilder) -> None:
    wrote = offsets(read(journal.path))
    (journal.dir / "segments" / f"{1:020d}.seg").unlink()
    with pytest.raises(RelayError, match=r"segment 1 of .* is in no tier"):
        read(journal.path)
    found = read(journal.path, mode="permissive")
    assert offsets(records(found)) == wrote[:2] + wrote[4:]
    (gap,) = gaps(found)
    assert (gap["offset"], gap["end"]) == (wrote[2], wrote[4])


def test_damage_where_the_relay_writes(journal: JournalBuilder) -> None:
    behind = journal.say(sent(9), sent(10)) + journal.say(sent(11))
    active = journal.dir / "segments" / f"{3:020d}.seg"
    begin = journal.journal.manifest.catalog.entries[3].base_offset
    flip(active, 52 + behind[0] - begin + 40)
    with pytest.raises(RelayError, match=rf"{active} at .*expected crc32"):
        read(journal.path)
    found = read(journal.path, mode="permissive")
    assert offsets(records(found))[-2:] == behind[1:]
    (gap,) = gaps(found)
    assert (gap["offset"], gap["end"]) == (behind[0], behind[1])


def test_a_write_that_was_cut_short_is_no_damage(journal: JournalBuilder) -> None:
    before = offsets(read(journal.path))
    begin = journal.journal.manifest.catalog.entries[3].base_offset
    journal.say(sent(9), sent(10))
    active = journal.dir / "segments" / f"{3:020d}.seg"
    data = bytearray(active.read_bytes())
    last = 52 + journal.journal.end - begin
    data[last - 60 : last] = bytes(60)  # of the last record, and of no other
    active.write_bytes(data)
    for mode in ("failfast", "permissive"):
        found = read(journal.path, mode=mode)
        assert offsets(found)[:-1] == before and gaps(found) == []


def test_what_a_salvage_left_is_a_gap(journal: JournalBuilder) -> None:
    (behind, *_) = journal.say(sent(9), sent(10))
    journal.say(sent(11))
    begin = journal.journal.manifest.catalog.entries[3].base_offset
    journal.close()
    flip(journal.dir / "segments" / f"{3:020d}.seg", 52 + behind - begin + 40)
    again = JournalBuilder(journal.root)  # it salvages what is whole
    assert again.warnings
    rows = gaps(read(again.path))
    assert [(row["offset"], row["number"]) for row in rows] == [(behind, None)]
    assert rows[0]["reason"] == journal_files.LOST
    again.close()


def test_a_hole_between_segments_is_a_gap(tmp_path: Path) -> None:
    builder = JournalBuilder(tmp_path)
    builder.segment(sent(1))
    builder.close()
    end = builder.journal.end
    longer = JournalBuilder(tmp_path, at_least=end + 1000)
    longer.say(sent(2))
    rows = read(longer.path)
    found = [(row["event"], row["offset"], row["end"]) for row in rows]
    assert found[1] == ("Gap", end, end + 1000)
    assert [one[0] for one in found] == ["MessageSent", "Gap", "MessageSent"]
    longer.close()


def test_a_damaged_manifest(journal: JournalBuilder) -> None:
    wrote = offsets(read(journal.path))
    (chunk,) = (journal.dir / "manifest").iterdir()
    flip(chunk, 100)
    with pytest.raises(RelayError, match=str(chunk)):
        read(journal.path)
    found = read(journal.path, mode="permissive")
    assert offsets(records(found)) == wrote
    (gap,) = gaps(found)
    assert (gap["offset"], gap["end"]) == (0, 0) and str(chunk) in gap["reason"]


def test_an_encrypted_journal(tmp_path: Path) -> None:
    key, other = (crypto.create_key(str(tmp_path / name)) for name in ("key", "other"))
    assert key != other
    builder = JournalBuilder(tmp_path / "home", key=key)
    builder.say(sent(1), delivered(1))
    opened = read(builder.path, key_file=str(tmp_path / "key"))
    assert [row["relay_id"] for row in opened] == ["1-1", None]
    for options, line in (
        ({}, "at 0 is encrypted, and no key was given"),
        ({"key_file": str(tmp_path / "other")}, "at 0 cannot be decrypted with this key"),
        ({"key_file": str(tmp_path / "none")}, "key file .*none: No such file"),
    ):
        with pytest.raises(RelayError, match=line):
            read(builder.path, **options)
    rows = read(builder.path, mode="permissive")
    assert [(row["event"], row["number"]) for row in rows] == [("Sealed", None)] * 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mode": "brave"}, "mode: expected one of failfast, permissive, got 'brave'"),
        ({"until": "soon"}, "until: expected JSON of stream -> offset"),
    ],
)
def test_a_wrong_option_is_one_line(
    journal: JournalBuilder, options: dict[str, str], line: str
) -> None:
    with pytest.raises(RelayError, match=f"^{line}"):
        read(journal.path, **options)


def test_events_of_another_version(journal: JournalBuilder) -> None:
    (at,) = journal.put(EventRecord(2, 1, delivered(1)))
    line = f"at {at}: expected events of version 1"
    with pytest.raises(RelayError, match=line):
        read(journal.path)


def test_the_evidence_of_a_run(spark: SparkSession, home: HomeBuilder, tmp_path: Path) -> None:
    home.write_store()
    journal = VIEWS["journal"]
    assert journal(home.inputs(spark, tmp_path / "before"), "SELECT event").count() == 0
    builder = JournalBuilder(home.root)
    builder.say(sent(1), delivered(1))
    inputs = home.inputs(spark, tmp_path / "run")
    builder.say(sent(2))
    rows = journal(inputs, "SELECT stream, relay_id").collect()
    assert [tuple(row) for row in rows] == [
        (f"journal/{1:020d}", "1-1"),
        (f"journal/{1:020d}", None),
    ]
    builder.close()
