"""What must hold of a store that is to be opened: the invariants of data-structures.txt.

A file may read without a fault and still hold two messages of one number; opened and written
again, one of them would be gone. Such a file is refused and left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from relay.comm.model import Channel, ChannelType, ParticipantRole, StoreFile
from relay.errors import FormatError, SealedStore


def check(file: StoreFile) -> None:
    """Errors: FormatError naming the first id or name that breaks an invariant.

    SealedStore for sealed contents: written again, they would pass for plain ones.
    """
    if file.encrypted:
        raise SealedStore("the store is encrypted, and was not opened with its key")
    for expected, found in broken(file):
        raise FormatError("the store", 0, expected, found)


def broken(file: StoreFile) -> Iterator[tuple[str, str]]:
    """(expected, found) of each invariant without which a store is not opened; one of a kind."""
    messages = (*file.messages, *file.dead_letters, *file.archive)
    yield from _unique("channel", [channel.id for channel in file.channels])
    yield from _unique("channel", [channel.name for channel in file.channels])
    yield from _unique("message", [message.id for message in messages])
    yield from _unique("subscription", [subscription.id for subscription in file.subscriptions])
    types = {channel.id: channel.channel_type for channel in file.channels}
    if {message.channel_id for message in messages} - types.keys():
        lost = next(message for message in messages if message.channel_id not in types)
        yield f"a channel for message {lost.id}", f"none of {lost.channel_id}"
    for subscription in file.subscriptions:
        if types.get(subscription.channel_id) is not ChannelType.PUB_SUB:
            where = f"none of {subscription.channel_id}"
            yield f"a PubSub channel for subscription {subscription.id}", where
            break


def crowded(file: StoreFile) -> Iterator[tuple[str, str]]:
    """(expected, found) of channels with more than theirs; such a store works all the same.

    Fewer are no fault: a Direct channel waits for its second, and who is gone may come back.
    """
    for channel in file.channels:
        name = f"channel {channel.id} ({channel.name})"
        count = len(channel.participants)
        if channel.channel_type is ChannelType.DIRECT and count > 2:
            yield f"2 participants in Direct {name}", str(count)
        elif channel.channel_type is ChannelType.BROADCAST and _owners(channel) > 1:
            yield f"1 owner of Broadcast {name}", str(_owners(channel))


def _owners(channel: Channel) -> int:
    return sum(one.role is ParticipantRole.OWNER for one in channel.participants)


def _unique(what: str, keys: Sequence[object]) -> Iterator[tuple[str, str]]:
    if len(set(keys)) < len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        yield f"{what} {twice} once", "two of it"
