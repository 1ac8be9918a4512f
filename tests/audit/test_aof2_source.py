"""The format `aof2`: every record once, in whatever tier, and damage named."""

from __future__ import annotations

import json
import os
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from relay.aof2.plan import TierPolicy
from relay.audit import aof2_source, faults, journal_columns, schemas
from relay.checksums import sha256_hex
from relay.comm import events
from relay.comm.model import (
    ArchiveNote,
    Channel,
    ChannelType,
    Delivery,
    DeliveryState,
    Origin,
    Participant,
)
from relay.errors import RelayError
from tests.audit.homes import START_NS, START_S
from tests.audit.journals import JournalBuilder, delivered, sent

SENT_AT = datetime(2026, 1, 31, 9, 30)
WARM_AT_ONCE = TierPolicy(True, 0, "", 0, 0)


def read(spark: SparkSession, path: str, **options: str) -> DataFrame:
    return spark.read.format("aof2").options(**options).load(path)


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row["offset"] for row in frame.select("offset").collect())


@pytest.fixture
def journal(tmp_path: Path) -> JournalBuilder:
    """Three sealed segments of two messages, and one that is written to."""
    builder = JournalBuilder(tmp_path / "home")
    for number in (1, 3, 5):
        builder.segment(sent(number), sent(number + 1, b"x" * 300))
    builder.say(delivered(1))
    return builder


def test_each_column_has_a_maker() -> None:
    assert set(journal_columns._COLUMNS) == set(schemas.JOURNAL.names)


def of_every_kind() -> list[events.Event]:
    origin = Origin("eve", "agents/eve/outbox/x.msg", 9, 1, 7, "cd", "text", "bob", START_NS)
    channel = Channel(9, "c", ChannelType.GROUP, "alice")
    note = ArchiveNote("2026-01-31/000001.acomm", 1, 1, 1, START_S, START_S, 0, 10)
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
        events.TakenOut(3, START_S),
    ]


def test_every_event_as_a_row(spark: SparkSession, tmp_path: Path) -> None:
    builder = JournalBuilder(tmp_path)
    builder.start(epoch=3)
    builder.say(*of_every_kind())
    builder.checkpoint()
    rows = read(spark, builder.path).orderBy("offset").collect()
    assert [row["event"] for row in rows[1:-1]] == [type(e).__name__ for e in of_every_kind()]
    start, first, *_, checkpoint = rows
    assert (start["event"], start["epoch"], start["boot_id"]) == ("Start", 3, "boot-1")
    assert (checkpoint["event"], checkpoint["covers"]) == ("Checkpoint", checkpoint["offset"])
    assert (first["stream"], first["segment"], first["at"]) == (builder.path, 0, SENT_AT)
    assert first["end"] == rows[2]["offset"] and first["sequence"] == 0
    assert first["number"] == Decimal(2**63 + 1) and first["numbers"] == 1
    assert (first["relay_id"], first["sender"], first["to"]) == (f"1-{2**63 + 1}", "alice", "bob")
    assert first["checksum"] == sha256_hex(b"hello") and first["content_size"] == 5
    assert (first["message_type"], first["state"], first["held"]) == ("Text", "Sent", False)
    assert (first["created_ns"], first["correlation_id"]) == (START_NS, "c-1")
    assert (first["file_checksum"], first["channel_id"]) == ("ab", 1)


def test_what_events_are_about(spark: SparkSession, tmp_path: Path) -> None:
    builder = JournalBuilder(tmp_path)
    builder.say(*of_every_kind())
    names = ["number", "numbers", "recipients", "state", "attempt", "reason", "message_numbers"]
    frame = aof2_source.load(spark, [builder.path], ["offset", "event", "deliveries", *names])
    found = {
        (row["event"], index): tuple(row[name] for name in names)
        for index, row in enumerate(frame.orderBy("offset").collect())
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
    pairs = [row["deliveries"] for row in frame.orderBy("offset").collect()]
    assert pairs[3] == [Row(number=1, recipient="bob", attempt=1), Row(2, "bob", 3)]
    assert pairs[2] == [Row(number=1, recipient="bob", attempt=2), Row(1, "eve", 2)]
    assert pairs[4] == [Row(1, "eve", None), Row(2, "eve", None)] and pairs[5] is None


def test_refused_files_and_the_rest(spark: SparkSession, tmp_path: Path) -> None:
    builder = JournalBuilder(tmp_path)
    builder.say(*of_every_kind())
    names = ["relay_id", "sender", "answer_id", "said", "due_at", "archive", "channel_id"]
    rows = aof2_source.load(spark, [builder.path], ["offset", *names]).orderBy("offset").collect()
    assert [rows[5][name] for name in names[:3]] == ["1-x", "eve", "1-nack"]
    assert [rows[6][name] for name in names[:3]] == [None, "eve", "1-nack2"]
    assert rows[2]["said"] == "completed"
    assert rows[2]["due_at"] == datetime(2026, 1, 31, 9, 30, 0, 500_000)
    assert rows[11]["archive"] == "2026-01-31/000001.acomm"
    assert [rows[i]["channel_id"] for i in (0, 13, 14, 15)] == [1, 9, 9, 9]


def test_a_partition_a_segment_and_a_frozen_end(
    spark: SparkSession, journal: JournalBuilder
) -> None:
    frame = read(spark, journal.path)
    assert (frame.count(), frame.rdd.getNumPartitions()) == (7, 4)
    frozen = {journal.path: journal.journal.end}
    journal.segment(sent(7))
    assert read(spark, journal.path).count() == 8
    assert read(spark, journal.path, until=json.dumps(frozen)).count() == 7
    assert read(spark, journal.path, until=json.dumps({journal.path: 0})).count() == 0


def test_paths(spark: SparkSession, journal: JournalBuilder, tmp_path: Path) -> None:
    for path in (journal.root, journal.dir.parent, journal.dir, tmp_path / "ho*"):
        assert read(spark, str(path)).count() == 7, path
    (tmp_path / "empty" / "journal").mkdir(parents=True)
    assert read(spark, str(tmp_path / "empty")).count() == 0
    with pytest.raises(RelayError, match="there is no journal .*/none"), faults.explained():
        read(spark, str(tmp_path / "none")).count()
    with pytest.raises(RelayError, match="is no journal, no stream"), faults.explained():
        read(spark, __file__).count()


def test_each_tier_gives_the_same(spark: SparkSession, tmp_path: Path) -> None:
    builder = JournalBuilder(tmp_path / "home", tiers=TierPolicy(True, 0, str(tmp_path / "o")))
    (tmp_path / "o").mkdir()
    (builder.root / "config.json").write_text(json.dumps({"journal": {"objects": "../o"}}))
    for number in range(3):
        builder.segment(*(sent(number * 500 + n, os.urandom(400)) for n in range(3)))
    hot = read(spark, builder.path).collect()
    builder.checkpoint()
    builder.checkpoint()
    # one stays as it was, one is compressed alone, one is in the object store alone
    builder.settle()
    names = builder.files()
    assert "warm/00000000000000000002.seg.zst" in names
    for name in ("segments/00000000000000000001.seg", "segments/00000000000000000002.seg"):
        if name in names:
            os.unlink(builder.dir / name)
    assert read(spark, builder.path).where("event = 'MessageSent'").collect() == hot
