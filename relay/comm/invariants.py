"""What must hold of a store that is to be opened: the invariants of data-structures.txt.

A file may read without a fault and still hold two messages of one number; opened and written
again, one of them would be gone. Such a file is refused and left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.comm.model import ChannelType, StoreFile
from relay.errors import FormatError


def check(file: StoreFile) -> None:
    """Errors: FormatError naming the first id or name that breaks an invariant."""
    _unique("channel", (channel.id for channel in file.channels))
    _unique("channel", (channel.name for channel in file.channels))
    _unique("message", (message.id for message in file.messages))
    _unique("subscription", (subscription.id for subscription in file.subscriptions))
    types = {channel.id: channel.channel_type for channel in file.channels}
    for message in file.messages:
        if message.channel_id not in types:
            raise _fault(f"a channel for message {message.id}", f"none of {message.channel_id}")
    for subscription in file.subscriptions:
        if types.get(subscription.channel_id) is not ChannelType.PUB_SUB:
            raise _fault(
                f"a PubSub channel for subscription {subscription.id}",
                f"none of {subscription.channel_id}",
            )


def _unique(what: str, keys: Iterable[object]) -> None:
    seen: set[object] = set()
    for key in keys:
        if key in seen:
            raise _fault(f"{what} {key} once", "two of it")
        seen.add(key)


def _fault(expected: str, found: str) -> FormatError:
    return FormatError("the store", 0, expected, found)
