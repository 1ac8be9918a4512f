"""What one run looks at: the ledger as it was at one instant, then the store as it was after.

The order matters. A row of the ledger is completed only once the journal holds its message, so
every completed row of the snapshot must be found in a store that is read later: the checkpoint,
and the journal behind it. What is younger than the snapshot is in the store and not in the
ledger: an age is asked for before such a message is called extra.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.acomm import codec
from relay.acomm.encryption import seal
from relay.audit import (
    acomm_source,
    aof2_source,
    files_source,
    journal_files,
    ledger_source,
    originals_source,
    schemas,
)
from relay.audit.acomm_columns import SECTIONS, sections_of
from relay.audit.ledger_source import LedgerSnapshot
from relay.audit.reading import SMALL_BYTES, Keep
from relay.audit.served import DEFAULT_RECENT_DAYS, watched_until
from relay.audit.sizes import Sizes, measure
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config, decode, read_file
from relay.base.errors import FormatError, HomeMissing, KeyFileError, RelayError, SealedStore
from relay.base.home import CONFIG, JOURNAL, LEDGER, STORE, Home
from relay.daemon.opening import open_store_readonly, store_key

T = TypeVar("T")
ARCHIVES = "store/archive/**/*.acomm"
NOT_KEPT = frozenset(("content", "metadata", "signature"))  # bytes that one job or none reads
# Of the journal's columns, those that jobs read more than once.
JOURNAL_KEPT = (
    "end",
    "at",
    "event",
    "number",
    "relay_id",
    "kind",
    "sender",
    "to",
    "checksum",
    "created_ns",
    "created_at",
    "state",
    "due_at",
    "deliveries",
)
_PASSED_OVER = ("store", "archive", "journal", "segment", "object")  # kinds of files
DAY_NS = 86_400 * NS_PER_S
DEFAULT_GRACE_S = 30.0  # a batch is recorded within a second of its discovery


class FrozenJournal(NamedTuple):
    """The journal up to where it stood; what lies behind is not looked at."""

    until: dict[str, int]  # stream -> logical offset; empty: there is no journal
    objects: str = ""  # where Tier 2 lies
    key_file: str = ""  # where the store is encrypted


class Gathered(NamedTuple):
    """The files of one run: nobody changes them any more."""

    home: str
    folder: str  # private to the run: holds the copies
    ledger: LedgerSnapshot
    store_files: tuple[str, ...]  # the live store as it stood, and the archives in their places
    grace_ns: int
    watched_until_ns: int  # the snapshot, or the last sign of a relay that runs no more
    recent_ns: int  # how long before that something may have happened and still be judged
    journal: FrozenJournal = FrozenJournal({})

    @property
    def size(self) -> int:
        """Bytes of ledger and store files: whether a home is small."""
        files = (self.ledger.path, *self.store_files)
        # One that retention took meanwhile is for those to tell who read it.
        return sum(os.path.getsize(path) for path in files if os.path.exists(path))

    def named(self, text: str) -> str:
        """``text`` with paths of copies turned into those of their originals."""
        for copy in (LEDGER, STORE):  # what else is in the folder is the run's own
            text = text.replace(os.path.join(self.folder, copy), os.path.join(self.home, copy))
        return text


def gather(
    home: str,
    folder: str,
    clock: Clock,
    grace_s: float = DEFAULT_GRACE_S,
    recent_days: float = DEFAULT_RECENT_DAYS,
) -> Gathered:
    """Take the ledger's snapshot, the live store, the list of archives, the journal's end.

    The store before the archives: a message that moves to an archive meanwhile is seen twice,
    never not at all. The journal has whatever the others have, so it is last. A store that was
    never written is an empty one.
    Errors: HomeMissing; LedgerError; RelayError when there is no store or it cannot be copied.
    """
    if not os.path.isdir(home):
        raise HomeMissing(f"there is no relay home at {home}")
    _require_ours(home)
    ledger = ledger_source.take_snapshot(
        os.path.join(home, LEDGER), os.path.join(folder, LEDGER), clock
    )
    files = _take_store(home, folder, clock)
    pattern = os.path.join(glob.escape(home), ARCHIVES)
    files += sorted(glob.glob(pattern, recursive=True))
    journal = _freeze_journal(home)
    until, recent = watched_until(home, ledger), int(recent_days * DAY_NS)
    grace = int(grace_s * NS_PER_S)
    return Gathered(home, folder, ledger, tuple(files), grace, until, recent, journal)


def _require_ours(home: str) -> None:
    """Errors: RelayError for a home whose ledger this user may not read."""
    path = os.path.join(home, LEDGER)
    hint = "run this as the user whose relay it is, or over a copy of the home"
    try:
        os.scandir(home).close()
        if os.path.exists(path):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise RelayError(f"{exc.filename} cannot be read: {exc.strerror}", hint=hint) from exc
    # Who reads a ledger in WAL mode maps ledger.db-shm, and makes it where nobody has it open.
    if not os.access(home, os.W_OK) and not os.path.exists(f"{path}-shm"):
        raise RelayError(f"{path} cannot be read: its folder cannot be written", hint=hint)


def _freeze_journal(home: str) -> FrozenJournal:
    """Where the journal ends now. What is damaged in it is for those to tell who read it."""
    if not os.path.isdir(os.path.join(home, JOURNAL)):
        return FrozenJournal({})
    until = {}
    for stream in journal_files.find_streams([os.path.join(glob.escape(home), JOURNAL)]):
        until[stream] = journal_files.plan(stream, strict=False).end
    return FrozenJournal(until, *journal_files.home_settings(home))


def _take_store(home: str, folder: str, clock: Clock) -> list[str]:
    """The live store as it stands now; where it cannot be made, its file, for the jobs to judge."""
    if not os.path.isdir(os.path.join(home, JOURNAL)) or not os.path.exists(
        os.path.join(home, CONFIG)
    ):
        return _copy_store(home, folder)
    target = os.path.join(folder, STORE)
    try:
        with Home(home) as opened:
            config = decode(opened.read_config(), opened.path(CONFIG))
            key = store_key(opened, config, make=False)
            file = open_store_readonly(opened, clock, config, key).snapshot().file()
        os.makedirs(os.path.dirname(target), mode=0o700)
        with open(target, "wb") as copy:  # not synced: it is this run's alone
            copy.write(codec.encode(seal(file, key)))
    except (FormatError, KeyFileError, SealedStore):
        return _copy_store(home, folder)
    return [target]


def _copy_store(home: str, folder: str) -> list[str]:
    source, target = os.path.join(home, STORE), os.path.join(folder, STORE)
    if not os.path.isdir(os.path.dirname(source)):
        raise RelayError(
            f"there is no store in {home}", hint="`relay init` completes a home; see --home"
        )
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        # The file is replaced by rename: what is open stays whole.
        shutil.copyfile(source, target)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise RelayError(f"{source} cannot be copied: {exc}") from exc
    return [target]


class Evidence:
    """What jobs read: DataFrames over the same frozen files.

    A table is read from its files when it is first asked for, and kept as Parquet in the run's
    folder. ``shared``: several jobs read, so of each table all columns are kept at once. Content,
    metadata and signatures are not among what is kept. ``permissive``: of store and journal what
    is damaged is passed over.
    """

    def __init__(
        self,
        spark: SparkSession,
        gathered: Gathered,
        *,
        shared: bool = False,
        earlier: str | None = None,
        permissive: bool = False,
    ) -> None:
        self.gathered = gathered
        self._permissive = permissive
        self._earlier = earlier  # what --out was of a run to compare with
        self._spark = spark
        self._shared = shared
        is_local = spark.sparkContext.master.startswith("local")
        self._here = is_local and gathered.size <= SMALL_BYTES
        self._kept: dict[str, Any] = {}
        self._lock = threading.Lock()  # jobs of one run ask at once
        self._locks: dict[str, threading.Lock] = {}  # of what is kept, one each

    @property
    def snapshot_ns(self) -> int:
        """When the ledger's snapshot was taken: Unix nanoseconds."""
        return self.gathered.ledger.taken_ns

    @property
    def grace_ns(self) -> int:
        """How much older than the snapshot a message must be to be judged by it."""
        return self.gathered.grace_ns

    @property
    def watched_until_ns(self) -> int:
        """Up to when a relay saw what happened: ages are reckoned from here. Unix nanoseconds."""
        return self.gathered.watched_until_ns

    @property
    def recent_since_ns(self) -> int:
        """What happened before is in the tables, and no finding any more. Unix nanoseconds."""
        return self.gathered.watched_until_ns - self.gathered.recent_ns

    @property
    def sizes(self) -> Sizes:
        """What home and disk measure, looked at once, when it is first asked for.

        Errors: ConfigError; RelayError for a disk that cannot be asked.
        """
        gathered = self.gathered
        return self._once("sizes", lambda: measure(gathered.home, gathered.watched_until_ns))

    def frame(self, rows: Iterable[tuple[object, ...]], schema: StructType) -> DataFrame:
        """These rows, which the driver knows, as a table of one partition."""
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrow = to_arrow_schema(schema, timezone="UTC")
        arrays = [pa.array(values, f.type) for values, f in zip(columns, arrow, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=arrow)
        return self._spark.createDataFrame(table).coalesce(1)

    @property
    def config(self) -> Config:
        """The home's configuration; the defaults where it has none. Errors: ConfigError."""
        return read_file(os.path.join(self.gathered.home, CONFIG))

    def compared(self, table: str, schema: StructType) -> DataFrame:
        """A small table of the run to compare with; no rows where there is none to compare with.

        It is read at once: this run may write to the same place. Errors: RelayError when that
        run has no such table.
        """
        rows: list[Row] = []
        if self._earlier is not None:
            path = os.path.join(self._earlier, table)
            if not os.path.isdir(path):
                raise RelayError(
                    f"there is no {path} to compare with",
                    hint="--compare takes what --out was of a run with the job integrity",
                )
            rows = self._spark.read.parquet(path).select(*schema.names).collect()
        return self._spark.createDataFrame(rows, schema)

    def ledger(self, table: str, *columns: str) -> DataFrame:
        """These columns of a table. Errors: RelayError for one that is not there."""
        path = self.gathered.ledger.path
        every = ledger_source.schema_of(table).names

        def load(names: Sequence[str]) -> DataFrame:
            return ledger_source.load(self._spark, path, table, names, keep=self._keep())

        return self._columns(f"ledger {table}", load, every, columns)

    def store(self, section: str, *columns: str) -> DataFrame:
        """These columns of a section of live store and archives; ``file`` as in the home.

        Errors: RelayError for one that is not there.
        """
        every = [name for name in store_columns(section) if name not in NOT_KEPT]
        return self._columns(
            f"store {section}", lambda names: self._store(section, names), every, columns
        )

    def moves(self) -> DataFrame:
        """Deliveries that were written, held or given up after their first row: few of audit_log.

        Columns: at, message_id, recipient, old_status, new_status, attempt, is_again (with a
        new attempt).
        """

        def few() -> DataFrame:
            log = ledger_source.load(
                self._spark,
                self.gathered.ledger.path,
                "audit_log",
                ("at", "what", "old_status", "new_status", "attempt", "staged_at", "written_at"),
                only={"new_status": ("written", "held", "dead")},
                keep=self._keep(),
            )
            return log.select(
                "at",
                F.substring_index("what", " > ", 1).alias("message_id"),
                F.substring_index("what", " > ", -1).alias("recipient"),
                "old_status",
                "new_status",
                "attempt",
                F.coalesce("staged_at", "written_at").isNotNull().alias("is_again"),
            )

        return self._once("moves", few)

    def undone(self) -> DataFrame:
        """Messages that were archived once, and then were not, by audit_log: no relay does that.

        Columns: message_id, was_archived (true), a row each.
        """

        def none() -> DataFrame:
            log = ledger_source.load(
                self._spark,
                self.gathered.ledger.path,
                "audit_log",
                ("what",),
                only={"old_status": ("archived",)},
                keep=self._keep(),
            )
            return log.select(
                F.col("what").alias("message_id"), F.lit(True).alias("was_archived")
            ).distinct()

        return self._once("undone", none)

    def originals(self, *columns: str) -> DataFrame:
        """These columns of the files that agents sent, archived since or before the snapshot.

        The folders are listed once, when they are first asked for. Errors: RelayError.
        """
        home = self.gathered.home
        planned = self._once("plan of originals", lambda: originals_source.plan(home))
        return self._columns(
            "originals",
            lambda names: originals_source.load(
                self._spark, home, planned, names, keep=self._keep()
            ),
            schemas.ORIGINAL.names,
            columns,
        )

    def journal(self, *columns: str) -> DataFrame:
        """These columns of the journal's records; ``stream`` as in the home.

        Errors: RelayError for one that is not there.
        """
        return self._columns("journal", self._journal, JOURNAL_KEPT, columns)

    def wholeness(self) -> DataFrame:
        """One row, ``is_whole``: False where something of store or journal was passed over."""
        if not self._permissive:
            return self._spark.range(1).select(F.lit(True).alias("is_whole"))
        files = self.files("kind", "problems").where(F.col("kind").isin(*_PASSED_OVER))
        return files.agg((F.count_if(F.size("problems") > 0) == 0).alias("is_whole"))

    def once(self, key: str, make: Callable[[], DataFrame]) -> DataFrame:
        """The frame that ``make`` gives, computed once whatever is made of it."""
        return self._once(key, lambda: make().persist(StorageLevel.MEMORY_AND_DISK))

    def _once(self, key: str, make: Callable[[], T]) -> T:
        """What ``make`` gives the first who asks; others who ask meanwhile wait for it alone."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._kept:
                self._kept[key] = make()
            kept: T = self._kept[key]
            return kept

    def _keep(self) -> Keep:
        """A place for one more table. Files that are asked for stay: the run's folder goes."""
        return Keep(tempfile.mkdtemp(prefix="table-", dir=self.gathered.folder), self._here)

    def files(self, *columns: str) -> DataFrame:
        """These columns of everything that keeps something, verified: schemas.KEPT_FILE."""
        gathered = self.gathered
        given = (gathered.home, gathered.store_files, gathered.folder, gathered.journal.objects)
        units = self._once("plan of files", lambda: files_source.plan(*given))
        return self._columns(
            "files",
            lambda names: files_source.load(
                self._spark, gathered.home, units, names, keep=self._keep()
            ),
            schemas.KEPT_FILE.names,
            columns,
        )

    def _columns(
        self,
        key: str,
        load: Callable[[Sequence[str]], DataFrame],
        every: Sequence[str],
        columns: Sequence[str],
    ) -> DataFrame:
        """From what is kept, where it is to be; else read for this one plan."""
        if not self._shared or not set(columns) <= set(every):
            return self._once(f"{key} {columns}", lambda: load(columns))
        return self._once(key, lambda: load(every)).select(*columns)

    def _store(self, section: str, columns: Sequence[str]) -> DataFrame:
        files = self.gathered.store_files
        frame = acomm_source.load(
            self._spark, files, section, columns, permissive=self._permissive, keep=self._keep()
        )
        return self._below(frame, "file", self.gathered.folder, self.gathered.home)

    def _journal(self, columns: Sequence[str]) -> DataFrame:
        journal = self.gathered.journal
        options = {"until": json.dumps(journal.until)}
        options |= {"objects": journal.objects} if journal.objects else {}
        options |= {"key_file": journal.key_file} if journal.key_file else {}
        streams = [glob.escape(stream) for stream in journal.until]
        frame = aof2_source.load(
            self._spark,
            streams,
            columns,
            permissive=self._permissive,
            keep=self._keep(),
            **options,
        )
        return self._below(frame, "stream", self.gathered.home)

    def _below(self, frame: DataFrame, column: str, *folders: str) -> DataFrame:
        """The frame with paths of that column, if it has it, relative to the folders."""
        for folder in folders if column in frame.columns else ():
            prefix = F.lit(os.path.join(folder, ""))
            frame = frame.withColumn(
                column,
                F.when(
                    F.col(column).startswith(prefix), F.substr(column, F.length(prefix) + F.lit(1))
                ).otherwise(F.col(column)),
            )
        return frame


def store_columns(section: str) -> list[str]:
    """The columns that a section has. Errors: RelayError for one that there is none of."""
    return list(SECTIONS[sections_of(section)[0]].names)
