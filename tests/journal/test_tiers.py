"""The tiers: what is due is done, what is read is the same wherever it lies."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relay.base.errors import JournalError, SegmentAway
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.manifest_format import ManifestType
from relay.journal.tier_plan import JobKind, TierJob, TierPolicy, local_bytes
from relay.journal.tiers import WORKER_NICE, TierWorker, lower_priority
from relay.journal.warm import dictionary_name
from tests.journal.payloads import with_dictionary
from tests.journal.tiers_support import AT_ONCE, FaultyObjects, MakeStream
from tests.s3_server import BUCKET, objects, s3_server

T0, T1, T2 = Residency.TIER0, Residency.TIER1, Residency.TIER2


def test_old_segments_are_compressed(make_stream: MakeStream) -> None:
    stream = make_stream(TierPolicy(compress_after_s=600))
    stream.fill(3)
    assert stream.run() == []
    stream.clock.advance(601)
    assert [line.split(":")[0] for line in stream.run()] == [
        "compress segment 0",
        "compress segment 1",
        "compress segment 2",
    ]
    assert stream.residency(0, 1, 2, 3) == [T0 | T1, T0 | T1, T0 | T1, T0]
    assert stream.noted(1) == ["CompressionStarted", "CompressionDone"]
    entry = stream.entry(1)
    assert (stream.dir / "warm" / f"{1:020d}.seg.zst").stat().st_size == entry.compressed_bytes
    assert stream.run() == []
    stream.reopen()
    assert stream.residency(0, 1, 2, 3) == [T0 | T1, T0 | T1, T0 | T1, T0]
    assert stream.read() == stream.expected()


def test_a_local_copy_leaves_by_budget_and_reading_continues(make_stream: MakeStream) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=60_000))
    stream.fill(4)
    stream.run()
    assert all(t & T0 for t in stream.residency(0, 1, 2, 3))  # no checkpoint covers them
    stream.tiers.set_safe_offset(stream.entry(1).end_offset)
    stream.run()
    assert stream.residency(0, 1, 2, 3) == [T1, T1, T0 | T1, T0 | T1]
    stream.cover()
    stream.run()
    assert sum(map(local_bytes, stream.tiers.entries())) <= 60_000
    assert stream.files("segments") == [
        f"{n:020d}.seg" for n in range(4) if stream.entry(n).residency & T0
    ]
    assert stream.noted(0)[-1] == "LocalEvicted"
    assert stream.read() == stream.expected()
    stream.reopen()
    assert stream.read() == stream.expected()
    assert stream.warnings == []


@pytest.mark.shows("journal 4.7")
def test_what_was_read_last_stays_longest(make_stream: MakeStream) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=0), None)
    stream.fill(3)
    entry = stream.entry(0)
    stream.run()
    stream.clock.advance(5)
    stream.tiers.fetch(entry).close()
    stream.cover()
    assert [line.split(":")[0] for line in stream.run()] == [
        "evict segment 1",
        "evict segment 2",
        "evict segment 0",
    ]


@pytest.mark.shows("journal 4.8")
def test_all_goes_up_and_leaves_the_disk(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=0), tier2)
    stream.settle(3)
    assert stream.residency(0, 1, 2) == [T2, T2, T2]
    assert stream.files("segments") == [] == stream.files("warm")
    assert stream.noted(2) == [
        "CompressionStarted",
        "CompressionDone",
        "LocalEvicted",
        "UploadStarted",
        "UploadDone",
        "LocalEvicted",
    ]
    entry = stream.entry(2)
    assert entry.key == f"{1:020d}/{2:020d}.seg.zst"
    facts = tier2.head(entry.key)
    assert facts is not None and facts.etag == entry.etag
    assert facts.metadata["records"] == "100"
    assert facts.metadata["segment-crc64"] == f"{entry.segment_crc64:016x}"
    stream.reopen()
    assert stream.read() == stream.expected()  # hydrated on the way
    assert all(t == T0 | T2 for t in stream.residency(0, 1, 2))
    assert stream.noted(2)[-2:] == ["HydrationStarted", "HydrationDone"]
    assert stream.warnings == []


def test_a_dictionary_of_an_earlier_version_goes_up_and_comes_back(
    make_stream: MakeStream, tier2: FaultyObjects
) -> None:
    stream = make_stream(AT_ONCE)
    stream.fill(1, records=3000)
    stream.run()
    path = stream.dir / "warm" / f"{0:020d}.seg.zst"
    number = with_dictionary(path)
    stream.journal.manifest.record(
        ManifestType.CompressionDone,
        0,
        0,
        compressed_bytes=path.stat().st_size,
        dictionary_id=number,
    )
    stream.policy, stream.objects = AT_ONCE._replace(local_bytes=0), tier2
    stream.reopen()
    stream.cover()
    stream.run()
    assert stream.residency(0) == [T2]
    (path.parent / dictionary_name(number)).unlink()  # as on another disk
    assert stream.read() == stream.expected()
    assert stream.warnings == []


def test_what_is_there_is_not_sent_again(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    stream = make_stream(AT_ONCE, tier2)
    stream.fill(1)

    def kill(call: str, key: str) -> None:
        if len(tier2.calls) > 2:  # head, put, and the answer never came
            raise KeyboardInterrupt

    tier2.fault = kill
    with pytest.raises(KeyboardInterrupt):
        stream.run()
    assert stream.residency(0) == [T0 | T1]
    tier2.fault = lambda call, key: None
    stream.reopen()
    tier2.calls.clear()
    stream.run()
    assert [call for call, _ in tier2.calls] == ["head"]
    assert stream.residency(0) == [T0 | T1 | T2]


@pytest.mark.shows("journal 4.7")
def test_nothing_above_the_second_checkpoint_goes(make_stream: MakeStream) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=0, keep_bytes=0))
    stream.fill(2)
    stream.run()
    stream.tiers.set_safe_offset(stream.entry(0).end_offset)
    for kind in (JobKind.EVICT_TIER0, JobKind.PRUNE):
        with pytest.raises(JournalError, match="two checkpoints have to cover it"):
            stream.tiers.run_job(TierJob(kind, stream.entry(1), "asked"))
    stream.run()
    assert list(stream.journal.manifest.catalog.entries) == [1, 2]
    assert stream.read() == stream.expected()


@pytest.mark.shows("journal 4.10")
def test_retention_takes_the_oldest(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    stream = make_stream(AT_ONCE, tier2)
    stream.settle(5)
    stream.tiers.policy = stream.tiers.policy._replace(keep_bytes=3 * stream.entry(0).file_bytes)
    planned = stream.prunes()
    assert [job.entry.segment_id for job in planned] == [0, 1]
    assert "bytes of stream" in str(planned[0])
    assert stream.residency(0) == [T0 | T1 | T2]  # planning does nothing
    assert stream.run() == [str(job) for job in planned]
    names = {path.name for path in Path(tier2.url).rglob("*.zst")}
    assert names == {f"{n:020d}.seg.zst" for n in (2, 3, 4)} == set(stream.files("warm"))
    assert stream.files("segments") == [f"{n:020d}.seg" for n in (2, 3, 4)]
    assert stream.noted(0)[-4:] == [
        "Tier2DeleteQueued",
        "Tier2Deleted",
        "LocalEvicted",
        "LocalEvicted",
    ]
    assert stream.read() == stream.expected()
    stream.reopen()
    assert list(stream.journal.manifest.catalog.entries) == [2, 3, 4, 5]
    assert stream.read() == stream.expected()


def test_retention_by_age(make_stream: MakeStream) -> None:
    stream = make_stream(AT_ONCE._replace(keep_age_s=100))
    stream.fill(2)
    stream.clock.advance(90)
    stream.fill(1)
    stream.cover()
    assert stream.prunes() == []
    stream.clock.advance(15)
    assert [job.entry.segment_id for job in stream.prunes()] == [0, 1]


def test_a_queued_deletion_is_finished(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=0), tier2)
    stream.settle(2)
    stream.tiers.policy = stream.tiers.policy._replace(keep_bytes=stream.entry(1).file_bytes)

    def kill(call: str, key: str) -> None:
        if call == "delete":
            raise KeyboardInterrupt

    tier2.fault = kill
    with pytest.raises(KeyboardInterrupt):
        stream.run()
    tier2.fault = lambda call, key: None
    stream.reopen()  # with a policy that keeps everything
    assert list(stream.journal.manifest.catalog.deleting) == [0]
    with pytest.raises(SegmentAway, match="segment 0 is being deleted from Tier 2"):
        list(stream.journal.read(0, stream.tiers.fetch))
    assert stream.tiers.run_next() == f"delete {1:020d}/{0:020d}.seg.zst"
    assert not stream.journal.manifest.catalog.deleting
    assert list(stream.journal.manifest.catalog.entries) == [1, 2]
    assert stream.read() == stream.expected()


@pytest.mark.shows("journal 4.5")
def test_on_a_real_s3_server(make_stream: MakeStream, tmp_path: Path) -> None:
    with s3_server() as url:
        stream = make_stream(AT_ONCE._replace(local_bytes=0), objects(url, tmp_path.name))
        stream.settle(3)
        assert stream.residency(0, 1, 2) == [T2, T2, T2]
        assert stream.tiers.policy.objects == f"s3://{BUCKET}/{tmp_path.name}"
        assert stream.read() == stream.expected()
        stream.tiers.policy = stream.tiers.policy._replace(keep_bytes=0)
        stream.run()
        assert stream.residency(3) == [T0]
        assert stream.warnings == []


def test_no_checkpoint_is_missed(make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream()
    stream.fill(1)
    stream.run()
    assert stream.tiers.due_ns() == stream.clock.monotonic_ns() + 60 * 10**9
    entries = stream.journal.manifest.entries

    def meanwhile() -> list[SegmentEntry]:
        found = entries()
        stream.cover()  # the loop's thread, just after the plan was made
        return found

    with monkeypatch.context() as patch:
        patch.setattr(stream.journal.manifest, "entries", meanwhile)
        assert stream.tiers.run_next() is None
    assert stream.tiers.due_ns() <= stream.clock.monotonic_ns()


def test_steps_run_beside_the_loop(make_stream: MakeStream) -> None:
    stream = make_stream()
    stream.fill(2)
    threads: set[str] = set()
    step = stream.tiers.run_next

    def watching() -> str | None:
        threads.add(threading.current_thread().name)
        if sys.platform == "linux":
            nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            assert nice == max(WORKER_NICE, os.getpriority(os.PRIO_PROCESS, os.getpid()))
        return step()

    stream.tiers.run_next = watching  # type: ignore[method-assign]
    with ThreadPoolExecutor(1, "tiers", initializer=lower_priority) as executor:
        worker = TierWorker(stream.tiers, executor, stream.clock)
        lines = [worker.poll()]
        while worker._running is not None:
            worker._running.exception()  # waits for it
            lines.append(worker.poll())
        assert len([line for line in lines if line]) == 2
        assert worker.due_ns() == stream.clock.monotonic_ns() + 60 * 10**9
    assert threads == {"tiers_0"}
    assert stream.residency(0, 1) == [T0 | T1] * 2
