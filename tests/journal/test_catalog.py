"""The catalog: what each record makes of a segment's entry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.journal.catalog import Catalog, Failure, Residency, SegmentEntry
from relay.journal.manifest_format import ManifestRecord, ManifestType, Reason
from tests.journal.manifest_support import any_record, opened, said, sealed

BOTH = [opened(0), sealed(0)]
COMPRESSED = said(ManifestType.CompressionDone, 0, compressed_bytes=60, dictionary_id=5)
UPLOADED = said(ManifestType.UploadDone, 0, key="k", etag="e")
EVICTED_0 = said(ManifestType.LocalEvicted, 0, reclaimed_bytes=152 + 40)
EVICTED_1 = said(ManifestType.LocalEvicted, 0, reclaimed_bytes=60)
HYDRATED = said(ManifestType.HydrationDone, 0, resident_bytes=192)
DELETED = said(ManifestType.Tier2Deleted, 0, key="k")


def after(*records: ManifestRecord) -> Catalog:
    catalog = Catalog()
    for record in records:
        catalog.apply(record)
    return catalog


def tiers(*records: ManifestRecord) -> Residency | None:
    """Of segment 0 once it was opened and sealed and the records came; None: it has left."""
    entry = after(*BOTH, *records).entries.get(0)
    return None if entry is None else entry.residency


def test_a_segment_opens_and_seals() -> None:
    active = after(opened(3, 500, at_ms=77))
    entry = SegmentEntry(3, 500, creation_ts_ms=77)
    assert active.entries == {3: entry}
    assert (entry.end_offset, entry.residency, entry.sealed) == (500, Residency.TIER0, False)
    done = after(opened(3, 500, at_ms=77), sealed(3, 500))
    assert done.entries[3] == SegmentEntry(3, 500, 152, 7, 9, 77, sealed=True)
    assert (done.entries[3].end_offset, done.entries[3].file_bytes) == (600, 192)
    assert done.next_segment_id == 4


def test_a_seal_without_its_opening_says_where_the_segment_begins() -> None:
    assert after(sealed(3, 500)).entries[3].base_offset == 500


def test_an_opening_said_again_keeps_the_seal() -> None:
    assert after(*BOTH, UPLOADED, opened(0)).entries == after(*BOTH, UPLOADED).entries
    assert after(opened(0), opened(0, 40)).entries[0].base_offset == 40


T0, T1, T2 = Residency.TIER0, Residency.TIER1, Residency.TIER2


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], T0),
        ([COMPRESSED], T0 | T1),
        ([COMPRESSED, UPLOADED], T0 | T1 | T2),
        ([COMPRESSED, EVICTED_0], T1),
        ([COMPRESSED, EVICTED_0, EVICTED_0], T1),  # said twice after a crash
        ([COMPRESSED, UPLOADED, EVICTED_1], T0 | T2),
        ([COMPRESSED, UPLOADED, EVICTED_0, EVICTED_1], T2),
        ([COMPRESSED, UPLOADED, EVICTED_0, EVICTED_1, HYDRATED], T0 | T2),
        ([COMPRESSED, UPLOADED, DELETED], T0 | T1),
        ([UPLOADED, EVICTED_0, DELETED], None),
        ([EVICTED_0], None),
        ([EVICTED_0, HYDRATED], None),  # nobody has it any more
    ],
)
def test_tiers_after_records(records: list[ManifestRecord], expected: Residency | None) -> None:
    assert tiers(*records) == expected


def test_two_copies_of_one_size_go_from_tier_0_first() -> None:
    same = said(ManifestType.CompressionDone, 0, compressed_bytes=192, dictionary_id=0)
    assert tiers(same, UPLOADED, EVICTED_0) == T1 | T2
    assert tiers(same, UPLOADED, EVICTED_0, EVICTED_0) == T2


def test_the_facts_of_the_tiers_are_kept_and_dropped() -> None:
    entry = after(*BOTH, COMPRESSED, UPLOADED).entries[0]
    assert (entry.compressed_bytes, entry.dictionary_id, entry.key, entry.etag) == (60, 5, "k", "e")
    gone = after(*BOTH, COMPRESSED, UPLOADED, DELETED).entries[0]
    assert (gone.compressed_bytes, gone.dictionary_id, gone.key, gone.etag) == (60, 5, "", "")


@pytest.mark.parametrize("name", ["Compression", "Upload", "Hydration"])
def test_what_failed_last_and_when_until_it_works(name: str) -> None:
    kind = ManifestType[f"{name}Failed"]
    fields = {"key": "k"} if name == "Upload" else {}
    first = said(kind, 0, at_ms=5, **fields, reason_code=3)
    second = said(kind, 0, at_ms=8, **fields, reason_code=0)
    other = said(kind, 1, at_ms=9, **fields, reason_code=2)
    failing = after(*BOTH, first, second, other)
    assert failing.failures == {
        (0, kind): Failure(Reason.TRANSIENT, 8, 2),
        (1, kind): Failure(Reason.AUTHENTICATION, 9, 1),
    }
    failing.apply({"Compression": COMPRESSED, "Upload": UPLOADED, "Hydration": HYDRATED}[name])
    assert failing.failures.keys() == {(1, kind)}


def test_a_delete_is_queued_until_it_is_done() -> None:
    queued = after(*BOTH, UPLOADED, said(ManifestType.Tier2DeleteQueued, 0, key="k"))
    assert queued.deleting == {0: "k"} and queued.entries[0].residency == T0 | T2
    queued.apply(DELETED)
    assert queued.deleting == {}


def test_ids_continue_when_entries_have_left() -> None:
    catalog = after(*BOTH, EVICTED_0, said(ManifestType.CompressionStarted, 0, job_id=6))
    assert catalog.entries == {}
    assert (catalog.next_segment_id, catalog.next_job_id) == (1, 7)
    assert (Catalog().next_segment_id, Catalog().next_job_id) == (0, 1)


@given(st.lists(any_record(st.integers(0, 3)), max_size=30))
def test_any_records_in_any_order_are_taken(records: list[ManifestRecord]) -> None:
    catalog = after(*records)
    assert list(catalog.entries) == sorted(catalog.entries)
    assert all(entry.residency for entry in catalog.entries.values())
    assert catalog.unknown == sum(not record.is_known for record in records)
    assert after(*records).entries == catalog.entries
