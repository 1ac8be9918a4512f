"""The reconcile job's verdicts that hang on time: what a crash left, what retention took."""

from __future__ import annotations

import contextlib
import sqlite3
import time

import msgspec
import pytest

from relay.acomm.model import DeliveryState
from relay.base.clock import NS_PER_S, iso_date
from relay.base.config import Config, RetentionSettings
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.home_journal import moved, write_journal
from tests.audit.tampering import write
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("audit 2.1")


@pytest.mark.shows("audit 2.3")
def test_a_row_that_is_undone_is_told_from_one_that_a_crash_left(home: HomeBuilder) -> None:
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
    outcome = home.says("reconcile", clock)
    assert outcome.checks == {"status_differs": {"1-undone", "1-logged"}}
    differ = {row["message_id"]: row["differs"] for row in outcome.tables["reconcile"]}
    undone = "status: ledger completed, store accepted, archive archived"
    assert (differ["1-undone"], differ["1-logged"]) == (undone, f"{undone}, audit_log archived")


@pytest.mark.shows("audit 2.3")
def test_a_delivery_that_the_journal_heard_of_at_the_next_start_is_no_forgery(
    home: HomeBuilder,
) -> None:
    """Killed between the row and the record of it; the relay was started again after an hour."""
    home.sent("1-killed")
    home.write_store()
    number, hour_s = home.stored[0].id, 3600
    accepted = slice(0, 1)  # and no record of what became of it
    later = [moved(number, "bob", DeliveryState.DELIVERED)]
    write_journal(home, {"1-killed": lambda said: said[accepted]}, later=later, after_s=hour_s)
    clock = FakeClock(START_NS + 3 * hour_s * NS_PER_S)
    assert home.says("reconcile", clock).checks == {}


def test_days_that_retention_took_are_no_loss(home: HomeBuilder) -> None:
    day_ns = 86_400 * NS_PER_S
    for number, days_ago in enumerate((100, 95, 2, 1)):
        home.sent(f"1-{number}", at_ns=START_NS - days_ago * day_ns)
    home.sent("1-packed")
    home.write_store()
    for name in ("0", "1", "3", "packed"):
        next((home.root / "archive").glob(f"*/alice/1-{name}.msg")).unlink()
    # A pack that cannot be read is no loss of each message in it.
    (home.root / "archive" / "2026-01-31.tar.zst").write_bytes(b"no pack")
    assert home.says("reconcile").checks == {"original_missing": {"1-3"}}
    settings = Config(retention=RetentionSettings(archive_days=0, archive_mib=0))
    (home.root / "config.json").write_bytes(msgspec.json.encode(settings))
    everything = {"original_missing": {"1-0", "1-1", "1-3"}}
    assert home.says("reconcile").checks == everything


@pytest.mark.parametrize(
    ("days", "mib", "missing"),
    [
        (90, 4096, {"20", "30"}),  # neither age nor size is a reason for more to go
        (10, 4096, {"30"}),
        (0, 4, {"30"}),
        (0, 0, {"10", "20", "30"}),
    ],
)
def test_the_day_from_which_on_nothing_may_be_missing(
    home: HomeBuilder, days: int, mib: int, missing: set[str]
) -> None:
    """Of the first day most are gone, of the others one."""
    retention = RetentionSettings(archive_days=days, archive_mib=mib)
    (home.root / "config.json").write_bytes(msgspec.json.encode(Config(retention=retention)))
    for day in (10, 20, 30):
        for number in range(4):
            at_ns = START_NS + (day - 31) * 86_400 * NS_PER_S
            home.sent(f"1-{day}-{number}", at_ns=at_ns)
    home.write_store()
    for gone in ("10-0", "10-1", "10-2", "20-3", "30-3"):
        next((home.root / "archive").glob(f"*/alice/1-{gone}.msg")).unlink()
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute("UPDATE messages SET file_size = 1048576, file_inode = NULL")
    found = home.says("reconcile").checks["original_missing"]
    assert {name.split("-")[1] for name in found} == missing
