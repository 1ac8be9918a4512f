"""Follow a journal, and count each event once.

    CHECKPOINT/watch.json          whose checkpoint it is
    CHECKPOINT/lock                held by the watch that has it
    CHECKPOINT/query/              Spark's own: which offsets each batch has, which are done
    CHECKPOINT/totals/{batch}.json the counts up to and with a batch
    OUT/watch.json, OUT/lock       whose events they are
    OUT/events/batch={batch}/      the events of a batch, as Parquet

A batch has its offsets before it begins and keeps them when it is repeated after a crash. Its
files are named by its number and replaced then: so no event is counted, or kept, twice, and none
is left out. A line may be printed again, with the same numbers.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from relay.audit.session import explained, session
from relay.audit.sources import journal_files
from relay.audit.sources.journal_files import ReadSettings, SegmentPart, read_segment
from relay.base import fsio
from relay.base.errors import HomeMissing, RelayError
from relay.base.home import JOURNAL

# One core: it runs all day, beside the relay.
MASTER = "local[1]"
CONF = {"spark.sql.shuffle.partitions": "1"}
DEFAULT_INTERVAL_S = 5.0
MAX_RECORDS = 200_000  # a batch: the first look at a long journal comes in pieces
SHOWN_FINDINGS = 20
STATE_VARIABLE = "XDG_STATE_HOME"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # unless ignored, as below nohup
_KEPT_TOTALS = 10
_POLL_S = 0.3
_STOP_S = 10.0  # time for a running batch when the watch ends


class WatchRequest(msgspec.Struct, frozen=True):
    """The parameters of a watch."""

    home: str
    checkpoint: str | None = None  # None: below the user's state folder
    out: str | None = None  # None: events are counted and not kept
    once: bool = False  # end when everything that is there now was read
    interval_s: float = DEFAULT_INTERVAL_S


class WatchedBatch(msgspec.Struct, frozen=True):
    """One batch."""

    batch: int
    until: str  # ISO 8601, UTC: the newest event of it
    counts: dict[str, int]  # of this batch; only what is there
    totals: dict[str, int]  # since the checkpoint began
    findings: list[str]  # a line each
    more_findings: int = 0  # than are shown


class _Totals(msgspec.Struct):
    counts: dict[str, int] = {}


class _Owner(msgspec.Struct, frozen=True):
    """The owner of a folder."""

    home: str
    checkpoint: str


def _deliveries(state: str) -> Column:
    """Count deliveries that entered a state."""
    return F.sum(F.when(F.col("state") == state, F.coalesce(F.size("recipients"), F.lit(0))))


def _events(*names: str) -> Column:
    return F.count_if(F.col("event").isin(*names))


COUNTS: dict[str, Callable[[], Column]] = {
    "events": lambda: F.count("sequence"),
    "accepted": lambda: _events("MessageSent"),
    "delivered": lambda: _deliveries("Delivered"),
    "read": lambda: _deliveries("Received"),
    "acked": lambda: _deliveries("Acknowledged"),
    "again": lambda: _events("DeliveryTimed"),
    "bounced": lambda: _deliveries("Bounced"),
    "expired": lambda: _deliveries("Expired"),
    "dead": lambda: _deliveries("Dead"),
    "refused": lambda: _events("FileRefused"),
    "starts": lambda: _events("Start"),
    "lost": lambda: _events("Gap"),
}


def watch(request: WatchRequest, on_batch: Callable[[WatchedBatch], object]) -> dict[str, int]:
    """Follow a home's journal until a signal of ENDING, or once; the counts since the
    checkpoint began.

    ``on_batch`` is called with each batch, from another thread. Damage is a gap, and a finding.
    Errors: HomeMissing; RelayError for a checkpoint or OUT of another watch, and for a journal
    that no longer goes back to the checkpoint.
    """
    home = os.path.abspath(request.home)
    if not os.path.isdir(os.path.join(home, JOURNAL)):
        raise HomeMissing(f"there is no relay home at {home}")
    checkpoint = _checkpoint_of(request, home)
    with _owned(checkpoint, request.out, home) as out:
        batches = _BatchProcessor(home, checkpoint, out, on_batch)
        with session(MASTER, "relay audit watch", CONF) as spark:
            with explained(), _signals() as stop:
                query = _start(spark, home, request, checkpoint, batches)
                _follow(query, stop)
        return batches.totals()


def default_checkpoint(home: str) -> str:
    """Return the default checkpoint of a home; not in the home, which only its relay writes to."""
    state = os.environ.get(STATE_VARIABLE) or os.path.expanduser("~/.local/state")
    name = hashlib.sha256(home.encode()).hexdigest()[:16]
    return os.path.join(state, "agent-relay", "watch", name)


def _checkpoint_of(request: WatchRequest, home: str) -> str:
    return os.path.abspath(request.checkpoint or default_checkpoint(home))


@contextlib.contextmanager
def _owned(checkpoint: str, out: str | None, home: str) -> Iterator[str | None]:
    """Make, claim and lock the folders for the block; the absolute path of OUT."""
    with contextlib.ExitStack() as held:
        yield _own(checkpoint, out, home, held)


def _own(checkpoint: str, out: str | None, home: str, held: contextlib.ExitStack) -> str | None:
    owner = _Owner(home, checkpoint)
    out = None if out is None else os.path.abspath(out)
    try:
        for folder in filter(None, (checkpoint, os.path.join(checkpoint, "totals"), out)):
            os.makedirs(folder, mode=0o700, exist_ok=True)  # private: they show who writes to whom
        for folder in dict.fromkeys(filter(None, (checkpoint, out))):
            _lock(folder, held)
            _claim(os.path.join(folder, "watch.json"), owner)
    except OSError as exc:
        taken = isinstance(exc, FileExistsError)
        why = "is not a folder" if taken else f"cannot be used: {exc.strerror}"
        raise RelayError(
            f"{exc.filename or checkpoint} {why}",
            hint="--checkpoint and --out name folders, there or not yet, that you may write to",
        ) from exc
    return out


def _lock(folder: str, held: contextlib.ExitStack) -> None:
    """Errors: RelayError when another watch has it."""
    try:
        held.enter_context(fsio.locked(os.path.join(folder, "lock")))
    except BlockingIOError:
        raise RelayError(
            f"another watch has {folder}", hint="end it, or see --checkpoint and --out"
        ) from None


def _claim(path: str, owner: _Owner) -> None:
    """Errors: RelayError when the folder is another watch's."""
    try:
        with open(path, "rb") as file:
            found = msgspec.json.decode(file.read(), type=_Owner)
    except FileNotFoundError:
        fsio.write_atomic(path, msgspec.json.encode(owner))
        return
    except msgspec.DecodeError as exc:
        raise RelayError(f"{path} is damaged: {exc}", hint="name another folder") from exc
    if found != owner:
        raise RelayError(
            f"{os.path.dirname(path)} belongs to the watch of {found.home}"
            f" with the checkpoint {found.checkpoint}",
            hint="name another folder: --checkpoint, --out",
        )


def _start(
    spark: SparkSession, home: str, request: WatchRequest, checkpoint: str, batches: _BatchProcessor
) -> StreamingQuery:
    settings = journal_files.home_settings(home)
    options = {"mode": "permissive", "max_records": str(MAX_RECORDS)}
    options |= {"key_file": settings.key_file} if settings.key_file else {}
    source = spark.readStream.format("aof2").options(**options)
    writer = source.load(glob.escape(home)).writeStream.foreachBatch(batches.process)
    writer = writer.option("checkpointLocation", os.path.join(checkpoint, "query"))
    if request.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{request.interval_s} seconds").start()


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set an event on a signal. Spark's own handler would interrupt a batch."""
    stop = threading.Event()
    handled = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in handled}
    # py4j logs a traceback of a batch that fails because the query ends.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(query: StreamingQuery, stop: threading.Event) -> None:
    """Wait until the query ends, or is stopped; then let the running batch finish."""
    while not query.awaitTermination(_POLL_S):
        if stop.is_set():
            break
    waited = 0.0
    while query.isActive and query.status["isTriggerActive"] and waited < _STOP_S:
        query.awaitTermination(_POLL_S)
        waited += _POLL_S
    query.stop()


class _BatchProcessor:
    """Processes batches; called by Spark, one at a time."""

    def __init__(
        self,
        home: str,
        checkpoint: str,
        out: str | None,
        on_batch: Callable[[WatchedBatch], object],
    ) -> None:
        self._home = home
        self._totals = os.path.join(checkpoint, "totals")
        self._out = out
        self._on_batch = on_batch

    def process(self, frame: DataFrame, batch: int) -> None:
        """Keep, count and report a batch."""
        frame = frame.persist()
        try:
            if self._out is not None:
                folder = os.path.join(self._out, "events", f"batch={batch}")
                frame.write.mode("overwrite").parquet(folder)
            row = frame.agg(
                F.date_format(F.max("at"), "yyyy-MM-dd'T'HH:mm:ss'Z'").alias("until"),
                *[count().alias(name) for name, count in COUNTS.items()],
            ).collect()[0]
            found = findings(frame).limit(SHOWN_FINDINGS + 1).collect()
            count = findings(frame).count() if len(found) > SHOWN_FINDINGS else len(found)
        finally:
            frame.unpersist()
        counts = {name: row[name] for name in COUNTS if row[name]}
        totals = self._add(batch, counts)
        lines = self._named(found[:SHOWN_FINDINGS])
        if counts:
            self._on_batch(
                WatchedBatch(batch, row["until"], counts, totals, lines, count - len(lines))
            )

    def _named(self, found: list[Row]) -> list[str]:
        """Replace the engine's numbers in the lines by the relay's ids that are known."""
        numbers = {int(row["number"]) for row in found if row["number"] is not None}
        names = relay_ids(self._home, numbers) if numbers else {}
        lines = []
        for row in found:
            name = names.get(int(row["number"])) if row["number"] is not None else None
            called = f"message {row['number']}"
            lines.append(row["line"].replace(called, name, 1) if name else row["line"])
        return lines

    def totals(self) -> dict[str, int]:
        """Return the totals of all batches so far."""
        return self._read(max(self._numbers(), default=-1))

    def _add(self, batch: int, counts: dict[str, int]) -> dict[str, int]:
        """Store the totals up to this batch, made of the previous ones: repeatable."""
        before = self._read(batch - 1)
        both = {name: before.get(name, 0) + counts.get(name, 0) for name in COUNTS}
        totals = {name: count for name, count in both.items() if count}
        fsio.write_atomic(self._path(batch), msgspec.json.encode(_Totals(totals)))
        for number in self._numbers():
            if number <= batch - _KEPT_TOTALS:
                os.unlink(self._path(number))
        return totals

    def _read(self, batch: int) -> dict[str, int]:
        if batch < 0:
            return {}
        path = self._path(batch)
        try:
            with open(path, "rb") as file:
                return msgspec.json.decode(file.read(), type=_Totals).counts
        except (OSError, msgspec.DecodeError) as exc:
            hint = "begin with a new checkpoint: --checkpoint"
            raise RelayError(f"{path} cannot be read: {exc}", hint=hint) from exc

    def _numbers(self) -> list[int]:
        names = (name.removesuffix(".json") for name in os.listdir(self._totals))
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def _path(self, batch: int) -> str:
        return os.path.join(self._totals, f"{batch:020d}.json")


def findings(events: DataFrame) -> DataFrame:
    """Make a line for each event that a person should know: refused, given up, lost.

    Columns: offset, line, and number where the line calls a message by it.
    """
    message = F.coalesce(F.col("relay_id"), F.concat(F.lit("message "), F.col("number")))
    recipients = F.concat_ws(", ", "recipients")
    reason = F.coalesce(F.concat(F.lit(": "), F.col("reason")), F.lit(""))
    ended = F.col("state").isin("Dead", "Bounced", "Expired")
    line = (
        F.when(
            F.col("event") == "FileRefused",
            F.concat(
                F.lit("refused "),
                F.coalesce("relay_id", "file_path"),
                F.lit(" of "),
                F.col("sender"),
                reason,
            ),
        )
        .when(
            F.col("event") == "Gap",
            F.concat(F.lit("lost offsets "), F.col("offset"), F.lit(" to "), F.col("end"), reason),
        )
        .when(
            ended, F.concat(F.lower("state"), F.lit(" "), message, F.lit(" > "), recipients, reason)
        )
    )
    number = F.when(ended & F.col("relay_id").isNull(), F.col("number"))
    lines = events.select("offset", number.alias("number"), line.alias("line"))
    return lines.where("line is not null").orderBy("offset")


def format_batch(batch: WatchedBatch) -> str:
    """Format one batch for people."""
    counts: list[Any] = [f"{name} {count:,}" for name, count in batch.counts.items()]
    return f"{batch.until}  {', '.join(counts)}"


# Deliveries end minutes or days after their message; older than this is not worth the reading.
NEWEST_SEGMENTS = 8
_SCHEMA = pa.schema(
    [
        ("event", pa.string()),
        ("number", pa.decimal128(20)),
        ("relay_id", pa.string()),
    ]
)


def relay_ids(home: str, numbers: Iterable[int]) -> dict[int, str]:
    """Look up the relay's ids of these messages in the newest segments of a home's journal.

    Nothing is fetched from an object store, and unreadable segments are ignored: the numbers are
    valid without an id.
    """
    wanted = set(numbers)
    found: dict[int, str] = {}
    try:
        where = journal_files.home_settings(home)
        settings = ReadSettings({}, where.key_file or None, True)
        for segment in _newest(home):
            if len(found) == len(wanted):
                break
            for batch in read_segment(segment, _SCHEMA, settings):
                found |= _named(batch, wanted)
    except (RelayError, OSError):
        pass
    return found


def _newest(home: str) -> Iterator[SegmentPart]:
    for stream in journal_files.find_streams([glob.escape(home)]):
        segments = journal_files.plan(stream, strict=False).segments
        yield from reversed(segments[-NEWEST_SEGMENTS:])


def _named(batch: pa.RecordBatch, wanted: set[int]) -> dict[int, str]:
    sent = batch.filter(pc.equal(batch["event"], "MessageSent"))
    pairs = zip(sent["number"].to_pylist(), sent["relay_id"].to_pylist(), strict=True)
    return {int(number): name for number, name in pairs if name and int(number) in wanted}
