"""The faults that can be planted into a history, and which check of an audit is to find each.

| group | what |
|---|---|
| rows | ledger, store and journal disagree, or say what must not be |
| files | originals and attachments that are gone or changed |
| damage | store files and segments with a flipped byte: no reader takes them |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from relay.base.errors import RelayError


class Fault(NamedTuple):
    """One kind of fault."""

    name: str
    group: str
    explains: str
    checks: tuple[str, ...]  # one of these finds it
    also: tuple[str, ...] = ()  # what may be found because of it


KINDS = (
    Fault("lost", "rows", "completed and archived, and in no store", ("reconcile.missing",)),
    Fault("differs", "rows", "the store has another content", ("reconcile.checksum_differs",)),
    Fault("extra", "rows", "in the store, and no row knows it", ("reconcile.orphan",)),
    Fault("undelivered", "rows", "completed, its delivery is staged", ("reconcile.undelivered",)),
    Fault(
        "doubled",
        "rows",
        "one delivery was made twice",
        ("duplicates.delivered_twice", "reconcile.delivery_duplicate"),
    ),
    Fault("twice", "rows", "one file was numbered twice", ("duplicates.numbered_twice",)),
    Fault("overdue", "rows", "a command that was never acknowledged", ("acks.overdue",)),
    Fault("orphan", "rows", "an ack of what nobody sent", ("acks.unrequested",)),
    Fault(
        "inversion",
        "rows",
        "written after one that was found later",
        ("ordering.inversion",),
        ("latency.slow_hour",),
    ),
    Fault(
        "skew",
        "rows",
        "its sender's clock is hours ahead",
        ("ordering.future_id", "ordering.future_mtime"),
    ),
    Fault("dead", "rows", "five dead letters of one pair, one reason", ("dead_letters.repeated",)),
    Fault("silent", "rows", "an agent with mail that says nothing", ("agents.silent",)),
    Fault("stuck", "rows", "a process that is stuck for hours", ("agents.stuck",)),
    Fault("runaway", "rows", "forty messages between two in a minute", ("threads.runaway",)),
    Fault(
        "unanswered", "rows", "a query without a response", ("threads.unanswered", "acks.overdue")
    ),
    Fault("signature", "rows", "a file with a false signature", ("security.bad_signature",)),
    Fault("repaired", "rows", "an inbox that was open to others", ("security.mode_repaired",)),
    Fault("limited", "rows", "an agent over its rate", ("security.rate_limited",)),
    Fault("refused", "rows", "a file whose name was taken", ("security.id_taken",)),
    Fault("slow", "rows", "an hour in which everything took long", ("latency.slow_hour",)),
    Fault("original_gone", "files", "an original is gone", ("reconcile.original_missing",)),
    Fault("original_altered", "files", "an original was edited", ("reconcile.original_differs",)),
    Fault("attachment_gone", "files", "an attachment is gone", ("integrity.missing",)),
    Fault("attachment_altered", "files", "one was edited", ("integrity.damaged",)),
    Fault("archive_byte", "damage", "a flipped byte in an archive", ("integrity.damaged",)),
    Fault("segment_byte", "damage", "a flipped byte in a segment", ("integrity.damaged",)),
)
BY_NAME = {fault.name: fault for fault in KINDS}
GROUPS = tuple(dict.fromkeys(fault.group for fault in KINDS))


class Planted(NamedTuple):
    """One fault of one home."""

    fault: str
    checks: tuple[str, ...]
    also: tuple[str, ...]
    explains: str
    message_id: str | None = None
    agent: str | None = None
    route: str | None = None
    path: str | None = None  # below the home


def chosen(text: str) -> set[str]:
    """Names meant by ``all``, a group, or names separated by commas.

    Errors: RelayError for an unknown name.
    """
    found: set[str] = set()
    for word in text.split(","):
        named = {f.name for f in KINDS if word in ("all", f.group, f.name)}
        if not named:
            known = ", ".join((*GROUPS, *BY_NAME))
            raise RelayError(f"there is no fault {word!r}: all, {known}")
        found |= named
    return found


def planted(name: str, **facts: str | None) -> Planted:
    """Create a fault of that name with its place."""
    fault = BY_NAME[name]
    return Planted(name, fault.checks, fault.also, fault.explains, **facts)


def listed(found: Iterable[Planted]) -> list[dict[str, object]]:
    """Convert to the entries of the list of faults."""
    return [one._asdict() for one in found]
