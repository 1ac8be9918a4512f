"""The ordering job: what was written out of order, and clocks that are wrong."""

from __future__ import annotations

import pytest

from relay.base.clock import NS_PER_MS, NS_PER_S
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.tampering import write
from tests.ledger.support import put

pytestmark = pytest.mark.shows("audit 2.1")


def named(after_s: float, tail: str) -> str:
    """An id of a time after START."""
    return f"{START_NS + int(after_s * NS_PER_S)}-{tail}"


def test_inversions_are_found_and_what_had_to_wait_is_none(
    home: HomeBuilder,
) -> None:
    def sent(number: int, after_ms: float, to: str = "bob") -> str:
        message_id = named(number, f"{number:04x}{'ab' if to == 'bob' else 'cd'}")
        at = START_NS + number * NS_PER_S
        home.sent(message_id, recipients=(to,), at_ns=at, written_after_ms=after_ms)
        return message_id

    sent(1, 5000.5)  # it took as long as that
    early = sent(2, 1.5)
    sent(3, 3000.5)
    late = sent(4, 1.5, "carol")
    with home.ledger.transaction():  # held, and let go when others were written
        home.ledger._db.execute("UPDATE deliveries SET state = 'staged' WHERE recipient = 'carol'")
        why = "inbox cannot be written"
        put(home.ledger, late, "carol", "held", last_error=why, due_at=START_NS)
        at = START_NS + 60 * NS_PER_S + NS_PER_MS
        put(home.ledger, late, "carol", "written", staged_at=at, written_at=at)
    sent(5, 1.5, "carol")
    said = home.says("ordering")
    assert said.checks == {"inversion": {early}}
    pairs = {row["recipient"]: row for row in said.tables["ordering"]}
    assert (pairs["bob"]["inversions"], pairs["bob"]["worst_ms"]) == (1, 5000.5 - 1001.5)
    assert (pairs["bob"]["deliveries"], pairs["carol"]["deliveries"]) == (3, 1)
    assert (pairs["carol"]["inversions"], said.tables["ordering_clock"]) == (0, [])


def test_clocks_that_are_wrong_are_told_and_explain_inversions(
    home: HomeBuilder,
) -> None:
    def sent(message_id: str, after_s: float, **more: float) -> None:
        at = START_NS + int(after_s * NS_PER_S)
        home.sent(message_id, at_ns=at, written_after_ms=1.5, **more)  # type: ignore[arg-type]

    sent(named(10, "a1"), 10)
    back = named(5, "a2")
    sent(back, 5)  # the clock was put back by five seconds
    future = named(20, "a3")
    sent(future, 6)
    with home.ledger.transaction():
        wrong = named(7, "a4")
        home.ledger._db.execute(
            "UPDATE messages SET file_mtime_ns = file_mtime_ns + ? WHERE message_id = ?",
            (60 * NS_PER_S, back),
        )
    home.sent(wrong, at_ns=START_NS + 7 * NS_PER_S, written_after_ms=-4000.5)
    said = home.says("ordering")
    assert said.checks == {
        "clock_back": {back},
        "future_id": {future},
        "future_mtime": {back},
        "negative": {wrong},
        "inversion": {wrong},
    }
    (pair,) = said.tables["ordering"]
    assert (pair["inversions"], pair["by_clock"]) == (3, 2)


@pytest.mark.shows("audit 2.3")
def test_times_of_deliveries_that_cannot_be(
    home: HomeBuilder,
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
    assert home.says("ordering").checks == {
        "negative": {"1-staged", "1-written", "1-read", "1-acked"}
    }
