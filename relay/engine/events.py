"""The events of the message engine, and their encoding in a journal.

Every change of a store is an event: ``transitions.apply`` is the only code that changes one,
so applying the same events to the same start gives the same store.

A journal keeps them as msgpack maps with a version, readable by any msgpack library:

    {"v": 1, "seq": n, "at_ns": ..., "event": {"type": "MessageSent", ...}}
                                                                   an event; the store's n-th
    {"v": 1, "start": {"boot_id": ..., "epoch": ..., "at": ...}}   control: its writer started
    {"v": 1, "checkpoint": {"offset": ..., "sequence": ...}}       snapshot boundary
    {"v": 1, "sealed": nonce | ciphertext | tag}                   one of these, encrypted

``seq`` makes replay idempotent. Encryption uses the store's key with the record's logical offset
as additional data, so a moved record does not decrypt. Nonces are random: an offset may be written
twice, after a torn tail. A new field of an event gets a default; what old readers must not read
gets a new version, and the old decoder stays.
"""

from __future__ import annotations

import os
from typing import ClassVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from relay.acomm.fields import U64
from relay.acomm.model import (
    ArchiveInfo,
    Channel,
    ChannelConfig,
    ChannelSettings,
    ChannelState,
    Delivery,
    DeliveryState,
    Message,
    Origin,
    Participant,
    Subscription,
)
from relay.acomm.store_file import NONCE_BYTES
from relay.base.errors import FormatError, SealedStore, VersionError


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class ChannelCreated(_Event, frozen=True):
    """A channel exists from now on."""

    channel: Channel

    @property
    def at(self) -> int:
        """Unix seconds."""
        return self.channel.created_at


class ChannelChanged(_Event, frozen=True):
    """A channel's state, settings and words are these from now on."""

    channel_id: int
    state: ChannelState
    config: ChannelConfig
    at: int
    settings: ChannelSettings = ChannelSettings()
    description: str | None = None
    tags: tuple[str, ...] = ()


class ParticipantJoined(_Event, frozen=True):
    """A participant joined a channel."""

    channel_id: int
    participant: Participant
    at: int  # Unix seconds


class ParticipantLeft(_Event, frozen=True):
    """A participant left a channel; its subscriptions there ended."""

    channel_id: int
    participant: str
    at: int


class ParticipantIdentified(_Event, frozen=True):
    """The key of a participant has this id from now on, in every channel; None: it has none."""

    participant: str
    identity_id: str | None
    at: int


class SubscriptionAdded(_Event, frozen=True):
    """A participant wants the topics that a pattern matches."""

    subscription: Subscription

    @property
    def at(self) -> int:
        """Unix seconds."""
        return self.subscription.created_at


class SubscriptionChanged(_Event, frozen=True):
    """A subscription is active or paused, and has this filter, from now on."""

    subscription: Subscription
    at: int


class SubscriptionRemoved(_Event, frozen=True):
    """A subscription ends."""

    subscription_id: int
    at: int


class MessageSent(_Event, frozen=True):
    """A message is accepted, numbered and routed: its content and its recipients."""

    message: Message
    recipients: tuple[str, ...]
    held: bool = False  # max_pending is reached: delivered once other messages are final
    origin: Origin | None = None  # where an owner that delivers got it from

    @property
    def at(self) -> int:
        """Unix seconds."""
        return self.message.created_at


class DeliveriesAdded(_Event, frozen=True):
    """A new participant of a sticky channel became a recipient of these earlier messages."""

    recipient: str
    message_ids: tuple[int, ...]
    at: int


class DeliveriesMoved(_Event, frozen=True):
    """Deliveries of one message advanced, all to the same state."""

    message_id: int
    recipients: tuple[str, ...]
    state: DeliveryState
    at: int
    due_ms: int = 0  # when the acknowledgment is overdue
    attempt: int = 0  # of a repeated delivery; 0: unchanged
    said: str = ""  # the status that an acknowledgment gives
    answer_id: str = ""  # of an acknowledgment: the relay's id of it
    answer_text: str = ""  # and the first line of what it says
    why: str = ""  # the reason of an end


class DeliveriesStaged(_Event, frozen=True):
    """An owner that delivers has staged the deliveries of a batch; only the renames are left.

    Each is (message id, recipient, attempt).
    """

    deliveries: tuple[tuple[int, str, int], ...]
    at: int


class FileRefused(_Event, frozen=True):
    """An owner that delivers refused a file; the store does not change."""

    message_id: str  # the relay's; empty where its name gives none
    origin: Origin
    reason: str
    answer_id: str  # of the nack
    has_row: bool  # False: its id is another message's
    unsafe: bool  # no regular file
    at: int
    code: str = ""  # a RefusalCode; empty in records of before it was known


class MessageReceived(_Event, frozen=True):
    """The recipient received the message from its queue."""

    message_id: int
    participant: str
    at: int
    how: str = ""  # of an owner that delivers: taken or removed; empty: not known


class LateRead(_Event, frozen=True):
    """The file of a delivery that had ended, or was answered unread, left the inbox later.

    The store does not change. It may not have the message any more: then ``message_id`` is 0.
    """

    message_id: int
    recipient: str
    state: DeliveryState  # of the delivery, then and afterwards; SENT where it is not known
    how: str
    at: int
    relay_id: str = ""  # of a message that the store does not have


class OfferChanged(_Event, frozen=True):
    """A hook showed a delivered message to an agent's session, or what became of that is known.

    The store does not change.
    """

    message_id: str  # the relay's
    recipient: str
    session: str  # as claude:0089…
    offer: int  # the n-th of this delivery; 0: the last one to this session
    became: str  # offered, in_context or returned
    detail: str  # the hook after which it was shown, the evidence, or why it was returned
    at_ns: int  # Unix nanoseconds, by the hook's clock
    at: int


class AgentRung(_Event, frozen=True):
    """An idle agent was rung for messages that wait. The store does not change."""

    recipient: str
    session: str
    rung: str  # the way: claude-inbox, command, ...
    messages: int
    result: str
    at_ns: int
    at: int


class DeliveryTimed(_Event, frozen=True):
    """A delivery waits: for its next attempt by a timer, or (Sent) held without one."""

    message_id: int
    recipient: str
    delivery: Delivery
    at: int


class DeadLettered(_Event, frozen=True):
    """Deliveries of a message were given up."""

    message_id: int
    recipients: tuple[str, ...]
    last_error: str
    at: int


class DeadLetterReplayed(_Event, frozen=True):
    """A dead letter's next attempt is due, only for the recipients it was given up for."""

    message_id: int
    at: int


class DeadLetterDiscarded(_Event, frozen=True):
    """A dead letter is deleted permanently."""

    message_id: int
    at: int
    relay_id: str = ""  # of an owner that delivers


class MessagesArchived(_Event, frozen=True):
    """Messages moved from the live ones into the archive."""

    message_ids: tuple[int, ...]
    at: int


class ArchiveDropped(_Event, frozen=True):
    """Archived messages are deleted permanently."""

    message_ids: tuple[int, ...]
    at: int


class Rolled(_Event, frozen=True):
    """An archive file counts from now on; its messages are leaving the store."""

    note: ArchiveInfo
    message_ids: tuple[int, ...]
    at: int


class MessagesEvicted(_Event, frozen=True, tag="TakenOut"):  # its name in journals
    """The first ``count`` messages being evicted were removed from the store."""

    count: int
    at: int


class Owed(_Event, frozen=True):
    """These recipients owe an answer from now on, or reported progress on it."""

    message_id: int
    recipients: tuple[str, ...]
    due_ms: int  # when it is overdue; 0: no timer while delivery is retried
    at: int
    said: str = ""  # received, in_progress: the status of an acknowledgment that is not final


class Reminded(_Event, frozen=True):
    """A recipient is reminded of the answer it owes."""

    message_id: int
    recipient: str
    due_ms: int  # when it is overdue again
    reminders: int  # with this one
    at: int


class OwedNoMore(_Event, frozen=True):
    """The obligations of these recipients ended: answered or given up."""

    message_id: int
    recipients: tuple[str, ...]
    at: int
    said: str = ""  # the answer's status; empty: given up


class TimeLost(_Event, frozen=True):
    """The store's owner did not run for a time: every deadline is postponed by it."""

    by_ms: int  # negative: the clock was set back
    at: int


class DuplicateNoted(_Event, frozen=True):
    """An exactly-once delivery was made: it is not repeated until this entry expires."""

    key: tuple[str, int, str]  # correlation id, message id, recipient
    expires_ms: int
    at: ClassVar[int] = 0  # as of the next one: told by other events of that time


class DuplicatesForgotten(_Event, frozen=True):
    """The entries of the exactly-once set that had expired by then are removed."""

    at_ms: int
    at: ClassVar[int] = 0


Event = (
    ChannelCreated
    | ChannelChanged
    | ParticipantJoined
    | ParticipantLeft
    | ParticipantIdentified
    | SubscriptionAdded
    | SubscriptionChanged
    | SubscriptionRemoved
    | MessageSent
    | DeliveriesAdded
    | DeliveriesMoved
    | DeliveriesStaged
    | FileRefused
    | MessageReceived
    | LateRead
    | OfferChanged
    | AgentRung
    | DeliveryTimed
    | DeadLettered
    | DeadLetterReplayed
    | DeadLetterDiscarded
    | MessagesArchived
    | ArchiveDropped
    | Rolled
    | MessagesEvicted
    | Owed
    | Reminded
    | OwedNoMore
    | TimeLost
    | DuplicateNoted
    | DuplicatesForgotten
)


VERSION = 1


# An event that is not in the journal yet, and when it happened (Unix nanoseconds).
FreshEvent = tuple[Event, int]


class Start(msgspec.Struct, frozen=True):
    """A writer started: the records before this one may end in a torn record."""

    boot_id: str  # and the mounts' numbers; after others what was not synced may be lost
    epoch: int
    at: int  # Unix nanoseconds


class Checkpoint(msgspec.Struct, frozen=True):
    """A store file covers everything before ``offset``."""

    offset: int
    sequence: int


class EventRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of one record: an event, or one of ``start``, ``checkpoint`` and ``sealed``."""

    v: int
    seq: int | None = None  # events of the store before this one
    event: Event | None = None
    start: Start | None = None
    checkpoint: Checkpoint | None = None
    sealed: bytes | None = None
    at_ns: int = 0  # when the event happened, Unix nanoseconds; 0: by its own seconds alone


# Made while the module is imported, which one thread does: msgspec looks at the fields of a type
# when they are first decoded, and two threads that do so at once end the process.
_decode = msgspec.msgpack.Decoder(EventRecord).decode


class EventCodec:
    """Encodes and decodes payloads of the journal at ``path``, which errors name.

    ``key``: 32 bytes that seal them; None: they are plain.
    """

    def __init__(self, key: bytes | None = None, path: str = "journal") -> None:
        self._path = path
        self._cipher = None if key is None else AESGCM(key)
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, frame: EventRecord, offset: int) -> bytes:
        """The payload of a record at ``offset``."""
        plain = self._encode(frame)
        if self._cipher is None:
            return plain
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, plain, U64.pack(offset))
        return self._encode(EventRecord(VERSION, sealed=sealed))

    def decode(self, payload: bytes, offset: int, path: str = "") -> EventRecord:
        """Decode a record. Errors: FormatError, VersionError with its offset; SealedStore."""
        try:
            frame = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise FormatError(path or self._path, offset, "an event of version 1", exc) from exc
        if frame.v != VERSION:
            expected = f"events of version {VERSION}"
            raise VersionError(path or self._path, offset, expected, frame.v)
        if frame.sealed is None:
            return frame
        path = path or self._path
        return EventCodec().decode(self.decrypt(frame.sealed, offset, path), offset, path)

    def decrypt(self, sealed: bytes, offset: int, path: str = "") -> bytes:
        """The payload that a record at ``offset`` has sealed. Errors: SealedStore."""
        path = path or self._path
        if self._cipher is None:
            raise SealedStore(f"{path} at {offset} is encrypted, and no key was given")
        nonce, rest = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, rest, U64.pack(offset))
        except (InvalidTag, ValueError):
            raise SealedStore(f"{path} at {offset} cannot be decrypted with this key") from None
