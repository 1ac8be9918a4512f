"""The reconcile job's other sides: journal, originals, and every single delivery."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from relay.acomm.model import DeliveryState
from relay.audit.jobs import reconcile
from relay.audit.jobs.messages import first_judged_day
from relay.base.clock import NS_PER_S
from relay.base.config import Config, RetentionSettings, encode
from relay.engine import events
from relay.engine.events import Event
from tests.audit.home_builder import START_NS, HomeBuilder, stored_message
from tests.audit.home_journal import moved, run, write_journal

pytestmark = pytest.mark.shows("audit 2.1")

DAY = "archive/2026-01-31/alice"


def make_findings(spark: SparkSession, home: HomeBuilder, folder: Path) -> dict[str, set[str]]:
    """Check -> message ids, of a run over the home."""
    return run(reconcile.JOB, home.inputs(spark, folder)).checks


def say_twice(said: list[Event]) -> list[Event]:
    """Its delivery is made once more."""
    return [*said, said[-1]]


def otherwise(said: list[Event]) -> list[Event]:
    """It was accepted with another content."""
    sent = said[0]
    assert isinstance(sent, events.MessageSent)
    message = msgspec.structs.replace(sent.message, content=b"something else")
    return [msgspec.structs.replace(sent, message=message), *said[1:]]


def for_carol_too(said: list[Event]) -> list[Event]:
    """It was accepted for one more."""
    sent = said[0]
    assert isinstance(sent, events.MessageSent)
    return [msgspec.structs.replace(sent, recipients=("bob", "carol")), *said[1:]]


def test_each_side_that_differs_is_found_and_nothing_else(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    for name in "good unjournaled altered lost edited forgotten doubled bounced".split():
        home.sent(f"1-{name}", name.encode())
    home.sent("1-more", recipients=("bob", "dave"))
    (home.root / DAY / "1-lost.msg").unlink()
    (home.root / DAY / "1-edited.msg").write_bytes(b"TO: bob\n\nforged")
    home.write_store()
    home.stored.append(stored_message(90, "1-extra"))
    write_journal(
        home,
        {
            "1-unjournaled": lambda said: [],
            "1-altered": otherwise,
            "1-forgotten": for_carol_too,
            "1-doubled": say_twice,
            "1-bounced": lambda said: [said[0], moved(8, "bob", DeliveryState.BOUNCED)],
            "1-more": lambda said: said,
        },
    )
    with home.ledger.transaction():
        home.ledger.deliveries.add_undelivered([("1-more", "zed", "staged", START_NS, None, None)])
        home.ledger.deliveries.give_up("1-more", "zed", "bounced", "planted")
    assert make_findings(spark, home, tmp_path / "run") == {
        "unjournaled": {"1-unjournaled"},
        "journal_differs": {"1-altered"},
        "original_missing": {"1-lost"},
        "original_differs": {"1-edited"},
        "orphan": {"1-extra"},
        "delivery_missing": {"1-forgotten"},
        "delivery_duplicate": {"1-doubled"},
        "delivery_conflict": {"1-bounced"},
        "delivery_orphan": {"1-more"},
    }


def test_late_answers_to_what_was_rolled_and_dead_letters_let_go_are_as_they_should(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-rolled")
    home.write_store("store/archive/2026-01-31/000001.acomm")
    home.sent("1-dead")
    with home.ledger.transaction():
        home.ledger.deliveries.acknowledge("1-rolled", "bob", "received", START_NS)
        home.ledger.deliveries.give_up("1-dead", "bob", "dead", "no acknowledgment")
    write_journal(
        home, {"1-rolled": lambda said: [said[0], moved(1, "bob", DeliveryState.DELIVERED)]}
    )
    home.stored = []
    home.write_store()
    tables, checks = run(reconcile.JOB, home.inputs(spark, tmp_path / "run"))
    classes = {row["message_id"]: row["class"] for row in tables["reconcile"]}
    assert (classes, checks) == ({"1-rolled": "delivered", "1-dead": "discarded"}, {})


def test_days_that_retention_took_are_no_loss(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    day_ns = 86_400 * NS_PER_S
    for number, days_ago in enumerate((100, 95, 2, 1)):
        home.sent(f"1-{number}", at_ns=START_NS - days_ago * day_ns)
    home.write_store()
    files = sorted((home.root / "archive").glob("*/alice/*.msg"))
    for file in files[:2]:
        file.unlink()
    assert make_findings(spark, home, tmp_path / "kept 90 days") == {}
    files[3].unlink()
    assert make_findings(spark, home, tmp_path / "yesterday") == {"original_missing": {"1-3"}}
    settings = Config(retention=RetentionSettings(archive_days=0, archive_mib=0))
    (home.root / "config.json").write_bytes(encode(settings))
    everything = {"original_missing": {"1-0", "1-1", "1-3"}}
    assert make_findings(spark, home, tmp_path / "kept for ever") == everything


def test_a_pack_that_cannot_be_read_is_no_loss_of_each_message_in_it(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a")
    home.write_store()
    (home.root / DAY / "1-a.msg").unlink()
    (home.root / "archive" / "2026-01-31.tar.zst").write_bytes(b"no pack")
    assert make_findings(spark, home, tmp_path / "run") == {}


def test_the_day_from_which_on_nothing_may_be_missing(spark: SparkSession) -> None:
    messages = spark.createDataFrame(
        [
            ("archived", "alice", f"archive/2026-01-{day}/alice/{n}.msg", 1 << 20)
            for day in (10, 20, 30)
            for n in range(4)
        ],
        "status string, agent_name string, file_path string, file_size bigint",
    )
    there = [("original", f"2026-01-{day}") for day in (20, 30) for _ in range(3)]
    originals = spark.createDataFrame(there, "kind string, day string")

    def first(days: int, mib: int) -> str:
        row = first_judged_day(messages, originals, START_NS, days, mib).first()
        assert row is not None
        return str(row[0])

    assert first(90, 4096) == "2026-01-20"  # neither age nor size is a reason for more to go
    assert first(10, 4096) == "2026-01-21"
    assert first(0, 4) == "2026-01-21"
    assert first(0, 0) == ""


def test_a_ledger_that_somebody_wrote_into_by_hand(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    for name in "good forged rerouted undone refused behind".split():
        home.sent(f"1-{name}", name.encode())
    home.write_store()
    write_journal(home)
    with sqlite3.connect(home.root / "ledger.db") as db:
        for change, name in (
            ("agent_name = 'mallory'", "forged"),
            ("target = 'carol'", "rerouted"),
            ("status = 'pending'", "undone"),
            ("status = 'failed'", "refused"),
        ):
            db.execute(f"UPDATE messages SET {change} WHERE message_id = '1-{name}'")
    db.close()
    outcome = run(reconcile.JOB, home.inputs(spark, tmp_path / "run"))
    assert outcome.checks == {
        "headers_differ": {"1-forged", "1-rerouted"},
        "status_differs": {"1-undone", "1-refused"},
    }
    differ = {row["message_id"]: row["differs"] for row in outcome.tables["reconcile"]}
    others = "store accepted, journal accepted, archive archived, audit_log archived"
    assert differ["1-undone"] == f"status: ledger pending, {others}"
    assert differ["1-refused"] == f"status: ledger failed, {others}"
