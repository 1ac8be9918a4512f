"""Tables as people see them: in a pipe, and on terminals of several widths."""

from __future__ import annotations

import sys

import pexpect
import pytest

from relay.base.clock import local_time
from relay.cli.tables import cut, highlight, print_table
from tests.procs import PATIENCE_S

TABLE = """
from relay.cli.tables import print_table
print_table(("ID", "STATUS", "BODY"), [("3f6777fc", "failed", "x" * 100), ("cafe", None, "y")], {})
"""


def on_a_terminal(columns: int, options: str = "wide=False", **env: str) -> list[str]:
    """Print the table on a terminal so wide; its lines."""
    code = TABLE.replace("{}", options)
    env = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "NO_COLOR": "1"} | env
    view = pexpect.spawn(
        sys.executable,
        ["-c", code],
        dimensions=(24, columns),
        env=env,
        encoding="utf-8",
        timeout=PATIENCE_S,
    )
    shown: str = view.read()
    view.close()
    return shown.split("\r\n")[:-1]


def test_a_pipe_gets_whole_cells_and_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cut for programs, and nothing on a line ends with blanks."""
    print_table(("ID", "BODY"), [("a\x1b[2J", "x" * 300), (None, "日本")])
    assert capsys.readouterr().out.splitlines() == [
        "ID        BODY",
        f"a\\x1b[2J  {'x' * 300}",
        "-         日本",
    ]


@pytest.mark.parametrize("columns", [60, 120])
def test_the_last_column_is_cut_to_the_terminal(columns: int) -> None:
    """Every line fits; what was cut ends with an ellipsis."""
    lines = on_a_terminal(columns)
    assert [len(line) for line in lines] == [22, columns if columns < 118 else 118, 19]
    assert lines[1].endswith("…") is (columns < 118)


FIVE = """
from relay.cli.tables import print_table
row = ("3f6777fc", "a-reviewer", "another-one", "overdue 4 min", "which branch? " * 9)
print_table(("ID", "FROM", "TO", "STATUS", "BODY"), [row, ("cafe", "bob", "alice", "read", None)])
"""


@pytest.mark.parametrize("columns", [60, 72])
def test_a_narrow_terminal_has_the_last_column_on_lines_of_its_own(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a few letters of each cell would be left; a row without one has no second line."""
    monkeypatch.setitem(globals(), "TABLE", FIVE)
    lines = on_a_terminal(columns)
    assert max(map(len, lines)) <= columns
    row = "3f6777fc  a-reviewer  another-one  overdue 4 min"
    if columns > 60:
        assert len(lines) == 3 and lines[1].startswith(f"{row}  which branch?")
    else:
        assert lines == [
            "ID        FROM        TO           STATUS",
            "    BODY",
            row,
            f"    {'which branch? ' * 9}"[:59] + "…",
            "cafe      bob         alice        read",
        ]


def test_wide_cuts_nothing() -> None:
    """As a pipe would get it."""
    assert "".join(on_a_terminal(60, "wide=True")).count("x") == 100


def test_outcomes_are_coloured_on_a_terminal_that_has_colours() -> None:
    """Red for what failed; none with NO_COLOR or a dumb terminal."""
    assert "\x1b[31mfailed" in on_a_terminal(200, NO_COLOR="")[1]
    for env in ({"NO_COLOR": "1"}, {"NO_COLOR": "", "TERM": "dumb"}):
        assert "\x1b" not in "".join(on_a_terminal(200, **env))


def test_wide_characters_take_two_columns() -> None:
    """A text is cut by what it takes on the screen."""
    assert cut("日本語", 6) == "日本語"
    assert cut("日本語", 5) == "日本…"
    assert cut("abcdef", 4) == "abc…"


def test_a_long_line_is_cut_around_its_first_match() -> None:
    """The match is seen, whatever comes before it; a line that fits is whole."""
    line = "a" * 100 + "match" + "b" * 100 + "match"
    parts = [(100, 105), (205, 210)]
    assert highlight(line, parts) == line
    assert highlight(line, parts, 210) == line
    assert highlight(line, parts, 40) == "…" + "a" * 20 + "match" + "b" * 13 + "…"
    assert highlight("match" + "b" * 100, [(0, 5)], 10) == "matchbbbb…"
    assert highlight("a\x1bmatch", [(2, 7)], 80) == "a\\x1bmatch"
    for most in range(8, 120):
        assert len(highlight(line, parts, most)) <= most


def test_times_are_local_and_as_short_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    now = 1_795_374_062 * 10**9
    assert local_time(now - 3600 * 10**9, now) == "19:01:02"
    assert local_time(now - 3 * 86_400 * 10**9, now) == "2026-11-19 20:01"
    assert local_time(now + 7 * 10**6, precise=True) == "2026-11-22 20:01:02.007"
    monkeypatch.undo()
    time.tzset()
