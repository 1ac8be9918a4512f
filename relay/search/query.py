"""The query language of ``relay list``.

    deploy "disk full" from:alice to:bob with:carol thread:release-42 kind:command channel:ci
    topic:build.# is:unread has:attachment after:2h before:2026-11-20T18:30 since:1h sort:oldest

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
from relay.base.errors import InvalidQuery, ValidationFailed
from relay.base.names import EVERYONE, EVERYONE_CHANNEL, uuid4_of
from relay.ledger import NOT_CANCELLED, UNREAD
from relay.search.index import Entry

KEYS = (
    *("from", "to", "with", "thread", "re", "kind", "channel", "topic", "priority", "is", "has"),
    *("after", "before", "since", "sort"),
)
REFUSED = "refused"  # by the relay: the ledger alone has it
# The ledger knows them: state -> its condition on deliveries. That of "failed" is word for word
# the one of an index in schema.sql, and so is that of "open".
_FAILED = (
    "ack_status = 'failed' OR obligation = 'given_up' OR state IN ('expired', 'bounced', 'dead')"
)
_NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000"
STATES = {
    "unread": f"(d.message_id, d.recipient) IN (SELECT message_id, recipient FROM {UNREAD})",
    "held": "state IN ('held', 'staged')",
    "open": "obligation = 'open'",
    "overdue": f"obligation = 'open' AND due_at <= {_NOW}",
    "failed": f"({_FAILED}) AND {NOT_CANCELLED} AND discarded_at IS NULL",
    REFUSED: "0",
    "dead": f"({_FAILED}) AND state = 'dead' AND discarded_at IS NULL",
    "expired": f"({_FAILED}) AND state = 'expired' AND {NOT_CANCELLED}",
    "bounced": f"({_FAILED}) AND state = 'bounced'",
    "removed": "state = 'read' AND read_how = 'removed'",
    "late": "obligation = 'answered' AND reminders > 0",
}
PRIORITIES = ("0", "1", "2", "3", "4")  # from critical to background
SORTS = ("newest", "oldest", "priority", "sender", "kind")
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
    parties: tuple[str, ...] = ()  # sender or recipient
    threads: tuple[str, ...] = ()  # their ids in the store
    named_threads: tuple[str, ...] = ()  # as they were given
    beside: tuple[str, ...] = ()  # relay ids of messages whose threads are meant as well
    answered: tuple[str, ...] = ()  # relay ids that RE names
    kinds: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()  # patterns
    priorities: tuple[int, ...] = ()
    states: tuple[str, ...] = ()  # of STATES
    with_attachment: bool = False
    after: int | None = None  # sent; Unix seconds
    before: int | None = None
    since: int | None = None  # it, or a delivery of it, changed
    sort: str = SORTS[0]
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
        parties=tuple(values["with"]),
        threads=tuple(map(uuid4_of, values["thread"])),
        named_threads=tuple(values["thread"]),
        answered=tuple(values["re"]),
        kinds=tuple(values["kind"]),
        channels=tuple(name.removeprefix("#") for name in values["channel"]),
        topics=tuple(values["topic"]),
        priorities=tuple(map(int, values["priority"])),
        states=tuple(values["is"]),
        with_attachment=bool(values["has"]),
        after=max(_seconds("after", values), default=None),
        before=min(_seconds("before", values), default=None),
        since=max(_seconds("since", values), default=None),
        sort=values["sort"][-1] if values["sort"] else SORTS[0],
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
    if not value or (key, value) == ("channel", "#"):
        raise InvalidQuery(f"{key}:{value} has no value", hint=_HINT.format(f"{key}:{value}"))
    if key == "topic":
        from relay.engine.rules import match_mode

        try:
            match_mode(value)
        except ValidationFailed as exc:
            raise InvalidQuery(f"topic:{str(exc).partition(': ')[2]}") from exc
    if key in ("to", "with") and (value == EVERYONE or value.startswith("#")):
        channel = EVERYONE_CHANNEL if value == EVERYONE else value[1:]
        raise InvalidQuery(f"{key}:{value} is no agent (expected channel:{channel})")
    allowed = {
        "is": tuple(STATES),
        "has": ("attachment",),
        "kind": kinds,
        "priority": PRIORITIES,
        "sort": SORTS,
    }
    known = allowed.get(key)
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


def _seconds(key: str, values: dict[str, list[str]]) -> list[int]:
    try:
        return [parse_time(value) // NS_PER_S for value in values[key]]
    except ValueError as exc:
        raise InvalidQuery(f"{key}: {exc}") from exc


def matches(
    query: Query,
    entry: Entry,
    recipients: tuple[str, ...],
    channel: str,
    in_state: frozenset[str] | None,
    regex: Callable[[str], bool] | None = None,
) -> bool:
    """True if a message is what a query asks for; the meaning of a query, for the scan.

    ``in_state``: the relay ids of all that are in one of its states, or changed since then.
    ``regex``: its pattern.
    """
    return (
        all(text in entry.body for text in query.texts)
        and (regex is None or regex(entry.body))
        and (not query.senders or entry.sender in query.senders)
        and (not query.recipients or not {*recipients}.isdisjoint(query.recipients))
        and (not query.parties or not {entry.sender, *recipients}.isdisjoint(query.parties))
        and (not query.threads or entry.correlation in query.threads)
        and (not query.answered or entry.re in query.answered)
        and (not query.kinds or entry.kind in query.kinds)
        and (not query.priorities or entry.priority in query.priorities)
        and (not query.channels or channel in query.channels)
        and (not query.topics or any_topic_matches(entry.topic, query.topics))
        and (in_state is None or entry.relay_id in in_state)
        and (not query.with_attachment or entry.attachments > 0)
        and (query.after is None or entry.at > query.after)
        and (query.before is None or entry.at < query.before)
    )


def any_topic_matches(topic: str | None, patterns: tuple[str, ...]) -> bool:
    """True if a topic, which a message may lack, matches one of these patterns."""
    from relay.engine.rules import topic_matches  # loads the engine: few ask for a topic

    return topic is not None and any(topic_matches(topic, pattern) for pattern in patterns)


def sort_key(query: Query, entry: Entry) -> tuple[object, ...]:
    """The key by which messages are sorted; see ``largest_first``."""
    age = (-entry.at, -entry.id)
    first = {"priority": (-entry.priority,), "sender": (entry.sender,), "kind": (entry.kind,)}
    return (*first.get(query.sort, ()), *age)


def largest_first(query: Query) -> bool:
    """True if the message with the largest ``sort_key`` comes first."""
    return query.sort == "oldest"


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
    pieces = [
        (str(match.lastgroup), match[str(match.lastgroup)]) for match in _PIECE.finditer(pattern)
    ]
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
