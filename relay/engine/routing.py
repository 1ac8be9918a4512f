"""Stage 3 of the send pipeline: who receives a message, asked of the state.

Source: message-engine.txt, "Route".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from relay.acomm.model import Channel, ChannelType, Message, Subscription
from relay.base.errors import ValidationFailed
from relay.engine.query import find
from relay.engine.state import State

OnInvalidFilter = Callable[[Subscription], object]


def route(
    state: State, channel: Channel, message: Message, on_invalid: OnInvalidFilter
) -> tuple[str, ...]:
    """The recipients of a message in a channel, by the channel's type.

    ``on_invalid`` is called with each subscription whose filter is invalid; it does not match.
    """
    if channel.channel_type is ChannelType.PUB_SUB:
        reached = dict.fromkeys(_subscribers(state, message, on_invalid))
    else:
        reached = dict(state.members[channel.id])
    if not channel.config.echo or channel.channel_type is ChannelType.DIRECT:
        reached.pop(message.sender, None)
    return tuple(reached)


def passes_filter(
    subscription: Subscription, message: Message, on_invalid: OnInvalidFilter
) -> bool:
    """True when an active subscription, whose pattern matches, lets the message through.

    An invalid filter, which a file of another writer may hold, lets nothing through.
    """
    if not subscription.active:
        return False
    if subscription.filter is None:
        return True
    try:
        return bool(find([message], subscription.filter))
    except ValidationFailed:
        on_invalid(subscription)
        return False


def _subscribers(state: State, message: Message, on_invalid: OnInvalidFilter) -> Iterator[str]:
    trie = state.topics.get(message.channel_id)
    for number in trie.match(message.topic or "") if trie else ():
        subscription = state.subscriptions[number]
        if passes_filter(subscription, message, on_invalid):
            yield subscription.subscriber
