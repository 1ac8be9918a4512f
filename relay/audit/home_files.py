"""Every stored file of a home: listed as sources of rows, each with its identity, and verified.

    store/relay.acomm                  SHA-256 in the footer; the archives that it lists are there
    store/archive/**/*.acomm           listed alone: who reads its rows verifies it
    journal/{stream}                   manifest, snapshots, and that they agree
    journal/{stream}/segments, warm    every record, footer and checksum of each
    Tier 2                             size and ETag by the manifest, not the bytes
    attachments/{2 hex}/{sha256}       the content matches the name

A file a row. A fault is a line in ``problems`` and stops no other file.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.audit.snapshot import HomeSnapshot
from relay.audit.sources import journal_files, originals
from relay.audit.sources.journal_files import SegmentPart
from relay.audit.sources.originals import ArchiveUnit
from relay.base.clock import NS_PER_MS, iso_date
from relay.base.errors import ObjectError, RelayError
from relay.base.finding import Finding, Severity
from relay.base.home import ARCHIVES, STORE
from relay.base.names import sha256_hex
from relay.engine.check import check_archives
from relay.journal import check
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.objects import open_objects
from relay.journal.segment import segment_files, warm_path
from relay.ledger import attachments

ATTACHMENTS = "attachments"
UNREAD = "records"  # in the place of a kind: what could not be read, and is not judged


class FileUnit(NamedTuple):
    """A file, a stream's catalog, or a folder of attachments."""

    kind: str  # store, archive, journal, segment, object, attachment
    path: str
    shown: str = ""  # below the home
    entry: SegmentEntry | None = None  # the manifest's, of a segment
    objects: str = ""  # where Tier 2 is


class HomeSource(NamedTuple):
    """A source that is read at once."""

    kind: str
    path: str  # below the home
    identity: str  # the same: so is the content; empty: it is read by each extract
    size: int = 0  # bytes
    month: str = ""  # sources of one month may share a part
    units: Sequence[FileUnit] = ()  # to be verified
    part: SegmentPart | None = None  # of the journal
    originals: Sequence[ArchiveUnit] = ()
    damage: Sequence[str] = ()  # of a stream, that its plan has found


class VerifiedFile(NamedTuple):
    """One row, in the order of its columns in the lake."""

    path: str
    kind: str
    day: str | None = None
    item: str | None = None
    size: int | None = None
    sha256: str | None = None
    problems: list[str] = []  # noqa: RUF012 - never altered
    warnings: list[str] = []  # noqa: RUF012


def sources_of(snapshot: HomeSnapshot) -> Iterator[HomeSource]:
    """List everything but the ledger; the originals last, as snapshot.py says.

    Damage is never an error here: reading the source reports it.
    """
    home = snapshot.home
    for path in snapshot.store_files:
        is_copy = path.startswith(snapshot.folder + os.sep)
        shown = os.path.relpath(path, snapshot.folder if is_copy else home)
        if shown == STORE:
            yield HomeSource("store", shown, "", units=[FileUnit("store", path, shown)])
        else:
            month = shown.split("/")[-2][:7]
            unit = FileUnit("archive", path, shown)
            yield HomeSource("archive", shown, *_stamp(path), month, [unit])
    for stream, end in snapshot.journal.until.items():
        yield from _of_stream(home, stream, end, snapshot.journal.settings.objects)
    folder = os.path.join(home, ATTACHMENTS)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path, shown = os.path.join(folder, name), f"{ATTACHMENTS}/{name}"
        if os.path.isdir(path):
            unit = FileUnit("attachment", path, shown)
            yield HomeSource("attachment", shown, *_listed(path), units=[unit])
    yield from _originals(home)


def _of_stream(home: str, stream: str, end: int, objects: str) -> Iterator[HomeSource]:
    """List a stream: its catalog, then segments, records to be read and files to be verified."""
    plan = journal_files.plan(stream, end=end, strict=False)
    below = os.path.relpath(stream, home)
    damage = [damaged.reason for damaged in plan.damage]
    catalog = FileUnit("journal", stream, below)
    yield HomeSource("journal", below, "", units=[catalog], damage=damage)
    parts = {part.segment_id: part for part in plan.segments}
    files = _segment_units(stream, below, objects)
    for number in sorted(parts.keys() | files.keys()):
        part, units = parts.get(number), files.get(number, [])
        stamps = [_stamp(unit.path) for unit in units]
        named = zip(units, stamps, strict=True)
        each = [f"{unit.shown} {stamp} {unit.entry}" for unit, (stamp, _) in named]
        identity = "; ".join([str(part and part[1:]), *each])
        entry = next((unit.entry for unit in units), None)
        is_sealed = part is not None and entry is not None and entry.sealed
        month = iso_date(part.created_ms * NS_PER_MS)[:7] if part and is_sealed else ""
        # Of one that only Tier 2 has, the object's.
        size = sum(size for _, size in stamps) or (entry.compressed_bytes if entry else 0)
        yield HomeSource("segment", f"{below}/{number}", identity, size, month, units, part)


def _segment_units(stream: str, below: str, objects: str) -> dict[int, list[FileUnit]]:
    """The files and objects of each segment; none where the catalog, a unit itself, is damaged."""
    found: dict[int, list[FileUnit]] = defaultdict(list)
    with contextlib.suppress(RelayError, OSError):
        for number, (first, entry) in segment_files(stream).items():
            for path in dict.fromkeys((first, warm_path(stream, number))):
                if path and os.path.exists(path):
                    shown = os.path.join(below, os.path.relpath(path, stream))
                    found[number].append(FileUnit("segment", path, shown, entry))
            if entry and entry.residency & Residency.TIER2:
                found[number].append(FileUnit("object", entry.key, entry.key, entry, objects))
    return found


def _originals(home: str) -> Iterator[HomeSource]:
    """List the folders and packs of the archive's days."""
    for path, of_day in originals.plan(home).items():
        whole = os.path.join(home, path)
        if of_day[0].agent:  # it becomes a pack one day
            yield HomeSource("originals", path, *_listed(whole), originals=of_day)
        else:
            month = of_day[0].day[:7]
            yield HomeSource("originals", path, *_stamp(whole), month, originals=of_day)


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


def verify(home: str, unit: FileUnit) -> Iterator[VerifiedFile]:
    """Verify one unit but an archive; faults are in the rows."""
    if unit.kind == "attachment":
        yield from _attachments(home, unit)
        return
    checks: dict[str, Callable[[FileUnit], VerifiedFile]] = {
        "store": lambda unit: _store(unit, home),
        "journal": _journal,
        "segment": _segment,
        "object": _object,
    }
    check_unit = checks[unit.kind]
    row = checked(home, unit, unit.shown, lambda: check_unit(unit))
    yield row
    if unit.objects and row.warnings:
        yield VerifiedFile(unit.shown, UNREAD, problems=row.warnings)


def _attachments(home: str, unit: FileUnit) -> Iterator[VerifiedFile]:
    """Verify the attachments of one folder, if it still exists."""
    try:
        names = sorted(os.listdir(unit.path))
    except FileNotFoundError:
        return
    except OSError as exc:
        yield VerifiedFile(unit.shown, unit.kind, problems=[exc.strerror or str(exc)])
        return
    for name in names:
        yield checked(home, unit, f"{unit.shown}/{name}", _attachment(unit, name))


def checked(
    home: str, unit: FileUnit, shown: str, look: Callable[[], VerifiedFile]
) -> VerifiedFile:
    """Make the row of a file; an error is its problem."""
    try:
        row = look()
    except FileNotFoundError:
        # rolled, evicted or pruned since; the catalog knows which files should exist
        return VerifiedFile(shown, unit.kind, warnings=["gone since it was listed"])
    except (RelayError, OSError) as exc:
        text = exc.strerror if isinstance(exc, OSError) else str(exc)
        row = VerifiedFile(shown, unit.kind, problems=[text or type(exc).__name__])
    below = os.path.join(home, "")
    return row._replace(
        problems=[line.replace(below, "").replace(unit.path, unit.shown) for line in row.problems],
        warnings=[line.replace(below, "") for line in row.warnings],
    )


def _store(unit: FileUnit, home: str) -> VerifiedFile:
    """Verify the live store, and existence and size of the archives that it lists."""
    _, blocks = store_file.read_indexes(unit.path)
    row = VerifiedFile(unit.shown, unit.kind, size=os.path.getsize(unit.path))
    listed = EngineState.decode(blocks).archives
    return _with_findings(row, check_archives(os.path.join(home, ARCHIVES), listed))


def _journal(unit: FileUnit) -> VerifiedFile:
    return _with_findings(VerifiedFile(unit.shown, unit.kind), check.check_manifest(unit.path))


def _segment(unit: FileUnit) -> VerifiedFile:
    entry = unit.entry
    found = check.check_segment(unit.path, entry)
    row = VerifiedFile(unit.shown, unit.kind, size=os.path.getsize(unit.path))
    if entry is not None and entry.sealed:
        row = _with_facts(row, unit, entry)
        if any(finding.severity is Severity.ERROR for finding in found):  # so that its day differs
            row = row._replace(sha256=None)
    return _with_findings(row, found)


def sound_segment(unit: FileUnit) -> VerifiedFile:
    """Make the row of a segment without faults, which was read elsewhere."""
    entry = unit.entry
    row = VerifiedFile(unit.shown, unit.kind, size=os.path.getsize(unit.path))
    return _with_facts(row, unit, entry) if entry is not None and entry.sealed else row


def _with_findings(row: VerifiedFile, findings: Iterable[Finding]) -> VerifiedFile:
    """Add the findings of a store's check."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    for finding in findings:
        lines[finding.severity is Severity.ERROR].append(finding.text)
    return row._replace(problems=lines[True], warnings=lines[False])


def _object(unit: FileUnit) -> VerifiedFile:
    """Verify an object by its metadata, without downloading it."""
    entry = unit.entry
    assert entry is not None
    row = _with_facts(VerifiedFile(unit.shown, unit.kind), unit, entry)
    if not unit.objects:
        return row._replace(warnings=["journal.objects is not set: not checked"])
    try:
        facts = open_objects(unit.objects).head(unit.path)
    except ObjectError as exc:  # its store does not answer: not a fault of the object
        return row._replace(warnings=[f"not checked: {exc}"])
    if facts is None:
        return row._replace(problems=["missing, but the manifest has it in Tier 2"])
    expected = (entry.compressed_bytes, entry.etag)
    problems = []
    if (facts.size, facts.etag) != expected and (entry.etag or facts.size != expected[0]):
        problems = [f"expected size and ETag {expected}, found {(facts.size, facts.etag)}"]
    return row._replace(size=facts.size, problems=problems)


def _with_facts(row: VerifiedFile, unit: FileUnit, entry: SegmentEntry) -> VerifiedFile:
    """Add the day of a sealed segment, and the facts that are the same in every tier."""
    parts = unit.shown.split("/")
    stream = parts[1] if unit.kind == "segment" else parts[0]
    return row._replace(
        day=iso_date(entry.creation_ts_ms * NS_PER_MS),
        item=f"{stream}/{entry.segment_id}",
        sha256=f"{entry.durable_bytes} {entry.segment_crc64:016x}",
    )


def _attachment(unit: FileUnit, name: str) -> Callable[[], VerifiedFile]:
    shown = f"{unit.shown}/{name}"

    def look() -> VerifiedFile:
        path = os.path.join(unit.path, name)
        row = VerifiedFile(shown, unit.kind, size=os.lstat(path).st_size)
        if len(name) != 64:  # set aside, or being written
            return row._replace(warnings=["not the name of an attachment"])
        problems = [finding.text for finding in attachments.check_file(path)]
        return row._replace(item=name, sha256=None if problems else name, problems=problems)

    return look
