"""Every stored file of a home, verified.

    store/relay.acomm                  SHA-256 in the footer; the archives that it lists are there
    store/archive/**/*.acomm           listed alone: who reads its rows verifies it
    journal/{stream}                   manifest, snapshots, and that they agree
    journal/{stream}/segments, warm    every record, footer and checksum of each
    Tier 2                             size and ETag by the manifest, not the bytes
    attachments/{2 hex}/{sha256}       the content matches the name

A file a row. A fault is a line in ``problems`` and stops no other file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.base.clock import NS_PER_MS, iso_date
from relay.base.errors import RelayError
from relay.base.finding import Finding, Severity
from relay.base.home import ARCHIVES, JOURNAL, STORE
from relay.engine.check import check_archives
from relay.journal import check
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.objects import open_objects
from relay.journal.segment import segment_files, warm_path
from relay.ledger import attachments

ATTACHMENTS = "attachments"


class FileUnit(NamedTuple):
    """A file, a stream's catalog, or a folder of attachments."""

    kind: str  # store, archive, journal, segment, object, attachment
    path: str
    shown: str = ""  # below the home
    entry: SegmentEntry | None = None  # the manifest's, of a segment
    objects: str = ""  # where Tier 2 is


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


def plan(home: str, store_files: Sequence[str], copies: str, objects: str = "") -> list[FileUnit]:
    """List the files to verify: the store files of the run, journal and attachments.

    ``copies``: the folder with a copy of the live store. Damage is never an error here: verifying
    the unit reports it.
    """
    units = []
    for path in store_files:
        root = copies if path.startswith(copies + os.sep) else home
        shown = os.path.relpath(path, root)
        units.append(FileUnit("store" if shown == STORE else "archive", path, shown))
    if os.path.isdir(os.path.join(home, JOURNAL)):
        for name in sorted(os.listdir(os.path.join(home, JOURNAL))):
            stream = os.path.join(home, JOURNAL, name)
            if name.isdigit() and os.path.isdir(stream):
                units += _of_stream(stream, f"{JOURNAL}/{name}", objects)
    folder = os.path.join(home, ATTACHMENTS)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if os.path.isdir(os.path.join(folder, name)):
            units.append(
                FileUnit("attachment", os.path.join(folder, name), f"{ATTACHMENTS}/{name}")
            )
    return units


def _of_stream(stream: str, shown: str, objects: str) -> Iterator[FileUnit]:
    yield FileUnit("journal", stream, shown)
    try:
        files = segment_files(stream)
    except (RelayError, OSError):
        return  # the previous unit reports it
    for file in files:
        warm = warm_path(stream, file.segment_id)
        for path in dict.fromkeys((file.path, warm)):
            if path and os.path.exists(path):
                below = os.path.join(shown, os.path.relpath(path, stream))
                yield FileUnit("segment", path, below, file.entry)
        if file.entry and file.entry.residency & Residency.TIER2:
            yield FileUnit("object", file.entry.key, file.entry.key, file.entry, objects)


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
    yield checked(home, unit, unit.shown, lambda: check_unit(unit))


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


def segment_of(unit: FileUnit) -> tuple[str, int]:
    """Return stream and id of a segment, or of its object."""
    entry, parts = unit.entry, unit.shown.split("/")
    stream = parts[1] if unit.kind == "segment" else parts[0]
    number = parts[-1].partition(".")[0]
    return stream, entry.segment_id if entry is not None else int(number)


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
    facts = open_objects(unit.objects).head(unit.path)
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
