"""Which messages of a store file are asked for: by option, and by what Spark pushes down.

A condition decides three times: whether a file has any such message (by the texts that its
columns or indexes name, once its checksum was found right), which rows are sent to Spark, and,
where it came from a query, once more in Spark itself. An option is decided here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from relay.acomm.indexes import Indexes
from relay.acomm.model import Channel, MessageStatus
from relay.audit.acomm_arrow import LAST_SECOND, MICROS, TIME, MessageTable
from relay.base.errors import RelayError

WORDS = ("sender", "channel", "status")
OPTIONS = ("since", "until", *WORDS)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
}
_PUSHED: dict[type, str] = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


class Condition(NamedTuple):
    """One of several that a message must all meet."""

    column: str  # created_at or one of WORDS
    how: str  # in, >, >=, <, <=
    values: tuple[str, ...] | tuple[int]  # texts; of created_at, Unix microseconds

    def mask(self, array: pa.Array) -> pa.Array:
        """True where a value of the column meets it; never for NULL."""
        kind = TIME if self.column == "created_at" else pa.string()
        if self.how == "in":
            return pc.is_in(array, pa.array(self.values, kind), skip_nulls=True)
        found = _COMPARISONS[self.how](array, pa.scalar(self.values[0], kind))
        return pc.fill_null(found, False)

    def meets_any(self, values: Iterable[Any]) -> bool:
        """Whether one of these values does."""
        kind = TIME if self.column == "created_at" else pa.string()
        return bool(pc.any(self.mask(pa.array(values, kind)), min_count=0).as_py())


def of_options(options: Mapping[str, str]) -> tuple[Condition, ...]:
    """The conditions of the options. Errors: RelayError for a time or status that is none."""
    found = []
    for name, how in (("since", ">="), ("until", "<")):
        if name in options:
            found.append(Condition("created_at", how, (_micros_of(name, options[name]),)))
    for name in WORDS:
        if name in options:
            found.append(Condition(name, "in", _words(name, options[name])))
    return tuple(found)


def of_filter(one: Filter) -> Condition | None:
    """The condition that a pushed filter is; None when it is not one for us to decide."""
    column = ".".join(one.attribute) if hasattr(one, "attribute") else ""
    if column != "created_at" and column not in WORDS:
        return None
    if isinstance(one, In):
        values = one.value
    elif isinstance(one, EqualTo | EqualNullSafe):
        values = (one.value,)
    elif type(one) in _PUSHED:
        values = (one.value,)
    else:
        return None
    if column == "created_at":
        if not all(isinstance(value, datetime) for value in values):
            return None
        values = tuple(_micros(value) for value in values)
    elif not all(isinstance(value, str) for value in values):
        return None
    return Condition(column, _PUSHED.get(type(one), "in"), values)


def rows_of(table: MessageTable, conditions: Iterable[Condition]) -> pa.Array | None:
    """The numbers of the messages that meet them all; None when all do."""
    wanted = list(conditions)
    for one in wanted:
        known = table.distinct(one.column)
        if known is not None and not pc.any(one.mask(known), min_count=0).as_py():
            return pa.array([], pa.uint64())
    mask = None
    for one in wanted:
        more = one.mask(table.column(one.column))
        mask = more if mask is None else pc.and_(mask, more)
        if not pc.any(mask, min_count=0).as_py():
            return pa.array([], pa.uint64())
    return None if mask is None or pc.all(mask).as_py() else pc.indices_nonzero(mask)


def may_have(found: Indexes, channels: Iterable[Channel], conditions: Iterable[Condition]) -> bool:
    """Whether a file with these indexes may hold a message that meets the conditions.

    An index that is absent decides nothing.
    """
    names = {channel.id: channel.name for channel in channels}
    for one in conditions:
        values: Iterable[Any] | None = None
        if one.column == "sender" and found.sender is not None:
            values = list(found.sender)
        elif one.column == "channel" and found.channel is not None:
            values = [names.get(ident) for ident in found.channel]
        elif one.column == "created_at" and found.timestamp is not None:
            seconds = [at for at, _ in found.timestamp]
            values = [at * MICROS for at in seconds if at <= LAST_SECOND]
        if values is not None and not one.meets_any(values):
            return False
    return True


def _words(name: str, text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    labels = [status.label for status in MessageStatus]
    for word in words:
        if name == "status" and word not in labels:
            raise RelayError(f"status {word!r} is none of {', '.join(labels)}")
    if not words:
        raise RelayError(f"option {name} names nothing: one or several, divided by commas")
    return words


def _micros_of(name: str, text: str) -> int:
    try:
        return _micros(datetime.fromisoformat(text.strip()))
    except ValueError:
        raise RelayError(
            f"option {name} is {text!r}, not a time such as 2026-01-31 or 2026-01-31T09:30:00Z"
        ) from None


def _micros(at: datetime) -> int:
    """Unix microseconds; a time without a zone is UTC."""
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    since = at - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * MICROS + since.microseconds
