"""What all charts share: two sizes, the page's colours, axes that say no more than they must."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

import matplotlib.dates as mdates
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.dates import DAILY, HOURLY, MINUTELY, MONTHLY, SECONDLY
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, MaxNLocator

from relay.audit import units
from relay.audit.report import cells
from relay.audit.report.svg import ROLES, SETTINGS, finished

WIDE, NARROW = 10.6, 4.7  # inches of 72 points; the page shows the one that fits
SERIES = [ROLES[f"series-{number}"] for number in range(1, 7)]
HEAT = [ROLES[f"heat-{number}"] for number in range(9)]
# Not by colour alone.
DASHES = ["-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1)), (0, (10, 3))]
# Of each kind of step the whole next kind: with as few ticks as a narrow drawing has, matplotlib's
# own steps leave gaps (12 hours are too short for two days), of which it warns.
WHOLE_STEPS = {MONTHLY: 12, DAILY: 31, HOURLY: 24, MINUTELY: 60, SECONDLY: 60}


@dataclass(frozen=True)
class Size:
    """One of the two drawings of a chart."""

    width: float  # inches
    narrow: bool


@dataclass(frozen=True)
class Drawing:
    """A figure, and what its marks say when they are pointed at."""

    figure: Figure
    titles: dict[str, str]


def both(slug: str, draw: Callable[[Size], Drawing]) -> tuple[str, str]:
    """The drawing for wide pages and that for narrow ones, as ``svg`` elements."""
    made = []
    for size, kind in ((Size(WIDE, False), "wide"), (Size(NARROW, True), "narrow")):
        with rc_context(SETTINGS):
            drawing = draw(size)
            made.append(finished(drawing.figure, cells.slug(slug, kind), drawing.titles))
    return made[0], made[1]


def figure(size: Size, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, in reading order."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, hspace=0.06)
    made = Figure(figsize=(size.width, height), layout=layout)
    axes = made.subplots(rows, columns, squeeze=False)
    return made, [_plain(axis) for row in axes for axis in row]


def over_time(axis: Axes, moments: Sequence[datetime | date], size: Size) -> None:
    """The horizontal axis is time, in UTC, with a date wherever one begins."""
    locator = mdates.AutoDateLocator(  # type: ignore[no-untyped-call]
        minticks=3, maxticks=4 if size.narrow else 7
    )
    for kind, whole in WHOLE_STEPS.items():
        locator.intervald[kind] = [*locator.intervald[kind], whole]
    formatter = mdates.ConciseDateFormatter(  # type: ignore[no-untyped-call]
        locator, show_offset=False
    )
    formatter.formats = ["%Y", "%b %Y", "%d %b", "%H:%M", "%H:%M", "%S.%f"]
    formatter.zero_formats = ["", "%Y", "%d %b", "%d %b", "%H:%M", "%H:%M"]
    axis.xaxis.set_major_locator(locator)
    axis.xaxis.set_major_formatter(formatter)
    if len(set(moments)) == 1:  # one instant has no extent of its own
        only = moments[0]
        around = timedelta(hours=3) if isinstance(only, datetime) else timedelta(days=1)
        axis.set_xlim(only - around, only + around)  # type: ignore[arg-type]


def counted(axis: Axes) -> None:
    """The vertical axis counts, from nothing."""
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axis.yaxis.set_major_formatter(as_text(lambda value: f"{value:,.0f}"))


def sized(axis: Axes) -> None:
    """The vertical axis is bytes, from nothing, with lines at whole KiB, MiB or GiB."""
    axis.set_ylim(bottom=0)
    most = axis.get_ylim()[1]
    step = 1024 ** max(0, int(math.log(max(most, 1), 1024)))
    ticks = MaxNLocator(nbins=4).tick_values(0, most / step)
    axis.set_ylim(0, most)  # the ticks may reach beyond
    axis.yaxis.set_major_locator(FixedLocator([tick * step for tick in ticks]))
    axis.yaxis.set_major_formatter(as_text(units.size))


def as_text(text: Callable[[float], str]) -> Formatter:
    """Ticks in these words."""
    return FuncFormatter(lambda value, _: text(value))


def titled(axis: Axes, text: str) -> None:
    """What a panel shows, at its left."""
    axis.set_title(text, loc="left", fontsize=10, color=ROLES["ink"], fontweight="bold")


def legend(axis: Axes, size: Size, **more: Any) -> None:
    """Names of the lines, above them and not over them."""
    axis.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=3 if size.narrow else 6,
        frameon=False,
        fontsize=9,
        borderaxespad=0.1,
        labelcolor=ROLES["ink"],
        handlelength=2.4,
        columnspacing=1.2,
        **more,
    )


def _plain(axis: Axes) -> Axes:
    axis.set_axisbelow(True)
    axis.grid(axis="y", color=ROLES["grid"], linewidth=0.8)
    axis.tick_params(colors=ROLES["muted"], length=0, labelsize=9)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(ROLES["muted"])
    return axis
