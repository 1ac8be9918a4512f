"""Text of others for a terminal: the one place that says what may be shown as it is.

A character that is not printable (control characters, C1 among them, those that turn the direction
of text around, those that nobody sees) is shown by its escape: it moves no cursor, sets no title,
and hides or reverses nothing.
"""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """``text`` with what cannot be seen as Python writes it, but for the characters of ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def json_line(value: object) -> str:
    """JSON on one line, which means the same: what cannot be seen is written as ``\\uXXXX``."""
    import json  # the SDK starts without it

    return json_visible(json.dumps(value, ensure_ascii=False))


def json_visible(text: str) -> str:
    """The same JSON, with what cannot be seen in its strings written as ``\\uXXXX``.

    ``text`` has no line breaks or tabs between its values.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _json_escape(c) for c in text)


def _json_escape(c: str) -> str:
    """As JSON has it: a pair of surrogates beyond the first 65,536."""
    code = ord(c)
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
