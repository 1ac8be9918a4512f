"""The effect of each event on the state of a store; ``apply`` is the only code that changes one.

Applying the same events to the same start gives the same state; nothing here reads the clock or
makes decisions.
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
from relay.engine import events, rules
from relay.engine.state import State, record_bytes

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
MAX_DOWNTIMES = 64  # of more, the oldest two become one


def apply(state: State, event: events.Event) -> None:
    """Change the state as the event says. The only code that does."""
    _APPLY[type(event)](state, event)
    state.sequence += 1
    state.modified_at = event.at or state.modified_at


def replay(state: State, event: events.Event, sequence: int) -> None:
    """Apply an event of a journal, which has this place in the store's sequence.

    Errors: LookupError, ValueError for an event that does not fit the state; it counts, too.
    """
    state.sequence = sequence + 1
    state.modified_at = event.at or state.modified_at
    _APPLY[type(event)](state, event)


def _channel_created(state: State, event: events.ChannelCreated) -> None:
    state.add_channel(event.channel)
    state.next_channel = max(state.next_channel, event.channel.id + 1)


def _channel_changed(state: State, event: events.ChannelChanged) -> None:
    channel = state.channels[event.channel_id]
    state.channels[event.channel_id] = msgspec.structs.replace(
        channel,
        state=event.state,
        config=event.config,
        description=event.description,
        tags=event.tags,
        modified_at=event.at,
    )
    state.note_retention(event.channel_id)
    state.set_settings(event.channel_id, event.settings)
    if channel.state is ChannelState.PAUSED and event.state is not ChannelState.PAUSED:
        _release_replays(state, event.channel_id, event.at)


def _release_replays(state: State, channel_id: int, at: int) -> None:
    """Make replays that a paused channel held due now."""
    for message_id in state.index.channel(channel_id):
        known = state.deliveries.get(message_id, {})
        held = {
            recipient: msgspec.structs.replace(delivery, due_ms=at * 1000)
            for recipient, delivery in known.items()
            if rules.is_replayed(delivery) and not delivery.due_ms
        }
        if held:
            state.set_deliveries(message_id, known, held)


def _participant_joined(state: State, event: events.ParticipantJoined) -> None:
    channel = state.channels[event.channel_id]
    state.channels[event.channel_id] = msgspec.structs.replace(
        channel,
        participants=(*channel.participants, event.participant),
        modified_at=event.at,
    )
    state.members[event.channel_id][event.participant.id] = None


def _participant_left(state: State, event: events.ParticipantLeft) -> None:
    channel = state.channels[event.channel_id]
    state.channels[event.channel_id] = msgspec.structs.replace(
        channel,
        participants=tuple(p for p in channel.participants if p.id != event.participant),
        modified_at=event.at,
    )
    state.members[event.channel_id].pop(event.participant, None)
    for subscription in list(state.subscriptions.values()):
        if (subscription.channel_id, subscription.subscriber) == (
            event.channel_id,
            event.participant,
        ):
            state.drop_subscription(subscription.id)


def _participant_identified(state: State, event: events.ParticipantIdentified) -> None:
    for channel_id, members in state.members.items():
        if event.participant not in members:
            continue
        channel = state.channels[channel_id]
        participants = tuple(
            msgspec.structs.replace(participant, identity_id=event.identity_id)
            if participant.id == event.participant
            else participant
            for participant in channel.participants
        )
        if participants != channel.participants:
            state.channels[channel_id] = msgspec.structs.replace(
                channel, participants=participants, modified_at=event.at
            )


def _subscription_added(state: State, event: events.SubscriptionAdded) -> None:
    subscription = event.subscription
    state.add_subscription(subscription)
    state.next_subscription = max(state.next_subscription, subscription.id + 1)


def _subscription_changed(state: State, event: events.SubscriptionChanged) -> None:
    if event.subscription.id in state.subscriptions:  # its pattern is unchanged
        state.subscriptions[event.subscription.id] = event.subscription


def _subscription_removed(state: State, event: events.SubscriptionRemoved) -> None:
    state.drop_subscription(event.subscription_id)


def _message_sent(state: State, event: events.MessageSent) -> None:
    message = event.message
    state.counts[message.channel_id] += 1  # first: an unknown channel raises before any change
    state.add_message(message)
    state.messages_sent += 1
    state.next_message = max(state.next_message, message.id + 1)
    size = record_bytes(message)
    state.bytes_sent += size
    state.record_bytes += size
    state.deliveries[message.id] = dict.fromkeys(event.recipients, _SENT)
    if event.held:
        state.pending.hold(message)
    elif state.pending.pending:
        state.note_pending(message)


def _deliveries_added(state: State, event: events.DeliveriesAdded) -> None:
    for message_id in event.message_ids:
        known = state.deliveries.get(message_id, {})
        state.set_deliveries(message_id, known, {event.recipient: _SENT})


def _deliveries_moved(state: State, event: events.DeliveriesMoved) -> None:
    known = state.deliveries.get(event.message_id)
    if known is None:
        return
    queued = event.state is DeliveryState.DELIVERED
    moved: dict[str, Delivery] = {}
    for recipient in event.recipients:
        before = known[recipient]
        attempt = event.attempt or before.attempt
        moved[recipient] = Delivery(event.state, attempt, event.due_ms, queued, before.spent)
    state.set_deliveries(event.message_id, known, moved)
    if event.state is DeliveryState.ACKNOWLEDGED and event.message_id in state.dead:
        _revive_acknowledged(state, event.message_id, event.recipients)
    if event.state in _HOPELESS and event.message_id in state.owed:
        state.set_obligations(event.message_id, dict.fromkeys(event.recipients))
    _set_status(state, event.message_id, event.at)
    if event.attempt:
        _note_retries(state, event.message_id, moved[event.recipients[0]])
    if event.message_id in state.dead:
        _note_dead_delivery(state, event.message_id)


def _deliveries_staged(state: State, event: events.DeliveriesStaged) -> None:
    for message_id, recipient, attempt in event.deliveries:
        known = state.deliveries.get(message_id, {})
        before = known.get(recipient)
        if before is None:
            continue  # it was discarded meanwhile
        staged = Delivery(DeliveryState.STAGED, attempt, 0, False, before.spent)
        state.set_deliveries(message_id, known, {recipient: staged})
        if message_id in state.messages:
            _note_retries(state, message_id, staged)


def _for_the_record(state: State, event: events.Event) -> None:
    """Nothing: the store does not change."""


def _message_received(state: State, event: events.MessageReceived) -> None:
    known = state.deliveries.get(event.message_id, {})
    before = known.get(event.participant, _SENT)
    waits = before.state is DeliveryState.WAITING  # keeps waiting for its next attempt
    after = Delivery(
        before.state if waits else DeliveryState.RECEIVED,
        before.attempt,
        before.due_ms,
        False,
        before.spent,
    )
    state.set_deliveries(event.message_id, known, {event.participant: after})


def _delivery_timed(state: State, event: events.DeliveryTimed) -> None:
    known = state.deliveries[event.message_id]
    state.set_deliveries(event.message_id, known, {event.recipient: event.delivery})
    _note_retries(state, event.message_id, event.delivery)


def _dead_lettered(state: State, event: events.DeadLettered) -> None:
    known = state.deliveries[event.message_id]
    dead = {
        recipient: msgspec.structs.replace(
            known[recipient], state=DeliveryState.DEAD, due_ms=0, queued=False
        )
        for recipient in event.recipients
    }
    state.set_deliveries(event.message_id, known, dead)
    if event.message_id in state.owed:
        state.set_obligations(event.message_id, dict.fromkeys(event.recipients))
    earlier = state.dead.get(event.message_id, DeadLetterInfo(event.at, "", ()))
    state.dead[event.message_id] = DeadLetterInfo(
        event.at, event.last_error, (*earlier.recipients, *event.recipients)
    )
    _note_dead_delivery(state, event.message_id)


def _dead_letter_replayed(state: State, event: events.DeadLetterReplayed) -> None:
    note = state.dead.pop(event.message_id)
    _revive(state, event.message_id)
    message = state.messages[event.message_id]
    state.messages[message.id] = msgspec.structs.replace(
        message, status=MessageStatus.SENT, retry_count=0, acknowledged_at=None
    )
    known = state.deliveries.get(event.message_id, {})
    is_paused = state.channels[message.channel_id].state is ChannelState.PAUSED
    due_ms = 0 if is_paused else event.at * 1000  # 0: until the channel is resumed
    due = {}
    for recipient in note.recipients:
        tried = known.get(recipient, _SENT).attempt
        due[recipient] = Delivery(DeliveryState.WAITING, tried, due_ms, False, tried)
    state.set_deliveries(event.message_id, known, due)
    for recipient in note.recipients:  # a replay is meant to be delivered again
        state.duplicates.pop((message.correlation_id or "", message.id, recipient), None)


def _dead_letter_discarded(state: State, event: events.DeadLetterDiscarded) -> None:
    del state.dead[event.message_id]
    removed = state.dead_letters.pop(event.message_id, None)
    if removed is not None:
        state.dead_index.remove([removed])
        state.forget(removed)


def _messages_archived(state: State, event: events.MessagesArchived) -> None:
    for message in state.drop_live(event.message_ids):
        state.add_archived(msgspec.structs.replace(message, status=MessageStatus.ARCHIVED))


def _archive_dropped(state: State, event: events.ArchiveDropped) -> None:
    removed = [state.archive.pop(message_id) for message_id in event.message_ids]
    state.archive_index.remove(removed)
    for message in removed:
        state.forget(message)


def _rolled(state: State, event: events.Rolled) -> None:
    state.archives += (event.note,)
    state.evicting = event.message_ids


def _messages_evicted(state: State, event: events.MessagesEvicted) -> None:
    out, state.evicting = state.evicting[: event.count], state.evicting[event.count :]
    removed = state.drop_live([number for number in out if number in state.messages])
    archived = [state.archive.pop(number) for number in out if number in state.archive]
    state.archive_index.remove(archived)
    for message in (*removed, *archived):
        state.forget(message)


def _owed(state: State, event: events.Owed) -> None:
    if event.message_id not in state.messages:
        return  # dead for all recipients, or rolled out: no answer is expected any more
    known = state.owed.get(event.message_id, {})
    moved: dict[str, Obligation | None] = {
        recipient: Obligation(
            event.due_ms,
            known.get(recipient, _NO_OBLIGATION).reminders,
            event.said,
            event.at,
        )
        for recipient in event.recipients
    }
    state.set_obligations(event.message_id, moved)


def _reminded(state: State, event: events.Reminded) -> None:
    before = state.owed[event.message_id][event.recipient]
    after = msgspec.structs.replace(before, due_ms=event.due_ms, reminders=event.reminders)
    state.set_obligations(event.message_id, {event.recipient: after})


def _owed_no_more(state: State, event: events.OwedNoMore) -> None:
    state.set_obligations(event.message_id, dict.fromkeys(event.recipients))


def _time_lost(state: State, event: events.TimeLost) -> None:
    by_ms = event.by_ms

    def later(due_ms: int) -> int:
        return max(1, due_ms + by_ms) if due_ms else 0

    timed = {
        message_id
        for message_id, known in state.deliveries.items()
        for delivery in known.values()
        if delivery.due_ms
    }
    for message_id in timed:
        state.deliveries[message_id] = {
            recipient: msgspec.structs.replace(delivery, due_ms=later(delivery.due_ms))
            for recipient, delivery in state.deliveries[message_id].items()
        }
    if timed:
        state.load_timers()
    state.load_owed(
        {
            message_id: {
                recipient: msgspec.structs.replace(obligation, due_ms=later(obligation.due_ms))
                for recipient, obligation in known.items()
            }
            for message_id, known in state.owed.items()
        }
    )
    state.duplicates = {key: later(at_ms) for key, at_ms in state.duplicates.items()}
    state.find_next_forget_ms()
    known = (*state.downtimes, Downtime(event.at, by_ms))
    if len(known) > MAX_DOWNTIMES:
        # with the later time: a deadline moves too far, never too little
        first, second, *rest = known
        known = (Downtime(second.at, first.ms + second.ms), *rest)
    state.downtimes = known


def _duplicate_noted(state: State, event: events.DuplicateNoted) -> None:
    state.duplicates[event.key] = event.expires_ms
    if state.next_forget_ms is None or event.expires_ms < state.next_forget_ms:
        state.next_forget_ms = event.expires_ms


def _duplicates_forgotten(state: State, event: events.DuplicatesForgotten) -> None:
    state.duplicates = {k: at for k, at in state.duplicates.items() if at > event.at_ms}
    state.find_next_forget_ms()


def _note_dead_delivery(state: State, message_id: int) -> None:
    """Make a message with dead deliveries a dead letter once none of the others is open."""
    states = [delivery.state for delivery in state.deliveries[message_id].values()]
    if message_id in state.messages and min(states) in _HOPELESS:
        message = state.drop_live([message_id])[0]
        dead = msgspec.structs.replace(message, status=MessageStatus.DEAD_LETTER)
        state.dead_letters[message_id] = dead
        state.dead_index.add(dead)


def _revive(state: State, message_id: int) -> None:
    """Make a dead letter live again, in its former place."""
    message = state.dead_letters.pop(message_id, None)
    if message is not None:
        state.dead_index.remove([message])
        state.add_message(message)
        state.live_is_sorted = False


def _revive_acknowledged(state: State, message_id: int, recipients: tuple[str, ...]) -> None:
    """Acknowledge deliveries that were given up: they are no longer dead."""
    note = state.dead.pop(message_id)
    left = tuple(name for name in note.recipients if name not in recipients)
    if left:
        state.dead[message_id] = note._replace(recipients=left)
    _revive(state, message_id)


def _note_retries(state: State, message_id: int, delivery: Delivery) -> None:
    """Update the number of retries of a message, over all recipients."""
    message = state.messages[message_id]
    retries = delivery.attempt - delivery.spent
    retries -= delivery.state is not DeliveryState.WAITING
    if retries > message.retry_count:
        state.messages[message_id] = msgspec.structs.replace(message, retry_count=retries)


def _set_status(state: State, message_id: int, at: int) -> None:
    """Update the message's status from its deliveries."""
    message = state.messages.get(message_id)
    # once all have acknowledged it, a recipient added later does not change the status
    if message is None or message.status is MessageStatus.ACKNOWLEDGED:
        return
    states = [delivery.state for delivery in state.deliveries[message_id].values()]
    status = _STATUS_OF.get(min(states))
    if status is MessageStatus.ACKNOWLEDGED and DeliveryState.DEAD in states:
        status = MessageStatus.DELIVERED  # an acknowledgment is missing
    if status is not None and status is not message.status:
        state.messages[message_id] = with_status(message, status, at)


_APPLY: dict[type, Callable[..., None]] = {
    events.ChannelCreated: _channel_created,
    events.ChannelChanged: _channel_changed,
    events.ParticipantJoined: _participant_joined,
    events.ParticipantLeft: _participant_left,
    events.ParticipantIdentified: _participant_identified,
    events.SubscriptionAdded: _subscription_added,
    events.SubscriptionChanged: _subscription_changed,
    events.SubscriptionRemoved: _subscription_removed,
    events.MessageSent: _message_sent,
    events.DeliveriesAdded: _deliveries_added,
    events.DeliveriesMoved: _deliveries_moved,
    events.DeliveriesStaged: _deliveries_staged,
    events.FileRefused: _for_the_record,
    events.MessageReceived: _message_received,
    events.LateRead: _for_the_record,
    events.OfferChanged: _for_the_record,
    events.AgentRung: _for_the_record,
    events.DeliveryTimed: _delivery_timed,
    events.DeadLettered: _dead_lettered,
    events.DeadLetterReplayed: _dead_letter_replayed,
    events.DeadLetterDiscarded: _dead_letter_discarded,
    events.MessagesArchived: _messages_archived,
    events.ArchiveDropped: _archive_dropped,
    events.Rolled: _rolled,
    events.MessagesEvicted: _messages_evicted,
    events.Owed: _owed,
    events.Reminded: _reminded,
    events.OwedNoMore: _owed_no_more,
    events.TimeLost: _time_lost,
    events.DuplicateNoted: _duplicate_noted,
    events.DuplicatesForgotten: _duplicates_forgotten,
}
