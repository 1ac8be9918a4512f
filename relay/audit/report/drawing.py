"""Parts that all charts share: two sizes, the page's colours, plain axes, and SVG for the page.

A drawing of matplotlib is adapted to the page: its colours become the page's (so that one drawing
serves light and dark), its font the page's, its ids unique among those of other drawings; links
stay in the page, and marks have a title. Declaration, metadata and global style are removed.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import matplotlib.dates as mdates
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.dates import DAILY, HOURLY, MINUTELY, MONTHLY, SECONDLY
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, MaxNLocator

from relay.audit.report.tables import anchor_id
from relay.base.text import format_size

SVG = "http://www.w3.org/2000/svg"
HREF = "{http://www.w3.org/1999/xlink}href"
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it is found, read out, and in the page's font
    "text.parse_math": False,  # a name with two $ is a name
    "timezone": "UTC",
    "font.size": 10,
}
# Placeholders for the colours of the page while matplotlib draws.
ROLES = {
    "ink": "#010101",
    "muted": "#010102",
    "grid": "#010103",
    "paper": "#010104",
    **{f"series-{number}": f"#01020{number}" for number in range(1, 7)},
    **{f"heat-{number}": f"#01030{number}" for number in range(9)},
}
_COLOUR = re.compile("|".join(ROLES.values()))
_BY_COLOUR = {colour: f"var(--{role})" for role, colour in ROLES.items()}
_FONT = re.compile(r"font-family:[^;\"]*;?\s*")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def page_svg(figure: Figure, prefix: str, titles: Mapping[str, str]) -> str:
    """Turn the figure into an ``svg`` element; ``titles`` are the tooltips of marks, by gid."""
    written = io.BytesIO()
    with rc_context({**SETTINGS, "svg.hashsalt": prefix}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    for child in list(root):
        if child.tag == f"{{{SVG}}}metadata" or _is_global_style(child):
            root.remove(child)
    for element in root.iter():
        _finish(element, prefix, titles)
    for size in ("width", "height"):
        del root.attrib[size]  # the view box has the shape, the page the size
    root.set("aria-hidden", "true")  # the figure has its words beside it
    root.set("focusable", "false")
    ElementTree.register_namespace("", SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _is_global_style(element: ElementTree.Element) -> bool:
    return element.find(f"{{{SVG}}}style") is not None


def _finish(element: ElementTree.Element, prefix: str, titles: Mapping[str, str]) -> None:
    attributes = element.attrib
    name = attributes.get("id", "")
    if name in titles:
        title = ElementTree.Element(f"{{{SVG}}}title")
        title.text = titles[name]
        element.insert(0, title)
    if name:
        attributes["id"] = f"{prefix}-{name}"
    if HREF in attributes:
        attributes["href"] = _reference(attributes.pop(HREF), element, prefix)
    if attributes.pop("target", None):
        attributes["tabindex"] = "-1"  # the same rows are reached from the text, with fewer keys
    if "clip-path" in attributes:
        attributes["clip-path"] = _REFERENCE.sub(rf"url(#{prefix}-\1)", attributes["clip-path"])
    if "style" in attributes:
        plain = _FONT.sub("", attributes["style"])
        plain = _COLOUR.sub(lambda found: _BY_COLOUR[found[0]], plain)
        attributes["style"] = _REFERENCE.sub(rf"url(#{prefix}-\1)", plain)


def _reference(target: str, element: ElementTree.Element, prefix: str) -> str:
    """Return a link unchanged; a reference to a mark gets the drawing's own id."""
    return target if element.tag == f"{{{SVG}}}a" else target.replace("#", f"#{prefix}-", 1)


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
    """A figure, and the tooltips of its marks."""

    figure: Figure
    titles: dict[str, str]


def draw_both(slug: str, draw: Callable[[Size], Drawing]) -> tuple[str, str]:
    """Draw for wide pages and for narrow ones; two ``svg`` elements."""
    made = []
    for size, kind in ((Size(WIDE, False), "wide"), (Size(NARROW, True), "narrow")):
        with rc_context(SETTINGS):
            drawing = draw(size)
            made.append(page_svg(drawing.figure, anchor_id(slug, kind), drawing.titles))
    return made[0], made[1]


def figure(size: Size, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Make a figure of so many panels, in reading order."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, hspace=0.06)
    made = Figure(figsize=(size.width, height), layout=layout)
    axes = made.subplots(rows, columns, squeeze=False)
    return made, [_plain(axis) for row in axes for axis in row]


def time_axis(axis: Axes, moments: Sequence[datetime | date], size: Size) -> None:
    """Make the horizontal axis time, in UTC, with a date wherever one begins."""
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


def count_axis(axis: Axes) -> None:
    """Make the vertical axis a count, from 0."""
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axis.yaxis.set_major_formatter(as_text(lambda value: f"{value:,.0f}"))


def byte_axis(axis: Axes) -> None:
    """Make the vertical axis bytes, from 0, with lines at whole KiB, MiB or GiB."""
    axis.set_ylim(bottom=0)
    most = axis.get_ylim()[1]
    step = 1024 ** max(0, int(math.log(max(most, 1), 1024)))
    ticks = MaxNLocator(nbins=4).tick_values(0, most / step)
    axis.set_ylim(0, most)  # the ticks may reach beyond
    axis.yaxis.set_major_locator(FixedLocator([tick * step for tick in ticks]))
    axis.yaxis.set_major_formatter(as_text(format_size))


def as_text(text: Callable[[float], str]) -> Formatter:
    """Make a formatter of ticks from a function."""
    return FuncFormatter(lambda value, _: text(value))


def panel_title(axis: Axes, text: str) -> None:
    """Put a title at the left of a panel."""
    axis.set_title(text, loc="left", fontsize=10, color=ROLES["ink"], fontweight="bold")


def legend(axis: Axes, size: Size, **more: Any) -> None:
    """Put the names of the lines above the panel."""
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
