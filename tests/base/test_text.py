"""What is shown of others' text, plain and as JSON: nothing moves a cursor or turns text around."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.base.text import did_you_mean, json_line, json_visible, visible
from relay.cli.common import print_table

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
def test_M18_what_cannot_be_seen_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_M18_lines_may_stay_lines() -> None:
    assert visible("a\n\tb\r\x1b", keep="\n\t") == "a\n\tb\\r\\x1b"


@given(values)
def test_M18_json_means_the_same_and_is_printable(value: Any) -> None:
    line = json_line(value)
    assert line.isprintable()
    assert json.loads(line) == value


def test_M18_json_has_the_escapes_that_json_has() -> None:
    assert json_line({"é": "\x9b\u202e\x7f\U000e0041"}) == (
        '{"é": "\\u009b\\u202e\\u007f\\udb40\\udc41"}'
    )
    assert json_line("\ud800") == '"\\ud800"'
    assert json_visible('["\u2066"]') == '["\\u2066"]'


def test_M18_no_cell_of_a_table_is_raw(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A", "B"), [("x\x1b[2J", None)])
    assert capsys.readouterr().out == "A         B\nx\\x1b[2J  -\n"


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
