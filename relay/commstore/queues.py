"""Queues: the delivery of a store whose recipients receive its messages by calls.

``CommStore`` adds them to an engine: what is accepted is put into its recipients' queues at once,
retries put it there again, and dead letters are announced on a topic of the engine's own channel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from itertools import islice
from typing import NamedTuple

from relay.acomm.model import (
    Channel,
    ChannelType,
    Delivery,
    DeliveryState,
    Message,
    MessageFilter,
    MessageType,
    read_only_copy,
)
from relay.base.clock import NS_PER_MS
from relay.base.errors import (
    CommError,
    MessageNotFound,
    NotParticipant,
    StoreFull,
    ValidationFailed,
)
from relay.commstore.writer import FileWriter
from relay.engine import rules
from relay.engine.deliveries import SYSTEM
from relay.engine.engine import Engine
from relay.engine.messages import NewMessage
from relay.engine.query import check_filter, find, sort
from relay.engine.retries import DEAD_LETTER_TOPIC, OverdueDelivery, dead_letter_text
from relay.engine.rules import check_member, check_number, check_text
from relay.engine.tables import Lanes

ACK_STATUSES = ("received", "in_progress", "completed", "failed")
CAPACITY_TOPIC = f"{SYSTEM}.store.capacity"


class Redelivery(NamedTuple):
    """A message that was put into its recipient's queue again."""

    message: Message
    recipient: str
    attempt: int


class Queues:
    """Sends, receives and repeats the messages of an engine."""

    def __init__(self, engine: Engine, writer: FileWriter) -> None:
        self._engine = engine
        self._state = engine.state
        self._writer = writer
        self._queued: dict[str, Lanes] = {}  # participant -> live messages not received
        for message_id, records in self._state.deliveries.items():
            message = self._state.messages.get(message_id)
            if message is not None:
                self.deliveries_moved(message, {}, records)
        self._state.observer = self
        self._is_resuming = False  # ``resume`` is running; it continues until nothing is resumable
        self._next_relief = 0  # the sequence before which looking for final messages is vain

    def deliveries_moved(
        self, message: Message, known: Mapping[str, Delivery], moved: Mapping[str, Delivery]
    ) -> None:
        """Put a message into the queues where it waits now, and take it from the others."""
        for recipient, delivery in moved.items():
            if delivery.queued:
                if recipient not in self._queued:
                    self._queued[recipient] = Lanes()
                self._queued[recipient].add(message)
            elif recipient in known and known[recipient].queued:
                self._queued[recipient].remove(message)

    def message_dropped(self, message: Message) -> None:
        """Take a message from all queues."""
        for recipient, delivery in self._state.deliveries.get(message.id, {}).items():
            if delivery.queued:
                self._queued[recipient].remove(message)

    def send(
        self,
        channel_id: int,
        sender: str,
        new: NewMessage,
        recipients: Iterable[str] | None = None,
        also: Iterable[str] = (),
    ) -> Message:
        """Run the whole pipeline: the message is in its recipients' queues when this returns.

        Arguments and errors: as ``CommStore.send_message``.
        """
        kind = new.message_type
        if type(kind) is not MessageType:
            kind = check_member("message_type", kind, MessageType)
        is_routed = recipients is None and not also
        if is_routed and kind in rules.ANSWERS:
            messages = self._engine.messages
            originals = messages.answered_by(channel_id, kind, new.correlation_id)
            return self._answer(channel_id, sender, new, originals)
        message = self._accept(channel_id, sender, new, recipients, also)
        self._enqueue_new(message, is_routed)
        if self._state.settings:
            self._writer.flush_if_immediate(channel_id)
        return read_only_copy(self._state.messages[message.id])

    def acknowledge(
        self, message_id: int, participant: str, status: str, text: str | None
    ) -> Message:
        """Acknowledge a message. Errors: as ``CommStore.acknowledge_message``."""
        messages = self._engine.messages
        original = messages.find_kept(check_number("message_id", message_id))
        if original is None:
            raise MessageNotFound(f"message {message_id} does not exist")
        if status not in ACK_STATUSES:
            raise ValidationFailed("status", f"{status!r} is not one of {', '.join(ACK_STATUSES)}")
        if text is not None:
            check_text("text", text)
        if not messages.expects_ack(original):
            raise ValidationFailed("message_id", f"message {message_id} expects no acknowledgment")
        if check_text("participant", participant) not in messages.recipients(message_id):
            raise NotParticipant(f"message {message_id} was not sent to {participant}")
        answer = NewMessage(
            MessageType.ACKNOWLEDGMENT,
            f"{status}\n{text}" if text else status,
            correlation_id=original.correlation_id,
            metadata={"ack_status": status, "answers": original.id},
        )
        return self._answer(original.channel_id, participant, answer, [original])

    def _answer(
        self, channel_id: int, sender: str, new: NewMessage, originals: list[Message]
    ) -> Message:
        """Send an answer only to the senders of the originals, and acknowledge these.

        Both are in the same flush: after a crash in between, the answer would be expected again.
        """
        with self._writer.single_flush(channel_id):
            senders = [message.sender for message in originals]
            answer = self._accept(channel_id, sender, new, senders)
            self._enqueue_new(answer)
            is_response = answer.message_type is MessageType.RESPONSE
            metadata = answer.metadata or {}
            said = "completed" if is_response else str(metadata.get("ack_status", "received"))
            for message in originals:
                ends = rules.ends_obligation(message, said, is_response)
                self._engine.deliveries.record_answer(message, sender, said, ends=ends)
                self.resume()
        self._writer.flush_if_immediate(channel_id)
        return read_only_copy(self._state.messages[answer.id])

    def _accept(
        self,
        channel_id: int,
        sender: str,
        new: NewMessage,
        recipients: Iterable[str] | None,
        also: Iterable[str] = (),
    ) -> Message:
        """Accept a message; if the memory is full, make room and try again."""
        archives, accept = self._engine.archives, self._engine.messages.accept
        was_near_full = archives.is_near_full
        try:
            message = accept(channel_id, sender, new, recipients=recipients, also=also)
        except StoreFull:
            if not self._free_memory():
                raise
            message = accept(channel_id, sender, new, recipients=recipients, also=also)
        if archives.is_near_full and not was_near_full:
            self._announce(CAPACITY_TOPIC, archives.capacity_warning())
        return message

    def _free_memory(self) -> bool:
        """Archive final messages after a flush; False when there is none.

        A scan of all messages is expensive: one that found little is not repeated for a while.
        """
        state, archives = self._state, self._engine.archives
        if state.sequence < self._next_relief:
            return False
        final = [m.id for m in state.messages.values() if archives.is_final(m)]
        if final:
            self._writer.flush()
            archives.archive_all(final)
        one_percent = self._engine.limits.active_messages // 100
        found_little = len(final) < one_percent
        self._next_relief = state.sequence + one_percent if found_little else 0
        return bool(final)

    def _announce(self, topic: str, text: str, also: Iterable[str] = ()) -> None:
        """Send a Notification on the system's channel, to its subscribers and to ``also``.

        Does nothing if that channel accepts no message.
        """
        channels = self._engine.channels
        with contextlib.suppress(CommError):
            channel = channels.find_by_name(SYSTEM)
            if channel is None:
                channel = channels.create(SYSTEM, ChannelType.PUB_SUB, SYSTEM)
            new = NewMessage(MessageType.NOTIFICATION, text, topic)
            self.send(channel.id, SYSTEM, new, also=also)

    def receive(
        self, channel_id: int | None, participant: str, filter: MessageFilter | None, peek: bool
    ) -> list[Message]:
        """Messages not received yet. Arguments and errors: as ``CommStore.receive_messages``."""
        check_text("participant", participant)
        channels = self._engine.channels
        if channel_id is not None:
            channel = channels.find(channel_id)
            if not channels.is_participant(channel_id, participant):
                raise NotParticipant(
                    f"{participant} is not a participant of channel {channel.name}"
                )
        if filter is not None:
            filter = check_filter(filter)
        expired: list[Message] = []
        waiting = self._without_expired(self._waiting(channel_id, participant), expired)
        if filter is None:
            fresh = list(waiting)
        elif filter.sort_by is None and filter.sort_order is None:
            end = filter.offset + filter.limit
            fresh = list(islice(find(waiting, filter), filter.offset, end))
        else:
            fresh = list(find(waiting, filter))
            sort(fresh, filter, self._engine.messages.rank)
            fresh = fresh[filter.offset : filter.offset + filter.limit]
        for message in expired:
            self._end(message.id, [participant], DeliveryState.EXPIRED)
        if not peek:
            for message in fresh:
                self._engine.deliveries.receive(message.id, participant)
                self.resume()
        return [read_only_copy(self._state.messages[message.id]) for message in fresh]

    def _waiting(self, channel_id: int | None, participant: str) -> Iterator[Message]:
        """The messages in the queue of ``participant``, by priority and id; lazily.

        Those of a channel that it has left are not included; the system channel needs no joining.
        """
        state, messages = self._state, self._state.messages
        queue = self._queued.get(participant, Lanes())

        def of_channel(number: int) -> Iterator[Message]:
            heeds_priority = state.channels[number].config.priority_ordering
            return (messages[found] for found in queue.in_order(number, heeds_priority))

        if channel_id is not None:
            return of_channel(channel_id)
        rank = self._engine.messages.rank
        visible = [
            of_channel(number)
            for number in queue.channels()
            if self._engine.channels.is_participant(number, participant)
            or state.channels[number].name == SYSTEM
        ]
        # the message id, not the clock
        return merge(*visible, key=lambda message: (rank(message), message.id))

    def _without_expired(
        self, messages: Iterator[Message], expired: list[Message]
    ) -> Iterator[Message]:
        """The messages whose TTL has not passed; the others are added to ``expired``."""
        for message in messages:
            if message.is_expired(self._engine.clock.now_ns()):
                expired.append(message)
            else:
                yield message

    def _end(self, message_id: int, recipients: Iterable[str], state: DeliveryState) -> None:
        """End deliveries; that may make room for held messages."""
        if self._engine.deliveries.move(message_id, recipients, state):
            self.resume()

    def resume(self) -> None:
        """Deliver the held messages that there is room for."""
        if self._is_resuming or not self._state.pending.held:
            return
        self._is_resuming = True
        try:
            while numbers := self._engine.deliveries.resumable():
                for number in numbers:
                    self._enqueue(self._state.messages[number])
        finally:
            self._is_resuming = False

    def _enqueue_new(self, message: Message, is_routed: bool = False) -> None:
        """Deliver a newly accepted message, unless it is held.

        ``is_routed``: its recipients were taken from the channel, so all are participants.
        """
        if message.id in self._state.pending.held:
            return
        recipients = self._state.deliveries[message.id]
        if is_routed and len(recipients) <= self._engine.limits.batch_recipients:
            self._engine.deliveries.deliver(message.id, recipients)
        else:
            self._enqueue(message)

    def _enqueue(self, message: Message) -> None:
        """Deliver an accepted message to all its recipients, a batch at a time.

        Recipients that left meanwhile are logged and skipped; after its TTL it is not delivered.
        """
        members = self._state.members[message.channel_id]
        waiting = [
            recipient
            for recipient, delivery in self._state.deliveries[message.id].items()
            if delivery.state is DeliveryState.SENT
        ]
        absent = [recipient for recipient in waiting if recipient not in members]
        if absent and self._state.channels[message.channel_id].name != SYSTEM:
            left = f"{len(absent)} recipients have left the channel, {absent[0]} first"
            self._engine.warn(f"message {message.id}: {left}")
            self._end(message.id, absent, DeliveryState.BOUNCED)
            waiting = [recipient for recipient in waiting if recipient in members]
        if message.is_expired(self._engine.clock.now_ns()):
            self._end(message.id, waiting, DeliveryState.EXPIRED)
            return
        size = self._engine.limits.batch_recipients
        for first in range(0, len(waiting), size):
            self._engine.deliveries.deliver(message.id, waiting[first : first + size])

    def enqueue_undelivered(self) -> None:
        """Deliver messages that were accepted before the store was opened."""
        held = self._state.pending.held
        for number, deliveries in list(self._state.deliveries.items()):
            message = self._state.messages.get(number)
            if message is None or number in held:
                continue
            if any(delivery.state is DeliveryState.SENT for delivery in deliveries.values()):
                self._enqueue(message)
        self.resume()

    def deliver_sticky(self) -> None:
        """Deliver what a new participant or subscriber gets of a sticky channel."""
        for number, recipient in self._engine.channels.pop_sticky():
            if number not in self._state.pending.held:
                self._engine.deliveries.deliver(number, [recipient])

    def bounce(self, channel: Channel, participant: str) -> None:
        """Bounce the messages of a channel that a participant has left without receiving them.

        Those that expect an acknowledgment stay: their senders are notified when it is overdue.
        """
        for message in list(self._waiting(channel.id, participant)):
            if not rules.ack_pending(channel, message):
                self._end(message.id, [participant], DeliveryState.BOUNCED)

    def deliver_replay(self, message_id: int) -> None:
        """Make the first attempt of a dead letter's replay."""
        for recipient, delivery in self._state.deliveries.get(message_id, {}).items():
            if rules.is_replayed(delivery):
                self._engine.deliveries.deliver(message_id, [recipient], delivery.attempt + 1)

    def tick(self, now_ns: int | None) -> list[Redelivery]:
        """Do what is due. Arguments and errors: as ``CommStore.tick``."""
        now_ns = self._engine.clock.now_ns() if now_ns is None else check_number("now_ns", now_ns)
        if not 0 <= now_ns < 2**64:
            raise ValidationFailed("now_ns", f"expected a time in nanoseconds, got {now_ns}")
        retries, now_ms = self._engine.retries, now_ns // NS_PER_MS
        again = self._repeat(retries.due(now_ns), now_ns)
        while (due_ms := retries.next_due_ms()) is not None and due_ms <= now_ms:
            again += self._repeat(retries.due(now_ns), now_ns)
        self._engine.archives.retain()
        self.resume()
        self._next_relief = 0
        return again

    def _repeat(self, found: list[OverdueDelivery], now_ns: int) -> list[Redelivery]:
        again: list[Redelivery] = []
        dead: dict[tuple[int, str], list[str]] = {}
        for overdue in found:
            number = overdue.number
            if overdue.state is DeliveryState.WAITING:
                self._engine.deliveries.deliver(
                    number, [overdue.recipient], overdue.attempt, now_ns
                )
                message = read_only_copy(self._state.messages[number])
                again.append(Redelivery(message, overdue.recipient, overdue.attempt))
            elif overdue.state is DeliveryState.EXPIRED:
                self._end(number, [overdue.recipient], DeliveryState.EXPIRED)
            else:
                dead.setdefault((number, overdue.reason), []).append(overdue.recipient)
        for (number, reason), recipients in dead.items():
            message = self._state.messages[number]
            self._engine.retries.dead_letter(number, recipients, reason)
            text = dead_letter_text(message, recipients, reason)
            # to the sender even if it has not subscribed
            self._announce(DEAD_LETTER_TOPIC, text, [message.sender])
        return again
