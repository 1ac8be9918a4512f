"""What one run looks at: the ledger as it was at one instant, then the store as it was after.

The order matters. A row of the ledger is completed only once the journal holds its message, so
every completed row of the snapshot must be found in a store that is read later: the checkpoint,
and the journal behind it. What is younger than the snapshot is in the store and not in the
ledger: an age is asked for before such a message is called extra.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit import acomm_source, ledger_source
from relay.audit.acomm_columns import SECTIONS, sections_of
from relay.audit.ledger_source import LedgerSnapshot
from relay.audit.sizes import Sizes, measure
from relay.audit.watched import DEFAULT_RECENT_DAYS, watched_until
from relay.clock import NS_PER_S, Clock
from relay.comm import acomm
from relay.comm.seal import seal
from relay.config import decode
from relay.errors import FormatError, HomeMissing, KeyFileError, RelayError, SealedStore
from relay.home import CONFIG, JOURNAL, LEDGER, STORE, Home
from relay.store.opening import look, store_key

ARCHIVES = "store/archive/**/*.acomm"
NOT_KEPT = frozenset(("content", "metadata", "signature"))  # bytes that one job or none reads
DAY_NS = 86_400 * NS_PER_S
DEFAULT_GRACE_S = 30.0  # a batch is recorded within a second of its discovery


class Gathered(NamedTuple):
    """The files of one run: nobody changes them any more."""

    home: str
    folder: str  # private to the run: holds the copies
    ledger: LedgerSnapshot
    store_files: tuple[str, ...]  # the live store as it stood, and the archives in their places
    grace_ns: int
    watched_until_ns: int  # the snapshot, or the last sign of a relay that runs no more
    recent_ns: int  # how long before that something may have happened and still be judged

    def named(self, text: str) -> str:
        """``text`` with paths of copies turned into those of their originals."""
        return text.replace(self.folder + os.sep, self.home + os.sep)


def gather(
    home: str,
    folder: str,
    clock: Clock,
    grace_s: float = DEFAULT_GRACE_S,
    recent_days: float = DEFAULT_RECENT_DAYS,
) -> Gathered:
    """Take the ledger's snapshot, then the live store, then the list of archives.

    The store before the archives: a message that moves to an archive meanwhile is seen twice,
    never not at all. A store that was never written is an empty one.
    Errors: HomeMissing; LedgerError; RelayError when there is no store or it cannot be copied.
    """
    if not os.path.isdir(home):
        raise HomeMissing(f"there is no relay home at {home}")
    ledger = ledger_source.take_snapshot(
        os.path.join(home, LEDGER), os.path.join(folder, LEDGER), clock
    )
    files = _take_store(home, folder, clock)
    pattern = os.path.join(glob.escape(home), ARCHIVES)
    files += sorted(glob.glob(pattern, recursive=True))
    until, recent = watched_until(home, ledger), int(recent_days * DAY_NS)
    return Gathered(home, folder, ledger, tuple(files), int(grace_s * NS_PER_S), until, recent)


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
            file = look(opened, clock, config, key).snapshot().file()
        os.makedirs(os.path.dirname(target), mode=0o700)
        acomm.write(target, seal(file, key))
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

    ``shared``: several jobs read, so each table is read from its files once and then kept in
    memory, and on the workers' disks where that is too little. Content, metadata and signatures
    are not among what is kept.
    """

    def __init__(self, spark: SparkSession, gathered: Gathered, *, shared: bool = False) -> None:
        self.gathered = gathered
        self._spark = spark
        self._shared = shared
        self._kept: dict[str, DataFrame] = {}

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

    @functools.cached_property
    def sizes(self) -> Sizes:
        """What home and disk measure, looked at once, when it is first asked for.

        Errors: RelayError for a config.json that is none.
        """
        return measure(self.gathered.home, self.gathered.watched_until_ns)

    def frame(self, rows: Iterable[tuple[object, ...]], schema: StructType) -> DataFrame:
        """These rows, which the driver knows, as a table of one partition."""
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrow = to_arrow_schema(schema, timezone="UTC")
        arrays = [pa.array(values, f.type) for values, f in zip(columns, arrow, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=arrow)
        return self._spark.createDataFrame(table).coalesce(1)

    def ledger(self, table: str, *columns: str) -> DataFrame:
        """These columns of a table. Errors: RelayError for one that is not there."""
        path = self.gathered.ledger.path
        every = ledger_source.schema_of(table).names

        def load(names: Sequence[str]) -> DataFrame:
            return ledger_source.load(self._spark, path, table, names)

        return self._columns(f"ledger {table}", load, every, columns)

    def store(self, section: str, *columns: str) -> DataFrame:
        """These columns of a section of live store and archives; ``file`` as in the home.

        Errors: RelayError for one that is not there.
        """
        every = [name for name in store_columns(section) if name not in NOT_KEPT]
        return self._columns(
            f"store {section}", lambda names: self._store(section, names), every, columns
        )

    def once(self, key: str, make: Callable[[], DataFrame]) -> DataFrame:
        """The frame that ``make`` gives, computed once whatever is made of it."""
        if key not in self._kept:
            self._kept[key] = make().persist(StorageLevel.MEMORY_AND_DISK)
        return self._kept[key]

    def _columns(
        self,
        key: str,
        load: Callable[[Sequence[str]], DataFrame],
        every: Sequence[str],
        columns: Sequence[str],
    ) -> DataFrame:
        """From what is kept, where it is to be; else read for this one plan."""
        if not self._shared or not set(columns) <= set(every):
            return load(columns)
        if key not in self._kept:
            self._kept[key] = load(every).persist(StorageLevel.MEMORY_AND_DISK)
        return self._kept[key].select(*columns)

    def _store(self, section: str, columns: Sequence[str]) -> DataFrame:
        files = self.gathered.store_files
        frame = acomm_source.load(self._spark, files, section, columns)
        if "file" not in columns:
            return frame
        for folder in (self.gathered.folder, self.gathered.home):
            prefix = F.lit(os.path.join(folder, ""))
            frame = frame.withColumn(
                "file",
                F.when(
                    F.col("file").startswith(prefix), F.substr("file", F.length(prefix) + F.lit(1))
                ).otherwise(F.col("file")),
            )
        return frame


def store_columns(section: str) -> list[str]:
    """The columns that a section has. Errors: RelayError for one that there is none of."""
    return list(SECTIONS[sections_of(section)[0]].names)
