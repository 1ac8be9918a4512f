"""Is a store file valid? Checks that change nothing: format, limits, invariants, signatures.

``verify`` reports all problems of a file's bytes, also those that ``decode`` tolerates: records
out of order, wrong flags, indexes and columns that disagree with the messages. ``check_limits``
and ``check_invariants`` refuse to open for writing what no flush could write again, or what would
lose messages. Entries of section 256 for messages and channels that do not exist are not an error:
a writer that does not know the section copies it as it is. They are left out. Source: FORMATS
section 2; acomm-file-format.txt, "Size Limits"; data-structures.txt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import TypeVar

import msgspec

from relay.acomm import columns, container, indexes, store_file
from relay.acomm.container import Flag, SectionType
from relay.acomm.engine_state import EngineState
from relay.acomm.fields import MAX_NAME_BYTES, MAX_TOPIC_BYTES, Reader
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
    ENCRYPTION_BYTES,
    MAX_CONTENT_BYTES,
    read_channel,
    read_message,
    read_subscription,
)
from relay.acomm.sections import split
from relay.base import crypto
from relay.base.errors import FormatError, LimitError, SealedStore
from relay.base.message import EMPTY_BODY_CONTENT


class FileProblems(msgspec.Struct, frozen=True):
    """The problems of a file, and what was skipped in it; one line each."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def verify(data: bytes, path: str) -> FileProblems:
    """Check a file's bytes from the magic to the last index.

    A damaged file gives one problem, the fault that ``decode`` met. Of each kind of disorder
    in a section, the first is told.
    """
    warnings: list[str] = []
    try:
        store = store_file.decode(data, path, warn=warnings.append)
    except FormatError as exc:
        return FileProblems((str(exc),), tuple(warnings))
    beyond = limit_faults(data, path) if exceeds_limits(store) else ()
    problems = (
        *_order(store),
        *_flags(store, data, path),
        *_indexes(store, data, path),
        *_columns(store, data, path),
    ) or tuple(_invariants(store))  # what stands there twice has been told
    found = (*map(str, beyond), *(f"{path}: {problem}" for problem in problems))
    return FileProblems(found, tuple(warnings))


def _order(store: StoreFile) -> Iterator[str]:
    for number, ids in (
        (SectionType.CHANNELS, [channel.id for channel in store.channels]),
        (SectionType.SUBSCRIPTIONS, [one.id for one in store.subscriptions]),
    ):
        for one, other in pairwise(ids):
            if one >= other:
                yield f"section {number}: id {other} stands behind {one}, ids must ascend"
                break
    for number, messages in _message_sections(store):
        for before, after in pairwise((one.created_at, one.id) for one in messages):
            if before >= after:
                yield (
                    f"section {number}: message {after[1]} of {after[0]} stands behind message "
                    f"{before[1]} of {before[0]}, created_at and id must ascend"
                )
                break
        seen: set[int] = set()
        for message in messages:
            if message.id in seen:
                yield f"section {number}: message {message.id} stands there twice"
                break
            seen.add(message.id)
        for message in messages:
            keys = list(message.metadata or ())
            if keys != sorted(keys):
                yield f"section {number}: metadata of message {message.id} is not in key order"
                break


def _flags(store: StoreFile, data: bytes, path: str) -> Iterator[str]:
    header = container.parse_header(data, path, len(data))
    messages = [one for _, section in _message_sections(store) for one in section]
    dead = any(one.status is MessageStatus.DEAD_LETTER for one in store.messages)
    for flag, is_true in (
        (Flag.INDEXED, _section(data, path, SectionType.INDEXES) is not None),
        # Dead letters in section 2 are another writer's, which may set the flag for them.
        (Flag.HAS_DEAD_LETTERS, bool(store.dead_letters) or (dead and header.flags & 4 != 0)),
        (Flag.HAS_SIGNATURES, any(one.signature is not None for one in messages)),
        (Flag.HAS_METADATA, any(one.metadata is not None for one in messages)),
    ):
        if bool(header.flags & flag) is not is_true:
            yield f"flag {flag.name}: expected {int(is_true)}, found {int(not is_true)}"


def _indexes(store: StoreFile, data: bytes, path: str) -> Iterable[str]:
    reader = _section(data, path, SectionType.INDEXES)
    if reader is None:
        return ()
    try:
        return indexes.verify(indexes.decode(reader), store.messages)
    except FormatError as exc:
        return (f"section 4 at {exc.offset}: expected {exc.expected}, found {exc.found}",)


def _columns(store: StoreFile, data: bytes, path: str) -> Iterable[str]:
    reader = _section(data, path, SectionType.COLUMNS)
    if reader is None:
        return ()
    try:
        found = columns.Columns.open(reader)
        return list(columns.verify(found, store.messages, store.channels))
    except FormatError as exc:
        return (f"section 257 at {exc.offset}: expected {exc.expected}, found {exc.found}",)


def _invariants(store: StoreFile) -> Iterator[str]:
    is_partial = not store.channels and any(messages for _, messages in _message_sections(store))
    if is_partial:  # section 1 may be missing: such a file is for reading alone
        return
    yield from invariant_problems(store)


def _message_sections(store: StoreFile) -> tuple[tuple[SectionType, tuple[Message, ...]], ...]:
    return (
        (SectionType.MESSAGES, store.messages),
        (SectionType.DEAD_LETTERS, store.dead_letters),
        (SectionType.ARCHIVE, store.archive),
    )


def _section(data: bytes, path: str, kind: SectionType) -> Reader | None:
    """That section, when the file has one that is not empty."""
    header = container.parse_header(data, path, len(data))
    for entry in container.parse_sections(data, path, header):
        if entry.kind == kind and entry.length:
            return Reader(data, path, entry.offset, entry.offset + entry.length)
    return None


_LAST_NUMBER = 2**64 - 2**32  # of ids and counts: what follows it has to fit as well
_LAST_ATTEMPT = 2**31
_ARCHIVE_NAME = re.compile(r"[0-9A-Za-z-]+/[0-9]{1,18}\.acomm")  # nothing above the archive folder
T = TypeVar("T")


def check_invariants(file: StoreFile) -> EngineState:
    """Check a store that is to be opened; returns its engine state.

    Errors: those of ``check_values`` and ``fitting``; SealedStore for sealed contents: written
    again, they would pass for plain ones.
    """
    if file.encrypted:
        raise SealedStore("the store is encrypted, and was not opened with its key")
    check_values(file)
    return without_unknown_ids(EngineState.decode(file.engine_state), file)


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


def without_unknown_ids(kept: EngineState, file: StoreFile) -> EngineState:
    """The engine state without entries for messages and channels that are not in the file.

    Errors: FormatError for counters without room for the next number, and for invalid archives.
    """
    for name in ("next_channel", "next_message", "next_subscription", "sequence"):
        _check_number(f"the {name} of section 256", getattr(kept, name))
    for note in kept.archives:
        if not _ARCHIVE_NAME.fullmatch(note.name):
            raise _fault("the name of an archive, as 2026-01-31/000001.acomm", repr(note.name))
        _check_number(f"the last id of archive {note.name}", note.last_id)
    if kept.evicting and not kept.archives:
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


def invariant_problems(file: StoreFile) -> Iterator[str]:
    """Why no store is opened with a file; else what its section 256 says of nothing that is
    there, the first of each kind."""
    try:
        check_values(file)
        kept = EngineState.decode(file.engine_state)
        fits = without_unknown_ids(kept, file)
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


Problem = tuple[str, str]  # what was expected, and what was found


def check_limits(file: StoreFile, path: str) -> None:
    """Errors: LimitError for the first value in the file at ``path``, which holds these values."""
    if not exceeds_limits(file):
        return
    for fault in limit_faults(store_file.read_bytes(path), path):
        raise LimitError(fault.path, fault.offset, fault.expected, fault.found)


def exceeds_limits(file: StoreFile) -> bool:
    """True when ``faults`` finds something in the bytes that hold these values."""
    messages = (*file.messages, *file.dead_letters, *file.archive)
    most = MAX_CONTENT_BYTES + (ENCRYPTION_BYTES if file.encrypted else 0)
    topics = {message.topic for message in messages} - {None}
    return (
        any(_of_channel(channel) for channel in file.channels)
        or any(_of_subscription(one) for one in file.subscriptions)
        or max((len(message.content) for message in messages), default=0) > most
        or any(_is_longer(name, MAX_NAME_BYTES) for name in {one.sender for one in messages})
        or any(_is_longer(topic or "", MAX_TOPIC_BYTES) for topic in topics)
    )


def limit_faults(data: bytes, path: str) -> Iterator[FormatError]:
    """Each value beyond its limit in a file that decodes, with the offset of its record."""
    header, table = container.open_frame(data, path)
    sections = split(data, path, header, table)
    most = MAX_CONTENT_BYTES + (ENCRYPTION_BYTES if header.flags & Flag.ENCRYPTED else 0)

    def of_message(message: Message) -> list[Problem]:
        return _of_message(message, most)

    kind = SectionType
    yield from _walk(sections.get(kind.CHANNELS), read_channel, _of_channel)
    yield from _walk(sections.get(kind.MESSAGES), read_message, of_message)
    yield from _walk(sections.get(kind.SUBSCRIPTIONS), read_subscription, _of_subscription)
    for section in (kind.DEAD_LETTERS, kind.ARCHIVE):
        yield from _walk(sections.get(section), read_message, of_message)


def _walk(
    reader: Reader | None, read: Callable[[Reader], T], look: Callable[[T], Iterable[Problem]]
) -> Iterator[FormatError]:
    if reader is None:
        return
    for _ in range(reader.u64("count")):
        start = reader.pos
        for expected, found in look(read(reader)):
            yield reader.fault(start, expected, found)


def _of_message(message: Message, most: int) -> list[Problem]:
    what = f"of message {message.id}"
    found = _names((f"sender {what}", message.sender))
    if len(message.content) > most:
        size = f"{len(message.content)} bytes"
        found.append((f"content {what} of at most {most} bytes", size))
    return found + _topic(f"topic {what}", message.topic)


def _of_channel(channel: Channel) -> list[Problem]:
    what = f"of channel {channel.id}"
    found = _names((f"name {what}", channel.name), (f"owner {what}", channel.owner))
    found += _names(*((f"participant {what}", one.id) for one in channel.participants))
    owners = sum(one.role is ParticipantRole.OWNER for one in channel.participants)
    if channel.channel_type is ChannelType.BROADCAST and not owners:
        found.append((f"one owner in broadcast channel {channel.id}", "none"))
    return found


def _of_subscription(one: Subscription) -> list[Problem]:
    what = f"of subscription {one.id}"
    found = _names((f"subscriber {what}", one.subscriber))
    return found + _topic(f"topic_pattern {what}", one.topic_pattern)


def _names(*named: tuple[str, str]) -> list[Problem]:
    return [
        (f"{what} of at most {MAX_NAME_BYTES} bytes", f"{len(name.encode())} bytes")
        for what, name in named
        if _is_longer(name, MAX_NAME_BYTES)
    ]


def _topic(what: str, topic: str | None) -> list[Problem]:
    if topic is None or not _is_longer(topic, MAX_TOPIC_BYTES):
        return []
    return [(f"{what} of at most {MAX_TOPIC_BYTES} bytes", f"{len(topic.encode())} bytes")]


def _is_longer(text: str, most: int) -> bool:
    """True for a text of more bytes; most texts are known by their characters."""
    return 4 * len(text) > most and len(text.encode()) > most


# A message without a body has its KIND's word for content; what was signed is the body.
_WORDS = frozenset(EMPTY_BODY_CONTENT.values())


def is_signed_by(message: Message, public_key: bytes) -> bool:
    """True when the message carries a signature of this key over what it says."""
    metadata = message.metadata or {}
    relay_id, to = metadata.get("relay_id"), metadata.get("to")
    signature = message.signature
    if signature is None or not isinstance(relay_id, str) or not isinstance(to, str):
        return False
    bodies = (message.content, b"") if message.content in _WORDS else (message.content,)
    return any(
        crypto.verify(public_key, signature, message.sender, relay_id, to, body) for body in bodies
    )


def invalid_signatures(file: StoreFile, public_keys: Mapping[str, bytes]) -> Iterator[str]:
    """A line for each signature that is not its sender's; senders without a key are passed over.

    Contents must be plain.
    """
    for section in ("messages", "dead_letters", "archive"):
        for message in getattr(file, section):
            key = public_keys.get(message.sender)
            if key and message.signature is not None and not is_signed_by(message, key):
                yield (
                    f"{section}: the signature of message {message.id} is not "
                    f"{message.sender}'s, or it was changed"
                )
