"""Deliveries of messages, their acknowledgments, and the answers that recipients owe.

    delivered -- answer --> none
              -- due --> reminded -- due --> reminded -- due --> given up

Each recipient of a plain command or query delivered as a file owes it an answer (an obligation):
``completed`` or ``failed`` for a command, a response or ``failed`` for a query. ``received`` and
``in_progress`` restart the timer. While delivery is being retried no timer runs: retries end in an
acknowledgment or a dead letter. Messages received from queues have no obligations. See
docs/states.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from relay.acomm.model import (
    ChannelState,
    Delivery,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageType,
    Obligation,
)
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.names import ORCHESTRATOR
from relay.engine import events, rules
from relay.engine.rules import check_number, check_text
from relay.engine.state import Core
from relay.engine.tables import Timer

SYSTEM = "_system"  # the engine's own channel, and its participant
_ALL = 2**32  # messages: more than a store holds
NO_DELIVERIES: Mapping[str, Delivery] = {}
NOTHING_OWED: Mapping[str, Obligation] = {}
MAX_REMINDERS = 2  # then the answer is given up


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


class Obligations:
    """The answers that recipients owe. Part of an engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._state = core.state

    def next_due_ms(self) -> int | None:
        """When the next answer is overdue (Unix ms)."""
        return self._state.reminders.next_ms()

    def overdue(self, limit: int) -> list[OverdueAnswer]:
        """Up to ``limit`` overdue answers, the longest overdue first.

        The same ones are returned until ``record_reminder`` or ``end`` is called.
        """
        now_ms = self._core.now_ms()
        found: dict[Timer, OverdueAnswer] = {}  # one may be there twice
        while len(found) < limit:
            reminder = self._state.reminders.pop_due(now_ms)
            if reminder is None:
                break
            _, number, recipient = reminder
            message, obligation = self._state.messages[number], self._state.owed[number][recipient]
            again_ms = now_ms + self._answer_timeout_ms(message)
            found[reminder] = OverdueAnswer(message, recipient, obligation, again_ms)
        self._state.reminders.restore(found)
        return list(found.values())

    def of(self, message_id: int) -> Mapping[str, Obligation]:
        """The answers owed for a message, by recipient."""
        return self._state.owed.get(message_id, NOTHING_OWED)

    def record_reminder(self, message_id: int, recipient: str, due_ms: int, count: int) -> None:
        """Record that a recipient was reminded so many times; it is overdue again at ``due_ms``."""
        if recipient in self._state.owed.get(message_id, {}):
            at = self._core.now_s()
            self._core.apply(events.Reminded(message_id, recipient, due_ms, count, at))

    def end(
        self, message_id: int, recipients: Iterable[str], said: str = "", at_ns: int | None = None
    ) -> None:
        """End obligations that were answered (``said``: the status) or given up (empty)."""
        at = self._core.now_s() if at_ns is None else at_ns // NS_PER_S
        self._core.apply(events.OwedNoMore(message_id, tuple(recipients), at, said), at_ns)

    def add(self, message: Message, recipients: Iterable[str], now_ms: int) -> None:
        """Add obligations of recipients that now have the message, if it requires an answer.

        Of a message that is about to leave the store nothing is owed.
        """
        if message.id in self._state.evicting:
            return
        known = self._state.owed.get(message.id, {})
        retried = rules.ack_pending(self._state.channels[message.channel_id], message)
        due_ms = 0 if retried else now_ms + self._answer_timeout_ms(message)
        owing = tuple(
            name
            for name in recipients
            if name not in (message.sender, ORCHESTRATOR)
            and ((obligation := known.get(name)) is None or (due_ms and not obligation.due_ms))
        )
        if owing:
            self._core.apply(events.Owed(message.id, owing, due_ms, now_ms // 1000))

    def pause(self, message_id: int, recipient: str) -> None:
        """Stop the timer of an answer until the message is delivered again."""
        obligation = self._state.owed.get(message_id, {}).get(recipient)
        if obligation is not None and obligation.due_ms:
            self._core.apply(
                events.Owed(message_id, (recipient,), 0, self._core.now_s(), obligation.said)
            )

    def restore(self, message: Message, recipient: str, said: str) -> None:
        """Add an obligation that is in the owner's records but not in the store.

        ``said``: the recipient's last ``received`` or ``in_progress``; empty: none.
        """
        if said:
            self.restart(message, recipient, said)
        else:
            self.add(message, [recipient], self._core.now_ms())

    def tracks(self, message: Message) -> bool:
        """True for messages delivered as files that require an answer."""
        return self._core.rules.by_files and rules.requires_answer(message)

    def restart(
        self, message: Message, recipient: str, said: str, at_ns: int | None = None
    ) -> None:
        """Restart the timer of an answer after ``received`` or ``in_progress``; as ``add``."""
        if message.id in self._state.evicting:
            return
        due_ms = self._core.now_ms() + self._answer_timeout_ms(message)
        at_ns = self._core.now_ns() if at_ns is None else at_ns
        self._core.apply(
            events.Owed(message.id, (recipient,), due_ms, at_ns // NS_PER_S, said), at_ns
        )

    def _answer_timeout_ms(self, message: Message) -> int:
        """The time for an answer: the message's, else its channel's, else its kind's."""
        channel = self._state.channels[message.channel_id]
        asked_ms = rules.requested_timeout_ms(channel, message)
        if asked_ms is not None:
            return asked_ms
        times = self._core.rules
        is_command = message.message_type is MessageType.COMMAND
        return 1000 * (times.command_timeout_s if is_command else times.ack_timeout_s)


class Deliveries:
    """The deliveries of messages to their recipients. Part of an engine."""

    def __init__(self, core: Core, obligations: Obligations) -> None:
        self._core = core
        self._state = core.state
        self._obligations = obligations

    def of(self, message_id: int) -> Mapping[str, Delivery]:
        """The deliveries of a message, by recipient; empty once it is archived."""
        return self._state.deliveries.get(message_id, NO_DELIVERIES)

    def deliver(
        self,
        message_id: int,
        recipients: Iterable[str],
        attempt: int = 0,
        at_ns: int | None = None,
    ) -> tuple[str, ...]:
        """Record the delivery to these recipients; starts the ack timeout if retried.

        ``attempt``: of a repeated delivery; 0: unchanged. ``at_ns``: when, if not now. Returns
        whose delivery moved: not that of who has answered, nor any of an archived message.
        """
        moved: tuple[str, ...] = ()
        message = self._state.messages.get(message_id)
        if message is not None:
            retried = rules.ack_pending(self._state.channels[message.channel_id], message)
            at_ns = self._core.now_ns() if at_ns is None else at_ns
            now_ms = at_ns // NS_PER_MS
            due_ms = now_ms + self.ack_timeout_ms(message) if retried else 0
            state = DeliveryState.DELIVERED
            moved = self.move(message_id, recipients, state, due_ms, attempt, at_ns=at_ns)
            if retried:
                self.note_exactly_once(message, moved, now_ms)
            if self._obligations.tracks(message):
                self._obligations.add(message, moved, now_ms)
        return moved

    def note_exactly_once(self, message: Message, recipients: Iterable[str], now_ms: int) -> None:
        """Remember an exactly-once delivery for twice its ack timeout from now on."""
        asked = (message.metadata or {}).get("delivery")
        mode = self._state.channels[message.channel_id].config.delivery
        if asked == "exactly-once" or mode is DeliveryMode.EXACTLY_ONCE:
            expires_ms = now_ms + 2 * self.ack_timeout_ms(message)
            for recipient in recipients:
                key = (message.correlation_id or "", message.id, recipient)
                self._core.apply(events.DuplicateNoted(key, expires_ms))

    def move(
        self,
        message_id: int,
        recipients: Iterable[str],
        state: DeliveryState,
        due_ms: int = 0,
        attempt: int = 0,
        said: str = "",
        answer: tuple[str, str] = ("", ""),
        why: str = "",
        at_ns: int | None = None,
    ) -> tuple[str, ...]:
        """Move the deliveries of these recipients to a state; returns whose moved.

        ``said``: the status of an acknowledgment; ``answer``: its relay id and the first line of
        its text, kept for the record, also of a later acknowledgment; ``why``: the reason of an
        end, for the record; ``at_ns``: when, if not now.
        Repeating a call changes nothing, and no delivery moves back: an acknowledged one stays
        acknowledged. A delivery that was given up can still be acknowledged.
        """
        known = self._state.deliveries.get(message_id, {})
        moved = tuple(
            [
                recipient
                for recipient in dict.fromkeys(recipients)
                if (delivery := known.get(recipient)) is not None
                and (_may_move(delivery, state, attempt) or (said and delivery.state is state))
            ]
        )
        if moved:
            at_ns = self._core.now_ns() if at_ns is None else at_ns
            at = at_ns // NS_PER_S
            self._core.apply(
                events.DeliveriesMoved(
                    message_id, moved, state, at, due_ms, attempt, said, *answer, why
                ),
                at_ns,
            )
        return moved

    def record_answer(
        self,
        message: Message,
        recipient: str,
        said: str,
        *,
        ends: bool,
        answer: tuple[str, str] = ("", ""),
        at_ns: int | None = None,
    ) -> None:
        """Record a recipient's answer to a message; ``ends``: the obligation ends.

        ``said``: received, in_progress, completed, failed; ``answer``, ``at_ns``: see ``move``.
        If a given-up obligation is answered with ``received`` or ``in_progress``, it is open
        again, unless the recipient had answered before.
        """
        delivery = self._state.deliveries.get(message.id, {}).get(recipient)
        was_silent = (
            delivery is not None
            and delivery.state is not DeliveryState.ACKNOWLEDGED
            and self._obligations.tracks(message)
            and recipient != message.sender
        )
        state = DeliveryState.ACKNOWLEDGED
        self.move(message.id, [recipient], state, said=said, answer=answer, at_ns=at_ns)
        if ends and self._obligations.tracks(message):
            self._obligations.end(message.id, [recipient], said, at_ns)
        elif not ends and (recipient in self._state.owed.get(message.id, {}) or was_silent):
            self._obligations.restart(message, recipient, said, at_ns)

    def stage(self, deliveries: Iterable[tuple[int, str, int]], at_ns: int | None = None) -> None:
        """Record as one event which deliveries the owner staged: (message id, recipient, attempt).

        ``at_ns``: when (Unix nanoseconds), if not now.
        From its commit on they count as made, unless ``postpone`` is called. Deliveries
        settled or archived meanwhile are unchanged.
        """
        messages, known = self._state.messages, self._state.deliveries
        ready = [
            (number, recipient, attempt)
            for number, recipient, attempt in deliveries
            if number in messages
            and (delivery := known.get(number, NO_DELIVERIES).get(recipient)) is not None
            and delivery.state < DeliveryState.ACKNOWLEDGED
        ]
        if ready:
            at = self._core.now_s() if at_ns is None else at_ns // NS_PER_S
            self._core.apply(events.DeliveriesStaged(tuple(ready), at), at_ns)

    def is_held(self, message_id: int) -> bool:
        """True while an accepted message is held by its channel's ``max_pending``."""
        return check_number("message_id", message_id) in self._state.pending.held

    def resumable(self) -> list[int]:
        """Held messages that may be delivered now: by channel, by priority if it uses them, FIFO.

        The owner calls ``deliver`` for each; one that was not delivered is returned again.
        Messages of a paused channel stay held.
        """
        found: list[int] = []
        pending = self._state.pending
        for channel_id in pending.waiting.channels():
            channel = self._state.channels[channel_id]
            if channel.state is ChannelState.PAUSED:
                continue
            settings = self._state.settings.get(channel_id)
            most = settings.max_pending if settings else None
            room = None if most is None else max(0, most - len(pending.pending[channel_id]))
            room = None if room is None or room > _ALL else room
            held = pending.waiting.in_order(channel_id, channel.config.priority_ordering)
            found += islice(held, room)
        return found

    def is_answered(self, message_id: int, recipient: str) -> bool:
        """True once ``recipient`` has acknowledged the message, or answered it."""
        deliveries = self._state.deliveries.get(check_number("message_id", message_id), {})
        delivery = deliveries.get(check_text("recipient", recipient))
        return delivery is not None and delivery.state is DeliveryState.ACKNOWLEDGED

    def receive(
        self, message_id: int, participant: str, how: str = "", at_ns: int | None = None
    ) -> None:
        """Record that ``participant`` received a message; an acknowledged one is unchanged.

        ``how``: the evidence of an owner that delivers, for the record; ``at_ns``: when, if not
        now.
        """
        at_ns = self._core.now_ns() if at_ns is None else at_ns
        at = at_ns // NS_PER_S
        deliveries = self._state.deliveries.get(check_number("message_id", message_id), {})
        delivery = deliveries.get(check_text("participant", participant))
        if delivery is not None and delivery.queued:
            self._core.apply(events.MessageReceived(message_id, participant, at, how), at_ns)
            if delivery.state is DeliveryState.SENT:
                self._resume(message_id, participant, at_ns)
        elif delivery is not None and how and delivery.state >= DeliveryState.ACKNOWLEDGED:
            state = delivery.state
            self._core.apply(events.LateRead(message_id, participant, state, how, at), at_ns)

    def _resume(self, message_id: int, recipient: str, at_ns: int) -> None:
        """Wait for the answer of who read a file while its further attempt was held."""
        message = self._state.messages.get(message_id)
        if message is None:
            return
        now_ms = at_ns // NS_PER_MS
        if rules.ack_pending(self._state.channels[message.channel_id], message):
            read = self._state.deliveries[message_id][recipient]
            due_ms = now_ms + self.ack_timeout_ms(message)
            self.set_timer(message_id, recipient, msgspec.structs.replace(read, due_ms=due_ms))
        if self._obligations.tracks(message):
            self._obligations.add(message, [recipient], now_ms)

    def schedule_retry(self, message_id: int, recipient: str, until_ms: int) -> None:
        """Wait until ``until_ms`` (Unix ms) before the next attempt."""
        delivery = self._state.deliveries[message_id][recipient]
        waiting = msgspec.structs.replace(delivery, state=DeliveryState.WAITING, due_ms=until_ms)
        self.set_timer(message_id, recipient, waiting)

    def postpone(
        self, message_id: int, recipient: str, attempt: int, at_ns: int | None = None
    ) -> bool:
        """Leave this attempt to the owner, at any later time: no timer runs.

        ``at_ns``: when it was postponed, if not now.
        Returns False for a delivery that was settled meanwhile, is archived or is unknown, which
        stays unchanged.
        """
        delivery = self._state.deliveries.get(message_id, {}).get(recipient)
        if delivery is None or delivery.state >= DeliveryState.ACKNOWLEDGED:
            return False
        if message_id not in self._state.messages:
            return False
        if delivery.state is DeliveryState.SENT and delivery.attempt == attempt:
            return True  # it waits already
        sent = msgspec.structs.replace(
            delivery, state=DeliveryState.SENT, attempt=attempt, due_ms=0
        )
        self.set_timer(message_id, recipient, sent, at_ns)
        self._obligations.pause(message_id, recipient)
        return True

    def set_timer(
        self, message_id: int, recipient: str, delivery: Delivery, at_ns: int | None = None
    ) -> None:
        """Set a delivery, and the time when it is due; ``at_ns``: when it was set, if not now."""
        at = self._core.now_s() if at_ns is None else at_ns // NS_PER_S
        self._core.apply(events.DeliveryTimed(message_id, recipient, delivery, at), at_ns)

    def add_downtime(self, by_ms: int) -> None:
        """Postpone every deadline by a time in which no relay ran, or a clock change."""
        self._core.apply(events.TimeLost(by_ms, self._core.now_s()))

    def downtime_ns(self, since_ns: int) -> int:
        """Nanoseconds without a running relay since ``since_ns``."""
        since = since_ns // NS_PER_S
        return (
            sum(downtime.ms for downtime in self._state.downtimes if downtime.at > since)
            * NS_PER_MS
        )

    def running_ns(self, since_ns: int) -> int:
        """Nanoseconds with a running relay since ``since_ns``, in which the machine did not sleep.

        A clock that was set since does not count either.
        """
        return self._core.now_ns() - since_ns - self.downtime_ns(since_ns)

    def ack_timeout_ms(self, message: Message) -> int:
        """The acknowledgment timeout: the message's, else its channel's, else the default."""
        channel = self._state.channels[message.channel_id]
        asked_ms = rules.requested_timeout_ms(channel, message)
        default_ms = self._core.rules.ack_timeout_s * 1000
        return min(default_ms, rules.MAX_WAIT_MS) if asked_ms is None else asked_ms


def _may_move(before: Delivery, after: DeliveryState, attempt: int) -> bool:
    if before.state > DeliveryState.ACKNOWLEDGED:  # given up
        return after is DeliveryState.ACKNOWLEDGED
    if before.state is DeliveryState.ACKNOWLEDGED:
        return False
    # a further attempt goes through the same states again
    again = attempt > before.attempt and before.state < DeliveryState.ACKNOWLEDGED
    return again or before.state < after
