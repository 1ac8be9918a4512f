"""The Spark format ``relay_files``: every stored file of a home, verified in the workers.

    store/relay.acomm                  SHA-256 in the footer; the archives that it lists are there
    store/archive/**/*.acomm           SHA-256 in the footer
    journal/{stream}                   manifest, snapshots, and that they agree
    journal/{stream}/segments, warm    every record, footer and checksum of each
    Tier 2                             size and ETag by the manifest, not the bytes
    attachments/{2 hex}/{sha256}       the content matches the name

A file a row. A fault is a line in ``problems`` and stops no other file. Options, which ``plan``
and ``load`` make: ``home``, ``units``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.acomm import container, store_file
from relay.acomm.engine_state import EngineState
from relay.audit.schemas import check_columns, formats, subset
from relay.audit.sources import parquet_cache
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

FORMAT = "relay_files"
ATTACHMENTS = "attachments"
MOST_PARTITIONS = 64
PIECE_BYTES = 1 << 20


class FileUnit(NamedTuple):
    """A file, a stream's catalog, or a folder of attachments."""

    kind: str  # store, archive, journal, segment, object, attachment
    path: str
    shown: str = ""  # below the home
    entry: str = ""  # JSON: the manifest's entry of a segment
    objects: str = ""  # where Tier 2 is


class VerifiedFile(NamedTuple):
    """One row, in the order of formats.KEPT_FILE."""

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
        entry = _encoded(file.entry)
        warm = warm_path(stream, file.segment_id)
        for path in dict.fromkeys((file.path, warm)):
            if path and os.path.exists(path):
                below = os.path.join(shown, os.path.relpath(path, stream))
                yield FileUnit("segment", path, below, entry)
        if file.entry and file.entry.residency & Residency.TIER2:
            yield FileUnit("object", file.entry.key, file.entry.key, entry, objects)


def load(
    spark: SparkSession,
    home: str,
    units: Sequence[FileUnit],
    columns: Iterable[str],
    *,
    cache: parquet_cache.ParquetCache | None = None,
) -> DataFrame:
    """Read columns of the planned units. Errors: RelayError for an unknown column."""
    schema = subset(formats.KEPT_FILE, columns, "files")
    options = {"home": home, "units": json.dumps(units)}
    return parquet_cache.read(spark, FilesSource, schema, options, cache)


class FilesSource(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column."""
        return formats.KEPT_FILE

    def reader(self, schema: StructType) -> FilesReader:
        """A reader of the columns of ``schema``. Errors: RelayError for unknown columns."""
        if "units" not in self.options or not self.options.get("home"):
            raise RelayError(f"format {FORMAT} is read by relay.audit.sources.files_source.load")
        check_columns(schema, formats.KEPT_FILE, "files")
        units = [FileUnit(*unit) for unit in json.loads(self.options["units"])]
        return FilesReader(self.options["home"], units, schema)


class FilesReader(DataSourceReader):  # type: ignore[misc]
    """Verifies files in workers."""

    def __init__(self, home: str, units: list[FileUnit], schema: StructType) -> None:
        self._home = home
        self._units = units
        self._schema = schema

    def partitions(self) -> list[parquet_cache.UnitsPartition]:
        """One a file, as long as there are not too many."""
        parts = [self._units[first::MOST_PARTITIONS] for first in range(MOST_PARTITIONS)]
        return [parquet_cache.UnitsPartition(part) for part in parts if part]

    def read(self, partition: parquet_cache.UnitsPartition) -> Iterator[pa.RecordBatch]:
        """A row for each file; never an error for one of them."""
        if not isinstance(partition, parquet_cache.UnitsPartition):
            return  # nothing at all: Spark asks for one partition nevertheless
        schema = to_arrow_schema(self._schema, timezone="UTC")
        for unit in partition.units:
            rows = list(verify(self._home, unit))
            yield parquet_cache.batch_of(rows, VerifiedFile._fields, schema)


def verify(home: str, unit: FileUnit) -> Iterator[VerifiedFile]:
    """Verify one unit; faults are in the rows."""
    if unit.kind == "attachment":
        yield from _attachments(home, unit)
        return
    checks: dict[str, Callable[[FileUnit], VerifiedFile]] = {
        "store": lambda one: _store(one, home),
        "archive": _archive,
        "journal": _journal,
        "segment": _segment,
        "object": _object,
    }
    check_unit = checks[unit.kind]
    yield _checked(home, unit, unit.shown, lambda: check_unit(unit))


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
        yield _checked(home, unit, f"{unit.shown}/{name}", _attachment(unit, name))


def _checked(
    home: str, unit: FileUnit, shown: str, look: Callable[[], VerifiedFile]
) -> VerifiedFile:
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


def _archive(unit: FileUnit) -> VerifiedFile:
    """Verify an archive, which never changes; its day is that of its folder."""
    data = store_file.read_bytes(unit.path)
    container.open_frame(data, unit.path)
    day = unit.shown.split("/")[-2]
    digest = hashlib.sha256(data).hexdigest()
    return VerifiedFile(unit.shown, unit.kind, day, unit.shown, len(data), digest)


def _store(unit: FileUnit, home: str) -> VerifiedFile:
    """Verify the live store, and existence and size of the archives that it lists."""
    _, blocks = store_file.read_indexes(unit.path)
    row = VerifiedFile(unit.shown, unit.kind, size=os.path.getsize(unit.path))
    listed = EngineState.decode(blocks).archives
    return _with_findings(row, check_archives(os.path.join(home, ARCHIVES), listed))


def _journal(unit: FileUnit) -> VerifiedFile:
    return _with_findings(VerifiedFile(unit.shown, unit.kind), check.check_manifest(unit.path))


def _segment(unit: FileUnit) -> VerifiedFile:
    entry = _entry(unit)
    found = check.check_segment(unit.path, entry)
    row = VerifiedFile(unit.shown, unit.kind, size=os.path.getsize(unit.path))
    if entry is not None and entry.sealed:
        row = _with_facts(row, unit, entry)
        if any(one.severity is Severity.ERROR for one in found):  # so that its day differs
            row = row._replace(sha256=None)
    return _with_findings(row, found)


def _with_findings(row: VerifiedFile, findings: Iterable[Finding]) -> VerifiedFile:
    """Add the findings of a store's check."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    for one in findings:
        lines[one.severity is Severity.ERROR].append(one.text)
    return row._replace(problems=lines[True], warnings=lines[False])


def _object(unit: FileUnit) -> VerifiedFile:
    """Verify an object by its metadata, without downloading it."""
    entry = _entry(unit)
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


def _entry(unit: FileUnit) -> SegmentEntry | None:
    """Decode the result of ``_encoded``."""
    if not unit.entry:
        return None
    entry = SegmentEntry(*json.loads(unit.entry))
    return msgspec.structs.replace(entry, residency=Residency(entry.residency))


def _encoded(entry: SegmentEntry | None) -> str:
    return json.dumps(msgspec.structs.astuple(entry)) if entry else ""


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
        problems = [one.text for one in attachments.check_file(path)]
        return row._replace(item=name, sha256=None if problems else name, problems=problems)

    return look
