"""The fields of channel commands as text: settings, and the filter of a subscription.

    MAX_PENDING: 10 · RETENTION: count 100 · TAGS: ci, build
    FILTER: sender=ci priority=0,1 type=Command match=REGEX

Each term of a filter narrows what the pattern matches; all must hold. ``match`` comes last and
extends to the end of the line.
"""

from __future__ import annotations

from relay.acomm.model import (
    ChannelConfig,
    DeliveryMode,
    MessageFilter,
    MessageType,
    Priority,
    Retention,
    RetentionKind,
)
from relay.base.errors import Refused
from relay.base.message import DELIVERY_MODES, DIGITS
from relay.base.names import is_agent_name
from relay.engine.query import check_filter

# Those after the fields of ChannelConfig are stored elsewhere; the engine validates them.
SETTINGS = (*ChannelConfig.__struct_fields__, "max_pending", "description", "tags")
RETENTION_WORDS = tuple(kind.name.lower() for kind in RetentionKind)
FORM = "sender=NAME, type=Command,Query, priority=0,1 and, last, match=REGEX"
_YES_OR_NO = ("echo", "sticky_messages", "priority_ordering")
_OPTIONAL = ("max_participants", "ack_timeout", "max_pending")
_EXPECTED = dict.fromkeys(_YES_OR_NO, "true or false") | {
    "ack_timeout": "seconds or a duration such as 30s, or none",
    "retry_backoff_ms": "milliseconds or a duration such as 2s",
}
_TYPES = {kind.label.lower(): kind for kind in MessageType}
_PRIORITIES = {str(int(priority)): priority for priority in Priority}


def settings_of(given: dict[str, str]) -> dict[str, object]:
    """Settings as the engine takes them; the engine checks the values. Errors: Refused."""
    unknown = [name for name in given if name not in SETTINGS]
    if unknown:
        raise Refused(f"setting {unknown[0]} does not exist: expected one of {', '.join(SETTINGS)}")
    return {name: _value(name, text) for name, text in given.items()}


def _value(name: str, text: str) -> object:
    if name == "delivery":
        if text.lower() not in DELIVERY_MODES:
            raise Refused(f"delivery {text[:60]!r} is not one of {', '.join(DELIVERY_MODES)}")
        return DeliveryMode(DELIVERY_MODES.index(text.lower()))
    if name == "retention":
        return _retention(text)
    if name == "description":
        return None if text.lower() == "none" else text
    if name == "tags":
        return () if text.lower() == "none" else tuple(tag.strip() for tag in text.split(","))
    words: dict[str, object] = {"none": None} if name in _OPTIONAL else {}
    if name in _YES_OR_NO:
        words = {"true": True, "false": False}
    elif DIGITS.fullmatch(text):
        return int(text)
    if text.lower() not in words:
        number = "a whole number of at most 18 digits" + (", or none" if words else "")
        raise Refused(f"{name}: expected {_EXPECTED.get(name, number)}, got {text[:60]!r}")
    return words[text.lower()]


def _retention(text: str) -> Retention:
    word, _, amount = text.lower().partition(" ")
    is_forever = word == RETENTION_WORDS[RetentionKind.FOREVER]
    is_amount = bool(DIGITS.fullmatch(amount.strip())) and int(amount) > 0
    if word not in RETENTION_WORDS or is_forever == is_amount or (is_forever and amount):
        raise Refused(
            f"retention {text[:60]!r} is not one of forever, duration SECONDS, count MESSAGES, "
            "size BYTES"
        )
    return Retention(RetentionKind(RETENTION_WORDS.index(word)), int(amount or 0))


def filter_of(text: str) -> MessageFilter | None:
    """Parse a FILTER line; None for an empty one, or `none`.

    Errors: Refused with one line that names the term; ValidationFailed for an invalid regular
    expression.
    """
    rest = text.strip()
    if rest.lower() in ("", "none"):
        return None
    given: dict[str, str] = {}
    while rest:
        name, _, value = rest.partition("=")
        name = name.strip().lower()
        if name != "match":
            value, _, rest = value.partition(" ")
        if name not in ("sender", "type", "priority", "match") or not value or name in given:
            raise _refused(text, f"{name}={value}" if value else name)
        given[name] = value
        rest = "" if name == "match" else rest.strip()
    sender, types, priorities = (given.get(name) for name in ("sender", "type", "priority"))
    if sender is not None and not is_agent_name(sender):
        raise _refused(text, f"sender={sender}")
    for name, words, known in (("type", types, _TYPES), ("priority", priorities, _PRIORITIES)):
        for word in words.split(",") if words else ():
            if word.lower() not in known:
                raise _refused(text, f"{name}={word}")
    return check_filter(
        MessageFilter(
            sender=sender,
            message_types=tuple(_TYPES[w.lower()] for w in types.split(",")) if types else None,
            priority=tuple(_PRIORITIES[w] for w in priorities.split(",")) if priorities else None,
            content_pattern=given.get("match"),
        )
    )


def in_words(wanted: MessageFilter | None) -> str:
    """Format a filter; empty for None."""
    if wanted is None:
        return ""
    types = ",".join(kind.label for kind in wanted.message_types or ())
    priorities = ",".join(str(int(priority)) for priority in wanted.priority or ())
    named = (
        ("sender", wanted.sender),
        ("type", types),
        ("priority", priorities),
        ("match", wanted.content_pattern),
    )
    return " ".join(f"{name}={value}" for name, value in named if value)


def where(wanted: MessageFilter | None) -> str:
    """The part of a reply that names a subscription's filter."""
    return "" if wanted is None else f", where {in_words(wanted)}"


def _refused(text: str, word: str) -> Refused:
    return Refused(f"FILTER {text[:80]!r}: expected {FORM}, got {word[:60]!r}")
