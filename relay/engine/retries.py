"""Retries, dead letters and the exactly-once set.

Separately for each recipient, by this schedule (base 1 s, 3 retries):

    delivered -- ack_timeout --> waits 1 s --> again -- ack_timeout --> waits 2 s --> again
              -- ack_timeout --> waits 4 s --> again -- ack_timeout --> dead

The guide's numbered steps give one retry less than its table; the table, which agrees with
``max_retries``, is implemented. Only at-least-once delivery has timers and retries.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

import msgspec

from relay.acomm.model import (
    ChannelState,
    DeadLetter,
    Delivery,
    DeliveryState,
    Message,
    read_only_copy,
)
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import MessageNotFound, ValidationFailed
from relay.base.text import plural
from relay.engine import events, rules
from relay.engine.deliveries import SYSTEM, Deliveries, Obligations
from relay.engine.rules import MAX_WAIT_MS, check_number
from relay.engine.state import Core
from relay.engine.tables import Timer

DEAD_LETTER_TOPIC = f"{SYSTEM}.message.deadletter"
NO_ACK = "no acknowledgment within {timeout_s} s, {attempts}"
TOO_OLD = "no acknowledgment for {age_s} s, {attempts}"
TTL_OVER = "its TTL of {ttl} s passed without an acknowledgment"
BATCH = 256  # deliveries that ``due`` hands out at once
FORGET_PER_MS = 16  # entries of the exactly-once set scanned: 1 ms of pause for so many


class OverdueDelivery(NamedTuple):
    """A delivery that needs action now."""

    number: int  # of its message
    relay_id: str  # of its message; empty: none
    recipient: str
    attempt: int  # the one that is due, or the last that was made
    state: DeliveryState = DeliveryState.WAITING  # its next attempt is due; any other: its end
    reason: str = ""  # why it ended


class Retries:
    """Overdue deliveries and dead letters. Part of an engine.

    Its owner calls ``due``, acts on the result, and reports it by ``Deliveries.deliver``, ``move``,
    or by ``dead_letter``.
    """

    def __init__(self, core: Core, deliveries: Deliveries, obligations: Obligations) -> None:
        self._core = core
        self._state = core.state
        self._deliveries = deliveries
        self._obligations = obligations
        self._next_forget_ms = 0  # earliest time of the next scan of the exactly-once set

    def next_due_ms(self) -> int | None:
        """Time of the next ``due`` with a result (Unix ms)."""
        return self._state.timers.next_ms()

    def due(self, now_ns: int | None = None, limit: int = BATCH) -> list[OverdueDelivery]:
        """The overdue deliveries among the next ``limit`` that need action by the caller.

        This call itself starts the wait before the next attempt, and counts attempts that
        exactly-once suppresses. The same deliveries are returned until they are handled. There
        may be more: see ``next_due_ms``.
        """
        now_ms = (self._core.now_ns() if now_ns is None else now_ns) // NS_PER_MS
        self._forget_duplicates(now_ms)
        found: dict[Timer, OverdueDelivery] = {}  # a timer may be in the heap twice
        for _ in range(limit):
            timer = self._state.timers.pop_due(now_ms)
            if timer is None:
                break
            overdue = self._decide(timer[1], timer[2], now_ms)
            if overdue is not None:
                found[timer] = overdue
        self._state.timers.restore(found)
        return list(found.values())

    def dead_letter(self, message_id: int, recipients: Iterable[str], reason: str) -> bool:
        """Give up these deliveries; when all of a message's are, it is a dead letter.

        Returns False if none is given up: they were settled, or the message is archived.
        """
        known = self._state.deliveries.get(message_id, {})
        dead = tuple(
            name
            for name in dict.fromkeys(recipients)
            if name in known
            and known[name].state not in (DeliveryState.ACKNOWLEDGED, DeliveryState.DEAD)
        )
        if not dead or message_id not in self._state.messages:
            return False
        self._core.apply(events.DeadLettered(message_id, dead, reason, self._core.now_s()))
        return True

    def dead_letters(self) -> list[DeadLetter]:
        """Every message given up for at least one recipient, oldest first."""
        return [self._find_dead_letter(message_id) for message_id in sorted(self._state.dead)]

    def replay(self, message_id: int) -> Message:
        """Deliver a dead letter again, only to the recipients it was given up for.

        It gets the full number of attempts, and bypasses the exactly-once set. In a paused channel
        it waits until the channel is resumed.
        Errors: MessageNotFound; ChannelUnavailable when the channel is draining or closed.
        """
        letter = self._find_dead_letter(message_id)
        channel = self._state.channels[letter.message.channel_id]
        if channel.state not in (ChannelState.ACTIVE, ChannelState.PAUSED):
            raise rules.unavailable(channel)
        self._core.apply(events.DeadLetterReplayed(message_id, self._core.now_s()))
        return read_only_copy(self._state.messages[message_id])

    def discard(self, message_id: int) -> None:
        """Delete a dead letter; its number is not used again. Errors: MessageNotFound."""
        relay_id = self._find_dead_letter(message_id).message.relay_id or ""
        self._core.apply(events.DeadLetterDiscarded(message_id, self._core.now_s(), relay_id))

    def purge(self, older_than_s: float) -> list[Message]:
        """Discard dead letters older than ``older_than_s``; returns their messages.

        Errors: ValidationFailed for a negative age.
        """
        is_number = isinstance(older_than_s, int | float) and not isinstance(older_than_s, bool)
        if not is_number or not 0 <= older_than_s < inf:  # a negative age would be every one
            raise ValidationFailed("older_than_s", f"expected 0 s or more, got {older_than_s!r}")
        limit = self._core.now_ns() / NS_PER_S - older_than_s
        old = [letter.message for letter in self.dead_letters() if letter.dead_lettered_at < limit]
        for message in old:
            self.discard(message.id)
        return old

    def _find_dead_letter(self, message_id: int) -> DeadLetter:
        note = self._state.dead.get(check_number("message_id", message_id))
        message = self._state.dead_letters.get(message_id) or self._state.messages.get(message_id)
        if note is None or message is None:
            raise MessageNotFound(f"dead letter {message_id} does not exist")
        return DeadLetter(read_only_copy(message), note.recipients, note.last_error, note.at)

    def _forget_duplicates(self, now_ms: int) -> None:
        """Drop expired entries; the larger the set, the rarer the scan."""
        first_ms = self._state.next_forget_ms
        if first_ms is None or max(first_ms, self._next_forget_ms) > now_ms:
            return
        first_ms = self._state.find_next_forget_ms()  # that entry may have gone with its message
        if first_ms is not None and first_ms <= now_ms:
            self._core.apply(events.DuplicatesForgotten(now_ms))
            self._next_forget_ms = now_ms + len(self._state.duplicates) // FORGET_PER_MS

    def _decide(self, message_id: int, recipient: str, now_ms: int) -> OverdueDelivery | None:
        """The decision on a delivery whose timer has expired; None if nothing is left to do."""
        message = self._state.messages[message_id]
        delivery = self._state.deliveries[message_id][recipient]
        attempt = delivery.attempt
        channel = self._state.channels[message.channel_id]
        is_waiting = delivery.state is DeliveryState.WAITING
        fields = (channel, message.message_type, message.metadata)
        if not is_waiting and not rules.is_retried(*fields):
            # from an earlier store, or its channel's delivery mode was lowered since
            self._deliveries.set_timer(
                message_id, recipient, msgspec.structs.replace(delivery, due_ms=0)
            )
            if self._obligations.tracks(message):
                self._obligations.add(message, [recipient], now_ms)
            return None
        overdue = OverdueDelivery(message_id, message.relay_id or "", recipient, attempt)
        if message.is_expired(now_ms * NS_PER_MS):
            reason = TTL_OVER.format(ttl=message.ttl)
            return overdue._replace(state=DeliveryState.EXPIRED, reason=reason)
        if is_waiting:
            if self._is_duplicate(message, recipient, now_ms):
                self._count_attempt(message, recipient, delivery, now_ms)
                return None
            return overdue._replace(attempt=attempt + 1)
        reason = self._dead_letter_reason(message, delivery)
        if reason:
            return overdue._replace(state=DeliveryState.DEAD, reason=reason)
        pause_ms = self._pause_ms(message, attempt - delivery.spent)
        if self._is_duplicate(message, recipient, now_ms):
            # it must outlive the attempt it suppresses, and the wait before the next one
            self._deliveries.note_exactly_once(message, [recipient], now_ms + pause_ms)
        self._deliveries.schedule_retry(message_id, recipient, now_ms + pause_ms)
        return None

    def _pause_ms(self, message: Message, attempts: int) -> int:
        """The backoff after so many attempts; it doubles each time."""
        doubled = min(max(attempts - 1, 0), MAX_WAIT_MS.bit_length())
        return min(
            self._state.channels[message.channel_id].config.retry_backoff_ms << doubled, MAX_WAIT_MS
        )

    def _dead_letter_reason(self, message: Message, delivery: Delivery) -> str:
        """Why no further attempt is made; empty if one is.

        The age is that of the first attempt, by the schedule: time in which the message waited for
        its channel, its NOT-BEFORE or a disk, and in which no relay ran, is not counted.
        """
        attempts = delivery.attempt - delivery.spent
        since = " since its replay" if delivery.spent else ""
        counted = plural(attempts, "attempt") + since
        timeout_ms = self._deliveries.ack_timeout_ms(message)
        if attempts > self._state.channels[message.channel_id].config.max_retries:
            return NO_ACK.format(timeout_s=f"{timeout_ms / 1000:g}", attempts=counted)
        paused = range(1, min(attempts, MAX_WAIT_MS.bit_length()))  # later ones would be years
        pauses_ms = sum(self._pause_ms(message, made) for made in paused)
        age_s = (attempts * timeout_ms + pauses_ms) // 1000
        if attempts > 1 and age_s >= self._core.rules.dead_letter_after_s:
            return TOO_OLD.format(age_s=age_s, attempts=counted)
        return ""

    def _count_attempt(
        self, message: Message, recipient: str, before: Delivery, now_ms: int
    ) -> None:
        """Count an attempt suppressed by exactly-once, without delivering."""
        state = DeliveryState.DELIVERED if before.queued else DeliveryState.RECEIVED
        after = msgspec.structs.replace(
            before,
            state=state,
            attempt=before.attempt + 1,
            due_ms=now_ms + self._deliveries.ack_timeout_ms(message),
        )
        self._deliveries.set_timer(message.id, recipient, after)

    def _is_duplicate(self, message: Message, recipient: str, now_ms: int) -> bool:
        key = (message.correlation_id or "", message.id, recipient)
        return self._state.duplicates.get(key, 0) > now_ms


def dead_letter_text(message: Message, recipients: Iterable[str], reason: str) -> str:
    """The text of a dead letter's notification."""
    return f"message {message.id} to {', '.join(recipients)} is dead: {reason}"
