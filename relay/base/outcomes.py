"""Outcomes of messages and deliveries in words, and how long to wait for one.

    waiting      not in the inbox yet                held         cannot be written now; why
    delivered    in the inbox                        shown        by a hook, and not seen yet
    read         taken out of the inbox
    removed      gone from it, not seen in .read     handled      by the relay itself
    in progress  reported by the recipient           completed    reported by the recipient
    failed       reported by the recipient; why      refused      by the relay; why
    bounced      the recipient no longer exists      expired      its TTL passed
    cancelled    taken back unread
    dead         given up without an answer     unanswered   the relay no longer waits for it

Rows of ``messages`` and ``deliveries`` in, texts out. States: docs/states.md.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from relay.base.clock import duration_ms, elapsed, iso_time
from relay.base.errors import LedgerError, LedgerMissing
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR
from relay.base.text import times

if TYPE_CHECKING:
    import sqlite3

    from relay.base.home import Home

Fields = Mapping[str, Any]  # a row, by column name
Row = Any  # of ``messages``: Fields, or the database's own
REMOVED = "removed"  # read_how: no longer in the inbox, and not in inbox/.read
CANCELLED = "cancelled by "  # last_error of an expired delivery whose message was taken back
WAITS = ("none", "taken", "delivered", "read", "done", "answer")
WAIT_S = 30.0  # for those that name no time
NO_RECIPIENTS = "no recipients"
MOST_NAMED = 3  # recipients named one by one; more are counted


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
    CANCELLED = "cancelled"
    DEAD = "dead"
    UNANSWERED = "unanswered"
    SHOWN = "shown"
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
    Outcome.SHOWN: "to",
}
_REASONED = frozenset(
    {Outcome.HELD, Outcome.BOUNCED, Outcome.EXPIRED, Outcome.CANCELLED, Outcome.DEAD}
)
OWING = ("command", "query")


_SHOWN = (
    "SELECT message_id, recipient FROM offers WHERE state = 'offered' "
    "AND message_id IN (SELECT value FROM json_each(?))"
)


def read_deliveries(db: sqlite3.Connection, which: str, *values: object) -> list[Fields]:
    """The deliveries of a ledger that meet a condition, with ``is_shown``, by recipient.

    ``is_shown``: a session was shown it, and has not seen it yet.
    """
    query = f"SELECT * FROM deliveries WHERE {which} ORDER BY message_id, recipient"
    import json

    found: list[Fields] = [dict(row) for row in db.execute(query, values)]
    unread = json.dumps(
        [delivery["message_id"] for delivery in found if delivery["state"] == "written"]
    )
    if unread == "[]":
        return found
    shown = {(row[0], row[1]) for row in db.execute(_SHOWN, (unread,))}
    return [
        {**delivery, "is_shown": True}
        if (delivery["message_id"], delivery["recipient"]) in shown
        else delivery
        for delivery in found
    ]


def outcome_of(delivery: Fields) -> Outcome:
    """The outcome of one delivery."""
    state = delivery["state"]
    if delivery["recipient"] == ORCHESTRATOR:
        return Outcome.HANDLED if state in ("read", "acked") else Outcome.WAITING
    if state == "acked":
        is_begun = delivery["ack_status"] == "received" and delivery["obligation"] == "open"
        return (
            Outcome.IN_PROGRESS
            if is_begun
            else _OF_ANSWER.get(delivery["ack_status"], Outcome.READ)
        )
    if state == "read" and delivery["read_how"] == REMOVED:
        return Outcome.REMOVED
    if state == "written" and delivery.get("is_shown"):
        return Outcome.SHOWN
    if is_cancelled(state, delivery["last_error"]):
        return Outcome.CANCELLED
    return _OF_STATE[state]


def is_cancelled(state: str, reason: str | None) -> bool:
    """True for a delivery whose message was taken back."""
    return state == "expired" and (reason or "").startswith(CANCELLED)


def by_whom(reason: str | None) -> str:
    """A reason beside the word cancelled: ``by alice``; any other as it is."""
    return (reason or "").removeprefix(f"{Outcome.CANCELLED} ")


_IN_INBOX = (Outcome.DELIVERED, Outcome.SHOWN, Outcome.REMOVED)
_TAKEN = (Outcome.READ, Outcome.IN_PROGRESS, Outcome.COMPLETED, Outcome.HANDLED, Outcome.FAILED)
_ON_THE_WAY = (Outcome.WAITING, Outcome.HELD)


def has_reached(delivery: Fields, step: str) -> bool | None:
    """True at one of ``WAITS``, from ``delivered`` on; None: it may come; False: it cannot."""
    outcome = outcome_of(delivery)
    if outcome in _ON_THE_WAY:
        return None
    if step == "delivered":
        return outcome in _IN_INBOX or outcome in _TAKEN
    if outcome in (Outcome.DELIVERED, Outcome.SHOWN):
        return None
    if step == "read":
        return outcome in _TAKEN
    if outcome is Outcome.READ and step == "answer" and delivery["obligation"] is None:
        return None
    if outcome is Outcome.READ:
        return None if delivery["obligation"] == "open" else delivery["obligation"] != "given_up"
    if outcome is Outcome.IN_PROGRESS:
        return None
    return outcome in (Outcome.COMPLETED, Outcome.HANDLED)


class Wait(NamedTuple):
    """A step to wait for, and the longest wait."""

    word: str  # one of WAITS
    seconds: float = WAIT_S


def parse_wait(text: str) -> Wait:
    """Parse ``read`` or ``read=10s``; a time alone is for the answer. Errors: ValueError."""
    word, mark, time_text = text.partition("=")
    if not mark and word not in WAITS:
        with contextlib.suppress(ValueError):
            return Wait("answer", duration_ms(word, least_ms=1) / 1000)
    if word not in WAITS:
        words = f"one of {', '.join(WAITS)}, one with =10s, or a time for the answer from 1 ms"
        raise ValueError(f"{text[:60]!r} is not {words}")
    return Wait(word, duration_ms(time_text, least_ms=1) / 1000) if mark else Wait(word)


class Progress(NamedTuple):
    """The progress of a message."""

    text: str
    is_there: bool = False  # at the step waited for
    is_over: bool = False  # and will not come there


IN_OUTBOX = Progress("the relay has not picked it up yet, it waits in the outbox")
UNKNOWN = Progress("it is in no outbox, and the relay has never had it", is_over=True)


def watch(
    home: Home, connect: Callable[[], sqlite3.Connection], message_id: str, wait: Wait
) -> Progress:
    """Look until a message is where it is waited for, cannot come there, or the time is over.

    ``connect`` opens the ledger. Errors: LedgerError.
    """
    import sqlite3

    from relay.base.home import LEDGER, lock_holder

    ends_at, pause_s = time.monotonic() + wait.seconds, 0.001
    while True:
        try:
            with contextlib.closing(connect()) as db:
                found = progress_of(db, message_id, wait.word)
                if found == IN_OUTBOX and not _is_in_an_outbox(home, message_id):
                    found = progress_of(db, message_id, wait.word)  # taken in the meantime
                    found = UNKNOWN if found == IN_OUTBOX else found
        except sqlite3.Error as exc:  # a connection that does not translate its errors
            raise LedgerError(f"{home.path(LEDGER)}: {exc}") from exc
        except LedgerMissing:
            if lock_holder(home) is None:
                raise
            found = Progress("it is sent; the ledger is gone, and the relay rebuilds it")
        left_s = ends_at - time.monotonic()
        if found.is_there or found.is_over or left_s <= 0:
            return found
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 0.05)


def progress_of(db: sqlite3.Connection, message_id: str, word: str) -> Progress:
    """Is it so far? ``taken``: the relay has recorded what became of it; of several recipients all
    must be at a later step, and the first answer counts.
    """
    which = "message_id = ?"
    row = db.execute(f"SELECT * FROM messages WHERE {which}", (message_id,)).fetchone()
    if row is None:
        return _rejected(db, message_id) or IN_OUTBOX
    deliveries = read_deliveries(db, which, message_id)
    text = progress(row, deliveries, time.time_ns())
    if row["status"] in ("pending", "processing"):
        return Progress(text if deliveries else "the relay has not recorded it yet")
    if word in ("none", "taken"):
        return Progress(text, is_there=True)
    reached = [has_reached(delivery, word) for delivery in deliveries]
    if word == "answer":
        return Progress(text, True in reached, all(is_reached is False for is_reached in reached))
    return Progress(text, bool(reached) and all(reached), not reached or False in reached)


def _rejected(db: sqlite3.Connection, message_id: str) -> Progress | None:
    """The refusal of a file without a row of its own; None if there was none."""
    sql = "SELECT reason FROM rejections WHERE file_name = ? ORDER BY at DESC"
    row = db.execute(sql, (message_id + MSG_SUFFIX,)).fetchone()
    return row and Progress(_with_reason(Outcome.REFUSED, row["reason"]), is_over=True)


def _is_in_an_outbox(home: Home, message_id: str) -> bool:
    name = message_id + MSG_SUFFIX
    outboxes = (home.path("agents", agent, "outbox", name) for agent in home.agent_names())
    return any(os.path.lexists(path) for path in outboxes)


def summary(row: Row, deliveries: Sequence[Fields]) -> str:
    """The outcome for a column: ``read``, or ``3 of 10 read`` for several recipients."""
    if row["status"] in ("failed", "rejected"):
        return Outcome.REFUSED
    if not deliveries:
        return NO_RECIPIENTS if row["status"] in ("completed", "archived") else Outcome.WAITING
    counts = Counter(outcome_of(delivery) for delivery in deliveries)
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


def facts(row: Row, deliveries: Sequence[Fields], now_ns: int) -> dict[str, Any]:
    """The outcome of a message for lists: in a word and a phrase, reason, due time, reminders.

    Reason, due time and reminders are those of a single delivery.
    """
    outcome = summary(row, deliveries)
    if outcome == Outcome.REFUSED:
        return refused(row["last_error"], row["last_error_code"])
    if len(deliveries) != 1:
        return {"outcome": outcome, "status": outcome}
    (delivery,) = deliveries
    is_owed = delivery["obligation"] in ("open", "given_up")
    status = "not read" if is_owed and outcome == Outcome.DELIVERED else str(outcome)
    if outcome == Outcome.IN_PROGRESS:
        status += f" {elapsed(now_ns - (delivery['acked_at'] or now_ns))}"
    reason = None
    if outcome in _REASONED:
        reason = delivery["last_error"]
    elif outcome in (Outcome.FAILED, Outcome.IN_PROGRESS):
        reason = delivery["answer_text"]
    if delivery["obligation"] == "given_up" and outcome not in _REASONED:
        reason = _with_reason(status, reason) + _times(delivery["reminders"])
        outcome = status = Outcome.UNANSWERED
    due_at = delivery["due_at"] if delivery["obligation"] == "open" else None
    return {
        "outcome": str(outcome),
        "status": _due(delivery, _with_reason(status, by_whom(reason)), due_at, now_ns),
        "reason": reason,
        "due_at": iso_time(due_at) if due_at else None,
        "reminders": delivery["reminders"] or 0,
    }


def _due(delivery: Fields, status: str, due_at: int | None, now_ns: int) -> str:
    """A status with the time when the answer is due; what is overdue comes first."""
    if due_at is None:
        return status
    if due_at > now_ns:
        return f"{status}, due in {elapsed(due_at - now_ns)}{reminders_text(delivery)}"
    return f"overdue {elapsed(now_ns - due_at)}{reminders_text(delivery)}, {status}"


def refused(reason: str | None, code: str | None) -> dict[str, Any]:
    """The same of what the relay refused."""
    status = _with_reason(Outcome.REFUSED, reason)
    return {"outcome": str(Outcome.REFUSED), "status": status, "reason": reason, "code": code}


def headline(row: Row, deliveries: Sequence[Fields], now_ns: int) -> str:
    """The outcome for the first line of ``relay trace``, with reason and time."""
    outcome = summary(row, deliveries)
    if outcome == Outcome.REFUSED or (outcome == Outcome.WAITING and not deliveries):
        return _with_reason(outcome, row["last_error"])
    if len(deliveries) != 1:
        return outcome
    (delivery,) = deliveries
    return describe(
        delivery, row["message_type"], now_ns, is_named=delivery["recipient"] != row["target"]
    )


def progress(row: Row, deliveries: Sequence[Fields], now_ns: int) -> str:
    """The outcome for the person who sent a message, with recipients: ``delivered to bob``."""
    if len(deliveries) > 1 and {outcome_of(delivery) for delivery in deliveries} == {
        Outcome.DELIVERED
    }:
        return f"delivered to {len(deliveries)} recipients, not read yet"
    if len({(outcome_of(one), one["last_error"]) for one in deliveries}) == 1:
        first = deliveries[0]
        if outcome_of(first) is Outcome.HELD:  # for all for the same reason
            names = ", ".join(one["recipient"] for one in deliveries[:MOST_NAMED])
            if len(deliveries) > MOST_NAMED:
                names += f" and {len(deliveries) - MOST_NAMED} more"
            return describe({**first, "recipient": names}, row["message_type"], now_ns)
    if 0 < len(deliveries) <= MOST_NAMED:
        return "; ".join(describe(delivery, row["message_type"], now_ns) for delivery in deliveries)
    return headline(row, deliveries, now_ns)


def describe(delivery: Fields, kind: str | None, now_ns: int, *, is_named: bool = True) -> str:
    """The outcome of one delivery, with recipient, reason and time."""
    outcome, name = outcome_of(delivery), delivery["recipient"]
    if outcome is Outcome.HANDLED:
        return "handled by the relay itself"
    if outcome is Outcome.REMOVED:
        return f"removed from the inbox of {name}, not seen in .read"
    text = (
        f"{outcome} {_BEFORE_A_NAME[outcome]} {name}"
        if is_named or outcome in _ANSWERED
        else str(outcome)
    )
    if outcome in _ANSWERED:
        if outcome is Outcome.IN_PROGRESS:
            text += f" for {elapsed(now_ns - (delivery['acked_at'] or now_ns))}"
        text = _with_reason(text, delivery["answer_text"])
        text += f" (answer {delivery['answer_id']})" if delivery["answer_id"] else ""
    elif outcome in _REASONED:  # which imply that no answer is expected
        return _with_reason(text, by_whom(delivery["last_error"])) + _of_the_file(delivery)
    elif outcome is Outcome.DELIVERED:
        text += ", not read yet"
    elif outcome is Outcome.SHOWN:
        text += ", not seen yet"
    elif outcome is Outcome.READ and kind in OWING and delivery["state"] == "read":
        text += ", not answered" if delivery["obligation"] == "given_up" else ", not answered yet"
    return text + reminders_text(delivery)


def _of_the_file(delivery: Fields) -> str:
    """Say if the last file of a dead delivery was read or removed, before its end or since."""
    if delivery["state"] != "dead" or (delivery["read_at"] or 0) <= (delivery["written_at"] or 0):
        return ""
    return "; it was removed" if delivery["read_how"] == REMOVED else "; it was read"


def reminders_text(delivery: Fields) -> str:
    """The reminders sent for an overdue answer; empty if there were none."""
    if delivery["obligation"] == "given_up":
        return ", the relay no longer waits for an answer"
    return _times(delivery["reminders"]) if delivery["obligation"] == "open" else ""


def _times(reminders: int | None) -> str:
    return f", reminded {times(reminders)}" if reminders else ""


def _with_reason(text: str, reason: str | None) -> str:
    return f"{text}: {reason}" if reason else text
