"""Topics and the patterns that match them, exactly as the guide's table has it.

``*`` and ``#`` are whole segments; ``#`` stands only last and matches zero or more segments; a
leading ``*`` is allowed in patterns. Inside a segment, from the second on, both are text, as
topics may have them. Source: message-engine.txt, "Topic Matching"; docs/decisions/0024.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from relay.acomm.model import MatchMode
from relay.base.errors import ValidationFailed

MAX_TOPIC_BYTES = 256
TOPIC = re.compile(r"[a-zA-Z0-9_-]+(?:\.[a-zA-Z0-9_*#-]+)*")
_FIRST = re.compile(r"[a-zA-Z0-9_-]+|\*")  # segment of a pattern
_SEGMENT = re.compile(r"[a-zA-Z0-9_*#-]+")
MULTI = "#"
ANY = "*"


def check_topic(topic: str) -> None:
    """Errors: ValidationFailed when a message cannot carry this topic."""
    if not isinstance(topic, str):
        raise ValidationFailed("topic", f"expected a string, got {topic!r}")
    if not TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC_BYTES:
        raise ValidationFailed(
            "topic",
            f"{topic!r} is not a valid topic; expected one like build.front.ok, "
            f"at most {MAX_TOPIC_BYTES} bytes",
            len(topic.encode(errors="replace")),
        )


def match_mode(pattern: str) -> MatchMode:
    """The match mode of a pattern.

    Errors: ValidationFailed for an empty segment; for ``*`` or ``#`` beside other text in the
    first segment, where no topic has them; for ``#`` as a segment anywhere but last, or at the
    end of a longer one, which other readers take for the end of a prefix.
    """
    if not isinstance(pattern, str):
        raise ValidationFailed("topic_pattern", f"expected a string, got {pattern!r}")
    segments = pattern.split(".")
    is_multi = segments[-1] == MULTI
    first, *rest = (segments[:-1] if is_multi else segments) or [ANY]
    if (
        len(pattern) > MAX_TOPIC_BYTES
        or not _FIRST.fullmatch(first)
        or not all(_SEGMENT.fullmatch(one) and one != MULTI for one in rest)
        or (pattern.endswith(MULTI) and not is_multi)
    ):
        raise ValidationFailed(
            "topic_pattern",
            f"{pattern!r}: segments between dots are letters, digits, _ and -, or *; "
            f"# stands only last; {MAX_TOPIC_BYTES} bytes at most",
            len(pattern.encode(errors="replace")),
        )
    if is_multi:
        return MatchMode.MULTI_LEVEL
    return MatchMode.WILDCARD if ANY in pattern else MatchMode.EXACT


def matches(topic: str, pattern: str) -> bool:
    """True when ``pattern`` (one that ``match_mode`` takes) covers ``topic``."""
    wanted = pattern.split(".")
    given = topic.split(".")
    if wanted[-1] == MULTI:
        wanted.pop()
        given = given[: len(wanted)]
    return len(given) == len(wanted) and all(
        want in (ANY, have) for want, have in zip(wanted, given, strict=True)
    )


class TopicTrie:
    """Patterns by their segments: matching a topic costs its segments and its matches.

    However many patterns there are: at each segment at most two ways go on, the segment itself
    and ``*``. It answers as ``matches`` does for each pattern, a test compares them.
    """

    def __init__(self) -> None:
        self._root = _TrieNode()

    def add(self, pattern: str, number: int) -> None:
        """Remember ``number`` under a pattern."""
        node = self._root
        for segment in pattern.split("."):
            node = node.children.setdefault(segment, _TrieNode())
        node.numbers[number] = None

    def remove(self, pattern: str, number: int) -> None:
        """Forget it again; branches that nobody is left on go with it."""
        path = [self._root]
        segments = pattern.split(".")
        for segment in segments:
            path.append(path[-1].children[segment])
        path[-1].numbers.pop(number, None)
        for segment, parent, node in reversed(list(zip(segments, path, path[1:], strict=False))):
            if node.numbers or node.children:
                break
            del parent.children[segment]

    def find_exact(self, pattern: str) -> Iterator[int]:
        """Every number under this very pattern."""
        node: _TrieNode | None = self._root
        for segment in pattern.split("."):
            node = node.children.get(segment) if node else None
        yield from node.numbers if node else ()

    def match(self, topic: str) -> Iterator[int]:
        """Every number whose pattern covers the topic, once."""
        nodes = [self._root]
        for segment in topic.split("."):
            yield from _multi_level_matches(nodes)
            # a topic may have a * or # of its own: neither is a second way to the same place
            ways = (ANY,) if segment in (ANY, MULTI) else (segment, ANY)
            nodes = [node.children[way] for node in nodes for way in ways if way in node.children]
        yield from _multi_level_matches(nodes)
        for node in nodes:
            yield from node.numbers


class _TrieNode:
    __slots__ = ("children", "numbers")

    def __init__(self) -> None:
        self.children: dict[str, _TrieNode] = {}
        self.numbers: dict[int, None] = {}


def _multi_level_matches(nodes: list[_TrieNode]) -> Iterator[int]:
    """The patterns that take whatever follows, from here on."""
    for node in nodes:
        if MULTI in node.children:
            yield from node.children[MULTI].numbers
