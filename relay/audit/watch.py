"""Follow a journal, and count each event once.

    CHECKPOINT/watch.json          whose checkpoint it is
    CHECKPOINT/lock                held by the watch that has it
    CHECKPOINT/position.json       the batches that are done, and the one that is being made
    OUT/watch.json, OUT/lock       whose events they are
    OUT/events/batch={batch}/      the events of a batch, as Parquet

A batch has its offsets in ``position.json`` before it begins and keeps them when it is repeated
after a crash. Its file is named by its number and replaced then: so no event is counted, or kept,
twice, and none is left out. A line may be printed again, with the same numbers. Before an offset
is kept what was read up to there is synced, so that a power cut takes nothing back that was
counted. Needs no Spark.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relay.audit.lake import FolderLake
from relay.audit.lake_columns import AOF2
from relay.audit.sources import journal_files
from relay.audit.sources.acomm_messages import LAST_SECOND, MICROS
from relay.audit.sources.journal_columns import relay_id_of
from relay.audit.sources.journal_files import (
    SegmentPart,
    StreamPlan,
    gap_rows,
    read_rows,
    read_segment,
)
from relay.base import fsio
from relay.base.discovery import has_config, user_home
from relay.base.errors import HomeMissing, JournalError, JournalPruned, RelayError
from relay.base.home import JOURNAL
from relay.journal.segment import segment_path

DEFAULT_INTERVAL_S = 5.0
MAX_RECORDS = 50_000  # a batch, about: the first look at a long journal comes in pieces
SHOWN_FINDINGS = 20
POSITION = "position.json"
STATE_VARIABLE = "XDG_STATE_HOME"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # unless ignored, as below nohup
NEW_CHECKPOINT = "begin with a new checkpoint: it starts at the first remaining record"

Offsets = dict[str, int]  # stream -> logical offset behind the last record that was read


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


class _Position(msgspec.Struct, frozen=True):
    """The position of a watch."""

    batch: int = 0  # number of the next one
    offsets: Offsets = {}  # behind all that is counted
    counts: dict[str, int] = {}
    ends: Offsets | None = None  # of the next batch, once they are known
    damaged: list[str] = []  # what could not be read when it was planned, and is told


class _Owner(msgspec.Struct, frozen=True):
    """The owner of a folder."""

    home: str
    checkpoint: str
    id: str = ""  # of the checkpoint: one that is made anew counts from the beginning


_Kind = TypeVar("_Kind", _Position, _Owner)

# What is counted -> the events, or the state that deliveries enter.
EVENTS = {
    "accepted": "MessageSent",
    "again": "DeliveryTimed",
    "refused": "FileRefused",
    "starts": "Start",
    "lost": "Gap",
}
STATES = {
    "delivered": "Delivered",
    "read": "Received",
    "acked": "Acknowledged",
    "bounced": "Bounced",
    "expired": "Expired",
    "dead": "Dead",
}
ENDED = ("Bounced", "Expired", "Dead")
FINDING = [
    *("event", "state", "offset", "end", "number", "relay_id"),
    *("file_path", "sender", "recipients", "reason"),
]
COUNTS = (
    *("events", "accepted", "delivered", "read", "acked", "again"),
    *("bounced", "expired", "dead", "refused", "starts", "lost"),
)


def watch(request: WatchRequest, on_batch: Callable[[WatchedBatch], object]) -> dict[str, int]:
    """Follow a home's journal until a signal of ENDING, or once; the counts since the
    checkpoint began.

    ``on_batch`` is called with each batch. Damage is a gap, and a finding. Errors: HomeMissing;
    RelayError for a checkpoint or OUT of another watch, for a journal that no longer goes back to
    the checkpoint, and for records that are away, or sealed without the key.
    """
    home = os.path.abspath(request.home)
    if not os.path.isdir(os.path.join(home, JOURNAL)):
        raise HomeMissing(f"there is no relay home at {home}")
    checkpoint = os.path.abspath(request.checkpoint or default_checkpoint(home))
    with contextlib.ExitStack() as held, _signals() as stop:
        out = _own(checkpoint, request.out, home, held)
        following = _Watch(home, checkpoint, out)
        last = following.ends() if request.once else None
        while not stop.is_set():
            batch = following.next(last)
            if batch is not None:
                if batch.counts:
                    on_batch(batch)
                following.finish()  # killed before, it is made and shown again
            elif request.once or stop.wait(request.interval_s):
                break
        return following.position.counts


def default_checkpoint(home: str) -> str:
    """Return the default checkpoint of a home; not in the home, which only its relay writes to."""
    state = os.environ.get(STATE_VARIABLE) or os.path.join(user_home(), ".local", "state")
    name = hashlib.sha256(home.encode()).hexdigest()[:16]
    return os.path.join(state, "agent-relay", "watch", name)


def _own(checkpoint: str, out: str | None, home: str, held: contextlib.ExitStack) -> str | None:
    """Make and claim the folders, and lock them as long as ``held``; the absolute path of OUT."""
    out = None if out is None else os.path.abspath(out)
    try:
        owner = _Owner(home, checkpoint, secrets.token_hex(8))
        for folder in dict.fromkeys(filter(None, (checkpoint, out))):
            if has_config(folder):
                raise RelayError(f"{folder} is a relay home", hint="name a folder of its own")
            os.makedirs(folder, mode=0o700, exist_ok=True)  # private: they show who writes to whom
            _lock(folder, held)
            owner = _claim(os.path.join(folder, "watch.json"), owner, is_new=folder == checkpoint)
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


def _claim(path: str, owner: _Owner, *, is_new: bool) -> _Owner:
    """Claim a folder; ``is_new``: its id is the one that it has, if it has one.

    Errors: RelayError when it is another watch's.
    """
    found = _read(path, _Owner)
    if found is None:
        fsio.write_atomic(path, msgspec.json.encode(owner))
        return owner
    if (found.home, found.checkpoint) != (owner.home, owner.checkpoint):
        whose = f"the watch of {found.home} with the checkpoint {found.checkpoint}"
    elif not is_new and found.id != owner.id:
        whose = f"an earlier checkpoint at {found.checkpoint}"
    else:
        return found
    raise RelayError(
        f"{os.path.dirname(path)} belongs to {whose}",
        hint="name another folder: --checkpoint, --out",
    )


def _read(path: str, kind: type[_Kind]) -> _Kind | None:
    """Read a file of a watch; None where there is none. Errors: RelayError for a damaged one."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as exc:
        raise RelayError(f"{path} is damaged: {exc}", hint="name another folder") from exc


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set an event on a signal: the batch that is being made ends first."""
    stop = threading.Event()
    handled = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Read(NamedTuple):
    """New records, where they begin and end, and what could not be read."""

    events: pa.Table
    starts: Offsets
    ends: Offsets
    damaged: list[str]


class _Watch:
    """Makes one batch after another of a home's journal."""

    def __init__(self, home: str, checkpoint: str, out: str | None) -> None:
        self._home = home
        self._state = FolderLake(checkpoint)
        self._out = None if out is None else FolderLake(out)
        # Inode and mtime of each stream's folder: those of a restored one differ.
        self._folders: dict[str, tuple[int, int]] = {}
        known = _read(os.path.join(checkpoint, POSITION), _Position)
        if known is None and os.path.exists(os.path.join(checkpoint, "query")):
            raise RelayError(
                f"{checkpoint} is of an earlier version of agent-relay; {NEW_CHECKPOINT}"
            )
        self.position = self._after = known or _Position()
        if out is not None and _last_batch(out) > (known.batch if known else -1):
            raise RelayError(
                f"{out} has batches that {checkpoint} does not: it was restored, or {POSITION} is"
                " gone, and events would be kept twice",
                hint=f"{NEW_CHECKPOINT}, and with a new OUT",
            )
        for stream in self.position.offsets.keys() - set(self._streams()):
            raise self._is_ahead(stream, 0)

    def ends(self) -> Offsets:
        """Return where the streams end now."""
        return {stream: journal_files.plan(stream, strict=False).end for stream in self._streams()}

    def next(self, last: Offsets | None) -> WatchedBatch | None:
        """Make the next batch; None when nothing is new, up to ``last``.

        It counts once ``finish`` was called. Errors: JournalPruned for records that are gone;
        RelayError for records that are away, sealed or of another journal, and for a full disk.
        """
        before = self.position
        if before.ends is None:
            read = self._read(self._plans(last), MAX_RECORDS)
            if not read.events.num_rows:
                return None
            begun = read.starts | before.offsets
            self._keep(msgspec.structs.replace(before, offsets=begun, ends=read.ends))
        else:  # begun before, and not finished: the same records
            read = self._read(self._plans(before.ends), None)
        if self._out is not None:
            sink = pa.BufferOutputStream()
            pq.write_table(read.events, sink, compression="zstd")
            path = f"events/batch={before.batch}/events.parquet"
            self._out.write(path, sink.getvalue().to_pybytes())
        counts = count(read.events)
        both = Counter(before.counts) + Counter(counts)
        totals = {name: both[name] for name in COUNTS if name in both}
        offsets = self.position.offsets | read.ends
        damaged = [*before.damaged, *read.damaged]
        self._after = _Position(before.batch + 1, offsets, totals, None, damaged)
        lines = findings(read.events, self._home)
        more = max(len(lines) - SHOWN_FINDINGS, 0)
        until, shown = _time_of(read.events), lines[:SHOWN_FINDINGS]
        return WatchedBatch(before.batch, until, counts, totals, shown, more)

    def finish(self) -> None:
        """Count the batch that was made."""
        self._keep(self._after)

    def _keep(self, position: _Position) -> None:
        self._state.write(POSITION, msgspec.json.encode(position))
        self.position = position

    def _streams(self) -> list[str]:
        return journal_files.find_streams([glob.escape(self._home)])

    def _plans(self, ends: Offsets | None) -> Iterator[tuple[str, StreamPlan]]:
        """Plan what is new in each stream; a later one is followed from its first record."""
        known = self.position.offsets
        for stream in self._streams() if ends is None else ends:
            self._check_reached(stream)
            end = None if ends is None else ends[stream]
            plan = journal_files.plan(stream, known.get(stream, 0), end, strict=False)
            if stream in known and known[stream] < plan.first:
                raise JournalPruned(
                    f"{stream}: the records from offset {known[stream]} to {plan.first} were"
                    f" pruned before they were read; {NEW_CHECKPOINT}"
                )
            yield stream, plan

    def _check_reached(self, stream: str) -> None:
        """Check, once for each folder, that a stream reaches what was read of it.

        Errors: JournalError.
        """
        status = os.stat(stream)
        folder = (status.st_ino, status.st_mtime_ns)
        if self._folders.get(stream) != folder:
            plan = journal_files.plan(stream, strict=False)
            if self.position.offsets.get(stream, 0) > plan.end and not plan.damage:
                raise self._is_ahead(stream, plan.end)
            self._folders[stream] = folder

    def _is_ahead(self, stream: str, end: int) -> JournalError:
        return JournalError(
            f"{stream}: the checkpoint is at offset {self.position.offsets[stream]}, but the"
            f" journal ends at {end}: it is another one, or was restored; {NEW_CHECKPOINT}"
        )

    def _read(self, plans: Iterable[tuple[str, StreamPlan]], most: int | None) -> _Read:
        """Read new records until there are ``most``, or a few more."""
        found: list[pa.RecordBatch] = []
        starts: Offsets = {}
        ends: Offsets = {}
        damaged: list[str] = []
        # They may have been changed meanwhile.
        settings = journal_files.home_settings(self._home)._replace(is_followed=True)
        for stream, plan in plans:
            begin = self.position.offsets.get(stream, plan.first)
            fresh = [gap for gap in plan.damage if gap.reason not in self.position.damaged]
            if fresh:
                damaged += [gap.reason for gap in fresh]
                found += gap_rows(fresh, AOF2)
                starts[stream] = ends[stream] = begin
            _sync(plan)
            for segment in plan.segments:
                for batch in read_segment(segment, AOF2, settings):
                    found.append(batch)
                    starts[stream], ends[stream] = begin, batch["end"][-1].as_py()
                    if most is not None and sum(map(len, found)) >= most:
                        return _Read(pa.Table.from_batches(found), starts, ends, damaged)
        events = pa.Table.from_batches(found, AOF2)
        return _Read(events, starts, ends, damaged)


def _last_batch(out: str) -> int:
    """The highest number of a batch in OUT; -1 without one."""
    names = glob.glob("batch=*", root_dir=os.path.join(out, "events"))
    numbers = (name.removeprefix("batch=") for name in names)
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)


def _time_of(events: pa.Table) -> str:
    """The time of the newest event, ISO 8601."""
    seconds = pc.max(events["at"].cast(pa.int64())).as_py() or 0
    at = datetime.fromtimestamp(min(seconds // MICROS, LAST_SECOND), UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _sync(plan: StreamPlan) -> None:
    """See to it that everything before the end of a plan is on the disk."""
    if plan.segments:
        last = plan.segments[-1]
        # One that has left Tier 0 was sealed, and synced with that.
        with contextlib.suppress(FileNotFoundError):
            path = segment_path(last.folder, last.segment_id)
            fd = fsio.open_read(path)
            try:
                fsio.sync_data(fd, path)
            finally:
                os.close(fd)


def count(events: pa.Table) -> dict[str, int]:
    """Count events, and deliveries by the state that they enter; only what is there."""
    kinds = Counter(events["event"].to_pylist())
    states: Counter[str] = Counter()
    sizes = pc.fill_null(pc.list_value_length(events["recipients"]), 0).to_pylist()
    for state, size in zip(events["state"].to_pylist(), sizes, strict=True):
        states[state] += size
    counts = {"events": pc.count(events["sequence"]).as_py()}
    counts |= {name: kinds[event] for name, event in EVENTS.items()}
    counts |= {name: states[state] for name, state in STATES.items()}
    return {name: counts[name] for name in COUNTS if counts[name]}


def findings(events: pa.Table, home: str) -> list[str]:
    """Make a line for each event that a person should know: refused, given up, lost."""
    is_end = pc.is_in(events["state"], pa.array(ENDED))
    is_other = pc.is_in(events["event"], pa.array(["FileRefused", "Gap"]))
    rows = events.filter(pc.or_(is_end, is_other)).select(FINDING).to_pylist()
    numbers = {int(row["number"]) for row in rows if not row["relay_id"] and row["number"]}
    names = relay_ids(home, numbers) if numbers else {}
    return [_line(row, names) for row in rows]


def _line(row: dict[str, Any], names: Mapping[int, str]) -> str:
    reason = f": {row['reason']}" if row["reason"] else ""
    if row["event"] == "FileRefused":
        return f"refused {row['relay_id'] or row['file_path']} of {row['sender']}{reason}"
    if row["event"] == "Gap":
        return f"lost offsets {row['offset']} to {row['end']}{reason}"
    message = row["relay_id"] or names.get(row["number"]) or f"message {row['number']}"
    return f"{row['state'].lower()} {message} > {', '.join(row['recipients'] or ())}{reason}"


def format_batch(batch: WatchedBatch) -> str:
    """Format one batch for people."""
    counts = [f"{name} {count:,}" for name, count in batch.counts.items()]
    return f"{batch.until}  {', '.join(counts)}"


# Deliveries end minutes or days after their message; older than this is not worth the reading.
NEWEST_SEGMENTS = 8


def relay_ids(home: str, numbers: Iterable[int]) -> dict[int, str]:
    """Look up the relay's ids of these messages in the newest segments of a home's journal.

    Nothing is fetched from an object store, and unreadable segments are ignored: the numbers are
    valid without an id.
    """
    wanted = set(numbers)
    found: dict[int, str] = {}
    try:
        settings = journal_files.home_settings(home)._replace(objects="")
        for segment in _newest(home):
            if len(found) == len(wanted):
                break
            for rows in read_rows(segment, settings):
                for event in rows.events:
                    number = event.message.id if event.message is not None else None
                    if number in wanted and (name := relay_id_of(event)):
                        found[number] = name
    except (RelayError, OSError):
        pass
    return found


def _newest(home: str) -> Iterator[SegmentPart]:
    for stream in journal_files.find_streams([glob.escape(home)]):
        segments = journal_files.plan(stream, strict=False).segments
        yield from reversed(segments[-NEWEST_SEGMENTS:])
