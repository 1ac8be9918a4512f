"""Queries over messages: what indexes have narrowed, predicates decide, and the regex comes last.

Every given criterion must match. A content pattern is bounded in size, and matched with a time
limit for the whole query, so that no pattern can hold the engine up. Source: message-engine.txt,
"Receive Pipeline"; data-structures.txt, "MessageFilter" and "Index Structures".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from relay.acomm.model import Message, MessageFilter, MessageStatus, SortField, SortOrder
from relay.base.errors import QueryTimeout, ValidationFailed
from relay.engine import patterns, topics, validation

REGEX_LIMIT_S = 2.0  # for one query, however many messages it looks at
FILTER_LIMIT_S = 0.1  # for one message and one subscriber's filter: a publisher waits for it


Rank = Callable[[Message], int]  # the group of a message: its priority, where that is heeded


class QueryResult(NamedTuple):
    """One page of what matched."""

    messages: list[Message]
    total_count: int  # before limit and offset
    has_more: bool


def check_filter(wanted: MessageFilter) -> MessageFilter:
    """The filter itself, when a subscription in a file can have it.

    Errors: ValidationFailed for a value that is none, and for a pattern that is none.
    """
    if not isinstance(wanted, MessageFilter):
        raise ValidationFailed("filter", f"{wanted!r} is no MessageFilter")
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
        patterns.compiled(wanted.content_pattern)
    return MessageFilter(**values)


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

    ``wanted`` is one that ``check_filter`` takes.
    Errors: QueryTimeout when the content pattern takes longer than ``limit_s``
    (REGEX_LIMIT_S) in all.
    """
    found = list(filter(matching(wanted), messages))
    if wanted.content_pattern is not None:
        limit_s = REGEX_LIMIT_S if limit_s is None else limit_s
        found = list(_with_content(found, wanted.content_pattern, limit_s))
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


def _with_content(messages: Iterable[Message], pattern: str, limit_s: float) -> Iterator[Message]:
    compiled = patterns.compiled(pattern)
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


# Ties are broken by id, so that a page is the same each time it is asked for.
_SORT_KEYS: dict[SortField, Callable[[Message], tuple[object, ...]]] = {
    SortField.CREATED_AT: lambda m: (m.created_at, m.id),
    SortField.PRIORITY: lambda m: (m.priority, m.id),
    SortField.SENDER: lambda m: (m.sender, m.id),
    SortField.MESSAGE_TYPE: lambda m: (m.message_type, m.id),
}
