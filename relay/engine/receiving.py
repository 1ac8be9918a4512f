"""Deliveries, the receive pipeline, queries, threads and search.

Source: message-engine.txt, "Receive Pipeline" and "Broadcast Fan-out".
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from relay.acomm.model import (
    ChannelConfig,
    ChannelState,
    Delivery,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageFilter,
    Priority,
    handed_out,
)
from relay.base.clock import NS_PER_S
from relay.base.errors import NotParticipant
from relay.engine import events
from relay.engine.ack_rules import owes_ack, still_retried
from relay.engine.obligations import OwingCommands
from relay.engine.query import QueryResult, check_filter, find, select, sort
from relay.engine.validation import check_number, check_text

SYSTEM = "_system"  # the engine's own channel, and its participant
_ALL = 2**32  # messages: more than a store holds


class ReceiveCommands(OwingCommands):
    """The CommStore's commands that read."""

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
            retried = still_retried(self.state.channels[message.channel_id], message)
            now_ms = self._now_ms() if now_ms is None else now_ms
            due_ms = now_ms + self._ack_timeout_ms(message) if retried else 0
            moved = self.move_deliveries(
                message_id, recipients, DeliveryState.DELIVERED, due_ms, attempt
            )
            if retried:
                self._note_exactly_once(message, moved, now_ms)
            if self.is_owed(message):
                self._owe(message, moved, now_ms)

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

    def hear_answer(
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
            and self.is_owed(message)
            and recipient != message.sender
        )
        state = DeliveryState.ACKNOWLEDGED
        self.move_deliveries(message.id, [recipient], state, said=said, answer=answer)
        if ends and self.is_owed(message):
            self.release(message.id, [recipient], said)
        elif not ends and (recipient in self.state.owed.get(message.id, {}) or was_silent):
            self._go_on(message, recipient, said)

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

    def holds(self, message_id: int) -> bool:
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
                    self.hand_over(self.state.messages[number])
        finally:
            self._resuming = False

    def hand_over_new(self, message: Message, is_routed: bool = False) -> None:
        """Deliver a message that was accepted just now, unless it is held.

        ``is_routed``: its recipients are all in the channel, which gave them.
        """
        if message.id in self.state.pending.held:
            return
        recipients = self.state.deliveries[message.id]
        if is_routed and len(recipients) <= self.limits.batch_recipients:
            self.deliver(message.id, recipients)
        else:
            self.hand_over(message)

    def hand_over(self, message: Message) -> None:
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
        return owes_ack(channel, message.message_type, message.metadata)

    def recipients(self, message_id: int) -> tuple[str, ...]:
        """Who the message was routed to; of one that was rolled out, too."""
        known = self.state.deliveries.get(check_number("message_id", message_id))
        if known is None and self.archives is not None:
            found = self.archives.get(self.state.archives, message_id)
            known = found.deliveries if found else None
        return tuple(known or ())

    def get_message(self, message_id: int) -> Message | None:
        """The message of that number, live or a dead letter."""
        message_id = check_number("message_id", message_id)
        known = self.state.messages.get(message_id) or self.state.dead_letters.get(message_id)
        return None if known is None else handed_out(known)

    def by_relay_id(self, relay_id: str) -> Message | None:
        """The message that came through the relay under this id; an archived one, too."""
        number = self.state.relay_ids.get(check_text("relay_id", relay_id))
        return None if number is None else self._kept(number)

    def ever_by_relay_id(self, relay_id: str) -> Message | None:
        """The same, and if it was rolled out: its archive is read then.

        Errors: FormatError, OSError for an archive that is damaged or gone.
        """
        found = self.by_relay_id(relay_id)
        if found is None and self.archives is not None:
            archived = self.archives.find(self.state.archives, relay_id)
            found = handed_out(archived.message) if archived else None
        return found

    def _kept(self, message_id: int) -> Message | None:
        known = self.get_message(message_id)
        archived = self.state.archive.get(message_id) if known is None else None
        return known if archived is None else handed_out(archived)

    def unsettled(self) -> dict[str, int]:
        """Relay id -> number of each message that somebody has not got, owes, or is dead for."""
        return {
            relay_id: number
            for relay_id, number in self.state.relay_ids.items()
            if number in self.state.owed
            or any(
                delivery.state in _UNSETTLED or delivery.due_ms
                for delivery in self.state.deliveries.get(number, {}).values()
            )
        }

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
        """What ``participant`` has not received yet, oldest first inside a priority.

        ``channel_id`` None: of every channel it takes part in, and what the system told it. What
        is returned counts as received, unless ``peek``. A message past its ttl is not returned,
        and expires. A filter that asks for an order has it inside each priority; its offset and
        limit count in the order that results.
        Errors: ChannelNotFound; NotParticipant; those of ``query_messages``.
        """
        check_text("participant", participant)
        if channel_id is not None:
            channel = self.get_channel(channel_id)
            if not self.takes_part(channel_id, participant):
                raise NotParticipant(f"{participant} does not take part in channel {channel.name}")
        if filter is not None:
            filter = check_filter(filter)
        waiting = [
            message
            for number in self.state.queues.get(participant, ())
            if (message := self.state.messages.get(number)) is not None
            and (
                self._serves(message, participant)
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
        return [handed_out(self.state.messages[message.id]) for message in fresh]

    def _serves(self, message: Message, participant: str) -> bool:
        """True unless ``participant`` has left the channel; nobody need join the system's."""
        channel_id = message.channel_id
        return (
            self.takes_part(channel_id, participant)
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

    def query_messages(
        self, filter: MessageFilter | None = None, *, grouped: bool = True
    ) -> QueryResult:
        """Messages by every given criterion, newest first by default; dead letters included.

        Where channels heed priority, in groups of one priority each, unless ``grouped`` is False.
        Archives are looked into as far as their indexes say that it is worth it.
        Errors: ValidationFailed for a pattern that is none; QueryTimeout; FormatError, OSError
        for an archive that is damaged or gone.
        """
        wanted = check_filter(MessageFilter() if filter is None else filter)
        rank = self._rank if grouped else None
        state = self.state
        found = [state.messages[number] for number in state.index.candidates(wanted)]
        found += [state.dead_letters[number] for number in state.dead_index.candidates(wanted)]
        if wanted.include_archived:
            found += [state.archive[number] for number in state.archive_index.candidates(wanted)]
        if self.archives is None or not state.archives:
            return _handed_out(select(found, wanted, rank))
        leaving = state.archives[-1] if state.leaving else None
        here = state.messages.keys() | state.archive.keys() if leaving else ()
        return _handed_out(self.archives.select(state.archives, found, wanted, leaving, here, rank))

    def search(self, pattern: str, limit: int = 100) -> list[Message]:
        """Messages whose content matches a regular expression, newest first."""
        wanted = MessageFilter(content_pattern=pattern, limit=limit, include_archived=True)
        return self.query_messages(wanted, grouped=False).messages

    def get_thread(self, correlation_id: str) -> list[Message]:
        """The messages of a thread, oldest first, archived ones included.

        Errors: FormatError, OSError for an archive that is damaged or gone.
        """
        here = self.thread_here(check_text("correlation_id", correlation_id))
        if self.archives is None:
            return here
        known = {message.id for message in here}
        rolled = self.archives.thread(self.state.archives, correlation_id)
        return sorted(
            [*here, *(handed_out(m) for m in rolled if m.id not in known)],
            key=lambda message: message.id,
        )

    def thread_here(self, correlation_id: str) -> list[Message]:
        """Those of a thread that were not rolled out, oldest first."""
        state = self.state
        live = [state.messages[n] for n in state.index.thread(correlation_id)]
        archived = [state.archive[n] for n in state.archive_index.thread(correlation_id)]
        dead = [state.dead_letters[n] for n in state.dead_index.thread(correlation_id)]
        found = sorted([*archived, *live, *dead], key=lambda message: message.id)
        return [handed_out(message) for message in found]

    def __len__(self) -> int:
        return len(self.state.messages)


def _handed_out(result: QueryResult) -> QueryResult:
    return result._replace(messages=[handed_out(message) for message in result.messages])


_UNSETTLED = frozenset(DeliveryState) - {
    DeliveryState.DELIVERED,
    DeliveryState.RECEIVED,
    DeliveryState.ACKNOWLEDGED,
}


def _may_move(before: Delivery, after: DeliveryState, attempt: int) -> bool:
    if before.state > DeliveryState.ACKNOWLEDGED:  # given up
        return after is DeliveryState.ACKNOWLEDGED
    if before.state is DeliveryState.ACKNOWLEDGED:
        return False
    # once more: it goes through the same states again
    again = attempt > before.attempt and before.state < DeliveryState.ACKNOWLEDGED
    return again or before.state < after
