"""The base of the CommStore: state, clock, ``apply``, retention and limits.

Retention decides which messages leave the live ones for the archive: by policy, by command, or for
room. Never one with an open delivery, an answer that is owed, or a dead letter. An archived
message stays in the store's file and can be queried; ``compact`` drops it.

Memory: at ``limits.active_messages`` the store is flushed and final messages are archived; if that
does not help, StoreFull. Disk: a warning at ``limits.warn_bytes``, StoreCapacity from
``limits.reserve_bytes`` below ``limits.file_bytes`` on. Answers are accepted up to the limits of
the file, because without them no message would become final. Source: data-structures.txt,
"RetentionPolicy"; acomm-file-format.txt, section 6; message-engine.txt, "Backpressure".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import msgspec

from relay.acomm.engine_state import StoreSnapshot
from relay.acomm.model import Channel, ChannelSettings, Message, MessageStatus, RetentionKind
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import (
    ChannelNotFound,
    MessageNotFound,
    StoreCapacity,
    StoreFull,
    ValidationFailed,
)
from relay.engine import ack_rules, events
from relay.engine.archives import Archives
from relay.engine.state import State
from relay.engine.tables import RECORD_BYTES
from relay.engine.validation import DEFAULT_LIMITS, Limits, check_number

_warn = logging.getLogger("relay.engine").warning
_DEFAULT = ChannelSettings()
# Scanning the open messages at every send would make sends linear in them: after a scan that met
# n of them in vain, the next n / PATIENCE calls do not scan.
RESCAN_DIVISOR = 16


class Compacted(NamedTuple):
    """The messages that ``compact`` dropped, and the bytes that it freed."""

    archived: int
    dead_letters: int
    content_bytes: int  # of the messages that were dropped
    file_bytes: int  # by which the file shrank; 0 for a store that writes none


class StoreStats(NamedTuple):
    """A store in numbers."""

    channels: int
    messages: dict[MessageStatus, int]  # live ones and dead letters; statuses that occur
    subscriptions: int
    dead_letters: int  # given up for at least one recipient
    archived: int
    pending: int  # delivered, and not received or not acknowledged
    held: int  # accepted, and held by max_pending
    duplicates: int  # entries of the exactly-once set
    file_bytes: int  # when it was last written; 0: never
    used_bytes: int  # estimate of its present size
    file_sequence: int  # the events that the file covers
    sequence: int  # the events so far


class StoreCore:
    """A state, and the time. Not thread-safe: one owner."""

    def __init__(
        self, clock: Clock, state: State | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._clock = clock
        self.state = state or State(self._now_s())
        self.ack_timeout_s = 60  # unless set by the message or the channel
        self.command_timeout_s = 1800  # the same for the answer owed to a command
        # False: its owner delivers by other means, and reports it; see ``RetryCommands``.
        self.delivers_itself = True
        self.dead_letter_after_s = (
            86_400  # a day: what is not acknowledged by then is a dead letter
        )
        self.archives: Archives | None = None  # the messages that were rolled out
        self.identities: dict[
            str, str
        ] = {}  # participant -> its key's id, where its owner knows it
        self._copies: list[tuple[int, str]] = []
        # Events for the owner's journal; None without one.
        self.fresh_events: list[events.Event] | None = None
        self.limits = limits
        self.warn: Callable[[str], object] = _warn
        self.file_bytes = 0  # of its file, when that was last written
        self.file_sequence = 0  # the events that it covers
        self._sent_in_file = 0  # ``state.bytes_sent`` as that file has it
        self._scans_to_skip: dict[int, int] = {}  # channel -> looks at its retention to be skipped
        self._next_relief = 0  # the sequence before which looking for final messages is vain
        self._roomy_until = (
            0  # ``state.bytes_sent`` below which no limit but that of memory is near
        )
        self._warned = False  # of the file's size
        self._invalid_filters: set[int] = set()  # subscriptions whose filter was found to be slow

    @property
    def created_at(self) -> int:
        """When the store was made, Unix seconds."""
        return self.state.created_at

    @property
    def modified_at(self) -> int:
        """When it last changed, Unix seconds."""
        return self.state.modified_at

    @property
    def sequence(self) -> int:
        """The number of events since the store was created."""
        return self.state.sequence

    @property
    def messages_sent(self) -> int:
        """The number of messages sent since the store was opened."""
        return self.state.messages_sent

    @property
    def bytes_sent(self) -> int:
        """About how many bytes of records were sent since the store was opened."""
        return self.state.bytes_sent

    def pop_sticky(self) -> list[tuple[int, str]]:
        """Remove and return (message id, recipient) of sticky copies the owner has to deliver."""
        copies, self._copies = self._copies, []
        return copies

    def file_written(self, size: int, sequence: int, bytes_sent: int) -> None:
        """Note that the file was written, its size and what it covers."""
        self.file_bytes = size
        self.file_sequence = sequence
        self._sent_in_file = bytes_sent
        self._roomy_until = 0

    def flush_if_immediate(self, channel_id: int) -> None:
        """Flush after a command in a channel with immediate flush. Errors: as ``flush``."""
        if self.state.settings and self.get_settings(channel_id).flush == "immediate":
            self.flush()

    def single_flush(self, channel_id: int) -> AbstractContextManager[None]:
        """A block whose events go into the file together, where the store writes one."""
        return nullcontext()

    def flush(self) -> None:
        """Write everything now, where the store writes a file of its own."""

    def apply(self, event: events.Event) -> None:
        """Change the store as the event says, and queue the event for the journal, if any."""
        self.state.apply(event)
        if self.fresh_events is not None:
            self.fresh_events.append(event)

    def record_event(self, event: events.Event) -> None:
        """Record an event that changes nothing in the store."""
        self.apply(event)

    def snapshot(self) -> StoreSnapshot:
        """Everything in the store as immutable values, for any thread to read."""
        return self.state.snapshot()

    def get_channel(self, channel_id: int) -> Channel:
        """The channel as it is now, its message count included. Errors: ChannelNotFound."""
        channel = self.state.channels.get(channel_id) if type(channel_id) is int else None
        if channel is None:
            raise ChannelNotFound(f"channel {channel_id!r} does not exist")
        # the state counts beside its channels: sending need not make a new one each time
        return msgspec.structs.replace(channel, message_count=self.state.counts[channel_id])

    def get_settings(self, channel_id: int) -> ChannelSettings:
        """The settings of a channel beside its config. Errors: ChannelNotFound."""
        return self.state.settings.get(self.get_channel(channel_id).id, _DEFAULT)

    def is_participant(self, channel_id: int, participant: str) -> bool:
        """True when ``participant`` is one of the channel's."""
        return isinstance(participant, str) and participant in self.state.members.get(
            channel_id, ()
        )

    def now_ns(self) -> int:
        """The time by the store's clock, Unix nanoseconds."""
        return self._clock.now_ns()

    def _now_ns(self) -> int:
        return self._clock.now_ns()

    def _now_ms(self) -> int:
        return self._clock.now_ns() // NS_PER_MS

    def _now_s(self) -> int:
        return self._clock.now_ns() // NS_PER_S

    def archive(self, message_id: int | None = None, *, before: int | None = None) -> int:
        """Archive one message, or all sent before a time (Unix seconds); returns their number.

        With ``before``, messages with an open delivery stay. Errors: MessageNotFound;
        ValidationFailed for one message with such a delivery, or when not exactly one of the two
        arguments is given.
        """
        if (message_id is None) == (before is None):
            raise ValidationFailed("archive", "pass either message_id or before, not both")
        if message_id is None:
            check_number("before", before)
            messages = self.state.messages.values()
            old = [m.id for m in messages if m.created_at < (before or 0) and self.is_final(m)]
            return self._archive(old)
        message = self.state.messages.get(check_number("message_id", message_id))
        if message is None:
            raise MessageNotFound(f"live message {message_id} does not exist")
        if not self.is_final(message):
            raise ValidationFailed(
                "message_id", f"message {message_id} has an open or dead delivery"
            )
        return self._archive([message_id])

    def evict(self) -> int:
        """Archive every message that has no open delivery; returns their number."""
        return self._archive([m.id for m in self.state.messages.values() if self.is_final(m)])

    def retain(self) -> int:
        """Archive the messages past their channel's retention; returns their number."""
        state = self.state
        return sum(self._retain(state.channels[number], 0) for number in sorted(state.retained))

    def _retain(self, channel: Channel, more: int, more_bytes: int = 0) -> int:
        """Apply a channel's retention, leaving room for ``more`` messages."""
        patience = self._scans_to_skip.get(channel.id, 0)
        if patience > 0:
            self._scans_to_skip[channel.id] = patience - 1
            return 0
        kind, amount = channel.config.retention.kind, channel.config.retention.amount
        by_count = kind is RetentionKind.COUNT
        kept = self.state.kept.get(channel.id, 0) + (more if by_count else more_bytes)
        oldest_kept = self._now_s() - amount
        past: list[int] = []
        in_vain = 0
        for message_id in self.state.index.channel(channel.id):
            message = self.state.messages[message_id]
            is_past = (
                message.created_at <= oldest_kept
                if kind is RetentionKind.DURATION
                else kept > amount
            )
            if not is_past:
                break
            if self.is_final(message):
                past.append(message_id)
                kept -= 1 if by_count else len(message.content)
            else:
                in_vain += 1
        self._scans_to_skip[channel.id] = in_vain // RESCAN_DIVISOR
        return self._archive(past)

    def _archive(self, message_ids: list[int]) -> int:
        if message_ids:
            self.apply(events.MessagesArchived(tuple(message_ids), self._now_s()))
        return len(message_ids)

    def is_final(self, message: Message) -> bool:
        """True when the message has no open delivery, owed answer or dead letter."""
        deliveries = self.state.deliveries.get(message.id, {}).values()
        channel = self.state.channels[message.channel_id]
        if message.id in self.state.dead or message.id in self.state.owed:
            return False
        return not ack_rules.is_open(channel, message, deliveries, not self.delivers_itself)

    def compact(self) -> Compacted:
        """Delete archived messages and dead letters permanently, and write the file.

        Messages with an open delivery are kept.
        Errors: those of ``flush``; the messages are deleted nevertheless.
        """
        state = self.state
        self.flush()
        before = (self.file_bytes, len(state.archive), len(state.dead))
        gone = [*state.archive.values(), *state.dead_letters.values()]
        if state.archive:
            self.apply(events.ArchiveDropped(tuple(sorted(state.archive)), self._now_s()))
        for message_id in sorted(state.dead):
            self.apply(events.DeadLetterDiscarded(message_id, self._now_s()))
        self.flush()
        self._roomy_until = 0
        return Compacted(
            before[1],
            before[2],
            sum(len(message.content) for message in gone),
            max(0, before[0] - self.file_bytes),
        )

    def stats(self) -> StoreStats:
        """The store in numbers. Scans every live message."""
        state = self.state
        pending = sum(
            message.id not in state.pending.held
            and ack_rules.is_pending(
                state.channels[message.channel_id],
                message,
                state.deliveries.get(message.id, {}).values(),
                state.owed.get(message.id, {}),
            )
            for message in state.messages.values()
        )
        known = [*state.messages.values(), *state.dead_letters.values()]
        return StoreStats(
            len(state.channels),
            dict(sorted(Counter(message.status for message in known).items())),
            len(state.subscriptions),
            len(state.dead),
            len(state.archive),
            pending,
            len(state.pending.held),
            len(state.duplicates),
            self.file_bytes,
            self.used_bytes(),
            self.file_sequence,
            state.sequence,
        )

    def used_bytes(self) -> int:
        """Estimate of the file's present size, at least that of its uncompressed records."""
        state = self.state
        if not self.file_bytes:
            return state.record_bytes
        return max(self.file_bytes + state.bytes_sent - self._sent_in_file, state.record_bytes)

    def _make_room(self, size: int, is_answer: bool) -> bool:
        """Make room for ``size`` bytes of content and metadata.

        True when the file crosses its warning limit with them.
        Errors: StoreFull, StoreCapacity.
        """
        state, limits = self.state, self.limits
        kept = len(state.messages) + len(state.dead_letters) + len(state.archive)
        if kept >= limits.messages:
            raise StoreCapacity(f"the store has {kept} messages, its limit is {limits.messages}")
        most = limits.file_bytes if is_answer else limits.file_bytes - limits.reserve_bytes
        used = self.used_bytes() + size + RECORD_BYTES
        if used > most:
            raise StoreCapacity(
                f"the store file would need {used} of {limits.file_bytes} bytes, "
                f"and the last {limits.reserve_bytes} are reserved for answers"
            )
        if len(state.messages) >= limits.active_messages and not is_answer:
            self._free_memory()
        near = used >= limits.warn_bytes
        is_news = near and not self._warned
        self._warned = near
        until = limits.file_bytes - limits.reserve_bytes if near else limits.warn_bytes
        # each message takes a record's bytes at least, so this bounds their number, too
        room = min(until - self.used_bytes(), (limits.messages - kept) * RECORD_BYTES)
        self._roomy_until = state.bytes_sent + room - RECORD_BYTES
        return is_news

    def _free_memory(self) -> None:
        """Archive final messages after a flush. Errors: StoreFull when that frees too little.

        For a store with archive files the ``Roller`` does this in the background.
        """
        state, most = self.state, self.limits.active_messages
        # A scan of all messages is expensive: one that found little is not repeated for a while.
        if self.archives is None and state.sequence >= self._next_relief:
            final = [m.id for m in state.messages.values() if self.is_final(m)]
            if final:
                self.flush()
                self._archive(final)
            found_little = len(final) < most // 100
            self._next_relief = state.sequence + most // 100 if found_little else 0
        active = len(state.messages)
        if active >= most:
            raise StoreFull(f"the store has {active} active messages, its limit is {most}")
