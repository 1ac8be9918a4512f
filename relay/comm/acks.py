"""What falls due: overdue acknowledgments, retries, dead letters, the exactly-once set.

For each recipient of its own, by the schedule of the guide (base 1 s, 3 retries):

    delivered -- ack_timeout --> waits 1 s --> again -- ack_timeout --> waits 2 s --> again
              -- ack_timeout --> waits 4 s --> again -- ack_timeout --> dead

The guide's numbered steps give one retry less than its table; the table and ``max_retries``
agree, and hold. Source: message-engine.txt, "Acknowledgment Flow" to "ExactlyOnce Deduplication".
"""

from __future__ import annotations

import contextlib
from heapq import heappop
from typing import NamedTuple

from relay.clock import NS_PER_MS, NS_PER_S
from relay.comm import events
from relay.comm.channels import ChannelCommands
from relay.comm.model import (
    ChannelType,
    DeadLetter,
    Delivery,
    DeliveryState,
    Message,
    MessageType,
)
from relay.comm.sending import SendCommands
from relay.errors import CommError, MessageNotFound

SYSTEM = "_system"
DEAD_LETTER_TOPIC = "_system.message.deadletter"
NO_ACK = "no acknowledgment within {timeout_s} s, {attempts} attempts"


class Redelivery(NamedTuple):
    """A message that stands in its recipient's queue once more."""

    message: Message
    recipient: str
    attempt: int


class DueCommands(ChannelCommands, SendCommands):
    """The CommStore's commands around what is overdue."""

    def next_due_ms(self) -> int | None:
        """When ``tick`` has something to do next (Unix ms)."""
        timers = self.state.timers
        while timers and not self._is_current(*timers[0]):
            heappop(timers)
        return timers[0][0] if timers else None

    def tick(self, now_ns: int | None = None) -> list[Redelivery]:
        """Do what is due at ``now_ns`` (default: the clock's); what was delivered again.

        A delivery whose ack is overdue waits, is attempted again, or is given up: then its
        message is a dead letter, the sender is told, and so is who subscribed to
        ``_system.message.deadletter``.
        """
        now_ms = self._now_ms() if now_ns is None else now_ns // NS_PER_MS
        again: list[Redelivery] = []
        dead: dict[int, dict[str, None]] = {}  # a timer may stand in the heap twice
        while (due_ms := self.next_due_ms()) is not None and due_ms <= now_ms:
            _, message_id, recipient = heappop(self.state.timers)
            message = self.state.messages[message_id]
            delivery = self.state.deliveries[message_id][recipient]
            if self._is_over(message, now_ms):
                self.move_deliveries(message_id, [recipient], DeliveryState.EXPIRED)
            elif delivery.state is DeliveryState.WAITING:
                again += self._attempt(message, recipient, delivery, now_ms)
            elif delivery.attempt > self._config(message).max_retries:
                dead.setdefault(message_id, {})[recipient] = None
            else:
                pause_ms = self._config(message).retry_backoff_ms << (delivery.attempt - 1)
                self._time(
                    message_id,
                    recipient,
                    Delivery(
                        DeliveryState.WAITING,
                        delivery.attempt,
                        now_ms + pause_ms,
                        delivery.queued,
                    ),
                )
        for message_id, recipients in dead.items():
            self._give_up(self.state.messages[message_id], list(recipients))
        if any(expires <= now_ms for expires in self.state.duplicates.values()):
            self.apply(events.DuplicatesForgotten(now_ms))
        return again

    def dead_letters(self) -> list[DeadLetter]:
        """Every message that was given up for somebody, oldest first."""
        return [self._dead_letter(message_id) for message_id in sorted(self.state.dead)]

    def replay_dead_letter(self, message_id: int) -> Message:
        """Send a dead letter again, to those alone for whom it was given up.

        Its attempts begin anew, and the exactly-once set does not stop it.
        Errors: MessageNotFound.
        """
        letter = self._dead_letter(message_id)
        self.apply(events.DeadLetterReplayed(message_id, self._now_s()))
        self.deliver(message_id, letter.recipients)
        return self.state.messages[message_id]

    def discard_dead_letter(self, message_id: int) -> None:
        """Let a dead letter go for good; its number is not used again. Errors: MessageNotFound."""
        self._dead_letter(message_id)
        self.apply(events.DeadLetterDiscarded(message_id, self._now_s()))

    def purge_dead_letters(self, older_than_s: float) -> int:
        """Discard the dead letters that are older; how many there were."""
        limit = self._now_ns() / NS_PER_S - older_than_s
        old = [message_id for message_id, note in self.state.dead.items() if note.at < limit]
        for message_id in old:
            self.discard_dead_letter(message_id)
        return len(old)

    def _dead_letter(self, message_id: int) -> DeadLetter:
        note = self.state.dead.get(message_id)
        message = self.state.dead_letters.get(message_id) or self.state.messages.get(message_id)
        if note is None or message is None:
            raise MessageNotFound(f"there is no dead letter {message_id}")
        return DeadLetter(message, note.recipients, note.last_error, note.at)

    def _is_current(self, due_ms: int, message_id: int, recipient: str) -> bool:
        """False for a timer whose delivery has moved on since."""
        delivery = self.state.deliveries.get(message_id, {}).get(recipient)
        return (
            delivery is not None and delivery.due_ms == due_ms and message_id in self.state.messages
        )

    def _is_over(self, message: Message, now_ms: int) -> bool:
        return message.ttl is not None and now_ms >= (message.created_at + message.ttl) * 1000

    def _attempt(
        self, message: Message, recipient: str, before: Delivery, now_ms: int
    ) -> list[Redelivery]:
        """The next attempt; one that exactly-once forbids counts, and delivers nothing."""
        due_ms = self._ack_due_ms(message) - self._now_ms() + now_ms
        attempt = before.attempt + 1
        if self._happened(message, recipient, now_ms):
            state = DeliveryState.DELIVERED if before.queued else DeliveryState.RECEIVED
            self._time(message.id, recipient, Delivery(state, attempt, due_ms, before.queued))
            return []
        self._time(message.id, recipient, Delivery(DeliveryState.DELIVERED, attempt, due_ms, True))
        self._note_exactly_once(message, [recipient])
        return [Redelivery(self.state.messages[message.id], recipient, attempt)]

    def _happened(self, message: Message, recipient: str, now_ms: int) -> bool:
        key = (message.correlation_id or "", message.id, recipient)
        return self.state.duplicates.get(key, 0) > now_ms

    def _time(self, message_id: int, recipient: str, delivery: Delivery) -> None:
        self.apply(events.DeliveryTimed(message_id, recipient, delivery, self._now_s()))

    def _give_up(self, message: Message, recipients: list[str]) -> None:
        config = self._config(message)
        reason = NO_ACK.format(
            timeout_s=f"{self._ack_timeout_ms(message) / 1000:g}", attempts=config.max_retries + 1
        )
        self.apply(events.DeadLettered(message.id, tuple(recipients), reason, self._now_s()))
        self._tell(message, f"message {message.id} to {', '.join(recipients)} is dead: {reason}")

    def _tell(self, message: Message, text: str) -> None:
        """Publish on the system's topic; the sender hears it whether it subscribed or not.

        Where that channel takes nothing the notice is not sent: the rest that is due goes on.
        """
        channel = self.get_channel_by_name(SYSTEM)
        if channel is None:
            channel = self.create_channel(SYSTEM, ChannelType.PUB_SUB, SYSTEM)
        with contextlib.suppress(CommError):
            notice = self.accept(
                channel.id,
                SYSTEM,
                MessageType.NOTIFICATION,
                text,
                topic=DEAD_LETTER_TOPIC,
                also=[message.sender],
            )
            self.deliver(notice.id, self.recipients(notice.id))
