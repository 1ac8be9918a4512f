"""The charts of a report: a few numbers each as bars, or as lines of one path.

A line's drawing has no text and stretches with the window, so one serves every width; what its
axes say stands beside it in HTML. The template writes all of it, and escapes the text.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relay.audit.report.tables import Row, Table, anchor_id, cell, duration_ms, shortened
from relay.audit.summary import with_noun
from relay.base.text import format_size

MOST_READ = 200_000  # hours times stages: five years of them
MOST_POINTS = 200  # of a line; beyond that a point is the worst of several hours
MOST_BARS = 12
MOST_PANELS = 6
LINKED = 40  # pairs whose rows are in the page, the busiest
QUANTILES = ("p50_ms", "p90_ms", "p99_ms")
WIDTH, HEIGHT = 600.0, 100.0  # of a drawing, in its own units


@dataclass(frozen=True)
class Bar:
    """A bar of a list: its share of the longest in percent, and what it says."""

    label: str
    percent: float
    text: str
    link: str = ""


@dataclass(frozen=True)
class Panel:
    """Lines over time, with the texts of the axes' ends."""

    title: str
    lines: list[str]  # the points of each, as SVG has them
    top: str
    bottom: str
    begin: str
    end: str


@dataclass(frozen=True)
class Chart:
    """A figure of the page."""

    summary: str  # its numbers in words
    note: str = ""
    bars: Sequence[Bar] = ()
    panels: Sequence[Panel] = ()
    table: str = ""  # whose rows it shows
    title: str = ""


def charts(tables: Mapping[str, Table]) -> list[Chart]:
    """Make the charts of these tables, in the order of the page."""
    made = []
    for name, (title, needs, empty, make) in _KINDS.items():
        table = tables.get(name)
        if table is not None and table.has(*needs):
            rows = table.largest(needs[-1], MOST_READ) if table.count else []
            made.append(replace(make(rows) if rows else Chart(empty), table=name, title=title))
    return made


def _latency(rows: list[Row]) -> Chart:
    stages: dict[str, list[Row]] = defaultdict(list)
    for row in sorted((row for row in rows if row["hour"]), key=lambda row: str(row["hour"])):
        stages[str(row["stage"])].append(row)
    panels: list[Panel] = []
    for stage, of in list(stages.items())[:MOST_PANELS]:
        panels += _panel(shortened(stage), of, "hour", QUANTILES, duration_ms, is_log=True)
    known = [row for row in rows if row["p99_ms"] is not None]
    text = "No percentile is known."
    if known:
        worst = max(known, key=lambda row: float(row["p99_ms"]))
        text = (
            f"The slowest hour, {cell(worst['hour'])}: 99 of 100 messages took at most "
            f"{duration_ms(worst['p99_ms'])} for {shortened(str(worst['stage']))}."
        )
    note = "Lines from below: p50, p90, p99; the scale is logarithmic."
    if any(len(of) > MOST_POINTS for of in stages.values()):
        note += " Each point is the worst of several hours."
    return Chart(text, note, panels=panels)


def _throughput(rows: list[Row]) -> Chart:
    rows = sorted((row for row in rows if row["hour"]), key=lambda row: str(row["hour"]))
    total = sum(row["messages"] or 0 for row in rows)
    busiest = max(rows, key=lambda row: row["messages"] or 0, default=None)
    text = f"{with_noun(total, 'message')}, {format_size(sum(row['bytes'] or 0 for row in rows))}."
    if busiest is not None:
        count = with_noun(busiest["messages"] or 0, "message")
        text += f" The busiest hour, {cell(busiest['hour'])}: {count}."
    panels = [
        *_panel("Messages an hour", rows, "hour", ("messages",), lambda value: f"{value:,.0f}"),
        *_panel("Bytes an hour", rows, "hour", ("bytes",), format_size),
    ]
    return Chart(text, panels=panels)


def _talks(rows: list[Row]) -> Chart:
    rows = sorted(rows, key=lambda row: -(row["messages"] or 0))
    total = sum(row["messages"] or 0 for row in rows)
    bars = []
    for number, row in enumerate(rows[:MOST_BARS]):
        label = f"{shortened(row['sender'])} to {shortened(row['recipient'])}"
        count = with_noun(row["messages"] or 0, "message")
        said = f"{count}, {format_size(row['bytes'] or 0)}"
        link = f"#{anchor_id('row', 'traffic', str(number))}" if number < LINKED else ""
        bars.append(Bar(label, _percent(row["messages"], rows[0]["messages"]), said, link))
    note = f"The busiest {len(bars)} of {len(rows):,}. A message to several counts once for each."
    text = f"{with_noun(len(rows), 'pair')}, {with_noun(total, 'message')}."
    text += f" The busiest: {bars[0].label}." if bars else ""
    return Chart(text, note, bars=bars)


def _dead_letters(rows: list[Row]) -> Chart:
    tally: dict[str, int] = defaultdict(int)
    for row in rows:
        tally[shortened(str(row["reason_kind"] or "(no reason)"))] += row["letters"] or 0
    ordered = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    bars = [
        Bar(reason, _percent(count, ordered[0][1]), f"{count:,}")
        for reason, count in ordered[:MOST_BARS]
    ]
    return Chart(f"{with_noun(sum(tally.values()), 'dead letter')}.", bars=bars)


def _capacity(rows: list[Row]) -> Chart:
    rows = sorted(rows, key=lambda row: str(row["day"]))
    size = format_size(rows[-1]["total_bytes"] or 0)
    text = f"What came in on {cell(rows[-1]['day'])} takes {size} of the disk."
    panels = _panel("Bytes a day", rows, "day", ("total_bytes",), format_size)
    return Chart(text, panels=panels)


def _percent(value: Any, most: Any) -> float:
    return round(100 * (value or 0) / most, 1) if most else 0.0


def _panel(
    title: str,
    rows: list[Row],
    moment: str,
    columns: Sequence[str],
    shown: Callable[[float], str],
    *,
    is_log: bool = False,
) -> list[Panel]:
    """Draw the columns over the rows' own order, a gap in time is not drawn; of one row, nothing.

    One hour or day is not drawn: the chart's summary says it.
    """
    if len(rows) < 2:
        return []
    width = -(-len(rows) // MOST_POINTS) or 1
    lists = []
    for column in columns:
        known = [float(row[column] or 0) for row in rows]
        lists.append([max(known[at : at + width]) for at in range(0, len(known), width)])
    # A clock that was set back makes a latency negative: nothing that a logarithm knows.
    values = [value for of in lists for value in of if value > 0]
    high = max(values, default=1.0)
    low = min(values, default=0.1) if is_log else 0.0

    def scaled(value: float) -> float:
        value = max(value, low)
        if not is_log:
            return value / high
        return math.log(value / low) / math.log(high / low) if high > low else 0.5

    lines = [_points([scaled(value) for value in of]) for of in lists]
    begin, end = cell(rows[0][moment]), cell(rows[-1][moment])
    return [Panel(title, lines, shown(high), shown(low) if is_log else "0", begin, end)]


def _points(shares: list[float]) -> str:
    """Place shares of the height from left to right."""
    step = WIDTH / max(1, len(shares) - 1)
    return " ".join(f"{at * step:.0f},{HEIGHT * (1 - y):.0f}" for at, y in enumerate(shares))


# table -> title, the columns needed (rows with the largest of the last are read), when empty
_KINDS: dict[str, tuple[str, tuple[str, ...], str, Callable[[list[Row]], Chart]]] = {
    "latency": (
        "Latency over time",
        ("stage", *QUANTILES, "hour"),
        "No message went through a stage.",
        _latency,
    ),
    "traffic_hours": (
        "Throughput",
        ("messages", "bytes", "hour"),
        "No message was written.",
        _throughput,
    ),
    "traffic": (
        "Who talks to whom",
        ("sender", "recipient", "bytes", "messages"),
        "No agent wrote to another.",
        _talks,
    ),
    "dead_letters_reasons": (
        "Dead letters",
        ("day", "reason_kind", "letters"),
        "No dead letters.",
        _dead_letters,
    ),
    "capacity": ("Capacity", ("total_bytes", "day"), "No day has been measured.", _capacity),
}
