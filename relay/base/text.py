"""Text for people: untrusted text is escaped, sizes and counts have units,
words are suggested.

Characters that cannot be seen (control characters including C1, bidirectional overrides, spaces
other than the space, and all that is in ``UNSEEN``) are escaped, so that they cannot move the
cursor, set a title, hide or reverse text, or carry text that nobody sees.

One of them stays: U+FE0F directly behind a sign that it turns into an emoji, because that is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

SIZE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
MOST_COMPARED = 500  # words: 18 ms if all of them are alike


def _chars(ranges: str) -> frozenset[str]:
    """The characters of hexadecimal ranges."""
    found: set[str] = set()
    for part in ranges.split():
        first, _, last = part.partition("-")
        found.update(map(chr, range(int(first, 16), int(last or first, 16) + 1)))
    return frozenset(found)


# Default_Ignorable_Code_Point (DerivedCoreProperties.txt of Unicode 17), without the unassigned
# U+E0200-E0FFF. Then what has no glyph of its own in the code charts: braille blank, joiners,
# Egyptian blanks, the Khitan filler, the null notehead, SignWriting spaces.
UNSEEN = _chars(
    "AD 34F 61C 115F-1160 17B4-17B5 180B-180F 200B-200F 202A-202E 2060-206F 3164 FE00-FE0F FEFF "
    "FFA0 FFF0-FFF8 1BCA0-1BCA3 1D173-1D17A E0000-E01FF "
    "2800 2D7F 1107F 13441-13442 16FE4 1D159 1DA7F-1DA80"
)
EMOJI_STYLE = "\ufe0f"
# Emoji without Emoji_Presentation (emoji-data.txt of Unicode 17): signs unless U+FE0F follows.
# Digits, # and * are such signs only in keycaps, which end with U+20E3.
_SIGNS = _chars(
    "A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 2328 23CF 23ED-23EF 23F1-23F2 23F8-23FA 24C2 "
    "25AA-25AB 25B6 25C0 25FB-25FC 2600-2604 260E 2611 2618 261D 2620 2622-2623 2626 262A "
    "262E-262F 2638-263A 2640 2642 265F-2660 2663 2665-2666 2668 267B 267E 2692 2694-2697 2699 "
    "269B-269C 26A0 26A7 26B0-26B1 26C8 26CF 26D1 26D3 26E9 26F0-26F1 26F4 26F7-26F9 2702 "
    "2708-2709 270C-270D 270F 2712 2714 2716 271D 2721 2733-2734 2744 2747 2763-2764 27A1 "
    "2934-2935 2B05-2B07 3030 303D 3297 3299 1F170-1F171 1F17E-1F17F 1F202 1F237 1F321 "
    "1F324-1F32C 1F336 1F37D 1F396-1F397 1F399-1F39B 1F39E-1F39F 1F3CB-1F3CE 1F3D4-1F3DF 1F3F3 "
    "1F3F5 1F3F7 1F43F 1F441 1F4FD 1F549-1F54A 1F56F-1F570 1F573-1F579 1F587 1F58A-1F58D 1F590 "
    "1F5A5 1F5A8 1F5B1-1F5B2 1F5BC 1F5C2-1F5C4 1F5D1-1F5D3 1F5DC-1F5DE 1F5E1 1F5E3 1F5E8 1F5EF "
    "1F5F3 1F5FA 1F6CB 1F6CD-1F6CF 1F6E0-1F6E5 1F6E9 1F6F0 1F6F3"
)
_KEYS, _KEYCAP = frozenset("0123456789#*"), "\u20e3"


def visible(text: str, keep: str = "") -> str:
    """``text`` with what cannot be seen as Python escapes, except characters in ``keep``."""
    return _escaped(text, keep, lambda c: c.encode("unicode_escape").decode())


def _escaped(text: str, keep: str, escape: Callable[[str], str]) -> str:
    if text.isprintable() and (text.isascii() or UNSEEN.isdisjoint(text)):
        return text
    return "".join(
        c
        if (c.isprintable() and c not in UNSEEN)
        or c in keep
        or (c == EMOJI_STYLE and _is_emoji(text, at))
        else escape(c)
        for at, c in enumerate(text)
    )


def _is_emoji(text: str, at: int) -> bool:
    """True if the selector there makes an emoji of the sign before it."""
    before = text[at - 1 : at]
    return before in _SIGNS or (before in _KEYS and text[at + 1 : at + 2] == _KEYCAP)


def plural(number: int, what: str) -> str:
    """A count, like ``1 error`` or ``2 errors``."""
    return f"{number} {what}{'s' * (number != 1)}"


def times(number: int) -> str:
    """A number of times in words: ``once``, ``twice``, ``3 times``."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def format_size(count: float) -> str:
    """Bytes in powers of 1024: ``1.5 MiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(SIZE_UNITS) - 1:
        count, power = count / 1024, power + 1
    unit = "byte" if count == 1 and not power else SIZE_UNITS[power]
    return f"{f'{count:,.1f}'.removesuffix('.0')} {unit}"


def json_line(value: object) -> str:
    """JSON on one line with what cannot be seen as ``\\uXXXX``."""
    import json  # the SDK starts without it

    return json_visible(json.dumps(value, ensure_ascii=False))


def json_visible(text: str) -> str:
    """The same JSON with what cannot be seen in strings as ``\\uXXXX``.

    ``text`` has no line breaks or tabs between its values.
    """
    return _escaped(text, "", _json_escape)


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

    others = [candidate for candidate in known if candidate != word]
    if len(others) > most:
        return ""
    by_lower = {candidate.lower().lstrip("-"): candidate for candidate in sorted(others)}
    found = get_close_matches(word.lower().lstrip("-"), by_lower, 1)
    return f"did you mean {by_lower[found[0]]}?" if found else ""
