"""The traffic job: who wrote to whom, and how long it took."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from relay.audit import schemas
from relay.audit.jobs import traffic
from tests.audit.homes import FILE_SIZE, START_NS, HomeBuilder


def test_pairs_are_counted_with_their_latencies(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    for number in range(1, 101):
        home.sent(f"1-{number}", written_after_ms=number)
    home.sent("2-all", sender="bob", to="*", recipients=("alice", "carol"), written_after_ms=2.5)
    home.seen("3-waits", sender="carol")
    home.deliver("3-waits", written_after_ms=None)
    tables = traffic.make(home.evidence(spark, tmp_path / "run"))
    pairs = tables["traffic"]
    assert pairs.columns == schemas.TRAFFIC.names
    assert sorted(map(tuple, pairs.collect())) == [
        ("alice", "bob", 100, 100 * FILE_SIZE, 50.0, 99.0, 100.0),
        ("bob", "alice", 1, FILE_SIZE, 2.5, 2.5, 2.5),
        ("bob", "carol", 1, FILE_SIZE, 2.5, 2.5, 2.5),
    ]
    counted = {row["name"]: row["count"] for row in traffic.counts(tables).collect()}
    assert counted == {"pairs": 3, "messages": 102, "bytes": 102 * FILE_SIZE}
    assert [row["sender"] for row in traffic.busiest(tables).collect()] == ["alice", "bob", "bob"]


def test_nothing_written_is_nothing(spark: SparkSession, home: HomeBuilder, tmp_path: Path) -> None:
    home.seen("1-a", at_ns=START_NS)
    tables = traffic.make(home.evidence(spark, tmp_path / "run"))
    pairs = tables["traffic"]
    assert pairs.collect() == []
    counted = {row["name"]: row["count"] for row in traffic.counts(tables).collect()}
    assert counted == {"pairs": 0, "messages": 0, "bytes": 0}
