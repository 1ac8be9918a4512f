"""The reconcile job: each fault is planted, and it finds that one and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from relay.audit.jobs import reconcile
from relay.audit.schemas import results
from relay.base.clock import NS_PER_S
from relay.base.names import sha256_hex
from relay.ledger import HeldDelivery, WrittenDelivery
from tests.audit.home_builder import START_NS, START_S, HomeBuilder, stored_message
from tests.audit.ledger_rows import written
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("audit 2.1")

NOW = datetime(2026, 1, 31, 10, 30, tzinfo=UTC)


def classes(spark: SparkSession, home: HomeBuilder, folder: Path, **how: object) -> dict[str, str]:
    """message_id -> class, of a run over the home."""
    inputs = home.inputs(spark, folder, **how)  # type: ignore[arg-type]
    table = reconcile.make(inputs)["reconcile"]
    assert table.columns == results.RECONCILED.names
    return {row["message_id"]: row["class"] for row in table.collect()}


def plant_every_fault(home: HomeBuilder) -> None:
    """One message of each class."""
    home.sent("1-good")
    home.sent("1-different", b"what the sender wrote")
    home.stored[-1] = stored_message(2, "1-different", b"what the store holds")
    home.sent("1-missing")
    home.stored.pop()
    home.keep("1-extra", sender="mallory", to="bob")
    home.seen("1-held")
    home.deliver("1-held", ("bob", "carol"), written_after_ms=None)
    home.ledger.deliveries.hold(
        [HeldDelivery("1-held", "carol", 1, "inbox cannot be written", START_NS)]
    )
    home.ledger.deliveries.mark_written([WrittenDelivery("1-held", "bob", 1, START_NS, START_NS)])
    home.finish("1-held")
    home.keep("1-held")
    home.seen("1-staged")
    home.deliver("1-staged", written_after_ms=None)
    home.finish("1-staged")
    home.keep("1-staged")
    home.seen("1-pending")
    home.seen("1-processing")
    home.deliver("1-processing")
    home.keep("1-processing")
    home.seen("1-failed")
    home.ledger.fail([("1-failed", "there is no agent zed")], START_NS)
    home.seen("1-returned", to="#team")
    home.ledger.claim(["1-returned"])
    home.ledger.deliveries.add_undelivered(
        [
            ("1-returned", "bob", "staged", START_NS, None, None),
            ("1-returned", "zed", "bounced", START_NS, "no longer an agent", None),
        ]
    )
    home.ledger.deliveries.mark_written(
        [WrittenDelivery("1-returned", "bob", 1, START_NS, START_NS)]
    )
    home.finish("1-returned")
    home.keep("1-returned", to="#team")
    home.keep(None)  # sent through the engine alone: nobody's business here
    home.write_store()


EXPECTED = {
    "1-good": "delivered",
    "1-different": "checksum_differs",
    "1-missing": "missing",
    "1-extra": "orphan",
    "1-held": "undelivered",
    "1-staged": "undelivered",
    "1-pending": "in_flight",
    "1-processing": "in_flight",
    "1-failed": "failed",
    "1-returned": "returned",
}


@pytest.fixture(scope="module")
def judged(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, DataFrame]]:
    """The tables of a run over one message of each class."""
    root = tmp_path_factory.mktemp("judged")
    home = HomeBuilder(root / "home")
    plant_every_fault(home)
    tables = reconcile.make(home.inputs(spark, root / "run"))
    yield {name: frame.persist() for name, frame in tables.items()}
    home.close()


def test_each_planted_fault_is_found_and_nothing_else(judged: dict[str, DataFrame]) -> None:
    assert judged["reconcile"].columns == results.RECONCILED.names
    assert {row["message_id"]: row["class"] for row in judged["reconcile"].collect()} == EXPECTED


def test_findings_name_what_is_wrong_and_what_is_known(judged: dict[str, DataFrame]) -> None:
    found = reconcile.findings(judged, NOW)
    assert found.schema.names == results.FINDING.names
    rows = {row["message_id"]: row for row in found.collect()}
    assert {name: (row["check"], row["severity"]) for name, row in rows.items()} == {
        "1-different": ("reconcile.checksum_differs", "error"),
        "1-missing": ("reconcile.missing", "error"),
        "1-extra": ("reconcile.orphan", "error"),
        "1-held": ("reconcile.undelivered", "warning"),
        "1-staged": ("reconcile.undelivered", "warning"),
    }
    assert rows["1-different"]["detail"] == {
        "status": "archived",
        "ledger_checksum": sha256_hex(b"what the sender wrote"),
        "store_checksum": sha256_hex(b"what the store holds"),
        "original_checksum": sha256_hex(b"what the sender wrote"),
        "store_file": "store/relay.acomm",
        "original": "archive/2026-01-31/alice/1-different.msg",
    }
    assert rows["1-held"]["detail"]["waiting_for"] == "carol"
    assert (rows["1-extra"]["agent"], rows["1-extra"]["route"]) == ("mallory", "bob")
    assert {row["observed_at"] for row in rows.values()} == {NOW.replace(tzinfo=None)}


def test_counts_are_one_a_class_and_add_up(judged: dict[str, DataFrame]) -> None:
    found = reconcile.counts(written(judged))
    assert found == {name: list(EXPECTED.values()).count(name) for name in EXPECTED.values()}


def test_a_store_that_was_never_written_is_empty(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-lost")
    home.seen("1-pending")
    found = classes(spark, home, tmp_path / "run")
    assert found == {"1-lost": "missing", "1-pending": "in_flight"}


def test_an_empty_home_has_nothing(spark: SparkSession, home: HomeBuilder, tmp_path: Path) -> None:
    home.write_store()
    assert classes(spark, home, tmp_path / "run") == {}


def test_archives_count_and_a_message_in_two_files_is_one(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-old")
    home.sent("1-both")
    home.write_store("store/archive/2026-01-30/000001.acomm")
    home.stored = [home.stored[1]]
    home.sent("1-altered", b"as it was sent")
    home.write_store()
    home.stored = [stored_message(9, "1-altered", b"another")]
    home.write_store("store/archive/2026-01-31/000001.acomm")
    table = reconcile.make(home.inputs(spark, tmp_path / "run"))["reconcile"].collect()
    assert {row["message_id"]: (row["class"], row["copies"]) for row in table} == {
        "1-old": ("delivered", 1),
        "1-both": ("delivered", 2),
        "1-altered": ("checksum_differs", 2),
    }
    files = {row["message_id"]: row["store_file"] for row in table}
    assert files["1-old"] == "store/archive/2026-01-30/000001.acomm"


def test_every_section_of_the_file_counts(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    for name in ("1-dead", "1-archived", "1-kept"):
        home.sent(name)
    dead, archived, *home.stored = home.stored
    home.write_store(dead_letters=(dead,), archive=(archived,))
    found = classes(spark, home, tmp_path / "run")
    assert found == {"1-dead": "delivered", "1-archived": "delivered", "1-kept": "delivered"}


# id: created_ns, created_at, class
AGES = {
    "1-old": (START_NS, START_S, "orphan"),
    "1-new": (START_NS + 80 * NS_PER_S, START_S + 80, "recent"),
    # found long ago, and taken in by the engine just now
    "1-answer": (START_NS - 10**6 * NS_PER_S, START_S + 80, "recent"),
    "1-before": (START_NS + 69 * NS_PER_S, START_S + 69, "orphan"),
    "1-at": (START_NS + 70 * NS_PER_S, START_S + 70, "recent"),
}


def test_extra_is_older_than_the_snapshot_by_the_grace(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.stored = [
        stored_message(number, name, created_ns=created_ns, created_at=created_at)
        for number, (name, (created_ns, created_at, _)) in enumerate(AGES.items(), 1)
    ]
    home.write_store()
    clock = FakeClock(START_NS + 100 * NS_PER_S)
    found = classes(spark, home, tmp_path / "run", clock=clock, grace_s=30)
    assert found == {name: expected for name, (_, _, expected) in AGES.items()}


def test_what_is_sealed_is_not_called_equal(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-sealed")
    home.stored = [stored_message(1, "1-sealed", bytes(33))]
    home.write_store(encrypted=True)
    assert classes(spark, home, tmp_path / "run") == {"1-sealed": "unverified"}
