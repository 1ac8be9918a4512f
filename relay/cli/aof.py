"""`relay aof`: check a journal stream, print its records and its manifest.

Reads only, with or without a running relay, and needs no home. A stream is a directory such as
`journal/00000000000000000001` in a home; a single segment, manifest chunk or snapshot can be given
as well.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import NS_PER_MS
from relay.base.errors import EXIT_FINDINGS, FormatError, NotFound, RelayError
from relay.base.finding import Finding
from relay.base.text import json_line
from relay.cli.common import (
    echo_findings,
    echo_json,
    findings_json,
    sanitize,
    when,
)
from relay.cli.tables import print_table

if TYPE_CHECKING:
    from relay.journal.catalog import CatalogSnapshot, Residency, SegmentEntry
    from relay.journal.format import Record
    from relay.journal.manifest_format import ManifestRecord
    from relay.journal.segment import SegmentFile

CHECK_EXAMPLES = """\b
Examples:
  relay aof check ~/.agent-relay/journal/00000000000000000001
  relay aof check segments/00000000000000000007.seg --json"""

DUMP_EXAMPLES = """\b
Examples:
  relay aof dump ~/.agent-relay/journal/00000000000000000001
  relay aof dump warm/00000000000000000007.seg.zst --json | jq .logical_offset"""

INSPECT_EXAMPLES = """\b
Examples:
  relay aof manifest-inspect ~/.agent-relay/journal/00000000000000000001
  relay aof manifest-inspect snapshot/00000000000000000001.snap --json"""

_PAYLOAD_CHARS = 100  # of a payload in the table
_ROW = "{:<12}  {:<27}  {:<5}  {:<7}  {}"
_path = click.argument("path", metavar="STREAM_DIR|FILE", type=click.Path())
_json = click.option("--json", "as_json", is_flag=True, help="JSON lines for programs.")


@click.group(epilog="\b\nExample:\n  relay aof check journal/00000000000000000001")
def aof() -> None:
    """Check a journal stream, print its records and its manifest."""


@aof.command(epilog=CHECK_EXAMPLES)
@_path
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs.")
def check(path: str, as_json: bool) -> None:
    """Verify every manifest chunk, snapshot and segment of a stream, and that they agree.

    Prints a line for each problem, then their number, or OK. Exits 3 if there are any. Changes
    nothing.
    """
    from relay.journal.check import check as check_stream

    _must_be(path)
    if as_json:
        row = findings_json(check_stream(path))
        errors = len(row["problems"])
        echo_json({"errors": errors, "path": path, **row})
    else:
        errors = echo_findings(check_stream(path))
    if errors:
        click.get_current_context().exit(EXIT_FINDINGS)


@aof.command(epilog=DUMP_EXAMPLES)
@_path
@_json
def dump(path: str, as_json: bool) -> None:
    """Print the records of a stream, or of one segment, in order.

    Damaged or missing segments are reported on stderr and skipped; the exit code is 3 then.
    """
    _must_be(path)
    faults: list[str] = []
    rows = _records(_segments(path), faults)
    if as_json:
        for record in rows:
            _line(record_row(record))
    else:
        click.echo(_ROW.format("offset", "at", "flags", "bytes", "payload"))
        for record in rows:  # line by line: a stream may be longer than the memory
            click.echo(_ROW.format(*_record_cells(record)).rstrip())
    _end(faults)


@aof.command("manifest-inspect", epilog=INSPECT_EXAMPLES)
@_path
@_json
def manifest_inspect(path: str, as_json: bool) -> None:
    """Print the records of a stream's manifest, of one chunk, or the entries of a snapshot.

    Damaged chunks are reported on stderr and skipped; the exit code is 3 then.
    """
    from relay.journal.check import file_kind, load_snapshot

    _must_be(path)
    if os.path.isfile(path) and file_kind(path) == "snapshot":
        snapshot = load_snapshot(path, _id_of(path))
        if as_json:
            _line(snapshot_row(snapshot))
        else:
            rows = [entry_row(entry) for entry in snapshot.entries]
            heads = list(rows[0]) if rows else ["segment_id"]
            print_table(heads, [[_cell(row[head]) for head in heads] for row in rows])
        return
    faults: list[str] = []
    records = _manifest_records(path, faults)
    if as_json:
        for record in records:
            _line(manifest_row(record))
    else:
        print_table(
            ("at", "type", "segment", "offset", "facts"),
            [_manifest_cells(manifest_row(record), record.flags) for record in records],
        )
    _end(faults)


def record_row(record: Record) -> dict[str, Any]:
    """A segment's record as a JSON object."""
    return {
        "logical_offset": record.offset,
        "append_ts_ms": record.at_ms,
        "flags": record.flags,
        "payload_hex": record.payload.hex(),
    }


def manifest_row(record: ManifestRecord) -> dict[str, Any]:
    """One manifest record; an unknown type is its number, and its payload hex."""
    row: dict[str, Any] = {
        "type": record.name if record.is_known else record.type,
        "segment_id": record.segment_id,
        "logical_offset": record.logical_offset,
        "timestamp_ms": record.timestamp_ms,
    }
    for name, value in record.fields.items():
        if isinstance(value, bytes):
            row[f"{name}_hex"] = value.hex()
        else:
            row[name] = value
    return row


def snapshot_row(snapshot: CatalogSnapshot) -> dict[str, Any]:
    """A snapshot with its entries."""
    return {
        "snapshot_id": snapshot.snapshot_id,
        "chunk_index": snapshot.chunk_index,
        "chunk_offset": snapshot.chunk_offset,
        "entries": [entry_row(entry) for entry in snapshot.entries],
    }


def entry_row(entry: SegmentEntry) -> dict[str, Any]:
    """One entry of the catalog; residency is the list of its tiers' names."""
    row: dict[str, Any] = {name: getattr(entry, name) for name in entry.__struct_fields__}
    row["residency"] = tier_names(entry.residency)
    return row


def tier_names(residency: Residency) -> list[str]:
    """``["tier0", "tier2"]``."""
    from relay.journal.catalog import Residency as Tier

    return [str(tier.name).lower() for tier in Tier if tier in residency]


def _segments(path: str) -> list[SegmentFile]:
    """The segments of a stream, or the given one."""
    from relay.journal.check import file_kind
    from relay.journal.segment import SegmentFile, segment_files

    if os.path.isdir(path):
        return segment_files(path)
    if (kind := file_kind(path)) != "segment":
        raise RelayError(f"{path} is a {kind}", hint="`relay aof manifest-inspect` prints it")
    return [SegmentFile(_id_of(path), path, None)]


def _records(files: list[SegmentFile], faults: list[str]) -> Iterator[Record]:
    """The good records of segments; adds problems to ``faults``."""
    from relay.journal.check import SegmentInspector

    for file in files:
        if not file.path:
            faults.append(f"segment {file.segment_id}: no copy on this machine")
            continue
        try:
            with contextlib.closing(SegmentInspector(file.path, file.entry)) as inspector:
                yield from inspector.records()
                faults += findings_json(inspector.findings)["problems"]
        except (FormatError, OSError) as exc:
            faults.append(Finding.of_error("journal", exc, file.path).text)


def _manifest_records(path: str, faults: list[str]) -> Iterator[ManifestRecord]:
    """The good records of a manifest, chunk by chunk."""
    from relay.journal.check import ChunkInspector, file_kind
    from relay.journal.replay import chunk_indexes, chunk_path

    if os.path.isdir(path):
        inspectors = (ChunkInspector(chunk_path(path, n), n) for n in chunk_indexes(path))
    elif (kind := file_kind(path)) != "chunk":
        raise RelayError(f"{path} is a {kind}", hint="`relay aof dump` prints it")
    else:
        inspectors = (ChunkInspector(path) for _ in range(1))
    expected: dict[int, int] = {0: 0}  # known base_record by chunk
    for inspector in inspectors:
        yield from inspector.records
        row = findings_json(inspector.findings)
        faults += row["problems"]
        for warning in row["warnings"]:
            click.echo(f"warning: {warning}", err=True)
        if (header := inspector.header) is not None and inspector.next_record is not None:
            base = expected.get(header.chunk_index, header.base_record)
            if base != header.base_record:
                fault = FormatError(inspector.path, 24, f"base_record {base}", header.base_record)
                faults.append(str(fault))
            expected[header.chunk_index + 1] = base + len(inspector.records)


def _record_cells(record: Record) -> list[Any]:
    at = _time(record.at_ms)
    return [record.offset, at, record.flags, len(record.payload), _shown(record.payload)]


def _shown(payload: bytes) -> str:
    """A payload for people: a decoded msgpack map or list, text, or hex."""
    import msgspec

    try:
        value = msgspec.msgpack.decode(payload)
        if isinstance(value, dict | list):
            return sanitize(str(value), _PAYLOAD_CHARS) or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return sanitize(payload.decode(), _PAYLOAD_CHARS) or ""
    except UnicodeDecodeError:
        return sanitize(payload.hex(), _PAYLOAD_CHARS) or ""


def _manifest_cells(row: dict[str, Any], flags: int) -> list[object]:
    from relay.journal.manifest_format import REASONS

    kind, segment, offset, at_ms = (row.pop(name) for name in list(row)[:4])
    if (code := row.get("reason_code")) is not None:
        row["reason_code"] = f"{code} ({REASONS.get(code, 'unknown')})"
    row = {"flags": flags, **row} if flags else row
    facts = ", ".join(f"{name} {_cell(value)}" for name, value in row.items())
    return [_time(at_ms), kind, segment, offset, sanitize(facts, 2 * _PAYLOAD_CHARS)]


def _time(at_ms: int) -> str | None:
    """A time in the file; the number if it is out of range."""
    try:
        return when(at_ms * NS_PER_MS)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def _cell(value: object) -> str:
    text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
    return sanitize(text) or ""


def _id_of(path: str) -> int:
    """The number in a file's name; 0 if it has none."""
    digits = os.path.basename(path).partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _must_be(path: str) -> None:
    if not os.path.lexists(path):
        raise NotFound(f"{path}: no such file or directory", hint="give a stream or a file of one")
    if os.path.isdir(path) and not any(
        os.path.isdir(os.path.join(path, name)) for name in ("segments", "manifest", "warm")
    ):
        raise RelayError(f"{path}: neither segments nor a manifest in it", hint="give a stream")


def _line(row: dict[str, Any]) -> None:
    sys.stdout.write(json_line(row) + "\n")


def _end(faults: list[str]) -> None:
    """Report what was skipped, and exit accordingly."""
    sys.stdout.flush()
    for fault in faults:
        click.echo(sanitize(fault), err=True)
    if faults:
        click.get_current_context().exit(EXIT_FINDINGS)
