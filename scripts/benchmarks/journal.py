"""``journal``: AOF2 on records of 1 KiB, each case beside a floor of the same run.

commit 1     append and commit one record; floor: the same bytes by pwrite and fdatasync into a
             file that is zeros already. p50 of each, measured in turns
commit 256   batches of 256; floor: one pwrite and one fdatasync a batch. Records a second;
             zeros are written ahead before, timed apart (``prepared``)
recover      opening on an unsealed segment; floor: reading the file and one crc32 over it
open         opening on 1,000 sealed segments and a snapshot, in ms
warm         one record of a full segment, anywhere in it, read in place from Tier 1, in ms
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from isal.isal_zlib import crc32

from relay.base.clock import Clock
from relay.journal.format import RECORD
from relay.journal.journal import Append, Journal
from relay.journal.segment import FIRST_RECORD, SegmentPolicy, segment_path
from relay.journal.tier_plan import JobKind, TierJob, TierPolicy
from relay.journal.tiers import Tiers
from relay.journal.warm import WarmSegment
from scripts.benchmarks.common import BODY_BYTES, fresh_root, note, percentile, report, timed

BATCH = 256
SINGLE_COMMITS = 1_000
BATCH_COMMITS = 120
ZEROS = 1 << 20
SCAN_RUNS = 5
RANDOM_READS = 500
PAYLOAD = bytes(range(256)) * (BODY_BYTES // 256)
RECORD_BYTES = RECORD.size + BODY_BYTES


def run(base: str | None, *, segments: int) -> None:
    """Run every case and print its line."""
    root = fresh_root(base)
    note(f"journal: records of {BODY_BYTES} bytes in {root}")
    _commit(root, 1, SINGLE_COMMITS)
    _commit(root, BATCH, BATCH_COMMITS)
    _recover(root)
    _open(root, segments)
    _warm(root)


def _journal(root: Path, name: str, policy: SegmentPolicy | None = None) -> Journal:
    folder = root / name
    folder.mkdir(exist_ok=True)
    return Journal.open(str(folder / f"{1:020d}"), 1, Clock(), policy or SegmentPolicy(), note)


def _commit(root: Path, batch: int, commits: int) -> None:
    total = commits * batch * RECORD_BYTES
    # All the zeros at once, as the slices of idle moments would have left them; kept separate.
    began = time.perf_counter()
    journal = _journal(root, f"commit-{batch}", SegmentPolicy(slice_bytes=total))
    prepared = time.perf_counter() - began
    appends = [Append(PAYLOAD)] * batch
    plain = _Plain(root / f"floor-{batch}", total, batch * RECORD_BYTES)
    ours: list[float] = []
    floor: list[float] = []

    def commit() -> None:
        journal.append(appends)
        journal.commit()

    for _ in range(commits):  # in turns: both have the same noise
        ours.append(timed(commit))
        floor.append(timed(plain.commit))
    plain.close()
    journal.close()
    at_p50, floor_p50 = percentile(ours, 0.5), percentile(floor, 0.5)
    report(
        case=f"journal commit {batch}",
        commits=len(ours),
        p50_us=round(at_p50 * 1e6, 1),
        floor_p50_us=round(floor_p50 * 1e6, 1),
        p50_to_floor=round(at_p50 / floor_p50, 3),
        records_per_s=round(batch * len(ours) / sum(ours)),
        rate_to_floor=round(sum(floor) / sum(ours), 3),
        prepared_rate_to_floor=round(sum(floor) / (sum(ours) + prepared), 3),
    )


class _Plain:
    """Floor: the same bytes, one pwrite and one fdatasync, into a file of zeros."""

    def __init__(self, path: Path, total: int, size: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        for _ in range(0, total, ZEROS):
            os.write(self._fd, bytes(ZEROS))
        os.fsync(self._fd)
        self._data = PAYLOAD[:1] * size
        self._at = 0

    def commit(self) -> None:
        os.pwrite(self._fd, self._data, self._at)
        os.fdatasync(self._fd)
        self._at += len(self._data)

    def close(self) -> None:
        os.close(self._fd)


def _recover(root: Path) -> None:
    journal = _journal(root, "recover")
    count = (SegmentPolicy().segment_bytes - 4096) // RECORD_BYTES
    for _ in range(0, count - BATCH, BATCH):
        journal.append([Append(PAYLOAD)] * BATCH)
        journal.commit()
    end = journal.durable
    journal.close()
    path = segment_path(str(root / "recover" / f"{1:020d}"), 0)

    def floor() -> None:
        with open(path, "rb") as file:
            crc32(file.read())

    def ours() -> None:
        opened = _journal(root, "recover")
        assert opened.end == end
        opened.close()

    _ratio("journal recover", ours, floor, bytes=os.path.getsize(path))


def _ratio(case: str, ours: Callable[[], None], floor: Callable[[], None], **facts: int) -> None:
    ours_s, floor_s = [], []
    for _ in range(SCAN_RUNS):
        floor_s.append(timed(floor))
        ours_s.append(timed(ours))
    report(
        case=case,
        **facts,
        seconds=round(min(ours_s), 4),
        floor_seconds=round(min(floor_s), 4),
        rate_to_floor=round(min(floor_s) / min(ours_s), 3),
    )


def _open(root: Path, segments: int) -> None:
    journal = _journal(root, "open", SegmentPolicy(slice_bytes=4096))
    for _ in range(segments):
        journal.append([Append(PAYLOAD)])
        journal.seal()
    journal.manifest.snapshot()
    journal.close()
    times = []
    for _ in range(SCAN_RUNS):
        began = time.perf_counter()
        opened = _journal(root, "open")
        times.append(time.perf_counter() - began)
        opened.close()
    report(
        case="journal open",
        sealed_segments=segments,
        ms=round(min(times) * 1e3, 2),
        slowest_ms=round(max(times) * 1e3, 2),
    )


def _warm(root: Path) -> None:
    journal = _journal(root, "warm")
    count = (SegmentPolicy().segment_bytes - 4096) // RECORD_BYTES
    for _ in range(0, count - BATCH, BATCH):
        texts = (os.urandom(BODY_BYTES // 2).hex().encode() for _ in range(BATCH))
        journal.append([Append(text) for text in texts])
        journal.commit()
    journal.seal()
    tiers = Tiers(journal.manifest, 1, TierPolicy(compress_after_s=0), Clock(), note)
    tiers.run_job(TierJob(JobKind.COMPRESS, tiers.entries()[0], "bench"))
    (path,) = (root / "warm").rglob("*.seg.zst")
    places = random.Random(1).sample(range(count - 2 * BATCH), RANDOM_READS)
    times: list[float] = []
    with WarmSegment(str(path)) as opened:
        for place in places:
            began = time.perf_counter()
            opened.read_at(FIRST_RECORD + place * RECORD_BYTES, RECORD_BYTES)
            times.append(time.perf_counter() - began)
    journal.close()
    report(
        case="journal warm",
        bytes=os.path.getsize(path),
        reads=RANDOM_READS,
        p50_ms=round(percentile(times, 0.5) * 1e3, 3),
        p99_ms=round(percentile(times, 0.99) * 1e3, 3),
    )
