"""Text of others as it is shown, time, and errors: the small words of everything else."""

from __future__ import annotations

import inspect
import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.base import errors
from relay.base.clock import NS_PER_S, iso_date, iso_time
from relay.base.errors import EXIT_CODES, MessageError, RelayError
from relay.base.text import did_you_mean, json_line, json_visible, visible

values = st.recursive(
    st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ✓ é 漢字", "plain ✓ é 漢字"),
        ("\x1b]0;t\x07", r"\x1b]0;t\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("a\u200bb\ufeff\u00ad", r"a\u200bb\ufeff\xad"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
    ],
)
def test_what_cannot_be_seen_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


# Default_Ignorable_Code_Point of Unicode 17, without those that are control characters anyway; then
# what is assigned and has no glyph: braille blank, joiners, Egyptian blanks, fillers, spaces.
UNSEEN = """34f 115f-1160 17b4-17b5 180b-180f 2065 3164 fe00-fe0f ffa0 fff0-fff8 e0000-e0fff
2800 2d7f 1107f 13441-13442 16fe4 1d159 1da7f-1da80"""


def test_of_all_of_unicode_what_cannot_be_seen_is_an_escape() -> None:
    unseen = set()
    for one in UNSEEN.split():
        first, _, last = one.partition("-")
        unseen |= set(range(int(first, 16), int(last or first, 16) + 1))
    # control, format, surrogate, private, unassigned; spaces that are not the space
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for c in map(chr, range(0x110000)):
        is_raw = unicodedata.category(c)[0] not in "CZ" or c == " "
        kinds[is_raw and ord(c) not in unseen].append(c)
    raw, escaped = "".join(kinds[True]), "".join(kinds[False])
    for show in (visible, json_visible):
        assert show(raw) == raw
        shown = show(escaped)
        assert set(shown).isdisjoint(kinds[False])
        assert shown.count("\\") >= len(escaped)
    assert visible("a\ufe00b\U000e0100\u3164") == r"a\ufe00b\U000e0100\u3164"
    assert json_line("\U000e0100") == '"\\udb40\\udd00"'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("I ❤\ufe0f it ☺\ufe0f", "I ❤\ufe0f it ☺\ufe0f"),  # emoji in place of signs: it is seen
        ("3\ufe0f\u20e3", "3\ufe0f\u20e3"),  # a keycap
        ("⭐\ufe0f", r"⭐\ufe0f"),  # an emoji as it is: it would be a bit that nobody sees
        ("3\ufe0f", r"3\ufe0f"),
        ("❤\ufe0e", r"❤\ufe0e"),
        ("❤\ufe0f\ufe0f", "❤\ufe0f\\ufe0f"),
        ("❤\ufe0f\U000e0101", "❤\ufe0f\\U000e0101"),
        ("\ufe0f❤", r"\ufe0f❤"),
    ],
)
def test_a_selector_stays_where_it_makes_an_emoji_of_a_sign(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_no_text_is_hidden_in_an_emoji() -> None:
    """Each byte as a variation selector, as hidden instructions are written."""
    selectors = "".join(chr(0xFE00 + b if b < 16 else 0xE0100 + b - 16) for b in b"run \x0f\x0f!")
    said = visible(f"thanks ❤\ufe0f{selectors}")
    assert said.startswith("thanks ❤\ufe0f\\U000e0162\\U000e0165\\U000e015e")
    assert [c for c in said if unicodedata.category(c) == "Mn"] == ["\ufe0f"]


def test_lines_may_stay_lines() -> None:
    assert visible("a\n\tb\r\x1b", keep="\n\t") == "a\n\tb\\r\\x1b"


@settings(max_examples=40)  # of all of Unicode it is shown above
@given(values)
def test_json_means_the_same_and_is_printable(value: Any) -> None:
    line = json_line(value)
    assert line.isprintable()
    assert json.loads(line) == value


def test_json_has_the_escapes_that_json_has() -> None:
    assert json_line({"é": "\x9b\u202e\x7f\U000e0041"}) == (
        '{"é": "\\u009b\\u202e\\u007f\\udb40\\udc41"}'
    )
    assert json_line("\ud800") == '"\\ud800"'
    assert json_visible('["\u2066"]') == '["\\u2066"]'


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [
        ("bbo", ["alice", "bob"], "did you mean bob?"),
        ("BOB", ["alice", "bob"], "did you mean bob?"),
        ("bob", ["bob"], ""),
        ("xyz", ["alice", "bob"], ""),
        ("bbo", [], ""),
        ("agent1", [f"agent{number}" for number in range(10_000)], ""),  # too many to compare
    ],
)
def test_the_word_that_was_meant_is_named(word: str, known: list[str], said: str) -> None:
    assert did_you_mean(word, known) == said


CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, RelayError) and cls.__module__ == errors.__name__
]

# -- clock ---------------------------------------------------------------------------------


def test_time_is_utc_with_microseconds() -> None:
    assert iso_time(0) == "1970-01-01T00:00:00.000000Z"
    assert iso_time(1_769_851_800_000_001_999) == "2026-01-31T09:30:00.000001Z"
    assert iso_date(1_769_851_800_000_001_999) == "2026-01-31"
    assert iso_date(86_400 * NS_PER_S - 1) == "1970-01-01"
    assert iso_date(86_400 * NS_PER_S) == "1970-01-02"


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_says_what_it_is_and_how_to_exit(cls: type[RelayError]) -> None:
    assert cls.__doc__ and cls.__doc__.endswith(".")
    assert cls.exit_code in EXIT_CODES and cls.exit_code != errors.EXIT_OK
    assert cls.hint == " ".join(cls.hint.split())


def test_every_exit_code_is_explained() -> None:
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert {code for code in codes if isinstance(code, int)} == EXIT_CODES.keys()


def test_an_error_is_one_line_whatever_it_is_given() -> None:
    error = RelayError("a\nb\r\n  c\t", hint="do this")
    assert str(error) == "a b c"
    assert error.hint == "do this"
    assert RelayError.hint == ""


def test_a_message_error_says_where() -> None:
    said = {
        "given twice": MessageError("given twice"),
        "a.msg: given twice": MessageError("given twice", file="a.msg"),
        "line 3, header X: given twice": MessageError("given twice", line=3, header="X"),
    }
    assert all(str(error) == text and error.rule == "given twice" for text, error in said.items())
    error = MessageError("given twice", file="a.msg", line=3, header="X")
    assert str(error) == "a.msg, line 3, header X: given twice"
