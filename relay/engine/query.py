"""Queries: filters, content patterns, pages.

Indexes narrow the candidates, predicates decide, and the content pattern comes last. Patterns are
RE2's: matching takes time linear in the content; the size of the pattern is a factor of it, and is
bounded. What subscriptions ask of each message is bounded again (``relay.engine.routing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import re2

from relay.acomm.model import (
    ArchiveInfo,
    Message,
    MessageFilter,
    MessageStatus,
    SortField,
    SortOrder,
)
from relay.base.errors import ValidationFailed
from relay.engine import rules

_SHOWN_PATTERN = 150  # characters of a pattern in an error
_RE2 = re2.Options()
_RE2.never_capture = True  # capturing groups makes RE2 slow on long texts
_RE2.log_errors = False
_BOUNDED = re2.Options()  # of new filters: 20 us a byte at most; a usual one takes nanoseconds
_BOUNDED.never_capture = True
_BOUNDED.log_errors = False
_BOUNDED.max_mem = 2 << 20
# A pattern without these is a plain text, and matches no replaced invalid byte.
_NOT_PLAIN = frozenset("\\^$.|?*+()[]{}\ufffd")

Rank = Callable[[Message], int]  # the group of a message: its priority, where that is heeded


class QueryResult(NamedTuple):
    """One page of what matched."""

    messages: list[Message]
    total_count: int  # before limit and offset
    has_more: bool


def check_filter(wanted: MessageFilter) -> MessageFilter:
    """The filter itself, if a file can hold it in a subscription.

    Errors: ValidationFailed for an invalid value or pattern.
    """
    if not isinstance(wanted, MessageFilter):
        raise ValidationFailed("filter", f"expected a MessageFilter, got {wanted!r}")
    values = rules.fields_of(wanted)
    numbers = [(name, values[name]) for name in ("limit", "offset", "after", "before")]
    numbers += [("channel_ids", number) for number in values["channel_ids"] or ()]
    for name, number in numbers:
        if number is not None and not 0 <= number < 2**64:
            raise ValidationFailed(name, f"{number} is not a number from 0 to {2**64 - 1}")
    for name in ("sender", "correlation_id", "topic_pattern", "content_pattern"):
        if values[name] is not None:
            rules.check_text(name, values[name])
    if wanted.topic_pattern is not None:
        rules.match_mode(wanted.topic_pattern)
    if wanted.content_pattern is not None:
        compile_pattern(wanted.content_pattern, _BOUNDED)
    return MessageFilter(**values)


def make_predicate(wanted: MessageFilter) -> Callable[[Message], bool]:
    """A predicate for all criteria except the content pattern."""
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
                or (message.topic is not None and rules.topic_matches(message.topic, pattern))
            )
            and (wanted.include_archived or message.status is not MessageStatus.ARCHIVED)
        )

    return matches


def compile_pattern(pattern: str, options: re2.Options = _RE2) -> re2._Regexp[bytes]:
    """The compiled content pattern, for UTF-8: the binding is slower on texts.

    Errors: ValidationFailed for an invalid pattern, for what RE2 does not support (look-around,
    back references), and for one that is too large.
    """
    try:
        return re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as exc:
        reason = exc.args[0].decode(errors="replace") if isinstance(exc, re2.error) else str(exc)
        shown = pattern if len(pattern) <= _SHOWN_PATTERN else pattern[:_SHOWN_PATTERN] + "…"
        text = f"{shown!r} is not a valid RE2 pattern: {reason[:80]!r}"
        raise ValidationFailed("content_pattern", text, len(pattern)) from exc


def find(messages: Iterable[Message], wanted: MessageFilter) -> Iterator[Message]:
    """The matching ones of ``messages``, in their order, before limit and offset; lazily.

    ``wanted`` must be valid (``check_filter``). Errors: ValidationFailed for an invalid content
    pattern, which a file of another writer may hold.
    """
    found = filter(make_predicate(wanted), messages)
    pattern = wanted.content_pattern
    if pattern is None:
        return found
    search = compile_pattern(pattern).search
    if _NOT_PLAIN.isdisjoint(pattern):
        text = pattern.encode()
        return (m for m in found if text in m.content)
    return (m for m in found if search(_valid_utf8(m.content)))


def _valid_utf8(content: bytes) -> bytes:
    """The content; each invalid byte, which a file of another writer may hold, is replaced."""
    return content if content.isascii() else content.decode(errors="replace").encode()


def select(
    messages: Iterable[Message], wanted: MessageFilter, rank: Rank | None = None
) -> QueryResult:
    """The page of ``messages`` that a valid filter (``check_filter``) selects.

    ``rank``: the group of a message; groups are sorted before the filter's order applies. Errors:
    those of ``find``.
    """
    found = list(find(messages, wanted))
    sort(found, wanted, rank)
    end = wanted.offset + wanted.limit
    return QueryResult(found[wanted.offset : end], len(found), len(found) > end)


def sort(found: list[Message], wanted: MessageFilter, rank: Rank | None) -> None:
    """Sort messages in the filter's order, within each ``rank`` if given.

    A filter that sorts by priority takes precedence over ranks.
    """
    field, order = wanted.order
    found.sort(key=_SORT_KEYS[field], reverse=order is SortOrder.DESCENDING)
    if rank is not None and field is not SortField.PRIORITY:
        found.sort(key=rank)


# Ties are broken by id, so that a page is the same each time.
_SORT_KEYS: dict[SortField, Callable[[Message], tuple[object, ...]]] = {
    SortField.CREATED_AT: lambda m: (m.created_at, m.id),
    SortField.PRIORITY: lambda m: (m.priority, m.id),
    SortField.SENDER: lambda m: (m.sender, m.id),
    SortField.MESSAGE_TYPE: lambda m: (m.message_type, m.id),
}


def is_outside(note: ArchiveInfo, wanted: MessageFilter) -> bool:
    """True when the whole archive is outside the filter's time range."""
    return (wanted.after is not None and note.last_at <= wanted.after) or (
        wanted.before is not None and note.first_at >= wanted.before
    )
