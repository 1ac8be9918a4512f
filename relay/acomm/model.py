"""The values of the message engine.

Every value is immutable: a change is a new value in the old one's place, so a snapshot of the
store is a copy of its lists, and another thread may encode it while the engine runs.

Numbers of the enums are the ones on disk; ``label`` is the document's spelling (``AtLeastOnce``),
used in JSON, logs and audits. Times are Unix seconds unless the name says otherwise.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn

import msgspec

from relay.base.clock import NS_PER_S

MetadataValue = str | int | float | bool | None
Metadata = dict[str, MetadataValue]


class FrozenMetadata(dict[str, MetadataValue]):
    """Read-only metadata for callers; a copy of it is a plain dict."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the metadata of a message is read-only: copy it with dict(metadata)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def copy(self) -> Metadata:
        """A plain dict."""
        return dict(self)

    def __reduce__(self) -> tuple[type, tuple[Metadata]]:
        return dict, (dict(self),)


class LabelledEnum(IntEnum):
    """An enum with the document's spelling of each member."""

    @property
    def label(self) -> str:
        """The document's name: ``AT_LEAST_ONCE`` is ``AtLeastOnce``."""
        return "".join(word.capitalize() for word in self.name.split("_"))


class MessageType(LabelledEnum):
    """The purpose of a message."""

    TEXT = 0
    COMMAND = 1  # expects an Acknowledgment
    QUERY = 2  # expects a Response
    RESPONSE = 3
    BROADCAST = 4
    NOTIFICATION = 5
    ACKNOWLEDGMENT = 6
    ERROR = 7


class MessageStatus(LabelledEnum):
    """The status of a message; it changes only on evidence."""

    CREATED = 0
    SENT = 1
    DELIVERED = 2  # written for every recipient
    ACKNOWLEDGED = 3
    FAILED = 4
    DEAD_LETTER = 5
    ARCHIVED = 6


class Priority(LabelledEnum):
    """Priorities; 0 goes first."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3
    BACKGROUND = 4


class ChannelType(LabelledEnum):
    """The kinds of channels, by their recipients."""

    DIRECT = 0  # the other one of two
    GROUP = 1  # every participant but the sender
    BROADCAST = 2  # the owner sends, observers and members receive
    PUB_SUB = 3  # subscribers of a matching topic


class ChannelState(LabelledEnum):
    """The states of a channel."""

    ACTIVE = 0
    PAUSED = 1
    DRAINING = 2  # delivers what it has, takes nothing new
    CLOSED = 3  # final


class ParticipantRole(LabelledEnum):
    """The roles of participants."""

    OWNER = 0
    MEMBER = 1
    OBSERVER = 2


class MatchMode(LabelledEnum):
    """Kinds of topic patterns."""

    EXACT = 0
    WILDCARD = 1  # has a `*` segment
    MULTI_LEVEL = 2  # ends with `#`


class DeliveryMode(LabelledEnum):
    """Delivery guarantees."""

    AT_MOST_ONCE = 0
    AT_LEAST_ONCE = 1
    EXACTLY_ONCE = 2


class RetentionKind(LabelledEnum):
    """Kinds of retention policies."""

    FOREVER = 0
    DURATION = 1  # seconds
    COUNT = 2  # messages
    SIZE = 3  # bytes


class DeliveryState(LabelledEnum):
    """The state of one recipient's delivery, in order; a further attempt begins at STAGED again."""

    SENT = 0  # accepted, not delivered yet
    STAGED = 1  # an owner that delivers has written its file; only the rename is left
    WAITING = 2  # its acknowledgment is overdue: it waits for the next attempt
    DELIVERED = 3  # in the recipient's inbox or queue
    RECEIVED = 4  # the recipient has taken it
    ACKNOWLEDGED = 5
    BOUNCED = 6  # the recipient left or no longer exists
    EXPIRED = 7  # its ttl passed first
    DEAD = 8  # its attempts are exhausted


class SortField(LabelledEnum):
    """Sort fields of a query."""

    CREATED_AT = 0
    PRIORITY = 1
    SENDER = 2
    MESSAGE_TYPE = 3


class SortOrder(LabelledEnum):
    """Sort orders."""

    ASCENDING = 0
    DESCENDING = 1


# gc=False: it holds texts, numbers and a dict of them, so it is part of no cycle, and a store
# has a hundred thousand that the collector need not walk.
class Message(msgspec.Struct, frozen=True, gc=False):
    """One message; fields in the order of the record on disk."""

    id: int
    message_type: MessageType
    sender: str
    channel_id: int
    content: bytes  # UTF-8, or ciphertext in an encrypted store's file
    topic: str | None = None
    correlation_id: str | None = None  # UUID v4
    priority: Priority = Priority.NORMAL
    metadata: Metadata | None = None
    created_at: int = 0
    delivered_at: int | None = None
    acknowledged_at: int | None = None
    ttl: int | None = None  # seconds
    status: MessageStatus = MessageStatus.CREATED
    retry_count: int = 0
    signature: bytes | None = None  # Ed25519

    @property
    def relay_id(self) -> str | None:
        """The id of the message file it was read from; None if there was none."""
        relay_id = self.metadata.get("relay_id") if self.metadata else None
        return relay_id if isinstance(relay_id, str) else None

    @property
    def created_ns(self) -> int:
        """When its file was discovered, or the relay's own event happened (Unix ns); 0: unknown."""
        at = (self.metadata or {}).get("created_ns")
        return at if isinstance(at, int) else 0

    @property
    def not_before_ns(self) -> int:
        """Until when it is held (Unix ns), as its sender asked; 0: it is not."""
        at = (self.metadata or {}).get("not_before_ns")
        return at if isinstance(at, int) else 0

    @property
    def ttl_over_ns(self) -> int | None:
        """When its ttl passes (Unix ns), counted from when it was sent; None without one."""
        if self.ttl is None:
            return None
        known = self.metadata or {}
        sent = known.get("sent_ns") or self.created_ns or None
        if not isinstance(sent, int):
            sent = self.created_at * NS_PER_S
        return sent + self.ttl * NS_PER_S

    def is_expired(self, now_ns: int) -> bool:
        """True when its ttl has passed."""
        over_ns = self.ttl_over_ns
        return over_ns is not None and now_ns >= over_ns


class Participant(msgspec.Struct, frozen=True):
    """A member of a channel."""

    id: str
    role: ParticipantRole = ParticipantRole.MEMBER
    joined_at: int = 0
    identity_id: str | None = None


class Retention(msgspec.Struct, frozen=True):
    """A retention policy; ``amount`` is 0 for Forever."""

    kind: RetentionKind = RetentionKind.FOREVER
    amount: int = 0


class ChannelConfig(msgspec.Struct, frozen=True):
    """The configuration of a channel; the defaults are the document's."""

    delivery: DeliveryMode = DeliveryMode.AT_MOST_ONCE
    max_message_size: int = 1_048_576  # bytes
    max_participants: int | None = None
    retention: Retention = Retention()
    ack_timeout: int | None = None  # seconds
    max_retries: int = 3
    retry_backoff_ms: int = 1000
    echo: bool = False
    sticky_messages: bool = False
    priority_ordering: bool = True


FLUSH_MODES = (None, "immediate", "batch", "manual")  # by their numbers on disk


class ChannelSettings(msgspec.Struct, frozen=True):
    """Settings of a channel that version 1 of the file has no field for."""

    max_pending: int | None = None  # pending messages; more are held. None: no limit
    flush: str | None = None  # one of FLUSH_MODES; None: as the store


class ArchiveInfo(msgspec.Struct, frozen=True):
    """One archive file that a store lists."""

    name: str  # below the archive folder: 2026-01-31/000001.acomm
    messages: int
    first_id: int
    last_id: int
    first_at: int  # created_at of the oldest, Unix seconds
    last_at: int
    archived: int  # of its messages, those with status Archived
    size: int  # bytes


class Origin(msgspec.Struct, frozen=True, gc=False):
    """The file that a message came in, with what is needed to find it again."""

    agent: str
    path: str  # below the home
    size: int  # bytes
    mtime_ns: int
    inode: int | None
    checksum: str | None  # SHA-256 in hex; None where it could not be parsed
    kind: str | None
    target: str | None
    discovered_at: int  # Unix nanoseconds


class Channel(msgspec.Struct, frozen=True):
    """A named conversation with participants and rules."""

    id: int
    name: str
    channel_type: ChannelType
    owner: str
    participants: tuple[Participant, ...] = ()
    config: ChannelConfig = ChannelConfig()
    state: ChannelState = ChannelState.ACTIVE
    created_at: int = 0
    modified_at: int = 0
    message_count: int = 0
    description: str | None = None
    tags: tuple[str, ...] = ()


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One message for one recipient."""

    state: DeliveryState = DeliveryState.SENT
    attempt: int = 1  # 1 for the first delivery
    due_ms: int = 0  # Unix ms: when its ack is overdue, or its wait ends; 0: never
    queued: bool = False  # in the recipient's queue, not yet received
    spent: int = 0  # attempts that a replayed dead letter had before


class Obligation(msgspec.Struct, frozen=True):
    """An answer that a recipient owes: it has the message and has not completed or failed it."""

    due_ms: int = 0  # Unix ms: when it is overdue; 0: no timer while delivery is retried
    reminders: int = 0  # how often it was reminded
    said: str = ""  # its last acknowledgment that did not end it: received, in_progress
    since: int = 0  # Unix seconds: when it said so; else when it got the message


class DeadLetter(msgspec.Struct, frozen=True):
    """A message whose delivery to ``recipients`` was given up."""

    message: Message  # with its original fields; retry_count says how often it was tried again
    recipients: tuple[str, ...]
    last_error: str
    dead_lettered_at: int


class MessageFilter(msgspec.Struct, frozen=True):
    """The criteria of a query; each one given must match."""

    channel_ids: tuple[int, ...] | None = None
    sender: str | None = None
    message_types: tuple[MessageType, ...] | None = None
    topic_pattern: str | None = None
    after: int | None = None
    before: int | None = None
    status: tuple[MessageStatus, ...] | None = None
    priority: tuple[Priority, ...] | None = None
    correlation_id: str | None = None
    content_pattern: str | None = None  # regular expression
    limit: int = 100
    offset: int = 0
    # None is CreatedAt, Descending; of receiving, where neither is given, first come, first served
    sort_by: SortField | None = None
    sort_order: SortOrder | None = None
    include_archived: bool = False

    @property
    def order(self) -> tuple[SortField, SortOrder]:
        """The sort field and order, with their defaults."""
        return (
            SortField.CREATED_AT if self.sort_by is None else self.sort_by,
            SortOrder.DESCENDING if self.sort_order is None else self.sort_order,
        )


class Subscription(msgspec.Struct, frozen=True):
    """A participant's interest in the topics of one PubSub channel."""

    id: int
    channel_id: int
    subscriber: str
    topic_pattern: str
    match_mode: MatchMode
    created_at: int = 0
    active: bool = True
    filter: MessageFilter | None = None


class StoreFile(msgspec.Struct, frozen=True):
    """Everything that one `.acomm` file holds."""

    created_at: int
    modified_at: int
    channels: tuple[Channel, ...] = ()
    messages: tuple[Message, ...] = ()
    subscriptions: tuple[Subscription, ...] = ()
    dead_letters: tuple[Message, ...] = ()
    archive: tuple[Message, ...] = ()
    engine_state: dict[int, bytes] = {}  # blocks of section 256, by tag
    encrypted: bool = False  # the content of every message is sealed


def read_only_copy(message: Message) -> Message:
    """The message for a caller, with read-only metadata.

    The store keeps plain dicts, which the garbage collector does not walk.
    """
    if message.metadata is None:
        return message
    return msgspec.structs.replace(message, metadata=FrozenMetadata(message.metadata))


def with_status(message: Message, status: MessageStatus, at: int) -> Message:
    """The message with a new status and the time of that status."""
    delivered = message.delivered_at
    if status is not MessageStatus.FAILED and delivered is None:
        delivered = at
    acknowledged = at if status is MessageStatus.ACKNOWLEDGED else message.acknowledged_at
    return msgspec.structs.replace(
        message, status=status, delivered_at=delivered, acknowledged_at=acknowledged
    )
