"""Charts along time: latency, throughput, dead letters, capacity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import NamedTuple

from matplotlib.ticker import FixedLocator, NullLocator

from relay.audit.report.drawing import (
    DASHES,
    SERIES,
    Drawing,
    Size,
    as_text,
    byte_axis,
    count_axis,
    draw_both,
    figure,
    legend,
    panel_title,
    time_axis,
)
from relay.audit.report.tables import Row, Table, cell, duration_ms, shortened
from relay.base.text import format_size

MOST_ROWS = 200_000  # hours times stages: five years of them
MOST_POINTS = 400  # of a line; beyond that a point is a day
MOST_KINDS = 6  # panels or lines of a chart; the others are one
OTHERS = "(others)"
NO_REASON = "(no reason)"
NO_PARTS = ("message_bytes", "total_bytes")  # of capacity: a part of another, and the sum
MOST_TICKS = 6
_SECOND, _MINUTE, _HOUR, _DAY = 1e3, 6e4, 3.6e6, 8.64e7  # ms
TICKS_MS = (
    *(0.01, 0.1, 1, 10, 100),
    *(_SECOND, 10 * _SECOND, _MINUTE, 10 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 10 * _DAY, 100 * _DAY),
)
QUANTILES = ("p50_ms", "p90_ms", "p99_ms")
MOST_LABEL = 44  # characters
MORE_HEADROOM = 1.5  # of a logarithmic axis


class ChartParts(NamedTuple):
    """The text and drawings of a chart."""

    summary: str
    note: str = ""
    wide: str = ""
    narrow: str = ""


Moment = datetime | date


def latency(slug: str, tables: Mapping[str, Table]) -> ChartParts:
    """Draw percentiles, one panel a stage."""
    rows = _since(tables["latency"], "hour", ("stage", "hour", *QUANTILES))
    by_stage: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["hour"] is not None:
            by_stage[str(row["stage"])].append(row)
    by_stage = dict(list(by_stage.items())[:MOST_KINDS])
    if not by_stage:
        return ChartParts("")
    daily = any(len(of) > MOST_POINTS for of in by_stage.values())
    lines = {
        stage: _by_day(of, QUANTILES, max) if daily else sorted(of, key=lambda row: row["hour"])
        for stage, of in by_stage.items()
    }
    wide, narrow = draw_both(slug, lambda size: _draw_latency(lines, size))
    worst = max(
        (row for row in rows if row["p99_ms"] is not None),
        key=lambda row: row["p99_ms"],
        default=None,
    )
    text = "No percentile is known."
    if worst is not None:
        text = (
            f"The slowest hour, {cell(worst['hour'])}: 99 of 100 messages took at most "
            f"{duration_ms(worst['p99_ms'])} for {worst['stage']}."
        )
    note = "Each point is the worst hour of a day." if daily else "Each point is an hour."
    return ChartParts(text, note + " The scale is logarithmic; times are UTC.", wide, narrow)


def _draw_latency(lines: dict[str, list[Row]], size: Size) -> Drawing:
    across = 1 if size.narrow or len(lines) == 1 else 2
    down = -(-len(lines) // across)
    made, panels = figure(size, 0.4 + 2.1 * down, down, across)
    for axis, (stage, rows) in zip(panels, lines.items(), strict=False):
        moments = [row["hour"] for row in rows]
        for number, column in enumerate(QUANTILES):
            # A clock that was set back makes a latency negative: nothing a logarithm knows.
            values = [row[column] if (row[column] or 0) > 0 else None for row in rows]
            axis.plot(
                moments,
                [float("nan") if value is None else value for value in values],
                color=SERIES[number],
                linestyle=DASHES[number],
                linewidth=1.6,
                marker="o" if len(rows) <= 48 else None,
                markersize=3,
                label=column.removesuffix("_ms"),
            )
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.set_ylim(low / MORE_HEADROOM, high * MORE_HEADROOM)
        axis.yaxis.set_major_locator(FixedLocator(_round_durations(low, high)))
        axis.yaxis.set_major_formatter(as_text(duration_ms))
        axis.yaxis.set_minor_locator(NullLocator())
        time_axis(axis, moments, size)
        panel_title(axis, stage)
    for axis in panels[len(lines) :]:
        axis.set_axis_off()
    legend(panels[0], size)
    return Drawing(made, {})


def _round_durations(low: float, high: float) -> list[float]:
    """Choose a few round durations for the ticks, in milliseconds."""
    within = [tick for tick in TICKS_MS if low / MORE_HEADROOM <= tick <= high * MORE_HEADROOM]
    return within[:: -(-len(within) // MOST_TICKS)] if within else [low]


def throughput(slug: str, tables: Mapping[str, Table]) -> ChartParts:
    """Draw messages and bytes, an hour or a day a bar."""
    table = tables["traffic_hours"]
    rows = [row for row in _since(table, "hour", ("hour", "messages", "bytes")) if row["hour"]]
    if not rows:
        return ChartParts("")
    daily = len(rows) > MOST_POINTS // 2
    shown = _by_day(rows, ("messages", "bytes"), _sum) if daily else rows
    per = "day" if daily else "hour"
    wide, narrow = draw_both(slug, lambda size: _draw_throughput(shown, per, size))
    busiest = max(rows, key=lambda row: row["messages"] or 0)
    text = (
        f"{sum(row['messages'] or 0 for row in rows):,} messages, "
        f"{format_size(sum(row['bytes'] or 0 for row in rows))}. The busiest hour, "
        f"{cell(busiest['hour'])}: {busiest['messages'] or 0:,} messages."
    )
    return ChartParts(text, f"Each bar is {'a day' if daily else 'an hour'}, UTC.", wide, narrow)


def _draw_throughput(rows: list[Row], per: str, size: Size) -> Drawing:
    made, (above, below) = figure(size, 3.9, 2, 1)
    moments = [row["hour"] for row in rows]
    length = 0.9 if per == "day" else 0.9 / 24  # days
    for axis, column, scaled, colour in (
        (above, "messages", count_axis, SERIES[0]),
        (below, "bytes", byte_axis, SERIES[1]),
    ):
        values = [row[column] or 0 for row in rows]
        axis.bar(moments, values, width=length, align="edge", color=colour, linewidth=0)
        scaled(axis)
        time_axis(axis, moments, size)
        panel_title(
            axis, f"{column} a{'n' if per == 'hour' else ''} {per}".replace("an day", "a day")
        )
    return Drawing(made, {})


def dead_letters(slug: str, tables: Mapping[str, Table]) -> ChartParts:
    """Draw bars a day, a panel for each of the most frequent reasons."""
    rows = tables["dead_letters_reasons"].sums(("day", "reason_kind"), ("letters",))
    tally: dict[str, dict[date, int]] = defaultdict(dict)
    for row in rows:
        day = _parsed(row["day"])
        if day is not None:
            reason = shortened(str(row["reason_kind"] or NO_REASON))
            tally[reason][day] = tally[reason].get(day, 0) + row["letters"]
    totals = {reason: sum(days.values()) for reason, days in tally.items()}
    ordered = sorted(totals, key=lambda reason: (-totals[reason], reason))
    total = sum(totals.values())
    if not total:
        return ChartParts("No dead letter has a known day.")
    text = (
        f"{total:,} dead letters. The most frequent reason: {ordered[0]}, {totals[ordered[0]]:,}."
    )
    stack = {reason: dict(tally[reason]) for reason in ordered[:MOST_KINDS]}
    if len(ordered) > MOST_KINDS:
        stack = {reason: stack[reason] for reason in ordered[: MOST_KINDS - 1]}
        stack[OTHERS] = _added(tally[reason] for reason in ordered[MOST_KINDS - 1 :])
    wide, narrow = draw_both(slug, lambda size: _draw_reasons(stack, size))
    note = "Each bar is a day, UTC."
    if any("#" in reason for reason in stack):
        note += " In a reason, # stands for any number."
    return ChartParts(text, note, wide, narrow)


def _draw_reasons(stack: dict[str, dict[date, int]], size: Size) -> Drawing:
    """Draw a panel a reason, distinguished by place and name, not by colour."""
    made, panels = figure(size, 0.4 + 1.15 * len(stack), len(stack), 1)
    days = sorted({day for of in stack.values() for day in of})
    most = max(count for of in stack.values() for count in of.values())
    for axis, (reason, of) in zip(panels, stack.items(), strict=True):
        axis.bar(
            list(of),  # type: ignore[arg-type]
            list(of.values()),
            width=0.9,
            align="edge",  # the bar of a day begins at its midnight
            color=SERIES[2],
            linewidth=0,
        )
        axis.set_ylim(top=most * 1.1)  # the same for all: they are to be compared
        count_axis(axis)
        time_axis(axis, days, size)
        axis.set_xlim(days[0] - timedelta(days=1), days[-1] + timedelta(days=2))  # type: ignore[arg-type]
        shown = reason if len(reason) <= MOST_LABEL else reason[: MOST_LABEL - 1] + "…"
        panel_title(axis, f"{shown} ({sum(of.values()):,})")
        axis.tick_params(labelbottom=axis is panels[-1])
    return Drawing(made, {})


def capacity(slug: str, tables: Mapping[str, Table]) -> ChartParts:
    """Draw the growth of each part of the home by day, and forecast the full disk."""
    table = tables["capacity"]
    parts = [name for name in table.numbers("_bytes") if name not in NO_PARTS]
    rows = [row for row in _since(table, "day", ("day", "total_bytes", *parts)) if row["day"]]
    if not rows:
        return ChartParts("")
    totals = {name: sum(row[name] or 0 for row in rows) for name in parts}
    busiest = sorted(totals, key=lambda name: -totals[name])[:MOST_KINDS]
    lines = {
        name.removesuffix("_bytes"): {_day(row["day"]): row[name] or 0 for row in rows}
        for name in busiest
        if totals[name]
    }
    wide, narrow = draw_both(slug, lambda size: _draw_capacity(lines, size)) if lines else ("", "")
    last = rows[-1]
    text = f"On {_day(last['day']).isoformat()} {format_size(last['total_bytes'] or 0)} were added."
    if "capacity_forecast" in tables:
        text = f"{text} {_forecast(tables['capacity_forecast'])}".strip()
    return ChartParts(text, "Bytes added a day, UTC.", wide, narrow)


def _forecast(table: Table) -> str:
    needed = ("free_bytes", "bytes_per_day", "full_in_days", "full_in_days_kept")
    if not table.has(*needed) or not table.count:
        return ""
    row = table.head(1)[0]
    full, kept = row["full_in_days"], row["full_in_days_kept"]
    at = f"{format_size(row['free_bytes'])} are free; at {format_size(row['bytes_per_day'])} a day"
    when = "it is not full within ten years" if full is None else f"it is full in {full:,} days"
    with_kept = "" if kept == full else "; with what retention removes "
    if with_kept:
        with_kept += "not within ten years" if kept is None else f"in {kept:,} days"
    return f"{at} {when}{with_kept}."


def _draw_capacity(lines: dict[str, dict[date, float]], size: Size) -> Drawing:
    made, (axis,) = figure(size, 2.9)
    for number, (kind, of) in enumerate(lines.items()):
        days = sorted(of)
        axis.plot(
            days,  # type: ignore[arg-type]
            [of[day] for day in days],
            color=SERIES[number],
            linestyle=DASHES[number],
            linewidth=1.8,
            marker="o" if len(days) <= 31 else None,
            markersize=3,
            label=kind,
        )
    byte_axis(axis)
    time_axis(axis, sorted({day for of in lines.values() for day in of}), size)
    legend(axis, size)
    return Drawing(made, {})


def _since(table: Table, moment: str, columns: Sequence[str]) -> list[Row]:
    """Read the rows in order of time, the latest when there are too many."""
    rows = table.largest(moment, MOST_ROWS) if table.count > MOST_ROWS else table.head(MOST_ROWS)
    kept = [{name: row[name] for name in columns} for row in rows]
    return sorted(kept, key=lambda row: str(row[moment]))


def _by_day(
    rows: list[Row], columns: Sequence[str], how: Callable[[list[float]], float]
) -> list[Row]:
    days: dict[date, list[Row]] = defaultdict(list)
    for row in rows:
        days[_day(row["hour"])].append(row)
    made = []
    for day, of in sorted(days.items()):
        known = {name: [row[name] for row in of if row[name] is not None] for name in columns}
        values = {name: how(known[name]) if known[name] else None for name in columns}
        made.append({"hour": datetime(day.year, day.month, day.day), **values})
    return made


def _sum(values: list[float]) -> float:
    return sum(values)


def _day(moment: Moment) -> date:
    return moment.date() if isinstance(moment, datetime) else moment


def _parsed(text: object) -> date | None:
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        return None


def _added(many: Iterable[dict[date, int]]) -> dict[date, int]:
    total: dict[date, int] = defaultdict(int)
    for one in many:
        for day, count in one.items():
            total[day] += count
    return dict(total)
