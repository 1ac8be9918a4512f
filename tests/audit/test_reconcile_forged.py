"""What somebody wrote into a home by hand, and took care of: each is found, and nothing else."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from relay.acomm.model import DeliveryState, Message, MessageType
from relay.audit.jobs import ordering, reconcile
from relay.base.clock import NS_PER_S, iso_date
from relay.engine import events
from tests.audit.home_builder import START_NS, START_S, HomeBuilder, file_of, stored_message
from tests.audit.home_journal import Change, moved, run, write_journal
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("audit 2.3")

DAY = "archive/2026-01-31/alice"
replace = msgspec.structs.replace


def write(home: HomeBuilder, table: str, changes: dict[str, str], before: str = "") -> None:
    """Message id -> what its rows of a table are set to."""
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute(before)
        for name, change in changes.items():
            db.execute(f"UPDATE {table} SET {change} WHERE message_id = '1-{name}'")


def make_findings(
    spark: SparkSession, home: HomeBuilder, folder: Path, clock: FakeClock | None = None
) -> dict[str, set[str]]:
    """Check -> message ids, of a run over the home."""
    return run(reconcile.JOB, home.inputs(spark, folder, clock)).checks


def test_rows_of_the_ledger(spark: SparkSession, home: HomeBuilder, tmp_path: Path) -> None:
    names = "good command moved away earlier unsummed seventh fewer unacked unread".split()
    for name in names:
        home.sent(f"1-{name}", name.encode())
    with home.ledger.transaction():
        home.ledger.deliveries.acknowledge(
            "1-unacked", "bob", "received", home.stored[0].created_at
        )
    home.write_store()
    again = moved(names.index("fewer") + 1, "bob", DeliveryState.DELIVERED, 2)
    write_journal(home, {"1-fewer": lambda said: [*said, again]})
    write(
        home,
        "messages",
        {
            "command": "message_type = 'command'",
            "moved": f"file_path = '{DAY}/1-good.msg'",
            "away": "file_path = 'outside/1-away.msg'",
            "earlier": "discovered_at = discovered_at - 1000000",
            "unsummed": "checksum = NULL",
        },
    )
    write(
        home,
        "deliveries",
        {"seventh": "attempt = 7", "unacked": "acked_at = NULL", "unread": "state = 'read'"},
    )
    outcome = run(reconcile.JOB, home.inputs(spark, tmp_path / "run"))
    assert outcome.checks == {
        "headers_differ": {"1-command", "1-earlier"},
        "checksum_differs": {"1-unsummed"},
        "path_differs": {"1-moved", "1-away"},
        "delivery_conflict": {"1-seventh", "1-fewer", "1-unacked", "1-unread"},
    }
    rows = outcome.tables["reconcile"]
    assert {row["message_id"]: row["differs"] for row in rows if row["differs"]} == {
        "1-moved": f"path: ledger {DAY}/1-good.msg, original {DAY}/1-moved.msg",
        "1-away": f"path: ledger outside/1-away.msg, original {DAY}/1-away.msg",
    }
    rows = outcome.tables["reconcile_deliveries"]
    assert {row["message_id"]: row["differs"] for row in rows if row["differs"]} == {
        "1-seventh": "attempt: ledger 7, journal 1",
        "1-fewer": "attempt: ledger 1, journal 2",
        "1-unacked": "acked_at: missing in the ledger",
        "1-unread": "read_at: missing in the ledger",
    }


def answered(number: int, status: str, answer_id: str) -> Change:
    """Its delivery was acknowledged by that message."""
    state = DeliveryState.ACKNOWLEDGED
    ack = events.DeliveriesMoved(
        number, ("bob",), state, START_S, said=status, answer_id=answer_id, answer_text="done"
    )
    return lambda said: [said[0], ack]


def test_acknowledgments_that_say_something_else(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    """Of what was rolled, a later answer is in the ledger alone: it is another message."""
    names = "good turned erased rolled late".split()
    for name in (*names, "invented"):
        home.sent(f"1-{name}", name.encode())
    given = {"turned": "failed", "rolled": "failed"}
    with home.ledger.transaction():
        for name in names:
            answer_id = "2-later" if name == "late" else f"2-{name}"
            status = given.get(name, "completed")
            home.ledger.deliveries.acknowledge(f"1-{name}", "bob", status, START_NS, answer_id)
        home.ledger.deliveries.mark_read([("1-invented", "bob", 1)], START_NS)
    said = {
        f"1-{name}": answered(number, "received" if name == "late" else "completed", f"2-{name}")
        for number, name in enumerate(names, 1)
    }
    write_journal(home, said)
    live = [one for one in home.stored if one.relay_id not in ("1-rolled", "1-late")]
    home.stored = [one for one in home.stored if one not in live]
    home.write_store("store/archive/2026-01-31/000001.acomm")
    home.stored = live
    home.write_store()
    changes = {"erased": "ack_status = NULL", "invented": "ack_status = 'completed'"}
    write(home, "deliveries", changes)
    outcome = run(reconcile.JOB, home.inputs(spark, tmp_path / "run"))
    others = {"1-turned", "1-erased", "1-rolled", "1-invented"}
    assert outcome.checks == {"delivery_conflict": others}
    differ = {row["message_id"]: row["differs"] for row in outcome.tables["reconcile_deliveries"]}
    assert differ == {
        "1-good": None,
        "1-late": None,
        "1-turned": "ack_status: ledger failed, journal completed",
        "1-erased": "ack_status: ledger none, journal completed",
        "1-rolled": "ack_status: ledger failed, journal completed",
        "1-invented": "ack_status: ledger completed, journal none",
    }


def test_headers_of_archived_originals(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    heads = {
        "good": "to:  bob \r\nkind: MESSAGE",
        "rerouted": "TO: carol",
        "command": "TO: bob\nKIND: command",
        "urgent": "TO: bob\nPRIORITY: 0",
        "expiring": "TO: bob\nTTL: 60",
        "topical": "TO: bob\nTOPIC: builds",
        "threaded": "TO: bob\nTHREAD: release-7",
        "unaddressed": "X-NOTE: to nobody",
        "broken": "no header at all",
    }
    for name in (*heads, "longer"):
        home.sent(f"1-{name}")
    home.write_store()
    write_journal(home)
    for name, head in heads.items():
        (home.root / DAY / f"1-{name}.msg").write_bytes(file_of(head, b"hello"))
    longer = home.root / DAY / "1-longer.msg"
    longer.write_bytes(longer.read_bytes().replace(b"X-PAD", b"X-NOTE"))
    others = {f"1-{name}" for name in heads if name != "good"}
    found = run(reconcile.JOB, home.inputs(spark, tmp_path / "run"))
    assert found.checks == {"headers_differ": others, "original_differs": {"1-longer"}}
    (longer,) = (row for row in found.tables["reconcile"] if row["message_id"] == "1-longer")
    assert longer["differs"] == "size: ledger 100, original 101"
    headers = {row["message_id"]: row["headers"] for row in found.tables["reconcile"]}
    assert headers["1-good"] is None
    assert headers["1-urgent"] == "priority: store Normal, original Critical"
    assert headers["1-expiring"] == "TTL: store none, original 60"
    assert headers["1-topical"] == "TOPIC: not the same in store and original"
    assert headers["1-threaded"] == "thread: not the same in store and original"


def test_M16_the_finding_names_the_header_and_the_values(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-forged")
    home.write_store()
    write_journal(home)
    write(home, "messages", {"forged": "agent_name = 'lead', target = 'carol'"})
    tables = reconcile.JOB.make(home.inputs(spark, tmp_path / "run"))
    (found,) = reconcile.findings(tables, datetime.now(UTC)).collect()
    assert found["check"] == "reconcile.headers_differ"
    assert found["detail"]["headers"] == (
        "sender: ledger lead, store alice, journal alice, original alice; "
        "TO: ledger carol, store bob, journal bob, original bob"
    )
    assert not any(name.endswith("_checksum") for name in found["detail"])


FORGED: dict[str, Callable[[Message], Message]] = {
    "good": lambda one: one,
    "earlier": lambda one: replace(one, metadata={**one.metadata, "created_ns": 1_769_851_000}),
    "older": lambda one: replace(one, created_at=START_S - 60),
    "sender": lambda one: replace(one, sender="mallory"),
    "route": lambda one: replace(one, metadata={**one.metadata, "to": "carol"}),
    "command": lambda one: replace(one, message_type=MessageType.COMMAND),
    "kind": lambda one: replace(one, metadata={**one.metadata, "kind": "spawn"}),
    "urgent": lambda one: replace(one, priority=0),
    "eternal": lambda one: replace(one, ttl=2**64 - 1),
}


@pytest.mark.parametrize("name", ["store/relay.acomm", "store/archive/2026-01-31/000001.acomm"])
def test_a_store_file_that_was_written_anew(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path, name: str
) -> None:
    for one in FORGED:
        home.sent(f"1-{one}")
    write_journal(home)
    home.stored = [
        change(message) for message, change in zip(home.stored, FORGED.values(), strict=True)
    ]
    home.write_store(name)  # with checksums that are right
    others = {f"1-{one}" for one in FORGED if one != "good"}
    assert make_findings(spark, home, tmp_path / "run") == {"headers_differ": others}


def test_a_row_that_is_undone_is_told_from_one_that_a_crash_left(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    """Files have the times of this machine's clock, so rows have, too."""
    now = time.time_ns()
    for after_s, name in ((0, "undone"), (300, "sound"), (600, "killed"), (610, "logged")):
        home.sent(f"1-{name}", at_ns=now + after_s * NS_PER_S)
    home.write_store()
    write(home, "messages", {"logged": "status = 'completed'"})  # which audit_log has seen
    write(home, "audit_log", {}, "DROP TRIGGER messages_moved")
    write(home, "messages", dict.fromkeys(("undone", "killed"), "status = 'completed'"))
    assert (home.root / "archive" / iso_date(now) / "alice" / "1-undone.msg").exists()
    clock = FakeClock(now + 3600 * NS_PER_S)
    outcome = run(reconcile.JOB, home.inputs(spark, tmp_path / "run", clock))
    assert outcome.checks == {"status_differs": {"1-undone", "1-logged"}}
    differ = {row["message_id"]: row["differs"] for row in outcome.tables["reconcile"]}
    undone = "status: ledger completed, store accepted, archive archived"
    assert (differ["1-undone"], differ["1-logged"]) == (undone, f"{undone}, audit_log archived")


def test_a_delivery_that_the_journal_heard_of_at_the_next_start_is_no_forgery(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    """Killed between the row and the record of it; the relay was started again after an hour."""
    home.sent("1-killed")
    home.write_store()
    number, hour_s = home.stored[0].id, 3600
    accepted = slice(0, 1)  # and no record of what became of it
    later = [moved(number, "bob", DeliveryState.DELIVERED)]
    write_journal(home, {"1-killed": lambda said: said[accepted]}, later=later, after_s=hour_s)
    clock = FakeClock(START_NS + 3 * hour_s * NS_PER_S)
    assert make_findings(spark, home, tmp_path / "run", clock) == {}


IN_2099 = 4_070_908_800 * NS_PER_S


def test_a_delivery_that_is_made_to_wait_is_one_finding(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    """Its message, which waits for it alone, is no other one; one that waits for more is."""
    home.sent("1-good")
    home.sent("1-one")
    home.seen("1-more")
    home.deliver("1-more", ("bob", "carol"), written_after_ms=None)
    home.finish("1-more")
    home.keep("1-more")
    home.write_store()
    reached = moved(3, "bob", DeliveryState.DELIVERED)
    write_journal(home, {"1-more": lambda said: [*said, reached]})
    write(home, "deliveries", {"one": "state = 'staged'"})
    assert make_findings(spark, home, tmp_path / "run") == {
        "delivery_conflict": {"1-one", "1-more"},
        "undelivered": {"1-more"},
    }


def test_a_time_that_has_not_come_hides_nothing(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    for name in "good late undelivered lost waiting".split():
        home.sent(f"1-{name}", name.encode())
    home.sent("1-ahead", at_ns=START_NS + 7200 * NS_PER_S)  # by a clock that was set back since
    write_journal(home)
    home.stored = [one for one in home.stored if one.relay_id != "1-lost"]
    home.stored.append(
        stored_message(90, "1-planted", created_ns=IN_2099, created_at=IN_2099 // NS_PER_S)
    )
    home.write_store()
    late = f"processed_at = {IN_2099}"
    gone = "DELETE FROM deliveries WHERE message_id = '1-undelivered'"
    changes = dict.fromkeys(("late", "undelivered", "lost"), late)
    write(home, "messages", {**changes, "waiting": f"status = 'pending', {late}"}, gone)
    tables = reconcile.JOB.make(home.inputs(spark, tmp_path / "run"))
    found = reconcile.findings(tables, datetime.now(UTC)).collect()
    assert {(row["check"], row["message_id"]) for row in found} == {
        ("reconcile.headers_differ", "1-late"),
        ("reconcile.headers_differ", "1-undelivered"),
        ("reconcile.delivery_missing", "1-undelivered"),
        ("reconcile.missing", "1-lost"),
        ("reconcile.status_differs", "1-waiting"),
        ("reconcile.orphan", "1-planted"),
    }
    headers = {row["detail"].get("headers") for row in found if row["message_id"] == "1-late"}
    assert headers == {"processed_at: ledger 2099-01-01 00:00:00, snapshot 2026-01-31 10:30:00"}


def test_times_of_deliveries_that_cannot_be(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    """What is earlier than what comes before it, by more than a clock's own error."""
    for name in "good staged written read acked".split():
        home.sent(f"1-{name}")
    minute = 60 * NS_PER_S
    write(
        home,
        "deliveries",
        {
            "staged": f"staged_at = staged_at - {minute}",
            "written": f"staged_at = staged_at + {minute}",
            "read": f"read_at = written_at - {minute}",
            "acked": f"acked_at = written_at - {minute}",
        },
    )
    checks = run(ordering.JOB, home.inputs(spark, tmp_path / "run")).checks
    assert checks == {"negative": {"1-staged", "1-written", "1-read", "1-acked"}}
