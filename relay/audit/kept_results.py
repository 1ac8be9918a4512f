"""Results that a lake keeps: a job that would read what it read before is not judged again.

    LAKE/judged/home={home}/{job}.json                what the answer depends on, and its files
    LAKE/judged/home={home}/{job}.{sha256}.parquet    tables and findings, named by their content

An answer depends on the job's SQL, on the rows of the tables that this reads, and on the times of
the run that it names. Of the snapshot's time SQL asks only whether something was before it, and for
its day: as long as all that a job reads is older than the grace, the day is enough. Ages change
with every run: a result with ages is kept only as long as it has no rows. What could not be read
whole is not kept.

The job's file is replaced last, by a rename or a PUT: until then the result is the one before.
Files that none names are removed by the next run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relay import __version__
from relay.audit.jobs import statements
from relay.audit.jobs.job import FINDINGS, AuditJob
from relay.audit.lake import (
    Lake,
    LakeManifest,
    content_name,
    default_name,
    home_id,
    read_file,
    read_rows,
    version,
)
from relay.audit.lake_columns import TABLES
from relay.audit.schemas import results
from relay.audit.snapshot import HomeSnapshot
from relay.base.names import sha256_hex

JUDGED = "judged"
BY_VALUE = ("home", "files")  # have times of the extract: of these the columns that are named
CLOCK, AGES = "snapshot_us", "now_us"
_DAY_US = 86_400_000_000
_NS_PER_US = 1000


class KeptResult(msgspec.Struct, frozen=True):
    """The result of a job."""

    key: str
    files: dict[str, str]  # below the folder of a run -> below the lake


class KeptResults:
    """The results that a lake has of a home, and the rows that they would be judged by."""

    def __init__(self, lake: Lake, made: LakeManifest, snapshot: HomeSnapshot) -> None:
        self._lake = lake
        self._made = made
        self._snapshot = snapshot
        self._home = home_id(default_name(snapshot.home))
        self._folder = f"{JUDGED}/home={self._home}"

    def of(self, job: AuditJob) -> KeptResult | None:
        """The result of a job, if it would be the same now. Errors: RelayError."""
        kept = self._read(job.name)
        if kept is None or kept.key != self._key(job):
            return None
        there = self._lake.sizes(self._folder)
        is_whole = there.keys() >= set(kept.files.values())
        is_ours = {os.path.dirname(name) for name in kept.files} <= set(_folders(job))
        return kept if is_whole and is_ours else None

    def copy(self, kept: KeptResult, out: str) -> None:
        """Copy a result into the folder of a run. Errors: RelayError, OSError."""
        for name, path in kept.files.items():
            data = read_file(self._lake, path)
            os.makedirs(os.path.dirname(os.path.join(out, name)), mode=0o700, exist_ok=True)
            with open(os.path.join(out, name), "wb") as file:
                file.write(data)

    def keep(self, jobs: Iterable[AuditJob], out: str) -> None:
        """Keep what these jobs have written into the folder of a run. Errors: RelayError."""
        with self._lake.locked(self._home):
            for job in jobs:
                names = list(_written(job, out))
                if (key := self._key(job)) is None or self._ages(job, out, names):
                    continue
                files = {name: self._put(job.name, out, name) for name in names}
                data = msgspec.json.encode(KeptResult(key, files))
                self._lake.write(f"{self._folder}/{job.name}.json", data)
            there = self._lake.sizes(self._folder)
            notes = {path for path in there if path.endswith(".json")}
            every = [self._read(os.path.basename(path)[:-5]) for path in notes]
            named = {path for kept in every if kept for path in kept.files.values()}
            for path in there.keys() - notes - named:
                self._lake.remove(path)

    def _ages(self, job: AuditJob, out: str, names: list[str]) -> bool:
        """True when rows of a job have an age."""
        if not any(
            f":{AGES}" in statement.sql for statement in statements.all_statements(job.name)
        ):
            return False
        return any(pq.read_metadata(os.path.join(out, name)).num_rows for name in names)

    def _put(self, job: str, out: str, name: str) -> str:
        with open(os.path.join(out, name), "rb") as file:
            data = file.read()
        path = f"{self._folder}/{job}.{content_name(data)}.parquet"
        self._lake.write(path, data)
        return path

    def _read(self, job: str) -> KeptResult | None:
        data = self._lake.read(f"{self._folder}/{job}.json")
        with contextlib.suppress(msgspec.DecodeError):  # of another relay: judged again
            return None if data is None else msgspec.json.decode(data, type=KeptResult)
        return None

    def _key(self, job: AuditJob) -> str | None:
        """Identify all that the answer depends on; None when that is more than can be named."""
        if job.source or any(part.lost for part in self._made.parts):
            return None
        read = statements.all_statements(job.name)
        text = "\n".join(statement.sql for statement in read)
        tables = sorted({table for statement in read for table in statement.reads} & TABLES.keys())
        times = {
            name: value
            for name, value in statements.times(self._snapshot).items()
            if f":{name}" in text and name != AGES
        }
        if CLOCK in times:
            if (
                self._newest_us(tables, text)
                >= times[CLOCK] - self._snapshot.grace_ns // _NS_PER_US
            ):
                return None
            times[CLOCK] //= _DAY_US
        schemas = [str(schema) for schema in results.TABLES[job.name].values()]
        rows = [list(self._rows(table, text)) for table in tables]
        return sha256_hex(
            repr([__version__, version(), text, str(job.header), schemas, times, rows]).encode()
        )

    def _rows(self, table: str, text: str) -> Iterator[str]:
        """Identify the rows of a table, in whatever files they are."""
        if table not in BY_VALUE:
            yield from sorted(file.path for file in self._made.files() if file.table == table)
            return
        names = [name for name in TABLES[table].names if statements.has_word(text, name)]
        yield from sorted(map(repr, read_rows(self._lake, self._made, table, names).to_pylist()))

    def _newest_us(self, tables: Iterable[str], text: str) -> int:
        """The latest time in the columns that are named."""
        newest = 0
        for table in tables:
            names = [
                column.name
                for column in TABLES[table]
                if (pa.types.is_timestamp(column.type) or column.name == "created_ns")
                and table not in BY_VALUE
                and statements.has_word(text, column.name)
            ]
            if names:
                for column in read_rows(self._lake, self._made, table, names).columns:
                    latest = pc.max(column.cast(pa.int64())).as_py() or 0
                    is_ns = pa.types.is_integer(column.type)
                    newest = max(newest, latest // _NS_PER_US if is_ns else latest)
        return newest


def _folders(job: AuditJob) -> tuple[str, ...]:
    """The folders of a job's tables and findings."""
    return (*job.tables, os.path.join(FINDINGS, f"job={job.name}"))


def _written(job: AuditJob, out: str) -> Iterator[str]:
    """The files of a job below the folder of a run."""
    for folder in _folders(job):
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(os.path.join(out, folder))):
                if name.endswith(".parquet"):
                    yield os.path.join(folder, name)
