"""The charts of a report: which there are, and from which columns of which table.

A chart is made when its table is there with the columns it needs. A table without rows is said in
a sentence; nothing is drawn of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relay.audit.report import heatmap, timelines
from relay.audit.report.reading import Table


@dataclass(frozen=True)
class Chart:
    """A figure of the page."""

    slug: str
    title: str
    table: str  # whose rows it shows
    says: str  # in words what it shows, with its numbers
    note: str = ""  # how it was made, where that is not plain
    wide: str = ""  # svg elements; empty: there is nothing to draw
    narrow: str = ""


@dataclass(frozen=True)
class Kind:
    """A chart that there may be."""

    slug: str
    title: str
    table: str
    needs: tuple[str, ...]
    make: Callable[[str, Mapping[str, Table]], timelines.Made]
    empty: str


KINDS = (
    Kind(
        "latency",
        "Latency over time",
        "latency",
        ("stage", "hour", "p50_ms", "p90_ms", "p99_ms"),
        timelines.latency,
        "No message went through a stage.",
    ),
    Kind(
        "throughput",
        "Throughput",
        "traffic_hours",
        ("hour", "messages", "bytes"),
        timelines.throughput,
        "No message was written.",
    ),
    Kind(
        "talks",
        "Who talks to whom",
        "traffic",
        ("sender", "recipient", "messages", "bytes"),
        heatmap.talks,
        "Nobody wrote to anybody.",
    ),
    Kind(
        "dead",
        "Dead letters",
        "dead_letters_reasons",
        ("day", "reason_kind", "letters"),
        timelines.dead_letters,
        "There are no dead letters.",
    ),
    Kind(
        "capacity",
        "Capacity",
        "capacity",
        ("day", "total_bytes"),
        timelines.capacity,
        "No day has been measured.",
    ),
)


def charts(tables: Mapping[str, Table]) -> list[Chart]:
    """The charts of these tables, in the order of the page."""
    return [
        _chart(kind, tables)
        for kind in KINDS
        if kind.table in tables and tables[kind.table].has(*kind.needs)
    ]


def _chart(kind: Kind, tables: Mapping[str, Table]) -> Chart:
    has_rows = tables[kind.table].count > 0
    made = kind.make(kind.slug, tables) if has_rows else timelines.Made(kind.empty)
    return Chart(
        kind.slug,
        kind.title,
        kind.table,
        made.says or kind.empty,
        made.note,
        made.wide,
        made.narrow,
    )
