"""Topics and patterns: the guide's table row by row, and what is no pattern."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.acomm.model import ChannelType, MatchMode
from relay.base.errors import ValidationFailed
from relay.engine.commstore import CommStore
from relay.engine.rules import check_topic, match_mode, topic_matches
from relay.engine.tables import TopicTrie
from tests.engine.support import channel_of, send

pytestmark = pytest.mark.shows("engine 2.10")

# The examples of matching that the engine was specified with.
GUIDE = """
build.frontend.complete	build.frontend.complete	Yes	Exact match
build.frontend.complete	build.*.complete	Yes	* matches frontend
build.frontend.complete	build.#	Yes	# matches frontend.complete
build.frontend.complete	build.backend.complete	No	backend != frontend
build.frontend.complete	build.*.start	No	start != complete
build.frontend.test.unit	build.*.complete	No	Segment count mismatch
build	build.#	Yes	# matches zero segments
deploy.staging	*.staging	Yes	* matches deploy
"""
ROWS = [line.split("\t") for line in GUIDE.strip().splitlines()]


@pytest.mark.parametrize(("topic", "pattern", "answer", "reason"), ROWS)
def test_the_guides_table(topic: str, pattern: str, answer: str, reason: str) -> None:
    assert topic_matches(topic, pattern) is (answer == "Yes"), reason
    check_topic(topic)
    match_mode(pattern)


def test_the_edges_of_the_rule() -> None:
    assert topic_matches("a", "*.#") and topic_matches("a.*", "a.*")
    for topic, pattern in (("A.b", "a.b"), ("ab", "a.#"), ("a.*", "a.b"), ("a.#", "a.b")):
        assert not topic_matches(topic, pattern), pattern


@pytest.mark.parametrize(
    ("pattern", "mode"),
    [
        ("build.a#b", MatchMode.EXACT),
        ("build.#a.c", MatchMode.EXACT),
        ("build.a*b", MatchMode.WILDCARD),
        ("*.a*b.#", MatchMode.MULTI_LEVEL),
    ],
)
def test_a_wildcard_is_a_whole_segment_and_text_inside_of_one(
    pattern: str, mode: MatchMode
) -> None:
    """Topics may have both, from the second segment on; so such a topic can be subscribed to."""
    assert match_mode(pattern) is mode
    topic = pattern.replace("*.", "x.").replace(".#", ".y") if mode > 1 else pattern
    check_topic(topic)
    trie = TopicTrie()
    trie.add(pattern, 1)
    for other in (topic, "build.axb", "build.a", "build.xa.c", "x.axb.y"):
        expected = other == topic
        assert topic_matches(other, pattern) is expected
        assert topic_matches(other, pattern) is by_the_guides_algorithm(other, pattern)
        assert list(trie.match(other)) == [1] * expected


def by_the_guides_algorithm(topic: str, pattern: str) -> bool:
    """The algorithm that the engine was specified with, step by step."""
    topic_segments = topic.split(".")
    pattern_segments = pattern.split(".")
    if pattern.endswith("#"):
        prefix = pattern_segments[:-1]
        if len(topic_segments) < len(prefix):
            return False
        for i in range(len(prefix)):
            if prefix[i] != "*" and prefix[i] != topic_segments[i]:
                return False
        return True
    if len(topic_segments) != len(pattern_segments):
        return False
    for i in range(len(topic_segments)):
        if pattern_segments[i] == "*":
            continue
        if pattern_segments[i] != topic_segments[i]:
            return False
    return True


SEGMENTS = st.lists(st.sampled_from(["a", "b", "*"]), max_size=4)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), SEGMENTS, st.booleans())
def test_it_is_the_guides_algorithm(topic: list[str], pattern: list[str], multi: bool) -> None:
    whole = [*pattern, "#"] if multi or not pattern else pattern
    name, wanted = ".".join(topic), ".".join(whole)
    assert topic_matches(name, wanted) is by_the_guides_algorithm(name, wanted)


@pytest.mark.parametrize(
    ("pattern", "mode"),
    [
        ("build.frontend.complete", MatchMode.EXACT),
        ("a", MatchMode.EXACT),
        ("A-b_9", MatchMode.EXACT),
        ("build.*.complete", MatchMode.WILDCARD),
        ("*", MatchMode.WILDCARD),
        ("*.*", MatchMode.WILDCARD),
        ("build.#", MatchMode.MULTI_LEVEL),
        ("#", MatchMode.MULTI_LEVEL),
        ("*.b.#", MatchMode.MULTI_LEVEL),
        ("p" * 256, MatchMode.EXACT),
    ],
)
def test_the_mode_is_inferred(pattern: str, mode: MatchMode) -> None:
    assert match_mode(pattern) is mode


NO_PATTERNS = (
    *("", ".", "a.", ".a", "a..b", "#.a", "a.#.b", "##", "a..#", "#.#", "a#", "#a", "a.b#", "a*"),
    *("a*.b", "*a", "*a.b", "**", "a b", "é", "a/b", "a\n", "p" * 257),
)
NO_TOPICS = ("", ".", "a.", ".a", "a..b", "*", "#", "*.a", "a b", "é", "t" * 257)


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


def test_a_topic_that_a_message_may_carry(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", "b")
    for topic in ("a", "a.b", "a-b_9.C", "a.*.#", "a.b*", "t" * 256):
        assert send(store, channel, "a", topic=topic).topic == topic
