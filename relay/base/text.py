"""Escape untrusted text for a terminal.

Characters that are not printable (control characters including C1, bidirectional overrides,
invisible ones) are escaped, so that they cannot move the cursor, set a title, or hide or reverse
text.
"""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """``text`` with unprintable characters as Python escapes, except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


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
