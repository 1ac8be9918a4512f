"""The state of a store: its tables, each by its lookup key; and the core that holds it.

``transitions`` changes it; here it is loaded from a file and copied into a snapshot. Values are
immutable and replaced, so ``snapshot`` copies pointers and any thread may read the result. The
parts of an engine share a ``Core``, and change the state by its ``apply``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol, Self

import msgspec

from relay.acomm import check
from relay.acomm.engine_state import (
    DeadLetterInfo,
    Downtime,
    DuplicateKey,
    EngineState,
    JournalPosition,
    StoreSnapshot,
)
from relay.acomm.model import (
    ArchiveInfo,
    Channel,
    ChannelSettings,
    Delivery,
    DeliveryState,
    Message,
    MessageStatus,
    Metadata,
    Obligation,
    RetentionKind,
    StoreFile,
    Subscription,
)
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import CommError, StateFault
from relay.engine import rules
from relay.engine.events import Event, FreshEvent
from relay.engine.rules import Limits
from relay.engine.tables import MessageIndex, PendingMessages, Timers, TopicTrie

_by_time = attrgetter("created_at", "id")
_NO_SETTINGS = ChannelSettings()
_KEPT_BACK = frozenset({DeliveryState.SENT, DeliveryState.ACKNOWLEDGED})
RECORD_BYTES = 160  # estimate of a message's record without content and metadata


def variable_bytes(content: bytes, metadata: Metadata | None) -> int:
    """Estimate of the bytes of content and metadata in a record."""
    if not metadata:
        return len(content)
    size = len(content)
    for name, value in metadata.items():  # of every message that a start loads
        size += len(name)
        if isinstance(value, str):
            size += len(value) if value.isascii() else len(value.encode())
    return size


def record_bytes(message: Message) -> int:
    """Estimate of the size of a message's record."""
    return variable_bytes(message.content, message.metadata) + RECORD_BYTES


class DeliveryObserver(Protocol):
    """Follows the deliveries of live messages."""

    def deliveries_moved(
        self, message: Message, known: Mapping[str, Delivery], moved: Mapping[str, Delivery]
    ) -> None:
        """Note changed deliveries; ``known`` are those before."""

    def message_dropped(self, message: Message) -> None:
        """Note that a message is live no more; its deliveries are kept."""


class State:
    """All data of a store. Anyone may read it; only ``transitions`` changes it."""

    def __init__(self, created_at: int) -> None:
        self.created_at = created_at  # Unix seconds
        self.modified_at = created_at
        self.sequence = 0  # events applied since the store began
        self.messages_sent = 0  # since it was opened
        self.channels: dict[int, Channel] = {}
        self.names: dict[str, int] = {}  # channel name -> id
        self.members: dict[int, dict[str, None]] = {}  # channel -> participants, in order
        self.counts: dict[int, int] = {}  # channel -> message_count
        self.settings: dict[int, ChannelSettings] = {}  # channel -> where they are not default
        self.messages: dict[int, Message] = {}
        self.bytes_sent = 0  # of records, since it was opened
        self.record_bytes = 0  # of every message kept, live, dead or archived
        self.kept: dict[int, int] = {}  # live messages or bytes, of channels that bound those
        self.pending = PendingMessages()
        self.retained: dict[int, None] = {}  # channels with a retention other than Forever
        self.deliveries: dict[int, dict[str, Delivery]] = {}  # inner dicts are replaced
        self.observer: DeliveryObserver | None = None  # of a library that keeps queues
        self.relay_ids: dict[str, int] = {}
        self.index = MessageIndex()
        self.subscriptions: dict[int, Subscription] = {}
        self.topics: dict[int, TopicTrie] = {}  # channel -> its subscriptions by pattern
        self.timers = Timers(self._open_delivery)
        self.owed: dict[int, dict[str, Obligation]] = {}  # open ones; inner dicts are replaced
        self.reminders = Timers(self._obligation)  # of what is owed
        self.downtimes: tuple[Downtime, ...] = ()  # when the owner did not run, oldest first
        self.dead: dict[int, DeadLetterInfo] = {}  # given-up deliveries, by message
        self.dead_letters: dict[int, Message] = {}  # given up for all recipients: no longer live
        self.dead_index = MessageIndex()
        self.duplicates: dict[DuplicateKey, int] = {}  # the exactly-once set: key -> expiry ms
        self.next_forget_ms: int | None = None  # when the first of them expires
        self.archive: dict[int, Message] = {}
        self.archive_index = MessageIndex()
        self.live_is_sorted = True
        self._archive_is_sorted = True
        self._archive_end = (0, 0)  # (created_at, id) of the last one
        self.archives: tuple[ArchiveInfo, ...] = ()  # files of what was rolled, oldest first
        self.evicting: tuple[int, ...] = ()  # messages of the last of them that are still here
        self.journal: JournalPosition | None = None  # what the file that it was loaded from covers
        self.next_channel = self.next_message = self.next_subscription = 1

    @property
    def next_archive(self) -> int:
        """The number of the next archive file."""
        if not self.archives:
            return 1
        return int(self.archives[-1].name.rpartition("/")[2].partition(".")[0]) + 1

    @classmethod
    def load(cls, file: StoreFile) -> Self:
        """The state that a file holds; counters that the file lacks are derived.

        Without ENGINE_STATE, ``derive_deliveries`` reconstructs the deliveries.
        Errors: FormatError when it breaks an invariant, or its engine state is truncated.
        """
        kept = check.check_invariants(file)
        state = cls(file.created_at)
        state.modified_at = file.modified_at
        for channel in file.channels:
            state.add_channel(channel)
        state._load_messages(file)
        for subscription in file.subscriptions:
            state.add_subscription(subscription)
        state.deliveries = kept.deliveries
        state.load_timers()
        unknown = {m.id: DeadLetterInfo(m.created_at, "", ()) for m in state.dead_letters.values()}
        state.dead = unknown | kept.dead
        state.duplicates = dict(kept.duplicates)
        state.find_next_forget_ms()
        state.sequence = kept.sequence
        for number in kept.held:
            if number in state.messages:
                state.pending.hold(state.messages[number])
        state.load_owed(kept.owed)  # before the limits, which count what is pending
        for channel_id, settings in kept.settings.items():
            state.set_settings(channel_id, settings)
        state.downtimes = kept.downtimes
        state.archives, state.evicting = kept.archives, kept.evicting
        state.journal = kept.journal
        rolled = (note.last_id for note in kept.archives)
        numbers = (*state.messages, *state.dead_letters, *state.archive, *rolled)
        state.next_channel = max([kept.next_channel - 1, *state.channels]) + 1
        state.next_message = max([kept.next_message - 1, *numbers]) + 1
        state.next_subscription = max([kept.next_subscription - 1, *state.subscriptions]) + 1
        return state

    def _load_messages(self, file: StoreFile) -> None:
        """Sort messages by status into tables; another writer may have all in section 2."""
        live, dead, archived = file.messages, file.dead_letters, file.archive
        if any(message.status >= MessageStatus.DEAD_LETTER for message in live):
            dead += tuple(m for m in live if m.status is MessageStatus.DEAD_LETTER)
            archived += tuple(m for m in live if m.status is MessageStatus.ARCHIVED)
            live = tuple(m for m in live if m.status < MessageStatus.DEAD_LETTER)
        self.messages = {message.id: message for message in live}
        self.index = MessageIndex(live)
        self.dead_letters = {message.id: message for message in dead}
        self.dead_index = MessageIndex(dead)
        for message in (*live, *dead):
            self.record_bytes += record_bytes(message)
            if message.metadata is not None:
                self._note_relay_id(message)
        for message in live if self.kept else ():
            if message.channel_id in self.kept:
                self.kept[message.channel_id] += self._weight(message)
        for message in archived:
            self.record_bytes += record_bytes(message)
            self.add_archived(message)

    def snapshot(self) -> StoreSnapshot:
        """Everything as immutable values, in O(messages) pointer copies."""
        if not self.live_is_sorted:  # a dead letter became live again
            self.messages = dict(sorted(self.messages.items()))
            self.live_is_sorted = True
        return StoreSnapshot(
            StoreFile(
                self.created_at,
                self.modified_at,
                tuple(
                    msgspec.structs.replace(channel, message_count=self.counts[channel.id])
                    for channel in self.channels.values()
                ),
                tuple(self.messages.values()),
                tuple(self.subscriptions.values()),
                tuple(sorted(self.dead_letters.values(), key=_by_time)),
                self._archive_in_order(),
            ),
            EngineState(
                self.next_channel,
                self.next_message,
                self.next_subscription,
                self.sequence,
                self.deliveries.copy(),
                self.dead.copy(),
                self.duplicates.copy(),
                self.settings.copy(),
                tuple(self.pending.held),
                self.archives,
                self.evicting,
                owed=self.owed.copy(),
                downtimes=self.downtimes,
            ),
        )

    def _archive_in_order(self) -> tuple[Message, ...]:
        """The archive by time, as in the file; sorted only if one was added out of order."""
        if not self._archive_is_sorted:
            self.archive = dict(sorted(self.archive.items(), key=lambda item: _by_time(item[1])))
            self._archive_is_sorted = True
        return tuple(self.archive.values())

    def set_deliveries(
        self, message_id: int, known: dict[str, Delivery], moved: dict[str, Delivery]
    ) -> None:
        """Store changed deliveries, and update timers."""
        # a new dict, never a change of the old one: a snapshot may hold that
        self.deliveries[message_id] = known | moved
        message = self.messages.get(message_id)
        for recipient, delivery in moved.items():
            if delivery.due_ms:
                self.timers.add(delivery.due_ms, message_id, recipient)
        if self.observer is not None and message is not None:
            self.observer.deliveries_moved(message, known, moved)
        limited = self.pending
        if limited.held or limited.pending:
            if message is not None:
                # acknowledging a held message does not release it for other recipients
                everybody = self.deliveries[message_id].values()
                if any(delivery.state not in _KEPT_BACK for delivery in moved.values()) or not any(
                    delivery.state is DeliveryState.SENT for delivery in everybody
                ):
                    self.pending.release(message)
                self.note_pending(message)

    def _open_delivery(self, message_id: int, recipient: str) -> Delivery | None:
        """The delivery of a live message."""
        if message_id not in self.messages:
            return None
        return self.deliveries.get(message_id, {}).get(recipient)

    def _obligation(self, message_id: int, recipient: str) -> Obligation | None:
        """The obligation that a live message has left."""
        return self.owed.get(message_id, {}).get(recipient) if message_id in self.messages else None

    def set_obligations(self, message_id: int, moved: dict[str, Obligation | None]) -> None:
        """Store changed obligations; None: it ended."""
        both = self.owed.get(message_id, {}) | moved
        left = {
            recipient: obligation
            for recipient, obligation in both.items()
            if obligation is not None
        }
        if left:
            self.owed[message_id] = left
        else:
            self.owed.pop(message_id, None)
        for recipient, obligation in left.items():
            if recipient in moved and obligation.due_ms:
                self.reminders.add(obligation.due_ms, message_id, recipient)
        message = self.messages.get(message_id)
        if message is not None and self.pending.pending:
            self.note_pending(message)

    def load_owed(self, owed: dict[int, dict[str, Obligation]]) -> None:
        self.owed = owed
        self.reminders.load(
            (obligation.due_ms, number, recipient)
            for number, known in owed.items()
            for recipient, obligation in known.items()
            if obligation.due_ms
        )

    def set_settings(self, channel_id: int, settings: ChannelSettings) -> None:
        """Store a channel's settings; only channels with ``max_pending`` count pending messages."""
        self.settings.pop(channel_id, None)
        self.pending.pending.pop(channel_id, None)
        if settings != _NO_SETTINGS:
            self.settings[channel_id] = settings
        if settings.max_pending is not None:
            self.pending.pending[channel_id] = {}
            for message_id in self.index.channel(channel_id):
                self.note_pending(self.messages[message_id])

    def note_pending(self, message: Message) -> None:
        """Update whether the message counts as pending, from its deliveries."""
        numbers = self.pending.pending.get(message.channel_id)
        if numbers is None:
            return
        deliveries = self.deliveries.get(message.id, {}).values()
        if message.id not in self.pending.held and rules.is_pending(
            self.channels[message.channel_id], message, deliveries, self.owed.get(message.id, {})
        ):
            numbers[message.id] = None
        else:
            numbers.pop(message.id, None)

    def add_subscription(self, subscription: Subscription) -> None:
        self.subscriptions[subscription.id] = subscription
        trie = self.topics.setdefault(subscription.channel_id, TopicTrie())
        trie.add(subscription.topic_pattern, subscription.id)

    def drop_subscription(self, subscription_id: int) -> None:
        removed = self.subscriptions.pop(subscription_id, None)
        if removed is not None:
            self.topics[removed.channel_id].remove(removed.topic_pattern, removed.id)

    def add_channel(self, channel: Channel) -> None:
        self.channels[channel.id] = channel
        self.names[channel.name] = channel.id
        self.members[channel.id] = {member.id: None for member in channel.participants}
        self.counts[channel.id] = channel.message_count
        self.note_retention(channel.id)

    def note_retention(self, channel_id: int) -> None:
        """Update the data that the channel's retention depends on."""
        kind = self.channels[channel_id].config.retention.kind
        self.retained.pop(channel_id, None)
        self.kept.pop(channel_id, None)
        if kind is not RetentionKind.FOREVER:
            self.retained[channel_id] = None
        if kind in (RetentionKind.COUNT, RetentionKind.SIZE):
            numbers = self.index.channel(channel_id)
            self.kept[channel_id] = sum(self._weight(self.messages[n]) for n in numbers)

    def _weight(self, message: Message) -> int:
        """The weight of a message in its channel's retention: one, or its bytes."""
        kind = self.channels[message.channel_id].config.retention.kind
        return 1 if kind is RetentionKind.COUNT else len(message.content)

    def add_message(self, message: Message) -> None:
        self.messages[message.id] = message
        self.index.add(message)
        if self.kept and message.channel_id in self.kept:
            self.kept[message.channel_id] += self._weight(message)
        if message.metadata is not None:
            self._note_relay_id(message)

    def load_timers(self) -> None:
        """Set the timers of all deliveries."""
        self.timers.load(
            (delivery.due_ms, message_id, recipient)
            for message_id, known in self.deliveries.items()
            for recipient, delivery in known.items()
            if delivery.due_ms
        )

    def add_archived(self, message: Message) -> None:
        self.archive[message.id] = message
        key = _by_time(message)
        if key < self._archive_end:
            self._archive_is_sorted = False
        else:
            self._archive_end = key
        self.archive_index.add(message)
        self._note_relay_id(message)

    def _note_relay_id(self, message: Message) -> None:
        relay_id = message.relay_id
        if relay_id is not None:
            self.relay_ids[relay_id] = message.id

    def drop_live(self, message_ids: Sequence[int]) -> list[Message]:
        """Remove messages from the live ones; their deliveries are kept."""
        removed = [self.messages.pop(message_id) for message_id in message_ids]
        self.index.remove(removed)
        for message in removed:
            if message.channel_id in self.kept:
                self.kept[message.channel_id] -= self._weight(message)
            self.pending.release(message)
            self.pending.pending.get(message.channel_id, {}).pop(message.id, None)
            if self.observer is not None:
                self.observer.message_dropped(message)
        return removed

    def find_next_forget_ms(self) -> int | None:
        """When the first entry of the exactly-once set expires; None: it is empty."""
        self.next_forget_ms = min(self.duplicates.values(), default=None)
        return self.next_forget_ms

    def forget(self, message: Message) -> None:
        """Remove everything kept of a message that is deleted."""
        self.record_bytes -= record_bytes(message)
        self.owed.pop(message.id, None)
        for recipient in self.deliveries.pop(message.id, {}):
            if self.duplicates:
                self.duplicates.pop((message.correlation_id or "", message.id, recipient), None)
        relay_id = message.relay_id
        if relay_id is not None and self.relay_ids.get(relay_id) == message.id:
            del self.relay_ids[relay_id]


Warn = Callable[[str], object]
log_warning = logging.getLogger("relay.engine").warning


class DeliveryRules(NamedTuple):
    """The way messages reach recipients, and the times for acknowledgments and answers.

    ``by_files``: the owner writes a message to its recipient's inbox, and reports that. A written
    file no longer needs the store, and the recipient of a plain command or query owes an answer.
    Else recipients receive their messages from queues.
    """

    by_files: bool = False
    ack_timeout_s: int = 60  # unless set by the message or the channel
    command_timeout_s: int = 1800  # the same for the answer owed to a command
    dead_letter_after_s: int = 86_400  # what is not acknowledged within a day is a dead letter


IN_QUEUES = DeliveryRules()


class Core:
    """The state, the way to change it, time, limits and rules: what the parts of an engine share.

    A part decides what a command does; it changes the store only by ``apply``. Not thread-safe:
    one owner.
    """

    def __init__(
        self,
        clock: Clock,
        state: State,
        limits: Limits,
        rules: DeliveryRules,
        warn: Warn,
        transition: Callable[[Event], None],
        keeps_events: bool,
    ) -> None:
        self.clock = clock
        self.state = state
        self.limits = limits
        self.rules = rules
        self.warn = warn
        self._transition = transition
        self.keeps_events = keeps_events
        self.fresh_events: list[FreshEvent] = []  # since ``clear_events``, for the owner's journal

    def apply(self, event: Event, at_ns: int | None = None) -> None:
        """Change the store as the event says: the one way to change it; keep it for the journal.

        ``at_ns``: when it happened (Unix nanoseconds), if not now.
        Errors: CommError of a store that takes no events, which is unchanged; StateFault when the
        event was applied in part: the store has to be opened again.
        """
        try:
            self._transition(event)
        except (CommError, OSError):
            raise
        except Exception as exc:
            name, why = type(event).__name__, type(exc).__name__  # its text may quote content
            raise StateFault(f"internal error: {name} cannot be applied: {why}") from exc
        if self.keeps_events:
            self.fresh_events.append((event, at_ns or self.clock.now_ns()))

    def clear_events(self) -> None:
        """Forget the fresh events: the journal has them."""
        self.fresh_events = []

    def now_ns(self) -> int:
        """The time by the owner's clock, Unix nanoseconds."""
        return self.clock.now_ns()

    def now_ms(self) -> int:
        """The same in milliseconds."""
        return self.clock.now_ns() // NS_PER_MS

    def now_s(self) -> int:
        """The same in seconds."""
        return self.clock.now_ns() // NS_PER_S
