"""What must hold of a store that is to be opened: the invariants of data-structures.txt.

A file may read without a fault and still hold two messages of one number; opened and written
again, one of them would be gone. Such a file is refused and left as it is. So is one whose
numbers leave no room for the next, for it could not be written any more.

Sections 1 to 6 are the store. Section 256 stands beside them, and a writer that does not know it
carries it along: what it says of messages and channels that are gone is no fault, and is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TypeVar

from relay.acomm.engine_state import EngineState
from relay.acomm.model import Channel, ChannelType, ParticipantRole, StoreFile
from relay.base.errors import FormatError, SealedStore

_LAST_NUMBER = 2**64 - 2**32  # of ids and counts: what follows it has to fit as well
_LAST_ATTEMPT = 2**31
_ARCHIVE_NAME = re.compile(r"[0-9A-Za-z-]+/[0-9]{1,18}\.acomm")  # nothing above the archive folder
T = TypeVar("T")


def check(file: StoreFile) -> EngineState:
    """What section 256 says of a store that is to be opened.

    Errors: those of ``check_values`` and ``fitting``; SealedStore for sealed contents: written
    again, they would pass for plain ones.
    """
    if file.encrypted:
        raise SealedStore("the store is encrypted, and was not opened with its key")
    check_values(file)
    return fitting(EngineState.decode(file.engine_state), file)


def check_values(file: StoreFile) -> None:
    """Errors: FormatError naming the first id or name that breaks an invariant."""
    for channel in file.channels:
        _check_channel(channel)
    _unique("channel", [channel.id for channel in file.channels])
    _unique("channel", [channel.name for channel in file.channels])
    messages = (*file.messages, *file.dead_letters, *file.archive)
    _unique("message", [message.id for message in messages])
    _check_number("the highest message id", max((one.id for one in messages), default=0))
    _unique("subscription", [subscription.id for subscription in file.subscriptions])
    types = {channel.id: channel.channel_type for channel in file.channels}
    if {message.channel_id for message in messages} - types.keys():
        lost = next(message for message in messages if message.channel_id not in types)
        raise _fault(f"a channel for message {lost.id}", f"none of {lost.channel_id}")
    for subscription in file.subscriptions:
        _check_number("a subscription's id", subscription.id)
        if types.get(subscription.channel_id) is not ChannelType.PUB_SUB:
            raise _fault(
                f"a PubSub channel for subscription {subscription.id}",
                f"none of {subscription.channel_id}",
            )


def fitting(kept: EngineState, file: StoreFile) -> EngineState:
    """What was kept, as far as it speaks of what is in the file.

    Errors: FormatError for numbers that cannot go on, and for archives that are none.
    """
    for name in ("next_channel", "next_message", "next_subscription", "sequence"):
        _check_number(f"the {name} of section 256", getattr(kept, name))
    for note in kept.archives:
        if not _ARCHIVE_NAME.fullmatch(note.name):
            raise _fault("the name of an archive, as 2026-01-31/000001.acomm", repr(note.name))
        _check_number(f"the last id of archive {note.name}", note.last_id)
    if kept.leaving and not kept.archives:
        raise _fault("an archive for the messages that are leaving", "none")
    for records in {id(one): one for one in kept.deliveries.values()}.values():
        for recipient, one in records.items():
            if (attempts := max(one.attempt, one.spent)) > _LAST_ATTEMPT:
                expected = f"a delivery to {recipient} of {_LAST_ATTEMPT} attempts at most"
                raise _fault(expected, attempts)
    ids = {one.id for one in (*file.messages, *file.dead_letters, *file.archive)}
    return kept._replace(
        deliveries=_of(ids, kept.deliveries),
        dead=_of(ids, kept.dead),
        settings=_of({channel.id for channel in file.channels}, kept.settings),
        owed=_of({one.id for one in file.messages}, kept.owed),
    )


def problems(file: StoreFile) -> Iterator[str]:
    """Why no store is opened with a file; else what its section 256 says of nothing that is
    there, the first of each kind."""
    try:
        check_values(file)
        kept = EngineState.decode(file.engine_state)
        fits = fitting(kept, file)
    except FormatError as exc:
        yield f"no store opens with it: expected {exc.expected}, found {exc.found}"
        return
    for what, name, of in (
        ("deliveries", "message", (kept.deliveries, fits.deliveries)),
        ("a dead letter", "message", (kept.dead, fits.dead)),
        ("settings", "channel", (kept.settings, fits.settings)),
        ("an answer that is owed", "message", (kept.owed, fits.owed)),
    ):
        if strange := of[0].keys() - of[1].keys():
            yield f"section 256 has {what} of {name} {min(strange)}, which is not there"


def _check_channel(channel: Channel) -> None:
    """The invariants of one channel; who has left may be missing from it."""
    _check_number(f"the id of channel {channel.name}", channel.id)
    _check_number(f"the message_count of channel {channel.name}", channel.message_count)
    _unique(f"in channel {channel.id} participant", [one.id for one in channel.participants])
    owners = sum(one.role is ParticipantRole.OWNER for one in channel.participants)
    if channel.channel_type is ChannelType.DIRECT and len(channel.participants) > 2:
        raise _fault(f"2 in direct channel {channel.id}", len(channel.participants))
    if channel.channel_type is ChannelType.BROADCAST and owners > 1:
        raise _fault(f"one owner in broadcast channel {channel.id}", owners)


def _check_number(what: str, number: int) -> None:
    if number > _LAST_NUMBER:
        raise _fault(f"{what} to be {_LAST_NUMBER} at most", number)


def _of(keys: Set[int], known: Mapping[int, T]) -> dict[int, T]:
    """The entries of these keys; the very dict where all are."""
    if isinstance(known, dict) and known.keys() <= keys:
        return known
    return {key: value for key, value in known.items() if key in keys}


def _unique(what: str, keys: Sequence[object]) -> None:
    if len(set(keys)) < len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise _fault(f"{what} {twice} once", "two of it")


def _fault(expected: str, found: object) -> FormatError:
    return FormatError("the store", 0, expected, found)
