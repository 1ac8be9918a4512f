"""Subscription filters as text: `sender=ci priority=0,1 type=Command match=REGEX`.

Each term narrows what the pattern matches; all must hold. ``match`` comes last and extends to the
end of the line.
"""

from __future__ import annotations

from relay.acomm.model import MessageFilter, MessageType, Priority
from relay.base.errors import Refused
from relay.base.names import is_agent_name
from relay.engine.query import check_filter

FORM = "sender=NAME, type=Command,Query, priority=0,1 and, last, match=REGEX"
_TYPES = {kind.label.lower(): kind for kind in MessageType}
_PRIORITIES = {str(int(priority)): priority for priority in Priority}


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
