"""Queries, topics and patterns: against a model that looks at everything, and the guide's table."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.acomm.model import (
    ChannelType,
    MatchMode,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Priority,
    SortField,
    SortOrder,
)
from relay.base.errors import ValidationFailed
from relay.commstore.store import CommStore
from relay.engine import query, rules
from relay.engine.rules import check_topic, match_mode, topic_matches
from relay.engine.tables import MessageIndex, TopicTrie
from tests.fakes import FakeClock

SEGMENT = st.sampled_from(["a", "b", "c"])
TOPIC = st.builds(
    lambda first, rest: ".".join([first, *rest]),
    SEGMENT,
    st.lists(SEGMENT | st.sampled_from(["*", "#"]), max_size=3),  # a topic may have those, too
)
PATTERN = st.builds(
    lambda segments, rest: ".".join(segments + rest),
    st.lists(st.sampled_from(["a", "b", "c", "*"]), max_size=4),
    st.sampled_from([["#"], ["a"], ["*"]]),
)


@pytest.mark.shows("engine 2.10")
@given(st.lists(PATTERN, max_size=12), TOPIC)
def test_the_trie_answers_as_matches_does(patterns: list[str], topic: str) -> None:
    trie = TopicTrie()
    for number, pattern in enumerate(patterns):
        rules.match_mode(pattern)  # each is one that subscribe takes
        trie.add(pattern, number)
    expected = [n for n, pattern in enumerate(patterns) if topic_matches(topic, pattern)]
    assert sorted(trie.match(topic)) == expected
    for number, pattern in enumerate(patterns):
        trie.remove(pattern, number)
    assert list(trie.match(topic)) == []
    assert trie._root.children == {}


def test_a_topic_of_wildcards_is_matched_as_soon_as_any_other() -> None:
    """Were each of its segments taken in two ways, a message of 250 bytes would never be routed."""
    trie = TopicTrie()
    for number, pattern in enumerate((".".join("*" * 125), "a.#", "#", "a.*.#")):
        trie.add(pattern, number)
    topic = "a" + ".*" * 124
    rules.check_topic(topic)
    assert sorted(trie.match(topic)) == [0, 1, 2, 3]
    assert sorted(trie.match("a.#")) == [1, 2, 3]


def _messages() -> st.SearchStrategy[list[Message]]:
    def build(rows: list[tuple[int, ...]]) -> list[Message]:
        return [
            Message(
                number,
                MessageType(kind),
                "abc"[sender],
                channel,
                f"text {number % 3}".encode(),
                None if topic > 2 else "abc"[topic],
                None if thread > 2 else f"t{thread}",
                Priority(priority),
                None,
                1000 + at,
                status=MessageStatus(status),
            )
            for number, (kind, sender, channel, topic, thread, priority, at, status) in enumerate(
                rows, 1
            )
        ]

    row = st.tuples(*(st.integers(0, most) for most in (7, 2, 2, 4, 4, 4, 4, 6)))
    return st.lists(row, min_size=10, max_size=30).map(build)


CONDITIONS: dict[str, st.SearchStrategy[object]] = {
    "channel_ids": st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple),
    "sender": st.sampled_from(["a", "b", "z"]),
    "message_types": st.just((MessageType.TEXT, MessageType.QUERY)),
    "topic_pattern": st.sampled_from(["a", "*", "#", "z"]),
    "after": st.integers(999, 1005),
    "before": st.integers(999, 1005),
    "status": st.just((MessageStatus.SENT, MessageStatus.ARCHIVED)),
    "priority": st.just((Priority.HIGH, Priority.NORMAL)),
    "correlation_id": st.sampled_from(["t0", "t1"]),
    "content_pattern": st.sampled_from(["text 1", "[02]$"]),
}


@st.composite
def filters_of_few(draw: st.DrawFn) -> MessageFilter:
    """At most three conditions: with many, nothing is found."""
    names = draw(st.lists(st.sampled_from(sorted(CONDITIONS)), max_size=3, unique=True))
    values: dict[str, Any] = {name: draw(CONDITIONS[name]) for name in names}
    return MessageFilter(
        limit=draw(st.integers(0, 10)),
        offset=draw(st.integers(0, 5)),
        sort_by=draw(st.sampled_from(SortField)),
        sort_order=draw(st.sampled_from(SortOrder)),
        include_archived=draw(st.booleans()),
        **values,
    )


def naive(messages: list[Message], wanted: MessageFilter) -> list[Message]:
    """Every rule of the table of MessageFilter, one after the other, on every message."""
    rules = [
        (wanted.channel_ids, lambda m, v: m.channel_id in v),
        (wanted.sender, lambda m, v: m.sender == v),
        (wanted.message_types, lambda m, v: m.message_type in v),
        (wanted.topic_pattern, lambda m, v: m.topic and topic_matches(m.topic, v)),
        (wanted.after, lambda m, v: m.created_at > v),
        (wanted.before, lambda m, v: m.created_at < v),
        (wanted.status, lambda m, v: m.status in v),
        (wanted.priority, lambda m, v: m.priority in v),
        (wanted.correlation_id, lambda m, v: m.correlation_id == v),
        (wanted.content_pattern, lambda m, v: re.search(v, m.content.decode())),
        (
            None if wanted.include_archived else True,
            lambda m, v: m.status is not MessageStatus.ARCHIVED,
        ),
    ]
    return [m for m in messages if all(v is None or holds(m, v) for v, holds in rules)]


@pytest.mark.shows("engine 2.6")
@given(_messages(), st.lists(filters_of_few(), min_size=5, max_size=10))
@example(  # the list of a sender is as short as that of the times: the times are checked as well
    [
        Message(number, MessageType.TEXT, sender, 1, b"", created_at=1000 + number)
        for number, sender in enumerate("ab")
    ],
    [MessageFilter(sender="a", after=1000), MessageFilter(sender="b", before=1001)],
)
def test_a_query_finds_as_a_model_does(messages: list[Message], asked: list[MessageFilter]) -> None:
    index = MessageIndex()
    for message in messages:
        index.add(message)
        if message.id % 3 == 0:
            list(index.candidates(asked[0]))  # asked between them, it takes in some before others
    by_id = {message.id: message for message in messages}
    for wanted in asked:
        result = query.select([by_id[n] for n in index.candidates(wanted)], wanted)
        expected = naive(messages, wanted)
        field, order = wanted.order
        expected.sort(
            key=lambda m: (getattr(m, field.name.lower()), m.id),
            reverse=order is SortOrder.DESCENDING,
        )
        end = wanted.offset + wanted.limit
        page = expected[wanted.offset : end]
        assert result == query.QueryResult(page, len(expected), len(expected) > end)

    index.remove(messages[::2])
    index.remove(messages[1::2])
    assert list(index.candidates(MessageFilter())) == []


@pytest.mark.shows("engine 2.7")
def test_a_pattern_that_backtracks_elsewhere_takes_linear_time() -> None:
    store = CommStore(FakeClock())
    channel = store.create_channel("c", ChannelType.GROUP, "a")
    store.send_message(channel.id, "a", MessageType.TEXT, "a" * 500_000 + "c")
    assert store.search("(a+)+b") == []
    assert len(store.search("(a|a?)+c")) == 1


# The examples of matching that the engine was specified with, and the edges of the rule.
GUIDE = """
build.frontend.complete	build.frontend.complete	Yes	Exact match
build.frontend.complete	build.*.complete	Yes	* matches frontend
build.frontend.complete	build.#	Yes	# matches frontend.complete
build.frontend.complete	build.backend.complete	No	backend != frontend
build.frontend.complete	build.*.start	No	start != complete
build.frontend.test.unit	build.*.complete	No	Segment count mismatch
build	build.#	Yes	# matches zero segments
deploy.staging	*.staging	Yes	* matches deploy
a	*.#	Yes	# matches zero segments behind a *
a.b	*.#	Yes	* matches a, # matches b
b	a.#	No	a != b
ab	a.#	No	a is a whole segment
a	*.*.#	No	Too few segments
A.b	a.b	No	A != a
a.*	a.*	Yes	A topic may have a *
a.*	a.b	No	which matches nothing else
a.#	a.b	No	nor does a #
"""
ROWS = [line.split("\t") for line in GUIDE.strip().splitlines()]


@pytest.mark.shows("engine 2.10")
@pytest.mark.parametrize(("topic", "pattern", "answer", "reason"), ROWS)
def test_the_guides_table(topic: str, pattern: str, answer: str, reason: str) -> None:
    assert topic_matches(topic, pattern) is (answer == "Yes"), reason
    check_topic(topic)
    match_mode(pattern)


@pytest.mark.shows("engine 2.10")
@pytest.mark.parametrize(
    ("pattern", "mode"),
    [
        ("build.a#b", MatchMode.EXACT),
        ("build.#a.c", MatchMode.EXACT),
        ("build.a*b", MatchMode.WILDCARD),
        ("*.a*b.#", MatchMode.MULTI_LEVEL),
    ],
)
def test_a_wildcard_is_a_whole_segment_or_text(pattern: str, mode: MatchMode) -> None:
    """Topics may have both, from the second segment on; so such a topic can be subscribed to."""
    assert match_mode(pattern) is mode
    topic = pattern.replace("*.", "x.").replace(".#", ".y") if mode > 1 else pattern
    check_topic(topic)
    trie = TopicTrie()
    trie.add(pattern, 1)
    for other in (topic, "build.axb", "build.a", "build.xa.c", "x.axb.y"):
        expected = other == topic
        assert topic_matches(other, pattern) is expected
        assert list(trie.match(other)) == [1] * expected


def test_the_mode_is_inferred() -> None:
    for mode, patterns in {
        MatchMode.EXACT: ("build.frontend.complete", "a", "A-b_9", "p" * 256),
        MatchMode.WILDCARD: ("build.*.complete", "*", "*.*"),
        MatchMode.MULTI_LEVEL: ("build.#", "#", "*.b.#"),
    }.items():
        assert [match_mode(pattern) for pattern in patterns] == [mode] * len(patterns)


NO_PATTERNS = (
    *("", ".", "a.", ".a", "a..b", "#.a", "a.#.b", "##", "a..#", "#.#", "a#", "#a", "a.b#", "a*"),
    *("a*.b", "*a", "*a.b", "**", "a b", "é", "a/b", "a\n", "p" * 257),
)
NO_TOPICS = ("", ".", "a.", ".a", "a..b", "*", "#", "*.a", "a b", "é", "t" * 257)


@pytest.mark.shows("engine 2.10")
def test_what_is_no_pattern_or_no_topic_is_refused() -> None:
    for check, field, values in (
        (match_mode, "topic_pattern", NO_PATTERNS),
        (check_topic, "topic", NO_TOPICS),
    ):
        for value in values:
            with pytest.raises(ValidationFailed) as caught:
                check(value)
            assert (caught.value.field, "\n" in str(caught.value)) == (field, False)
            assert caught.value.value_length == len(value.encode())
