"""The duplicates job: each thing that is there twice is found, and what may be twice is not."""

from __future__ import annotations

import pytest

from relay.base.clock import NS_PER_S
from relay.ledger.ledger import FileFacts
from tests.audit.home_builder import START_NS, HomeBuilder, stored_message
from tests.audit.home_journal import write_journal
from tests.ledger.support import put

pytestmark = pytest.mark.shows("audit 2.1")


def asked(home: HomeBuilder, message_id: str, text: str, *, after_s: int, kind: str) -> None:
    """A row, accepted, of that kind and text."""
    at = START_NS + after_s * NS_PER_S
    path = f"agents/alice/outbox/{message_id}.msg"
    facts = FileFacts(message_id, "alice", path, 100, at, 7, text, kind, "bob", at)
    with home.ledger.transaction():
        home.ledger.add([facts])
        home.ledger.claim([message_id])
        home.ledger.complete([message_id], at)


def archive_twice(home: HomeBuilder) -> None:
    """One in two archive files, one twice in the first; and one on its way there, still live."""
    home.sent("1-archived")
    home.sent("1-leaving")
    leaving = home.stored.pop()
    home.sent("1-repeated")
    home.becomes("1-repeated", id=3)
    archived, repeated = home.stored
    home.stored = [archived, leaving, repeated, repeated]
    home.write_store("store/archive/2026-01-30/000001.acomm")
    home.stored = [archived]
    home.write_store("store/archive/2026-01-31/000002.acomm")
    home.stored = [leaving]


def deliver_more_than_once(home: HomeBuilder) -> None:
    """Two with a second attempt, as it should be; and one that was written again after reading."""
    with home.ledger.transaction():
        times, why = {"staged_at": START_NS, "written_at": START_NS}, "inbox cannot be written"
        put(home.ledger, "1-again", "bob", "written", 2, **times)
        put(home.ledger, "1-held", "bob", "held", 2, last_error=why, due_at=START_NS)
        put(home.ledger, "1-held", "bob", "written", 2, **times)
        for state in ("read", "written"):
            home.ledger._db.execute(
                "UPDATE deliveries SET state = ? WHERE message_id = '1-twice'", (state,)
            )


def test_each_planted_duplicate_is_found_and_nothing_else(home: HomeBuilder) -> None:
    archive_twice(home)
    for number, name in enumerate(("recorded", "again", "held", "twice", "once more"), 10):
        home.sent(f"1-{name}")
        home.becomes(f"1-{name}", id=number)
    home.stored += [stored_message(number, "1-numbered") for number in (30, 31)]
    home.write_store()
    home.stored.append(stored_message(30, "1-shared"))  # the journal's alone: a file takes no two
    deliver_more_than_once(home)
    asked(home, "1-do", "ab", after_s=100, kind="command")
    asked(home, "1-do again", "ab", after_s=130, kind="command")
    asked(home, "1-do later", "ab", after_s=300, kind="command")
    asked(home, "1-say", "cd", after_s=100, kind="message")
    asked(home, "1-say again", "cd", after_s=101, kind="message")
    write_journal(home, {"1-recorded": lambda said: [said[0], *said]})
    said = home.says("duplicates")
    assert said.checks == {
        "archived_twice": {"1-archived"},
        "repeated_in_archive": {"1-repeated"},
        "numbered_twice": {"1-numbered"},
        "number_shared": {"1-numbered"},
        "recorded_twice": {"1-recorded"},
        "delivered_twice": {"1-twice"},
        "resent": {"1-do again"},
    }
    (resent,) = (row for row in said.tables["duplicates"] if row["class"] == "resent")
    assert (resent["what"], resent["interval_ms"]) == ("1-do", 30_000)
    what = {row["class"]: (row["times"], row["what"]) for row in said.tables["duplicates"]}
    first, second = "store/archive/2026-01-30/000001.acomm", "store/archive/2026-01-31/000002.acomm"
    assert what["archived_twice"] == (2, f"{first}, {second}")
    assert what["repeated_in_archive"] == (2, first)
