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
        " is:dead is:open has:attachment after:1970-01-02 before:1970-01-03T00:00 word with:dora"
        " topic:build.# priority:0 since:1970-01-02 sort:Oldest"
    )
    assert query == Query(
        texts=("word",),
        senders=("alice", "carol"),
        recipients=("bob",),
        parties=("dora",),
        threads=(uuid4_of("release-42"),),
        named_threads=("release-42",),
        kinds=("command",),
        channels=("ci",),
        topics=("build.#",),
        priorities=(0,),
        states=("unread", "dead", "open"),
        with_attachment=True,
        after=86_400,
        before=2 * 86_400,
        since=86_400,
        sort="oldest",
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
        ("is:blue", "is:blue is unknown (expected unread, held, open, overdue, failed, refused,"),
        ("sort:size", "sort:size is unknown (expected newest, oldest, priority, sender, kind)"),
        ("topic:a.#.b", "topic:'a.#.b': segments between dots are letters"),
        ("has:wheels", "has:wheels is unknown (expected attachment)"),
        ("kind:comand", "kind:comand is unknown (perhaps kind:command)"),
        ("to:#ci/linux", "to:#ci/linux is no agent (expected channel:ci/linux)"),
        ("with:*", "with:* is no agent (expected channel:all)"),
        ("from: alice", "from: has no value"),
        ("channel:#", "channel:# has no value"),
        ('"disk full', '"disk: the closing " is missing, or text follows it'),
        ('"disk"full', '"disk"full: the closing " is missing, or text follows it'),
        ('from:"a b', '"a: the closing " is missing, or text follows it'),
        ('what:"a b"', "unknown key what: (expected from, to, with, thread, re, kind,"),
    ],
)
def test_mistakes(text: str, line: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        asked(text)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
