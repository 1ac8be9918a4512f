"""The acks job: what is owed, what is overdue, and answers that nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from relay.acomm.model import DeliveryState, MessageType
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.ledger import IN_CONTEXT, OFFERED, RETURNED, TAKEN
from relay.ledger.deliveries import ObligationFacts, OfferChange
from relay.ledger.ledger import Ledger
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.home_journal import Change, moved, write_journal
from tests.audit.second_engine import Said
from tests.ledger.support import put

pytestmark = pytest.mark.shows("audit 2.1")

OWED_S = 60


def delivered(number: int, *, due_s: int = 0, attempt: int = 0) -> Change:
    """Told as delivered, with the time at which its acknowledgment is overdue."""
    state = DeliveryState.DELIVERED
    return lambda said: [said[0], moved(number, "bob", state, attempt, due_s)]


class Sent(NamedTuple):
    """A message to bob, and what is said of its delivery."""

    sender: str = "alice"
    kind: MessageType = MessageType.COMMAND
    due_s: int = 0  # as the journal says it
    attempt: int = 0
    class_: str | None = None


CASES = {
    "owed": Sent(due_s=3600, class_="owed"),
    "late": Sent(due_s=3600, attempt=2, class_="late"),
    "overdue": Sent(due_s=OWED_S, class_="overdue"),
    "done": Sent(due_s=OWED_S),
    "unrequested": Sent(kind=MessageType.TEXT, class_="unrequested"),
    "plain": Sent(kind=MessageType.TEXT),
    # What is begun is owed, and what was given up is not; as the ledger says it.
    "begun": Sent("carol", class_="overdue"),
    "silent": Sent("carol", class_="owed"),
    "finished": Sent("carol"),
    "over": Sent("carol", class_="given_up"),
    # What was shown and never seen; not what was seen, returned, taken since, or shown just now.
    "lost": Sent("dave", MessageType.TEXT, class_="offered_not_in_context"),
    "seen": Sent("dave", MessageType.TEXT),
    "returned": Sent("dave", MessageType.TEXT),
    "read": Sent("dave", MessageType.TEXT),
    "fresh": Sent("dave", MessageType.TEXT),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    """What one run finds in a home with all of them."""
    root = tmp_path_factory.mktemp("acks")
    home = HomeBuilder(root / "home")
    for name, one in CASES.items():
        home.sent(f"1-{name}", sender=one.sender)
        home.becomes(f"1-{name}", message_type=one.kind)
    home.keep("1-answer")
    home.becomes("1-answer", message_type=MessageType.ACKNOWLEDGMENT, correlation_id="c-7")
    home.write_store()
    with home.ledger.transaction():
        answer(home.ledger)
        show(home.ledger)
    write_journal(
        home,
        {
            f"1-{name}": delivered(number, due_s=one.due_s, attempt=one.attempt)
            for number, (name, one) in enumerate(CASES.items(), 1)
        },
    )
    with home.ledger.transaction():  # the relay was at work until then
        home.ledger.set_state("epoch", "1", START_NS + (OWED_S + 40) * NS_PER_S)
    yield home.says("acks")
    home.close()


def answer(ledger: Ledger) -> None:
    """What recipients said, and what the relay made of it."""
    at, due = START_NS + 25 * NS_PER_MS, START_NS + OWED_S * NS_PER_S
    for name, status in (
        ("done", "completed"),
        ("unrequested", "received"),
        ("begun", "in_progress"),
        ("finished", "completed"),
    ):
        said = {"acked_at": at, "read_at": at, "ack_status": status}
        put(ledger, f"1-{name}", "bob", "acked", **said)
    put(ledger, "1-late", "bob", "written", 2, staged_at=at, written_at=at)
    ledger.deliveries.set_obligations(
        [
            ObligationFacts("1-begun", "bob", "open", due),
            ObligationFacts("1-silent", "bob", "open", due + 3600 * NS_PER_S),
            ObligationFacts("1-finished", "bob", "answered", None, 2),
            ObligationFacts("1-over", "bob", "given_up", None, 2),
        ]
    )


def show(ledger: Ledger) -> None:
    """What was offered to a session of bob's, and what became of it."""
    for name in ("lost", "seen", "returned", "read", "fresh"):
        at = START_NS + (600 if name == "fresh" else -7200) * NS_PER_S
        ledger.offers.change([OfferChange(f"1-{name}", "bob", "claude:1", 1, OFFERED, "Stop", at)])
    for name, state in (("seen", IN_CONTEXT), ("returned", RETURNED)):
        ledger.offers.change([OfferChange(f"1-{name}", "bob", "claude:1", 0, state, "why", at)])
    put(ledger, "1-read", "bob", "read", read_at=at, read_how=TAKEN)


def test_each_is_found_and_nothing_else(said: Said) -> None:
    assert said.checks == {
        "overdue": {"1-overdue", "1-begun"},
        "unrequested": {"1-unrequested", "1-answer"},
        "given_up": {"1-over"},
        "offered_not_in_context": {"1-lost"},
    }
    classes = {row["message_id"]: row["class"] for row in said.tables["acks_owed"]}
    expected = {f"1-{name}": one.class_ for name, one in CASES.items() if one.class_}
    assert classes == {**expected, "1-answer": "unrequested"}


def test_pairs_have_their_numbers(said: Said) -> None:
    pairs = {row["sender"]: row for row in said.tables["acks"]}
    names = ("acked", "owed", "late", "overdue")
    assert [pairs["alice"][name] for name in names] == [2, 3, 1, 1]
    assert (pairs["alice"]["p50_ms"], pairs["alice"]["max_ms"]) == (20.0, 20.0)
    # late: acknowledged, after two reminders
    assert [pairs["carol"][name] for name in names] == [1, 2, 1, 1]


def test_without_a_journal_the_kind_says_what_is_owed(
    home: HomeBuilder,
) -> None:
    home.sent("1-command")
    home.sent("1-plain")
    home.becomes("1-command", message_type=MessageType.COMMAND)
    home.write_store()
    with home.ledger.transaction():  # a relay that ends before it is due owes nothing yet
        home.ledger.set_state("epoch", "1", START_NS + 30 * NS_PER_S)
    stopped = home.says("acks")
    assert (stopped.checks, [row["class"] for row in stopped.tables["acks_owed"]]) == ({}, ["owed"])
    with home.ledger.transaction():
        home.ledger.set_state("epoch", "2", START_NS + 100 * NS_PER_S)
    assert home.says("acks").checks == {"overdue": {"1-command"}}
