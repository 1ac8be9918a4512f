"""Deliveries of messages: made, received, answered; and the answers that recipients owe.

    delivered -- answer --> none
              -- due --> reminded -- due --> reminded -- due --> given up

A plain command or query that a relay delivers is owed an answer by each recipient: a command ends
with ``completed`` or ``failed``, a query with its response or ``failed``; ``received`` and
``in_progress`` restart the timer. While delivery is being retried no timer runs: retries end in an
acknowledgment or a dead letter. A store that delivers by itself has no such obligations. Source:
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
MAX_REMINDERS = 2  # then it is given up
MAX_WAIT_MS = 2**53  # beyond any wait, and twice of it from now is a time that a file holds


class OverdueAnswer(NamedTuple):
    """An answer that is overdue."""

    message: Message
    recipient: str
    obligation: Obligation
    next_due_ms: int  # where the recipient is reminded now

    @property
    def is_exhausted(self) -> bool:
        """True when all reminders were sent."""
        return self.obligation.reminders >= MAX_REMINDERS


class DeliveryCommands(StoreCore):
    """The CommStore's commands on deliveries and on the answers that are owed."""

    _resuming = False  # one resumption goes on until nothing more may go

    def deliver(
        self,
        message_id: int,
        recipients: Iterable[str],
        attempt: int = 0,
        now_ms: int | None = None,
    ) -> None:
        """Stage 5: these recipients have it now; where it comes again, the ack's time runs.

        ``attempt``: of a delivery that was made again; 0: as it was.
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
        """Note what became of these recipients' deliveries; whose moved.

        ``said``: the status of an acknowledgment, ``answer``: its relay id and the first line of
        what it says, for the record; so is that of a later one.
        The same again changes nothing, and nothing moves back: what is acknowledged was
        delivered, whatever is noted later. What was given up can still be acknowledged.
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
        """Note what a recipient says of a message; ``ends``: it owes nothing any more.

        ``said``: received, in_progress, completed, failed; ``answer``: see ``move_deliveries``.
        The answer that never came is owed again by who begins after all, and by nobody who has
        answered before.
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
        """An owner that delivers has these ready: (message id, recipient, attempt), as one event.

        From its commit on they count as made, unless ``hold`` says otherwise. What was settled
        meanwhile stays so, and what was archived.
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
        """True while a message is accepted, and held back by its channel's ``max_pending``."""
        return check_number("message_id", message_id) in self.state.pending.held

    def resumable(self) -> list[int]:
        """Held messages that may go now: by channel, by priority where it heeds that, then FIFO.

        Whoever delivers calls ``deliver`` for each; one that was not delivered comes again.
        A paused channel lets nothing go.
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
        """Deliver what may go by now; where the owner delivers, ``resumable`` tells it."""
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
        """Deliver a message that was accepted just now, unless it is held.

        ``is_routed``: its recipients are all in the channel, which gave them.
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

        Who has left meanwhile is logged, and holds up nobody else; past the ttl nobody gets it.
        """
        members = self.state.members[message.channel_id]
        waiting = [
            recipient
            for recipient, one in self.state.deliveries[message.id].items()
            if one.state is DeliveryState.SENT
        ]
        gone = [recipient for recipient in waiting if recipient not in members]
        if gone and self.state.channels[message.channel_id].name != SYSTEM:
            self.warn(f"message {message.id}: {len(gone)} have left, among them {gone[0]}")
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
        """True for a Command, a Query, and whatever is delivered at least once.

        An Acknowledgment never expects one, whatever its channel promises.
        """
        channel = self.state.channels[message.channel_id]
        return requires_ack(channel, message.message_type, message.metadata)

    def receive(self, message_id: int, participant: str, how: str = "") -> None:
        """``participant`` took one message; what it has acknowledged stays acknowledged.

        ``how``: of an owner that delivers, for the record: what shows that it was taken.
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

        ``channel_id`` None: of every channel it takes part in, and what the system told it. What
        is returned counts as received, unless ``peek``. A message past its ttl is not returned,
        and expires. A filter that asks for an order has it inside each priority; its offset and
        limit count in the order that results.
        Errors: ChannelNotFound; NotParticipant; those of ``query_messages``.
        """
        check_text("participant", participant)
        if channel_id is not None:
            channel = self.get_channel(channel_id)
            if not self.is_participant(channel_id, participant):
                raise NotParticipant(f"{participant} does not take part in channel {channel.name}")
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
        """True unless ``participant`` has left the channel; nobody need join the system's."""
        channel_id = message.channel_id
        return (
            self.is_participant(channel_id, participant)
            or self.state.channels[channel_id].name == SYSTEM
        )

    def _expire(self, message: Message, participant: str) -> bool:
        """True when the message's ttl has passed; its delivery is over then."""
        if message.ttl is None or not self._is_past(message):
            return False
        self.move_deliveries(message.id, [participant], DeliveryState.EXPIRED)
        return True

    def _is_past(self, message: Message) -> bool:
        return self._now_ns() >= (message.created_at + (message.ttl or 0)) * NS_PER_S

    def _delivery_order(self, message: Message) -> tuple[int, int]:
        """Priority where the channel heeds it, then first come, first served, by no clock."""
        return (self._rank(message), message.id)

    def _rank(self, message: Message) -> int:
        """The message's priority where its channel heeds that, as normal elsewhere."""
        heeds = self.state.channels[message.channel_id].config.priority_ordering
        return message.priority if heeds else Priority.NORMAL

    def next_reminder_ms(self) -> int | None:
        """When the next answer is overdue (Unix ms)."""
        reminders = self.state.reminders
        while reminders and not self.state.is_due(reminders[0]):
            heappop(reminders)
        return reminders[0][0] if reminders else None

    def overdue_answers(self, limit: int) -> list[OverdueAnswer]:
        """Up to ``limit`` answers that are overdue, the one first that is so for longest.

        The same again until ``remind`` or ``release`` says what was done about it.
        """
        now_ms = self._now_ms()
        next_ms = self.next_reminder_ms()
        if next_ms is None or next_ms > now_ms:
            return []
        found: dict[tuple[int, int, str], OverdueAnswer] = {}  # one may stand in the heap twice
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
        """It was reminded of its answer, which is overdue again at ``due_ms``."""
        one = self.state.owed.get(message_id, {}).get(recipient)
        if one is not None:
            count = one.reminders + 1
            self.apply(events.Reminded(message_id, recipient, due_ms, count, self._now_s()))

    def end_obligation(self, message_id: int, recipients: Iterable[str], said: str = "") -> None:
        """These have answered (``said``: the status), or their answer is waited for no longer."""
        self.apply(events.OwedNoMore(message_id, tuple(recipients), self._now_s(), said))

    def add_downtime(self, by_ms: int) -> None:
        """Move each deadline by the time in which no relay ran or the clock was changed."""
        self.apply(events.TimeLost(by_ms, self._now_s()))

    def downtime_ns(self, since_ns: int) -> int:
        """The part of the time since then in which no relay ran (ns)."""
        since = since_ns // NS_PER_S
        return sum(one.ms for one in self.state.downtimes if one.at > since) * NS_PER_MS

    def _add_obligations(self, message: Message, recipients: Iterable[str], now_ms: int) -> None:
        """These have the message now, and owe its answer where one is owed at all."""
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
        """Stop the timer of an answer until the recipient has the message."""
        one = self.state.owed.get(message_id, {}).get(recipient)
        if one is not None and one.due_ms:
            self.apply(events.Owed(message_id, (recipient,), 0, self._now_s(), one.said))

    def restore_obligation(self, message: Message, recipient: str, said: str) -> None:
        """Add an obligation that the owner's records have and the store lacks.

        ``said``: the recipient's last acknowledgment that ended nothing; empty: none.
        """
        if said:
            self._restart_answer_timer(message, recipient, said)
        else:
            self._add_obligations(message, [recipient], self._now_ms())

    def tracks_answer(self, message: Message) -> bool:
        """True for what its recipients owe an answer, here in a relay."""
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
    # once more: it goes through the same states again
    again = attempt > before.attempt and before.state < DeliveryState.ACKNOWLEDGED
    return again or before.state < after
