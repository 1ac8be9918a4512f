"""The pages below docs/, for tests that compare them with the code."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def read_page(name: str) -> str:
    """The text of a page below docs/."""
    return (DOCS / name).read_text()


def tables(page: str, heading: str) -> list[list[list[str]]]:
    """The tables of a page under a heading, each a list of rows of cells, heads left out."""
    section = re.split(rf"^#+ {heading}\n", page, maxsplit=1, flags=re.M)[1]
    blocks = re.findall(r"(?:^\|.*\n)+", re.split(r"^#+ ", section, flags=re.M)[0], flags=re.M)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]
        for block in blocks
    ]
