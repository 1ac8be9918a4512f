"""Queries: filters, content patterns, the index in memory, pages.

Indexes narrow the candidates, predicates decide, and the content pattern comes last. Patterns are
RE2's: matching takes time linear in the content, so no pattern can block the engine. Source:
message-engine.txt, "Receive Pipeline"; data-structures.txt, "MessageFilter", "Index Structures".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import re2

from relay.acomm.indexes import Ids, Indexes
from relay.acomm.model import (
    ArchiveInfo,
    Message,
    MessageFilter,
    MessageStatus,
    SortField,
    SortOrder,
)
from relay.base.errors import ValidationFailed
from relay.engine import topics, validation

_SHOWN_PATTERN = 150  # characters of a pattern in an error
_RE2 = re2.Options()
_RE2.never_capture = True  # with groups to fill in, RE2 is slow on long texts
_RE2.log_errors = False

Rank = Callable[[Message], int]  # the group of a message: its priority, where that is heeded


class QueryResult(NamedTuple):
    """One page of what matched."""

    messages: list[Message]
    total_count: int  # before limit and offset
    has_more: bool


def check_filter(wanted: MessageFilter) -> MessageFilter:
    """The filter itself, when a subscription in a file can have it.

    Errors: ValidationFailed for an invalid value or pattern.
    """
    if not isinstance(wanted, MessageFilter):
        raise ValidationFailed("filter", f"expected a MessageFilter, got {wanted!r}")
    values = validation.fields_of(wanted)
    numbers = [(name, values[name]) for name in ("limit", "offset", "after", "before")]
    numbers += [("channel_ids", number) for number in values["channel_ids"] or ()]
    for name, number in numbers:
        if number is not None and not 0 <= number < 2**64:
            raise ValidationFailed(name, f"{number} is not a number from 0 to {2**64 - 1}")
    for name in ("sender", "correlation_id", "topic_pattern", "content_pattern"):
        if values[name] is not None:
            validation.check_text(name, values[name])
    if wanted.topic_pattern is not None:
        topics.match_mode(wanted.topic_pattern)
    if wanted.content_pattern is not None:
        compile_pattern(wanted.content_pattern)
    return MessageFilter(**values)


def make_predicate(wanted: MessageFilter) -> Callable[[Message], bool]:
    """A predicate of every criterion but the content pattern."""
    statuses = frozenset(wanted.status) if wanted.status is not None else None
    types = frozenset(wanted.message_types) if wanted.message_types is not None else None
    priorities = frozenset(wanted.priority) if wanted.priority is not None else None
    channels = frozenset(wanted.channel_ids) if wanted.channel_ids is not None else None
    pattern = wanted.topic_pattern

    def matches(message: Message) -> bool:
        return (
            (channels is None or message.channel_id in channels)
            and (wanted.sender is None or message.sender == wanted.sender)
            and (types is None or message.message_type in types)
            and (wanted.after is None or message.created_at > wanted.after)
            and (wanted.before is None or message.created_at < wanted.before)
            and (statuses is None or message.status in statuses)
            and (priorities is None or message.priority in priorities)
            and (wanted.correlation_id is None or message.correlation_id == wanted.correlation_id)
            and (
                pattern is None
                or (message.topic is not None and topics.matches(message.topic, pattern))
            )
            and (wanted.include_archived or message.status is not MessageStatus.ARCHIVED)
        )

    return matches


def compile_pattern(pattern: str) -> re2._Regexp[str]:
    """The compiled content pattern.

    Errors: ValidationFailed for an invalid pattern, for what RE2 does not support (look-around,
    back references), and for one that is too large.
    """
    try:
        return re2.compile(pattern, _RE2)
    except (re2.error, UnicodeEncodeError) as exc:
        reason = exc.args[0].decode(errors="replace") if isinstance(exc, re2.error) else str(exc)
        shown = pattern if len(pattern) <= _SHOWN_PATTERN else pattern[:_SHOWN_PATTERN] + "…"
        text = f"{shown!r} is not a valid RE2 pattern: {reason[:80]!r}"
        raise ValidationFailed("content_pattern", text, len(pattern)) from exc


def find(messages: Iterable[Message], wanted: MessageFilter) -> list[Message]:
    """Those of ``messages`` that match, in their order, without limit and offset.

    ``wanted`` is one that ``check_filter`` takes. Errors: ValidationFailed for a content pattern
    that is invalid all the same: a file of another writer may hold one.
    """
    found = list(filter(make_predicate(wanted), messages))
    if wanted.content_pattern is not None:
        search = compile_pattern(wanted.content_pattern).search
        found = [m for m in found if search(m.content.decode(errors="replace"))]
    return found


def select(
    messages: Iterable[Message], wanted: MessageFilter, rank: Rank | None = None
) -> QueryResult:
    """The page of ``messages`` that a filter asks for, one that ``check_filter`` takes.

    ``rank``: of ``page``. Errors: those of ``find``.
    """
    found = find(messages, wanted)
    return page(found, wanted, len(found), rank)


def page(
    found: list[Message], wanted: MessageFilter, total: int, rank: Rank | None = None
) -> QueryResult:
    """The page of what matched, ``total`` in all; ``found`` has at least those that are on it.

    ``rank``: what is grouped by before the filter's order.
    """
    sort(found, wanted, rank)
    end = wanted.offset + wanted.limit
    return QueryResult(found[wanted.offset : end], total, total > end)


def sort(found: list[Message], wanted: MessageFilter, rank: Rank | None) -> None:
    """Put messages into the filter's order, inside each ``rank`` where there is one.

    A filter that asks for an order by priority has that order, whatever their ranks.
    """
    field, order = wanted.order
    found.sort(key=_SORT_KEYS[field], reverse=order is SortOrder.DESCENDING)
    if rank is not None and field is not SortField.PRIORITY:
        found.sort(key=rank)


# Ties are broken by id, so that a page is the same each time it is asked for.
_SORT_KEYS: dict[SortField, Callable[[Message], tuple[object, ...]]] = {
    SortField.CREATED_AT: lambda m: (m.created_at, m.id),
    SortField.PRIORITY: lambda m: (m.priority, m.id),
    SortField.SENDER: lambda m: (m.sender, m.id),
    SortField.MESSAGE_TYPE: lambda m: (m.message_type, m.id),
}


CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
T = TypeVar("T", int, tuple[int, int])


class MessageIndex:
    """Ids of messages by channel, sender, topic, thread and time; ids ascending."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._new = list(messages)  # not in a chunk yet
        self._chunks: dict[int, _Chunk] = {}

    def add(self, message: Message) -> None:
        """Note a message."""
        self._new.append(message)
        if len(self._new) >= CHUNK:  # a little now and then, not everything when first asked
            self._distribute()

    def remove(self, messages: Iterable[Message]) -> None:
        """Let messages go."""
        self._distribute()
        for message in messages:
            number = message.id >> CHUNK_BITS
            chunk = self._chunks[number]
            chunk.gone.add(message.id)
            if len(chunk.gone) == chunk.held:
                del self._chunks[number]

    def channel(self, channel_id: int) -> Iterator[int]:
        """Ids of the messages in this channel; no further than they are asked for."""
        for chunk in self._settled():
            yield from chunk.left(chunk.channel.get(channel_id))

    def thread(self, correlation_id: str) -> list[int]:
        """Ids of the messages with this correlation id."""
        return [
            n for chunk in self._settled() for n in chunk.left(chunk.thread.get(correlation_id))
        ]

    def candidates(self, wanted: MessageFilter) -> Iterator[int]:
        """Ids among which every match is; as few as one index of each chunk can tell."""
        for chunk in self._settled():
            yield from chunk.left(chunk.candidates(wanted))

    def _settled(self) -> Iterator[_Chunk]:
        self._distribute()
        for number in sorted(self._chunks):
            chunk = self._chunks[number]
            chunk.settle()
            yield chunk

    def _distribute(self) -> None:
        if not self._new:
            return
        for message in self._new:
            number = message.id >> CHUNK_BITS
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = _Chunk()
            chunk.add(message)
        self._new = []


class _Chunk:
    """The index of up to 4,096 neighbours."""

    __slots__ = ("channel", "gone", "held", "new", "sender", "thread", "time", "topic")

    def __init__(self) -> None:
        self.channel: dict[int, list[int]] = {}
        self.sender: dict[str, list[int]] = {}
        self.topic: dict[str, list[int]] = {}
        self.thread: dict[str, list[int]] = {}
        self.time: list[tuple[int, int]] = []  # (created_at, id)
        self.new: list[Message] = []  # not taken in yet
        self.gone: set[int] = set()  # still in the lists
        self.held = 0  # messages ever added, those that are gone among them

    def add(self, message: Message) -> None:
        if message.id in self.gone:  # it is back, and in the lists still: nothing of it changes
            self.gone.discard(message.id)
            return
        self.new.append(message)
        self.held += 1

    def left(self, ids: Sequence[int] | None) -> Iterable[int]:
        """Those of ``ids`` that are not gone."""
        if not ids or not self.gone:
            return ids or ()
        gone = self.gone
        return [number for number in ids if number not in gone]

    def candidates(self, wanted: MessageFilter) -> Sequence[int]:
        lists: list[Sequence[int]] = []
        if wanted.sender is not None:
            lists.append(self.sender.get(wanted.sender, ()))
        if wanted.correlation_id is not None:
            lists.append(self.thread.get(wanted.correlation_id, ()))
        if wanted.topic_pattern is not None and not set(wanted.topic_pattern) & {"*", "#"}:
            lists.append(self.topic.get(wanted.topic_pattern, ()))
        if wanted.channel_ids is not None and len(wanted.channel_ids) == 1:
            lists.append(self.channel.get(wanted.channel_ids[0], ()))
        if wanted.after is not None or wanted.before is not None or not lists:
            first, end = self._time_bounds(wanted)
            if not lists or end - first < min(map(len, lists)):
                return [number for _, number in self.time[first:end]]
        return min(lists, key=len)

    def _time_bounds(self, wanted: MessageFilter) -> tuple[int, int]:
        first, end = 0, len(self.time)
        if wanted.after is not None:
            first = bisect_right(self.time, (wanted.after, 1 << 64))
        if wanted.before is not None:
            end = bisect_left(self.time, (wanted.before, 0))
        return first, max(first, end)

    def settle(self) -> None:
        """Take in what is new, a column at a time."""
        if not self.new:
            return
        new = sorted(self.new, key=attrgetter("id"))
        self.new = []
        numbers = [message.id for message in new]
        _put(self.channel, [message.channel_id for message in new], numbers)
        _put(self.sender, [message.sender for message in new], numbers)
        _put(self.topic, [message.topic for message in new], numbers)
        _put(self.thread, [message.correlation_id for message in new], numbers)
        for entry in sorted((message.created_at, message.id) for message in new):
            _append(self.time, entry)


def _put(index: dict[Any, list[int]], keys: Iterable[object], numbers: list[int]) -> None:
    """Add each number under the key at its position; None is not a key."""
    for key, number in zip(keys, numbers, strict=True):
        if key is not None:
            _append(index.setdefault(key, []), number)


def _append(ordered: list[T], entry: T) -> None:
    """Nearly always behind all others; not when the clock was set back."""
    if ordered and ordered[-1] > entry:
        insort(ordered, entry)
    else:
        ordered.append(entry)


def is_index_query(wanted: MessageFilter) -> bool:
    """True when the indexes alone can tell what matches."""
    return (
        wanted.message_types is None
        and wanted.status is None
        and wanted.priority is None
        and wanted.content_pattern is None
    )


def index_lookups(
    wanted: MessageFilter,
) -> Iterator[Callable[[Indexes], Iterable[int] | None]]:
    """For each criterion that an index serves: its ids, None when the file lacks the index."""

    def keyed(index: dict[str, Ids] | None, key: str) -> Iterable[int] | None:
        return None if index is None else index.get(key, ())

    if wanted.channel_ids is not None:
        channels = wanted.channel_ids
        yield (
            lambda one: (
                None
                if one.channel is None
                else [i for c in channels for i in one.channel.get(c, ())]
            )
        )
    if (sender := wanted.sender) is not None:
        yield lambda one: keyed(one.sender, sender)
    if (thread := wanted.correlation_id) is not None:
        yield lambda one: keyed(one.correlation, thread)
    if (pattern := wanted.topic_pattern) is not None:
        yield (
            lambda one: (
                None
                if one.topic is None
                else [i for t, ids in one.topic.items() if topics.matches(t, pattern) for i in ids]
            )
        )


def in_time_range(at: int, wanted: MessageFilter) -> bool:
    return (wanted.after is None or at > wanted.after) and (
        wanted.before is None or at < wanted.before
    )


def is_outside(note: ArchiveInfo, wanted: MessageFilter) -> bool:
    """True when the whole archive is before or behind what is asked for."""
    return (wanted.after is not None and note.last_at <= wanted.after) or (
        wanted.before is not None and note.first_at >= wanted.before
    )


def is_within(note: ArchiveInfo, wanted: MessageFilter) -> bool:
    """True when no message of the archive is outside the time asked for."""
    return in_time_range(note.first_at, wanted) and in_time_range(note.last_at, wanted)
