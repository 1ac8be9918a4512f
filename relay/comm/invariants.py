"""What must hold of a store that is to be opened: the invariants of data-structures.txt.

A file may read without a fault and still hold two messages of one number; opened and written
again, one of them would be gone. Such a file is refused and left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from relay.comm.model import ChannelType, StoreFile
from relay.errors import FormatError, SealedStore


def check(file: StoreFile) -> None:
    """Errors: FormatError naming the first id or name that breaks an invariant.

    SealedStore for sealed contents: written again, they would pass for plain ones.
    """
    if file.encrypted:
        raise SealedStore("the store is encrypted, and was not opened with its key")
    _unique("channel", [channel.id for channel in file.channels])
    _unique("channel", [channel.name for channel in file.channels])
    messages = (*file.messages, *file.dead_letters, *file.archive)
    _unique("message", [message.id for message in messages])
    _unique("subscription", [subscription.id for subscription in file.subscriptions])
    types = {channel.id: channel.channel_type for channel in file.channels}
    if {message.channel_id for message in messages} - types.keys():
        lost = next(message for message in messages if message.channel_id not in types)
        raise _fault(f"a channel for message {lost.id}", f"none of {lost.channel_id}")
    for subscription in file.subscriptions:
        if types.get(subscription.channel_id) is not ChannelType.PUB_SUB:
            raise _fault(
                f"a PubSub channel for subscription {subscription.id}",
                f"none of {subscription.channel_id}",
            )


def _unique(what: str, keys: Sequence[object]) -> None:
    if len(set(keys)) < len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise _fault(f"{what} {twice} once", "two of it")


def _fault(expected: str, found: str) -> FormatError:
    return FormatError("the store", 0, expected, found)
