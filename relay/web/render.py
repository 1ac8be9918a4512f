"""Facts as pages: every value is text, and what cannot be seen of it is an escape."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup, escape

from relay.base.clock import NS_PER_S, iso_time, local_time, parse_time
from relay.base.discovery import default_home, with_home
from relay.base.text import format_size, plural, visible
from relay.views.times import ago

HERE = os.path.dirname(__file__)
STATIC = {
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_ID = re.compile(r"(?<![/\w])[0-9]{16,20}-[0-9a-f]{8,32}\b")
MOST_LINE = 400  # characters; what does not fit is cut by the browser
SHORT = 8  # hex digits of an id
# the first word of an outcome -> how a badge looks
_LOOKS = {
    "good": ("completed", "handled", "read", "active", "working", "ok"),
    "open": ("in", "waiting", "held", "not", "blocked", "unread", "idle"),
    "bad": (
        *("failed", "refused", "bounced", "expired", "dead", "unanswered", "overdue", "removed"),
        *("terminated", "silent", "error", "failing", "ended"),
    ),
}


def environment(root: str) -> jinja2.Environment:
    """The templates, which escape all that they are given; their commands are for this home."""
    is_usual = root == default_home()
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.join(HERE, "templates")),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "at": at,
        "age": age,
        "badge": badge,
        "clock": clock,
        "day": day,
        "one_line": one_line,
        "linked": linked,
        "short": short,
        "size": format_size,
        "here": lambda text: text if is_usual else with_home(text, root),
        "with_short_ids": lambda text: _ID.sub(lambda match: short(match[0]), text),
    }
    found.globals |= {"plural": plural, "href": href}
    return found


def shown(value: object) -> object:
    """A value as it is seen: nothing for None; no text that hides, moves or reverses another."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value, keep="\n\t")
    return "" if value is None else value


def at(value: int | str | None, now_ns: int) -> Markup:
    """A time of a row: Unix ns, or ISO 8601."""
    if value is None:
        return Markup("")
    at_ns = parse_time(value) if isinstance(value, str) else value
    return _time(at_ns, local_time(at_ns, now_ns))


def age(value: int | str | None, now_ns: int) -> Markup:
    """The age of a time; the time itself when it is pointed at."""
    if value is None:
        return Markup("")
    at_ns = parse_time(value) if isinstance(value, str) else value
    return _time(at_ns, ago(at_ns, now_ns))


def _time(at_ns: int, text: str) -> Markup:
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        iso_time(at_ns), local_time(at_ns, precise=True), text
    )


def day(value: str) -> str:
    """The day of an ISO 8601 time, here."""
    return time.strftime("%Y-%m-%d %Z", time.localtime(parse_time(value) // NS_PER_S)).strip()


def clock(value: str | None) -> str:
    """The time of day of an ISO 8601 time, here, with milliseconds."""
    if value is None:
        return "unknown"
    return local_time(parse_time(value), precise=True).partition(" ")[2][:12]


def badge(text: str | None) -> str:
    """The class of a badge for an outcome or a state."""
    word = (text or "").partition(" ")[0].rstrip(":,")
    return next((look for look, words in _LOOKS.items() if word in words), "plain")


def one_line(text: str | None) -> str:
    """The beginning of a text, in one line."""
    return " ".join((text or "")[:MOST_LINE].split())


def linked(text: str | None) -> Markup:
    """A text in which ids of messages are links."""
    found, at_char = Markup(""), 0
    for match in _ID.finditer(text or ""):
        found += escape(shown((text or "")[at_char : match.start()]))
        found += Markup('<a href="/m/{0}">{1}</a>').format(match[0], short(match[0]))
        at_char = match.end()
    return found + escape(shown((text or "")[at_char:]))


def short(message_id: str | None) -> str:
    """The digits by which a message is called."""
    digits = (message_id or "").partition("-")[2]
    return digits[:SHORT] if len(digits) >= SHORT else message_id or ""


def href(path: str, **query: object) -> str:
    """An address with a query; what is empty is left out."""
    given = urlencode({name: value for name, value in query.items() if value not in (None, "", 0)})
    return f"{path}?{given}" if given else path


def as_json(facts: Mapping[str, Any]) -> bytes:
    """The facts of a page for a program."""
    return json.dumps(facts, ensure_ascii=True, default=str).encode() + b"\n"


def static(path: str) -> tuple[bytes, str]:
    """The content of a static file and its type."""
    name, kind = STATIC[path]
    with open(os.path.join(HERE, "static", name), "rb") as file:
        return file.read(), kind
