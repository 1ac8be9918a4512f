"""Values that a file can hold and no flush could write again: found before a store is opened.

Reading applies no limits, for what is stored is data; so a file of another writer may have a
content, a name or a topic beyond its limit, or a Broadcast channel whose owner is missing, in
which nobody may send. It is read and dumped as it is. Opened for writing it is refused, and
left as it is. Source: acomm-file-format.txt, "Size Limits"; data-structures.txt, "Channel".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from relay.acomm import codec, container
from relay.acomm.container import Flag, SectionType
from relay.acomm.message_record import MAX_CONTENT_BYTES, SEAL_BYTES, read_message
from relay.acomm.model import (
    Channel,
    ChannelType,
    Message,
    ParticipantRole,
    StoreFile,
    Subscription,
)
from relay.acomm.reader import Reader
from relay.acomm.records import read_channel, read_subscription
from relay.acomm.sections import split
from relay.acomm.writer import MAX_NAME_BYTES, MAX_TOPIC_BYTES
from relay.base.errors import FormatError, LimitError

Problem = tuple[str, str]  # what was expected, and what was found
T = TypeVar("T")


def check(file: StoreFile, path: str) -> None:
    """Errors: LimitError for the first value in the file at ``path``, which holds these values."""
    if not has_any(file):
        return
    for fault in faults(codec.read_bytes(path), path):
        raise LimitError(fault.path, fault.offset, fault.expected, fault.found)


def has_any(file: StoreFile) -> bool:
    """True when ``faults`` finds something in the bytes that hold these values."""
    messages = (*file.messages, *file.dead_letters, *file.archive)
    most = MAX_CONTENT_BYTES + (SEAL_BYTES if file.encrypted else 0)
    topics = {message.topic for message in messages} - {None}
    return (
        any(_of_channel(channel) for channel in file.channels)
        or any(_of_subscription(one) for one in file.subscriptions)
        or max((len(message.content) for message in messages), default=0) > most
        or any(_is_longer(name, MAX_NAME_BYTES) for name in {one.sender for one in messages})
        or any(_is_longer(topic or "", MAX_TOPIC_BYTES) for topic in topics)
    )


def faults(data: bytes, path: str) -> Iterator[FormatError]:
    """Each value beyond its limit in a file that decodes, with the offset of its record."""
    header, table = container.open_frame(data, path)
    sections = split(data, path, header, table)
    most = MAX_CONTENT_BYTES + (SEAL_BYTES if header.flags & Flag.ENCRYPTED else 0)

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
