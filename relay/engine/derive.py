"""The deliveries of messages of which ENGINE_STATE says nothing: what message and channel tell.

    status of the message     its deliveries
    Created, Sent             to be delivered
    Delivered                 received
    Acknowledged, Archived    acknowledged
    Failed                    bounced
    DeadLetter                dead

Recipients are those to whom it would have been routed: who took part, or had subscribed, when it
was sent. An answer went to who was asked. Source: FORMATS section 2, last sentence, and section 4.
"""

from __future__ import annotations

from relay.acomm.engine_state import DeadNote
from relay.acomm.model import (
    ChannelType,
    Delivery,
    DeliveryState,
    Message,
    MessageStatus,
    Subscription,
)
from relay.engine import routing
from relay.engine.ack_rules import ANSWERS
from relay.engine.state import State

_STATE_OF = {
    MessageStatus.CREATED: DeliveryState.SENT,
    MessageStatus.SENT: DeliveryState.SENT,
    MessageStatus.DELIVERED: DeliveryState.RECEIVED,
    MessageStatus.ACKNOWLEDGED: DeliveryState.ACKNOWLEDGED,
    MessageStatus.ARCHIVED: DeliveryState.ACKNOWLEDGED,
    MessageStatus.FAILED: DeliveryState.BOUNCED,
    MessageStatus.DEAD_LETTER: DeliveryState.DEAD,
}
_MOST_RETRIES = 2**30  # of another writer: attempts are counted on from there


def derive_deliveries(state: State) -> None:
    """Give messages of a state just loaded the deliveries that they must have had.

    Another writer may have left out all of section 256, or added messages that it does not know.
    """
    for messages in (state.messages, state.dead_letters, state.archive):
        for message in [one for one in messages.values() if one.id not in state.deliveries]:
            is_dead = messages is state.dead_letters
            status = MessageStatus.DEAD_LETTER if is_dead else message.status
            one = Delivery(_STATE_OF[status], min(message.retry_count, _MOST_RETRIES) + 1)
            recipients = _recipients(state, message)
            state.deliveries[message.id] = dict.fromkeys(recipients, one)
            if is_dead and not state.dead[message.id].recipients:
                state.dead[message.id] = DeadNote(message.created_at, "", recipients)


def _recipients(state: State, message: Message) -> tuple[str, ...]:
    if message.message_type in ANSWERS:
        return _asked(state, message)
    channel = state.channels[message.channel_id]
    since: dict[str, int] = {p.id: p.joined_at for p in channel.participants}
    if channel.channel_type is ChannelType.PUB_SUB:
        since = {}
        for one in _subscriptions(state, message):
            since[one.subscriber] = min(one.created_at, since.get(one.subscriber, one.created_at))
    routed = routing.route(state, channel, message, lambda _: None)
    return tuple(one for one in routed if since.get(one, 0) <= message.created_at)


def _subscriptions(state: State, message: Message) -> list[Subscription]:
    trie = state.topics.get(message.channel_id)
    return [state.subscriptions[n] for n in trie.match(message.topic or "")] if trie else []


def _asked(state: State, message: Message) -> tuple[str, ...]:
    """Who sent what this answers: the others of its thread that are no answers themselves."""
    thread = message.correlation_id
    if thread is None:
        return ()
    asked = [
        messages[number].sender
        for index, messages in (
            (state.index, state.messages),
            (state.archive_index, state.archive),
        )
        for number in index.thread(thread)
        if messages[number].message_type not in ANSWERS
    ]
    return tuple(dict.fromkeys(one for one in asked if one != message.sender))
