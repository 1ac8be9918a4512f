"""What the tiers have to do, decided from the catalog alone. No I/O, no clock: pure.

    Tier 0  segments/   written here; leaves when two checkpoints cover it and a copy is proved
    Tier 1  warm/       compressed; leaves when Tier 2 has it
    Tier 2  objects     leaves by retention alone

Retention takes whole segments, oldest first, from all tiers: what is left is always the end of
the stream without a hole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from relay.base.errors import RelayError
from relay.journal.catalog import Residency, SegmentEntry

_MS = 1_000
SEAL, PRUNE = "seal", "prune"
VERBS = (SEAL, "compress", "upload", "evict", "evict-warm", "hydrate", PRUNE)


class TierPolicy(NamedTuple):
    """What is kept where, and how long."""

    compress: bool = True  # text of events: a fifth to a third of the size
    compress_after_s: float = 600  # a start after a crash reads the newest segments
    objects: str = ""  # Tier 2: a directory, or s3://bucket/prefix; none until somebody names one
    local_bytes: int = 2 << 30  # Tier 0 sealed and Tier 1: a disk shared with the agents' work
    local_age_s: float = 30 * 86_400  # a month back is read now and then; older hardly
    keep_bytes: int | None = None  # of the stream, uncompressed; None: nothing is ever deleted
    keep_age_s: float | None = None


class JobKind(StrEnum):
    """One bounded piece of work on one segment."""

    COMPRESS = "compress"  # Tier 0 -> Tier 1
    UPLOAD = "upload"  # Tier 1 -> Tier 2
    EVICT_TIER0 = "evict"  # the local copy as it was written
    EVICT_TIER1 = "evict warm"  # the compressed local copy
    PRUNE = "prune"  # the segment, from all tiers


class TierJob(NamedTuple):
    """What to do with a segment, and why."""

    kind: JobKind
    entry: SegmentEntry
    why: str

    def __str__(self) -> str:
        return f"{self.kind} segment {self.entry.segment_id}: {self.why}"


class JournalCommand(NamedTuple):
    """What somebody asks of the journal by name."""

    verb: str  # of VERBS
    segment_ids: tuple[int, ...] = ()  # none: all that it would change
    keep_age_s: float | None = None  # of a prune; neither: what is configured
    keep_bytes: int | None = None


class JobResult(NamedTuple):
    """What became of an order for one segment."""

    segment_id: int
    what: str  # compressed, uploaded …; empty when it failed
    error: RelayError | OSError | None = None

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.what} segment {self.segment_id}"
        hint = self.error.hint if isinstance(self.error, RelayError) else ""
        return f"segment {self.segment_id}: {self.error}{'; ' + hint if hint else ''}"


class PlanInputs(NamedTuple):
    """What decides beside the catalog."""

    now_ms: int
    safe_offset: int  # two checkpoints cover the stream below this offset
    read_ns: Mapping[int, int]  # when a segment was read last, by id; monotonic


def sealed_ms(entries: Sequence[SegmentEntry]) -> dict[int, int]:
    """When each segment was sealed: the next one was opened then."""
    following = [*entries[1:], entries[-1]] if entries else []
    return {e.segment_id: n.creation_ts_ms for e, n in zip(entries, following, strict=True)}


def compressions(
    entries: Sequence[SegmentEntry], policy: TierPolicy, times: PlanInputs
) -> Iterator[TierJob]:
    """Sealed segments that are in Tier 0 alone, for long enough."""
    if not (policy.compress or policy.objects):
        return
    sealed = sealed_ms(entries)
    for entry in entries:
        age_ms = times.now_ms - sealed[entry.segment_id]
        if (
            entry.sealed
            and entry.residency == Residency.TIER0
            and age_ms >= policy.compress_after_s * _MS
        ):
            yield TierJob(JobKind.COMPRESS, entry, f"sealed {_age(age_ms)} ago")


def uploads(entries: Sequence[SegmentEntry], policy: TierPolicy) -> Iterator[TierJob]:
    """Compressed segments that Tier 2 has not; where there is one."""
    for entry in entries if policy.objects else ():
        has = entry.residency
        if has & Residency.TIER1 and not has & Residency.TIER2:
            yield TierJob(JobKind.UPLOAD, entry, f"not in {policy.objects} yet")


def evictions(
    entries: Sequence[SegmentEntry], policy: TierPolicy, times: PlanInputs
) -> Iterator[TierJob]:
    """Local copies that age or the budget take away, least recently read first.

    Tier 0 copies go before compressed ones, which cost less and are read in place.
    """
    sealed = sealed_ms(entries)
    ordered = sorted(entries, key=lambda e: (times.read_ns.get(e.segment_id, 0), e.segment_id))
    total = sum(local_bytes(entry) for entry in entries)
    for entry, tier in _evictable(ordered, times.safe_offset):
        age_ms = times.now_ms - sealed[entry.segment_id]
        size = copy_bytes(entry, tier)
        if age_ms > policy.local_age_s * _MS:
            why = f"{_age(age_ms)} old"
        elif total > policy.local_bytes:
            why = f"{total} local bytes, {policy.local_bytes} allowed"
        else:
            continue
        total -= size
        kind = JobKind.EVICT_TIER0 if tier is Residency.TIER0 else JobKind.EVICT_TIER1
        yield TierJob(kind, entry, why)


def prunes(
    entries: Sequence[SegmentEntry], policy: TierPolicy, times: PlanInputs
) -> Iterator[TierJob]:
    """Segments that retention lets go, oldest first; it stops at the first that has to stay."""
    sealed = sealed_ms(entries)
    total = sum(entry.file_bytes for entry in entries if entry.sealed)
    for entry in entries:
        age_ms = times.now_ms - sealed[entry.segment_id]
        if not entry.sealed or entry.end_offset > times.safe_offset:
            return
        if policy.keep_age_s is not None and age_ms > policy.keep_age_s * _MS:
            why = f"{_age(age_ms)} old, {_age(int(policy.keep_age_s * _MS))} are kept"
        elif policy.keep_bytes is not None and total > policy.keep_bytes:
            why = f"{total} bytes of stream, {policy.keep_bytes} are kept"
        else:
            return
        total -= entry.file_bytes
        yield TierJob(JobKind.PRUNE, entry, why)


def eviction_blocker(entry: SegmentEntry, tier: Residency, safe_offset: int) -> str:
    """Why a local copy has to stay; empty when it may go once its other copy is proved."""
    if not entry.sealed:
        return "it is not sealed"
    if not entry.residency & tier:
        return "it is not there"
    if tier is Residency.TIER1:
        if entry.residency & Residency.TIER0:
            return "the copy in Tier 0 goes first"
        return "" if entry.residency & Residency.TIER2 else "Tier 2 has it not"
    if entry.end_offset > safe_offset:
        return "two checkpoints have to cover it first"
    others = entry.residency & (Residency.TIER1 | Residency.TIER2)
    return "" if others else "neither Tier 1 nor Tier 2 has it"


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


def _age(age_ms: int) -> str:
    seconds = max(age_ms, 0) // _MS
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
