"""The acks job: what is owed, what is overdue, and answers that nobody asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from relay.acomm.model import DeliveryState, MessageType
from relay.audit.jobs import acks
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.ledger import ReadDelivery, WrittenDelivery
from relay.ledger.deliveries import TAKEN
from relay.ledger.offers import IN_CONTEXT, OFFERED, RETURNED, OfferChange
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.home_journal import Change, moved, run, write_journal

pytestmark = pytest.mark.shows("audit 2.1")

OWED_S = 60


def delivered(number: int, *, due_s: int = 0, attempt: int = 0) -> Change:
    """Told as delivered, with the time at which its acknowledgment is overdue."""
    state = DeliveryState.DELIVERED
    return lambda said: [said[0], moved(number, "bob", state, attempt, due_s)]


def test_owed_late_overdue_and_orphans_with_a_journal(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    for name in ("owed", "late", "overdue", "done"):
        home.sent(f"1-{name}")
        home.becomes(f"1-{name}", message_type=MessageType.COMMAND)
    home.sent("1-unrequested")
    home.sent("1-plain")
    home.keep("1-answer")
    home.becomes("1-answer", message_type=MessageType.ACKNOWLEDGMENT, correlation_id="c-7")
    home.write_store()
    at = START_NS + 25 * NS_PER_MS
    with home.ledger.transaction():
        home.ledger.deliveries.acknowledge("1-done", "bob", "completed", at)
        home.ledger.deliveries.acknowledge("1-unrequested", "bob", "received", at)
        home.ledger.deliveries.mark_written([WrittenDelivery("1-late", "bob", 2, at, at)])
    write_journal(
        home,
        {
            "1-owed": delivered(1, due_s=3600),
            "1-late": delivered(2, due_s=3600, attempt=2),
            "1-overdue": delivered(3, due_s=OWED_S),
            "1-done": delivered(4, due_s=OWED_S),
            "1-unrequested": delivered(5),
            "1-plain": delivered(6),
        },
    )
    with home.ledger.transaction():  # the relay was at work until then
        home.ledger.set_state("epoch", "1", START_NS + (OWED_S + 40) * NS_PER_S)
    tables, checks, _ = run(acks.JOB, home.inputs(spark, tmp_path / "run"))
    assert checks == {"overdue": {"1-overdue"}, "unrequested": {"1-unrequested", "1-answer"}}
    classes = {row["message_id"]: row["class"] for row in tables["acks_owed"]}
    assert classes == {
        "1-owed": "owed",
        "1-late": "late",
        "1-overdue": "overdue",
        "1-unrequested": "unrequested",
        "1-answer": "unrequested",
    }
    (pair,) = tables["acks"]
    assert (pair["acked"], pair["owed"], pair["late"], pair["overdue"]) == (2, 3, 1, 1)
    assert (pair["p50_ms"], pair["max_ms"]) == (20.0, 20.0)


def test_M03_what_is_begun_is_owed_and_what_was_given_up_is_not(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    names = ("begun", "silent", "done", "over")
    for name in names:
        home.sent(f"1-{name}")
        home.becomes(f"1-{name}", message_type=MessageType.COMMAND)
    home.write_store()
    at, due = START_NS + 25 * NS_PER_MS, START_NS + OWED_S * NS_PER_S
    with home.ledger.transaction():
        home.ledger.deliveries.acknowledge("1-begun", "bob", "in_progress", at)
        home.ledger.deliveries.set_obligation("1-begun", "bob", "open", due)
        home.ledger.deliveries.set_obligation("1-silent", "bob", "open", due + 3600 * NS_PER_S)
        home.ledger.deliveries.acknowledge("1-done", "bob", "completed", at)
        home.ledger.deliveries.set_obligation("1-done", "bob", "answered", None, 2)
        home.ledger.deliveries.set_obligation("1-over", "bob", "given_up", None, 2)
    write_journal(home, {f"1-{name}": delivered(n) for n, name in enumerate(names, 1)})
    with home.ledger.transaction():
        home.ledger.set_state("epoch", "1", START_NS + (OWED_S + 40) * NS_PER_S)
    tables, checks, _ = run(acks.JOB, home.inputs(spark, tmp_path / "run"))
    assert checks == {"overdue": {"1-begun"}, "given_up": {"1-over"}}
    classes = {row["message_id"]: row["class"] for row in tables["acks_owed"]}
    assert classes == {"1-begun": "overdue", "1-silent": "owed", "1-over": "given_up"}
    (pair,) = tables["acks"]
    assert (pair["acked"], pair["owed"], pair["overdue"]) == (1, 2, 1)
    assert pair["late"] == 1  # acknowledged, after two reminders


def test_without_a_journal_the_kind_says_what_is_owed(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-command")
    home.sent("1-plain")
    home.becomes("1-command", message_type=MessageType.COMMAND)
    home.write_store()
    with home.ledger.transaction():  # a relay that ends before it is due owes nothing yet
        home.ledger.set_state("epoch", "1", START_NS + 30 * NS_PER_S)
    tables, checks, _ = run(acks.JOB, home.inputs(spark, tmp_path / "stopped"))
    assert (checks, [row["class"] for row in tables["acks_owed"]]) == ({}, ["owed"])
    with home.ledger.transaction():
        home.ledger.set_state("epoch", "2", START_NS + 100 * NS_PER_S)
    assert run(acks.JOB, home.inputs(spark, tmp_path / "at work")).checks == {
        "overdue": {"1-command"}
    }


def test_what_was_shown_and_never_seen_is_found(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    """Not what was seen, returned, taken since, or shown a moment ago."""
    shown = {"lost": 0, "seen": 0, "returned": 0, "read": 0, "fresh": 7800}
    for name in shown:
        home.sent(f"1-{name}")
    home.write_store()
    with home.ledger.transaction():
        for name, after_s in shown.items():
            at = START_NS + (after_s - 7200) * NS_PER_S
            home.ledger.offers.change(
                [OfferChange(f"1-{name}", "bob", "claude:1", 1, OFFERED, "Stop", at)]
            )
        for name, state in (("seen", IN_CONTEXT), ("returned", RETURNED)):
            change = OfferChange(f"1-{name}", "bob", "claude:1", 0, state, "why", at)
            home.ledger.offers.change([change])
        home.ledger.deliveries.mark_read([ReadDelivery("1-read", "bob", 1, TAKEN)], at)
    checks = run(acks.JOB, home.inputs(spark, tmp_path / "run")).checks
    assert checks == {"offered_not_in_context": {"1-lost"}}
