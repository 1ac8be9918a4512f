"""Values that the stages of the pipeline share: the context, and the work items of a batch."""

from __future__ import annotations

import re
from typing import NamedTuple

from relay.acomm.model import DeliveryState, Origin
from relay.agents.requests import ProcessRequest
from relay.agents.status import StatusChange
from relay.base.checksums import sha256_hex
from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.home import Home
from relay.base.incidents import Incident
from relay.base.logs import LogCall
from relay.base.metrics import Metrics
from relay.base.names import ORCHESTRATOR
from relay.delivery.eventlog import EventLog
from relay.delivery.intake import OutboxFile
from relay.engine.commstore import CommStore
from relay.journal.plan import JournalCommand
from relay.ledger import FileFacts, Ledger, MessageRow
from relay.ledger.processes import ProcessRow


class Context(NamedTuple):
    """Shared dependencies of one session. Each part keeps those it needs."""

    config: Config
    home: Home
    ledger: Ledger
    store: CommStore
    events: EventLog  # of that store: the journal
    clock: Clock
    log: LogCall
    tally: Metrics


class Prune(NamedTuple):
    """A job: prune now according to `retention` in config.json."""


class Pack(NamedTuple):
    """A job: pack the archive's days before ``before`` (ISO date), each into one file."""

    before: str = ""  # empty: before yesterday


PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")


class KeyRegistration(NamedTuple):
    """The public key of an agent from now on; empty: none."""

    name: str
    public_key: str

    def __str__(self) -> str:
        if not self.public_key:
            return f"no key is registered for {self.name} any more"
        return f"the key {self.public_key} is registered for {self.name}"


class OutgoingFile(NamedTuple):
    """One message to be written into inboxes."""

    message_id: str
    engine_id: int
    data: bytes  # the delivered file
    recipients: tuple[str, ...]  # those that have an inbox and have not got it yet
    system: FileFacts | None = None  # the ledger's facts, when it is the orchestrator's message
    attempt: int = 0  # of a delivery that is made again; 0 for the first


class DeferredDelivery(NamedTuple):
    """A delivery that is not made with its batch but when due."""

    message_id: str
    recipient: str
    reason: str
    due_at: int  # Unix nanoseconds


class EndedDelivery(NamedTuple):
    """A delivery that ended without reaching, or being acknowledged by, its recipient."""

    number: int  # of its message, in the store
    message_id: str
    recipient: str
    state: DeliveryState  # EXPIRED, BOUNCED or DEAD
    attempt: int  # the last that was made
    reason: str


class ObligationState(NamedTuple):
    """The ledger's entry for an answer owed by a recipient."""

    obligation: str  # open, answered, given_up
    due_at: int | None = None  # Unix nanoseconds: when it is overdue


class Reminder(NamedTuple):
    """A reminder of an owed answer, or the end of waiting for it."""

    number: int  # of the message, in the store
    message_id: str
    recipient: str
    reminders: int  # with this one
    due_ms: int  # when it is overdue again; 0: given up


class Acknowledged(NamedTuple):
    """The effect of an answer on the message that it answers."""

    message_id: str  # the relay's id of the original
    recipient: str  # the answering agent
    status: str  # received, in_progress, completed, failed
    answer_id: str = ""  # of the answer itself
    text: str = ""  # its first line
    obligation: ObligationState | None = None  # what is owed after it; None: as before


class WorkItem:
    """One file, or one message of the relay, in the pipeline. Only the loop uses it."""

    __slots__ = (
        "acknowledged",
        "attachments",
        "bounced",
        "closed_intents",
        "deferred",
        "discovered_at",
        "ended",
        "failure",
        "file",
        "has_row",
        "incidents",
        "is_control",
        "is_repeat",
        "is_stored",
        "is_unsafe",
        "jobs",
        "key",
        "message_id",
        "notice_key",
        "origin",
        "outgoing",
        "pause_s",
        "process",
        "redacted",
        "reminders",
        "requests",
        "seen_at",
        "status_change",
        "status_note",
        "undelivered",
    )

    def __init__(self, found: OutboxFile, message_id: str, discovered_at: int) -> None:
        self.file = found
        self.message_id = message_id
        self.discovered_at = discovered_at  # what ids of answers are derived from
        self.seen_at = discovered_at  # this time round
        self.has_row = True  # False: refused without a row, see the table rejections
        self.is_repeat = False  # it was recorded before: a crash or a passing error came between
        self.is_stored = False  # the store had it before
        self.failure = ""  # why it is refused; its file goes to rejected/
        self.is_unsafe = False  # no regular file, or not the agent's alone
        self.incidents: list[Incident] = []  # what should not have been there
        self.attachments: tuple[str, ...] = ()  # what it names
        self.key: KeyRegistration | None = None  # a key that is registered with this
        self.notice_key = ""  # not a file at all: what tells one notice from another
        self.is_control = False  # the orchestrator itself was the recipient
        self.jobs: list[JournalCommand | Prune | Pack] = []  # once this is accepted
        self.bounced: dict[str, str] = {}  # recipients that are no longer there -> why
        self.outgoing: list[OutgoingFile] = []
        self.deferred: list[DeferredDelivery] = []
        self.undelivered: dict[tuple[str, str], str] = {}  # (message id, recipient) -> why
        self.status_note: str | None = None  # the sender's own status text
        self.status_change: StatusChange | None = None  # an agent's status, as a command has it
        self.acknowledged: Acknowledged | None = None
        self.origin: Origin | None = None  # what is known of the file, where there is one
        self.ended: list[EndedDelivery] = []  # deliveries that end with this
        self.reminders: list[Reminder] = []  # reminders sent, or given up
        self.redacted: bytes | None = None  # what is archived instead of the file: it has secrets
        self.requests: list[
            ProcessRequest
        ] = []  # processes to be started or ended, once this is accepted
        self.process: ProcessRow | None = None  # its new row in the ledger
        self.closed_intents: tuple[int, ...] = ()  # intents that are done with this
        self.pause_s = 0  # until what is held is tried again; 0: as at first

    @property
    def agent(self) -> str:
        """The sender: the owner of the outbox."""
        return self.file.agent

    @property
    def archive_day_ns(self) -> int:
        """A time on the day whose archive folder the file goes to."""
        return self.discovered_at if self.has_row else self.seen_at

    def system_ids(self) -> list[str]:
        """Ids of the orchestrator's messages caused by this file."""
        return [posting.message_id for posting in self.outgoing if posting.system is not None]

    def deliveries(self) -> int:
        """Number of files that this work writes into inboxes."""
        return sum(len(posting.recipients) for posting in self.outgoing)

    def undelivered_rows(
        self, now_ns: int
    ) -> list[tuple[str, str, str, int, str | None, int | None]]:
        """Rows for the ledger's ``stage``: every recipient that was not reached now."""
        rows: list[tuple[str, str, str, int, str | None, int | None]] = [
            (message_id, recipient, "held", now_ns, reason, None)
            for (message_id, recipient), reason in self.undelivered.items()
        ]
        rows.extend(
            (self.message_id, name, "bounced", now_ns, reason, None)
            for name, reason in self.bounced.items()
        )
        rows.extend(
            (one.message_id, one.recipient, "held", now_ns, one.reason, one.due_at)
            for one in self.deferred
        )
        return rows


def system_work(row: MessageRow, key: str) -> WorkItem:
    """A work item without a file, about an accepted message; ``key`` names the occasion."""
    return system_work_about(row.message_id, row.agent_name, row.discovered_at, key)


def system_work_about(
    message_id: str, agent: str = "", discovered_at: int = 0, key: str = "end"
) -> WorkItem:
    """A work item without a file, about a message that may have no row."""
    work = WorkItem(OutboxFile(agent, "", None, 0, 0, 0), message_id, discovered_at)
    work.has_row = False
    work.notice_key = key
    return work


def system_message_row(
    message_id: str, content: bytes, kind: str, to: str, at_ns: int
) -> FileFacts:
    """The ledger row of a message of the orchestrator, which has no file in an outbox."""
    path, checksum = f"{ORCHESTRATOR}/{message_id}.msg", sha256_hex(content)
    return FileFacts(
        message_id, ORCHESTRATOR, path, len(content), at_ns, None, checksum, kind, to, at_ns
    )
