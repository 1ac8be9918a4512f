"""The Spark format ``relay_files``: every file that keeps something, verified in the workers.

    store/relay.acomm                  SHA-256 in the footer; the archives that it lists are there
    store/archive/**/*.acomm           SHA-256 in the footer
    journal/{stream}                   manifest, snapshots, and that they agree
    journal/{stream}/segments, warm    every record, footer and checksum of each
    Tier 2                             size and ETag by the manifest, not the bytes
    attachments/{2 hex}/{sha256}       the file is what its name says

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

from relay.acomm import codec, container
from relay.acomm.engine_state import EngineState
from relay.audit.schemas import formats
from relay.audit.schemas.fields import check_columns, subset
from relay.audit.sources import parquet_cache
from relay.base.clock import NS_PER_MS, iso_date
from relay.base.errors import RelayError
from relay.base.home import ARCHIVES, JOURNAL, STORE
from relay.journal import check
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.objects import open_objects
from relay.journal.warm import warm_name

FORMAT = "relay_files"
ATTACHMENTS = "attachments"
MOST_PARTITIONS = 64
PIECE_BYTES = 1 << 20


class Unit(NamedTuple):
    """A file, a stream's catalog, or a folder of attachments."""

    kind: str  # store, archive, journal, segment, object, attachment
    path: str
    shown: str = ""  # below the home
    entry: str = ""  # JSON: what the manifest says of a segment
    objects: str = ""  # where Tier 2 is


class Verified(NamedTuple):
    """One row, in the order of formats.KEPT_FILE."""

    path: str
    kind: str
    day: str | None = None
    item: str | None = None
    size: int | None = None
    sha256: str | None = None
    problems: list[str] = []  # noqa: RUF012 - never altered
    warnings: list[str] = []  # noqa: RUF012


def plan(home: str, store_files: Sequence[str], copies: str, objects: str = "") -> list[Unit]:
    """What there is to verify now: the store files of the run, journal and attachments.

    ``copies``: the folder in which a copy of the live store lies. Never an error for what is
    damaged: that is for the unit to tell.
    """
    units = []
    for path in store_files:
        root = copies if path.startswith(copies + os.sep) else home
        shown = os.path.relpath(path, root)
        units.append(Unit("store" if shown == STORE else "archive", path, shown))
    if os.path.isdir(os.path.join(home, JOURNAL)):
        for name in sorted(os.listdir(os.path.join(home, JOURNAL))):
            stream = os.path.join(home, JOURNAL, name)
            if name.isdigit() and os.path.isdir(stream):
                units += _of_stream(stream, f"{JOURNAL}/{name}", objects)
    folder = os.path.join(home, ATTACHMENTS)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if os.path.isdir(os.path.join(folder, name)):
            units.append(Unit("attachment", os.path.join(folder, name), f"{ATTACHMENTS}/{name}"))
    return units


def _of_stream(stream: str, shown: str, objects: str) -> Iterator[Unit]:
    yield Unit("journal", stream, shown)
    try:
        files = check.segment_files(stream)
    except (RelayError, OSError):
        return  # the unit before says why
    for file in files:
        entry = _encoded(file.entry)
        warm = os.path.join(stream, "warm", warm_name(file.segment_id))
        for path in dict.fromkeys((file.path, warm)):
            if path and os.path.exists(path):
                below = os.path.join(shown, os.path.relpath(path, stream))
                yield Unit("segment", path, below, entry)
        if file.entry and file.entry.residency & Residency.TIER2:
            yield Unit("object", file.entry.key, file.entry.key, entry, objects)


def load(
    spark: SparkSession,
    home: str,
    units: Sequence[Unit],
    columns: Iterable[str],
    *,
    cache: parquet_cache.ParquetCache | None = None,
) -> DataFrame:
    """These columns of what was planned. Errors: RelayError for a column that is not there."""
    schema = subset(formats.KEPT_FILE, columns, "files")
    options = {"home": home, "units": json.dumps(units)}
    return parquet_cache.read(spark, FilesSource, schema, options, cache)


class FilesSource(DataSource):  # type: ignore[misc]
    """Made by Spark, once a plan."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column."""
        return formats.KEPT_FILE

    def reader(self, schema: StructType) -> FilesReader:
        """A reader of the columns of ``schema``. Errors: RelayError when they are not ours."""
        if "units" not in self.options or not self.options.get("home"):
            raise RelayError(f"format {FORMAT} is read by relay.audit.files_source.load")
        check_columns(schema, formats.KEPT_FILE, "files")
        units = [Unit(*unit) for unit in json.loads(self.options["units"])]
        return FilesReader(self.options["home"], units, schema)


class FilesReader(DataSourceReader):  # type: ignore[misc]
    """Verifies files in workers."""

    def __init__(self, home: str, units: list[Unit], schema: StructType) -> None:
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
            yield parquet_cache.batch_of(rows, Verified._fields, schema)


def verify(home: str, unit: Unit) -> Iterator[Verified]:
    """Look at one unit. Whatever is wrong with it is in the rows."""
    if unit.kind == "attachment":
        yield from _attachments(home, unit)
        return
    looks: dict[str, Callable[[Unit], Verified]] = {
        "store": lambda one: _store(one, home),
        "archive": _archive,
        "journal": _journal,
        "segment": _segment,
        "object": _object,
    }
    look = looks[unit.kind]
    yield _said(home, unit, unit.shown, lambda: look(unit))


def _attachments(home: str, unit: Unit) -> Iterator[Verified]:
    """Those of one folder; none of one that went since it was listed."""
    try:
        names = sorted(os.listdir(unit.path))
    except FileNotFoundError:
        return
    except OSError as exc:
        yield Verified(unit.shown, unit.kind, problems=[exc.strerror or str(exc)])
        return
    for name in names:
        yield _said(home, unit, f"{unit.shown}/{name}", _attachment(unit, name))


def _said(home: str, unit: Unit, shown: str, look: Callable[[], Verified]) -> Verified:
    try:
        row = look()
    except FileNotFoundError:
        # rolled, evicted or pruned since: whether it should be there, the catalog says
        return Verified(shown, unit.kind, warnings=["gone since it was listed"])
    except (RelayError, OSError) as exc:
        text = exc.strerror if isinstance(exc, OSError) else str(exc)
        row = Verified(shown, unit.kind, problems=[text or type(exc).__name__])
    below = os.path.join(home, "")
    return row._replace(
        problems=[line.replace(below, "").replace(unit.path, unit.shown) for line in row.problems],
        warnings=[line.replace(below, "") for line in row.warnings],
    )


def _archive(unit: Unit) -> Verified:
    """An archive never changes; its day is that of the folder it lies in."""
    data = codec.read_bytes(unit.path)
    container.open_frame(data, unit.path)
    day = unit.shown.split("/")[-2]
    digest = hashlib.sha256(data).hexdigest()
    return Verified(unit.shown, unit.kind, day, unit.shown, len(data), digest)


def _store(unit: Unit, home: str) -> Verified:
    """The live store, and whether the archives that it lists are there, as long as they were."""
    _, blocks = codec.read_aids(unit.path)
    row = Verified(unit.shown, unit.kind, size=os.path.getsize(unit.path))
    problems = []
    for note in EngineState.decode(blocks).archives:
        name = f"{ARCHIVES}/{note.name}"
        try:
            size = os.path.getsize(os.path.join(home, name))
        except FileNotFoundError:
            problems.append(f"{name}: missing, and the store lists it")
            continue
        if note.size and size != note.size:
            problems.append(f"{name}: {size} bytes, and the store lists it with {note.size}")
    return row._replace(problems=problems)


def _journal(unit: Unit) -> Verified:
    found = check.check_manifest(unit.path)
    return Verified(unit.shown, unit.kind, problems=found.problems, warnings=found.warnings)


def _segment(unit: Unit) -> Verified:
    entry = _entry(unit)
    found = check.StreamFindings([], [])
    check.check_segment(unit.path, entry, found)
    row = Verified(unit.shown, unit.kind, size=os.path.getsize(unit.path))
    if entry is not None and entry.sealed:
        row = _with_facts(row, unit, entry)
        if found.problems:  # so that its day is not what it was
            row = row._replace(sha256=None)
    return row._replace(problems=found.problems, warnings=found.warnings)


def _object(unit: Unit) -> Verified:
    """An object, by what its store says of it without sending it."""
    entry = _entry(unit)
    assert entry is not None
    row = _with_facts(Verified(unit.shown, unit.kind), unit, entry)
    if not unit.objects:
        return row._replace(warnings=["journal.objects is not set: it was not asked for"])
    facts = open_objects(unit.objects).head(unit.path)
    if facts is None:
        return row._replace(problems=["missing, and the manifest has it in Tier 2"])
    expected = (entry.compressed_bytes, entry.etag)
    problems = []
    if (facts.size, facts.etag) != expected and (entry.etag or facts.size != expected[0]):
        problems = [f"expected size and ETag {expected}, found {(facts.size, facts.etag)}"]
    return row._replace(size=facts.size, problems=problems)


def _entry(unit: Unit) -> SegmentEntry | None:
    """What ``_encoded`` was given."""
    if not unit.entry:
        return None
    entry = SegmentEntry(*json.loads(unit.entry))
    return msgspec.structs.replace(entry, residency=Residency(entry.residency))


def _encoded(entry: SegmentEntry | None) -> str:
    return json.dumps(msgspec.structs.astuple(entry)) if entry else ""


def _with_facts(row: Verified, unit: Unit, entry: SegmentEntry) -> Verified:
    """The day of a sealed segment, and what is the same of it in whatever tier."""
    parts = unit.shown.split("/")
    stream = parts[1] if unit.kind == "segment" else parts[0]
    return row._replace(
        day=iso_date(entry.creation_ts_ms * NS_PER_MS),
        item=f"{stream}/{entry.segment_id}",
        sha256=f"{entry.durable_bytes} {entry.segment_crc64:016x}",
    )


def _attachment(unit: Unit, name: str) -> Callable[[], Verified]:
    shown = f"{unit.shown}/{name}"

    def look() -> Verified:
        path = os.path.join(unit.path, name)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        row = Verified(shown, unit.kind, item=name, size=size, sha256=digest)
        if len(name) != 64:  # set aside, or being written
            return row._replace(item=None, warnings=["no attachment's name"])
        if digest != name:
            return row._replace(problems=[f"its SHA-256 is {digest}, not its name"])
        return row

    return look
