"""The dead_letters job: why, how often, and what became of them."""

from __future__ import annotations

import time

import pytest

from relay.base.clock import NS_PER_S
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.fakes import FakeClock
from tests.ledger.support import put

pytestmark = pytest.mark.shows("audit 2.1")


def test_repeats_replays_and_what_was_let_go(
    home: HomeBuilder,
) -> None:
    names = ["a", "b", "c", "alone", "replayed", "again", "gone", "fine"]
    for name in names:
        to = "bob" if name in "abc" else "carol"
        home.sent(f"1-{name}", to=to, recipients=(to,))
    with home.ledger.transaction():
        for number, name in enumerate(names[:-1]):
            to = "bob" if name in "abc" else "carol"
            reason = f"no acknowledgment within {60 + number} s"
            why = reason if name in "abc" else name
            put(home.ledger, f"1-{name}", to, "dead", last_error=why)
        for name in ("replayed", "again"):
            times = {"staged_at": START_NS, "written_at": START_NS}
            put(home.ledger, f"1-{name}", "carol", "written", 2, **times)
        put(home.ledger, "1-again", "carol", "dead", 2, last_error="again")
    home.stored = [m for m in home.stored if m.relay_id != "1-gone"]
    home.write_store()
    # audit_log has SQLite's clock, so the snapshot is of now
    now = FakeClock(time.time_ns() + NS_PER_S)
    said = home.says("dead_letters", now)
    checks = said.checks
    assert {key for key in checks} == {"repeated", "again"}
    assert checks["again"] == {"1-again"} and checks["repeated"] <= {"1-a", "1-b", "1-c"}
    found = {row["message_id"]: (row["class"], row["times"]) for row in said.tables["dead_letters"]}
    assert found == {
        **{f"1-{name}": ("waiting", 1) for name in ("a", "b", "c", "alone")},
        "1-replayed": ("replayed", 1),
        "1-again": ("waiting", 2),
        "1-gone": ("discarded", 1),
    }
    reasons = {row["reason_kind"]: row["letters"] for row in said.tables["dead_letters_reasons"]}
    assert reasons["no acknowledgment within … s"] == 3

    later = FakeClock(time.time_ns() + 8 * 86_400 * NS_PER_S)
    assert home.says("dead_letters", later).checks["forgotten"] == {"1-a", "1-b", "1-c", "1-alone"}


def test_who_says_that_it_was_discarded(home: HomeBuilder) -> None:
    """By hand in the ledger, though the store has it as a dead letter; and in truth, of several."""
    for name in ("hidden", "let go"):
        home.sent(f"1-{name}")
        facts = {"last_error": "no acknowledgment", "discarded_at": START_NS}
        with home.ledger.transaction():
            put(home.ledger, f"1-{name}", "bob", "dead", **facts)
    home.write_store(dead_letters=(home.stored.pop(0),))
    said = home.says("dead_letters", FakeClock(time.time_ns() + 8 * 86_400 * NS_PER_S))
    classes = {row["message_id"]: row["class"] for row in said.tables["dead_letters"]}
    assert classes == {"1-hidden": "waiting", "1-let go": "discarded"}
    assert said.checks == {"forgotten": {"1-hidden"}}
