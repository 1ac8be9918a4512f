"""The lines that ``relay search`` shows of a message."""

from __future__ import annotations

from typing import Any

import pytest

from relay.cli.listing import MOST_LINES, _matching_lines
from relay.search.query import parse


def lines(words: str, content: str, most: int | None = None) -> list[str]:
    return _matching_lines(parse(words, ("message",)), content, most)


def test_each_line_with_a_match_once_and_not_all_of_them() -> None:
    text = "".join(f"{number} red, red and blue\nnone\n" for number in range(MOST_LINES + 1))
    expected = [f"{number} red, red and blue" for number in range(MOST_LINES)]
    assert lines("red", text) == lines("red blue", text) == expected
    assert lines("from:bob", text) == [expected[0]]
    assert lines('"blue\nnone\n1"', text) == [expected[0]]
    assert lines("sort:oldest", "\n") == [""]


def test_a_long_line_is_looked_up_once_however_many_matches_it_has() -> None:
    """A megabyte in one line, as of JSON, took minutes."""
    slices = []

    class Text(str):
        def __getitem__(self, key: Any) -> str:
            slices.append(key)
            return super().__getitem__(key)

    (line,) = lines("key", Text('{"key": 1}, ' * 5_000), 100)
    assert line.startswith('{"key": 1}, {"key"') and line.endswith("…") and len(line) <= 100
    assert len(slices) == 1


@pytest.mark.parametrize("most", [40, 41])
def test_a_line_that_is_cut_begins_before_its_first_match(most: int) -> None:
    (line,) = lines("red", "x" * 5_000 + "red" + "y" * 5_000, most)
    assert line == "…" + "x" * 20 + "red" + "y" * (most - 25) + "…"
