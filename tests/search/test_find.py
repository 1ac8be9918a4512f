"""The index finds the same messages as a look at each one, whatever is asked."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import re2
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relay.ledger.schema import schema_sql
from relay.search.find import find, ledger_ids
from relay.search.index import Entry
from relay.search.query import (
    SORTS,
    STATES,
    Query,
    largest_first,
    matches,
    required_literals,
    sort_key,
)
from tests.search.support import entry, filled

# Few characters, so that texts have much in common.
TEXTS = st.text(alphabet='abAé"\n -\0😀%', max_size=12)
NAMES = st.sampled_from(["alice", "bob", "carol"])
WORDS = st.text(alphabet='abAé" -😀%', min_size=1, max_size=5)
MESSAGES = st.lists(
    st.tuples(
        TEXTS, NAMES, st.lists(NAMES, min_size=1, max_size=2, unique=True), st.integers(1, 9)
    ),
    min_size=6,
    max_size=25,
)
PATTERNS = st.sampled_from(
    [
        "a+b",
        "aa|bb",
        "(ab)?a",
        "(?i)aa",
        "a{2}b",
        "[ab]a",
        "^a",
        "b$",
        r"a\-",
        "é.a",
        "ab*A",
        "a{b|c}",
    ]
)
CONDITIONS: dict[str, st.SearchStrategy[object]] = {
    "texts": st.lists(WORDS, min_size=1, max_size=3).map(tuple),
    "regex": PATTERNS,
    "senders": NAMES.map(lambda name: (name,)),
    "recipients": st.lists(NAMES, min_size=1, max_size=2).map(tuple),
    "parties": st.lists(NAMES, min_size=1, max_size=2).map(tuple),
    "answered": st.just(("1-aa",)),
    "priorities": st.sampled_from([(2,), (0, 3)]),
    "topics": st.sampled_from([("build.#",), ("build.*", "x")]),
    "kinds": st.sampled_from([("message",), ("command",)]),
    "with_attachment": st.just(True),
    "after": st.integers(0, 9),
    "before": st.integers(0, 10),
}


@st.composite
def asked_with_few(draw: st.DrawFn) -> Query:
    """A query of at most three conditions: one of many finds nothing."""
    names = draw(st.lists(st.sampled_from(sorted(CONDITIONS)), max_size=3, unique=True))
    values: dict[str, Any] = {name: draw(CONDITIONS[name]) for name in names}
    return Query(sort=draw(st.sampled_from(SORTS)), **values)


@given(
    MESSAGES,
    st.lists(asked_with_few(), min_size=5, max_size=10),
    st.integers(1, 6),
    st.sets(st.integers(1, 25)),
    st.booleans(),
)
@settings(max_examples=80)
def test_the_index_finds_what_a_look_at_each_message_finds(
    messages: list[tuple[str, str, list[str], int]],
    queries: list[Query],
    limit: int,
    removed: set[int],
    in_order: bool,
) -> None:
    if in_order:
        messages.sort(key=lambda one: one[3])
    entries = [
        entry(number, body, *names, sender=sender, at=at)._replace(
            priority=number % 4,
            topic=[None, "build.x", "build.x.y"][number % 3],
            kind=["message", "command"][number % 2],
            re=[None, "1-aa"][number // 2 % 2],
            attachments=number // 4 % 2,
        )
        for number, (body, sender, names, at) in enumerate(messages, 1)
    ]
    left = [one for one in entries if one.id not in removed]
    with tempfile.TemporaryDirectory() as folder, filled(Path(folder), *entries) as index:
        with index.batch(None):
            index.remove(removed)
        for query in queries:
            found = find(index, query, limit)
            expected = [one for one in left if is_match(query, one)]
            expected.sort(key=lambda one: sort_key(query, one), reverse=largest_first(query))
            assert [one for one, _ in found.entries] == expected[:limit]
            assert found.has_more == (len(expected) > limit)


DELIVERED = st.tuples(
    st.sampled_from(["written", "read", "acked", "expired", "bounced", "dead"]),
    st.sampled_from([None, "open", "answered", "given_up"]),
    st.sampled_from([None, "failed", "completed"]),
    st.sampled_from([None, "cancelled by alice"]),
    st.integers(0, 1),  # reminders
    st.sampled_from([1, 2**62]),  # due: long ago, in a long time
)


@given(
    st.lists(st.tuples(DELIVERED, DELIVERED, st.integers(0, 3)), max_size=8),
    st.lists(st.sampled_from(sorted(STATES)), max_size=2, unique=True).map(tuple),
    st.lists(st.sampled_from(["bob", "carol"]), max_size=1).map(tuple),
    st.none() | st.integers(0, 4),
)
@settings(max_examples=50)
def test_what_became_of_a_message_is_asked_of_the_ledger(
    messages: list[tuple[tuple[object, ...], tuple[object, ...], int]],
    states: tuple[str, ...],
    recipients: tuple[str, ...],
    since: int | None,
) -> None:
    query = Query(states=states, recipients=recipients, since=since)
    names = ("bob", "carol")
    entries = [entry(number, "", *names) for number in range(1, len(messages) + 1)]
    with tempfile.TemporaryDirectory() as folder, filled(Path(folder), *entries) as index:
        path = str(Path(folder, "ledger.db"))
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as ledger:
            ledger.executescript("PRAGMA synchronous = OFF;" + schema_sql())
            ledger.execute("DROP TRIGGER deliveries_asked")
            for one, (bob, carol, changed) in zip(entries, messages, strict=True):
                for name, values in zip(names, (bob, carol), strict=True):
                    ledger.execute(
                        "INSERT INTO deliveries (message_id, recipient, state, obligation, "
                        "ack_status, last_error, reminders, due_at) "
                        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        (one.relay_id, name, *values),
                    )
                ledger.execute(
                    "INSERT INTO audit_log (id, at, message_id, new_status) VALUES (?, ?, ?, 'x')",
                    (10 * changed + one.id, changed * 10**9, one.relay_id),
                )
            ids = ledger_ids(ledger, query) if states or since is not None else None
        found = find(index, query, 100, path).entries
        expected = [one for one in entries if matches(query, one, names, "c", ids)]
        assert [one for one, _ in found] == expected[::-1]


def is_match(query: Query, one: Entry) -> bool:
    names = tuple(one.recipients.strip('[]"').split('", "'))
    regex = None
    if query.regex is not None:
        pattern = re2.compile(query.regex)
        regex = lambda body: pattern.search(body) is not None  # noqa: E731
    return matches(query, one, names, "c", None, regex)


PIECES = st.sampled_from(
    [
        *("a", "b", "ab", ".", "^", "$", "|", "a*", "b+", "a?", "ab{2}", "{", "}", "a{,2}"),
        *("[ab]", "[^a]", "[]a]", "[[:alpha:]]", r"\.", r"\b", r"\d", r"\x61", r"\Qa|b\E"),
        *("(a|b)", "(?:ab)*", "(?i)", "(?P<n>b)", "(a(b|c))+", "b??", "ab+?", "{a|b}", r"[\]|]"),
    ]
)


@given(st.lists(PIECES, max_size=6).map("".join), st.text(alphabet="abA.|{}]", max_size=10))
@example("a{b|c}", "c")
@settings(max_examples=1000)
def test_every_match_of_a_pattern_has_its_literals(pattern: str, text: str) -> None:
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error:
        return
    if compiled.search(text):
        assert [one for one in required_literals(pattern) if one not in text] == []


def test_literals_of_patterns() -> None:
    assert required_literals("deploy(ed)? to (staging|production)") == ("deploy", " to ")
    assert required_literals(r"disk \w+ full\.") == ("disk ", " full.")
    assert required_literals("ab+c") == ("ab", "c")
    assert required_literals("failed|refused") == ()
    assert required_literals("(?i)failed") == ()


def test_messages_of_a_wide_and_of_a_narrow_condition(tmp_path: Path) -> None:
    """Of many messages of a sender with a rare word, and of a rare sender with a common word."""
    many = [entry(n, f"common word {n}", sender="alice") for n in range(1, 4001)]
    few = [entry(4001, "common word", sender="carol"), entry(4002, "rare", sender="alice")]
    with filled(tmp_path, *many, *few) as index:

        def numbers(query: Query, limit: int = 3) -> list[int]:
            return [one.id for one, _ in find(index, query, limit).entries]

        assert numbers(Query(texts=("common",), senders=("carol",))) == [4001]
        assert numbers(Query(texts=("rare",), senders=("alice",))) == [4002]
        assert numbers(Query(senders=("alice",))) == [4002, 4000, 3999]
        assert numbers(Query(senders=("alice",), before=11)) == [10, 9, 8]
        assert numbers(Query(texts=("word 7", "7"), before=100)) == [79, 78, 77]
        assert numbers(Query(channels=("c",), texts=("d 4000",))) == [4000]
        assert numbers(Query(texts=("4",), after=3999)) == [4000]
