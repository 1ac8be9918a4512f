"""The query language of ``relay search``.

    deploy "disk full" from:alice to:bob thread:release-42 kind:command channel:ci
    is:unread is:dead is:owed has:attachment after:2h before:2026-11-20T18:30

Every word and every phrase must be in the text, as it is written: with its case, also inside of
a longer word. A key that is given repeatedly matches any of its values; different keys must all
match. A word with a colon whose beginning is not a key, and not nearly one, is a text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from relay.base.clock import NS_PER_S, parse_time
from relay.base.errors import InvalidQuery
from relay.base.names import uuid4_of
from relay.search.index import Entry

KEYS = ("from", "to", "thread", "re", "kind", "channel", "is", "has", "after", "before")
STATES = ("unread", "dead", "owed")  # the ledger knows them
_TOKEN = re.compile(
    r'\s*(?:(?P<key>[A-Za-z]+):)?(?:"(?P<quoted>[^"]*)"(?=\s|$)|(?P<word>\S+)|(?=\s|$))'
)
_CLOSE = 0.7  # how similar a misspelled key is
_HINT = "to search for a text with a colon, quote it: '\"{}\"'"


class Query(NamedTuple):
    """The conditions that a message meets to be found."""

    texts: tuple[str, ...] = ()  # all of them are in the text
    regex: str | None = None  # RE2: matches in the text
    senders: tuple[str, ...] = ()
    recipients: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()  # their ids in the store
    named_threads: tuple[str, ...] = ()  # as they were given
    beside: tuple[str, ...] = ()  # relay ids of messages whose threads are meant as well
    answered: tuple[str, ...] = ()  # relay ids that RE names
    kinds: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    states: tuple[str, ...] = ()  # of STATES
    with_attachment: bool = False
    after: int | None = None  # Unix seconds
    before: int | None = None
    like_keys: tuple[str, ...] = ()  # words before a colon that were taken as text


def parse(text: str, kinds: tuple[str, ...]) -> Query:
    """Parse a query. Errors: InvalidQuery, with the key it is about.

    ``kinds`` are those there are.
    """
    values: dict[str, list[str]] = {key: [] for key in KEYS}
    texts: list[str] = []
    like_keys: list[str] = []
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if found is None or found.end() == at:
            raise InvalidQuery(f"{text[at:].strip()!r} cannot be read as a query")
        at = found.end()
        key, quoted, word = found["key"], found["quoted"], found["word"]
        if quoted is None and (word or "").startswith('"'):
            raise InvalidQuery(f'{word}: the closing " is missing, or text follows it')
        value = quoted if quoted is not None else word or ""
        if key is None:
            texts.append(value)
        elif key.lower() in values and not value.startswith("//"):
            values[key.lower()].append(_checked(key.lower(), value, kinds))
        else:
            texts.append(_as_text(key, value, quoted is not None))
            like_keys.append(key)
    return Query(
        texts=tuple(filter(None, texts)),
        senders=tuple(values["from"]),
        recipients=tuple(values["to"]),
        threads=tuple(map(uuid4_of, values["thread"])),
        named_threads=tuple(values["thread"]),
        answered=tuple(values["re"]),
        kinds=tuple(values["kind"]),
        channels=tuple(name.removeprefix("#") for name in values["channel"]),
        states=tuple(values["is"]),
        with_attachment=bool(values["has"]),
        after=max(map(_seconds, values["after"]), default=None),
        before=min(map(_seconds, values["before"]), default=None),
        like_keys=tuple(like_keys),
    )


def _as_text(key: str, value: str, is_quoted: bool) -> str:
    """A word with a colon, as a text. Errors: InvalidQuery if it looks like a misspelled key."""
    close = difflib.get_close_matches(key.lower(), KEYS, 1, _CLOSE)
    whole = f"{key}:{value}"
    if (close or is_quoted) and not value.startswith("//"):
        meant = f"perhaps {close[0]}:" if close else f"expected {', '.join(KEYS)}"
        raise InvalidQuery(f"unknown key {key}: ({meant})", hint=_HINT.format(whole))
    return whole


def _checked(key: str, value: str, kinds: tuple[str, ...]) -> str:
    """A key's value. Errors: InvalidQuery."""
    if not value:
        raise InvalidQuery(f"{key}: has no value", hint=_HINT.format(f"{key}:"))
    if key in ("after", "before"):
        try:
            parse_time(value)
        except ValueError as exc:
            raise InvalidQuery(f"{key}: {exc}") from exc
    known = {"is": STATES, "has": ("attachment",), "kind": kinds}.get(key)
    if known is None:
        return value
    word = value.lower()
    if word not in known:
        close = difflib.get_close_matches(word, known, 1)
        meant = f"perhaps {key}:{close[0]}" if close else f"expected {', '.join(known)}"
        raise InvalidQuery(
            f"{key}:{value} is unknown ({meant})", hint=_HINT.format(f"{key}:{value}")
        )
    return word


def _seconds(time: str) -> int:
    return parse_time(time) // NS_PER_S


def matches(
    query: Query,
    entry: Entry,
    recipients: tuple[str, ...],
    channel: str,
    in_state: frozenset[str] | None,
    regex: Callable[[str], bool] | None = None,
) -> bool:
    """True if a message is what a query asks for; the meaning of a query, for the scan.

    ``in_state``: the relay ids of all that are in one of its states. ``regex``: its pattern.
    """
    return (
        all(text in entry.body for text in query.texts)
        and (regex is None or regex(entry.body))
        and (not query.senders or entry.sender in query.senders)
        and (not query.recipients or not {*recipients}.isdisjoint(query.recipients))
        and (not query.threads or entry.correlation in query.threads)
        and (not query.answered or entry.re in query.answered)
        and (not query.kinds or entry.kind in query.kinds)
        and (not query.channels or channel in query.channels)
        and (in_state is None or entry.relay_id in in_state)
        and (not query.with_attachment or entry.attachments > 0)
        and (query.after is None or entry.at > query.after)
        and (query.before is None or entry.at < query.before)
    )


_PIECE = re.compile(
    r"\\(?P<escape>.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<repeat>\{\d*,?\d*\}|[*+?])|(?P<char>.)",
    re.DOTALL,
)
_NOT_CLEAR = re.compile(r"\[:|\(\?(?!:|P<|<)")  # named classes; flags: without case, perhaps
# Escapes that take more characters, or that change the meaning of those after them.
_OPENING_ESCAPES = frozenset("QECxpPkc0123456789")
_NOT_LITERAL = frozenset(".^$(){|")


def required_literals(pattern: str) -> tuple[str, ...]:
    """Texts that every match of a valid RE2 pattern contains; none where that is not clear.

    Only characters outside of groups and classes, and without a repetition, count.
    """
    if _NOT_CLEAR.search(pattern):
        return ()
    pieces = [(str(one.lastgroup), one[str(one.lastgroup)]) for one in _PIECE.finditer(pattern)]
    found: list[str] = []
    run, depth = "", 0
    for (kind, text), following in pairwise([*pieces, ("", "")]):
        literal = ""
        if kind == "escape":
            if text in _OPENING_ESCAPES:
                return ()
            literal = "" if text.isalnum() else text
        elif kind == "char":
            if text == "|" and depth == 0:
                return ()
            depth += (text == "(") - (text == ")")
            literal = "" if text in _NOT_LITERAL else text
        is_repeated = following[0] == "repeat"
        if depth or (is_repeated and following[1] != "+"):
            literal = ""
        run += literal
        if not literal or is_repeated:
            found.append(run)
            run = ""
    return tuple(filter(None, (*found, run)))
