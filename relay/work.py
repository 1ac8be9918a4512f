"""The work of one batch: what is known of each file between its claim and its archive."""

from __future__ import annotations

from typing import NamedTuple

from relay.found import Found
from relay.ledger import FileFacts
from relay.names import ORCHESTRATOR


class Posting(NamedTuple):
    """One message to be put into inboxes."""

    message_id: str
    engine_id: int
    data: bytes  # the delivered file
    recipients: tuple[str, ...]  # those that have an inbox and have not got it yet
    own: FileFacts | None = None  # the ledger's facts, when it is the orchestrator's message
    attempt: int = 0  # of a delivery that is made again; 0 for the first


class Later(NamedTuple):
    """A delivery that is not made with its batch: it is held, and tried when due."""

    message_id: str
    recipient: str
    reason: str
    due_at: int  # Unix nanoseconds


class Acknowledged(NamedTuple):
    """What an answer says of the message that it answers."""

    message_id: str  # the relay's id of the original
    recipient: str  # who answered
    status: str  # received, in_progress, completed, failed


class Work:
    """One file on its way. Only the loop touches it."""

    __slots__ = (
        "acknowledged",
        "again",
        "bounced",
        "control",
        "discovered_at",
        "failure",
        "found",
        "has_row",
        "held",
        "later",
        "message_id",
        "notice",
        "postings",
        "seen_at",
        "sequence",
        "status_note",
        "unsafe",
    )

    def __init__(self, found: Found, message_id: str, discovered_at: int) -> None:
        self.found = found
        self.message_id = message_id
        self.discovered_at = discovered_at  # what ids of answers are derived from
        self.seen_at = discovered_at  # this time round
        self.has_row = True  # False: refused without a row, see the table rejections
        self.again = False  # it was recorded before: a crash or a passing error came between
        self.failure = ""  # why it is refused; its file goes to rejected/
        self.unsafe = False  # no regular file
        self.notice = ""  # not a file at all: what tells one notice from another
        self.control = False  # the orchestrator itself was the recipient
        self.bounced: tuple[str, ...] = ()  # recipients that are no longer there
        self.postings: list[Posting] = []
        self.later: list[Later] = []
        self.held: dict[tuple[str, str], str] = {}  # (message id, recipient) -> why
        self.status_note: str | None = None  # what the sender says of itself
        self.acknowledged: Acknowledged | None = None
        self.sequence = 0  # the engine's, once everything this file causes is an event

    @property
    def agent(self) -> str:
        """The sender: the owner of the outbox."""
        return self.found.agent

    @property
    def archive_day_ns(self) -> int:
        """A time on the day whose archive folder takes the file."""
        return self.discovered_at if self.has_row else self.seen_at

    def own_ids(self) -> list[str]:
        """Ids of the orchestrator's messages that this file caused."""
        return [posting.message_id for posting in self.postings if posting.own is not None]

    def deliveries(self) -> int:
        """Files that this work puts into inboxes."""
        return sum(len(posting.recipients) for posting in self.postings)

    def delivery_rows(self, now_ns: int) -> list[tuple[str, str, str, int, str | None, int | None]]:
        """Rows for the ledger's ``stage``: every recipient, reached or not, for the first time."""
        rows: list[tuple[str, str, str, int, str | None, int | None]] = [
            (posting.message_id, recipient, "staged", now_ns, None, None)
            for posting in self.postings
            if not posting.attempt
            for recipient in posting.recipients
        ]
        rows.extend(
            (self.message_id, name, "bounced", now_ns, "no longer an agent", None)
            for name in self.bounced
        )
        rows.extend(
            (one.message_id, one.recipient, "held", now_ns, one.reason, one.due_at)
            for one in self.later
        )
        if self.control:
            rows.append((self.message_id, ORCHESTRATOR, "staged", now_ns, None, None))
        return rows

    def redelivery_rows(self) -> list[tuple[str, str, int]]:
        """(message id, recipient, attempt) of every delivery that is made again."""
        return [
            (posting.message_id, recipient, posting.attempt)
            for posting in self.postings
            if posting.attempt
            for recipient in posting.recipients
        ]
