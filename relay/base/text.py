"""Text for people: untrusted text is escaped, sizes and counts have units,
words are suggested.

Characters that are not printable (control characters including C1, bidirectional overrides,
invisible ones) are escaped, so that they cannot move the cursor, set a title, or hide or reverse
text.
"""

from __future__ import annotations

from collections.abc import Iterable

SIZE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
MOST_COMPARED = 500  # words: 18 ms if all of them are alike


def visible(text: str, keep: str = "") -> str:
    """``text`` with unprintable characters as Python escapes, except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def plural(number: int, what: str) -> str:
    """A count, like ``1 error`` or ``2 errors``."""
    return f"{number} {what}{'s' * (number != 1)}"


def format_size(count: float) -> str:
    """Bytes in powers of 1024: ``1.5 MiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(SIZE_UNITS) - 1:
        count, power = count / 1024, power + 1
    unit = "byte" if count == 1 and not power else SIZE_UNITS[power]
    return f"{f'{count:,.1f}'.removesuffix('.0')} {unit}"


def json_line(value: object) -> str:
    """JSON on one line with unprintable characters as ``\\uXXXX``."""
    import json  # the SDK starts without it

    return json_visible(json.dumps(value, ensure_ascii=False))


def json_visible(text: str) -> str:
    """The same JSON with unprintable characters in strings as ``\\uXXXX``.

    ``text`` has no line breaks or tabs between its values.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _json_escape(c) for c in text)


def _json_escape(c: str) -> str:
    """JSON escape; a surrogate pair above U+FFFF."""
    code = ord(c)
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def did_you_mean(word: str, known: Iterable[str], most: int = MOST_COMPARED) -> str:
    """``did you mean X?`` with the word of ``known`` that is most like ``word``; empty if none is.

    Of more than ``most`` words none is suggested: comparing them takes too long.
    """
    from difflib import get_close_matches  # only after a mistake

    others = [one for one in known if one != word]
    if len(others) > most:
        return ""
    by_lower = {one.lower().lstrip("-"): one for one in sorted(others)}
    found = get_close_matches(word.lower().lstrip("-"), by_lower, 1)
    return f"did you mean {by_lower[found[0]]}?" if found else ""
