"""Checking a stream: every chunk, every snapshot, every segment, and whether they agree.

Works beside a writer: what is missing or wrong because it is being written is not a problem.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from relay.base import fsio
from relay.base.errors import RelayError
from relay.journal import chunk as chunks
from relay.journal import snapshot as snapshots
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.inspect import (
    WARM_SUFFIX,
    ChunkInspector,
    SegmentInspector,
    describe_error,
    file_kind,
    load_snapshot,
)
from relay.journal.manifest import read_manifest
from relay.journal.segment import segment_ids, segment_path

WARM = "warm"
_WARM_NAME = re.compile(r"(0[0-9]{19})\.seg\.zst")


class StreamFindings(NamedTuple):
    """What is wrong, and what is only worth knowing; a line each."""

    problems: list[str]
    warnings: list[str]


class SegmentFile(NamedTuple):
    """One segment of a stream; ``path`` is empty where no local copy is there."""

    segment_id: int
    path: str
    entry: SegmentEntry | None  # None: the manifest does not know it


def segment_files(stream_dir: str) -> list[SegmentFile]:
    """Every segment that is there or should be, by id; Tier 0 before Tier 1."""
    found = {number: os.path.join(stream_dir, WARM, name) for number, name in _warm(stream_dir)}
    found |= {number: segment_path(stream_dir, number) for number in segment_ids(stream_dir)}
    entries = read_manifest(stream_dir, lambda line: None).catalog.entries
    return [
        SegmentFile(number, found.get(number, ""), entries.get(number))
        for number in sorted(found.keys() | entries.keys())
    ]


def _warm(stream_dir: str) -> Iterator[tuple[int, str]]:
    """Segments in Tier 1: id and file name."""
    try:
        names = os.listdir(os.path.join(stream_dir, WARM))
    except FileNotFoundError:
        return
    for name in names:
        if match := _WARM_NAME.fullmatch(name):
            yield int(match[1]), name


def check_stream(path: str) -> StreamFindings:
    """Verify a stream's directory, or one file of it. Never raises for what it finds there."""
    findings = StreamFindings([], [])
    try:
        if not os.path.isdir(path):
            _check_file(path, findings)
            return findings
        _check_catalog(path, findings)
        for file in segment_files(path):
            tier1 = os.path.join(path, WARM, f"{file.segment_id:020d}{WARM_SUFFIX}")
            for copy in dict.fromkeys((file.path, tier1)):
                if copy and os.path.exists(copy):
                    check_segment(copy, file.entry, findings)
    except (RelayError, OSError) as exc:
        findings.problems.append(describe_error(exc, path))
    return findings


def check_manifest(stream_dir: str) -> StreamFindings:
    """Verify a stream's manifest and snapshots, and that the files are there which they speak of.

    What is in the segments is not looked at. Never raises for what it finds there.
    """
    findings = StreamFindings([], [])
    try:
        _check_catalog(stream_dir, findings)
    except (RelayError, OSError) as exc:
        findings.problems.append(describe_error(exc, stream_dir))
    return findings


def _check_catalog(stream_dir: str, findings: StreamFindings) -> None:
    _check_manifest(stream_dir, findings)
    _check_snapshots(stream_dir, findings)
    _check_segments(stream_dir, findings)


def _check_file(path: str, findings: StreamFindings) -> None:
    kind = file_kind(path)
    if kind == "segment":
        check_segment(path, None, findings)
    elif kind == "chunk":
        _take(ChunkInspector(path), findings)
    else:
        load_snapshot(path)


def _check_manifest(stream_dir: str, findings: StreamFindings) -> None:
    """Every chunk, and that they follow one another."""
    there = chunks.chunk_indexes(stream_dir)
    if not there:
        where = os.path.join(stream_dir, chunks.MANIFEST)
        findings.problems.append(f"{where}: expected a manifest, found no chunk")
    next_record = 0 if there[:1] == [0] else None
    for number, index in enumerate(there):
        path = chunks.chunk_path(stream_dir, index)
        if number and index != there[number - 1] + 1:
            findings.problems.append(f"{path}: expected chunk {there[number - 1] + 1} before it")
            next_record = None
        look = ChunkInspector(path, index, next_record)
        next_record = look.next_record
        _take(look, findings)


def _check_snapshots(stream_dir: str, findings: StreamFindings) -> None:
    for snapshot_id in snapshots.snapshot_ids(stream_dir):
        path = snapshots.snapshot_path(stream_dir, snapshot_id)
        try:
            snapshot = load_snapshot(path, snapshot_id)
        except FileNotFoundError:
            continue  # an older one that its writer removed meanwhile
        except (RelayError, OSError) as exc:
            findings.problems.append(describe_error(exc, path))
            continue
        chunk = chunks.chunk_path(stream_dir, snapshot.chunk_index)
        ends = [chunks.FIRST_MANIFEST_RECORD]
        if os.path.exists(chunk):
            ends += ChunkInspector(chunk).ends
        if snapshot.chunk_offset not in ends:
            position = f"chunk {snapshot.chunk_index} at {snapshot.chunk_offset}"
            findings.warnings.append(f"{path}: its position, {position}, is no end of a record")


def _check_segments(stream_dir: str, findings: StreamFindings) -> None:
    """Every file against the manifest, every entry against the files, and the offsets."""
    behind: int | None = None  # where the next segment has to begin
    for file in segment_files(stream_dir):
        entry = file.entry
        if entry is None:
            findings.warnings.append(f"{file.path}: the manifest does not know this segment")
        else:
            if behind is not None and entry.base_offset != behind:
                where = f"{stream_dir}: segment {file.segment_id}"
                findings.problems.append(
                    f"{where}: expected base_offset {behind}, found {entry.base_offset}"
                )
            behind = entry.end_offset if entry.sealed else None
            _check_residency(stream_dir, entry, findings)


def _check_residency(stream_dir: str, entry: SegmentEntry, findings: StreamFindings) -> None:
    """That the files are there which the manifest speaks of; one local copy is enough to read."""
    copies = {
        Residency.TIER0: segment_path(stream_dir, entry.segment_id),
        Residency.TIER1: os.path.join(stream_dir, WARM, f"{entry.segment_id:020d}{WARM_SUFFIX}"),
    }
    missing = {
        path: f"{path}: missing, and the manifest has it in {str(tier.name).lower()}"
        for tier, path in copies.items()
        if entry.residency & tier and not _may_be_there(path)
    }
    if missing and _still(stream_dir, entry):
        is_whole = any(map(_may_be_there, copies.values()))
        (findings.warnings if is_whole else findings.problems).extend(missing.values())


def _may_be_there(path: str) -> bool:
    """False when it is known to be gone; one that cannot be read is among the problems itself."""
    try:
        return fsio.exists(path)
    except OSError:
        return True


def _still(stream_dir: str, entry: SegmentEntry) -> bool:
    """Whether the manifest says the same now: a tier may have been left meanwhile."""
    now = read_manifest(stream_dir, lambda line: None).catalog.entries
    return now.get(entry.segment_id) == entry


def check_segment(path: str, entry: SegmentEntry | None, findings: StreamFindings) -> None:
    """One copy of a segment, against what the manifest says of it, into ``findings``.

    What looks wrong is looked at again, for it may be being written. Never raises for what it
    finds there.
    """
    before: list[str] | None = None
    while True:
        try:
            look = SegmentInspector(path, entry)
        except FileNotFoundError:
            return  # sealed, evicted meanwhile: the manifest was asked before
        except (RelayError, OSError) as exc:
            findings.problems.append(describe_error(exc, path))
            return
        try:
            look.verify()
        except (RelayError, OSError) as exc:
            look.problems.append(describe_error(exc, path))
        finally:
            look.close()
        if not look.problems or look.problems == before:
            _take(look, findings)
            return
        before = look.problems


def _take(look: ChunkInspector | SegmentInspector, findings: StreamFindings) -> None:
    findings.problems.extend(look.problems)
    findings.warnings.extend(look.warnings)
