"""Everything that can be wrong with an `.acomm` file, found without changing it.

``decode`` refuses what cannot be trusted. This goes on to what a reader gets over and a writer
should not have done: records out of order, flags that do not tell the truth, indexes and
columns at odds with the messages, the invariants of a store. Source: FORMATS section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from relay.acomm import codec, columns, container, excess, indexes, invariants
from relay.acomm.container import Flag, SectionType
from relay.acomm.model import Message, MessageStatus, StoreFile
from relay.acomm.reader import Reader
from relay.base.errors import FormatError


class Findings(msgspec.Struct, frozen=True):
    """What is wrong with a file, and what was skipped in it; one line each."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def verify(data: bytes, path: str) -> Findings:
    """Check a file's bytes from the magic to the last index.

    A damaged file gives one problem, the fault that ``decode`` met. Of each kind of disorder
    in a section, the first is told.
    """
    warnings: list[str] = []
    try:
        store = codec.decode(data, path, warn=warnings.append)
    except FormatError as exc:
        return Findings((str(exc),), tuple(warnings))
    beyond = excess.faults(data, path) if excess.has_any(store) else ()
    problems = (
        *_order(store),
        *_flags(store, data, path),
        *_indexes(store, data, path),
        *_columns(store, data, path),
    ) or tuple(_invariants(store))  # what stands there twice has been told
    found = (*map(str, beyond), *(f"{path}: {problem}" for problem in problems))
    return Findings(found, tuple(warnings))


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
    yield from invariants.problems(store)


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
