"""What somebody asks of the tiers by name: compress this, hydrate that. Done now, whatever waits.

The same functions serve the command line, when no relay runs, and a relay that is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from relay.base.errors import FormatError, JournalError, RelayError
from relay.journal import chunk as chunks
from relay.journal import plan
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.format import CHECKPOINT_WRITTEN, ManifestType
from relay.journal.plan import JobKind, JobResult, TierJob
from relay.journal.tiers import Tiers

ASKED = "asked for"


class _Command(NamedTuple):
    done: str
    is_due: Callable[[SegmentEntry, Tiers], bool]  # for segments that nobody names
    run: Callable[[Tiers, SegmentEntry], object]


def run(tiers: Tiers, verb: str, segment_ids: Sequence[int] = ()) -> Iterator[JobResult]:
    """Carry out ``compress``, ``upload``, ``evict``, ``evict-warm`` or ``hydrate``.

    For the segments named, or all that it would change, oldest first. What fails for one is its
    ``error``, and the next is tried. Errors: JournalError for an id that the stream has not.
    """
    made = _COMMANDS[verb]
    entries = {entry.segment_id: entry for entry in tiers.entries()}
    check_segments(entries, segment_ids)
    for number in segment_ids or [n for n, e in entries.items() if made.is_due(e, tiers)]:
        try:
            made.run(tiers, entries[number])
        except (RelayError, OSError) as exc:
            yield JobResult(number, "", exc)
        else:
            yield JobResult(number, made.done)


def check_segments(entries: Mapping[int, SegmentEntry], segment_ids: Iterable[int]) -> None:
    """Errors: JournalError for a segment that cannot be moved: not there, or not sealed."""
    for number in segment_ids:
        if number not in entries:
            raise JournalError(f"segment {number}: the stream has none", hint=_WHICH)
        if not entries[number].sealed:
            raise JournalError(f"segment {number}: not sealed yet", hint="`relay journal seal`")


def prune(tiers: Tiers, jobs: Sequence[TierJob]) -> Iterator[JobResult]:
    """Carry out what ``Tiers.prunes`` planned; it ends at the first that fails, for what is left
    has to be the end of the stream."""
    for job in jobs:
        try:
            tiers.run_job(job)
        except (RelayError, OSError) as exc:
            yield JobResult(job.entry.segment_id, "", exc)
            return
        yield JobResult(job.entry.segment_id, "pruned")


def checkpoint_offsets(stream_dir: str) -> list[int]:
    """The offsets that the two newest checkpoints cover, as the manifest has them, newest first.

    They cover the stream below the second of them. Reads chunks from the newest back; damaged
    ones are stepped over, which makes the answer smaller, never larger.
    """
    found: list[int] = []
    for index in reversed(chunks.chunk_indexes(stream_dir)):
        path = chunks.chunk_path(stream_dir, index)
        try:
            records = chunks.decode_chunk(chunks.load_chunk(path), path, index).records
        except (FormatError, FileNotFoundError):
            continue
        for record in reversed(records):
            if record.type == ManifestType.CustomEvent and len(found) < 2:
                found += _covered(record.fields)
        if len(found) >= 2:
            break
    return found


def _covered(fields: dict[str, int | str | bytes]) -> list[int]:
    if fields["schema_id"] != CHECKPOINT_WRITTEN:
        return []
    try:
        return [int(msgspec.msgpack.decode(fields["blob"], type=dict[str, int])["offset"])]  # type: ignore[arg-type]
    except (msgspec.DecodeError, KeyError):
        return []


def _do(kind: JobKind) -> Callable[[Tiers, SegmentEntry], object]:
    return lambda tiers, entry: tiers.run_job(TierJob(kind, entry, ASKED))


def _may_leave(tier: Residency) -> Callable[[SegmentEntry, Tiers], bool]:
    return lambda entry, tiers: not plan.eviction_blocker(entry, tier, tiers.safe_offset)


_WHICH = "`relay journal status` shows which there are"
_COMMANDS = {
    "compress": _Command(
        "compressed",
        lambda entry, tiers: entry.sealed and entry.residency == Residency.TIER0,
        _do(JobKind.COMPRESS),
    ),
    "upload": _Command(
        "uploaded",
        lambda entry, tiers: entry.sealed and not entry.residency & Residency.TIER2,
        _do(JobKind.UPLOAD),
    ),
    "evict": _Command("evicted", _may_leave(Residency.TIER0), _do(JobKind.EVICT_TIER0)),
    "evict-warm": _Command("evicted", _may_leave(Residency.TIER1), _do(JobKind.EVICT_TIER1)),
    "hydrate": _Command(
        "hydrated",
        lambda entry, tiers: entry.sealed and not entry.residency & Residency.TIER0,
        lambda tiers, entry: tiers.hydrate(entry.segment_id),
    ),
}
