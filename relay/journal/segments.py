"""The succession of a stream's segments: one is sealed, the next is made, the manifest is told.

Files first, so that a crash leaves a file ahead of the manifest and never the other way: what
opening does about it is in recover.py.
"""

from __future__ import annotations

from typing import NamedTuple

from relay.base.clock import NS_PER_MS, Clock
from relay.journal.format import Field, Footer, ManifestRecord, ManifestType, SegmentHeader
from relay.journal.manifest import Manifest
from relay.journal.segment import FIRST_RECORD, ActiveSegment


class SegmentPolicy(NamedTuple):
    """When segments roll, and how far they are written ahead."""

    segment_bytes: int = 64 << 20  # header and footer included; one longer record has its own
    segment_age_s: float = 86_400  # since its first record: a quiet day reaches the tiers, too
    slice_bytes: int = 1 << 20  # zeros at a time: some ms of writing, beside the acks
    ahead_bytes: int = 64 << 20  # zeros ahead at most, whatever room is asked for


class Stream(NamedTuple):
    """What everything about one stream needs to know."""

    folder: str
    stream_id: int
    clock: Clock
    policy: SegmentPolicy
    manifest: Manifest
    epoch: int  # count of the daemon's starts


def start_segment(stream: Stream, base: int) -> ActiveSegment:
    """The next segment, empty, durable, and known to the manifest. Errors: OSError, RelayError."""
    number = stream.manifest.catalog.next_segment_id
    header = SegmentHeader(stream.stream_id, number, stream.clock.now_ns() // NS_PER_MS)
    ahead = min(FIRST_RECORD + stream.policy.slice_bytes, stream.policy.segment_bytes)
    active = ActiveSegment.create(stream.folder, header, base, ahead)
    try:
        stream.manifest.append(opened_record(header, base, stream.epoch))
    except BaseException:
        active.close()
        raise
    return active


def seal_segment(stream: Stream, active: ActiveSegment, covered: int) -> None:
    """Seal a segment and tell the manifest. Errors: OSError, RelayError."""
    end = active.end
    footer = active.seal()
    at_ms = stream.clock.now_ns() // NS_PER_MS
    number = active.header.segment_id
    stream.manifest.append(seal_record(number, end, at_ms, footer, covered, active.flush_failure))


def opened_record(header: SegmentHeader, base: int, epoch: int) -> ManifestRecord:
    """What the manifest is told of a new segment."""
    fields: dict[str, Field] = {"base_offset": base, "epoch": epoch}
    kind = ManifestType.SegmentOpened
    return ManifestRecord(kind, header.segment_id, base, header.creation_ts_ms, fields)


def seal_record(
    segment_id: int, end: int, at_ms: int, footer: Footer, covered: int, failed: bool
) -> ManifestRecord:
    """What the manifest is told of a seal. ``end``: the logical offset behind the segment;
    ``failed``: a sync failed while it was active."""
    fields: dict[str, Field] = {
        "durable_bytes": footer.durable_bytes,
        "segment_crc64": footer.segment_crc64,
        "ext_id": footer.ext_id,
        "coordinator_watermark": covered,
        "flush_failure": int(failed),
    }
    return ManifestRecord(ManifestType.SealSegment, segment_id, end, at_ms, fields)
