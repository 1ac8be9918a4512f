"""The pages below docs/, for tests that compare them with the code."""

from __future__ import annotations

import re
from pathlib import Path
from struct import Struct

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


CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
SIZES = {"B": 1, "H": 2, "I": 4, "Q": 8}


def plain(struct: Struct) -> str:
    """Its format with every number written out: ``<QIQQQQQ`` for ``<QIQQQ2Q``."""
    return re.sub(r"(\d+)([BHIQ])", lambda m: m[2] * int(m[1]), struct.format)


def fields_of(page: str, heading: str, struct: Struct) -> list[str]:
    """The names of the fields in a table of offsets, sizes and types, which is the struct's."""
    *rows, total = tables(page, heading)[0]
    offset, packed = 0, "<"
    for at, size, kind, name, _ in rows:
        assert int(at) == offset and name
        code = CODES.get(kind, f"{size}s")
        assert SIZES.get(code, int(size)) == int(size)
        packed += code
        offset += int(size)
    assert packed == plain(struct)
    assert (int(total[0]), total[4]) == (struct.size, "total")
    return [row[3] for row in rows]
