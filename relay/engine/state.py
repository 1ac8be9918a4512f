"""The state of a store, and the one way to change it: ``State.apply(event)``.

Applying the same events to the same start gives the same state; nothing here asks the clock or
decides. Owned by the CommStore. Source: data-structures.txt, "CommStore".
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from relay.acomm.engine_state import DeadLetterInfo, Downtime
from relay.acomm.model import (
    ChannelState,
    Delivery,
    DeliveryState,
    MessageStatus,
    Obligation,
    with_status,
)
from relay.engine import ack_rules, events
from relay.engine.tables import Tables, record_bytes

# What a delivery's state means for its message, once every delivery is at least there.
_STATUS_OF = {
    DeliveryState.DELIVERED: MessageStatus.DELIVERED,
    DeliveryState.RECEIVED: MessageStatus.DELIVERED,
    DeliveryState.ACKNOWLEDGED: MessageStatus.ACKNOWLEDGED,
    DeliveryState.BOUNCED: MessageStatus.FAILED,
    DeliveryState.EXPIRED: MessageStatus.FAILED,
}
_HOPELESS = frozenset({DeliveryState.BOUNCED, DeliveryState.EXPIRED, DeliveryState.DEAD})
_SENT = Delivery()
_NO_OBLIGATION = Obligation()
MAX_DOWNTIMES = (
    64  # times in which nobody ran that are kept: what is open is younger than the oldest
)


class State(Tables):
    """The tables of a store; changed by ``apply`` alone."""

    def apply(self, event: events.Event) -> None:
        """Change the state as the event says. The only code that does."""
        _APPLY[type(event)](self, event)
        self.sequence += 1

    def _channel_created(self, event: events.ChannelCreated) -> None:
        self._add_channel(event.channel)
        self.next_channel = max(self.next_channel, event.channel.id + 1)
        self.modified_at = event.channel.created_at

    def _channel_changed(self, event: events.ChannelChanged) -> None:
        channel = self.channels[event.channel_id]
        self.channels[event.channel_id] = msgspec.structs.replace(
            channel,
            state=event.state,
            config=event.config,
            description=event.description,
            tags=event.tags,
            modified_at=event.at,
        )
        self._note_retention(event.channel_id)
        self._set_settings(event.channel_id, event.settings)
        if channel.state is ChannelState.PAUSED and event.state is not ChannelState.PAUSED:
            self._let_replays_go(event.channel_id, event.at)
        self.modified_at = event.at

    def _let_replays_go(self, channel_id: int, at: int) -> None:
        """Make replays that a paused channel held due now."""
        for message_id in self.index.channel(channel_id):
            known = self.deliveries.get(message_id, {})
            held = {
                recipient: msgspec.structs.replace(one, due_ms=at * 1000)
                for recipient, one in known.items()
                if ack_rules.is_replayed(one) and not one.due_ms
            }
            if held:
                self._set_deliveries(message_id, known, held)

    def _participant_joined(self, event: events.ParticipantJoined) -> None:
        channel = self.channels[event.channel_id]
        self.channels[event.channel_id] = msgspec.structs.replace(
            channel,
            participants=(*channel.participants, event.participant),
            modified_at=event.at,
        )
        self.members[event.channel_id][event.participant.id] = None
        self.modified_at = event.at

    def _participant_left(self, event: events.ParticipantLeft) -> None:
        channel = self.channels[event.channel_id]
        self.channels[event.channel_id] = msgspec.structs.replace(
            channel,
            participants=tuple(p for p in channel.participants if p.id != event.participant),
            modified_at=event.at,
        )
        self.members[event.channel_id].pop(event.participant, None)
        for subscription in list(self.subscriptions.values()):
            if (subscription.channel_id, subscription.subscriber) == (
                event.channel_id,
                event.participant,
            ):
                self._drop_subscription(subscription.id)
        self.modified_at = event.at

    def _participant_identified(self, event: events.ParticipantIdentified) -> None:
        for channel_id, members in self.members.items():
            if event.participant not in members:
                continue
            channel = self.channels[channel_id]
            participants = tuple(
                msgspec.structs.replace(one, identity_id=event.identity_id)
                if one.id == event.participant
                else one
                for one in channel.participants
            )
            if participants != channel.participants:
                self.channels[channel_id] = msgspec.structs.replace(
                    channel, participants=participants, modified_at=event.at
                )
        self.modified_at = event.at

    def _subscription_added(self, event: events.SubscriptionAdded) -> None:
        subscription = event.subscription
        self._add_subscription(subscription)
        self.next_subscription = max(self.next_subscription, subscription.id + 1)
        self.modified_at = subscription.created_at

    def _subscription_changed(self, event: events.SubscriptionChanged) -> None:
        if event.subscription.id in self.subscriptions:  # its pattern is what it was
            self.subscriptions[event.subscription.id] = event.subscription
        self.modified_at = event.at

    def _subscription_removed(self, event: events.SubscriptionRemoved) -> None:
        self._drop_subscription(event.subscription_id)
        self.modified_at = event.at

    def _message_sent(self, event: events.MessageSent) -> None:
        message = event.message
        self.counts[message.channel_id] += 1  # first: without its channel it has no effect at all
        self._add_message(message)
        self.messages_sent += 1
        self.next_message = max(self.next_message, message.id + 1)
        size = record_bytes(message)
        self.bytes_sent += size
        self.record_bytes += size
        self.deliveries[message.id] = dict.fromkeys(event.recipients, _SENT)
        if event.held:
            self.pending.hold(message)
        elif self.pending.pending:
            self._note_pending(message)
        self.modified_at = message.created_at

    def _deliveries_added(self, event: events.DeliveriesAdded) -> None:
        for message_id in event.message_ids:
            known = self.deliveries.get(message_id, {})
            self._set_deliveries(message_id, known, {event.recipient: _SENT})
        self.modified_at = event.at

    def _deliveries_moved(self, event: events.DeliveriesMoved) -> None:
        known = self.deliveries.get(event.message_id)
        if known is None:
            return
        queued = event.state is DeliveryState.DELIVERED
        moved = {
            recipient: Delivery(
                event.state, event.attempt or before.attempt, event.due_ms, queued, before.spent
            )
            for recipient in event.recipients
            for before in (known[recipient],)
        }
        self._set_deliveries(event.message_id, known, moved)
        if event.state is DeliveryState.ACKNOWLEDGED and event.message_id in self.dead:
            self._answered_after_all(event.message_id, event.recipients)
        if event.state in _HOPELESS and event.message_id in self.owed:
            self._set_owed(event.message_id, dict.fromkeys(event.recipients))
        self._set_status(event.message_id, event.at)
        if event.attempt:
            self._note_retries(event.message_id, moved[event.recipients[0]])
        if event.message_id in self.dead:
            self._note_end(event.message_id)

    def _deliveries_staged(self, event: events.DeliveriesStaged) -> None:
        for message_id, recipient, attempt in event.deliveries:
            known = self.deliveries.get(message_id, {})
            before = known.get(recipient)
            if before is None:
                continue  # it was discarded meanwhile
            staged = Delivery(DeliveryState.STAGED, attempt, 0, False, before.spent)
            self._set_deliveries(message_id, known, {recipient: staged})
            if message_id in self.messages:
                self._note_retries(message_id, staged)
        self.modified_at = event.at

    def _file_refused(self, event: events.FileRefused) -> None:
        """It is on record; the store has nothing of it."""

    def _late_read(self, event: events.LateRead) -> None:
        """It is on record; what the delivery came to stays."""

    def _message_received(self, event: events.MessageReceived) -> None:
        known = self.deliveries.get(event.message_id, {})
        before = known.get(event.participant, _SENT)
        waits = before.state is DeliveryState.WAITING  # for its next attempt, all the same
        after = msgspec.structs.replace(
            before, state=before.state if waits else DeliveryState.RECEIVED, queued=False
        )
        self._set_deliveries(event.message_id, known, {event.participant: after})
        self.modified_at = event.at

    def _delivery_timed(self, event: events.DeliveryTimed) -> None:
        known = self.deliveries[event.message_id]
        self._set_deliveries(event.message_id, known, {event.recipient: event.delivery})
        self._note_retries(event.message_id, event.delivery)
        self.modified_at = event.at

    def _dead_lettered(self, event: events.DeadLettered) -> None:
        known = self.deliveries[event.message_id]
        dead = {
            recipient: msgspec.structs.replace(
                known[recipient], state=DeliveryState.DEAD, due_ms=0, queued=False
            )
            for recipient in event.recipients
        }
        self._set_deliveries(event.message_id, known, dead)
        if event.message_id in self.owed:
            self._set_owed(event.message_id, dict.fromkeys(event.recipients))
        earlier = self.dead.get(event.message_id, DeadLetterInfo(event.at, "", ()))
        self.dead[event.message_id] = DeadLetterInfo(
            event.at, event.last_error, (*earlier.recipients, *event.recipients)
        )
        self.modified_at = event.at
        self._note_end(event.message_id)

    def _dead_letter_replayed(self, event: events.DeadLetterReplayed) -> None:
        note = self.dead.pop(event.message_id)
        self._return_to_life(event.message_id)
        message = self.messages[event.message_id]
        self.messages[message.id] = msgspec.structs.replace(
            message, status=MessageStatus.SENT, retry_count=0, acknowledged_at=None
        )
        known = self.deliveries.get(event.message_id, {})
        is_paused = self.channels[message.channel_id].state is ChannelState.PAUSED
        due_ms = 0 if is_paused else event.at * 1000  # 0: until the channel is resumed
        due = {}
        for recipient in note.recipients:
            tried = known.get(recipient, _SENT).attempt
            due[recipient] = Delivery(DeliveryState.WAITING, tried, due_ms, False, tried)
        self._set_deliveries(event.message_id, known, due)
        for recipient in note.recipients:  # a replay is meant to be delivered again
            self.duplicates.pop((message.correlation_id or "", message.id, recipient), None)
        self.modified_at = event.at

    def _dead_letter_discarded(self, event: events.DeadLetterDiscarded) -> None:
        del self.dead[event.message_id]
        gone = self.dead_letters.pop(event.message_id, None)
        if gone is not None:
            self.dead_index.remove([gone])
            self._forget(gone)
        self.modified_at = event.at

    def _messages_archived(self, event: events.MessagesArchived) -> None:
        for message in self._drop_live(event.message_ids):
            self._add_archived(msgspec.structs.replace(message, status=MessageStatus.ARCHIVED))
        self.modified_at = event.at

    def _archive_dropped(self, event: events.ArchiveDropped) -> None:
        gone = [self.archive.pop(message_id) for message_id in event.message_ids]
        self.archive_index.remove(gone)
        for message in gone:
            self._forget(message)
        self.modified_at = event.at

    def _rolled(self, event: events.Rolled) -> None:
        self.archives += (event.note,)
        self.evicting = event.message_ids
        self.modified_at = event.at

    def _taken_out(self, event: events.MessagesEvicted) -> None:
        out, self.evicting = self.evicting[: event.count], self.evicting[event.count :]
        gone = self._drop_live([number for number in out if number in self.messages])
        archived = [self.archive.pop(number) for number in out if number in self.archive]
        self.archive_index.remove(archived)
        for message in (*gone, *archived):
            self._forget(message)
        self.modified_at = event.at

    def _owed(self, event: events.Owed) -> None:
        if event.message_id not in self.messages:
            return  # dead for all, or rolled out: too late to wait for it
        known = self.owed.get(event.message_id, {})
        moved: dict[str, Obligation | None] = {
            recipient: Obligation(
                event.due_ms,
                known.get(recipient, _NO_OBLIGATION).reminders,
                event.said,
                event.at,
            )
            for recipient in event.recipients
        }
        self._set_owed(event.message_id, moved)
        self.modified_at = event.at

    def _reminded(self, event: events.Reminded) -> None:
        before = self.owed[event.message_id][event.recipient]
        after = msgspec.structs.replace(before, due_ms=event.due_ms, reminders=event.reminders)
        self._set_owed(event.message_id, {event.recipient: after})
        self.modified_at = event.at

    def _owed_no_more(self, event: events.OwedNoMore) -> None:
        self._set_owed(event.message_id, dict.fromkeys(event.recipients))
        self.modified_at = event.at

    def _time_lost(self, event: events.TimeLost) -> None:
        by_ms = event.by_ms

        def later(due_ms: int) -> int:
            return max(1, due_ms + by_ms) if due_ms else 0

        self.timers, self.reminders = [], []
        for message_id, known in self.deliveries.items():
            if any(one.due_ms for one in known.values()):
                self.deliveries[message_id] = {
                    recipient: msgspec.structs.replace(one, due_ms=later(one.due_ms))
                    for recipient, one in known.items()
                }
        self._load_deliveries(self.deliveries)
        self._load_owed(
            {
                message_id: {
                    recipient: msgspec.structs.replace(one, due_ms=later(one.due_ms))
                    for recipient, one in known.items()
                }
                for message_id, known in self.owed.items()
            }
        )
        self.duplicates = {key: later(at_ms) for key, at_ms in self.duplicates.items()}
        self.next_forget_ms = min(self.duplicates.values(), default=None)
        self.downtimes = (*self.downtimes[1 - MAX_DOWNTIMES :], Downtime(event.at, by_ms))
        self.modified_at = event.at

    def _duplicate_noted(self, event: events.DuplicateNoted) -> None:
        self.duplicates[event.key] = event.expires_ms
        if self.next_forget_ms is None or event.expires_ms < self.next_forget_ms:
            self.next_forget_ms = event.expires_ms

    def _duplicates_forgotten(self, event: events.DuplicatesForgotten) -> None:
        self.duplicates = {k: at for k, at in self.duplicates.items() if at > event.at_ms}
        self.next_forget_ms = min(self.duplicates.values(), default=None)

    def _note_end(self, message_id: int) -> None:
        """A message given up for somebody is a dead letter once nobody else will have it."""
        states = [one.state for one in self.deliveries[message_id].values()]
        if message_id in self.messages and min(states) in _HOPELESS:
            message = self._drop_live([message_id])[0]
            dead = msgspec.structs.replace(message, status=MessageStatus.DEAD_LETTER)
            self.dead_letters[message_id] = dead
            self.dead_index.add(dead)

    def _return_to_life(self, message_id: int) -> None:
        """A message that was dead for all is live again, where it stood before."""
        message = self.dead_letters.pop(message_id, None)
        if message is not None:
            self.dead_index.remove([message])
            self._add_message(message)
            self._live_is_sorted = False

    def _answered_after_all(self, message_id: int, recipients: tuple[str, ...]) -> None:
        """An acknowledgment of what was given up: for these it is dead no longer."""
        note = self.dead.pop(message_id)
        left = tuple(name for name in note.recipients if name not in recipients)
        if left:
            self.dead[message_id] = note._replace(recipients=left)
        self._return_to_life(message_id)

    def _note_retries(self, message_id: int, delivery: Delivery) -> None:
        """Update the number of retries of a message, over all recipients."""
        message = self.messages[message_id]
        retries = delivery.attempt - delivery.spent
        retries -= delivery.state is not DeliveryState.WAITING
        if retries > message.retry_count:
            self.messages[message_id] = msgspec.structs.replace(message, retry_count=retries)

    def _set_status(self, message_id: int, at: int) -> None:
        """The message's status, as its deliveries stand now."""
        self.modified_at = at
        message = self.messages.get(message_id)
        states = {delivery.state for delivery in self.deliveries[message_id].values()}
        status = _STATUS_OF.get(min(states))
        if status is MessageStatus.ACKNOWLEDGED and DeliveryState.DEAD in states:
            status = MessageStatus.DELIVERED  # one who owes an acknowledgment never gave it
        if (
            message is not None
            and status is not None
            and status is not message.status
            # all had acknowledged it: one more who gets it now changes nothing in that
            and message.status is not MessageStatus.ACKNOWLEDGED
        ):
            self.messages[message_id] = with_status(message, status, at)


_APPLY: dict[type, Callable[..., None]] = {
    events.ChannelCreated: State._channel_created,
    events.ChannelChanged: State._channel_changed,
    events.ParticipantJoined: State._participant_joined,
    events.ParticipantLeft: State._participant_left,
    events.ParticipantIdentified: State._participant_identified,
    events.SubscriptionAdded: State._subscription_added,
    events.SubscriptionChanged: State._subscription_changed,
    events.SubscriptionRemoved: State._subscription_removed,
    events.MessageSent: State._message_sent,
    events.DeliveriesAdded: State._deliveries_added,
    events.DeliveriesMoved: State._deliveries_moved,
    events.DeliveriesStaged: State._deliveries_staged,
    events.FileRefused: State._file_refused,
    events.MessageReceived: State._message_received,
    events.LateRead: State._late_read,
    events.DeliveryTimed: State._delivery_timed,
    events.DeadLettered: State._dead_lettered,
    events.DeadLetterReplayed: State._dead_letter_replayed,
    events.DeadLetterDiscarded: State._dead_letter_discarded,
    events.MessagesArchived: State._messages_archived,
    events.ArchiveDropped: State._archive_dropped,
    events.Rolled: State._rolled,
    events.MessagesEvicted: State._taken_out,
    events.Owed: State._owed,
    events.Reminded: State._reminded,
    events.OwedNoMore: State._owed_no_more,
    events.TimeLost: State._time_lost,
    events.DuplicateNoted: State._duplicate_noted,
    events.DuplicatesForgotten: State._duplicates_forgotten,
}
