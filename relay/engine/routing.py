"""Stage 3 of the send pipeline: who receives a message, asked of the state.

Source: message-engine.txt, "Route".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from relay.acomm.model import Channel, ChannelType, Message, Subscription
from relay.base.errors import QueryTimeout, ValidationFailed
from relay.engine.query import FILTER_LIMIT_S, find
from relay.engine.state import State

Slow = Callable[[Subscription], object]


def route(state: State, channel: Channel, message: Message, slow: Slow) -> tuple[str, ...]:
    """The recipients of a message in a channel, by the channel's type.

    ``slow`` is told of a subscription whose filter takes too long; it does not match then, so
    that no subscriber can hold up a publisher.
    """
    if channel.channel_type is ChannelType.PUB_SUB:
        reached = dict.fromkeys(_subscribers(state, message, slow))
    else:
        reached = dict(state.members[channel.id])
    if not channel.config.echo or channel.channel_type is ChannelType.DIRECT:
        reached.pop(message.sender, None)
    return tuple(reached)


def wants(
    subscription: Subscription, message: Message, slow: Slow, limit_s: float = FILTER_LIMIT_S
) -> bool:
    """True when an active subscription, whose pattern matches, lets the message through.

    A filter that takes longer than ``limit_s``, or that a file had though it is none, does not.
    """
    if not subscription.active:
        return False
    if subscription.filter is None:
        return True
    try:
        return bool(find([message], subscription.filter, limit_s))
    except (QueryTimeout, ValidationFailed):
        slow(subscription)
        return False


def _subscribers(state: State, message: Message, slow: Slow) -> Iterator[str]:
    trie = state.topics.get(message.channel_id)
    for number in trie.match(message.topic or "") if trie else ():
        subscription = state.subscriptions[number]
        if wants(subscription, message, slow):
            yield subscription.subscriber
