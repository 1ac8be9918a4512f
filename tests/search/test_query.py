"""The query language: what is typed, what is asked for, and one clear line for every mistake."""

from __future__ import annotations

import pytest

from relay.base.errors import InvalidQuery
from relay.base.names import uuid4_of
from relay.search.query import Query
from tests.search.support import asked


def test_words_and_phrases() -> None:
    assert asked("").texts == ()
    assert asked('deploy  "disk full" -x').texts == ("deploy", "disk full", "-x")
    assert asked('say"hi" there').texts == ('say"hi"', "there")


def test_every_key() -> None:
    query = asked(
        "from:alice FROM:carol to:bob thread:release-42 kind:Command channel:#ci is:unread"
        " is:dead has:attachment after:1970-01-02 before:1970-01-03T00:00 word"
    )
    assert query == Query(
        texts=("word",),
        senders=("alice", "carol"),
        recipients=("bob",),
        threads=(uuid4_of("release-42"),),
        named_threads=("release-42",),
        kinds=("command",),
        channels=("ci",),
        states=("unread", "dead"),
        with_attachment=True,
        after=86_400,
        before=2 * 86_400,
    )
    assert asked('thread:"release 42"').named_threads == ("release 42",)


@pytest.mark.parametrize("text", ["http://x/y", "error:", "10:30", "std::string", "a:b:c", ":-)"])
def test_a_text_with_a_colon_is_a_text(text: str) -> None:
    assert asked(text).texts == (text,)


@pytest.mark.parametrize(
    "text, line",
    [
        ("form:alice", "unknown key form: (perhaps from:)"),
        ("x:y chanel:ci", "unknown key chanel: (perhaps channel:)"),
        ("is:unreed", "is:unreed is unknown (perhaps is:unread)"),
        ("is:blue", "is:blue is unknown (expected unread, dead, owed)"),
        ("has:wheels", "has:wheels is unknown (expected attachment)"),
        ("kind:comand", "kind:comand is unknown (perhaps kind:command)"),
        ("from: alice", "from: has no value"),
        ('"disk full', '"disk: the closing " is missing, or text follows it'),
        ('"disk"full', '"disk"full: the closing " is missing, or text follows it'),
        ('from:"a b', '"a: the closing " is missing, or text follows it'),
        ('what:"a b"', "unknown key what: (expected from, to, thread, re, kind, channel, is,"),
    ],
)
def test_mistakes(text: str, line: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        asked(text)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
