"""Queries over the live messages: indexes narrow, predicates decide, the regex comes last.

Every given criterion must match. The smallest index list that a filter names is walked; time
bounds cut the time index by binary search. A content pattern is matched with a time limit for
the whole query, so that no pattern can hold the engine up. Source: message-engine.txt,
"Receive Pipeline"; data-structures.txt, "MessageFilter" and "Index Structures".
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import regex

from relay.comm import topics
from relay.comm.model import (
    Message,
    MessageFilter,
    MessageStatus,
    SortField,
    SortOrder,
)
from relay.errors import QueryTimeout, ValidationFailed

REGEX_LIMIT_S = 2.0  # for one query, however many messages it looks at
FILTER_LIMIT_S = 0.1  # for one message and one subscriber's filter: a publisher waits for it
_MANY = 64


T = TypeVar("T", int, tuple[int, int])


class QueryResult(NamedTuple):
    """One page of what matched."""

    messages: list[Message]
    total_count: int  # before limit and offset
    has_more: bool


class MessageIndex:
    """Ids of the live messages by channel, sender, topic, thread and time; ids ascending.

    Messages are taken in when the index is first asked for something, all at once: opening a
    store and sending wait for no index.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._channel: dict[int, list[int]] = {}
        self._sender: dict[str, list[int]] = {}
        self._topic: dict[str, list[int]] = {}
        self._thread: dict[str, list[int]] = {}
        self._time: list[tuple[int, int]] = []  # (created_at, id)
        self._new = list(messages)  # those not taken in yet

    def add(self, message: Message) -> None:
        """Note a message."""
        self._new.append(message)

    def remove(self, messages: Sequence[Message]) -> None:
        """Let messages go that left the live store."""
        self._settle()
        if len(messages) > _MANY:  # once through each list, not once for each message
            gone = {message.id for message in messages}
            for ids in {id(ids): ids for m in messages for ids in self._lists(m)}.values():
                ids[:] = [number for number in ids if number not in gone]
            self._time = [entry for entry in self._time if entry[1] not in gone]
            return
        for message in messages:
            for ids in self._lists(message):
                del ids[bisect_left(ids, message.id)]
            del self._time[bisect_left(self._time, (message.created_at, message.id))]

    def channel(self, channel_id: int) -> Sequence[int]:
        """Ids of the messages in this channel."""
        self._settle()
        return self._channel.get(channel_id, ())

    def thread(self, correlation_id: str) -> Sequence[int]:
        """Ids of the messages with this correlation id."""
        self._settle()
        return self._thread.get(correlation_id, ())

    def candidates(self, wanted: MessageFilter) -> Iterable[int]:
        """Ids among which every match is; as few as one index can tell."""
        self._settle()
        lists: list[Sequence[int]] = []
        if wanted.sender is not None:
            lists.append(self._sender.get(wanted.sender, ()))
        if wanted.correlation_id is not None:
            lists.append(self._thread.get(wanted.correlation_id, ()))
        if wanted.topic_pattern is not None and not set(wanted.topic_pattern) & {"*", "#"}:
            lists.append(self._topic.get(wanted.topic_pattern, ()))
        if wanted.channel_ids is not None and len(wanted.channel_ids) == 1:
            lists.append(self._channel.get(wanted.channel_ids[0], ()))
        if wanted.after is not None or wanted.before is not None or not lists:
            first, end = self._time_bounds(wanted)
            if not lists or end - first < min(map(len, lists)):
                return (number for _, number in self._time[first:end])
        return min(lists, key=len)

    def _time_bounds(self, wanted: MessageFilter) -> tuple[int, int]:
        first, end = 0, len(self._time)
        if wanted.after is not None:
            first = bisect_right(self._time, (wanted.after, 1 << 64))
        if wanted.before is not None:
            end = bisect_left(self._time, (wanted.before, 0))
        return first, max(first, end)

    def _lists(self, message: Message) -> Iterator[list[int]]:
        yield self._channel.setdefault(message.channel_id, [])
        yield self._sender.setdefault(message.sender, [])
        if message.topic is not None:
            yield self._topic.setdefault(message.topic, [])
        if message.correlation_id is not None:
            yield self._thread.setdefault(message.correlation_id, [])

    def _settle(self) -> None:
        """Take in what is new, a column at a time."""
        if not self._new:
            return
        new = sorted(self._new, key=attrgetter("id"))
        self._new = []
        numbers = [message.id for message in new]
        _put(self._channel, [message.channel_id for message in new], numbers)
        _put(self._sender, [message.sender for message in new], numbers)
        _put(self._topic, [message.topic for message in new], numbers)
        _put(self._thread, [message.correlation_id for message in new], numbers)
        for entry in sorted((message.created_at, message.id) for message in new):
            _append(self._time, entry)


def _put(index: dict[Any, list[int]], keys: Iterable[object], numbers: list[int]) -> None:
    """Note under each key the number beside it; None is no key."""
    for key, number in zip(keys, numbers, strict=True):
        if key is not None:
            _append(index.setdefault(key, []), number)


def _append(ordered: list[T], entry: T) -> None:
    """Nearly always behind all others; not when the clock was set back."""
    if ordered and ordered[-1] > entry:
        insort(ordered, entry)
    else:
        ordered.append(entry)


def check_filter(wanted: MessageFilter) -> None:
    """Errors: ValidationFailed for a topic pattern or a content pattern that is none."""
    if wanted.topic_pattern is not None:
        topics.match_mode(wanted.topic_pattern)
    if wanted.content_pattern is not None:
        _compiled(wanted.content_pattern)


def matching(wanted: MessageFilter) -> Callable[[Message], bool]:
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


def find(
    messages: Iterable[Message], wanted: MessageFilter, limit_s: float | None = None
) -> list[Message]:
    """Those of ``messages`` that match, in their order, without limit and offset.

    Errors: ValidationFailed for a bad pattern; QueryTimeout when the content pattern takes
    longer than ``limit_s`` (REGEX_LIMIT_S) in all.
    """
    check_filter(wanted)
    found = list(filter(matching(wanted), messages))
    if wanted.content_pattern is not None:
        found = list(_with_content(found, wanted.content_pattern, limit_s or REGEX_LIMIT_S))
    return found


def select(messages: Iterable[Message], wanted: MessageFilter) -> QueryResult:
    """The page of ``messages`` that a filter asks for. Errors: as ``find``."""
    found = find(messages, wanted)
    found.sort(key=_SORT_KEYS[wanted.sort_by], reverse=wanted.sort_order is SortOrder.DESCENDING)
    end = wanted.offset + wanted.limit
    return QueryResult(found[wanted.offset : end], len(found), len(found) > end)


def _with_content(messages: Iterable[Message], pattern: str, limit_s: float) -> Iterator[Message]:
    compiled = _compiled(pattern)
    deadline = time.monotonic() + limit_s
    for message in messages:
        left_s = deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            if compiled.search(message.content.decode(errors="replace"), timeout=left_s):
                yield message
        except TimeoutError as exc:
            raise QueryTimeout(
                f"content pattern {pattern!r} took longer than {limit_s:g} s"
            ) from exc


def _compiled(pattern: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern)
    except regex.error as exc:
        raise ValidationFailed("content_pattern", f"{pattern!r}: {exc}", len(pattern)) from exc


# Ties are broken by id, so that a page is the same each time it is asked for.
_SORT_KEYS: dict[SortField, Callable[[Message], tuple[object, ...]]] = {
    SortField.CREATED_AT: lambda m: (m.created_at, m.id),
    SortField.PRIORITY: lambda m: (m.priority, m.id),
    SortField.SENDER: lambda m: (m.sender, m.id),
    SortField.MESSAGE_TYPE: lambda m: (m.message_type, m.id),
}
