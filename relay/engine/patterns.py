"""Content patterns: compiled where that is cheap, and refused where it is not.

A matcher can be given a time limit, a compiler cannot. ``regex`` writes out what is repeated,
once for each time that it must come, and nested repetitions multiply: thirty characters take all
memory. So the parts are counted first, as they would be written out, and never too few.
"""

from __future__ import annotations

import re

import regex

from relay.base.errors import ValidationFailed

MOST_PARTS = 20_000  # written out; about 30 MB and 30 ms at worst
_SHOWN = 200  # characters of a pattern in an error
_COMMENT = re.compile(r"\(\?#[^)]*\)?")
_SET = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL)
_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_VERBOSE = re.compile(r"\(\?[a-zA-Z0-9]*[xX]")


def compiled(pattern: str) -> regex.Pattern[str]:
    """The pattern, ready to be matched.

    Errors: ValidationFailed for what is none, and for one that would be too large.
    """
    parts = count_parts(pattern)
    try:
        if parts > MOST_PARTS:
            raise ValueError(f"its repetitions make {MOST_PARTS} parts and more of it")
        return regex.compile(pattern)
    except (regex.error, RecursionError, MemoryError, ValueError) as exc:
        shown = pattern if len(pattern) <= _SHOWN else pattern[:_SHOWN] + "…"
        raise ValidationFailed("content_pattern", f"{shown!r}: {exc}", len(pattern)) from exc


def count_parts(pattern: str) -> int:
    """How many characters, sets and groups it has with what must be repeated written out.

    It may be too many, for a repetition is taken to be one wherever it looks like one; above
    MOST_PARTS counting ends.
    """
    is_verbose = bool(_VERBOSE.search(pattern))  # what stands before a repetition may be a comment
    groups = [0]  # parts so far, of each group that is open
    last = at = 0  # parts of what a repetition would repeat
    while at < len(pattern) and groups[-1] <= MOST_PARTS:
        begin, char = at, pattern[at]
        at += 1
        if found := _COMMENT.match(pattern, begin):
            at = found.end()
            continue
        if char == "(":
            groups.append(0)
            last = 0
            continue
        if times := _times(pattern, begin):
            at = begin + times[1]
            groups[-1] += last * (times[0] - 1)
            last *= times[0]
            continue
        parts = 1
        if char == "\\":
            at += 1
        elif char == "[" and (found := _SET.match(pattern, begin)):
            at = found.end()
        elif char == ")" and len(groups) > 1:
            parts += groups.pop()
        groups[-1] += parts
        last = max(last, parts) if is_verbose or char.isspace() else parts
    return sum(groups)


def _times(pattern: str, at: int) -> tuple[int, int] | None:
    """How often the repetition at ``at`` writes out what is before it, and its length."""
    if pattern[at] in "*?":
        return 1, 1
    if pattern[at] == "+":
        return 2, 1  # once, and a loop
    found = _REPEAT.match(pattern, at)
    if found is None:
        return None
    least, comma, most = found.groups()
    if not least and not most:
        return None
    number = min(int(least[:9] or 0), MOST_PARTS + 1)
    return max(number + (bool(comma) and most != least and number > 0), 1), len(found[0])
