"""``relay dump`` and ``relay build``: what is in a file, and a store made of its lines."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import click
import msgspec

from relay.acomm import jsonl, store_file
from relay.base import crypto
from relay.base.archive_pack import members
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import EXIT_FINDINGS, FormatError, RelayError
from relay.base.finding import Finding
from relay.base.text import json_line
from relay.cli import check as kinds
from relay.cli.check import key_option, kind_of
from relay.cli.common import check_no_home_file, findings_json, sanitize, when
from relay.cli.upkeep import cell, json_value
from relay.journal.catalog import CatalogSnapshot, Residency, SegmentEntry, load_snapshot
from relay.journal.check import ChunkInspector, SegmentInspector
from relay.journal.format import Record
from relay.journal.manifest_format import REASONS, ManifestRecord
from relay.journal.manifest_reader import chunk_indexes, chunk_path
from relay.journal.segment import segment_files
from relay.ledger.file import open_snapshot

BUILD_EXAMPLES = """\b
Examples:
  relay dump old.acomm --json | relay build new.acomm
  relay build new.acomm --from store.jsonl --no-compress"""

_CHARS = 200  # of a line for people
_PAYLOAD_CHARS = 100
_RECORD = "{:<12}  {:<27}  {:<5}  {:<7}  {}"
_ENTRY = "{!s:<27}  {:<20}  {:<8}  {:<12}  {}"
Lines = Iterator[str]


@click.command(
    epilog="""\b
Examples:
  relay dump store/relay.acomm --section messages --json | jq -r .status | sort | uniq -c
  relay dump journal/00000000000000000001
  relay dump journal/00000000000000000001/manifest
  relay dump warm/00000000000000000007.seg.zst --json | jq .logical_offset
  relay dump ledger.db --json"""
)
@click.argument("path", metavar="FILE", type=click.Path(readable=False))
@click.option("--section", type=click.Choice(jsonl.SECTIONS), help="Only this section of a store.")
@key_option
@click.option("--json", "as_json", is_flag=True, help="JSON lines for programs, never cut short.")
def dump(path: str, section: str | None, key_file: str | None, as_json: bool) -> int:
    """Print the contents of a store, a ledger, a packed day, or a part of a journal.

    A journal stream prints the records of its segments, its directory `manifest` those of the
    manifest. What is damaged there is skipped and reported on stderr; the exit code is 3 then. An
    encrypted store stays so without --key-file. `relay build FILE` makes an equal store from
    the JSON lines of one.
    """
    faults: list[str] = []
    kind = kind_of(path)
    readers: dict[str, Callable[[], Lines]] = {
        kinds.STORE: lambda: _store(path, section, key_file, as_json),
        kinds.STREAM: lambda: _segments(segment_files(path), as_json, faults),
        kinds.SEGMENT: lambda: _segments({_id_of(path): (path, None)}, as_json, faults),
        kinds.MANIFEST: lambda: _manifest(_chunks(path), as_json, faults),
        kinds.CHUNK: lambda: _manifest([path], as_json, faults),
        kinds.SNAPSHOT: lambda: _snapshot(path, as_json),
        kinds.LEDGER: lambda: _database(path, as_json),
        kinds.SEARCH: lambda: _database(path, as_json),
        kinds.PACK: lambda: _pack(path, as_json),
    }
    if kind not in readers:
        hint = "name a file in it" if kind == kinds.HOME else "`cat` prints it"
        raise RelayError(f"{path}: {kind}, which has no records of its own", hint=hint)
    out = sys.stdout.buffer  # JSON lines are UTF-8 in every locale
    for line in readers[kind]():  # one by one: a stream may be longer than the memory
        out.write(line.encode() + b"\n")
    out.flush()
    for fault in faults:
        click.echo(sanitize(fault), err=True)
    return EXIT_FINDINGS if faults else 0


def _text(name: str, facts: dict[str, Any]) -> str:
    """A row for people: what has a value, in one line."""
    cells = (f"{key} {_cell(value)}" for key, value in facts.items() if value not in (None, ""))
    return sanitize(f"{name:<13}  {', '.join(cells)}", _CHARS) or ""


def _cell(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


# -- stores, ledgers, packs --------------------------------------------------------------------


def _store(path: str, section: str | None, key_file: str | None, as_json: bool) -> Lines:
    store = store_file.read(path, warn=_warn)
    if key_file is not None:
        store = store_file.decrypt(store, crypto.load_key(key_file), path)
    for line in jsonl.to_lines(store, section):
        row = {} if as_json else json.loads(line)
        yield line if as_json else _text(row.pop("section"), row)


def _database(path: str, as_json: bool) -> Lines:
    """The rows of every table, in one snapshot."""
    from sqlite_utils import Database  # takes 0.15 s

    tables = (
        "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table' "
        "AND name NOT LIKE 'sqlite_%' ORDER BY name"
    )
    with open_snapshot(path) as db:
        tools = Database(db, recursive_triggers=False, execute_plugins=False)
        for (table,) in db.execute(tables).fetchall():
            for row in tools[table].rows:
                shown = json_value if as_json else cell
                facts = {name: shown(value) for name, value in row.items()}
                yield json_line({"table": table, **facts}) if as_json else _text(table, facts)


def _pack(path: str, as_json: bool) -> Lines:
    """The files of a packed day: their paths in the home, and their texts."""
    with contextlib.ExitStack() as stack:
        for name, data, at_s in members(stack, path):
            row = {"path": name, "at": when(at_s * NS_PER_S), "bytes": len(data)}
            text = data.decode(errors="replace")
            yield json_line({**row, "text": text}) if as_json else _text("file", row)


# -- journals ----------------------------------------------------------------------------------


def _segments(
    files: Mapping[int, tuple[str, SegmentEntry | None]], as_json: bool, faults: list[str]
) -> Lines:
    """The good records of segments; problems are added to ``faults``."""
    if not as_json:
        yield _RECORD.format("offset", "at", "flags", "bytes", "payload")
    for number, (path, entry) in files.items():
        if not path:
            faults.append(f"segment {number}: no copy on this machine")
            continue
        try:
            with contextlib.closing(SegmentInspector(path, entry)) as inspector:
                for record in inspector.records():
                    yield json_line(_record_row(record)) if as_json else _record_text(record)
                faults += findings_json(inspector.findings)["problems"]
        except (FormatError, OSError) as exc:
            faults.append(Finding.of_error("journal", exc, path).text)


def _chunks(folder: str) -> list[str]:
    stream = os.path.dirname(os.path.abspath(folder))
    return [chunk_path(stream, number) for number in chunk_indexes(stream)]


def _manifest(paths: list[str], as_json: bool, faults: list[str]) -> Lines:
    """The good records of chunks; problems are added to ``faults``."""
    if not as_json:
        yield _ENTRY.format("at", "type", "segment", "offset", "facts")
    expected: dict[int, int] = {0: 0}  # known base_record by chunk
    for inspector in map(ChunkInspector, paths):
        for record in inspector.records:
            yield json_line(manifest_row(record)) if as_json else _manifest_text(record)
        row = findings_json(inspector.findings)
        faults += row["problems"]
        for warning in row["warnings"]:
            _warn(warning)
        if (header := inspector.header) is not None and inspector.next_record is not None:
            base = expected.get(header.chunk_index, header.base_record)
            if base != header.base_record:
                fault = FormatError(inspector.path, 24, f"base_record {base}", header.base_record)
                faults.append(str(fault))
            expected[header.chunk_index + 1] = base + len(inspector.records)


def _snapshot(path: str, as_json: bool) -> Lines:
    """A snapshot with its entries."""
    row = snapshot_row(load_snapshot(path, _id_of(path)))
    if as_json:
        yield json_line(row)
        return
    entries = row.pop("entries")
    yield _text("snapshot", row)
    for entry in entries:
        yield _text("entry", entry)


def _record_row(record: Record) -> dict[str, Any]:
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
    facts = ("snapshot_id", "chunk_index", "chunk_offset")
    row: dict[str, Any] = {name: getattr(snapshot, name) for name in facts}
    return {**row, "entries": [_entry_row(entry) for entry in snapshot.entries]}


def _entry_row(entry: SegmentEntry) -> dict[str, Any]:
    """One entry of the catalog; residency is the list of its tiers' names."""
    row: dict[str, Any] = {name: getattr(entry, name) for name in entry.__struct_fields__}
    tiers = [str(tier.name).lower() for tier in Residency if tier in entry.residency]
    return {**row, "residency": tiers}


def _record_text(record: Record) -> str:
    at, payload = _time(record.at_ms), record.payload
    return _RECORD.format(record.offset, at, record.flags, len(payload), _shown(payload)).rstrip()


def _shown(payload: bytes) -> str:
    """A payload for people: a decoded msgpack map or list, text, or hex."""
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


def _manifest_text(record: ManifestRecord) -> str:
    kind, segment, offset, at_ms, *_ = (row := manifest_row(record)).values()
    facts = {"flags": record.flags, **dict(list(row.items())[4:])}
    if (code := facts.get("reason_code")) is not None:
        facts["reason_code"] = f"{code} ({REASONS.get(code, 'unknown')})"
    cells = ", ".join(f"{name} {_cell(value)}" for name, value in facts.items() if value != 0)
    return _ENTRY.format(_time(at_ms), kind, segment, offset, sanitize(cells, _CHARS)).rstrip()


def _time(at_ms: int) -> str | None:
    """A time in the file; the number if it is out of range."""
    try:
        return when(at_ms * NS_PER_MS)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def _id_of(path: str) -> int:
    """The number in a file's name; 0 if it has none."""
    digits = os.path.basename(path).partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


# -- making a store ----------------------------------------------------------------------------


@click.command(epilog=BUILD_EXAMPLES)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--from",
    "source",
    metavar="JSONL",
    default="-",
    type=click.File("rb"),
    help="JSON lines as printed by `relay dump --json`; - is standard input, the default.",
)
@click.option("--no-compress", is_flag=True, help="Do not compress the messages.")
@click.option("--force", is_flag=True, help="Replace FILE if it is a valid .acomm.")
def build(file: str, source: BinaryIO, no_compress: bool, force: bool) -> None:
    """Write the store FILE from JSON lines, as `relay dump` prints them.

    The header comes first, then records of any section; indexes, counts and order are computed. An
    existing FILE is replaced only with --force, and never if it is damaged or not an `.acomm`.
    """
    if os.path.lexists(file):
        if not force:
            raise RelayError(f"{file} already exists", hint="--force replaces a valid .acomm")
        store_file.read(file, warn=_warn)
    target = check_no_home_file(file)
    store = jsonl.from_lines(line.decode("utf-8", "surrogateescape") for line in source)
    store_file.write(target, store, compress=not no_compress)
    click.echo(
        f"{file}: {len(store.channels)} channels, {len(store.messages)} messages, "
        f"{len(store.subscriptions)} subscriptions, {len(store.dead_letters)} dead letters, "
        f"{len(store.archive)} archived"
    )


def _warn(line: str) -> None:
    click.echo(sanitize(f"warning: {line}"), err=True)
