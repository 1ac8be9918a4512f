"""Which messages leave the live ones for the archive: by policy, by command, under pressure.

Never one with an open delivery or an answer that is owed, nor one that is a dead letter for
somebody. An archived message stays in the store's file and can be asked for; ``compact`` drops it.
Source: data-structures.txt "RetentionPolicy"; acomm-file-format.txt, section 6; message-engine.txt,
"Backpressure".
"""

from __future__ import annotations

from typing import NamedTuple

from relay.acomm.model import Channel, Message, RetentionKind
from relay.base.errors import MessageNotFound, ValidationFailed
from relay.engine import ack_rules, events
from relay.engine.receiving import ReceiveCommands
from relay.engine.validation import check_number

# Looking at open messages again and again would cost each send all of them: after a look that
# met n of them in vain, the next n / PATIENCE calls do not look.
PATIENCE = 16


class Compacted(NamedTuple):
    """What ``compact`` dropped, and what that freed."""

    archived: int
    dead_letters: int
    content_bytes: int  # of the messages that were dropped
    file_bytes: int  # by which the file shrank; 0 for a store that writes none


class RetentionCommands(ReceiveCommands):
    """The CommStore's commands on what is kept, and where."""

    def archive(self, message_id: int | None = None, *, before: int | None = None) -> int:
        """Archive one message, or all sent before a time (Unix seconds); how many there were.

        By time, those with an open delivery stay. Errors: MessageNotFound; ValidationFailed for
        one message that has such a delivery, or when not exactly one of the two is given.
        """
        if (message_id is None) == (before is None):
            raise ValidationFailed("archive", "give a message's id, or before=, and not both")
        if message_id is None:
            check_number("before", before)
            messages = self.state.messages.values()
            old = [m.id for m in messages if m.created_at < (before or 0) and self.is_final(m)]
            return self._archive(old)
        message = self.state.messages.get(check_number("message_id", message_id))
        if message is None:
            raise MessageNotFound(f"there is no live message {message_id}")
        if not self.is_final(message):
            raise ValidationFailed(
                "message_id", f"message {message_id} has a delivery that is open, or was given up"
            )
        return self._archive([message_id])

    def evict(self) -> int:
        """Archive every message that has no open delivery; how many there were."""
        return self._archive([m.id for m in self.state.messages.values() if self.is_final(m)])

    def retain(self) -> int:
        """Archive what is past the retention of its channel; how many there were."""
        state = self.state
        return sum(self._retain(state.channels[number], 0) for number in sorted(state.retained))

    def _retain(self, channel: Channel, more: int, more_bytes: int = 0) -> int:
        """Archive what a channel keeps too long, with room for ``more`` messages to come."""
        patience = self._patience.get(channel.id, 0)
        if patience > 0:
            self._patience[channel.id] = patience - 1
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
        self._patience[channel.id] = in_vain // PATIENCE
        return self._archive(past)

    def _archive(self, message_ids: list[int]) -> int:
        if message_ids:
            self.apply(events.MessagesArchived(tuple(message_ids), self._now_s()))
        return len(message_ids)

    def is_final(self, message: Message) -> bool:
        """True when nobody waits for the message any more."""
        deliveries = self.state.deliveries.get(message.id, {}).values()
        channel = self.state.channels[message.channel_id]
        if message.id in self.state.dead or message.id in self.state.owed:
            return False
        return not ack_rules.is_open(channel, message, deliveries, not self.delivers_itself)
