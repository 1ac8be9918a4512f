"""The work of the tiers, planned from the catalog alone. Pure: no I/O, no clock.

    Tier 0  segments/   as written; evicted when two checkpoints cover it and a copy is verified
    Tier 1  warm/       compressed; evicted when it is in Tier 2
    Tier 2  objects     deleted by retention only

Retention removes whole segments, oldest first, from all tiers: the rest is always the end of the
stream without a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from relay.base.clock import NS_PER_MS, NS_PER_S, elapsed
from relay.base.errors import JournalError, RelayError
from relay.journal.catalog import Residency, SegmentEntry

_MS = 1_000
SEAL, PRUNE = "seal", "prune"
HYDRATE = "hydrate"
VERBS = (SEAL, "compress", "upload", "evict", "evict-warm", HYDRATE, PRUNE)
REQUESTED = "requested"  # the reason of a command's jobs


class TierPolicy(NamedTuple):
    """The location of segments, and how long each tier keeps them."""

    compress: bool = True  # events compress to a fifth to a third of their size
    compress_after_s: float = 600  # a start after a crash reads the newest segments
    objects: str = ""  # Tier 2: a directory, or s3://bucket/prefix; none by default
    local_bytes: int = 2 << 30  # sealed Tier 0 and Tier 1: agents share the disk
    local_age_s: float = 30 * 86_400  # older segments are hardly ever read
    keep_bytes: int | None = None  # of the stream, uncompressed; None: no limit
    keep_age_s: float | None = None


class JobKind(StrEnum):
    """One bounded piece of work on one segment."""

    COMPRESS = "compress"  # Tier 0 -> Tier 1
    UPLOAD = "upload"  # Tier 1 -> Tier 2
    EVICT_TIER0 = "evict"  # the local copy as it was written
    EVICT_TIER1 = "evict warm"  # the compressed local copy
    PRUNE = "prune"  # the segment, from all tiers


class TierJob(NamedTuple):
    """A job on one segment, and the reason for it."""

    kind: JobKind
    entry: SegmentEntry
    why: str

    def __str__(self) -> str:
        return f"{self.kind} segment {self.entry.segment_id}: {self.why}"


class JournalCommand(NamedTuple):
    """A command of `relay journal`, or of a control message."""

    verb: str  # of VERBS
    segment_ids: tuple[int, ...] = ()  # empty: all that it would change
    keep_age_s: float | None = None  # of a prune; both None: as configured
    keep_bytes: int | None = None


class JobResult(NamedTuple):
    """The result of a command for one segment."""

    segment_id: int
    what: str  # compressed, uploaded …; empty when it failed
    error: RelayError | OSError | None = None

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.what} segment {self.segment_id}"
        hint = self.error.hint if isinstance(self.error, RelayError) else ""
        return f"segment {self.segment_id}: {self.error}{'; ' + hint if hint else ''}"


EVICTED_TIERS = {"evict": Residency.TIER0, "evict-warm": Residency.TIER1}
COMMAND_JOBS = {  # verb -> job, and the result in words
    "compress": (JobKind.COMPRESS, "compressed"),
    "upload": (JobKind.UPLOAD, "uploaded"),
    "evict": (JobKind.EVICT_TIER0, "evicted"),
    "evict-warm": (JobKind.EVICT_TIER1, "evicted"),
    HYDRATE: (None, "hydrated"),
}


def sealed_ms(entries: Sequence[SegmentEntry]) -> dict[int, int]:
    """The time each segment was sealed, which is when the next one was opened."""
    following = [*entries[1:], entries[-1]] if entries else []
    return {e.segment_id: n.creation_ts_ms for e, n in zip(entries, following, strict=True)}


def compressions(
    entries: Sequence[SegmentEntry], policy: TierPolicy, now_ms: int
) -> Iterator[TierJob]:
    """Compress segments that are in Tier 0 only, and were sealed long enough ago."""
    if not (policy.compress or policy.objects):
        return
    sealed = sealed_ms(entries)
    for entry in entries:
        age_ms = now_ms - sealed[entry.segment_id]
        if (
            entry.sealed
            and entry.residency == Residency.TIER0
            and age_ms >= policy.compress_after_s * _MS
        ):
            yield TierJob(JobKind.COMPRESS, entry, f"sealed {elapsed(age_ms * NS_PER_MS)} ago")


def uploads(entries: Sequence[SegmentEntry], policy: TierPolicy) -> Iterator[TierJob]:
    """Upload compressed segments that are not in Tier 2, if there is one."""
    for entry in entries if policy.objects else ():
        has = entry.residency
        if has & Residency.TIER1 and not has & Residency.TIER2:
            yield TierJob(JobKind.UPLOAD, entry, f"not in {policy.objects} yet")


def evictions(
    entries: Sequence[SegmentEntry],
    policy: TierPolicy,
    now_ms: int,
    safe_offset: int,
    read_ns: Mapping[int, int],
) -> Iterator[TierJob]:
    """Evict local copies that are too old or exceed the budget, least recently read first.

    Tier 0 copies go before compressed ones, which are smaller and can be read in place.
    ``safe_offset``: two checkpoints cover the stream below it. ``read_ns``: the last read of each
    segment, by id, on any clock.
    """
    sealed = sealed_ms(entries)
    ordered = sorted(entries, key=lambda e: (read_ns.get(e.segment_id, 0), e.segment_id))
    total = sum(local_bytes(entry) for entry in entries)
    for entry, tier in _evictable(ordered, safe_offset):
        age_ms = now_ms - sealed[entry.segment_id]
        size = copy_bytes(entry, tier)
        if age_ms > policy.local_age_s * _MS:
            why = f"{elapsed(age_ms * NS_PER_MS)} old"
        elif total > policy.local_bytes:
            why = f"{total} local bytes, {policy.local_bytes} allowed"
        else:
            continue
        total -= size
        kind = JobKind.EVICT_TIER0 if tier is Residency.TIER0 else JobKind.EVICT_TIER1
        yield TierJob(kind, entry, why)


def prunes(
    entries: Sequence[SegmentEntry], policy: TierPolicy, now_ms: int, safe_offset: int
) -> Iterator[TierJob]:
    """Prune segments by age and size, oldest first, up to the first that has to stay."""
    sealed = sealed_ms(entries)
    total = sum(entry.file_bytes for entry in entries if entry.sealed)
    for entry in entries:
        age_ms = now_ms - sealed[entry.segment_id]
        if not entry.sealed or entry.end_offset > safe_offset:
            return
        if policy.keep_age_s is not None and age_ms > policy.keep_age_s * _MS:
            kept = elapsed(int(policy.keep_age_s * NS_PER_S))
            why = f"{elapsed(age_ms * NS_PER_MS)} old, {kept} are kept"
        elif policy.keep_bytes is not None and total > policy.keep_bytes:
            why = f"{total} bytes of stream, {policy.keep_bytes} are kept"
        else:
            return
        total -= entry.file_bytes
        yield TierJob(JobKind.PRUNE, entry, why)


def eviction_blocker(entry: SegmentEntry, tier: Residency, safe_offset: int) -> str:
    """The reason that prevents an eviction; empty if a verified other copy is all it takes."""
    if not entry.sealed:
        return "it is not sealed"
    if not entry.residency & tier:
        return "it has no such copy"
    if tier is Residency.TIER1:
        if entry.residency & Residency.TIER0:
            return "the copy in Tier 0 goes first"
        return "" if entry.residency & Residency.TIER2 else "it is not in Tier 2 yet"
    if entry.end_offset > safe_offset:
        return "two checkpoints have to cover it first"
    others = entry.residency & (Residency.TIER1 | Residency.TIER2)
    return "" if others else "it is in neither Tier 1 nor Tier 2"


def is_due(verb: str, entry: SegmentEntry, safe_offset: int) -> bool:
    """True if a command that names no segments would change this one."""
    if verb in EVICTED_TIERS:
        return not eviction_blocker(entry, EVICTED_TIERS[verb], safe_offset)
    if verb == "compress":
        has = entry.residency
        return entry.sealed and bool(has & Residency.TIER0) and not has & Residency.TIER1
    missing = Residency.TIER2 if verb == "upload" else Residency.TIER0
    return entry.sealed and not entry.residency & missing


def check_segments(entries: Mapping[int, SegmentEntry], segment_ids: Iterable[int]) -> None:
    """Errors: JournalError for a segment that does not exist, or is not sealed."""
    for number in segment_ids:
        if number not in entries:
            hint = "`relay journal status` lists the segments"
            raise JournalError(f"segment {number} is not in the stream", hint=hint)
        if not entries[number].sealed:
            raise JournalError(f"segment {number} is not sealed", hint="`relay journal seal`")


def copy_bytes(entry: SegmentEntry, tier: Residency) -> int:
    """Bytes of one copy of a sealed segment."""
    return entry.file_bytes if tier is Residency.TIER0 else entry.compressed_bytes


def local_bytes(entry: SegmentEntry) -> int:
    """Bytes of both local copies of a sealed segment; 0 for the active one."""
    tiers = (Residency.TIER0, Residency.TIER1)
    return sum(copy_bytes(entry, t) for t in tiers if entry.sealed and entry.residency & t)


def _evictable(
    entries: Sequence[SegmentEntry], safe_offset: int
) -> Iterator[tuple[SegmentEntry, Residency]]:
    for tier in (Residency.TIER0, Residency.TIER1):
        for entry in entries:
            if not eviction_blocker(entry, tier, safe_offset):
                yield entry, tier
