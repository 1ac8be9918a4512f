"""The threads job: how long they are, what nobody answered, and who cannot stop."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import msgspec
import pytest

from relay.acomm.model import MessageType
from relay.base.names import ORCHESTRATOR
from tests.audit.home_builder import START_NS, HomeBuilder, stored_message
from tests.audit.ledger_rows import (
    DAY,
    END_NS,
    HOUR,
    TICK,
    S,
    delivery,
    insert,
    message,
)
from tests.audit.second_engine import Said

pytestmark = pytest.mark.shows("audit 2.1")

LONG_AGO = START_NS - 2 * HOUR


def thread(number: int) -> str:
    """A correlation id."""
    return str(UUID(int=number + (4 << 76) + (2 << 62)))


def say(
    home: HomeBuilder, number: int, kind: MessageType, sender: str, at_ns: int, relay_id: str = ""
) -> None:
    """A message of that thread, as the store keeps it."""
    known = stored_message(
        len(home.stored) + 1, relay_id or f"m-{len(home.stored)}", sender=sender, created_ns=at_ns
    )
    home.stored.append(
        msgspec.structs.replace(known, message_type=kind, correlation_id=thread(number))
    )


def ask(
    home: HomeBuilder,
    number: int,
    name: str,
    at_ns: int = LONG_AGO,
    recipients: tuple[str, ...] = ("bob",),
    **of: object,
) -> None:
    """A query of alice's that was delivered."""
    insert(home, "messages", [message(name, at_ns, message_type="query")])
    rows = [delivery(name, at_ns, 1, recipient=one) for one in recipients]
    insert(home, "deliveries", [{**row, **of} for row in rows])
    say(home, number, MessageType.QUERY, "alice", at_ns, name)


def exchange(
    home: HomeBuilder,
    name: str,
    talk: list[tuple[str, str]],
    begin_ns: int,
    every_s: int = 1,
    **of: object,
) -> None:
    """Messages one after the other, each from the first of a pair to the second."""
    for n, (sender, recipient) in enumerate(talk):
        at = begin_ns + n * every_s * S
        insert(home, "messages", [message(f"{name}-{n:03d}", at, agent_name=sender, **of)])
        insert(home, "deliveries", [delivery(f"{name}-{n:03d}", at, 1, recipient=recipient)])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    """What is made of threads in the store, and of pairs that wrote in the ledger alone."""
    root = tmp_path_factory.mktemp("threads")
    home = HomeBuilder(root / "home")
    for n, sender in enumerate(("alice", "bob", "bob", "alice", "carol")):
        say(home, 1, MessageType.TEXT, sender, START_NS + n * S)
    say(home, 2, MessageType.TEXT, "alice", START_NS)
    home.keep("1-in-none")
    there, back = ("ann", "ben"), ("ben", "ann")
    by_turns = [there, back] * 16
    # From the middle of a minute into the next: neither minute has enough by itself.
    exchange(home, "1-run", by_turns, START_NS + 44 * S + TICK)
    exchange(home, "2-old", by_turns, START_NS - 8 * DAY)
    exchange(home, "3-slow", [("ann", "cid"), ("cid", "ann")] * 16, START_NS, every_s=3)
    exchange(home, "4-rpc", [("ann", "dan"), ("dan", "ann")] * 20, START_NS, message_type="query")
    exchange(home, "5-past", [("ann", "eve")] * 20 + [("eve", "ann")] * 20, START_NS)
    exchange(home, "6-flood", [("ann", "fay")] * 45, START_NS)
    exchange(home, "7-few", [("ann", "gus"), ("gus", "ann")] * 15, START_NS)
    home.write_store()
    home.write_store("store/archive/2026-01-31/000001.acomm")  # in two files, and still one
    yield home.says("threads")
    home.close()


def test_a_thread_has_length_depth_and_duration(said: Said) -> None:
    rows = {row["thread"]: row for row in said.tables["threads"]}
    assert set(rows) == {thread(1), thread(2)}
    names = ("messages", "participants", "turns", "duration_s")
    assert [rows[thread(1)][name] for name in names] == [5, 3, 4, 4.0]
    assert [rows[thread(2)][name] for name in names] == [1, 1, 1, 0.0]
    assert (said.counts["threads"], said.counts["messages"]) == (2, 6)


def test_two_that_cannot_stop_are_found_and_who_works_fast_is_not(said: Said) -> None:
    assert said.found == [("threads.runaway", "warning", "1-run-031", "ann")]
    assert said.findings[0]["detail"]["messages"] == 32
    minutes = {(r["first"], r["second"], r["recent"]) for r in said.tables["threads_runaways"]}
    assert minutes == {("ann", "ben", True), ("ann", "ben", False)}


def test_a_query_that_nobody_answers_is_found(home: HomeBuilder) -> None:
    ask(home, 1, "1-answered")
    say(home, 1, MessageType.RESPONSE, "bob", LONG_AGO + S)
    ask(home, 2, "1-lonely")
    ask(home, 3, "1-received", state="acked", ack_status="received")
    say(home, 3, MessageType.ACKNOWLEDGMENT, "bob", LONG_AGO + S)
    ask(home, 4, "1-declined", state="acked", ack_status="failed")
    ask(home, 5, "1-dead", state="dead")
    ask(home, 6, "1-young", at_ns=END_NS - 600 * S)
    ask(home, 7, "1-old", at_ns=START_NS - 8 * DAY)
    ask(home, 8, "1-to-the-relay", recipients=(ORCHESTRATOR,))
    ask(home, 9, "1-one-of-two", recipients=("bob", "carol"))
    say(home, 9, MessageType.RESPONSE, "carol", LONG_AGO + S)
    say(home, 10, MessageType.RESPONSE, "bob", LONG_AGO)
    ask(home, 10, "2-asked-after-the-answer")
    ask(home, 11, "2-answered-by-another")
    say(home, 11, MessageType.RESPONSE, "mallory", LONG_AGO + S)
    home.write_store()
    said = home.says("threads")
    queries = {row["message_id"]: row for row in said.tables["threads_queries"]}
    assert {name: row["class"] for name, row in queries.items()} == {
        "1-answered": "answered",
        "1-lonely": "unanswered",
        "1-received": "unanswered",
        "1-declined": "closed",
        "1-dead": "ended",
        "1-young": "waiting",
        "1-old": "unanswered",
        "1-one-of-two": "answered",
        "2-asked-after-the-answer": "unanswered",
        "2-answered-by-another": "unanswered",
    }
    assert (queries["1-one-of-two"]["recipients"], queries["1-one-of-two"]["answered"]) == (2, 1)
    found = ("1-lonely", "1-received", "2-answered-by-another", "2-asked-after-the-answer")
    assert said.found == [("threads.unanswered", "warning", name, "alice") for name in found]
    counts = said.counts
    assert (counts["unanswered"], counts["answered"], counts["waiting"]) == (5, 2, 1)
