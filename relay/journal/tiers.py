"""The tiers of one stream: what is due is done a piece at a time, beside the loop.

A step is one segment's compression, upload, eviction, or what else the plan has; it runs in a
thread of its own and shares nothing with the loop but the manifest's lock, for one append.
What fails is tried again by its reason: a busy store soon, one that is away later, and where an
operator has to act, only when asked to (``retry``; a start of the relay asks, too).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
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
from relay.journal import plan
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.copies import LocalCopies
from relay.journal.format import ManifestType, Reason
from relay.journal.manifest import Manifest
from relay.journal.objects import ObjectStore, open_objects
from relay.journal.plan import JobKind, JobResult, PlanInputs, TierJob, TierPolicy
from relay.journal.segment import FileSource, SegmentSource
from relay.journal.transfer import RemoteCopies
from relay.journal.warm import WarmSegment

WORKER_NICE = 10  # of 19: agents come first, and the work is done in the end
POLL_S = 60  # how often age and budget are looked at; ``wake`` is for what cannot wait


class Backoff(NamedTuple):
    """Seconds before the first try again, doubled each time, and the most."""

    first_s: float
    most_s: float


BACKOFF = {
    Reason.TRANSIENT: Backoff(1, 60),  # a store that asks to slow down, a full disk
    Reason.UNAVAILABLE: Backoff(5, 600),  # a network that is away: minutes to days
}
FOR_OPERATOR = "waits for the operator: "
_STORE, _DISK = "store", "disk"  # what fails for one segment fails for all
_NEEDS = {
    JobKind.COMPRESS: _DISK,
    JobKind.UPLOAD: _STORE,
    JobKind.EVICT_TIER0: "",
    JobKind.EVICT_TIER1: _STORE,
    JobKind.PRUNE: _STORE,
}


class RetryWait(NamedTuple):
    """Why something is not tried now."""

    due_ns: int | None  # monotonic; None: when an operator asks
    times: int  # how often it failed in a row
    text: str


class _Task(NamedTuple):
    key: str  # of its own wait
    needs: str  # _STORE, _DISK or nothing
    text: str
    run: Callable[[], object]


class Tiers:
    """The tiers of the stream whose manifest this is. ``step``, ``do``, ``hydrate`` and ``fetch``
    exclude one another and may come from any thread; ``fetch`` from Tier 1 waits for nobody."""

    def __init__(
        self,
        manifest: Manifest,
        stream_id: int,
        policy: TierPolicy,
        clock: Clock,
        warn: Callable[[str], object],
        objects: ObjectStore | None = None,
    ) -> None:
        """``objects``: in the place of the one that the policy names. Errors: RelayError when
        S3 is asked for and not installed."""
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
        self._commands: deque[Iterator[JobResult]] = deque()  # one thread adds, the steps take
        self._read_ns: dict[int, int] = {}
        self._poll_ns = 0
        self._is_woken = False  # since the step in hand began
        self._is_swept = False

    def set_safe_offset(self, offset: int) -> None:
        """Two checkpoints cover the stream below ``offset``: Tier 0 may give up what is there."""
        self.safe_offset = max(self.safe_offset, offset)
        self.wake()

    def wake(self) -> None:
        """Something happened (a seal, a checkpoint): the next step is due at once."""
        self._is_woken = True
        self._poll_ns = 0

    def retry(self) -> None:
        """An operator asks: what waits for that, or for its time, is tried at the next step."""
        self._waits.clear()
        self.wake()

    def enqueue(self, order: Iterator[JobResult]) -> None:
        """Have the steps do this first, a segment each; it is drawn from in their thread."""
        self._commands.append(order)

    def due_ns(self) -> int:
        """When the next step is due, on the monotonic clock."""
        if self._commands:
            return 0
        times = [wait.due_ns for wait in tuple(self._waits.values()) if wait.due_ns]
        return min([self._poll_ns, *times])

    def run_next(self) -> str | None:
        """Do one bounded piece of what is due: a line about it, or None when nothing was.

        What fails is warned of, in the line, and in ``waiting``: nothing is raised.
        """
        with self._lock:
            self._is_woken = False
            if not self._is_swept:
                self._copies.clean_up()
                self._is_swept = True
            asked = self._next_command()
            if asked is not None:
                return asked
            now_ns = self._clock.monotonic_ns()
            seen = set()
            for task in self._tasks():
                if not self._is_waiting(task, now_ns):
                    return self._try(task)
                seen |= {task.key, task.needs}
            # What waits for nothing that is planned any more is forgotten.
            self._waits = {key: wait for key, wait in self._waits.items() if key in seen}
            if not self._is_woken:  # by the loop's thread, after the plan was made
                self._poll_ns = now_ns + POLL_S * NS_PER_S
            return None

    def run_job(self, job: TierJob) -> None:
        """Do one job now, whatever waits. Errors: RelayError, OSError; they are noted in the
        manifest as in a step."""
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

    def prunes(self) -> list[TierJob]:
        """What retention would let go now, oldest first, and why."""
        return list(plan.prunes(self.entries(), self.policy, self._plan_inputs()))

    def hydrate(self, segment_id: int) -> bool:
        """Bring a segment back to Tier 0, from the nearest copy that is good; False when it is
        there and whole.

        Errors: ObjectError with a hint when Tier 2 has lost it, FormatError, OSError.
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
        """The bytes of a segment that Tier 0 has not: Tier 1 is read in place, Tier 2 hydrated.

        Errors: JournalError when it has left the stream; as ``hydrate``.
        """
        entry = self._copies.entry(entry.segment_id)
        self._read_ns[entry.segment_id] = self._clock.monotonic_ns()
        if entry.residency & Residency.TIER1:
            try:
                return WarmSegment(self._copies.tier1(entry), self._copies.dictionaries)
            except (FormatError, FileNotFoundError) as exc:
                self._warn(f"{exc}: reading another copy of segment {entry.segment_id}")
        elif entry.segment_id in self._manifest.catalog.deleting:
            raise SegmentAway(
                f"segment {entry.segment_id} is being deleted from Tier 2",
                hint="retention let it go",
            )
        with self._lock:  # so that it is not evicted before it is open
            self.hydrate(entry.segment_id)
            return FileSource(self._copies.tier0(entry))

    def waiting(self) -> tuple[str, ...]:
        """What failed and is not tried now, each a line; those for the operator, FOR_OPERATOR."""
        return tuple(sorted(wait.text for wait in tuple(self._waits.values())))

    def _next_command(self) -> str | None:
        """Do one segment of what was asked for first; a line about it, None when nothing was."""
        while self._commands:
            try:
                done = next(self._commands[0])
            except StopIteration:
                self._commands.popleft()
            except (RelayError, OSError) as exc:
                self._commands.popleft()
                hint = f"; {exc.hint}" if isinstance(exc, RelayError) and exc.hint else ""
                text = f"asked for, and not done: {exc}{hint}"
                self._warn(text)
                return text
            else:
                text = f"asked for: {done}"
                if done.error is not None:
                    self._warn(text)
                return text
        return None

    def _plan_inputs(self) -> PlanInputs:
        now_ms = self._clock.now_ns() // NS_PER_MS
        return PlanInputs(now_ms, self.safe_offset, self._read_ns)

    def _tasks(self) -> Iterator[_Task]:
        """Everything that the plan has, what frees the disk first."""
        entries, policy, times = self.entries(), self.policy, self._plan_inputs()
        transfer, deleting = self._remote, self._manifest.catalog.deleting
        for entry in entries if transfer else ():
            if entry.segment_id in deleting:
                text = f"delete {deleting[entry.segment_id]}"
                yield _Task(text, _STORE, text, partial(self._tier2().delete, entry))
        for jobs in (
            plan.evictions(entries, policy, times),
            plan.compressions(entries, policy, times),
            plan.uploads(entries, policy),
            plan.prunes(entries, policy, times),
        ):
            for job in jobs:
                key = f"{job.kind} {job.entry.segment_id}"
                yield _Task(key, self._needs(job), str(job), partial(self.run_job, job))
        for index in transfer.chunks_to_upload() if transfer else ():
            text = f"upload manifest chunk {index}"
            yield _Task(text, _STORE, text, partial(self._tier2().upload_chunk, index))

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
        """Note when to try again, and say so."""
        key, reason = task.needs or task.key, Reason.TRANSIENT
        if isinstance(exc, ObjectError):
            reason = Reason(exc.reason)
            is_about_it = isinstance(exc, ObjectConflict) or reason is Reason.MISSING
            key = task.key if is_about_it else _STORE
        elif isinstance(exc, RelayError):  # a damaged file, a store that is not named
            key, reason = task.key, Reason.CODEC
        times = self._waits[key].times + 1 if key in self._waits else 1
        backoff = BACKOFF.get(reason)
        hint = f"; {exc.hint}" if isinstance(exc, RelayError) and exc.hint else ""
        if backoff is None:
            text = f"{FOR_OPERATOR}{task.text}: {exc}{hint}"
            self._waits[key] = RetryWait(None, times, text)
        else:
            wait_s = min(backoff.first_s * 2 ** (times - 1), backoff.most_s)
            text = f"again in {wait_s:g} s: {task.text}: {exc}{hint}"
            due_ns = self._clock.monotonic_ns() + int(wait_s * NS_PER_S)
            self._waits[key] = RetryWait(due_ns, times, text)
        self._warn(text)
        return text

    def _upload(self, entry: SegmentEntry) -> None:
        if not entry.residency & Residency.TIER1:
            self._copies.compress(entry)
            entry = self._copies.entry(entry.segment_id)
        self._tier2().upload(self._ensure_warm(entry))

    def _ensure_warm(self, entry: SegmentEntry) -> SegmentEntry:
        """Make sure that Tier 1 has the segment, anew from Tier 0 where its file is damaged."""
        try:
            self._copies.verify_warm(entry)
        except (FormatError, FileNotFoundError) as exc:
            if not entry.residency & Residency.TIER0:
                raise
            self._warn(f"{exc}: compressed anew from Tier 0")
            self._copies.compress(entry)
        return self._copies.entry(entry.segment_id)

    def _evict(self, entry: SegmentEntry, kind: JobKind) -> None:
        """Give a local copy up, once the other is proved."""
        tier = Residency.TIER0 if kind is JobKind.EVICT_TIER0 else Residency.TIER1
        why_not = plan.eviction_blocker(entry, tier, self.safe_offset)
        if why_not:
            raise JournalError(f"segment {entry.segment_id} cannot be evicted: {why_not}")
        if tier is Residency.TIER0 and entry.residency & Residency.TIER1:
            entry = self._ensure_warm(entry)
        else:
            self._tier2().verify(entry)
        self._copies.evict(entry, tier)

    def _prune(self, entry: SegmentEntry) -> None:
        """Let a segment go from all tiers. A crash leaves less of it, and the plan goes on."""
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
        if entry.dictionary_id:
            self._copies.remove_unused_dictionaries()

    def _hydrate(self, entry: SegmentEntry) -> None:
        copies, has = self._copies, entry.residency
        tiers = [t for t in (Residency.TIER1, Residency.TIER2) if has & t]
        if not tiers:
            raise FormatError(copies.tier0(entry), 0, "a whole copy in some tier", "none")
        if tiers == [Residency.TIER2]:
            self._tier2()  # where no store is named, there is nothing to try
        for tier in tiers:
            source_tier = 1 if tier is Residency.TIER1 else 2
            copies.record(ManifestType.HydrationStarted, entry, source_tier=source_tier)
            try:
                if tier is Residency.TIER1:
                    copies.restore(entry)
                else:
                    self._tier2().hydrate(entry)
            except (RelayError, OSError) as exc:
                missing = isinstance(exc, ObjectError) and exc.reason == Reason.MISSING
                reason = Reason.MISSING if missing else Reason.TRANSIENT
                copies.record_failure(ManifestType.HydrationFailed, entry, reason_code=reason)
                if tier is tiers[-1]:
                    raise
                self._warn(f"{exc}: segment {entry.segment_id} is taken from Tier 2")
                continue
            copies.record(ManifestType.HydrationDone, entry, resident_bytes=entry.file_bytes)
            return

    def _tier2(self) -> RemoteCopies:
        if self._remote is None:
            raise JournalError(
                "a segment is in Tier 2, and no object store is named",
                hint="name it again: journal.objects in config.json, or --objects",
            )
        return self._remote


def lower_priority() -> None:
    """Let everything else on the machine go before the calling thread; for an executor's
    ``initializer``. Linux alone has priorities of threads: elsewhere nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORKER_NICE)


class TierWorker:
    """Runs the steps of the tiers in an executor, one at a time, when they are due."""

    def __init__(
        self,
        tiers: Tiers,
        executor: Executor,
        clock: Clock,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake``: called, from the thread of the tiers, when a step is done."""
        self._tiers = tiers
        self._executor = executor
        self._clock = clock
        self._wake = wake
        self._running: Future[str | None] | None = None

    def poll(self, *, start: bool = True) -> str | None:
        """Start a step when one is due and none runs; what the last one did, once it is done.

        Takes no time. ``start`` False: the owner is about to end, no other step begins.
        """
        done = None
        if self._running is not None:
            if not self._running.done():
                return None
            done, self._running = self._running.result(), None
        if start and self._clock.monotonic_ns() >= self._tiers.due_ns():
            self._running = self._executor.submit(self._tiers.run_next)
            self._running.add_done_callback(lambda _: self._wake())
        return done

    def waiting(self) -> tuple[str, ...]:
        """As of the tiers."""
        return self._tiers.waiting()

    def wait(self, seconds: float) -> bool:
        """Wait for the step that runs, so long at most; True when none runs any more."""
        if self._running is None:
            return True
        return bool(wait([self._running], timeout=seconds).done)

    def due_ns(self) -> int | None:
        """When to poll next; None while a step runs (it is done when it is done)."""
        return None if self._running is not None else self._tiers.due_ns()
