"""The charts of a report, each with the table and columns that it needs, and the heat map of pairs.

A chart is made when its table exists with those columns. For a table without rows it is a
sentence.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from relay.audit.report import timelines
from relay.audit.report.drawing import HEAT, ROLES, Drawing, Size, draw_both, figure
from relay.audit.report.tables import Table, anchor_id, shortened
from relay.audit.report.timelines import ChartParts
from relay.audit.summary import with_noun
from relay.base.text import format_size

MOST_PAIRS = 20_000  # read for the chart, the busiest
MOST_AGENTS = 20  # a side; the others are one row and one column
MOST_NUMBERED = 12  # with more columns than this a square has no room for its number
MOST_LABEL = 16  # characters
OTHERS = "(others)"
LINKED = 100  # pairs whose rows are in the page, the busiest
_CELL = 0.36  # inches


class Matrix(NamedTuple):
    """The chart's squares."""

    senders: list[str]
    recipients: list[str]
    messages: dict[tuple[str, str], int]
    bytes: dict[tuple[str, str], int]
    links: dict[tuple[str, str], str]


def talks(slug: str, tables: Mapping[str, Table]) -> ChartParts:
    """Draw the heat map of the busiest agents of ``traffic``."""
    table = tables["traffic"]
    rows = table.largest("messages", MOST_PAIRS)
    matrix = _matrix(rows)
    wide, narrow = draw_both(slug, lambda size: _draw(matrix, size))
    top = rows[0]
    total = sum(row["messages"] for row in rows)
    text = (
        f"{with_noun(table.count, 'pair')}, {with_noun(total, 'message')}. The busiest: "
        f"{shortened(top['sender'])} to {shortened(top['recipient'])}, "
        f"{with_noun(top['messages'], 'message')}, {format_size(top['bytes'] or 0)}."
    )
    note = "A message to several counts once for each."
    if OTHERS in (*matrix.senders, *matrix.recipients):
        note += f" Agents beyond the busiest {MOST_AGENTS} are {OTHERS}."
    if table.count > MOST_PAIRS:
        note += f" Of the pairs the busiest {MOST_PAIRS:,} are counted."
    return ChartParts(text, note, wide, narrow)


def _matrix(rows: list[dict[str, object]]) -> Matrix:
    senders, recipients = _busiest(rows, "sender"), _busiest(rows, "recipient")
    messages: dict[tuple[str, str], int] = defaultdict(int)
    size: dict[tuple[str, str], int] = defaultdict(int)
    links: dict[tuple[str, str], str] = {}
    for number, row in enumerate(rows):
        sender = str(row["sender"]) if row["sender"] in senders else OTHERS
        recipient = str(row["recipient"]) if row["recipient"] in recipients else OTHERS
        pair = (sender, recipient)
        messages[pair] += int(str(row["messages"]))
        size[pair] += int(str(row["bytes"] or 0))
        if OTHERS not in pair and number < LINKED:
            links[pair] = f"#{anchor_id('row', 'traffic', str(number))}"
    return Matrix(
        _with_others(senders, {pair[0] for pair in messages}),
        _with_others(recipients, {pair[1] for pair in messages}),
        messages,
        size,
        links,
    )


def _busiest(rows: list[dict[str, object]], side: str) -> list[str]:
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        totals[str(row[side])] += int(str(row["messages"]))
    ordered = sorted(totals, key=lambda name: (-totals[name], name))
    return sorted(ordered[:MOST_AGENTS])


def _with_others(names: list[str], seen: set[str]) -> list[str]:
    return [*names, OTHERS] if OTHERS in seen else names


def _draw(matrix: Matrix, size: Size) -> Drawing:
    columns, rows = len(matrix.recipients), len(matrix.senders)
    made, (axis,) = figure(size, max(1.6, 1.2 + rows * _CELL * (0.72 if size.narrow else 1)))
    axis.grid(False)
    axis.spines["bottom"].set_visible(False)
    axis.set_xlim(0, columns)
    axis.set_ylim(rows, 0)
    titles: dict[str, str] = {}
    for y, sender in enumerate(matrix.senders):
        for x, recipient in enumerate(matrix.recipients):
            gid = f"cell-{y}-{x}"
            _draw_cell(axis, matrix, (x, y), gid, is_narrow=size.narrow)
            if matrix.messages.get((sender, recipient)):
                titles[gid] = _title(matrix, sender, recipient)
    axis.set_yticks([y + 0.5 for y in range(rows)], [_label(name) for name in matrix.senders])
    many = columns > (4 if size.narrow else 10)
    axis.set_xticks(
        [x + 0.5 for x in range(columns)],
        [_label(name) for name in matrix.recipients],
        rotation=90 if many else 0,
    )
    axis.xaxis.tick_top()
    axis.tick_params(length=0, labelcolor=ROLES["ink"])
    axis.set_ylabel("sender", color=ROLES["muted"])
    axis.xaxis.set_label_position("top")
    axis.set_xlabel("recipient", color=ROLES["muted"])
    return Drawing(made, titles)


def _draw_cell(
    axis: Axes, matrix: Matrix, at: tuple[int, int], gid: str, *, is_narrow: bool
) -> None:
    """Draw the square at a column and row, with a link, and its number where there is room."""
    x, y = at
    pair = (matrix.senders[y], matrix.recipients[x])
    count = matrix.messages.get(pair, 0)
    step = _step(count, max(matrix.messages.values()))
    square = Rectangle((x + 0.03, y + 0.04), 0.94, 0.92, facecolor=HEAT[step], linewidth=0)
    square.set_gid(gid)
    axis.add_patch(square)
    if not count:
        return
    square.set_url(matrix.links.get(pair, "#table-traffic"))
    if len(matrix.recipients) <= (6 if is_narrow else MOST_NUMBERED):
        axis.text(
            x + 0.5,
            y + 0.53,
            _short(count),
            ha="center",
            va="center",
            fontsize=9,
            color=ROLES["paper"] if step > 4 else ROLES["ink"],
        )


def _title(matrix: Matrix, sender: str, recipient: str) -> str:
    pair = (sender, recipient)
    messages, size = with_noun(matrix.messages[pair], "message"), format_size(matrix.bytes[pair])
    return f"{shortened(sender)} to {shortened(recipient)}: {messages}, {size}"


def _step(count: int, most: int) -> int:
    """Return 0 for none, else 1 to 8 by the logarithm: one busy pair must not hide the others."""
    if not count:
        return 0
    return 1 + round(7 * math.log1p(count) / math.log1p(most))


def _short(count: int) -> str:
    for step, length in (("M", 1_000_000), ("k", 10_000)):
        if count >= length:
            return f"{count / (1_000_000 if step == 'M' else 1000):,.0f}{step}"
    return f"{count:,}"


def _label(name: str) -> str:
    name = shortened(name)
    return name if len(name) <= MOST_LABEL else name[: MOST_LABEL - 1] + "…"


@dataclass(frozen=True)
class Chart:
    """A figure of the page."""

    slug: str
    title: str
    table: str  # whose rows it shows
    summary: str  # its numbers in words
    note: str = ""  # on how it was made
    wide: str = ""  # svg elements; empty without data
    narrow: str = ""


@dataclass(frozen=True)
class ChartType:
    """A type of chart, with the table that it needs."""

    slug: str
    title: str
    table: str
    needs: tuple[str, ...]
    make: Callable[[str, Mapping[str, Table]], timelines.ChartParts]
    empty: str


CHART_TYPES = (
    ChartType(
        "latency",
        "Latency over time",
        "latency",
        ("stage", "hour", "p50_ms", "p90_ms", "p99_ms"),
        timelines.latency,
        "No message went through a stage.",
    ),
    ChartType(
        "throughput",
        "Throughput",
        "traffic_hours",
        ("hour", "messages", "bytes"),
        timelines.throughput,
        "No message was written.",
    ),
    ChartType(
        "talks",
        "Who talks to whom",
        "traffic",
        ("sender", "recipient", "messages", "bytes"),
        talks,
        "No agent wrote to another.",
    ),
    ChartType(
        "dead",
        "Dead letters",
        "dead_letters_reasons",
        ("day", "reason_kind", "letters"),
        timelines.dead_letters,
        "No dead letters.",
    ),
    ChartType(
        "capacity",
        "Capacity",
        "capacity",
        ("day", "total_bytes"),
        timelines.capacity,
        "No day has been measured.",
    ),
)


def charts(tables: Mapping[str, Table]) -> list[Chart]:
    """Make the charts of these tables, in the order of the page."""
    return [
        _chart(kind, tables)
        for kind in CHART_TYPES
        if kind.table in tables and tables[kind.table].has(*kind.needs)
    ]


def _chart(kind: ChartType, tables: Mapping[str, Table]) -> Chart:
    has_rows = tables[kind.table].count > 0
    made = kind.make(kind.slug, tables) if has_rows else timelines.ChartParts(kind.empty)
    return Chart(
        kind.slug,
        kind.title,
        kind.table,
        made.summary or kind.empty,
        made.note,
        made.wide,
        made.narrow,
    )
