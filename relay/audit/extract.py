"""Extraction: the files of a home become rows of a lake, without Spark.

First everything is frozen, in the order of snapshot.py. A source is read once: one pass gives its
rows and its verdict. Archives, packs and sealed segments do not change, and what the lake has of
one with the same identity is not read again; nor is anything else whose files are as they were. As
disks decay, each extract reads an eighth of that again, what was read longest ago. The ledger is
read whole, and each month of it whose rows are as they were has the same file. The live store is
read by each extract. The manifest is written last, then what it does not name is removed.

A damaged source is a row of `files` with its problems, and the rest is read.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from relay.audit import home_files, lake_columns
from relay.audit.disk_usage import measure
from relay.audit.home_files import UNREAD, FileUnit, HomeSource, VerifiedFile, sources_of
from relay.audit.lake import (
    EXTRACTOR,
    Lake,
    LakeFile,
    LakeManifest,
    LakePart,
    default_name,
    folder_of,
    home_id,
    manifest_path,
    open_lake,
    read_manifest,
    version,
    write_rows,
    write_table,
)
from relay.audit.lake_columns import LEDGER_PREFIX, TABLES, batch_of, with_bucket
from relay.audit.snapshot import DAY_NS, HomeSnapshot, snapshot_home
from relay.audit.sources import ledger_rows, originals, store_files
from relay.audit.sources.journal_files import ReadSettings
from relay.audit.sources.journal_rows import NO_KEY, read_part
from relay.audit.temp_folders import temporary_folder
from relay.base.clock import NS_PER_US, Clock
from relay.base.config import read_file
from relay.base.discovery import CONFIG
from relay.base.errors import LedgerError, RelayError
from relay.base.home import LEDGER
from relay.base.text import format_size

PROCESSES = 2
ALONE_BYTES = 4 << 20  # a source of so many has a part of its own
PART_BYTES = 64 << 20  # of a part with several sources
SAFE_PATH = "PYTHONSAFEPATH"
FEW_BYTES = 16 << 20  # a second process takes as long to start as to read these
BATCH_ROWS = 5_000
AGAIN = 8  # extracts that read everything once
AGAIN_NS = DAY_NS  # who extracts each hour has all read once a day at most


class PartTask(NamedTuple):
    """A part to be read, by whatever process."""

    lake: str
    home_id: str
    home: str
    settings: ReadSettings
    sources: list[HomeSource]
    at_ns: int


class Extracted(msgspec.Struct):
    """The outcome of an extract."""

    home: str
    sources: int  # that the home has
    read: int  # of them; the others were in the lake
    rows: int  # in the lake
    bytes: int  # of its files
    problems: list[str]  # of what could not be read, a line each

    def __str__(self) -> str:
        rows = f"{self.rows:,} rows in the lake, {format_size(self.bytes)}"
        return f"{self.home}: read {self.read:,} of {self.sources:,} sources; {rows}"


def homes_in(text: str) -> list[str]:
    """List the homes that a glob matches, or a file names, one a line. Errors: RelayError."""
    if os.path.isfile(text):
        try:
            with open(text, encoding="utf-8") as file:
                lines = [line.strip() for line in file]
        except UnicodeDecodeError as exc:
            raise RelayError(f"{text}: expected UTF-8 text, a home a line ({exc})") from exc
        found = [line for line in lines if line and not line.startswith("#")]
    else:
        found = sorted(path for path in glob.glob(text) if os.path.isdir(path))
    if not found:
        raise RelayError(f"{text}: no homes", hint="--homes expects a file, one a line, or a glob")
    return found


def extract(
    home: str, url: str, clock: Clock, *, name: str = "", strict: bool = False, full: bool = False
) -> Extracted:
    """Bring a home's rows in the lake up to date; ``name``: of a copy, else by its path.

    ``full``: everything is read again.
    Errors: RelayError for a home or ledger that cannot be read, a lake that cannot be written, one
    that has another home under the name, and when ``strict`` for the first source that is damaged:
    then the lake is what it was.
    """
    home = os.path.abspath(home)
    name = name or default_name(home)
    lake, ident = open_lake(url), home_id(name)
    with lake.locked(ident), temporary_folder("extract") as folder:
        snapshot = snapshot_home(home, folder, clock)
        try:
            return update(lake, name, snapshot, strict=strict, full=full)[1]
        except LedgerError as exc:  # of the copy, which is removed
            raise LedgerError(snapshot.original_paths(str(exc)), hint=exc.hint) from exc


def extracted(
    snapshot: HomeSnapshot, url: str | None, *, full: bool = False
) -> tuple[Lake, LakeManifest]:
    """Bring a lake, or one in the run's folder, up to date with a snapshot. Errors: RelayError."""
    lake = open_lake(url or os.path.join(snapshot.folder, "lake"))
    name = default_name(snapshot.home)
    with lake.locked(home_id(name)):
        return lake, update(lake, name, snapshot, full=full)[0]


def update(
    lake: Lake, name: str, snapshot: HomeSnapshot, *, strict: bool = False, full: bool = False
) -> tuple[LakeManifest, Extracted]:
    """Bring the rows of a home up to date with a snapshot of it. Errors: as ``extract``."""
    ident = home_id(name)
    known = read_manifest(lake, ident)
    ledger_id = ledger_rows.read_state(snapshot.ledger.path).get("home_id", "")
    known_id = known.ledger if known is not None else ""
    if known_id and ledger_id and known_id != ledger_id:
        hint = f"give this one a --name of its own, or remove {lake.url}/{manifest_path(ident)}"
        raise RelayError(f"the lake has another home under the name {name}", hint=hint)
    there = {
        path: size for table in TABLES for path, size in lake.sizes(folder_of(table, ident)).items()
    }
    sources = list(sources_of(snapshot))
    at_ns = snapshot.ledger.taken_ns
    in_lake = list(_in_lake(known, sources, there)) if known is not None else []
    again, kept = (in_lake, []) if full else _rota(in_lake, at_ns)
    fresh = {source.path: source for source in sources}
    # Grouped as before, what is read again is in files of the same names.
    groups = [[fresh.pop(path) for path in part.sources] for part in again]
    for path in (path for part in kept for path in part.sources):
        del fresh[path]
    groups += _groups(list(fresh.values()))
    tasks = [
        PartTask(lake.url, ident, snapshot.home, snapshot.journal.settings, group, at_ns)
        for group in groups
    ]
    ledger = _ledger(lake, ident, snapshot)
    facts = _facts(lake, ident, name, snapshot)
    parts = []
    for part in chain(kept, _read_all(tasks), [ledger, facts]):
        if strict and part.problems:
            raise RelayError(part.problems[0], hint="without --strict the rest is read")
        parts.append(part)
    filled = {file.table for part in parts for file in part.files}
    empty = [table for table in TABLES if table not in filled]
    made_empty = [
        write_table(lake, ident, "none", table, TABLES[table].empty_table()) for table in empty
    ]
    parts.append(LakePart("none", {}, made_empty))
    made = LakeManifest(version(), name, at_ns, parts, ledger_id)
    lake.write(manifest_path(ident), msgspec.json.format(msgspec.json.encode(made)))
    files = list(made.files())
    for path in there.keys() - {file.path for file in files}:
        lake.remove(path)
    problems = [line for part in parts for line in part.problems]
    rows, size = sum(file.rows for file in files), sum(file.size for file in files)
    read = sum(map(len, groups))
    return made, Extracted(name, len(sources), read, rows, size, problems)


def _in_lake(
    known: LakeManifest, sources: Iterable[HomeSource], there: Mapping[str, int]
) -> Iterator[LakePart]:
    """The parts that are still as they were: their sources, and their files in the lake."""
    if known.version != version():
        return
    present = {source.path: source.identity for source in sources if source.identity}
    for part in known.parts:
        is_same = all(present.get(path) == its for path, its in part.sources.items())
        is_whole = not (part.problems or part.lost)  # what was away, or had no key, may be there
        if (
            part.sources
            and is_whole
            and is_same
            and all(there.get(file.path) == file.size for file in part.files)
        ):
            yield part


def _rota(parts: Sequence[LakePart], at_ns: int) -> tuple[list[LakePart], list[LakePart]]:
    """Divide parts that have not changed into those to be read again, and those to be kept.

    Read again is a share of the bytes, first what was read longest ago; what was read later than
    now, by a clock that was ahead, may be as old as any.
    """
    again, kept = [], []
    left = sum(part.bytes for part in parts) / AGAIN
    for part in sorted(parts, key=lambda part: part.at_ns if part.at_ns <= at_ns else 0):
        if left > 0 and not 0 <= at_ns - part.at_ns < AGAIN_NS:
            again.append(part)
            left -= part.bytes
        else:
            kept.append(part)
    return again, kept


def _groups(sources: Sequence[HomeSource]) -> Iterator[list[HomeSource]]:
    """Divide the sources into parts: small ones of a kind and month share one."""
    shared: dict[tuple[str, str], list[HomeSource]] = defaultdict(list)
    for source in sources:
        if source.size >= ALONE_BYTES or not source.month:
            yield [source]
        else:
            shared[source.kind, source.month].append(source)
    for group in shared.values():
        room = PART_BYTES
        part: list[HomeSource] = []
        for source in group:
            if part and source.size > room:
                yield part
                room, part = PART_BYTES, []
            part.append(source)
            room -= source.size
        yield part


def _read_all(tasks: Sequence[PartTask]) -> Iterator[LakePart]:
    """Read the parts, the largest first; in two processes where there is much."""
    ordered = sorted(tasks, key=lambda task: -sum(source.size for source in task.sources))
    if sum(source.size for task in tasks for source in task.sources) < FEW_BYTES:
        yield from map(read_task, ordered)
        return
    try:
        # The modules are not looked through for garbage again and again: a fourteenth of the time.
        with (
            _safe_path(),
            ProcessPoolExecutor(PROCESSES, get_context("spawn"), gc.freeze) as pool,
        ):
            for part in pool.map(_read_or_explain, ordered):
                if not isinstance(part, LakePart):
                    raise RelayError(part[0], hint=part[1])
                yield part
    except BrokenProcessPool as exc:
        raise RelayError("a process of the extract ended; the lake is as it was") from exc


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Let processes that start in the block take no module of the current directory."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH)
        if before is not None:
            os.environ[SAFE_PATH] = before


def _read_or_explain(task: PartTask) -> LakePart | tuple[str, str]:
    """Read a part; an error as text, since not every error comes from a process to another."""
    try:
        return read_task(task)
    except RelayError as exc:
        return str(exc), exc.hint


def read_task(task: PartTask) -> LakePart:
    """Read the sources of a part, and write their rows and verdicts into the lake."""
    tables: dict[str, list[pa.RecordBatch]] = defaultdict(list)
    verdicts: list[VerifiedFile] = []
    lost: list[str] = []
    for source in task.sources:
        found, rows, missing = _READERS[source.kind](task, source)
        verdicts += found
        lost += missing
        for table, batches in rows.items():
            tables[table] += batches
    tables["files"] = [_verdicts(verdicts, task.at_ns)]
    first = task.sources[0]
    label = "-".join(filter(None, (first.kind, first.month)))
    lake = open_lake(task.lake)
    files = [
        file
        for table, batches in tables.items()
        for file in write_rows(lake, task.home_id, label, table, batches)
    ]
    problems = [
        line if line.startswith(verdict.path) else f"{verdict.path}: {line}"
        for verdict in verdicts
        if verdict.kind != "attachment"  # whose faults lose no rows
        for line in verdict.problems
    ]
    identities = {source.path: source.identity for source in task.sources}
    n_bytes = sum(source.size for source in task.sources)
    return LakePart(first.kind, identities, files, problems, lost, n_bytes, task.at_ns)


def _verdicts(rows: Sequence[VerifiedFile], at_ns: int) -> pa.RecordBatch:
    return batch_of([(*row, at_ns // NS_PER_US) for row in rows], TABLES["files"])


# -- reading one ------------------------------------------------------------------------

Rows = tuple[list[VerifiedFile], dict[str, list[pa.RecordBatch]], list[str]]  # and what is lost


def _read_archive(task: PartTask, source: HomeSource) -> Rows:
    (unit,) = source.units
    row, rows = _of_store_file(task, unit, unit.shown.split("/")[-2])
    return [row], rows, row.problems


def _read_store(task: PartTask, source: HomeSource) -> Rows:
    """Read the live store; that the archives which it lists are there is its verdict."""
    (unit,) = source.units
    (row,) = home_files.verify(task.home, unit)
    read, rows = _of_store_file(task, unit, None)
    return [row if row.problems else row._replace(problems=read.problems)], rows, read.problems


def _of_store_file(
    task: PartTask, unit: FileUnit, day: str | None
) -> tuple[VerifiedFile, dict[str, list[pa.RecordBatch]]]:
    rows: dict[str, list[pa.RecordBatch]] = {}

    def look() -> VerifiedFile:
        found = store_files.read_tables(unit.path, unit.shown)
        rows.update(found.tables)
        return VerifiedFile(unit.shown, unit.kind, day, unit.shown, found.size, found.sha256)

    return home_files.checked(task.home, unit, unit.shown, look), rows


def _read_segment(task: PartTask, source: HomeSource) -> Rows:
    if source.part is None:
        return _read_files(task, source)
    file = next((unit for unit in source.units if unit.kind == "segment"), None)
    shown = os.path.relpath(source.part.folder, task.home)
    verdicts: list[VerifiedFile] = []
    rows: dict[str, list[pa.RecordBatch]] = {}
    others = source.units
    try:
        local = (file.path, file.entry) if file is not None else ("", None)
        read = read_part(source.part, shown, task.settings, *local)
        rows, lost = read.tables, read.lost
        if read.is_sound and file is not None:
            verdicts.append(home_files.sound_segment(file))
            others = [unit for unit in others if unit is not file]
    except (RelayError, OSError) as exc:
        text = str(exc).replace(os.path.join(task.home, ""), "")
        verdicts.append(VerifiedFile(source.path, UNREAD, problems=[text]))
        lost = [str(exc)]
    verdicts += [row for unit in others for row in home_files.verify(task.home, unit)]
    if lost and not any(row.problems for row in verdicts):
        # An object in Tier 2 has the size and the ETag that it should have, and other bytes; or
        # nothing is wrong with what is here: its records are sealed, or its store is not named.
        objects = [row for row in verdicts if row.kind == "object" and not row.warnings]
        if file is None and objects and not any(line.endswith(NO_KEY) for line in lost):
            verdicts = [row._replace(sha256=None, problems=lost) for row in objects]
        else:
            verdicts.append(VerifiedFile(source.path, UNREAD, problems=lost))
    return verdicts, rows, lost


def _read_files(task: PartTask, source: HomeSource) -> Rows:
    """Verify files that have no rows of their own: of attachments, and of a stream's catalog."""
    rows = [row for unit in source.units for row in home_files.verify(task.home, unit)]
    return rows, {}, list(source.damage)


def _read_originals(task: PartTask, source: HomeSource) -> Rows:
    """Read the folders, or the pack, of a day."""
    found = (row for unit in source.originals for row in originals.read_unit(task.home, unit))
    batches, verdicts = [], []
    columns = TABLES["originals"]
    plain = columns.remove(0)
    while rows := list(islice(found, BATCH_ROWS)):
        verdicts += [
            VerifiedFile(original.path, original.kind, problems=[original.problem])
            for original in rows
            if original.kind == "pack" and original.problem
        ]
        batches.append(with_bucket(columns, batch_of(rows, plain), "message_id"))
    return verdicts, {"originals": batches}, []


_READERS = {
    "archive": _read_archive,
    "store": _read_store,
    "segment": _read_segment,
    "journal": _read_files,
    "attachment": _read_files,
    "originals": _read_originals,
}


# -- the ledger, and what is known of the home --------------------------------------------


def _ledger(lake: Lake, ident: str, snapshot: HomeSnapshot) -> LakePart:
    """Write the ledger's tables, a file a month of what is about messages."""
    files: list[LakeFile] = []
    path = snapshot.ledger.path
    for table, plain in lake_columns.LEDGER.items():
        name = f"{LEDGER_PREFIX}{table}"
        columns = TABLES[name]
        batches = list(ledger_rows.read_rows(path, table, plain))
        if columns is plain or "bucket" not in columns.names:
            files += write_rows(lake, ident, "all", name, batches)
            continue
        batches = [with_bucket(columns, batch, "message_id") for batch in batches]
        rows = pa.Table.from_batches(batches, columns)
        months = pc.utf8_slice_codeunits(rows.column("bucket"), 0, 7)
        for month in sorted(pc.unique(months).to_pylist()):
            part = rows.filter(pc.equal(months, month))
            files += write_rows(lake, ident, month, name, part.to_batches())
    problems = ledger_rows.log_problems(path)
    if problems:
        verdict = _verdicts(
            [VerifiedFile(LEDGER, "ledger", problems=problems)], snapshot.ledger.taken_ns
        )
        files += write_rows(lake, ident, "ledger", "files", [verdict])
    return LakePart("ledger", {}, files)


def _facts(lake: Lake, ident: str, name: str, snapshot: HomeSnapshot) -> LakePart:
    """Write the tables home, usage and limits."""
    config = read_file(os.path.join(snapshot.home, CONFIG))
    usage = measure(snapshot.home, snapshot.observed_until_ns)
    retention, state = config.retention, ledger_rows.read_state(snapshot.ledger.path)
    kept_from = state.get("audit_kept_from", "")
    home = {
        "name": name,
        "snapshot_at": snapshot.ledger.taken_ns // NS_PER_US,
        "observed_until": snapshot.observed_until_ns // NS_PER_US,
        "follows": ledger_rows.journal_position(state),
        "journal_end": max(snapshot.journal.until.values(), default=None),
        "audit_kept_from": int(kept_from) // NS_PER_US if kept_from.isdecimal() else None,
        "ack_timeout_s": config.delivery.ack_timeout_s,
        "archive_days": retention.archive_days,
        "archive_mib": retention.archive_mib,
        "attachments_days": retention.attachments_days,
        "attachments_mib": retention.attachments_mib,
        "disk_bytes": usage.disk_bytes,
        "free_bytes": usage.free_bytes,
        "floor_bytes": usage.floor_bytes,
        "warm_raw_bytes": usage.tiers.warm_raw,
        "warm_bytes": usage.tiers.warm,
        "evicted_bytes": usage.tiers.evicted,
        "extractor": EXTRACTOR,
    }
    measured = [(of.part, of.day and of.day.isoformat(), *of[2:]) for of in usage.measured]
    made = {
        "home": pa.RecordBatch.from_pylist([home], schema=TABLES["home"]),
        "usage": batch_of(measured, TABLES["usage"]),
        "limits": batch_of(usage.limits, TABLES["limits"]),
    }
    files = [
        file
        for table, batch in made.items()
        for file in write_rows(lake, ident, table, table, [batch])
    ]
    return LakePart("home", {}, files)
