"""Codes of refusals, and kinds of security incidents: rows of ``security_events``.

An incident is written once, with the action taken, however often it
is seen again. Of files refused for the same reason, the first of a minute is written, then a count.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from relay.base.clock import NS_PER_S, Clock

WINDOW_S = 60  # refusals of an agent that are alike are counted for so long
MOST_KNOWN = 10_000  # incidents remembered as written; after that the memory is cleared


class IncidentKind(StrEnum):
    """Kind of an incident; docs/formats/ledger.md has the same list."""

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
    RATE_LIMITED = "rate_limited"  # an agent sends faster than it may; the rest waits
    REPLY_LOOP = "reply_loop"  # agents answer each other without end; further messages wait
    STRAY_MESSAGE = "stray_message"  # in an inbox, and not delivered by the relay; left there
    UNSIGNED = "unsigned"  # without a signature although one is required; refused


class RefusalCode(StrEnum):
    """Why a file is refused, beside the sentence; docs/formats/ledger.md has the same list."""

    ANSWERS_NOTHING = "answers_nothing"  # RE or THREAD names nothing that awaits this answer
    ATTACHMENT = "attachment"  # it is missing, too large, unsafe, or has other content
    BAD_NAME = "bad_name"  # the file's name is not that of a message
    BAD_SIGNATURE = "bad_signature"  # not by the registered key, or changed after signing
    CHANNEL = "channel"  # there is none of this name, or its state or rules do not allow it
    CHECKSUM = "checksum"  # CHECKSUM is not the body's
    DISAPPEARED = "file_disappeared"  # its file left the outbox while no relay ran
    EXPIRED = "expired"  # its TTL passed before it could be delivered
    FAULT = "fault"  # a bug in the relay
    ID_TAKEN = "id_taken"  # another message has its id
    MALFORMED = "malformed"  # a rule of the format
    NO_RECIPIENT = "no_recipient"  # TO names nobody that there is
    RECIPIENT_AWAY = "recipient_away"  # its recipient was retired, or terminated
    TO_ITSELF = "to_itself"  # its sender is its recipient
    TOO_LARGE = "too_large"  # larger than limits.max_body_bytes
    UNSAFE_FILE = "unsafe_file"  # a link, FIFO, directory, device, or another user's
    UNSENT = "unsent"  # left in .pending
    UNSIGNED = "unsigned"  # without a signature, or a key, although one is required


class Refusal(NamedTuple):
    """Why a file is not delivered: a code for programs, a sentence for its sender."""

    code: str  # a RefusalCode; empty where it is not known
    reason: str


class Incident(NamedTuple):
    """One row of ``security_events`` without its time."""

    kind: IncidentKind
    agent: str | None
    path: str | None  # relative to the home
    detail: str


class IncidentDedup:
    """Lasting incidents that were written already. Owned by the loop."""

    def __init__(self) -> None:
        self._known: set[Incident] = set()

    def fresh(self, incidents: list[Incident]) -> list[Incident]:
        """The new ones of ``incidents``. Memory is bounded: after very many, all count as new."""
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        new = [incident for incident in dict.fromkeys(incidents) if incident not in self._known]
        self._known.update(new)
        return new


# Kinds of refused files: each file has its own nack and its row in messages or rejections.
COUNTED = frozenset(
    {
        IncidentKind.ATTACHMENT_MISMATCH,
        IncidentKind.ATTACHMENT_UNSAFE,
        IncidentKind.BAD_SIGNATURE,
        IncidentKind.FOREIGN_OWNER,
        IncidentKind.HARD_LINK,
        IncidentKind.NOT_A_REGULAR_FILE,
        IncidentKind.UNSIGNED,
    }
)


class IncidentCounter:
    """Counts refusals per agent and kind in windows of a minute. Owned by the loop.

    A kill before a window ends loses its count and nothing more: see COUNTED.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.windows: dict[tuple[str | None, IncidentKind], tuple[int, int]] = {}  # end, count

    def fresh(self, incidents: list[Incident]) -> list[Incident]:
        """Those of ``incidents`` to write now; the others are counted."""
        new: list[Incident] = []
        for incident in incidents:
            key = (incident.agent, incident.kind)
            if incident.kind not in COUNTED:
                new.append(incident)
            elif key in self.windows:
                end, count = self.windows[key]
                self.windows[key] = (end, count + 1)
            else:
                self.windows[key] = (self._clock.monotonic_ns() + WINDOW_S * NS_PER_S, 0)
                new.append(incident)
        return new

    def take_over(self, *, all_of_them: bool = False) -> list[Incident]:
        """Counts of the windows that ended, each once, except those with a single refusal."""
        now = self._clock.monotonic_ns()
        over = [key for key, (end, _) in self.windows.items() if all_of_them or end <= now]
        counts = [(key, self.windows.pop(key)[1]) for key in over]
        return [
            Incident(
                kind,
                agent,
                f"agents/{agent}/outbox",
                f"{count} more of the same within {WINDOW_S} s: each was refused and answered",
            )
            for (agent, kind), count in counts
            if count
        ]
