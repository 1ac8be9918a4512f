"""Every hop of a delivery with its time: from its row, and from what audit_log kept of it.

A row knows its last attempt alone. Of those before, audit_log has when each was accepted and
written, noted with the attempt that followed, and when it was read or given up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from relay.base.clock import NS_PER_MS
from relay.base.names import ORCHESTRATOR

ENDED = ("bounced", "expired", "dead", "held")


class Hop(NamedTuple):
    """One step of a message on its way; ``at`` is Unix ns, None where nobody knows it."""

    at: int | None
    what: str  # a status or state of docs/formats/ledger.md, or a word of its own
    recipient: str | None  # None: it is the message's
    attempt: int | None = None
    detail: str | None = None


def audit_rows(
    db: sqlite3.Connection, message_id: str, since_ns: int
) -> dict[str, list[sqlite3.Row]]:
    """What audit_log has of a message's deliveries, by recipient, oldest first.

    It has no index: it is walked back from its end to ``since_ns``, when the message was found.
    """
    row = db.execute(
        "SELECT id FROM audit_log WHERE at < ? ORDER BY id DESC LIMIT 1",
        (since_ns // 1_000_000 * 1_000_000,),
    ).fetchone()
    lead = f"{message_id} > "
    found: dict[str, list[sqlite3.Row]] = {}
    for one in db.execute(
        "SELECT * FROM audit_log WHERE id > ? AND substr(what, 1, ?) = ? ORDER BY id",
        (row[0] if row else 0, len(lead), lead),
    ):
        found.setdefault(one["what"][len(lead) :], []).append(one)
    return found


def delivery_hops(delivery: Mapping[str, Any], log: Iterable[sqlite3.Row]) -> list[Hop]:
    """The hops of one delivery that were made, in the order of time."""
    name = delivery["recipient"]
    if name == ORCHESTRATOR:
        return [Hop(delivery["read_at"], "handled", name)] if delivery["read_at"] else []
    hops = list(_with_exact_times(_attempts(delivery, log), delivery["read_at"]))
    made = {hop.what for hop in hops}
    if delivery["read_at"] and "read" not in made:
        hops.append(Hop(delivery["read_at"], "read", name, delivery["attempt"]))
    for n, hop in reversed([*enumerate(hops)]):
        if hop.what == "read":  # the row knows the last alone
            hops[n] = hop._replace(detail=delivery["read_how"])
            break
    if delivery["state"] in ENDED:
        if delivery["state"] not in made:  # it was so from the beginning, or nobody noted it
            at = None if delivery["written_at"] else delivery["staged_at"]
            hops.append(Hop(at, delivery["state"], name, delivery["attempt"]))
        last = max(n for n, hop in enumerate(hops) if hop.what == delivery["state"])
        hops[last] = hops[last]._replace(detail=delivery["last_error"])
    if delivery["acked_at"]:
        hops.append(Hop(delivery["acked_at"], "acked", name, detail=delivery["ack_status"]))
    return sort_hops(hops)


def _with_exact_times(hops: Iterable[Hop], read_at: int | None) -> Iterator[Hop]:
    """The hops, of which audit_log has some to the millisecond, in the order they were made in.

    A millisecond is not before what was noted in it to the nanosecond.
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


def _is_same_ms(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one // NS_PER_MS == other // NS_PER_MS


def sort_hops(hops: Iterable[Hop]) -> list[Hop]:
    """By time; one whose time is not known stays behind the one before it."""
    keyed: list[tuple[int, Hop]] = []
    at = 0
    for hop in hops:
        at = hop.at or at
        keyed.append((at, hop))
    return [hop for _, hop in sorted(keyed, key=itemgetter(0))]


def _attempts(delivery: Mapping[str, Any], log: Iterable[sqlite3.Row]) -> Iterator[Hop]:
    """Attempt for attempt: each ends with the change that began the next."""
    name, number = delivery["recipient"], 1
    before: int | None = None  # when the last file was written: an attempt may have none
    seen: list[sqlite3.Row] = []
    for one in log:
        if one["attempt"] not in (None, number):
            written = one["written_at"] if one["written_at"] != before else None
            yield from _attempt_hops(name, number, one["staged_at"], written, seen)
            before, number, seen = one["written_at"], one["attempt"], []
        seen.append(one)
    while number < delivery["attempt"]:  # attempts that nobody noted
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
    """One attempt: accepted or replayed, written, and whatever came of it."""
    if number == 1:
        yield Hop(staged, "accepted", name, number)
    for one in seen:
        if one["old_status"] == "dead" and one["new_status"] in ("held", "written"):
            # noted when it was done: not behind the file that it led to
            yield Hop(min(one["at"], written or one["at"]), "replayed", name, number)
    if written or not is_noted:
        yield Hop(written, "written", name, number)
    for one in seen:
        if one["new_status"] in ("read", *ENDED):
            yield Hop(one["at"], one["new_status"], name, number)
