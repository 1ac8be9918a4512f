"""The values that pass through the pipeline: an Inbound for each file, a Plan for each effect.

    OutboxFile -> Inbound (read, claimed, validated) -> Plan -> OutgoingFile

All are frozen; rows of the ledger are tuples. A Plan without an Inbound is the relay's own: a
retry, a reminder, a notice. At the end: the ``Resources`` that each ``Part`` of the loop has.
"""

from __future__ import annotations

import os
import re
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from relay.acomm.model import (
    ChannelType,
    Message,
    Origin,
)
from relay.agents.status import StatusChange
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.home import PENDING, Home
from relay.base.incidents import Incident, IncidentKind, Refusal
from relay.base.logs import LogCall
from relay.base.message import MessageFile
from relay.base.names import answer_id, derived_id, message_id_of, shown
from relay.base.outcomes import CANCELLED
from relay.delivery.eventlog import EventLog
from relay.engine.engine import Engine
from relay.engine.messages import NewMessage
from relay.engine.retries import OverdueDelivery
from relay.journal.tier_plan import JournalCommand
from relay.ledger.agents import PendingOperation, ProcessRow
from relay.ledger.deliveries import DeliveryFacts
from relay.ledger.ledger import FileFacts, Ledger

FIRST_PAUSE_S, MOST_PAUSE_S = 1, 60  # between two tries at what a disk or an inbox refuses
OUTBOX = ("outbox",)
IN_PENDING = ("outbox", PENDING)  # where a writer left it
MOST_DRAFTED_NS = 86_400 * NS_PER_S  # between naming a file and writing it
LATEST_NS = 9 * 10**18  # the year 2255
UNSAFE_FILES = frozenset(
    {IncidentKind.HARD_LINK, IncidentKind.FOREIGN_OWNER, IncidentKind.NOT_A_REGULAR_FILE}
)
PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")


class OutboxFile(msgspec.Struct, frozen=True, gc=False):
    """A file in an outbox, and its facts from fstat."""

    agent: str
    file_name: str
    message_id: str  # empty: the name is not that of a message
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int = 0  # last changed or renamed: no writer can set it; 0: it has other names
    place: tuple[str, ...] = OUTBOX  # below the agent's directory

    @property
    def path(self) -> str:
        """Relative to the home."""
        return "/".join(("agents", self.agent, *self.place, self.file_name))

    @property
    def key(self) -> tuple[str, str]:
        """The key of the file while it waits or is processed."""
        return (self.agent, "/".join((*self.place[1:], self.file_name)))


def outbox_file_of(
    agent: str, name: str, status: os.stat_result, place: tuple[str, ...] = OUTBOX
) -> OutboxFile:
    """The facts of a file."""
    mtime_ns, ctime_ns = _times_of(status)
    message_id = message_id_of(name) or ""
    return OutboxFile(
        agent, name, message_id, status.st_size, mtime_ns, status.st_ino, ctime_ns, place
    )


def _times_of(status: os.stat_result) -> tuple[int, int]:
    """The mtime in 63 bits, as its writer may set any; the ctime, 0 for a file with other names.

    Each of these names that goes changes the ctime for all.
    """
    mtime_ns = min(max(status.st_mtime_ns, 0), LATEST_NS)
    return mtime_ns, status.st_ctime_ns if status.st_nlink == 1 else 0


def is_same(found: OutboxFile, status: os.stat_result) -> bool:
    """True if the file is unchanged and in its place."""
    mtime_ns, ctime_ns = _times_of(status)
    return (
        status.st_ino == found.inode
        and status.st_size == found.size
        and mtime_ns == found.mtime_ns
        and (ctime_ns == found.ctime_ns or not ctime_ns or not found.ctime_ns)
    )


class Row(Enum):
    """The ledger's row of a file."""

    NEW = auto()  # inserted with this batch
    REPEATED = auto()  # inserted before: a crash or a transient error came between
    NONE = auto()  # refused without a row, see the table rejections


class Inbound(msgspec.Struct, frozen=True, gc=False):
    """A file from an outbox: read by intake, claimed in the ledger, then validated."""

    file: OutboxFile
    message: MessageFile | None  # None: it is not a valid message
    refusal: Refusal | None = None  # None: it is valid
    checksum: str | None = None  # SHA-256 of the content, hex
    original: MessageFile | None = None  # as it was sent, where ``message`` is without its secrets
    redacted: bytes | None = None  # archived in place of a file that has secrets
    incidents: tuple[Incident, ...] = ()
    row: Row = Row.NEW
    seen_at: int = 0  # Unix nanoseconds, when it was claimed this time
    discovered_at: int = 0  # the first time

    @property
    def is_unsafe(self) -> bool:
        """True for anything but a regular file that the agent alone owns."""
        return any(incident.kind in UNSAFE_FILES for incident in self.incidents)

    @property
    def has_row(self) -> bool:
        """True if the ledger has a row of this file."""
        return self.row is not Row.NONE

    @property
    def subject(self) -> Subject:
        """The message, as replies refer to it."""
        source = self.file if self.row is Row.NONE else None
        return Subject(self.file.message_id, self.file.agent, self.discovered_at, source)

    @property
    def sent_at(self) -> int:
        """Time at which it was sent (Unix ns), no later than its discovery.

        That is the earlier of the time in its name and its mtime. A time in the name more than a
        day before the mtime is ignored: the name was copied from an example, or is not a time.
        """
        at = min(self.file.mtime_ns, self.discovered_at)
        named = int((self.file.message_id or "0").partition("-")[0])
        return named if at - MOST_DRAFTED_NS <= named < at else at

    @property
    def archive_day_ns(self) -> int:
        """A time on the day whose archive folder the file goes to."""
        return self.seen_at if self.row is Row.NONE else self.discovered_at

    def facts(self) -> FileFacts:
        """The facts that the ledger records."""
        return FileFacts(self.file.message_id, *msgspec.structs.astuple(self.origin()))

    def origin(self) -> Origin:
        """The same for the journal. Its path is text: a name may be invalid text."""
        message, file = self.message, self.file
        return Origin(
            file.agent,
            file.path if file.message_id else shown(file.path),
            file.size,
            file.mtime_ns,
            file.inode,
            self.checksum,
            None if message is None else str(message.kind),
            None if message is None else message.to,
            self.seen_at if self.row is Row.NONE else self.discovered_at,
        )


class Subject(msgspec.Struct, frozen=True, gc=False):
    """The message that messages of the relay are about; their ids are derived from it."""

    message_id: str = ""  # empty: none
    agent: str = ""  # its sender
    at_ns: int = 0  # when it was discovered
    source: OutboxFile | None = None  # a file without a row, whose id may be another's

    def reply_id(self, to: str, key: str, order: int = 0) -> str:
        """The id of a message about it, the same after a crash; in an inbox they sort by order."""
        return answer_id(self.at_ns + order, to, self.source or self.message_id, key)


class SystemMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of the relay's own: a reply, a notice, a reminder. Sent once for each id."""

    message_id: str
    message: MessageFile
    at_ns: int  # it is dated no earlier
    recipients: tuple[str, ...]  # those that get a file
    is_answer: bool = False  # acknowledges the plan's message, if that expects it

    def with_next_id(self) -> SystemMessage:
        """It with another id, where an agent has sent a message under the one that it has.

        Whoever knows what a message of the relay is about can tell its id.
        """
        next_id = derived_id(self.at_ns, "taken", self.message_id)
        return msgspec.structs.replace(self, message_id=next_id)


class Route(msgspec.Struct, frozen=True, gc=False):
    """A channel, and the recipients if the channel does not determine them."""

    channel: str
    channel_type: ChannelType
    members: tuple[str, ...] = ()  # to be members before it is sent
    recipients: tuple[str, ...] | None = None  # None: determined by the channel's type
    shown_channel: str | None = None  # the CHANNEL header of the delivered file


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A message for the engine to store, and its channel."""

    route: Route
    message: NewMessage


class Answer(msgspec.Struct, frozen=True, gc=False):
    """An agent's answer to a message in the store."""

    original: Message
    status: str  # received, in_progress, completed, failed
    text: str  # its first line
    ends: bool  # nothing is owed after it


class OutgoingFile(msgspec.Struct, frozen=True, gc=False):
    """One message to be written into inboxes."""

    message_id: str
    number: int  # in the store; 0: of the plan's draft
    data: bytes  # the delivered file
    recipients: tuple[str, ...]
    attempt: int = 0  # of a delivery that is made again; 0 for the first
    pause_s: int = 0  # until an inbox that cannot be written is tried again; 0: as at first


class Reminder(msgspec.Struct, frozen=True, gc=False):
    """A reminder of an owed answer, or the end of waiting for it."""

    number: int  # of the message, in the store
    message_id: str
    recipient: str
    reminders: int  # with this one
    due_ms: int  # when it is overdue again; 0: given up


class DeliveryChanges(msgspec.Struct, frozen=True, gc=False):
    """Changes of deliveries beside those that files are written for."""

    ended: tuple[OverdueDelivery, ...] = ()  # not reached, or not acknowledged
    reminders: tuple[Reminder, ...] = ()
    held: tuple[DeliveryFacts, ...] = ()  # not made yet


class Cancellation(NamedTuple):
    """A message that is to be taken back from those that have not read it."""

    number: int  # in the store
    message_id: str
    sender: str  # of the command
    recipients: tuple[str, ...] = ()  # whose deliveries it ended

    @property
    def reason(self) -> str:
        """The reason that the ended deliveries get."""
        return f"{CANCELLED}{self.sender}"


class Prune(msgspec.Struct, frozen=True, gc=False):
    """A job: prune now according to `retention` in config.json."""


class Pack(msgspec.Struct, frozen=True, gc=False):
    """A job: pack the archive's days before ``before`` (ISO date), each into one file."""

    before: str = ""  # empty: before yesterday


Job = JournalCommand | Prune | Pack  # run beside the loop


class Effects(msgspec.Struct, frozen=True, gc=False):
    """Changes of the ledger's other tables, and work for others, once a plan is committed."""

    incidents: tuple[Incident, ...] = ()
    may_repeat: bool = False  # the incidents may have been recorded before a crash
    status_note: str | None = None  # the sender's own status text
    status_change: StatusChange | None = None
    key: tuple[str, str] | None = None  # of an agent from now on; an empty one: none
    asked: PendingOperation | None = None  # what the command asks for, and is answered later
    process: ProcessRow | None = None  # its new row
    closed_intents: tuple[int, ...] = ()
    job: Job | None = None
    cancellation: Cancellation | None = None


NO_EFFECTS = Effects()


class ControlReply(msgspec.Struct, frozen=True, gc=False):
    """The reply of the orchestrator. ``ok`` None: no reply, or one that comes later."""

    ok: bool | None
    text: str = ""
    effects: Effects = NO_EFFECTS
    told: tuple[SystemMessage, ...] = ()  # to others
    attached: bytes = b""  # appended to the text


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Everything that one message, or one event of the relay's own, causes.

    ``PlanApplier.apply`` completes it: numbers, the files of ``messages``, what is held, and the
    effects of its command.
    """

    subject: Subject
    inbound: Inbound | None = None  # None: the relay's own; refused, it goes to rejected/
    draft: Draft | None = None  # None: nothing to be stored, or stored before
    answer: Answer | None = None
    files: tuple[OutgoingFile, ...] = ()
    command: MessageFile | None = None  # for the orchestrator
    is_carried_out: bool = False  # the command was, before a crash
    messages: tuple[SystemMessage, ...] = ()
    changes: DeliveryChanges = DeliveryChanges()
    effects: Effects = NO_EFFECTS

    @property
    def refusal(self) -> Refusal | None:
        """Why its file is refused."""
        return None if self.inbound is None else self.inbound.refusal

    @property
    def message_id(self) -> str:
        """The id of the message that it is about; empty: none."""
        return self.subject.message_id


Missed = dict[tuple[str, str], str]  # message id, recipient -> why it is not in its inbox


# -- what the parts of the loop share --------------------------------------------------------


class Resources(NamedTuple):
    """The open stores of a home, its settings, the clock and the log."""

    config: Config
    home: Home
    ledger: Ledger
    store: Engine
    events: EventLog  # of the store: its journal
    clock: Clock
    log: LogCall


class Part:
    """A part of the loop, which owns it: used in its thread alone."""

    def __init__(self, given: Resources) -> None:
        self._config = given.config
        self._home = given.home
        self._ledger = given.ledger
        self._store = given.store
        self._events = given.events
        self._clock = given.clock
        self._log = given.log
