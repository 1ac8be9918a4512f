"""Background work: retention, packing, watching the WAL, checking the ledger.

Files are removed and packed in a thread, in small slices with a longer pause after each; rows of
the ledger by the loop, its only writer, a few hundred at a time. The next run continues an
interrupted one. The agent that asked for a run is answered at its end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

from relay.base import archive_pack
from relay.base.archive_pack import PackedDay
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.disk import CHECK_S
from relay.base.errors import LedgerDamaged, RelayError
from relay.base.home import LEDGER, Home
from relay.base.message import Kind
from relay.base.text import plural
from relay.daemon import prune
from relay.daemon.prune import Pruned
from relay.delivery.values import Pack, Part, Prune, Resources, Subject
from relay.ledger import file as ledger_file
from relay.ledger.file import open_readonly
from relay.ledger.ledger import Ledger
from relay.ledger.wal import WalWatch

PAUSE_S = 0.01  # after each slice, at least: the loop has priority on the disk
PAUSE_FACTOR = 4  # pause this many times as long as the slice took
POLL_NS = NS_PER_S  # interval at which the thread is polled
CHECK_NS = 86_400 * NS_PER_S  # the ledger is checked once a day, 5 ms a MiB
CLOCK_NS = 3_600 * NS_PER_S  # in which a clock that is wrong after a start has been set
AFTER_FAILURE_NS = 600 * NS_PER_S  # a disk that is low stays low
SLICE_NS = 50_000_000  # between two slices of rows
T = TypeVar("T")
LogLine = tuple[str, str, dict[str, object]]  # sentence, action, facts
NOBODY = Subject()  # asked for a job of the relay's own


class Housekeeper(Part):
    """Runs one job at a time in ``executor``, beside the loop."""

    def __init__(self, given: Resources, executor: Executor, *, pause_s: float) -> None:
        super().__init__(given)
        self._executor = executor
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._queue: list[tuple[Subject, Prune | Pack]] = []
        self._job: Future[list[LogLine]] | None = None
        self._running: tuple[Subject, Prune | Pack] | None = None  # until it is answered
        self._results: list[str] = []  # of that job
        self.answers: list[tuple[Subject, Kind, str]] = []  # to those who asked, to be sent
        self._pruning: Iterator[int] | None = None  # of rows, in the loop
        self._audit_rows_pruned = 0
        # Not right at the start, and early enough for a relay that is restarted often.
        self._next_prune_ns = (
            given.clock.monotonic_ns() + min(60, given.config.retention.every_s) * NS_PER_S
        )
        self._next_check_ns = self._next_prune_ns
        self._next_disk_ns = given.clock.monotonic_ns()
        self._next_slice_ns = 0
        self.damage = ""  # what the last check of the ledger found
        self.wal = WalWatch(
            given.home.path(LEDGER), given.config.ledger, given.clock, executor, given.log
        )

    def enqueue(self, job: Prune | Pack, asked_by: Subject = NOBODY) -> None:
        """Queue a job for the thread; lost in a crash."""
        if (asked_by, job) not in self._queue:
            self._queue.append((asked_by, job))

    def stop(self) -> None:
        """End the thread after its current slice."""
        self._stopping.set()

    def poll(self, *, idle: bool, is_low: bool = False) -> int:
        """Start or continue work; returns when to poll next (monotonic ns). Errors: LedgerError.

        ``idle``: no batch waits. ``is_low``: the disk is nearly full, so the archive is packed.
        """
        now = self._clock.monotonic_ns()
        due = self.wal.poll(idle=idle)
        self._take_result()
        if self._pruning is not None and now >= self._next_slice_ns:
            self._prune_slice(self._pruning)
            self._next_slice_ns = now + SLICE_NS
        if self._job is None and self._pruning is None:
            self._answer()
            self._start_next_job(now, is_low)
        if self._pruning is not None:
            due = min(due, self._next_slice_ns)
        if self._job is not None:
            due = min(due, now + POLL_NS)
        return min(due, self._next_prune_ns, self._next_check_ns, self._next_disk_ns)

    def _start_next_job(self, now: int, is_low: bool) -> None:
        """Start the thread's next job: requested, due, or needed by a full disk."""
        if now >= self._next_prune_ns:
            self._next_prune_ns = now + self._config.retention.every_s * NS_PER_S
            if (
                self._store.deliveries.downtime_ns(self._clock.now_ns() - CLOCK_NS)
                > archive_pack.DAY_NS
            ):
                self._next_prune_ns = now + CLOCK_NS  # the clock may be wrong, and be set soon
            else:
                self.enqueue(Prune())
        if now >= self._next_disk_ns:
            self._next_disk_ns = now + CHECK_S * NS_PER_S
            if not self._queue and is_low and packable(self._home, self._clock):
                self.enqueue(Pack())
        if self._queue:
            self._running = self._queue.pop(0)
            job = self._running[1]
            if isinstance(job, Prune):
                settings, at = self._config.retention, self._clock.now_ns()
                self._pruning = prune.prune_rows(self._home, self._ledger, settings, at)
                self._job = self._executor.submit(self._prune)
            else:
                self._job = self._executor.submit(self._pack, job.before)
        elif now >= self._next_check_ns:
            self._next_check_ns = now + CHECK_NS
            self._job = self._executor.submit(self._check)

    def _prune_slice(self, pruning: Iterator[int]) -> None:
        """Remove a slice of the rows past their retention."""
        pruned = next(pruning, None)
        if pruned is not None:
            self._audit_rows_pruned += pruned
            return
        self._pruning = None
        count, self._audit_rows_pruned = self._audit_rows_pruned, 0
        if count:
            text = f"Removed {plural(count, 'row')} of audit_log and security_events"
            self._report(text, "prune", kind="audit", count=count)

    def _take_result(self) -> None:
        if self._job is None or not self._job.done():
            return
        job, self._job = self._job, None
        try:
            for text, action, facts in job.result():
                self._report(text, action, **facts)
        except (RelayError, OSError) as exc:  # the next run tries again
            self._next_disk_ns = self._clock.monotonic_ns() + AFTER_FAILURE_NS
            text = f"Could not prune, pack or check: {exc}"
            self._log(text, action="prune_failed", level="error")
            self._answer(text)

    def _report(self, text: str, action: str, **facts: object) -> None:
        self._log(text, action=action, **facts)
        self._results.append(text)

    def _answer(self, failure: str = "") -> None:
        """Answer the command that asked for the last job, if one did."""
        results, self._results = self._results, []
        subject, job = self._running or (NOBODY, None)
        self._running = None
        if subject is NOBODY:
            return
        nothing = "nothing has expired" if isinstance(job, Prune) else "nothing to pack"
        done = "completed " + ("\n".join(results) or nothing)
        kind = Kind.NACK if failure else Kind.ACK
        self.answers.append((subject, kind, failure or done))

    # -- in the thread -----------------------------------------------------------------

    def _prune(self) -> list[LogLine]:
        now = self._clock.now_ns()
        found = self._run_slices(prune.prune_files(self._home, self._config.retention, now))
        return [
            (
                f"Removed {plural(pruned.number, 'file')} of {pruned.kind}, {pruned.n_bytes} bytes",
                "prune",
                {"kind": pruned.kind, "count": pruned.number, "bytes": pruned.n_bytes},
            )
            for pruned in found or ()
            if pruned.number
        ]

    def _check(self) -> list[LogLine]:
        """Check the ledger's pages: SQLite itself notices damage only when a page is used."""
        path = self._home.path(LEDGER)
        try:
            with contextlib.closing(open_readonly(path)) as db:
                why = ledger_file.quick_check(db, lambda: not self._stopping.is_set())
            found = LedgerDamaged(path, why) if why else None
        except LedgerDamaged as exc:
            found = exc
        self.damage = f"{found}; {found.hint}" if found else ""
        return [(self.damage, "ledger_damaged", {"level": "warning"})] if found else []

    def _pack(self, before: str) -> list[LogLine]:
        lines: list[LogLine] = []
        for day in packable(self._home, self._clock, before):
            packed = self._run_slices(archive_pack.pack(self._home, day))
            if packed is None:
                break
            lines.append(
                (describe_pack(packed), "pack", {"day": packed.day, "files": packed.files})
            )
        return lines

    def _run_slices(self, steps: Iterator[T | None]) -> T | None:
        """Run the steps with a pause after each; the last value, or None when interrupted."""
        value, began = None, time.monotonic()
        for value in steps:
            if self._stopping.is_set():
                return None
            if value is None and self._pause_s:
                time.sleep(max(self._pause_s, PAUSE_FACTOR * (time.monotonic() - began)))
                began = time.monotonic()
        return value


def packable(home: Home, clock: Clock, before: str = "") -> list[str]:
    """Days of the archive that may be packed, oldest first: never today's or yesterday's, nor
    one whose file an open row still needs. Errors: LedgerError."""
    last = archive_pack.before_yesterday(clock.now_ns())
    last = min(before, last) if before else last
    _, needed = prune.files_in_use(home)
    return [day for day in archive_pack.days(home) if day < last and day not in needed]


def describe_pack(packed: PackedDay) -> str:
    """One line about a pack."""
    return (
        f"packed {plural(packed.files, 'file')} of {packed.day}: {packed.n_bytes} bytes are "
        f"{packed.packed_bytes} in archive/{packed.day}{archive_pack.SUFFIX}"
    )


def run_retention(
    home: Home, config: Config, clock: Clock, *, dry_run: bool = False
) -> list[Pruned]:
    """A complete retention run in the foreground. The caller holds the home's lock; with
    ``dry_run`` nothing is removed and no lock is needed. Errors: LedgerError, OSError."""
    settings, now, path = config.retention, clock.now_ns(), home.path(LEDGER)
    *_, found = prune.prune_files(home, settings, now, dry_run=dry_run)
    with contextlib.closing(open_readonly(path)) as db:
        audit = prune.audit_due(db, settings, now)
    if not dry_run:
        with contextlib.closing(Ledger.open(path)) as ledger:
            for _ in prune.prune_rows(home, ledger, settings, now):
                pass
    return [*(found or ()), audit]
