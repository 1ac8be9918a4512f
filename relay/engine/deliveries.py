"""Deliveries of messages, their acknowledgments, and the answers that recipients owe.

    delivered -- answer --> none
              -- due --> reminded -- due --> reminded -- due --> given up

Each recipient of a plain command or query that a relay delivers owes it an answer (an obligation):
``completed`` or ``failed`` for a command, a response or ``failed`` for a query. ``received`` and
``in_progress`` restart the timer. While delivery is being retried no timer runs: retries end in an
acknowledgment or a dead letter. A store that delivers by itself has no obligations. Source:
message-engine.txt, "Receive Pipeline", "Broadcast Fan-out", "Acknowledgment Statuses"; DESIGN,
"Attempts".
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from relay.acomm.model import (
    ChannelConfig,
    ChannelState,
    Delivery,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageFilter,
    MessageType,
    Obligation,
    Priority,
    read_only_copy,
)
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import NotParticipant
from relay.base.names import ORCHESTRATOR
from relay.engine import ack_rules, events
from relay.engine.ack_rules import ack_pending, requires_ack
from relay.engine.core import StoreCore
from relay.engine.query import check_filter, find, sort
from relay.engine.validation import check_number, check_text

SYSTEM = "_system"  # the engine's own channel, and its participant
_ALL = 2**32  # messages: more than a store holds
MAX_REMINDERS = 2  # then the answer is given up
MAX_WAIT_MS = 2**53  # longer than any wait; twice that from now still fits the file's field


class OverdueAnswer(NamedTuple):
    """An answer that is overdue."""

    message: Message
    recipient: str
    obligation: Obligation
    next_due_ms: int  # after the reminder now due

    @property
    def is_exhausted(self) -> bool:
        """True when all reminders were sent."""
        return self.obligation.reminders >= MAX_REMINDERS


class DeliveryCommands(StoreCore):
    """The CommStore's commands on deliveries and obligations."""

    _resuming = False  # ``resume`` is running; it continues until nothing is resumable

    def deliver(
        self,
        message_id: int,
        recipients: Iterable[str],
        attempt: int = 0,
        now_ms: int | None = None,
    ) -> None:
        """Stage 5: record the delivery to these recipients; starts the ack timeout if retried.

        ``attempt``: of a repeated delivery; 0: unchanged.
        """
        message = self.state.messages.get(message_id)
        if message is not None:
            retried = ack_pending(self.state.channels[message.channel_id], message)
            now_ms = self._now_ms() if now_ms is None else now_ms
            due_ms = now_ms + self._ack_timeout_ms(message) if retried else 0
            moved = self.move_deliveries(
                message_id, recipients, DeliveryState.DELIVERED, due_ms, attempt
            )
            if retried:
                self._note_exactly_once(message, moved, now_ms)
            if self.tracks_answer(message):
                self._add_obligations(message, moved, now_ms)

    def _config(self, message: Message) -> ChannelConfig:
        return self.state.channels[message.channel_id].config

    def _note_exactly_once(self, message: Message, recipients: Iterable[str], now_ms: int) -> None:
        """Remember an exactly-once delivery for twice its ack timeout from now on."""
        asked = (message.metadata or {}).get("delivery")
        mode = self._config(message).delivery
        if asked == "exactly-once" or mode is DeliveryMode.EXACTLY_ONCE:
            expires_ms = now_ms + 2 * self._ack_timeout_ms(message)
            for recipient in recipients:
                key = (message.correlation_id or "", message.id, recipient)
                self.apply(events.DuplicateNoted(key, expires_ms))

    def move_deliveries(
        self,
        message_id: int,
        recipients: Iterable[str],
        state: DeliveryState,
        due_ms: int = 0,
        attempt: int = 0,
        said: str = "",
        answer: tuple[str, str] = ("", ""),
    ) -> tuple[str, ...]:
        """Move the deliveries of these recipients to a state; returns whose moved.

        ``said``: the status of an acknowledgment; ``answer``: its relay id and the first line of
        its text, kept for the record, also of a later acknowledgment.
        Repeating a call changes nothing, and no delivery moves back: an acknowledged one stays
        acknowledged. A delivery that was given up can still be acknowledged.
        """
        known = self.state.deliveries.get(message_id, {})
        moved = tuple(
            [
                recipient
                for recipient in dict.fromkeys(recipients)
                if (one := known.get(recipient)) is not None
                and (_may_move(one, state, attempt) or (said and one.state is state))
            ]
        )
        if moved:
            now = self._now_s()
            self.apply(
                events.DeliveriesMoved(
                    message_id, moved, state, now, due_ms, attempt, said, *answer
                )
            )
            if self.state.pending.held and state is not DeliveryState.DELIVERED:
                self.resume()
        return moved

    def record_answer(
        self,
        message: Message,
        recipient: str,
        said: str,
        *,
        ends: bool,
        answer: tuple[str, str] = ("", ""),
    ) -> None:
        """Record a recipient's answer to a message; ``ends``: the obligation ends.

        ``said``: received, in_progress, completed, failed; ``answer``: see ``move_deliveries``.
        If a given-up obligation is answered with ``received`` or ``in_progress``, it is open
        again, unless the recipient had answered before.
        """
        delivery = self.state.deliveries.get(message.id, {}).get(recipient)
        was_silent = (
            delivery is not None
            and delivery.state is not DeliveryState.ACKNOWLEDGED
            and self.tracks_answer(message)
            and recipient != message.sender
        )
        state = DeliveryState.ACKNOWLEDGED
        self.move_deliveries(message.id, [recipient], state, said=said, answer=answer)
        if ends and self.tracks_answer(message):
            self.end_obligation(message.id, [recipient], said)
        elif not ends and (recipient in self.state.owed.get(message.id, {}) or was_silent):
            self._restart_answer_timer(message, recipient, said)

    def stage(self, deliveries: Iterable[tuple[int, str, int]]) -> None:
        """Record as one event which deliveries the owner staged: (message id, recipient, attempt).

        From its commit on they count as made, unless ``postpone`` is called. Deliveries
        settled or archived meanwhile are unchanged.
        """
        ready = tuple(
            (number, recipient, attempt)
            for number, recipient, attempt in deliveries
            if number in self.state.messages
            and (one := self.state.deliveries.get(number, {}).get(recipient)) is not None
            and one.state < DeliveryState.ACKNOWLEDGED
        )
        if ready:
            self.apply(events.DeliveriesStaged(ready, self._now_s()))

    def is_held(self, message_id: int) -> bool:
        """True while an accepted message is held by its channel's ``max_pending``."""
        return check_number("message_id", message_id) in self.state.pending.held

    def resumable(self) -> list[int]:
        """Held messages that may be delivered now: by channel, by priority if it uses them, FIFO.

        The owner calls ``deliver`` for each; one that was not delivered is returned again.
        Messages of a paused channel stay held.
        """
        found: list[int] = []
        pending = self.state.pending
        for channel_id in pending.holding():
            channel = self.state.channels[channel_id]
            if channel.state is ChannelState.PAUSED:
                continue
            most = self.get_settings(channel_id).max_pending
            room = None if most is None else max(0, most - len(pending.pending[channel_id]))
            room = None if room is None or room > _ALL else room
            found += islice(pending.in_order(channel_id, channel.config.priority_ordering), room)
        return found

    def resume(self) -> None:
        """Deliver the resumable messages, unless the owner delivers (see ``resumable``)."""
        if not self.delivers_itself or self._resuming:
            return
        self._resuming = True
        try:
            while numbers := self.resumable():
                for number in numbers:
                    self.enqueue(self.state.messages[number])
        finally:
            self._resuming = False

    def enqueue_new(self, message: Message, is_routed: bool = False) -> None:
        """Deliver a newly accepted message, unless it is held.

        ``is_routed``: its recipients were taken from the channel, so all are participants.
        """
        if message.id in self.state.pending.held:
            return
        recipients = self.state.deliveries[message.id]
        if is_routed and len(recipients) <= self.limits.batch_recipients:
            self.deliver(message.id, recipients)
        else:
            self.enqueue(message)

    def enqueue(self, message: Message) -> None:
        """Deliver an accepted message to all its recipients, a batch at a time.

        Recipients that left meanwhile are logged and skipped; after its TTL it is not delivered.
        """
        members = self.state.members[message.channel_id]
        waiting = [
            recipient
            for recipient, one in self.state.deliveries[message.id].items()
            if one.state is DeliveryState.SENT
        ]
        gone = [recipient for recipient in waiting if recipient not in members]
        if gone and self.state.channels[message.channel_id].name != SYSTEM:
            left = f"{len(gone)} recipients have left the channel, {gone[0]} first"
            self.warn(f"message {message.id}: {left}")
            self.move_deliveries(message.id, gone, DeliveryState.BOUNCED)
            waiting = [recipient for recipient in waiting if recipient in members]
        if message.ttl is not None and self._is_past(message):
            self.move_deliveries(message.id, waiting, DeliveryState.EXPIRED)
            return
        size = self.limits.batch_recipients
        for first in range(0, len(waiting), size):
            self.deliver(message.id, waiting[first : first + size])

    def is_answered(self, message_id: int, recipient: str) -> bool:
        """True once ``recipient`` has acknowledged the message, or answered it."""
        deliveries = self.state.deliveries.get(check_number("message_id", message_id), {})
        delivery = deliveries.get(check_text("recipient", recipient))
        return delivery is not None and delivery.state is DeliveryState.ACKNOWLEDGED

    def expects_ack(self, message: Message) -> bool:
        """True for a Command, a Query, and any message delivered at least once.

        An Acknowledgment never expects one, whatever the delivery mode of its channel.
        """
        channel = self.state.channels[message.channel_id]
        return requires_ack(channel, message.message_type, message.metadata)

    def receive(self, message_id: int, participant: str, how: str = "") -> None:
        """Record that ``participant`` received a message; an acknowledged one is unchanged.

        ``how``: the evidence of an owner that delivers, for the record.
        """
        deliveries = self.state.deliveries.get(check_number("message_id", message_id), {})
        delivery = deliveries.get(check_text("participant", participant))
        if delivery is not None and delivery.queued:
            self.apply(events.MessageReceived(message_id, participant, self._now_s(), how))
            if self.state.pending.held:
                self.resume()
        elif delivery is not None and how and delivery.state >= DeliveryState.ACKNOWLEDGED:
            state = delivery.state
            self.apply(events.LateRead(message_id, participant, state, how, self._now_s()))

    def receive_messages(
        self,
        channel_id: int | None,
        participant: str,
        filter: MessageFilter | None = None,
        peek: bool = False,
    ) -> list[Message]:
        """Messages that ``participant`` has not received yet, oldest first within a priority.

        ``channel_id`` None: of all its channels, and its system messages. Messages returned count
        as received, unless ``peek``. A message past its TTL is not returned, and expires. A
        filter's order applies within each priority; its offset and limit apply to the resulting
        order.
        Errors: ChannelNotFound; NotParticipant; those of ``query_messages``.
        """
        check_text("participant", participant)
        if channel_id is not None:
            channel = self.get_channel(channel_id)
            if not self.is_participant(channel_id, participant):
                raise NotParticipant(
                    f"{participant} is not a participant of channel {channel.name}"
                )
        if filter is not None:
            filter = check_filter(filter)
        waiting = [
            message
            for number in self.state.queues.get(participant, ())
            if (message := self.state.messages.get(number)) is not None
            and (
                self._is_visible_to(message, participant)
                if channel_id is None
                else channel_id == message.channel_id
            )
        ]
        fresh = [message for message in waiting if not self._expire(message, participant)]
        fresh.sort(key=self._delivery_order)
        if filter is not None:
            fresh = find(fresh, filter)
            if filter.sort_by is not None or filter.sort_order is not None:
                sort(fresh, filter, self._rank)
            fresh = fresh[filter.offset : filter.offset + filter.limit]
        if not peek:
            for message in fresh:
                self.receive(message.id, participant)
        return [read_only_copy(self.state.messages[message.id]) for message in fresh]

    def _is_visible_to(self, message: Message, participant: str) -> bool:
        """True unless ``participant`` has left the channel; the system channel needs no joining."""
        channel_id = message.channel_id
        return (
            self.is_participant(channel_id, participant)
            or self.state.channels[channel_id].name == SYSTEM
        )

    def _expire(self, message: Message, participant: str) -> bool:
        """True when the message's TTL has passed; its delivery then expires."""
        if message.ttl is None or not self._is_past(message):
            return False
        self.move_deliveries(message.id, [participant], DeliveryState.EXPIRED)
        return True

    def _is_past(self, message: Message) -> bool:
        return self._now_ns() >= (message.created_at + (message.ttl or 0)) * NS_PER_S

    def _delivery_order(self, message: Message) -> tuple[int, int]:
        """Sort key: priority if the channel uses it, then the message id, not the clock."""
        return (self._rank(message), message.id)

    def _rank(self, message: Message) -> int:
        """The message's priority, or normal if its channel does not use priorities."""
        heeds = self.state.channels[message.channel_id].config.priority_ordering
        return message.priority if heeds else Priority.NORMAL

    def next_reminder_ms(self) -> int | None:
        """When the next answer is overdue (Unix ms)."""
        reminders = self.state.reminders
        while reminders and not self.state.is_due(reminders[0]):
            heappop(reminders)
        return reminders[0][0] if reminders else None

    def overdue_answers(self, limit: int) -> list[OverdueAnswer]:
        """Up to ``limit`` overdue answers, the longest overdue first.

        The same ones are returned until ``record_reminder`` or ``end_obligation`` is called.
        """
        now_ms = self._now_ms()
        next_ms = self.next_reminder_ms()
        if next_ms is None or next_ms > now_ms:
            return []
        found: dict[tuple[int, int, str], OverdueAnswer] = {}  # one may be in the heap twice
        while next_ms is not None and next_ms <= now_ms and len(found) < limit:
            reminder = heappop(self.state.reminders)
            _, number, recipient = reminder
            message, one = self.state.messages[number], self.state.owed[number][recipient]
            again_ms = now_ms + self._answer_timeout_ms(message)
            found[reminder] = OverdueAnswer(message, recipient, one, again_ms)
            next_ms = self.next_reminder_ms()
        for reminder in found:
            heappush(self.state.reminders, reminder)
        return list(found.values())

    def record_reminder(self, message_id: int, recipient: str, due_ms: int) -> None:
        """Record a reminder to the recipient; the answer is overdue again at ``due_ms``."""
        one = self.state.owed.get(message_id, {}).get(recipient)
        if one is not None:
            count = one.reminders + 1
            self.apply(events.Reminded(message_id, recipient, due_ms, count, self._now_s()))

    def end_obligation(self, message_id: int, recipients: Iterable[str], said: str = "") -> None:
        """End obligations that were answered (``said``: the status) or given up (empty)."""
        self.apply(events.OwedNoMore(message_id, tuple(recipients), self._now_s(), said))

    def add_downtime(self, by_ms: int) -> None:
        """Postpone every deadline by a time in which no relay ran, or a clock change."""
        self.apply(events.TimeLost(by_ms, self._now_s()))

    def downtime_ns(self, since_ns: int) -> int:
        """Nanoseconds without a running relay since ``since_ns``."""
        since = since_ns // NS_PER_S
        return sum(one.ms for one in self.state.downtimes if one.at > since) * NS_PER_MS

    def _add_obligations(self, message: Message, recipients: Iterable[str], now_ms: int) -> None:
        """Add obligations of recipients that now have the message, if it requires an answer."""
        known = self.state.owed.get(message.id, {})
        retried = ack_rules.ack_pending(self.state.channels[message.channel_id], message)
        due_ms = 0 if retried else now_ms + self._answer_timeout_ms(message)
        owing = tuple(
            name
            for name in recipients
            if name not in (message.sender, ORCHESTRATOR)
            and ((one := known.get(name)) is None or (due_ms and not one.due_ms))
        )
        if owing:
            self.apply(events.Owed(message.id, owing, due_ms, now_ms // 1000))

    def _pause_obligation(self, message_id: int, recipient: str) -> None:
        """Stop the timer of an answer until the message is delivered again."""
        one = self.state.owed.get(message_id, {}).get(recipient)
        if one is not None and one.due_ms:
            self.apply(events.Owed(message_id, (recipient,), 0, self._now_s(), one.said))

    def restore_obligation(self, message: Message, recipient: str, said: str) -> None:
        """Add an obligation that is in the owner's records but not in the store.

        ``said``: the recipient's last ``received`` or ``in_progress``; empty: none.
        """
        if said:
            self._restart_answer_timer(message, recipient, said)
        else:
            self._add_obligations(message, [recipient], self._now_ms())

    def tracks_answer(self, message: Message) -> bool:
        """True in a relay, for messages that require an answer."""
        return not self.delivers_itself and ack_rules.requires_answer(message)

    def _restart_answer_timer(self, message: Message, recipient: str, said: str) -> None:
        """Restart the timer of an answer after ``received`` or ``in_progress``."""
        due_ms = self._now_ms() + self._answer_timeout_ms(message)
        self.apply(events.Owed(message.id, (recipient,), due_ms, self._now_s(), said))

    def _answer_timeout_ms(self, message: Message) -> int:
        """The time for an answer: the message's, else its channel's, else its kind's."""
        asked_ms = self._requested_timeout_ms(message)
        if asked_ms is not None:
            return asked_ms
        is_command = message.message_type is MessageType.COMMAND
        return 1000 * (self.command_timeout_s if is_command else self.ack_timeout_s)

    def _ack_timeout_ms(self, message: Message) -> int:
        """The acknowledgment timeout: the message's, else its channel's, else the default."""
        asked_ms = self._requested_timeout_ms(message)
        return min(self.ack_timeout_s * 1000, MAX_WAIT_MS) if asked_ms is None else asked_ms

    def _requested_timeout_ms(self, message: Message) -> int | None:
        asked_ms = (message.metadata or {}).get("await_ms")
        if isinstance(asked_ms, int) and asked_ms > 0:
            return min(asked_ms, MAX_WAIT_MS)
        asked_s = self.state.channels[message.channel_id].config.ack_timeout
        return min(asked_s * 1000, MAX_WAIT_MS) if asked_s else None


def _may_move(before: Delivery, after: DeliveryState, attempt: int) -> bool:
    if before.state > DeliveryState.ACKNOWLEDGED:  # given up
        return after is DeliveryState.ACKNOWLEDGED
    if before.state is DeliveryState.ACKNOWLEDGED:
        return False
    # a further attempt goes through the same states again
    again = attempt > before.attempt and before.state < DeliveryState.ACKNOWLEDGED
    return again or before.state < after
