"""Outcomes of messages and deliveries in words, for all commands.

    waiting      not in the inbox yet                held         cannot be written now; why
    delivered    in the inbox                        read         taken out of the inbox
    removed      gone from it, not seen in .read     handled      by the relay itself
    in progress  reported by the recipient           completed    reported by the recipient
    failed       reported by the recipient; why      refused      by the relay; why
    bounced      the recipient no longer exists      expired      its TTL passed
    dead         given up without an answer

Pure: rows of ``messages`` and ``deliveries`` in, texts out. States: docs/states.md.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from relay.base.clock import elapsed
from relay.base.names import ORCHESTRATOR
from relay.ledger.deliveries import REMOVED

Fields = Mapping[str, Any]  # a row, by column name
Row = Fields | sqlite3.Row  # of ``messages``
NO_RECIPIENTS = "no recipients"


class Outcome(StrEnum):
    """The outcome of a delivery or a message; the most advanced ones first."""

    COMPLETED = "completed"
    FAILED = "failed"
    IN_PROGRESS = "in progress"
    READ = "read"
    HANDLED = "handled"
    REMOVED = "removed"
    HELD = "held"
    BOUNCED = "bounced"
    EXPIRED = "expired"
    DEAD = "dead"
    DELIVERED = "delivered"
    WAITING = "waiting"
    REFUSED = "refused"


_OF_STATE = {
    "staged": Outcome.WAITING,
    "held": Outcome.HELD,
    "written": Outcome.DELIVERED,
    "read": Outcome.READ,
    "expired": Outcome.EXPIRED,
    "bounced": Outcome.BOUNCED,
    "dead": Outcome.DEAD,
}
_OF_ANSWER = {
    "completed": Outcome.COMPLETED,
    "failed": Outcome.FAILED,
    "in_progress": Outcome.IN_PROGRESS,
}
_ANSWERED = frozenset(_OF_ANSWER.values())
_BEFORE_A_NAME = dict.fromkeys(Outcome, "for") | {
    Outcome.COMPLETED: "by",
    Outcome.FAILED: "by",
    Outcome.IN_PROGRESS: "by",
    Outcome.READ: "by",
    Outcome.DELIVERED: "to",
}
_REASONED = frozenset({Outcome.HELD, Outcome.BOUNCED, Outcome.EXPIRED, Outcome.DEAD})
OWING = ("command", "query")


_SINCE_SCHEMA_3: Fields = dict.fromkeys(
    ("read_how", "answer_id", "answer_text", "obligation", "reminders")
)


def delivery_fields(row: sqlite3.Row) -> Fields:
    """A delivery's row by column name; columns that an earlier schema lacks are None."""
    return {**_SINCE_SCHEMA_3, **dict(zip(row.keys(), row, strict=True))}


def outcome_of(delivery: Fields) -> Outcome:
    """The outcome of one delivery."""
    state = delivery["state"]
    if delivery["recipient"] == ORCHESTRATOR:
        return Outcome.HANDLED if state in ("read", "acked") else Outcome.WAITING
    if state == "acked":
        begun = delivery["ack_status"] == "received" and delivery["obligation"] == "open"
        return (
            Outcome.IN_PROGRESS if begun else _OF_ANSWER.get(delivery["ack_status"], Outcome.READ)
        )
    if state == "read" and delivery["read_how"] == REMOVED:
        return Outcome.REMOVED
    return _OF_STATE[state]


def summary(row: Row, deliveries: Sequence[Fields]) -> str:
    """The outcome for a column: ``read``, or ``3 of 10 read`` for several recipients."""
    if row["status"] in ("failed", "rejected"):
        return Outcome.REFUSED
    if not deliveries:
        return NO_RECIPIENTS if row["status"] in ("completed", "archived") else Outcome.WAITING
    counts = Counter(outcome_of(one) for one in deliveries)
    if len(deliveries) == 1:
        return next(iter(counts))
    known = [
        outcome
        for outcome in Outcome
        if counts[outcome] and outcome not in (Outcome.DELIVERED, Outcome.WAITING)
    ]
    counted = [f"{counts[outcome]} {outcome}" for outcome in known] or [f"0 {Outcome.READ}"]
    counted[0] = counted[0].replace(" ", f" of {len(deliveries)} ", 1)
    return ", ".join(counted)


def headline(row: Row, deliveries: Sequence[Fields], now_ns: int) -> str:
    """The outcome for the first line of ``relay trace``, with reason and time."""
    outcome = summary(row, deliveries)
    if outcome == Outcome.REFUSED or (outcome == Outcome.WAITING and not deliveries):
        return _with_reason(outcome, row["last_error"])
    if len(deliveries) != 1:
        return outcome
    (one,) = deliveries
    return describe(one, row["message_type"], now_ns, is_named=one["recipient"] != row["target"])


def describe(delivery: Fields, kind: str | None, now_ns: int, *, is_named: bool = True) -> str:
    """The outcome of one delivery, with recipient, reason and time."""
    outcome, name = outcome_of(delivery), delivery["recipient"]
    if outcome is Outcome.HANDLED:
        return "handled by the relay itself"
    if outcome is Outcome.REMOVED:
        return f"removed from the inbox of {name}, not seen in .read"
    said = (
        f"{outcome} {_BEFORE_A_NAME[outcome]} {name}"
        if is_named or outcome in _ANSWERED
        else str(outcome)
    )
    if outcome in _ANSWERED:
        if outcome is Outcome.IN_PROGRESS:
            said += f" for {elapsed(now_ns - (delivery['acked_at'] or now_ns))}"
        said = _with_reason(said, delivery["answer_text"])
        said += f" (answer {delivery['answer_id']})" if delivery["answer_id"] else ""
    elif outcome in _REASONED:  # which imply that no answer is expected
        return _with_reason(said, delivery["last_error"]) + _since(delivery)
    elif outcome is Outcome.DELIVERED:
        said += ", not read yet"
    elif outcome is Outcome.READ and kind in OWING and delivery["state"] == "read":
        said += ", not answered yet"
    return said + reminders_text(delivery)


def _since(delivery: Fields) -> str:
    """The later fate of the file of a delivery after it was given up."""
    if delivery["state"] != "dead" or (delivery["read_at"] or 0) <= (delivery["written_at"] or 0):
        return ""
    return "; removed since" if delivery["read_how"] == REMOVED else "; read since"


def reminders_text(delivery: Fields) -> str:
    """The reminders sent for an overdue answer; empty if there were none."""
    if delivery["obligation"] == "given_up":
        return ", no answer is waited for any more"
    times = delivery["reminders"] if delivery["obligation"] == "open" else 0
    return f", reminded {'once' if times == 1 else f'{times} times'}" if times else ""


def _with_reason(said: str, reason: str | None) -> str:
    return f"{said}: {reason}" if reason else said
