"""The one vocabulary for people: what became of a message, from its row and its deliveries."""

from __future__ import annotations

from typing import Any

import pytest

from relay.base import outcomes
from relay.ledger.schema import schema_sql

NOW = 1_700_000_000_000_000_000
MIN = 60 * 10**9
BOB = {
    **{"recipient": "bob", "state": "written", "attempt": 1, "staged_at": NOW - 9 * MIN},
    **{"written_at": NOW - 8 * MIN, "read_at": None, "read_how": None, "acked_at": None},
    **{"ack_status": None, "due_at": None, "last_error": None, "answer_id": None},
    **{"answer_text": None, "obligation": None, "reminders": 0},
}
ROW = {"status": "archived", "target": "bob", "message_type": "command", "last_error": None}


def bob(state: str, **facts: Any) -> dict[str, Any]:
    return {**BOB, "state": state, **facts}


def acked(status: str, text: str | None = None, **facts: Any) -> dict[str, Any]:
    said = {"acked_at": NOW - 3 * MIN, "ack_status": status, "answer_id": "9-ab"}
    return bob("acked", **{**said, "answer_text": text, **facts})


REMINDED = {"obligation": "open", "reminders": 1}
GIVEN_UP = {"obligation": "given_up", "reminders": 2}
TAKEN = {"last_error": "no answer", "read_how": "taken"}


@pytest.mark.parametrize(
    ("delivery", "word", "rest"),
    [
        (bob("staged"), "waiting", ""),
        (bob("held", last_error="inbox is a link"), "held", ": inbox is a link"),
        (bob("written"), "delivered", ", not read yet"),
        (bob("written", **REMINDED), "delivered", ", not read yet, reminded once"),
        (bob("read", read_how="taken"), "read", ", not answered yet"),
        (
            bob("read", **GIVEN_UP),
            "read",
            ", not answered, the relay no longer waits for an answer",
        ),
        (bob("read", read_how="removed"), "removed", " from the inbox of bob, not seen in .read"),
        (acked("in_progress", "half"), "in progress", " by bob for 3 min: half (answer 9-ab)"),
        (
            acked("received", **REMINDED),
            "in progress",
            " by bob for 3 min (answer 9-ab), reminded once",
        ),
        (acked("received"), "read", ""),
        (acked("completed", "all green"), "completed", " by bob: all green (answer 9-ab)"),
        (acked("completed", answer_id=None), "completed", " by bob"),
        (acked("failed", "no such branch"), "failed", " by bob: no such branch (answer 9-ab)"),
        (bob("bounced", last_error="bob is retired"), "bounced", ": bob is retired"),
        (bob("expired", last_error="its TTL passed"), "expired", ": its TTL passed"),
        (bob("dead", last_error="no answer"), "dead", ": no answer"),
        (bob("dead", **TAKEN, read_at=NOW), "dead", ": no answer; it was read"),
        (bob("dead", **TAKEN, read_at=NOW - 9 * MIN), "dead", ": no answer"),  # an earlier attempt
        (bob("read", recipient="__orchestrator__"), "handled", " by the relay itself"),
    ],
)
def test_what_became_of_a_message_in_a_word_and_in_a_line(
    delivery: dict[str, Any], word: str, rest: str
) -> None:
    assert outcomes.summary(ROW, [delivery]) == word
    assert outcomes.headline(ROW, [delivery], NOW) == word + rest


def test_who_it_is_for_is_named_where_the_address_does_not_say() -> None:
    team = {**ROW, "target": "#team"}
    assert outcomes.headline(team, [bob("written")], NOW) == "delivered to bob, not read yet"
    assert outcomes.headline(team, [bob("held", last_error="full")], NOW) == "held for bob: full"


@pytest.mark.parametrize(
    ("status", "error", "short", "headline"),
    [
        ("pending", None, "waiting", "waiting"),
        ("pending", "journal: disk full", "waiting", "waiting: journal: disk full"),
        ("failed", "there is no agent bbo", "refused", "refused: there is no agent bbo"),
        ("archived", None, "no recipients", "no recipients"),
    ],
)
def test_what_nobody_has_yet_or_ever(
    status: str, error: str | None, short: str, headline: str
) -> None:
    row = {**ROW, "status": status, "last_error": error}
    assert outcomes.summary(row, []) == short
    assert outcomes.headline(row, [], NOW) == headline


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (["written"] * 10, "0 of 10 read"),
        (["read"] * 3 + ["written"] * 7, "3 of 10 read"),
        (["read", "written", "bounced", "held"], "1 of 4 read, 1 held, 1 bounced"),
        (["held", "written"], "1 of 2 held"),
    ],
)
def test_several_are_counted(states: list[str], text: str) -> None:
    assert outcomes.summary(ROW, [bob(state) for state in states]) == text
    assert outcomes.headline(ROW, [bob(state) for state in states], NOW) == text


def test_the_reason_why_several_are_held_is_said_once() -> None:
    held = [bob("held", last_error="full channel", recipient=name) for name in "abcde"]
    assert outcomes.progress(ROW, held[:2], NOW) == "held for a, b: full channel"
    assert outcomes.progress(ROW, held, NOW) == "held for a, b, c and 2 more: full channel"
    held[1] = bob("held", last_error="full", recipient="b")
    assert outcomes.progress(ROW, held[:2], NOW) == "held for a: full channel; held for b: full"


def test_answers_of_several_come_first() -> None:
    found = [acked("completed"), acked("failed"), bob("read"), bob("written")]
    assert outcomes.summary(ROW, found) == "1 of 4 completed, 1 failed, 1 read"


def test_every_state_of_the_ledger_has_a_word() -> None:
    states = ("held", "staged", "written", "read", "acked", "expired", "bounced", "dead")
    assert all(f"'{state}'" in schema_sql() for state in states)
    assert {outcomes.outcome_of(bob(state)) for state in states} <= set(outcomes.Outcome)
