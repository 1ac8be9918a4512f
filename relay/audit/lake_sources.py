"""The sources of a home's rows, and what identifies the content of each."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from relay.audit.snapshot import HomeSnapshot
from relay.audit.sources import home_files, journal_files, originals
from relay.audit.sources.home_files import FileUnit
from relay.audit.sources.journal_files import SegmentPart, StreamPlan
from relay.audit.sources.originals import ArchiveUnit
from relay.base.clock import NS_PER_MS, iso_date
from relay.base.home import JOURNAL
from relay.base.names import sha256_hex


class HomeSource(NamedTuple):
    """A source that is read at once."""

    kind: str
    path: str  # below the home
    identity: str  # the same: so is the content; empty: it is read by each extract
    size: int = 0  # bytes
    month: str = ""  # sources of one month may share a part
    given: Any = None  # for who reads it


def sources_of(snapshot: HomeSnapshot) -> Iterator[HomeSource]:
    """List everything but the ledger; the originals last, as snapshot.py says."""
    home, journal = snapshot.home, snapshot.journal
    units = home_files.plan(home, snapshot.store_files, snapshot.folder, journal.objects)
    plans = {
        stream: journal_files.plan(stream, end=end, strict=False)
        for stream, end in journal.until.items()
    }
    segments: dict[tuple[str, int], list[FileUnit]] = defaultdict(list)
    for unit in units:
        if unit.kind in ("segment", "object"):
            segments[home_files.segment_of(unit)].append(unit)
        elif unit.kind == "archive":
            month = unit.shown.split("/")[-2][:7]
            yield HomeSource("archive", unit.shown, *_stamp(unit.path), month, unit)
        elif unit.kind == "attachment":
            yield HomeSource("attachment", unit.shown, *_listed(unit.path), given=unit)
        elif unit.kind == "journal":
            plan = plans.get(unit.path)
            damage = [damaged.reason for damaged in plan.damage] if plan is not None else []
            yield HomeSource("journal", unit.shown, "", given=(unit, damage))
        else:
            yield HomeSource("store", unit.shown, "", given=unit)
    yield from _segments(plans, segments)
    days: dict[str, list[ArchiveUnit]] = defaultdict(list)
    for original in originals.plan(home):
        name = original.day if original.agent else originals.pack_name(original.day)
        days[f"{originals.FOLDER}/{name}"].append(original)
    for path, of_day in sorted(days.items()):
        whole = os.path.join(home, path)
        if of_day[0].agent:  # it becomes a pack one day
            yield HomeSource("originals", path, *_listed(whole), given=of_day)
        else:
            month = of_day[0].day[:7]
            yield HomeSource("originals", path, *_stamp(whole), month, of_day)


def _segments(
    plans: Mapping[str, StreamPlan], units: Mapping[tuple[str, int], list[FileUnit]]
) -> Iterator[HomeSource]:
    """List the segments: records to be read, and files to be verified."""
    parts: dict[tuple[str, int], SegmentPart] = {}
    for stream, plan in plans.items():
        for part in plan.segments:
            parts[os.path.basename(stream), part.segment_id] = part
    for key in sorted(parts.keys() | units.keys()):
        span, of_segment = parts.get(key), units.get(key, [])
        stamps = [_stamp(unit.path) for unit in of_segment]
        named = zip(of_segment, stamps, strict=True)
        each = [f"{unit.shown} {stamp} {unit.entry}" for unit, (stamp, _) in named]
        identity = "; ".join([str(span and span[1:]), *each])
        entry = next((unit.entry for unit in of_segment), None)
        is_sealed = span is not None and entry is not None and entry.sealed
        month = iso_date(span.created_ms * NS_PER_MS)[:7] if span and is_sealed else ""
        # Of one that only Tier 2 has, the object's.
        size = sum(size for _, size in stamps) or (entry.compressed_bytes if entry else 0)
        path = f"{JOURNAL}/{key[0]}/{key[1]}"
        yield HomeSource("segment", path, identity, size, month, (span, of_segment))


def _stamp(path: str) -> tuple[str, int]:
    """Identify a file by what changes when it is written; empty without one. With its bytes."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return "", 0
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{status.st_ino} {status.st_size} {times}", status.st_size


def _listed(folder: str) -> tuple[str, int]:
    """Identify what is below a folder by its files' names, sizes and times of change; its bytes."""
    found, n_bytes = [], 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            stamp, size = _stamp(os.path.join(parent, name))
            found.append(f"{parent} {name} {stamp}")
            n_bytes += size
    return sha256_hex("\n".join(found).encode(errors="surrogateescape")), n_bytes
