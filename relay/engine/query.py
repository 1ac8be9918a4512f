"""Queries over messages: what indexes have narrowed, predicates decide, and the regex comes last.

Every given criterion must match. Content patterns are RE2's: matching takes time linear in the
content, so no pattern can block the engine. Source: message-engine.txt, "Receive Pipeline";
data-structures.txt, "MessageFilter" and "Index Structures".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import re2

from relay.acomm.model import Message, MessageFilter, MessageStatus, SortField, SortOrder
from relay.base.errors import ValidationFailed
from relay.engine import topics, validation

_SHOWN_PATTERN = 200  # characters of a pattern in an error
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
        text = f"{shown!r} is not a valid RE2 pattern: {reason[:_SHOWN_PATTERN]!r}"
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
