"""Growth of the home a day, the day when the disk is full, and the savings of the tiers.

Growth is that of the last seven whole days, or of as many as there are: the first day of a home
and today are none, so that nothing is foreseen of a home of some hours. The ledger,
`store/archive` and the journal (unless config.json bounds it) grow without end; archive, inboxes
and attachments up to the limits of retention. The disk is full at the relay's floor, where it
accepts nothing more. Writes of other programs are not foreseen.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any, NamedTuple

from relay.audit.disk_usage import (
    ARCHIVE_PART,
    ATTACHMENT_PART,
    INBOX_PART,
    JOURNAL_PART,
    LEDGER_PART,
    STORE_PART,
    HomeUsage,
    measure,
)
from relay.audit.jobs.job import (
    ASCENDING,
    DAY_S,
    DESCENDING,
    FINDINGS,
    AuditJob,
    Plain,
    Rows,
    Written,
    first_rows,
)
from relay.audit.jobs.sql_files import job_header, severities
from relay.audit.lake_columns import FINDING, RESULTS, arrow_table
from relay.audit.snapshot import HomeSnapshot
from relay.base.clock import NS_PER_S, NS_PER_US
from relay.ledger.file import connect_readonly

NAME = "capacity"
PARTS, FORECAST = f"{NAME}_parts", f"{NAME}_forecast"
GROWTH_DAYS = 7  # a week has working days and others
SOON_DAYS = 30
HORIZON_DAYS = 3650  # ten years: the disk will be another one
DAILY_PARTS = (JOURNAL_PART, STORE_PART, ARCHIVE_PART, INBOX_PART, ATTACHMENT_PART)
_SENT = (
    f"SELECT discovered_at / {DAY_S * NS_PER_S} AS day, count(*), sum(file_size) FROM messages"
    " WHERE discovered_at >= 0 GROUP BY day"
)
_EPOCH = date(1970, 1, 1)


class Sent(NamedTuple):
    """The messages of a day."""

    messages: int = 0
    n_bytes: int = 0


class Day(NamedTuple):
    """Bytes of a day on the disk: a row of its table without the total."""

    day: date
    messages: int
    message_bytes: int
    ledger: int
    journal: int
    store: int
    archive: int
    inbox: int
    attachment: int


class Part(NamedTuple):
    """A part of the home: a row of its table."""

    part: str
    files: int
    n_bytes: int
    rate: float | None  # bytes a day
    limit: int | None  # bytes


def make(snapshot: HomeSnapshot) -> Plain:
    """Make one row a day, one a part, one forecast, and its findings.

    Errors: ConfigError; LedgerError; RelayError when the disk cannot be queried.
    """
    return tables(snapshot, measure(snapshot.home, snapshot.observed_until_ns))


def tables(snapshot: HomeSnapshot, sizes: HomeUsage) -> Plain:
    """Make the tables of a home that has these sizes."""
    found = rows(snapshot.ledger.path, sizes)
    (known,) = found[FORECAST]
    at_us = snapshot.ledger.taken_ns // NS_PER_US
    said = findings(dict(zip(RESULTS[FORECAST].names, known, strict=True)), at_us)
    made = {name: arrow_table(found[name], schema) for name, schema in JOB.tables.items()}
    return {**made, FINDINGS: arrow_table(said, FINDING)}


def findings(forecast: Mapping[str, Any], at_us: int) -> list[tuple[object, ...]]:
    """Make the rows of the table of findings: one, or none."""
    full_in_days = forecast["full_in_days_kept"]
    if forecast["free_bytes"] < forecast["floor_bytes"]:
        check, facts = "below_floor", ("free_bytes", "floor_bytes", "disk_bytes", "home_bytes")
    elif full_in_days is not None and full_in_days <= SOON_DAYS:
        check = "full_soon"
        facts = ("full_in_days_kept", "free_bytes", "floor_bytes", "bytes_per_day")
    else:
        return []
    detail = [(name, str(forecast[name])) for name in facts if forecast[name] is not None]
    nobody = (None, None, None, None)
    return [(f"{NAME}.{check}", severities(NAME)[check], *nobody, at_us, detail)]


def rows(ledger: str, sizes: HomeUsage) -> Mapping[str, list[tuple[object, ...]]]:
    """Make the rows of each table. Errors: LedgerError when the snapshot cannot be read."""
    days = by_day(_sent(ledger), sizes)
    parts = by_part(days, sizes)
    every: list[tuple[object, ...]] = [(*day, sum(day[3:])) for day in days.values()]
    return {NAME: every, PARTS: [*parts], FORECAST: [forecast(parts, days, sizes)]}


def _sent(ledger: str) -> dict[date, Sent]:
    with contextlib.closing(connect_readonly(ledger)) as db:
        found = db.execute(_SENT).fetchall()
    return {_EPOCH + timedelta(days=day): Sent(*sums) for day, *sums in found}


def by_day(sent: Mapping[date, Sent], sizes: HomeUsage) -> dict[date, Day]:
    """Sum the bytes of each day on the disk, in order.

    The ledger's file is shared out by messages: a row is as long as any other.
    """
    kept = Counter[tuple[str, date]]()
    ledger = 0
    for measured in sizes.measured:
        if measured.day is not None:
            kept[measured.part, measured.day] += measured.n_bytes
        if measured.part == LEDGER_PART:
            ledger += measured.n_bytes
    total = max(sum(day.messages for day in sent.values()), 1)
    return {
        day: Day(
            day,
            *sent.get(day, Sent()),
            math.floor(ledger * sent.get(day, Sent()).messages / total + 0.5),
            *[kept[part, day] for part in DAILY_PARTS],
        )
        for day in sorted(sent.keys() | {day for _, day in kept})
    }


def by_part(days: Mapping[date, Day], sizes: HomeUsage) -> list[Part]:
    """Measure the size, growth and limit of each part of the home."""
    files, n_bytes = Counter[str](), Counter[str]()
    for measured in sizes.measured:
        files[measured.part] += measured.files
        n_bytes[measured.part] += measured.n_bytes
    limits = {limit.part: limit for limit in sizes.limits}
    rates = _rates(days, sizes.until)
    parts = []
    for part in sorted(files):
        # Without a whole day nothing is known; parts that do not grow with the days have no rate.
        rate = None if rates is None else rates.get(part, 0.0)
        most = []
        if (limit := limits.get(part)) is not None:
            if limit.n_bytes is not None:
                most.append(limit.n_bytes)
            if limit.days is not None and rate is not None:
                most.append(math.ceil(limit.days * rate))
        parts.append(Part(part, files[part], n_bytes[part], rate, min(most, default=None)))
    return parts


def _rates(days: Mapping[date, Day], until: date) -> dict[str, float] | None:
    """Bytes a day of each part, over the whole days; None if there is none.

    Days without anything count as days. The first one and the last are not whole.
    """
    with_messages = [day.day for day in days.values() if day.messages]
    if not with_messages:
        return None
    end = until - timedelta(days=1)
    begin = max(min(with_messages) + timedelta(days=1), end - timedelta(days=GROWTH_DAYS - 1))
    inside = [day for day in days.values() if begin <= day.day <= end]
    if not inside:
        return None
    n_days = (end - begin).days + 1
    return {
        part: sum(getattr(day, part) for day in inside) / n_days
        for part in (LEDGER_PART, *DAILY_PARTS)
    }


def forecast(parts: list[Part], days: Mapping[date, Day], sizes: HomeUsage) -> tuple[object, ...]:
    """Forecast the full disk, and sum the tiers' savings: the row of its table."""
    rates = [part.rate for part in parts if part.rate is not None]
    packs = {used.day: used.pack_bytes for used in sizes.measured if used.day and used.pack_bytes}
    return (
        sizes.disk_bytes,
        sizes.free_bytes,
        sizes.floor_bytes,
        sum(part.n_bytes for part in parts),
        sum(rates) if rates else None,
        _full_in_days(parts, sizes, kept=False),
        _full_in_days(parts, sizes, kept=True),
        *sizes.tiers,
        sum(days[day].message_bytes for day in packs if day in days),
        sum(packs.values()),
    )


def _full_in_days(parts: list[Part], sizes: HomeUsage, *, kept: bool) -> int | None:
    """Days until the parts have grown by more than there is room; ``kept``: with retention."""
    room = max(sizes.free_bytes - sizes.floor_bytes, 0)

    def growth(part: Part, in_days: int) -> float:
        grown = (part.rate or 0) * in_days
        if not kept or part.limit is None:
            return grown
        # Everything that is there may be young: retention is not expected to remove it.
        return min(grown, max(part.limit - part.n_bytes, 0))

    for in_days in range(1, HORIZON_DAYS + 1):
        if sum(growth(part, in_days) for part in parts) > room:
            return in_days
    return None


def counts(tables: Written) -> dict[str, int]:
    """Count by the forecast; unknown numbers are left out."""
    names = ["free_bytes", "home_bytes", "bytes_per_day", "full_in_days", "full_in_days_kept"]
    (row,) = tables[FORECAST].to_table(columns=names).to_pylist()
    return {name: round(value) for name, value in row.items() if value is not None}


def shown(tables: Written) -> Rows:
    """Choose the parts to print, largest first."""
    return first_rows(tables[PARTS], {"bytes": DESCENDING, "part": ASCENDING})


JOB = AuditJob(
    name=NAME,
    header=job_header(NAME),
    tables={name: RESULTS[name] for name in (NAME, PARTS, FORECAST)},
    counts=counts,
    plain=make,
    shown=shown,
)
