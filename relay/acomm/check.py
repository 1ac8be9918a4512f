"""Checks of a store file, which change nothing: format, limits, invariants, signatures.

``check`` reports all problems of a file's bytes, also those that ``decode`` tolerates: records out
of order, wrong flags, indexes and columns that disagree with the messages. ``check_limits`` and
``check_invariants`` refuse to open for writing what no flush could write again, or what would lose
messages. Entries of section 256 for messages and channels that do not exist are not an error: a
writer that does not know the section copies it as it is. They are left out. See
docs/formats/acomm.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, TypeVar

from relay.acomm import columns, container, indexes, store_file
from relay.acomm.codec import Codec
from relay.acomm.container import Flag, SectionType
from relay.acomm.engine_state import EngineState
from relay.acomm.fields import MAX_NAME_BYTES, MAX_TOPIC_BYTES, Fault, Reader
from relay.acomm.model import (
    Channel,
    ChannelType,
    Message,
    MessageStatus,
    ParticipantRole,
    StoreFile,
    Subscription,
)
from relay.acomm.records import (
    CHANNEL,
    ENCRYPTION_BYTES,
    MAX_CONTENT_BYTES,
    MESSAGE,
    SUBSCRIPTION,
)
from relay.acomm.sections import split
from relay.base import crypto
from relay.base.errors import FormatError, LimitError, RelayError, SealedStore
from relay.base.finding import Finding, Severity
from relay.base.message import EMPTY_BODY_CONTENT

WHAT = "store"
OPENS = "it opens nevertheless; the next checkpoint writes it in order"
Problem = tuple[str, str]  # what was expected, and what was found


def check_file(
    path: str, key: bytes | None = None, public_keys: Mapping[str, bytes] | None = None
) -> Iterator[Finding]:
    """Check a file, and its signatures by the public keys of their senders.

    ``key``: of an encrypted file, needed only to check signatures. Does not raise for any file.
    """
    try:
        data = store_file.read_bytes(path)
        is_damaged = False
        for finding in check(data, path):
            is_damaged |= finding.severity is Severity.ERROR
            yield finding
        if not is_damaged and (key is not None or public_keys):
            file = store_file.decrypt(store_file.decode(data, path, warn=_ignore), key, path)
            yield from check_signatures(file, path, public_keys or {})
    except (RelayError, OSError) as exc:
        yield Finding.of_error(WHAT, exc, path)


def check(data: bytes, path: str) -> Iterator[Finding]:
    """Check a file's bytes from the magic to the last index.

    A damaged file gives one finding, the fault that ``decode`` met. Of each kind of disorder in a
    section, the first is reported. Skipped parts are warnings.
    """
    warnings: list[str] = []
    try:
        store = store_file.decode(data, path, warn=warnings.append)
    except FormatError as exc:
        store = None
        yield Finding.of_error(WHAT, exc)
    for line in warnings:
        yield Finding(WHAT, path, line, severity=Severity.WARNING)
    if store is None:
        return
    if exceeds_limits(store):
        for fault in limit_faults(data, path):
            yield Finding.of_error(WHAT, fault)
    is_partial = not store.channels and any(messages for _, messages in _message_sections(store))
    faults = [] if is_partial else list(_opening_faults(store))  # a file may lack its section 1
    advice = "" if faults else OPENS
    is_ordered = True
    for check_part in (_order, _flags, _indexes, _columns):
        for where, expected, found in check_part(store, data, path):
            is_ordered = False
            yield Finding(WHAT, f"{path}: {where}", found, advice, expected=expected)
    if faults and is_ordered:  # else the cause, as a duplicate, was reported
        for expected, found in faults:
            where = f"{path}: it cannot be opened as a store"
            yield Finding(WHAT, where, found, expected=expected)
    elif not faults and not is_partial:
        for expected, found in _unknown_ids(store):
            yield Finding(WHAT, f"{path}: section 256", found, OPENS, expected=expected)


def _order(store: StoreFile, data: bytes, path: str) -> Iterator[Fault]:
    for number, ids in (
        (SectionType.CHANNELS, [channel.id for channel in store.channels]),
        (SectionType.SUBSCRIPTIONS, [subscription.id for subscription in store.subscriptions]),
    ):
        for first, second in pairwise(ids):
            if first >= second:
                yield f"section {number}", "ascending ids", f"{second} after {first}"
                break
    for number, messages in _message_sections(store):
        where = f"section {number}"
        for before, after in pairwise((message.created_at, message.id) for message in messages):
            if before >= after:
                found = f"message {after[1]} of {after[0]} after message {before[1]} of {before[0]}"
                yield where, "ascending created_at and id", found
                break
        for problem in _duplicates("message", [message.id for message in messages]):
            yield where, *problem
        for message in messages:
            keys = list(message.metadata or ())
            if keys != sorted(keys):
                yield where, f"the metadata of message {message.id} in key order", str(keys)
                break


def _flags(store: StoreFile, data: bytes, path: str) -> Iterator[Fault]:
    header = container.parse_header(data, path, len(data))
    messages = [message for _, section in _message_sections(store) for message in section]
    dead = any(message.status is MessageStatus.DEAD_LETTER for message in store.messages)
    for flag, is_true in (
        (Flag.INDEXED, _section(data, path, SectionType.INDEXES) is not None),
        # Dead letters in section 2 are another writer's, which may set the flag for them.
        (Flag.HAS_DEAD_LETTERS, bool(store.dead_letters) or (dead and header.flags & 4 != 0)),
        (Flag.HAS_SIGNATURES, any(message.signature is not None for message in messages)),
        (Flag.HAS_METADATA, any(message.metadata is not None for message in messages)),
    ):
        if bool(header.flags & flag) is not is_true:
            yield f"flag {flag.name}", str(int(is_true)), str(int(not is_true))


def _indexes(store: StoreFile, data: bytes, path: str) -> Iterable[Fault]:
    reader = _section(data, path, SectionType.INDEXES)
    if reader is None:
        return ()
    try:
        return indexes.verify(indexes.decode(reader), store.messages)
    except FormatError as exc:
        return ((f"section 4 at {exc.offset}", str(exc.expected), str(exc.found)),)


def _columns(store: StoreFile, data: bytes, path: str) -> Iterable[Fault]:
    reader = _section(data, path, SectionType.COLUMNS)
    if reader is None:
        return ()
    try:
        found = columns.Columns.open(reader)
        return list(columns.verify(found, store.messages, store.channels))
    except FormatError as exc:
        return ((f"section 257 at {exc.offset}", str(exc.expected), str(exc.found)),)


def _message_sections(store: StoreFile) -> tuple[tuple[SectionType, tuple[Message, ...]], ...]:
    return (
        (SectionType.MESSAGES, store.messages),
        (SectionType.DEAD_LETTERS, store.dead_letters),
        (SectionType.ARCHIVE, store.archive),
    )


def _section(data: bytes, path: str, kind: SectionType) -> Reader | None:
    """The section of that type; None if missing or empty."""
    header = container.parse_header(data, path, len(data))
    for entry in container.parse_sections(data, path, header):
        if entry.kind == kind and entry.length:
            return Reader(data, path, entry.offset, entry.offset + entry.length)
    return None


def _ignore(_: str) -> None:
    """Ignore warnings: they are findings already."""


_LAST_NUMBER = 2**64 - 2**32  # of ids and counts: what follows it has to fit as well
_LAST_ATTEMPT = 2**31
_ARCHIVE_NAME = re.compile(r"[0-9A-Za-z-]+/[0-9]{1,18}\.acomm")  # nothing above the archive folder
T = TypeVar("T")


def check_invariants(file: StoreFile) -> EngineState:
    """Check a store before it is opened; returns its engine state.

    Entries for messages and channels that are not in the file are left out. Errors: FormatError for
    the first id, name or number that breaks an invariant; SealedStore for encrypted contents:
    written again, they would be taken for plain ones.
    """
    if file.encrypted:
        raise SealedStore("the store is encrypted, and was not opened with its key")
    for problem in _value_faults(file):
        raise FormatError("the store", 0, *problem)
    kept = EngineState.decode(file.engine_state)
    for problem in _kept_faults(kept):
        raise FormatError("the store", 0, *problem)
    return _without_unknown_ids(kept, file)


def _opening_faults(file: StoreFile) -> Iterator[Problem]:
    """Everything that keeps a file from being opened as a store."""
    yield from _value_faults(file)
    try:
        yield from _kept_faults(EngineState.decode(file.engine_state))
    except FormatError as exc:
        yield str(exc.expected), str(exc.found)


def _unknown_ids(file: StoreFile) -> Iterator[Problem]:
    """The first entry of each kind in section 256 that refers to nothing in the file."""
    kept = EngineState.decode(file.engine_state)
    fits = _without_unknown_ids(kept, file)
    for what, name, of in (
        ("deliveries", "message", (kept.deliveries, fits.deliveries)),
        ("dead letters", "message", (kept.dead, fits.dead)),
        ("settings", "channel", (kept.settings, fits.settings)),
        ("owed answers", "message", (kept.owed, fits.owed)),
    ):
        if strange := of[0].keys() - of[1].keys():
            yield f"{what} of a {name} in the file", f"{name} {min(strange)}"


def _value_faults(file: StoreFile) -> Iterator[Problem]:
    """Ids and names that break an invariant."""
    for channel in file.channels:
        yield from _channel_faults(channel)
    yield from _duplicates("channel", [channel.id for channel in file.channels])
    yield from _duplicates("channel", [channel.name for channel in file.channels])
    messages = (*file.messages, *file.dead_letters, *file.archive)
    yield from _duplicates("message", [message.id for message in messages])
    yield from _beyond(
        "the highest message id", max((message.id for message in messages), default=0)
    )
    yield from _duplicates("subscription", [subscription.id for subscription in file.subscriptions])
    types = {channel.id: channel.channel_type for channel in file.channels}
    if {message.channel_id for message in messages} - types.keys():
        lost = next(message for message in messages if message.channel_id not in types)
        yield f"a channel for message {lost.id}", f"none of {lost.channel_id}"
    for subscription in file.subscriptions:
        yield from _beyond("a subscription's id", subscription.id)
        if types.get(subscription.channel_id) is not ChannelType.PUB_SUB:
            yield (
                f"a PubSub channel for subscription {subscription.id}",
                f"none of {subscription.channel_id}",
            )


def _kept_faults(kept: EngineState) -> Iterator[Problem]:
    """Counters without room for the next number, and invalid archives."""
    for name in ("next_channel", "next_message", "next_subscription", "sequence"):
        yield from _beyond(f"the {name} of section 256", getattr(kept, name))
    for note in kept.archives:
        if not _ARCHIVE_NAME.fullmatch(note.name):
            yield "the name of an archive, as 2026-01-31/000001.acomm", repr(note.name)
        yield from _beyond(f"the last id of archive {note.name}", note.last_id)
    if kept.evicting and not kept.archives:
        yield "an archive for the messages that are leaving", "none"
    for records in {id(deliveries): deliveries for deliveries in kept.deliveries.values()}.values():
        for recipient, delivery in records.items():
            if (attempts := max(delivery.attempt, delivery.spent)) > _LAST_ATTEMPT:
                expected = f"a delivery to {recipient} of {_LAST_ATTEMPT} attempts at most"
                yield expected, str(attempts)


def _without_unknown_ids(kept: EngineState, file: StoreFile) -> EngineState:
    """The engine state without entries for messages and channels that are not in the file."""
    ids = {message.id for message in (*file.messages, *file.dead_letters, *file.archive)}
    return kept._replace(
        deliveries=_subset(ids, kept.deliveries),
        dead=_subset(ids, kept.dead),
        settings=_subset({channel.id for channel in file.channels}, kept.settings),
        owed=_subset({message.id for message in file.messages}, kept.owed),
    )


def _channel_faults(channel: Channel) -> Iterator[Problem]:
    """Invariants of one channel that do not hold; participants that left may be missing."""
    yield from _beyond(f"the id of channel {channel.name}", channel.id)
    yield from _beyond(f"the message_count of channel {channel.name}", channel.message_count)
    people = [participant.id for participant in channel.participants]
    yield from _duplicates(f"in channel {channel.id} participant", people)
    owners = sum(participant.role is ParticipantRole.OWNER for participant in channel.participants)
    if channel.channel_type is ChannelType.DIRECT and len(people) > 2:
        yield f"2 in direct channel {channel.id}", str(len(people))
    if channel.channel_type is ChannelType.BROADCAST and owners > 1:
        yield f"one owner in broadcast channel {channel.id}", str(owners)


def _beyond(what: str, number: int) -> Iterator[Problem]:
    if number > _LAST_NUMBER:
        yield f"{what} to be {_LAST_NUMBER} at most", str(number)


def _subset(keys: Set[int], known: Mapping[int, T]) -> dict[int, T]:
    """The entries of these keys; the same dict if that is all of them."""
    if isinstance(known, dict) and known.keys() <= keys:
        return known
    return {key: value for key, value in known.items() if key in keys}


def _duplicates(what: str, keys: Sequence[object]) -> Iterator[Problem]:
    """The first key that occurs more than once."""
    if len(set(keys)) < len(keys):
        key, count = next(item for item in Counter(keys).items() if item[1] > 1)
        yield f"{what} {key} once", f"it {count} times"


def check_limits(file: StoreFile, path: str) -> None:
    """Errors: LimitError for the first of these values, those of the file at ``path``."""
    if not exceeds_limits(file):
        return
    for fault in limit_faults(store_file.read_bytes(path), path):
        raise LimitError(fault.path, fault.offset, fault.expected, fault.found)


def exceeds_limits(file: StoreFile) -> bool:
    """True when ``limit_faults`` would find a fault in the bytes of these values."""
    messages = (*file.messages, *file.dead_letters, *file.archive)
    most = MAX_CONTENT_BYTES + (ENCRYPTION_BYTES if file.encrypted else 0)
    senders = {("", message.sender) for message in messages}
    topics = {("", message.topic) for message in messages}
    return bool(
        any(_of_channel(channel) for channel in file.channels)
        or any(_of_subscription(subscription) for subscription in file.subscriptions)
        or max((len(message.content) for message in messages), default=0) > most
        or _long(MAX_NAME_BYTES, *senders)
        or _long(MAX_TOPIC_BYTES, *topics)
    )


def limit_faults(data: bytes, path: str) -> Iterator[FormatError]:
    """Each value beyond its limit in a file that decodes, with the offset of its record."""
    header, table = container.open_frame(data, path)
    sections = split(data, path, header, table)
    most = MAX_CONTENT_BYTES + (ENCRYPTION_BYTES if header.flags & Flag.ENCRYPTED else 0)

    def of_message(message: Message) -> list[Problem]:
        return _of_message(message, most)

    kind = SectionType
    yield from _walk(sections.get(kind.CHANNELS), CHANNEL, _of_channel)
    yield from _walk(sections.get(kind.MESSAGES), MESSAGE, of_message)
    yield from _walk(sections.get(kind.SUBSCRIPTIONS), SUBSCRIPTION, _of_subscription)
    for section in (kind.DEAD_LETTERS, kind.ARCHIVE):
        yield from _walk(sections.get(section), MESSAGE, of_message)


def _walk(
    reader: Reader | None, codec: Codec, look: Callable[[Any], Iterable[Problem]]
) -> Iterator[FormatError]:
    if reader is None:
        return
    for _ in range(reader.u64("count")):
        start = reader.pos
        for expected, found in look(codec.read(reader, "")):
            yield reader.fault(start, expected, found)


def _of_message(message: Message, most: int) -> list[Problem]:
    what = f"of message {message.id}"
    found = _long(MAX_NAME_BYTES, (f"sender {what}", message.sender))
    if len(message.content) > most:
        size = f"{len(message.content)} bytes"
        found.append((f"content {what} of at most {most} bytes", size))
    return found + _long(MAX_TOPIC_BYTES, (f"topic {what}", message.topic))


def _of_channel(channel: Channel) -> list[Problem]:
    what = f"of channel {channel.id}"
    found = _long(
        MAX_NAME_BYTES,
        (f"name {what}", channel.name),
        (f"owner {what}", channel.owner),
        *((f"participant {what}", participant.id) for participant in channel.participants),
    )
    owners = sum(participant.role is ParticipantRole.OWNER for participant in channel.participants)
    if channel.channel_type is ChannelType.BROADCAST and not owners:
        found.append((f"one owner in broadcast channel {channel.id}", "none"))
    return found


def _of_subscription(subscription: Subscription) -> list[Problem]:
    what = f"of subscription {subscription.id}"
    found = _long(MAX_NAME_BYTES, (f"subscriber {what}", subscription.subscriber))
    return found + _long(MAX_TOPIC_BYTES, (f"topic_pattern {what}", subscription.topic_pattern))


def _long(most: int, *named: tuple[str, str | None]) -> list[Problem]:
    """The texts of more than ``most`` bytes; for most texts the number of characters decides."""
    return [
        (f"{what} of at most {most} bytes", f"{len(text.encode())} bytes")
        for what, text in named
        if text is not None and 4 * len(text) > most and len(text.encode()) > most
    ]


# A message without a body has its KIND's word as content; the signature is of the body.
_WORDS = frozenset(EMPTY_BODY_CONTENT.values())


def is_signed_by(message: Message, public_key: bytes) -> bool:
    """True when the message has a valid signature of this key."""
    metadata = message.metadata or {}
    relay_id, to = metadata.get("relay_id"), metadata.get("to")
    signature = message.signature
    if signature is None or not isinstance(relay_id, str) or not isinstance(to, str):
        return False
    bodies = (message.content, b"") if message.content in _WORDS else (message.content,)
    return any(
        crypto.verify(public_key, signature, message.sender, relay_id, to, body) for body in bodies
    )


def check_signatures(
    file: StoreFile, path: str, public_keys: Mapping[str, bytes]
) -> Iterator[Finding]:
    """Check signatures; senders without a key are skipped. Contents must not be encrypted."""
    for section in ("messages", "dead_letters", "archive"):
        for message in getattr(file, section):
            key = public_keys.get(message.sender)
            if key and message.signature is not None and not is_signed_by(message, key):
                found = (
                    f"{path}: {section}: the signature of message {message.id} is not "
                    f"{message.sender}'s, or it was changed"
                )
                yield Finding(WHAT, path, found)
