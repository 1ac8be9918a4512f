"""Every step of a message with its time, from ledger, audit_log, offers and outboxes.

A delivery's row knows only its last attempt. Of earlier attempts audit_log has when each was
accepted and written, noted with the attempt that followed, and when it was read or given up.
Messages that no relay has recorded are found as files in outboxes, their ``.pending`` and inboxes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from operator import itemgetter
from typing import Any, NamedTuple

from relay.base import outcomes
from relay.base.clock import NS_PER_MS, NS_PER_S, local_time
from relay.base.errors import NotFound, RelayError, UnsafePath
from relay.base.home import LEDGER, PENDING, Home
from relay.base.message import ANSWERS, Kind
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR
from relay.base.outcomes import REMOVED, Outcome
from relay.views.ids import messages_in, resolve_id

OFFERS = ("offered", "in_context", "returned")
MOST_ANSWER = 200  # characters of an earlier one
MOST_RINGS = 20  # of one delivery
NEVER = 1 << 62
ENDED = ("bounced", "expired", "dead", "held")
TAKEN_UP = (("held", "staged"), ("held", "written"))
UNRECORDED_TEXT = {
    "waiting": "is in the outbox of {}, not seen by a relay yet",
    "stray": "is in the inbox of {}, but was not delivered by the relay",
    "unsent": "is in the outbox/.pending of {}, untouched for {} s, not sent yet",
}
UNRECORDED_IN_INBOX = "is in the inbox of {}, but not in the ledger"  # e.g. after a crash
RUNNING_HINT = "a relay is running; `relay status` says whether it accepts messages"
_WORDS = {
    "accepted": "accepted for {}",
    "discovered": "discovered in the outbox of {}",
    "acked": "acknowledged by {}",
    "answered": "answered by {}",  # before that
    "handled": "handled by the relay itself",
    "read": "read by {}",
    "offered": "shown to {}",
    "in_context": "seen in the context of {}",
    "returned": "not seen by {}, to be shown again",
    "rung": "{} was rung",
    "reminded": "{} was reminded",
    "discarded": "its dead letter for {} was discarded",
    "told": "{} was told",
    "about": "{} sent a message about it",
    REMOVED: "removed from the inbox of {}, not seen in .read",
    "written": "written to the inbox of {}",
}
# What became of a message's deliveries; a ring is of an agent, for all that waited.
_LOG = """
SELECT * FROM audit_log WHERE message_id = ? AND recipient IS NOT NULL
AND new_status NOT IN
    ('asked', 'reminded', 'given_up', 'offered', 'in_context', 'returned', 'discarded')
ORDER BY id"""


class NotRecorded(NotFound):
    """The ledger has neither a row nor a refusal for this id."""


class Hop(NamedTuple):
    """One step of a message; ``at`` is Unix ns, None if unknown."""

    at: int | None
    what: str  # a status or state of docs/formats/ledger.md, or "discovered", "replayed" …
    recipient: str | None  # None: a step of the message itself
    attempt: int | None = None
    detail: str | None = None


def trace_message(home: Home, given: str) -> tuple[dict[str, Any], str]:
    """The facts of a message and its steps, and a note about what is not known.

    ``given``: an id, or the beginning of either part. Errors: NotFound.
    """
    from relay.ledger.file import open_current

    message_id, note = resolve_id(home, given), ""
    with contextlib.closing(open_current(home.path(LEDGER))) as db:
        try:
            facts = read_trace(db, message_id)
        except NotRecorded:  # the relay may have recorded it in the meantime: look again
            facts = find_unrecorded(home, message_id) or read_trace(db, message_id)
    if facts["status"] not in UNRECORDED_TEXT:
        hops = [Hop(**hop) for hop in facts["hops"]]
        try:
            last = {delivery["answer"] for delivery in facts["deliveries"]}
            hops += _hops_about(home, message_id, last)
        except (RelayError, OSError) as exc:
            note = f"reminders and messages about it are not known: {exc}"
        facts["hops"] = [hop._asdict() for hop in sort_hops(hops)]
    facts["file_at"] = _file_at(home, facts)
    return facts, note


def _hops_about(home: Home, message_id: str, last: Set[str]) -> Iterator[Hop]:
    """Yield reminders, notices and other messages about a message, and answers but the ``last``."""
    from relay.views.messages import messages_about

    for message in messages_about(home, message_id):
        if message.kind in ANSWERS:
            if message.relay_id not in last and message.sender != ORCHESTRATOR:
                line = " ".join(message.body.split())[:MOST_ANSWER]
                answer = f"{message.kind}, {line} (answer {message.relay_id})"
                yield Hop(message.at_ns, "answered", message.sender, detail=answer)
            continue
        names = json.loads(message.recipients)
        what, name = "about", message.sender
        if message.sender == ORCHESTRATOR:
            what, name = "reminded" if message.kind == Kind.REMINDER else "told", ", ".join(names)
        text = f"{message.relay_id}: {message.body}" if what == "about" else message.body
        detail = None if what == "reminded" else text.split("\n", 1)[0]
        yield Hop(message.at_ns, what, name, detail=detail)


def _file_at(home: Home, facts: dict[str, Any]) -> str | None:
    """Return where an archived message's file is now; None for other messages."""
    from relay.base import archive_pack

    path = facts.get("file") or ""
    return archive_pack.locate(home, path) if path.startswith("archive/") else None


def read_trace(db: sqlite3.Connection, message_id: str) -> dict[str, Any]:
    """Read what the ledger knows of one message.

    Times are Unix ns. Errors: NotRecorded for an unknown id.
    """
    row = db.execute("SELECT * FROM messages WHERE message_id = ?", (message_id,)).fetchone()
    if row is None:
        return _rejected(db, message_id)
    deliveries = outcomes.read_deliveries(db, "message_id = ?", message_id)
    log: dict[str, list[sqlite3.Row]] = {}
    for entry in db.execute(_LOG, (message_id,)):
        log.setdefault(entry["recipient"], []).append(entry)
    hops = [Hop(row["discovered_at"], "discovered", None)]
    for delivery in deliveries:
        hops += delivery_hops(delivery, log.get(delivery["recipient"], ()))
    hops += offer_hops(db, message_id, deliveries)
    if row["processed_at"]:
        hops.append(Hop(row["processed_at"], row["status"], None, detail=row["file_path"]))
    return {
        "message_id": message_id,
        "from": row["agent_name"],
        "to": row["target"],
        "kind": row["message_type"],
        "status": row["status"],
        "outcome": outcomes.headline(row, deliveries, time.time_ns()),
        "file": row["file_path"],
        "checksum": row["checksum"],
        "discovered_at": row["discovered_at"],
        "processed_at": row["processed_at"],
        "retries": row["retry_count"],
        "error": row["last_error"],
        "code": row["last_error_code"],
        "deliveries": [_delivery(delivery) for delivery in deliveries],
        "hops": [hop._asdict() for hop in sort_hops(hops)],
    }


def _delivery(row: outcomes.Fields) -> dict[str, Any]:
    return {
        "recipient": row["recipient"],
        "state": row["state"],
        "outcome": outcomes.outcome_of(row),
        "attempt": row["attempt"],
        "staged_at": row["staged_at"],
        "written_at": row["written_at"],
        "read_at": row["read_at"],
        "acked_at": row["acked_at"],
        "ack_status": row["ack_status"],
        "read_how": row["read_how"],
        "answer": row["answer_id"],
        "answer_text": row["answer_text"],
        "obligation": row["obligation"],
        "reminders": row["reminders"],
        "discarded_at": row["discarded_at"],
        "due_at": row["due_at"],
        "error": row["last_error"],
    }


def _rejected(db: sqlite3.Connection, message_id: str) -> dict[str, Any]:
    row = db.execute(
        "SELECT * FROM rejections WHERE file_name = ? ORDER BY at DESC", (message_id + MSG_SUFFIX,)
    ).fetchone()
    if row is None:
        raise NotRecorded(
            f"no message {message_id}, in the ledger or any outbox",
            hint="`relay list` lists messages",
        )
    return {
        "message_id": message_id,
        "from": row["agent"],
        "status": "rejected",
        "outcome": f"refused: {row['reason']}",
        "error": row["reason"],
        "code": row["code"],
        "answer": row["nack_id"],
        "discovered_at": row["at"],
        "deliveries": [],
        "hops": [Hop(row["at"], "discovered", None)._asdict()],
    }


def describe_hop(hop: dict[str, Any], facts: dict[str, Any]) -> str:
    """Describe a hop."""
    what, name, detail = hop["what"], hop["recipient"], hop["detail"]
    if name is None and facts["from"] == ORCHESTRATOR:  # which has no outbox, and writes no file
        return "made by the relay" if what == "discovered" else str(what)
    if name is None and what != "discovered":
        at = facts.get("file_at") or detail
        return f"{what}, file in {detail}" + ("" if at == detail else f" ({at})")
    word = REMOVED if what == "read" and detail == REMOVED else what
    if outcomes.is_cancelled(what, detail):
        word, detail = str(Outcome.CANCELLED), outcomes.by_whom(detail)
    text: str = _WORDS.get(word, word + " for {}").format(name or facts["from"])
    if what in OFFERS and (hop["attempt"] or 1) > 1:
        text += f" (offer {hop['attempt']})"
    if detail is not None and what != "read":
        text += f": {detail}" + (_answer(name, facts) if what == "acked" else "")
    elif (hop["attempt"] or 1) > 1 and what not in OFFERS:
        text += f", attempt {hop['attempt']}"
    for delivery in facts["deliveries"]:
        is_it = delivery["recipient"] == name and delivery["state"] == what == "held"
        if is_it and detail is not None and delivery["due_at"]:
            text += f", tried again at {local_time(delivery['due_at'])}"
    return text


def _answer(name: str, facts: dict[str, Any]) -> str:
    """Format an acknowledgment's first line and id."""
    for delivery in facts["deliveries"]:
        if delivery["recipient"] == name and delivery["answer"]:
            text = f", {delivery['answer_text']}" if delivery["answer_text"] else ""
            return f"{text} (answer {delivery['answer']})"
    return ""


def not_yet(deliveries: list[dict[str, Any]], is_to_be_acked: bool) -> Iterator[str]:
    """List the steps still to come. Reading a command does not complete it: an agent may crash."""
    for delivery in deliveries:
        name, state = delivery["recipient"], delivery["state"]
        if name == ORCHESTRATOR:
            if not delivery["read_at"]:
                yield "handled by the relay itself"
            continue
        if state == "staged":
            yield f"written to the inbox of {name}"
        if state in ("staged", "written"):
            yield f"read by {name}"
        if is_to_be_acked and state in ("staged", "written", "read") and not delivery["acked_at"]:
            yield f"acknowledged by {name}{outcomes.reminders_text(delivery)}"
        elif state == "acked" and delivery["outcome"] == Outcome.IN_PROGRESS:
            yield f"completed by {name}"


def delivery_hops(delivery: Mapping[str, Any], log: Iterable[sqlite3.Row]) -> list[Hop]:
    """Return the past hops of one delivery in the order of time."""
    name = delivery["recipient"]
    if name == ORCHESTRATOR:
        return [Hop(delivery["read_at"], "handled", name)] if delivery["read_at"] else []
    hops = list(_with_exact_times(_attempts(delivery, log), delivery["read_at"]))
    made = {hop.what for hop in hops}
    if delivery["read_at"] and "read" not in made:
        hops.append(Hop(delivery["read_at"], "read", name, delivery["attempt"]))
    for n, hop in reversed([*enumerate(hops)]):
        if hop.what == "read":  # the delivery's row has only the last read
            hops[n] = hop._replace(detail=delivery["read_how"])
            break
    if delivery["state"] in ENDED:
        if delivery["state"] not in made:  # from the beginning, or not in audit_log
            at = None if delivery["written_at"] else delivery["staged_at"]
            hops.append(Hop(at, delivery["state"], name, delivery["attempt"]))
        last = max(n for n, hop in enumerate(hops) if hop.what == delivery["state"])
        hops[last] = hops[last]._replace(detail=delivery["last_error"])
    if delivery["discarded_at"]:
        hops.append(Hop(delivery["discarded_at"], "discarded", name))
    if delivery["acked_at"]:
        hops.append(Hop(delivery["acked_at"], "acked", name, detail=delivery["ack_status"]))
    return sort_hops(hops)


def offer_hops(
    db: sqlite3.Connection, message_id: str, deliveries: Iterable[Mapping[str, Any]]
) -> Iterator[Hop]:
    """Yield what hooks showed of a message and what came of it, and rings while it waited."""
    query = "SELECT * FROM offers WHERE message_id = ? ORDER BY recipient, offer"
    for offered in db.execute(query, (message_id,)):
        name, offer = offered["recipient"], offered["offer"]
        if offered["state"] == "offered" or offered["after"]:
            detail = f"session {offered['session']}, after {offered['after'] or 'a call'}"
            yield Hop(offered["offered_at"], "offered", name, offer, detail)
        if offered["state"] != "offered":
            yield Hop(offered["ended_at"], offered["state"], name, offer, offered["evidence"])
    rings = "SELECT * FROM rings WHERE agent = ? AND at BETWEEN ? AND ? ORDER BY at LIMIT ?"
    for delivery in deliveries:
        since = delivery["written_at"] or 0  # of a file that was found by recovery it is not known
        until = delivery["read_at"] or delivery["acked_at"] or NEVER
        for ring in db.execute(rings, (delivery["recipient"], since, until, MOST_RINGS)):
            detail = f"{ring['rung']}, {ring['messages']} waiting: {ring['result']}"
            yield Hop(ring["at"], "rung", delivery["recipient"], detail=detail)


def _with_exact_times(hops: Iterable[Hop], read_at: int | None) -> Iterator[Hop]:
    """Correct times that audit_log rounds down to milliseconds.

    A rounded time must not sort before an exact one of the same millisecond.
    """
    before = 0
    for hop in hops:
        at = hop.at
        if hop.what == "read" and _is_same_ms(at, read_at):
            at = read_at
        if at is not None and at < before and _is_same_ms(at, before):
            at = before
        before = at or before
        yield hop._replace(at=at)


def _is_same_ms(first: int | None, second: int | None) -> bool:
    return first is not None and second is not None and first // NS_PER_MS == second // NS_PER_MS


def sort_hops(hops: Iterable[Hop]) -> list[Hop]:
    """Sort by time; a hop of unknown time stays after its predecessor of the same recipient."""
    keyed: list[tuple[int, Hop]] = []
    hops = list(hops)
    begin = at = (hops[0].at or 0) if hops else 0
    recipient = None
    for hop in hops:
        at = hop.at or (at if hop.recipient == recipient else begin)
        recipient = hop.recipient
        keyed.append((at, hop))
    return [hop for _, hop in sorted(keyed, key=itemgetter(0))]


def _attempts(delivery: Mapping[str, Any], log: Iterable[sqlite3.Row]) -> Iterator[Hop]:
    """Yield the hops by attempt; a row that begins an attempt has the times of the previous one."""
    name, number = delivery["recipient"], 1
    before: int | None = None  # when the last file was written; not every attempt writes one
    seen: list[sqlite3.Row] = []
    for entry in log:
        if entry["attempt"] not in (None, number):
            written = entry["written_at"] if entry["written_at"] != before else None
            yield from _attempt_hops(name, number, entry["staged_at"], written, seen)
            before, number, seen = entry["written_at"], entry["attempt"], []
        seen.append(entry)
    while number < delivery["attempt"]:  # attempts missing in audit_log
        yield from _attempt_hops(name, number, None, None, seen, is_noted=False)
        number, seen = number + 1, []
    written = delivery["written_at"] if delivery["written_at"] != before else None
    yield from _attempt_hops(name, number, delivery["staged_at"], written, seen)


def _attempt_hops(
    name: str,
    number: int,
    staged: int | None,
    written: int | None,
    seen: list[sqlite3.Row],
    *,
    is_noted: bool = True,
) -> Iterator[Hop]:
    """Yield one attempt: accepted or replayed, written, and its result.

    A delivery that was held has the time when it was taken up again: that of its acceptance is not
    known then.
    """
    if number == 1:
        first = seen[0] if seen else None
        is_later = first is not None and (staged or 0) // NS_PER_MS > first["at"] // NS_PER_MS
        was_held = first is not None and (first["old_status"], first["new_status"]) in TAKEN_UP
        yield Hop(None if was_held or is_later else staged, "accepted", name, number)
        if was_held:  # from the beginning
            yield Hop(None, "held", name, number)
    for entry in seen:
        if entry["old_status"] == "dead" and entry["new_status"] in ("held", "written"):
            # logged after the fact: sort it before the file it produced
            yield Hop(min(entry["at"], written or entry["at"]), "replayed", name, number)
    if written or not is_noted:
        yield Hop(written, "written", name, number)
    for entry in seen:
        if entry["new_status"] in ("read", *ENDED):
            yield Hop(entry["at"], entry["new_status"], name, number)


def count_waiting(home: Home) -> int:
    """Count the messages in the outboxes."""
    return sum(1 for _ in messages_in(home, "outbox"))


def find_unrecorded(home: Home, message_id: str) -> dict[str, Any] | None:
    """Find the file of an unrecorded message, as facts for `relay trace`."""
    places = (("waiting", "outbox"), ("unsent", f"outbox/{PENDING}"), ("stray", "inbox"))
    for status, place in places:
        for agent, found in messages_in(home, place):
            if found == message_id:
                return {
                    "message_id": message_id,
                    "from": agent,
                    "status": status,
                    "file": f"agents/{agent}/{place}/{message_id}{MSG_SUFFIX}",
                    "untouched_s": _untouched_s(home, agent, place, message_id + MSG_SUFFIX),
                    "error": None,
                    "deliveries": [],
                    "hops": [],
                }
    return None


def describe_unrecorded(facts: dict[str, Any], is_running: bool) -> str:
    """Describe an unrecorded message: where it is and what is needed."""
    if facts["status"] == "stray" and not is_running:
        text = UNRECORDED_IN_INBOX.format(facts["from"])
        return f"{text}: `relay up` recovers what a crash left unrecorded"
    if facts["status"] == "stray":
        hint = "find out who put it there"
    elif facts["status"] == "waiting":
        hint = RUNNING_HINT if is_running else "no relay is running; start one with `relay up`"
    else:
        hint = "rename it into the outbox to send it"
    text = UNRECORDED_TEXT[facts["status"]].format(facts["from"], facts["untouched_s"])
    return f"{text}: {hint}"


def _untouched_s(home: Home, agent: str, place: str, name: str) -> int:
    """Return the seconds since a file was written or renamed; 0 if it has just been removed."""
    from relay.delivery.intake import untouched_since

    now = time.time_ns()
    with home.dirs() as dirs, contextlib.suppress(OSError, UnsafePath):
        folder = dirs.get("agents", agent, *place.split("/"))
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return (now - untouched_since(status, now)) // NS_PER_S
    return 0
