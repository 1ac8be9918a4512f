"""Recipients of a message: by the type of its channel, and, for files without deliveries, derived.

A file of another writer may lack the section that holds deliveries; ``derive_deliveries`` restores
them from status and channel:

    status of the message     its deliveries
    Created, Sent             to be delivered
    Delivered                 received
    Acknowledged, Archived    acknowledged
    Failed                    bounced
    DeadLetter                dead

See docs/formats/acomm.md, docs/formats/ledger.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from relay.acomm.engine_state import DeadLetterInfo
from relay.acomm.model import (
    Channel,
    ChannelType,
    Delivery,
    DeliveryState,
    Message,
    MessageStatus,
    Subscription,
)
from relay.base.clock import NS_PER_MS
from relay.base.errors import ValidationFailed
from relay.engine.query import find
from relay.engine.rules import ANSWERS
from relay.engine.state import State

MATCHED_BYTES = 64 << 10  # of a text, by the pattern of a filter: RE2 costs text x pattern
SLOW_NS = 50 * NS_PER_MS  # of CPU, for one text: a usual pattern takes a hundredth


class Filters:
    """The filters of subscriptions, and which of them are given up, which is told once.

    An invalid one, which a file of another writer may hold, lets nothing through; one that took
    longer than SLOW_NS lets everything through.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._given_up: dict[int, bool] = {}  # subscription -> what it lets through

    def let_through(self, subscription: Subscription, message: Message) -> bool:
        """True when an active subscription, whose pattern matches, lets the message through."""
        if not subscription.active:
            return False
        if subscription.filter is None:
            return True
        known = self._given_up.get(subscription.id)
        if known is not None:
            return known
        begin = time.thread_time_ns()
        try:
            found = any(find([_beginning(message)], subscription.filter))
        except ValidationFailed:
            self._give_up(subscription, "is not a valid RE2 pattern, so nothing matches", False)
            return False
        if time.thread_time_ns() - begin > SLOW_NS:
            self._give_up(subscription, "takes too long, so every message matches", True)
        return found

    def forget(self, subscription_id: int) -> None:
        """Try it again: it has another filter."""
        self._given_up.pop(subscription_id, None)

    def _give_up(self, subscription: Subscription, why: str, lets_through: bool) -> None:
        self._given_up[subscription.id] = lets_through
        self._warn(
            f"subscription {subscription.id} of {subscription.subscriber}: its content pattern "
            f"{why}; subscribe again with another one"
        )


def _beginning(message: Message) -> Message:
    """The message with the part of its text that a pattern is looked for in."""
    if len(message.content) <= MATCHED_BYTES:
        return message
    return msgspec.structs.replace(message, content=message.content[:MATCHED_BYTES])


def route(state: State, channel: Channel, message: Message, filters: Filters) -> tuple[str, ...]:
    """The recipients of a message in a channel, by the channel's type."""
    if channel.channel_type is ChannelType.PUB_SUB:
        reached = dict.fromkeys(_subscribers(state, message, filters))
    else:
        reached = dict(state.members[channel.id])
    if not channel.config.echo or channel.channel_type is ChannelType.DIRECT:
        reached.pop(message.sender, None)
    return tuple(reached)


def _subscribers(state: State, message: Message, filters: Filters) -> Iterator[str]:
    trie = state.topics.get(message.channel_id)
    for number in trie.match(message.topic or "") if trie else ():
        subscription = state.subscriptions[number]
        if filters.let_through(subscription, message):
            yield subscription.subscriber


_STATE_OF = {
    MessageStatus.CREATED: DeliveryState.SENT,
    MessageStatus.SENT: DeliveryState.SENT,
    MessageStatus.DELIVERED: DeliveryState.RECEIVED,
    MessageStatus.ACKNOWLEDGED: DeliveryState.ACKNOWLEDGED,
    MessageStatus.ARCHIVED: DeliveryState.ACKNOWLEDGED,
    MessageStatus.FAILED: DeliveryState.BOUNCED,
    MessageStatus.DEAD_LETTER: DeliveryState.DEAD,
}
_MOST_RETRIES = 2**30  # of another writer's message: attempts continue from there


def derive_deliveries(state: State) -> None:
    """Reconstruct missing deliveries of messages after a load.

    Another writer may have omitted section 256, or added messages without entries in it.
    """
    for messages in (state.messages, state.dead_letters, state.archive):
        for message in [m for m in messages.values() if m.id not in state.deliveries]:
            is_dead = messages is state.dead_letters
            status = MessageStatus.DEAD_LETTER if is_dead else message.status
            delivery = Delivery(_STATE_OF[status], min(message.retry_count, _MOST_RETRIES) + 1)
            recipients = _recipients(state, message)
            state.deliveries[message.id] = dict.fromkeys(recipients, delivery)
            if is_dead and not state.dead[message.id].recipients:
                state.dead[message.id] = DeadLetterInfo(message.created_at, "", recipients)


def _recipients(state: State, message: Message) -> tuple[str, ...]:
    if message.message_type in ANSWERS:
        return _asked(state, message)
    channel = state.channels[message.channel_id]
    since: dict[str, int] = {p.id: p.joined_at for p in channel.participants}
    if channel.channel_type is ChannelType.PUB_SUB:
        since = {}
        for subscription in _subscriptions(state, message):
            since[subscription.subscriber] = min(
                subscription.created_at, since.get(subscription.subscriber, subscription.created_at)
            )
    routed = route(state, channel, message, Filters(lambda _: None))
    return tuple(name for name in routed if since.get(name, 0) <= message.created_at)


def _subscriptions(state: State, message: Message) -> list[Subscription]:
    trie = state.topics.get(message.channel_id)
    return [state.subscriptions[n] for n in trie.match(message.topic or "")] if trie else []


def _asked(state: State, message: Message) -> tuple[str, ...]:
    """The senders of the other messages of its thread that are not answers."""
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
    return tuple(dict.fromkeys(name for name in asked if name != message.sender))
