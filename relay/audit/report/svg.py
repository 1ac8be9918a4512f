"""A drawing of matplotlib made fit to stand in a page.

Its colours become the page's (so that one drawing serves light and dark), its font the page's, its
ids its own among those of other drawings; links stay in the page, and marks have a title. What
it brings for itself (declaration, metadata, a style for everything) goes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
HREF = "{http://www.w3.org/1999/xlink}href"
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it is found, read out, and in the page's font
    "text.parse_math": False,  # a name with two $ is a name
    "timezone": "UTC",
    "font.size": 10,
}
# What stands for a colour of the page while matplotlib draws.
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


def finished(figure: Figure, prefix: str, titles: Mapping[str, str]) -> str:
    """The figure as an ``svg`` element; ``titles``: what the mark of a gid says when pointed at."""
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
        del root.attrib[size]  # the view box says the shape, the page the size
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
    """Of a link as it is; of a mark that is used again, to the drawing's own id."""
    return target if element.tag == f"{{{SVG}}}a" else target.replace("#", f"#{prefix}-", 1)
