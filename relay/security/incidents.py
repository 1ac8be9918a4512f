"""Incidents: what should not have been there, a kind each; rows of ``security_events``.

One is written once, with what was done about it, and not again each time that the same thing is
seen. Source: relay-file-system.txt 5.1-5.3.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

MOST_KNOWN = 10_000  # states that are remembered as told; then it begins anew


class IncidentKind(StrEnum):
    """What happened; docs/formats/ledger.md has the same list."""

    ATTACHMENT_MISMATCH = "attachment_mismatch"  # content that is not its name's; set aside
    ATTACHMENT_UNSAFE = "attachment_unsafe"  # a link, a FIFO, another user's; set aside
    AUDIT_PRUNED = "audit_pruned"  # retention removed rows of audit_log or security_events
    BAD_SIGNATURE = "bad_signature"  # signed, and not by the registered key; refused
    FOREIGN_OWNER = "foreign_owner"  # a file or directory of another user; refused
    HARD_LINK = "hard_link"  # a message file of several names; refused, its mode left alone
    KEY_CHANGED = "key_changed"  # meta.json names another key than the registered one; ignored
    KEY_CONFIRMED = "key_confirmed"  # operator or lead registered a key with `relay key trust`
    KEY_REGISTERED = "key_registered"  # the first key that meta.json named
    LINKED_DIRECTORY = "linked_directory"  # a link in the place of a directory; not entered
    MODE_REPAIRED = "mode_repaired"  # it was open to others, and is 700 or 600 now
    NOT_A_REGULAR_FILE = "not_a_regular_file"  # a link, FIFO, socket, directory, device; refused
    QUOTA_EXCEEDED = "quota_exceeded"  # more waits in an outbox than may; it waits there
    RATE_LIMITED = "rate_limited"  # an agent sends faster than it may; the rest waits
    REPLY_LOOP = "reply_loop"  # agents answer each other without end; what is too much waits
    UNSIGNED = "unsigned"  # without a signature, where one is asked for; refused


class Incident(NamedTuple):
    """One row of ``security_events``, its time apart."""

    kind: IncidentKind
    agent: str | None
    path: str | None  # relative to the home
    detail: str


class Told:
    """Which incidents that last were told already. Owned by the loop."""

    def __init__(self) -> None:
        self._known: set[Incident] = set()

    def fresh(self, incidents: list[Incident]) -> list[Incident]:
        """Those of ``incidents`` that are new; a set of bounded size, so after very many, all."""
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        new = [one for one in dict.fromkeys(incidents) if one not in self._known]
        self._known.update(new)
        return new

    def forget(self, agent: str, kind: IncidentKind) -> None:
        """It is over: when it comes again, it is an incident of its own."""
        self._known = {one for one in self._known if one.agent != agent or one.kind is not kind}
