"""Disk usage of a home, measured once, by the driver; jobs get values.

Bytes are those that a file takes of the disk: a message of 300 bytes takes a block of 4,096.
A day is that of the folder's name in the archives, of a segment's beginning in the journal, and
of the file's mtime elsewhere.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import NamedTuple

from relay.base.archive_pack import SUFFIX, is_day
from relay.base.clock import NS_PER_S
from relay.base.config import Config, RetentionSettings, read_file
from relay.base.discovery import CONFIG
from relay.base.disk import floor_bytes, measure_disk
from relay.base.errors import RelayError
from relay.base.home import ARCHIVES, JOURNAL, LEDGER
from relay.delivery.eventlog import STREAM_ID
from relay.journal.catalog import Catalog, Residency
from relay.journal.manifest_reader import read_manifest

LEDGER_PART, JOURNAL_PART, STORE_PART = "ledger", "journal", "store"
ARCHIVE_PART, INBOX_PART, ATTACHMENT_PART, OTHER_PART = "archive", "inbox", "attachment", "other"
_BLOCK = 512  # the unit of st_blocks, whatever the file system's own
_MIB = 1 << 20


class PartUsage(NamedTuple):
    """Files of one part of the home and one day, in the order of the lake's columns."""

    part: str
    day: date | None  # None: it does not grow with the days
    files: int
    n_bytes: int  # on the disk
    pack_bytes: int | None = None  # of them the day's pack; None: the day is not packed


class RetentionLimit(NamedTuple):
    """Limits that retention sets to a part, in the order of the lake's columns."""

    part: str
    days: int | None
    n_bytes: int | None


class TierSavings(NamedTuple):
    """Savings of the tiers, by the journal's manifest; bytes."""

    warm_raw: int = 0  # of segments that Tier 1 has, before they were compressed
    warm: int = 0  # the same, compressed
    evicted: int = 0  # of segments that the object store alone has, compressed


@dataclass(frozen=True)
class HomeUsage:
    """The disk, the home's parts and their limits in config.json; bytes."""

    disk_bytes: int
    free_bytes: int  # available to an ordinary user
    floor_bytes: int  # the relay accepts nothing below it
    until: date  # the day up to which there was a relay
    measured: tuple[PartUsage, ...] = ()
    limits: tuple[RetentionLimit, ...] = ()
    tiers: TierSavings = TierSavings()  # noqa: RUF009 - never altered


def measure(home: str, observed_until_ns: int) -> HomeUsage:
    """Measure every file of the home; files that are removed meanwhile are not counted.

    Errors: ConfigError; RelayError when the disk cannot be queried.
    """
    config = read_file(os.path.join(home, CONFIG))  # defaults for a copy of ledger and store alone
    try:
        size, _, free = measure_disk(home)
    except OSError as exc:
        raise RelayError(f"{home}: its disk cannot be queried: {exc.strerror}") from exc
    totals: dict[tuple[str, date | None], list[int]] = defaultdict(lambda: [0, 0])
    packs: dict[tuple[str, date | None], int] = {}
    catalog = _catalog(home)
    for path, status in _files(home, ""):
        part, day = _place(path, status.st_mtime, catalog)
        taken = status.st_blocks * _BLOCK
        totals[part, day][0] += 1
        totals[part, day][1] += taken
        if path.endswith(SUFFIX) and path.count("/") == 1 and day is not None:
            packs[part, day] = taken
    return HomeUsage(
        size,
        free,
        floor_bytes(config.disk, size),
        _day(observed_until_ns / NS_PER_S),
        tuple(
            PartUsage(part, day, files, n_bytes, packs.get((part, day)))
            for (part, day), (files, n_bytes) in totals.items()
        ),
        _limits(config),
        _tiers(catalog),
    )


def _files(home: str, below: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path below the home, status) of every regular file; links are not followed."""
    try:
        entries = list(os.scandir(os.path.join(home, below)))
    except OSError:
        return  # removed, or not readable
    for entry in entries:
        path = f"{below}/{entry.name}" if below else entry.name
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(home, path)
            elif entry.is_file(follow_symlinks=False):
                yield path, entry.stat(follow_symlinks=False)
        except OSError:
            continue


def _place(path: str, mtime_s: float, catalog: Catalog) -> tuple[str, date | None]:
    """Return the part that a file belongs to, and its day where the part grows with the days."""
    top, *rest = path.split("/")
    if path.startswith(LEDGER):
        return LEDGER_PART, None
    if path.startswith(ARCHIVES + "/"):
        return STORE_PART, _named(rest[1])
    if top == "store":
        return STORE_PART, None
    if top == JOURNAL:
        return JOURNAL_PART, _segment_day(rest, catalog)
    if top == "archive" and rest:
        return ARCHIVE_PART, _named(rest[0].removesuffix(SUFFIX))
    if top == "agents" and "inbox" in rest[1:2]:
        return INBOX_PART, _day(mtime_s)
    if top == "attachments" and not path.endswith(".tmp"):  # one that was never finished
        return ATTACHMENT_PART, _day(mtime_s)
    return OTHER_PART, None


def _segment_day(rest: list[str], catalog: Catalog) -> date | None:
    """Return the day on which a segment was begun, of a file ``stream/tier/ID.seg…``."""
    number = rest[-1].partition(".")[0]
    if len(rest) != 3 or rest[1] not in ("segments", "warm") or not number.isdecimal():
        return None
    entry = catalog.entries.get(int(number))
    return None if entry is None else _day(entry.creation_ts_ms / 1000)


def _named(name: str) -> date | None:
    return date.fromisoformat(name) if is_day(name) else None


def _day(at_s: float) -> date:
    return datetime.fromtimestamp(at_s, UTC).date()


def _limits(config: Config) -> tuple[RetentionLimit, ...]:
    kept: RetentionSettings = config.retention
    journal = config.journal
    # Without an object store a segment has nowhere to go: the compressed copy stays.
    local = journal.local_mib if journal.objects else 0
    most_mib = min((mib for mib in (journal.keep_mib, local) if mib), default=0)
    age_days = -(-journal.keep_age_s // 86_400)
    return (
        _limit(ARCHIVE_PART, kept.archive_days, kept.archive_mib),
        _limit(INBOX_PART, kept.read_days, kept.read_mib),
        _limit(ATTACHMENT_PART, kept.attachments_days, kept.attachments_mib),
        _limit(JOURNAL_PART, age_days, most_mib),
    )


def _limit(part: str, days: int, mib: int) -> RetentionLimit:
    """Make a limit; 0 in config.json means unlimited."""
    return RetentionLimit(part, days or None, mib * _MIB or None)


def _catalog(home: str) -> Catalog:
    """Read the manifest; empty where it is missing or unreadable, which other jobs report."""
    folder = os.path.join(home, JOURNAL, f"{STREAM_ID:020d}")
    if os.path.isdir(folder):
        with contextlib.suppress(OSError, RelayError):
            return read_manifest(folder, lambda _: None).catalog
    return Catalog()


def _tiers(catalog: Catalog) -> TierSavings:
    raw = warm = evicted = 0
    for entry in catalog.entries.values():
        if entry.residency & Residency.TIER1:
            raw += entry.file_bytes
            warm += entry.compressed_bytes
        elif entry.residency == Residency.TIER2:
            evicted += entry.compressed_bytes
    return TierSavings(raw, warm, evicted)
