"""Tables for people: fitted to the terminal, coloured by what they say.

Into a pipe or a file a table is as wide as its cells and has no colours. The environment's
``NO_COLOR`` and ``TERM=dumb`` are respected, ``COLUMNS`` is the width where it is set.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence

import click

from relay.base.clock import NS_PER_S, local_time
from relay.base.text import visible

limit_option = click.option("--limit", type=click.IntRange(1), default=100, show_default=True)

GAP = "  "
BEFORE = 20  # characters of a text before the first part that is marked
ENOUGH = 20  # columns of the terminal in which a text can be recognized
LEAST = 5  # for any cell that is cut
NARROW, INDENT = 80, "    "
WHOLE = ("ID", "AT", "NAME", "SETTING")  # columns that are never cut
COLOURED = ("STATUS", "STATE", "SEVERITY", "DUE")
_COLOURS = {
    "red": "refused security failed dead bounced error overdue crashed terminated damaged nack",
    "yellow": (
        "held expired cancelled removed warning inactive silent waiting paused stopped retired"
    ),
    "green": "completed handled active running ready ok",
}
_COLOUR_OF = {word: colour for colour, words in _COLOURS.items() for word in words.split()}

wide_option = click.option("--wide", is_flag=True, help="Do not cut long lines.")


def print_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    wide: bool = False,
    flexible: Sequence[str] = (),
) -> None:
    """Print rows in columns; None is shown as ``-``, control characters are escaped.

    On a terminal the columns named in ``flexible`` (by default the last one) are cut to fit its
    width, the widest first, unless ``wide``; an end that was cut is ``…``. On a narrow one, where
    that would leave nothing to read, the last column has lines of its own.
    """
    most, cells = screen_columns(wide=wide), [_texts(row) for row in rows]
    if most is None or most >= NARROW or _least(header, cells, flexible) <= most:
        lines = table_lines(header, cells, most, flexible=flexible)
    else:
        first = table_lines(header[:-1], [row[:-1] for row in cells], most, flexible=flexible)
        last = [row[-1] for row in cells]
        title = colour(INDENT + header[-1], bold=True) if set(last) - {"-"} else ""
        below = (cut(INDENT + cell, most) if cell != "-" else "" for cell in last)
        pairs = zip(first, (title, *below), strict=True)
        lines = [line for pair in pairs for line in pair if line]
    for line in lines:
        click.echo(line)


def _least(header: Sequence[str], cells: Sequence[Sequence[str]], flexible: Sequence[str]) -> int:
    """Columns that a table takes if only what is flexible is cut."""
    total = len(GAP) * (len(header) - 1)
    for name, *column in zip(header, *cells, strict=True):
        width = max(map(_width, (name, *column)))
        total += min(width, ENOUGH) if name in (flexible or header[-1:]) else width
    return total


def _texts(row: Iterable[object]) -> list[str]:
    return ["-" if cell is None else visible(str(cell)) for cell in row]


def table_lines(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    most: int | None,
    *,
    flexible: Sequence[str] = (),
    numbers: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a table, at most ``most`` columns wide as far as cells can be cut.

    The columns named in ``numbers`` are aligned to the right.
    """
    cells = [_texts(row) for row in rows]
    widths = [max(map(_width, column)) for column in zip(header, *cells, strict=True)]
    if most is not None:
        wanted = [n for n, name in enumerate(header) if name in (flexible or header[-1:])]
        others = [n for n, name in enumerate(header) if name not in WHOLE]
        _fit(widths, wanted, others, most)
    titles = [
        _pad(name, width, name in numbers) for name, width in zip(header, widths, strict=True)
    ]
    lines = [colour(GAP.join(titles).rstrip(), bold=True)]
    for row in cells:
        shown = [
            (colour_by_word if name in COLOURED else str)(_pad(cell, width, name in numbers))
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        lines.append(GAP.join(shown).rstrip())
    return lines


def screen_columns(*, wide: bool = False) -> int | None:
    """Columns of the terminal; None if stdout is not one, or if nothing is to be cut."""
    return None if wide or not sys.stdout.isatty() else shutil.get_terminal_size().columns


def _fit(widths: list[int], flexible: Sequence[int], others: Sequence[int], most: int) -> None:
    """Make columns narrower until all fit, the widest first: flexible ones, then others."""
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - most
    for columns, least in ((flexible, ENOUGH), (others, LEAST)):
        while excess > 0:
            column = max(columns, key=lambda n: widths[n], default=None)
            if column is None or widths[column] <= least:
                break
            widths[column] -= 1
            excess -= 1


def _width(text: str) -> int:
    """Columns that a text takes on a terminal: two for a wide character."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cut(text: str, width: int) -> str:
    """Cut a text to ``width`` columns of the terminal; an end that was cut is ``…``."""
    if _width(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1).rstrip() + "…"


def cut_middle(text: str, most: int) -> str:
    """Cut a text to ``most`` characters; what was cut from its middle is ``…``."""
    if len(text) <= most:
        return text
    end = most // 2
    return f"{text[: most - end - 1]}…{text[len(text) - end :]}"


def _pad(text: str, width: int, is_number: bool) -> str:
    shown = cut(text, width)
    space = " " * (width - _width(shown))
    return space + shown if is_number else shown + space


def is_coloured() -> bool:
    """True when stdout is a terminal that shows colours, and the user wants them."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return wanted and sys.stdout.isatty()


def colour(text: str, name: str | None = None, *, bold: bool = False) -> str:
    """Colour a text if stdout shows colours."""
    is_plain = name is None and not bold
    return text if is_plain or not is_coloured() else click.style(text, fg=name, bold=bold or None)


def colour_by_word(text: str) -> str:
    """Colour a state or an outcome by its first word: red failed, yellow waits, green is done."""
    return colour(text, _COLOUR_OF.get(text.split(maxsplit=1)[0].rstrip(":,") if text else ""))


def highlight(text: str, parts: Sequence[tuple[int, int]], most: int | None = None) -> str:
    """Escape a text, with parts of it marked if stdout shows colours.

    ``parts``: begin and end of each. A text that takes more than ``most`` columns is cut: it begins
    shortly before the first part.
    """
    is_cut = most is not None and _width(visible(text)) > most
    at = max(0, parts[0][0] - BEFORE) if is_cut else 0
    shown = "…" if at else ""
    left = (most or 0) - len(shown) - 1  # the last column is for the ellipsis
    for begin, end in (*parts, (len(text), len(text))):
        for piece, name in ((visible(text[at:begin]), None), (visible(text[begin:end]), "red")):
            if is_cut and _width(piece) > left:
                return shown + colour(cut(piece, left + 1), name, bold=name is not None)
            left -= _width(piece)
            shown += colour(piece, name, bold=name is not None)
        at = end
    return shown


def day_of(at_ns: int) -> str:
    """Format the local day with the time zone, as a line above times: ``2026-11-22 CET``."""
    return time.strftime("%Y-%m-%d %Z", time.localtime(at_ns // NS_PER_S)).strip()


def clock_of(at_ns: int) -> str:
    """Format the local time of day with milliseconds: ``20:01:02.007``."""
    return local_time(at_ns, precise=True).partition(" ")[2]
