"""Topics and the patterns that match them, exactly as the guide's table has it.

``*`` and ``#`` are whole segments; ``#`` stands only last and matches zero or more segments; a
leading ``*`` is allowed in patterns. Source: message-engine.txt, "Topic Matching".
"""

from __future__ import annotations

import re

from relay.comm.model import MatchMode
from relay.errors import ValidationFailed

MAX_TOPIC_BYTES = 256
TOPIC = re.compile(r"[a-zA-Z0-9_-]+(?:\.[a-zA-Z0-9_*#-]+)*")
_SEGMENT = re.compile(r"[a-zA-Z0-9_-]+|\*")
MULTI = "#"
ANY = "*"


def check_topic(topic: str) -> None:
    """Errors: ValidationFailed when a message cannot carry this topic."""
    if not topic or len(topic.encode()) > MAX_TOPIC_BYTES or not TOPIC.fullmatch(topic):
        raise ValidationFailed(
            "topic",
            f"{topic!r} is no topic like build.front.ok of at most {MAX_TOPIC_BYTES} bytes",
            len(topic.encode()),
        )


def match_mode(pattern: str) -> MatchMode:
    """How a pattern is matched.

    Errors: ValidationFailed for an empty segment, for ``*`` or ``#`` as a part of one, and
    for ``#`` anywhere but last.
    """
    segments = pattern.split(".")
    last = segments[-1]
    rest = segments[:-1] if last == MULTI else segments
    if len(pattern.encode()) > MAX_TOPIC_BYTES or not all(_SEGMENT.fullmatch(s) for s in rest):
        raise ValidationFailed(
            "topic_pattern",
            f"{pattern!r}: segments between dots are letters, digits, _ and -, or *; "
            f"# stands only last; {MAX_TOPIC_BYTES} bytes at most",
            len(pattern.encode()),
        )
    if last == MULTI:
        return MatchMode.MULTI_LEVEL
    return MatchMode.WILDCARD if ANY in segments else MatchMode.EXACT


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
