"""CommStore: the message engine as a library, with channels, messages and queues.

    with CommStore.open("project.acomm") as store:
        channel = store.create_channel("planner-executor", ChannelType.DIRECT, "planner")
        store.join_channel(channel.id, "executor")
        store.send_message(channel.id, "planner", MessageType.COMMAND, "deploy to staging")
        store.receive_messages(channel.id, "executor")

It has an engine (``relay.engine.engine``), queues for its messages and, opened from a path, a file
that it locks and writes. Threads may share it: a method waits until that of another thread has
returned, as does the timer that flushes when no further call is made. What is below ``engine`` and
``state`` does not wait. A fork of its process cannot change it: it opens the store itself, when the
owner has closed it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from relay.acomm import store_file
from relay.acomm.engine_state import StoreSnapshot
from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelSettings,
    ChannelState,
    ChannelType,
    DeadLetter,
    Message,
    MessageFilter,
    MessageType,
    ParticipantRole,
    StoreFile,
    Subscription,
    read_only_copy,
)
from relay.base.clock import NS_PER_S, Clock
from relay.base.errors import RelayError, ValidationFailed
from relay.commstore.queues import Queues, Redelivery
from relay.commstore.writer import FileWriter, one_thread_at_a_time
from relay.engine import rules
from relay.engine.checkpoint import FlushPolicy
from relay.engine.engine import Engine, StoreStats, load_state, state_of
from relay.engine.messages import NewMessage
from relay.engine.query import QueryResult
from relay.engine.rules import DEFAULT_LIMITS, Limits
from relay.engine.state import State, Warn


class Compacted(NamedTuple):
    """The messages that ``compact`` dropped, and the bytes that it freed."""

    archived: int
    dead_letters: int
    content_bytes: int  # of the messages that were dropped
    file_bytes: int  # by which the file shrank; 0 for a store that writes none


@one_thread_at_a_time
class CommStore:
    """One live store. Opened from a path it writes its file."""

    def __init__(
        self,
        clock: Clock | None = None,
        state: State | None = None,
        limits: Limits = DEFAULT_LIMITS,
        warn: Warn | None = None,
        *,
        refusal: str = "",
    ) -> None:
        clock = clock or Clock()
        state = state or State(clock.now_ns() // NS_PER_S)
        self._writer = FileWriter(state, clock, refusal)
        self.engine = Engine(clock, state, limits, warn=warn, transition=self._writer.apply)
        self.state = state
        self.path: str | None = None  # the file that it was opened from
        self._queues = Queues(self.engine, self._writer)
        self._held = contextlib.ExitStack()  # the lock of its file

    @classmethod
    def load(cls, clock: Clock, file: StoreFile, limits: Limits = DEFAULT_LIMITS) -> CommStore:
        """The store that a file holds, in memory. Errors: FormatError, SealedStore."""
        return cls(clock, state_of(file), limits)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        policy: FlushPolicy | None = None,
        clock: Clock | None = None,
        *,
        key: bytes | None = None,
    ) -> CommStore:
        """A new store at ``path``, written at once. Errors: RelayError when there is a file."""
        path = os.fspath(path)
        for name in (path, path + store_file.PREVIOUS):
            if os.path.lexists(name):
                raise RelayError(f"{name} exists already", hint="open it, or choose another path")
        return cls.open(path, policy, clock, key=key)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        policy: FlushPolicy | None = None,
        clock: Clock | None = None,
        *,
        key: bytes | None = None,
        limits: Limits = DEFAULT_LIMITS,
        warn: Warn | None = None,
    ) -> CommStore:
        """The store at ``path`` for writing, created if it does not exist; ``close`` it.

        It is flushed by ``policy`` (default: every 100 messages or 5 s), even if no further call
        is made, and by ``close``. A temp file of a killed writer is removed, and the messages
        that writer accepted and did not deliver are delivered. With a ``key`` of 32 bytes every
        content is encrypted in the file; a plain file is from the next flush on. For a damaged
        file see ``load_state``.
        A file of a later version, or with unknown sections, is opened read-only, with a call of
        ``warn``; commands that would change it raise StoreReadOnly.
        Errors: StoreLocked; FormatError for a damaged file, LimitError for one that could not be
        written again, SealedStore for one encrypted with another key; each names the file, which
        is left unchanged.
        """
        clock, path = clock or Clock(), os.fspath(path)
        with contextlib.ExitStack() as held:
            held.enter_context(store_file.locked(path, clock.now_ns() // NS_PER_S))
            state = load_state(path, key, warn)
            refusal = ""
            if state is not None:
                read = path if os.path.lexists(path) else path + store_file.PREVIOUS
                if lost := store_file.lost_on_rewrite(read):
                    refusal = f"{path} is opened for reading only: a flush would lose {lost}"
            store = cls(clock, state, limits, warn, refusal=refusal)
            if state is not None:
                store.engine.archives.loaded_from(path)
            if refusal:
                store.engine.warn(refusal)
            else:
                store._begin(path, policy or FlushPolicy(), key)
            store._held, store.path = held.pop_all(), path
        if not refusal:
            store._queues.enqueue_undelivered()
        return store

    def _begin(self, path: str, policy: FlushPolicy, key: bytes | None) -> None:
        """Write the file from now on; first if there is none."""
        for name in (path, path + store_file.PREVIOUS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name + ".tmp")
        if not os.path.lexists(path):
            size = store_file.save(path, self.snapshot(), key=key)
            self.engine.archives.file_written(size, self.sequence, 0)
        self._writer.begin(self.engine, path, policy, key)

    def close(self) -> None:
        """Flush and release the lock; later commands are refused, as nothing would write them."""
        try:
            self._writer.close()
        finally:
            self._held.close()

    def __enter__(self) -> CommStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def flush(self) -> None:
        """Write everything now. Errors: OSError, StoreCapacity; the file is then unchanged."""
        self._writer.flush()

    def tick(self, now_ns: int | None = None) -> list[Redelivery]:
        """Do what is due at ``now_ns``: retries, retention, held messages, the flush.

        A delivery whose ack is overdue waits, is attempted again, or is given up: its message
        becomes a dead letter, and its sender and the subscribers of
        ``_system.message.deadletter`` are notified. Returns what was delivered again.
        """
        if self._writer.refusal:
            return []
        again = self._queues.tick(now_ns)
        self._writer.flush_if_due()
        return again

    def next_due_ms(self) -> int | None:
        """Deadline of the next ``tick`` with a retry to do (Unix ms)."""
        return self.engine.retries.next_due_ms()

    @property
    def sequence(self) -> int:
        """The number of events since the store was created."""
        return self.state.sequence

    def snapshot(self) -> StoreSnapshot:
        """Everything in the store as immutable values, for any thread to read."""
        return self.state.snapshot()

    def stats(self) -> StoreStats:
        """The store in numbers. Scans every live message."""
        return self.engine.stats()

    def __len__(self) -> int:
        return len(self.state.messages)

    # -- channels ---------------------------------------------------------------------

    def create_channel(
        self,
        name: str,
        channel_type: ChannelType,
        owner: str,
        config: ChannelConfig | None = None,
        *,
        description: str | None = None,
        tags: Iterable[str] = (),
    ) -> Channel:
        """Create a channel; its owner is the first participant. Errors: as ``Channels.create``."""
        return self.engine.channels.create(
            name, channel_type, owner, config, description=description, tags=tags
        )

    def get_channel(self, channel_id: int) -> Channel:
        """The channel as it is now, its message count included. Errors: ChannelNotFound."""
        return self.engine.channels.get(channel_id)

    def get_channel_by_name(self, name: str) -> Channel | None:
        """The channel of that name, if there is one."""
        found = self.engine.channels.find_by_name(rules.check_text("name", name))
        return None if found is None else self.engine.channels.get(found.id)

    def list_channels(self) -> list[Channel]:
        """Every channel, by id."""
        return self.engine.channels.list_all()

    def get_settings(self, channel_id: int) -> ChannelSettings:
        """The settings of a channel beside its config. Errors: ChannelNotFound."""
        return self.engine.channels.settings(channel_id)

    def message_count(self, channel_id: int) -> int:
        """The number of messages ever sent in the channel. Errors: ChannelNotFound."""
        return self.engine.channels.get(channel_id).message_count

    def is_participant(self, channel_id: int, participant: str) -> bool:
        """True when ``participant`` is one of the channel's."""
        return self.engine.channels.is_participant(channel_id, participant)

    def join_channel(
        self, channel_id: int, participant: str, role: ParticipantRole | None = None
    ) -> Channel:
        """Add a participant. Arguments and errors: as ``Channels.join``."""
        channel = self.engine.channels.join(channel_id, participant, role)
        self._queues.deliver_sticky()
        return channel

    def leave_channel(self, channel_id: int, participant: str) -> Channel:
        """Remove a participant. Its undelivered messages bounce, except those that expect an
        acknowledgment: their senders are notified when it is overdue.

        Errors: as ``Channels.leave``.
        """
        channel = self.engine.channels.leave(channel_id, participant)
        self._queues.bounce(channel, participant)
        return channel

    def set_identities(self, identities: Mapping[str, str]) -> None:
        """Set the key id of each participant. Errors: as ``Channels.set_identities``."""
        self.engine.channels.set_identities(identities)

    def configure_channel(self, channel_id: int, **changes: object) -> Channel:
        """Change a channel by name of setting. Names and errors: as ``Channels.configure``."""
        channel = self.engine.channels.configure(channel_id, **changes)
        self._queues.resume()
        return channel

    def set_channel_state(self, channel_id: int, state: ChannelState) -> Channel:
        """Pause, drain, close or resume a channel. A closed channel stays closed.

        Resuming also releases the replays of dead letters made while it was paused.
        Errors: as ``Channels.set_state``.
        """
        was_paused = self.engine.channels.find(channel_id).state is ChannelState.PAUSED
        channel = self.engine.channels.set_state(channel_id, state)
        self._queues.resume()
        if was_paused and channel.state is not ChannelState.PAUSED:
            for number in list(self.state.index.channel(channel_id)):
                self._queues.deliver_replay(number)
        return channel

    def subscribe(
        self,
        channel_id: int,
        subscriber: str,
        pattern: str,
        filter: MessageFilter | None = None,
    ) -> Subscription:
        """Subscribe to the topics that ``pattern`` matches. Errors: as ``Channels.subscribe``."""
        subscription = self.engine.channels.subscribe(channel_id, subscriber, pattern, filter)
        self._queues.deliver_sticky()
        return subscription

    def subscriptions(
        self, channel_id: int | None = None, subscriber: str | None = None
    ) -> list[Subscription]:
        """Subscriptions in the order of their ids. Errors: as ``Channels.subscriptions``."""
        return self.engine.channels.subscriptions(channel_id, subscriber)

    def set_subscription_active(self, subscription_id: int, active: bool) -> Subscription:
        """Pause or resume a subscription. Errors: ValidationFailed for an unknown id."""
        return self.engine.channels.set_subscription_active(subscription_id, active)

    def unsubscribe(self, channel_id: int, subscriber: str, pattern: str | None = None) -> int:
        """End the subscriptions to ``pattern`` (None: all of this channel); returns their number.

        Errors: ChannelNotFound.
        """
        return self.engine.channels.unsubscribe(channel_id, subscriber, pattern)

    # -- messages ---------------------------------------------------------------------

    def send_message(
        self,
        channel_id: int,
        sender: str,
        message_type: MessageType,
        content: str | bytes,
        *,
        recipients: Iterable[str] | None = None,
        also: Iterable[str] = (),
        **fields: Any,
    ) -> Message:
        """Run the whole pipeline: the message is in its recipients' queues when this returns.

        Unless it is held because its channel has too many pending messages. An answer goes only to
        the senders it answers in this channel, and acknowledges their messages. ``recipients``
        replaces the route, ``also`` adds to it; ``fields``: those of ``NewMessage``.
        Errors: as ``Messages.accept``; the message is then not stored. In a channel with immediate
        flush also those of ``flush``; the message is then stored, and written later.
        """
        new = NewMessage(message_type, content, **fields)
        return self._queues.send(channel_id, sender, new, recipients, also)

    def send_query(
        self, channel_id: int, sender: str, content: str | bytes, timeout_s: int | None = None
    ) -> Message:
        """Send a query; responses refer to it by its correlation id.

        ``timeout_s``: time limit of the answer; None: the channel's. Errors: as
        ``send_message``; ValidationFailed for an invalid timeout.
        """
        metadata = None
        if timeout_s is not None:
            metadata = {"await_ms": rules.check_timeout(timeout_s) * 1000}
        return self.send_message(channel_id, sender, MessageType.QUERY, content, metadata=metadata)

    def send_response(
        self, channel_id: int, sender: str, correlation_id: str, content: str | bytes
    ) -> Message:
        """Answer a query; the response goes to its sender, and acknowledges it.

        Errors: ValidationFailed when no query of this channel has this correlation id.
        """
        return self.send_message(
            channel_id, sender, MessageType.RESPONSE, content, correlation_id=correlation_id
        )

    def publish(
        self, channel_id: int, sender: str, topic: str, content: str | bytes, **fields: Any
    ) -> Message:
        """Send to the topic's subscribers. Errors: ValidationFailed if it has no topics."""
        channel = self.engine.channels.find(channel_id)
        if channel.channel_type is not ChannelType.PUB_SUB:
            raise ValidationFailed("channel", f"{channel.name} is not a PubSub channel")
        fields["topic"] = topic
        return self.send_message(channel_id, sender, MessageType.TEXT, content, **fields)

    def broadcast(self, channel_id: int, sender: str, content: str | bytes) -> Message:
        """Send to all participants of the channel, as type Broadcast."""
        return self.send_message(channel_id, sender, MessageType.BROADCAST, content)

    def acknowledge_message(
        self, message_id: int, participant: str, status: str, text: str | None = None
    ) -> Message:
        """Acknowledge a message with a status, which goes only to its sender.

        ``status``: received, in_progress, completed or failed. Errors: MessageNotFound;
        ValidationFailed for another status or a message that expects none; NotParticipant
        when it was not sent to ``participant``.
        """
        return self._queues.acknowledge(message_id, participant, status, text)

    def receive_messages(
        self,
        channel_id: int | None,
        participant: str,
        filter: MessageFilter | None = None,
        peek: bool = False,
    ) -> list[Message]:
        """Messages that ``participant`` has not received yet, oldest first within a priority.

        ``channel_id`` None: of all its channels, and its system messages. Messages returned count
        as received, unless ``peek``. A message past its TTL is not returned, and expires; without
        an order of the filter only messages up to its limit are looked at. A filter's order
        applies within each priority; its offset and limit apply to the resulting order.
        Errors: ChannelNotFound; NotParticipant; those of ``query_messages``.
        """
        return self._queues.receive(channel_id, participant, filter, peek)

    def get_message(self, message_id: int) -> Message | None:
        """The message of that number, live or a dead letter."""
        return self.engine.messages.get(message_id)

    def recipients(self, message_id: int) -> tuple[str, ...]:
        """The recipients of a message, also of an archived one."""
        return self.engine.messages.recipients(message_id)

    def query_messages(
        self, filter: MessageFilter | None = None, *, grouped: bool = True
    ) -> QueryResult:
        """Messages by every given criterion. Arguments and errors: as ``Messages.query``."""
        return self.engine.messages.query(filter, grouped=grouped)

    def search(self, pattern: str, limit: int = 100) -> list[Message]:
        """Messages whose content matches a regular expression, newest first."""
        return self.engine.messages.search(pattern, limit)

    def get_thread(self, correlation_id: str) -> list[Message]:
        """The messages of a thread, oldest first, archived ones included."""
        return self.engine.messages.thread(correlation_id)

    def dead_letters(self) -> list[DeadLetter]:
        """Every message given up for at least one recipient, oldest first."""
        return self.engine.retries.dead_letters()

    def replay_dead_letter(self, message_id: int) -> Message:
        """Deliver a dead letter again, with all its attempts. Errors: as ``Retries.replay``."""
        message = self.engine.retries.replay(message_id)
        if self.state.channels[message.channel_id].state is ChannelState.ACTIVE:
            self._queues.deliver_replay(message_id)
        return read_only_copy(self.state.messages[message_id])

    def discard_dead_letter(self, message_id: int) -> None:
        """Delete a dead letter; its number is not used again. Errors: MessageNotFound."""
        self.engine.retries.discard(message_id)

    def purge_dead_letters(self, older_than_s: float) -> int:
        """Discard dead letters older than ``older_than_s``; returns their number."""
        return len(self.engine.retries.purge(older_than_s))

    # -- archive ----------------------------------------------------------------------

    def archive(self, message_id: int | None = None, *, before: int | None = None) -> int:
        """Archive one message, or all sent before a time. Errors: as ``Archives.archive``."""
        return self.engine.archives.archive(message_id, before=before)

    def evict(self) -> int:
        """Archive every message that has no open delivery; returns their number."""
        return self.engine.archives.evict()

    def retain(self) -> int:
        """Archive the messages past their channel's retention; returns their number."""
        return self.engine.archives.retain()

    def compact(self) -> Compacted:
        """Delete archived messages and dead letters permanently, and write the file.

        Messages with an open delivery are kept.
        Errors: those of ``flush``; the messages are deleted nevertheless.
        """
        self.flush()
        before = self.engine.archives.file_bytes
        dropped = self.engine.archives.drop()
        self.flush()
        return Compacted(*dropped, max(0, before - self.engine.archives.file_bytes))
