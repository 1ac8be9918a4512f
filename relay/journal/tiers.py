"""The tiers of one stream: planned jobs and commands run one at a time, beside the loop.

A step is one segment's compression, upload, eviction or the like; it runs in a thread of its own
and shares nothing with the loop but the manifest's lock, for one append. Failed jobs are retried
by their reason: a busy store soon, an unavailable one later, and where an operator has to act, with
the next start of the relay only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import NamedTuple

from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import (
    FormatError,
    JournalError,
    ObjectConflict,
    ObjectError,
    RelayError,
    SegmentAway,
)
from relay.journal import tier_plan
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.copies import LocalCopies, RemoteCopies
from relay.journal.manifest import Manifest
from relay.journal.manifest_format import ManifestType, Reason
from relay.journal.objects import ObjectStore, open_objects
from relay.journal.segment import FileSource, SegmentSource
from relay.journal.tier_plan import JobKind, JobResult, TierJob, TierPolicy
from relay.journal.warm import WarmSegment

WORKER_NICE = 10  # of 19: agents come first, yet the work gets done
POLL_S = 60  # how often age and budget are checked; ``wake`` is for urgent work


BACKOFF_S = {  # before the first retry, doubled each time, and at most
    Reason.TRANSIENT: (1, 60),  # a store that is busy, a full disk
    Reason.UNAVAILABLE: (5, 600),  # a network that is down, for minutes to days
}
FOR_OPERATOR = "waits for the operator: "
_STORE, _DISK = "store", "disk"  # needs that fail for one segment fail for all
_NEEDS = {
    JobKind.COMPRESS: _DISK,
    JobKind.UPLOAD: _STORE,
    JobKind.EVICT_TIER0: "",
    JobKind.EVICT_TIER1: _STORE,
    JobKind.PRUNE: _STORE,
}


class RetryWait(NamedTuple):
    """A failed task that waits for its retry."""

    due_ns: int | None  # monotonic; None: with the next start
    failures: int  # in a row
    text: str


class _Task(NamedTuple):
    key: str  # of its own RetryWait
    needs: str  # _STORE, _DISK or empty
    text: str
    run: Callable[[], object]


class Tiers:
    """The tiers of one stream.

    ``run_next``, ``run_job``, ``hydrate`` and ``fetch`` exclude one another and may be called from
    any thread; ``fetch`` from Tier 1 takes no lock.
    """

    def __init__(
        self,
        manifest: Manifest,
        stream_id: int,
        policy: TierPolicy,
        clock: Clock,
        warn: Callable[[str], object],
        objects: ObjectStore | None = None,
    ) -> None:
        """``objects``: instead of the store in the policy. Errors: RelayError when S3 support is
        needed and not installed."""
        if objects is None and policy.objects:
            objects = open_objects(policy.objects)
        self.policy = policy._replace(objects=objects.url if objects else "")
        self.safe_offset = 0  # two checkpoints cover the stream below this offset
        self._manifest = manifest
        self._clock = clock
        self._warn = warn
        self._copies = LocalCopies(manifest.stream_dir, manifest, warn)
        self._remote = RemoteCopies(self._copies, objects, stream_id) if objects else None
        self._lock = threading.RLock()
        self._waits: dict[str, RetryWait] = {}
        self._commands: deque[Iterator[JobResult]] = deque()  # one thread adds, the steps run
        self._read_ns: dict[int, int] = {}
        self._poll_ns = 0
        self._is_woken = False  # since the current step began
        self._is_clean = False

    def set_safe_offset(self, offset: int) -> None:
        """Allow eviction of segments below ``offset``, which two checkpoints cover."""
        self.safe_offset = max(self.safe_offset, offset)
        self.wake()

    def wake(self) -> None:
        """Make the next step due at once, after a seal or a checkpoint."""
        self._is_woken = True
        self._poll_ns = 0

    def enqueue(self, command: Iterator[JobResult]) -> None:
        """Queue a command, run before other steps and in their thread, one segment per step."""
        self._commands.append(command)

    def due_ns(self) -> int:
        """The time of the next step, on the monotonic clock."""
        if self._commands:
            return 0
        due = [wait.due_ns for wait in tuple(self._waits.values()) if wait.due_ns]
        return min([self._poll_ns, *due])

    def run_next(self) -> str | None:
        """Do one bounded piece of work that is due; a line about it, or None if nothing is.

        Failures are in the line, in a warning, and in ``waiting``: nothing is raised.
        """
        with self._lock:
            self._is_woken = False
            if not self._is_clean:
                self._is_clean = True
                try:
                    self._copies.clean_up()
                except OSError as exc:
                    self._warn(f"files that a crash left stay until the next start: {exc}")
            line = self._next_command()
            if line is not None:
                return line
            now_ns = self._clock.monotonic_ns()
            seen = set()
            for task in self._tasks():
                if not self._is_waiting(task, now_ns):
                    return self._try(task)
                seen |= {task.key, task.needs}
            # Waits of tasks that are no longer planned are dropped.
            self._waits = {key: wait for key, wait in self._waits.items() if key in seen}
            if not self._is_woken:  # not woken by the loop's thread since the plan was made
                self._poll_ns = now_ns + POLL_S * NS_PER_S
            return None

    def run_job(self, job: TierJob) -> None:
        """Do one job now, even if it waits for a retry. Errors: RelayError, OSError; they are
        recorded in the manifest as in a step."""
        with self._lock:
            entry = self._copies.entry(job.entry.segment_id)
            if job.kind is JobKind.COMPRESS:
                self._copies.compress(entry)
            elif job.kind is JobKind.UPLOAD:
                self._upload(entry)
            elif job.kind is JobKind.PRUNE:
                self._prune(entry)
            else:
                self._evict(entry, job.kind)

    def entries(self) -> list[SegmentEntry]:
        """The segments, oldest first."""
        return self._manifest.entries()

    def hydrate(self, segment_id: int) -> bool:
        """Restore a segment to Tier 0, from the nearest good copy; False if it is there and whole.

        Errors: ObjectError with a hint when it is missing in Tier 2, FormatError, OSError.
        """
        with self._lock:
            entry = self._copies.entry(segment_id)
            if not entry.sealed:
                return False
            if entry.residency & Residency.TIER0 and self._copies.is_resident(entry):
                return False
            self._hydrate(entry)
            return True

    def fetch(self, entry: SegmentEntry) -> SegmentSource:
        """Open a segment that is not in Tier 0: Tier 1 is read in place, Tier 2 is hydrated.

        Errors: JournalError when the stream has it no more; as ``hydrate``.
        """
        entry = self._copies.entry(entry.segment_id)
        self._read_ns[entry.segment_id] = self._clock.monotonic_ns()
        if entry.residency & Residency.TIER1:
            try:
                return WarmSegment(self._copies.tier1(entry))
            except (FormatError, FileNotFoundError) as exc:
                self._warn(f"{exc}: reading another copy of segment {entry.segment_id}")
        elif entry.segment_id in self._manifest.catalog.deleting:
            raise SegmentAway(
                f"segment {entry.segment_id} is being deleted from Tier 2",
                hint="it was removed by retention",
            )
        with self._lock:  # so that it is not evicted before it is open
            self.hydrate(entry.segment_id)
            return FileSource(self._copies.tier0(entry))

    def run(self, verb: str, segment_ids: Sequence[int] = ()) -> Iterator[JobResult]:
        """Run a command of ``COMMAND_JOBS``, for these segments or all that it would change.

        Oldest first. A failure is the result's ``error``, and the next segment is tried.
        Errors: JournalError for a segment that does not exist or is not sealed.
        """
        entries = {entry.segment_id: entry for entry in self.entries()}
        tier_plan.check_segments(entries, segment_ids)
        due = [n for n, entry in entries.items() if tier_plan.is_due(verb, entry, self.safe_offset)]
        kind, done = tier_plan.COMMAND_JOBS[verb]
        for number in segment_ids or due:
            try:
                if kind is None:
                    self.hydrate(number)
                else:
                    self.run_job(TierJob(kind, entries[number], tier_plan.REQUESTED))
            except (RelayError, OSError) as exc:
                yield JobResult(number, "", exc)
            else:
                yield JobResult(number, done)

    def prune(self, jobs: Sequence[TierJob]) -> Iterator[JobResult]:
        """Run planned prune jobs up to the first that fails, so that no gap is left."""
        for job in jobs:
            try:
                self.run_job(job)
            except (RelayError, OSError) as exc:
                yield JobResult(job.entry.segment_id, "", exc)
                return
            yield JobResult(job.entry.segment_id, "pruned")

    def waiting(self) -> tuple[str, ...]:
        """Failed tasks, a line each; those that need the operator begin with FOR_OPERATOR."""
        return tuple(sorted(wait.text for wait in tuple(self._waits.values())))

    def _next_command(self) -> str | None:
        """Run one segment of the oldest command; a line about it, None without a command."""
        while self._commands:
            try:
                done = next(self._commands[0])
            except StopIteration:
                self._commands.popleft()
            except (RelayError, OSError) as exc:
                self._commands.popleft()
                hint = f"; {exc.hint}" if isinstance(exc, RelayError) and exc.hint else ""
                text = f"command failed: {exc}{hint}"
                self._warn(text)
                return text
            else:
                text = f"command: {done}"
                if done.error is not None:
                    self._warn(text)
                return text
        return None

    def _tasks(self) -> Iterator[_Task]:
        """All planned tasks, those that free disk space first."""
        entries, policy, now_ms = self.entries(), self.policy, self._clock.now_ns() // NS_PER_MS
        deleting = self._manifest.catalog.deleting
        for entry in entries if self._remote else ():
            if entry.segment_id in deleting:
                text = f"delete {deleting[entry.segment_id]}"
                yield _Task(text, _STORE, text, partial(self._tier2().delete, entry))
        for jobs in (
            tier_plan.evictions(entries, policy, now_ms, self.safe_offset, self._read_ns),
            tier_plan.compressions(entries, policy, now_ms),
            tier_plan.uploads(entries, policy),
            tier_plan.prunes(entries, policy, now_ms, self.safe_offset),
        ):
            for job in jobs:
                key = f"{job.kind} {job.entry.segment_id}"
                yield _Task(key, self._needs(job), str(job), partial(self.run_job, job))

    def _needs(self, job: TierJob) -> str:
        if job.kind is JobKind.PRUNE and not job.entry.residency & Residency.TIER2:
            return ""
        return _NEEDS[job.kind]

    def _is_waiting(self, task: _Task, now_ns: int) -> bool:
        for key in (task.key, task.needs):
            wait = self._waits.get(key)
            if wait is not None and (wait.due_ns is None or wait.due_ns > now_ns):
                return True
        return False

    def _try(self, task: _Task) -> str:
        try:
            task.run()
        except (RelayError, OSError) as exc:
            return self._failed(task, exc)
        for key in (task.key, task.needs):
            self._waits.pop(key, None)
        return task.text

    def _failed(self, task: _Task, exc: RelayError | OSError) -> str:
        """Schedule the retry, and report it."""
        key, reason = task.needs or task.key, Reason.TRANSIENT
        if isinstance(exc, ObjectError):
            reason = Reason(exc.reason)
            is_own_fault = isinstance(exc, ObjectConflict) or reason is Reason.MISSING
            key = task.key if is_own_fault else _STORE
        elif isinstance(exc, RelayError):  # a damaged file, a store that is not configured
            key, reason = task.key, Reason.CODEC
        failures = self._waits[key].failures + 1 if key in self._waits else 1
        backoff_s = BACKOFF_S.get(reason)
        hint = f"; {exc.hint}" if isinstance(exc, RelayError) and exc.hint else ""
        if backoff_s is None:
            text = f"{FOR_OPERATOR}{task.text}: {exc}{hint}"
            self._waits[key] = RetryWait(None, failures, text)
        else:
            first_s, most_s = backoff_s
            wait_s = min(first_s * 2 ** (failures - 1), most_s)
            text = f"retry in {wait_s:g} s: {task.text}: {exc}{hint}"
            due_ns = self._clock.monotonic_ns() + int(wait_s * NS_PER_S)
            self._waits[key] = RetryWait(due_ns, failures, text)
        self._warn(text)
        return text

    def _upload(self, entry: SegmentEntry) -> None:
        if not entry.residency & Residency.TIER1:
            self._copies.compress(entry)
            entry = self._copies.entry(entry.segment_id)
        self._tier2().upload(self._ensure_warm(entry))

    def _ensure_warm(self, entry: SegmentEntry) -> SegmentEntry:
        """Verify the Tier 1 copy; compress it again from Tier 0 if it is damaged."""
        try:
            self._copies.verify_warm(entry)
        except (FormatError, FileNotFoundError) as exc:
            if not entry.residency & Residency.TIER0:
                raise
            self._warn(f"{exc}: compressed again from Tier 0")
            self._copies.compress(entry)
        return self._copies.entry(entry.segment_id)

    def _evict(self, entry: SegmentEntry, kind: JobKind) -> None:
        """Evict a local copy, once the other is verified."""
        tier = Residency.TIER0 if kind is JobKind.EVICT_TIER0 else Residency.TIER1
        blocker = tier_plan.eviction_blocker(entry, tier, self.safe_offset)
        if blocker:
            raise JournalError(f"segment {entry.segment_id} cannot be evicted: {blocker}")
        if tier is Residency.TIER0 and entry.residency & Residency.TIER1:
            entry = self._ensure_warm(entry)
        else:
            self._tier2().verify(entry)
        self._copies.evict(entry, tier)

    def _prune(self, entry: SegmentEntry) -> None:
        """Delete a segment from all tiers. After a crash the next plan deletes the rest."""
        if not entry.sealed or entry.end_offset > self.safe_offset:
            raise JournalError(
                f"segment {entry.segment_id} cannot be pruned: two checkpoints have to cover it"
            )
        if entry.residency & Residency.TIER2:
            self._tier2().delete(entry)
        for tier in (Residency.TIER0, Residency.TIER1):
            if entry.residency & tier:
                self._copies.evict(entry, tier)
        self._read_ns.pop(entry.segment_id, None)

    def _hydrate(self, entry: SegmentEntry) -> None:
        copies, has = self._copies, entry.residency
        tiers = [t for t in (Residency.TIER1, Residency.TIER2) if has & t]
        if not tiers:
            raise FormatError(copies.tier0(entry), 0, "a whole copy in some tier", "none")
        if tiers == [Residency.TIER2]:
            self._tier2()  # fails at once where no store is configured
        for tier in tiers:
            source_tier = 1 if tier is Residency.TIER1 else 2
            copies.record(ManifestType.HydrationStarted, entry, source_tier=source_tier)
            try:
                if tier is Residency.TIER1:
                    copies.restore(entry)
                else:
                    self._tier2().hydrate(entry)
            except (RelayError, OSError) as exc:
                is_missing = isinstance(exc, ObjectError) and exc.reason == Reason.MISSING
                reason = Reason.MISSING if is_missing else Reason.TRANSIENT
                copies.record_failure(ManifestType.HydrationFailed, entry, reason_code=reason)
                if tier is tiers[-1]:
                    raise
                self._warn(f"{exc}: segment {entry.segment_id} is restored from Tier 2")
                continue
            copies.record(ManifestType.HydrationDone, entry, resident_bytes=entry.file_bytes)
            return

    def _tier2(self) -> RemoteCopies:
        if self._remote is None:
            raise JournalError(
                "a segment is in Tier 2, and no object store is configured",
                hint="set journal.objects in config.json, or use --objects",
            )
        return self._remote


def lower_priority() -> None:
    """Lower the priority of the calling thread; for an executor's ``initializer``.

    Only Linux has priorities of threads: elsewhere nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            nice = max(WORKER_NICE, os.nice(0))  # a relay under nice stays as it is
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class TierWorker:
    """Runs the steps of the tiers in an executor, one at a time, when they are due."""

    def __init__(self, tiers: Tiers, executor: Executor, clock: Clock) -> None:
        self._tiers = tiers
        self._executor = executor
        self._clock = clock
        self._running: Future[str | None] | None = None

    def poll(self, *, start: bool = True) -> str | None:
        """Start a step if one is due and none runs; the line of the last one, once it is done.

        Never blocks. ``start`` False: no further step begins, because the owner ends.
        """
        done = None
        if self._running is not None:
            if not self._running.done():
                return None
            done, self._running = self._running.result(), None
        if start and self._clock.monotonic_ns() >= self._tiers.due_ns():
            self._running = self._executor.submit(self._tiers.run_next)
        return done

    def waiting(self) -> tuple[str, ...]:
        """See ``Tiers.waiting``."""
        return self._tiers.waiting()

    def wait(self, seconds: float) -> Future[str | None] | None:
        """Wait for the running step up to ``seconds``; the step if it still runs then."""
        if self._running is None or wait([self._running], timeout=seconds).done:
            return None
        return self._running

    def due_ns(self) -> int | None:
        """The time to poll next; None while a step runs, whose end wakes the owner."""
        return None if self._running is not None else self._tiers.due_ns()
