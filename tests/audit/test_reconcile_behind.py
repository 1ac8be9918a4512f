"""A ledger that is behind its journal: one finding of the home, however many messages lie there."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from relay.base.clock import NS_PER_S
from relay.engine import events
from tests.audit.home_builder import START_NS, START_S, HomeBuilder, stored_message
from tests.audit.home_journal import write_journal
from tests.audit.tampering import write
from tests.fakes import FakeClock
from tests.ledger.support import put

pytestmark = pytest.mark.shows("audit 2.3")

HOME = {"ledger_behind": {None}}  # a finding of the home has no message
SOON = FakeClock(START_NS + 10 * NS_PER_S)  # within the grace
Looked = tuple[dict[str, str], dict[str, set[str]], list[str]]


def set_position(home: HomeBuilder, change: str) -> None:
    """What the ledger says of its position in the journal."""
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute(f"{change} WHERE key = 'journal'")
    db.close()


def look(home: HomeBuilder, clock: FakeClock | None = None) -> Looked:
    """Message id -> class, what was found, and what is said of the home."""
    said = home.says("reconcile", clock)
    problems = [row["detail"]["problem"] for row in said.findings if row["message_id"] is None]
    return (
        {row["message_id"]: row["class"] for row in said.tables["reconcile"]},
        said.checks,
        problems,
    )


def test_records_behind_its_position_are_one_finding_once_they_are_old(home: HomeBuilder) -> None:
    """One of them was killed behind the journal's commit: it is in flight, whatever its age."""
    home.sent("1-a")
    home.sent("1-killed")
    home.write_store()
    home.stored += [stored_message(number, f"1-behind {number}") for number in (90, 91)]
    end = write_journal(home)
    write(home, "messages", {"killed": "status = 'processing'"})
    set_position(home, "UPDATE orchestrator_state SET value = '1'")
    known = {"1-a": "delivered", "1-killed": "in_flight"}
    soon = {**known, "1-behind 90": "recent", "1-behind 91": "recent"}
    assert look(home, SOON) == (soon, {}, [])
    later = {**known, "1-behind 90": "behind", "1-behind 91": "behind"}
    problem = (
        f"the ledger follows the journal up to 1, it ends at {end}: "
        "4 records of messages are not in it, the oldest of 2026-01-31 09:30:00Z"
    )
    assert look(home) == (later, HOME, [problem])
    set_position(home, f"UPDATE orchestrator_state SET value = '{10**30}'")  # no offset at all
    assert look(home)[1] == HOME
    set_position(home, "DELETE FROM orchestrator_state")
    assert look(home)[1] == HOME


def test_an_older_copy_of_the_ledger_is_no_orphan_of_each_message_since(
    home: HomeBuilder, tmp_path: Path
) -> None:
    """Of a message whose record retention has taken meanwhile there is the store alone."""
    home.sent("1-known", at_ns=START_NS - 5 * NS_PER_S)
    copy = tmp_path / "yesterday.db"
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db", isolation_level=None)) as db:
        db.execute("VACUUM INTO ?", (str(copy),))
    db.close()
    known = home.stored.pop()
    home.sent("1-since", at_ns=START_NS + NS_PER_S)
    (home.root / "archive/2026-01-31/alice/1-since.msg").unlink()  # it came there just now
    write_journal(home)
    before = {"created_ns": START_NS - NS_PER_S, "created_at": START_S - 1}
    home.stored += [msgspec.structs.replace(known, id=80), stored_message(81, "1-gone", **before)]
    home.write_store()
    home.close()
    (home.root / "ledger.db-wal").unlink(missing_ok=True)
    shutil.copyfile(copy, home.root / "ledger.db")
    classes = {"1-known": "delivered", "1-since": "behind", "1-gone": "behind"}
    assert look(home)[:2] == (classes, HOME)


def test_a_delivery_behind_the_position_of_an_idle_relay_is_judged(home: HomeBuilder) -> None:
    """What follows a batch, that it was delivered, is in the journal with the next one."""
    home.sent("1-gone")
    home.sent("1-last")
    home.write_store()
    write_journal(home)
    set_position(home, "UPDATE orchestrator_state SET value = value - 1")
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute("DELETE FROM deliveries WHERE message_id = '1-gone'")
    db.close()
    assert look(home)[1] == {"delivery_missing": {"1-gone"}}


def test_a_read_behind_the_position_of_an_idle_relay_is_no_fault(home: HomeBuilder) -> None:
    """The ledger has it; the position passes it with the next batch."""
    home.sent("1-last")
    home.write_store()
    end = write_journal(home, later=[events.MessageReceived(1, "bob", START_S + 1)], after_s=1)
    with home.ledger.transaction():
        put(home.ledger, "1-last", "bob", "read", read_at=START_NS + NS_PER_S)
    set_position(home, f"UPDATE orchestrator_state SET value = '{end - 1}'")
    assert look(home) == ({"1-last": "delivered"}, {}, [])
