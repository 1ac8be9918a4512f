"""The sections of an `.acomm` file, a store's values to their bytes and back.

    1, 3      u64 count, records                 by id
    2, 5, 6   u64 count, messages, enveloped     by created_at, then id
    4         indexes.py
    256       blocks of  tag u32 | length u64 | data     by tag
    257       columns.py

A section that is missing or empty holds nothing. Bytes left over are a fault. See
docs/formats/acomm.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from relay.acomm import columns, container, indexes
from relay.acomm.codec import Codec
from relay.acomm.container import MAX_FILE_BYTES, FileHeader, Flag, SectionEntry, SectionType
from relay.acomm.fields import U64, Reader, tagged
from relay.acomm.model import Message, StoreFile
from relay.acomm.records import (
    CHANNEL,
    ENCRYPTION_BYTES,
    MAX_CONTENT_BYTES,
    MESSAGE,
    SUBSCRIPTION,
    encode_message,
    read_messages,
    walk_messages,
)
from relay.base.errors import FormatError, StoreCapacity

MAX_MESSAGES = 10_000_000  # of sections 2, 5 and 6 together
MAX_CHANNELS = 100_000
MAX_SUBSCRIPTIONS = 1_000_000

# Indexes and columns are made from the messages.
READ = frozenset(SectionType) - {SectionType.INDEXES, SectionType.COLUMNS}
ENVELOPED = frozenset({SectionType.MESSAGES, SectionType.DEAD_LETTERS, SectionType.ARCHIVE})

_by_id = attrgetter("id")
_by_time = attrgetter("created_at", "id")


def check_counts(store: StoreFile) -> None:
    """Errors: StoreCapacity when the store has more of something than a file may hold."""
    messages = len(store.messages) + len(store.dead_letters) + len(store.archive)
    for what, count, limit in (
        ("messages", messages, MAX_MESSAGES),
        ("channels", len(store.channels), MAX_CHANNELS),
        ("subscriptions", len(store.subscriptions), MAX_SUBSCRIPTIONS),
    ):
        if count > limit:
            raise StoreCapacity(f"{count} {what}, a store file can hold {limit}")


def check_size(size: int) -> None:
    """Errors: StoreCapacity for more bytes than a file may have."""
    if size > MAX_FILE_BYTES:
        raise StoreCapacity(f"{size} bytes, a store file can hold {MAX_FILE_BYTES}")


def encode_sections(
    store: StoreFile, compress: bool, with_columns: bool = False
) -> dict[SectionType, bytes]:
    """Each section's bytes, in the order of the file."""
    most = MAX_CONTENT_BYTES + (ENCRYPTION_BYTES if store.encrypted else 0)

    def messages(records: list[bytes]) -> bytes:
        raw = _counted(records)
        check_size(len(raw))  # a reader would refuse to inflate more
        return container.pack_envelope(raw) if compress else raw

    def records(ordered: Iterable[Message]) -> list[bytes]:
        return [encode_message(message, most) for message in ordered]

    ordered = sorted(store.messages, key=_by_time)
    of_messages = records(ordered)
    channels = sorted(store.channels, key=_by_id)
    subscriptions = sorted(store.subscriptions, key=_by_id)
    bodies = {
        SectionType.CHANNELS: _counted(CHANNEL.encode("", channel) for channel in channels),
        SectionType.MESSAGES: messages(of_messages),
        SectionType.SUBSCRIPTIONS: _counted(SUBSCRIPTION.encode("", one) for one in subscriptions),
        SectionType.INDEXES: indexes.encode(indexes.build(store.messages)),
        SectionType.DEAD_LETTERS: messages(records(sorted(store.dead_letters, key=_by_time))),
        SectionType.ARCHIVE: messages(records(sorted(store.archive, key=_by_time))),
    }
    if store.engine_state:
        bodies[SectionType.ENGINE_STATE] = tagged(dict(sorted(store.engine_state.items())))
    if with_columns:
        sizes = [len(record) for record in of_messages]
        bodies[SectionType.COLUMNS] = columns.encode(ordered, sizes, channels)
    return bodies


def split(
    data: bytes, path: str, header: FileHeader, table: Iterable[SectionEntry]
) -> dict[int, Reader]:
    """A reader for each section that is not empty, unpacked from its envelope.

    The bytes of a compressed file are no longer needed once this returns.
    Errors: FormatError for an envelope.
    """
    readers = {}
    for entry in table:
        if entry.kind not in READ or not entry.length:
            continue
        reader = Reader(data, path, entry.offset, entry.offset + entry.length)
        if header.flags & Flag.COMPRESSED and entry.kind in ENVELOPED:
            name = f"section {entry.kind}"
            readers[entry.kind] = container.unpack_envelope(
                reader, name, _walk(path, header, entry.kind)
            )
        elif header.flags & Flag.COMPRESSED:
            readers[entry.kind] = Reader(data[entry.offset : reader.end], path, base=entry.offset)
        else:
            readers[entry.kind] = reader
    return readers


def _check_messages(pieces: Iterable[bytes], path: str, name: str, limit: int, where: str) -> None:
    """Check that the pieces are a count and so many messages in order, without keeping them.

    Errors: FormatError with the first fault, except a truncated end, which ``decode_sections``
    reports.
    """
    data, base, left, last = b"", 0, -1, (-1, -1)
    for piece in pieces:
        data += piece
        reader = Reader(data, path, base=base, where=where)
        if left < 0:
            if len(data) < U64.size:
                continue
            left = reader.u64(f"count of {name}")
            if left > limit:
                raise reader.fault(0, f"count of {name} of at most {limit}", left)
        for key in walk_messages(reader, left):
            if key <= last:
                found = f"message {key[1]} of {key[0]} after message {last[1]} of {last[0]}"
                raise reader.fault(0, f"{name} by created_at and id, ascending", found)
            left, last = left - 1, key
        if not left:
            reader.finish(name)
        base += reader.pos
        data = data[reader.pos :]


def _walk(path: str, header: FileHeader, kind: int) -> container.CheckPieces:
    """The check of a section that a few bytes claim to be: no more messages than the header has."""
    is_dead = kind == SectionType.DEAD_LETTERS
    limit = min(MAX_MESSAGES, header.dead_letter_count if is_dead else header.message_count)
    name = f"section {kind}"
    return lambda pieces, where: _check_messages(pieces, path, name, limit, where)


def decode_sections(path: str, header: FileHeader, sections: dict[int, Reader]) -> StoreFile:
    """The store in the sections, after comparing them with the header's counts.

    Sections are released as they are read. Errors: FormatError.
    """

    def records(
        kind: SectionType, codec: Codec, limit: int, read: Callable[[Reader, int], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        reader = sections.pop(kind, None)
        if reader is None:
            return ()
        start, name = reader.pos, f"section {kind}"
        count = reader.count(f"count of {name}", codec.least, wide=True)
        if count > limit:
            raise reader.fault(start, f"count of {name} of at most {limit}", count)
        found = read(reader, count)
        reader.finish(name)
        return found

    def plain(kind: SectionType, codec: Codec, limit: int) -> tuple[Any, ...]:
        return records(
            kind,
            codec,
            limit,
            lambda reader, count: tuple([codec.read(reader, "") for _ in range(count)]),
        )

    def messages(kind: SectionType) -> tuple[Message, ...]:
        return records(kind, MESSAGE, MAX_MESSAGES, read_messages)

    kind = SectionType
    store = StoreFile(
        created_at=header.created_at,
        modified_at=header.modified_at,
        channels=plain(kind.CHANNELS, CHANNEL, MAX_CHANNELS),
        messages=messages(kind.MESSAGES),
        subscriptions=plain(kind.SUBSCRIPTIONS, SUBSCRIPTION, MAX_SUBSCRIPTIONS),
        dead_letters=messages(kind.DEAD_LETTERS),
        archive=messages(kind.ARCHIVE),
        engine_state=read_blocks(sections.pop(kind.ENGINE_STATE, None)),
        encrypted=bool(header.flags & Flag.ENCRYPTED),
    )
    _compare_counts(store, header, path)
    return store


def _counted(records: Iterable[bytes]) -> bytes:
    found = list(records)
    return b"".join((U64.pack(len(found)), *found))


def read_blocks(reader: Reader | None) -> dict[int, bytes]:
    """The blocks of section 256 by tag; none without the section. Errors: FormatError."""
    if reader is None:
        return {}
    found = reader.blocks("engine_state block")
    return {tag: reader.data[reader.pos : reader.end] for tag, reader in found.items()}


def _compare_counts(store: StoreFile, header: FileHeader, path: str) -> None:
    """Compare the header's counts with the sections."""
    for at, field, count, expected in (
        (16, "channel_count", header.channel_count, len(store.channels)),
        (24, "message_count", header.message_count, len(store.messages) + len(store.archive)),
        (32, "subscription_count", header.subscription_count, len(store.subscriptions)),
        (40, "dead_letter_count", header.dead_letter_count, len(store.dead_letters)),
    ):
        if count != expected:
            raise FormatError(path, at, f"{field} {expected}, as the sections hold", count)
