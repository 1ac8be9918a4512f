"""The tiers when something fails: it waits as its reason says, and no copy is given up for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.base.errors import FormatError, JournalError, ObjectError
from relay.journal.catalog import Residency
from relay.journal.manifest_format import ManifestType, Reason
from relay.journal.tier_plan import JobKind, TierJob
from tests.disk import failing
from tests.journal.tiers_support import AT_ONCE, FaultyObjects, MakeStream
from tests.kills import killed_in

pytestmark = pytest.mark.shows("journal 4.5")

T0, T1, T2 = Residency.TIER0, Residency.TIER1, Residency.TIER2


@pytest.mark.shows("journal 4.4")
def test_other_content_under_the_key_is_never_overwritten(
    make_stream: MakeStream, tier2: FaultyObjects, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"another stream's")
    key = f"{1:020d}/{0:020d}.seg.zst"
    tier2.inner.put(key, str(tmp_path / "other"), {"crc64": "1"})
    stream = make_stream(AT_ONCE._replace(local_bytes=0), tier2)
    stream.fill(2)
    stream.cover()
    lines = stream.run()
    (told,) = stream.tiers.waiting()
    assert told.startswith("waits for the operator: upload segment 0") and told in lines
    assert "another stream may write there" in told
    assert b"".join(tier2.get(key)[1]) == b"another stream's"
    assert stream.residency(0, 1) == [T1, T2]  # the one is kept, the other goes its way
    assert stream.noted(0)[-2:] == ["UploadStarted", "UploadFailed"]
    assert stream.read() == stream.expected()


@pytest.mark.shows("journal 4.6")
@pytest.mark.parametrize(
    ("reason", "waits_s"),
    [
        (Reason.TRANSIENT, [1, 2, 4, 8, 16, 32, 60, 60]),
        (Reason.UNAVAILABLE, [5, 10, 20, 40, 80, 160, 320, 600, 600]),
    ],
)
def test_a_store_that_fails_is_tried_again_later_and_later(
    reason: Reason, waits_s: list[int], make_stream: MakeStream, tier2: FaultyObjects
) -> None:
    def fail(call: str, key: str) -> None:
        raise ObjectError("no", reason)

    tier2.fault = fail
    stream = make_stream(AT_ONCE, tier2)
    stream.fill(2)
    stream.run()  # compresses both; one upload tells that the store is away, the other waits
    for wait_s in waits_s:
        assert len(tier2.calls) == 1
        (told,) = stream.tiers.waiting()
        assert told.startswith(f"retry in {wait_s} s: upload segment 0: ")
        due_ns = stream.tiers.due_ns()
        assert due_ns <= stream.clock.monotonic_ns() + wait_s * 10**9
        stream.clock.advance(wait_s - 0.01)
        assert stream.run() == []
        tier2.calls.clear()
        stream.clock.advance(0.02)
        stream.run()
    failed = stream.journal.manifest.catalog.failures[0, ManifestType.UploadFailed]
    assert (failed.reason, failed.times) == (reason, len(waits_s) + 1)
    tier2.fault = lambda call, key: None
    stream.clock.advance(600)
    stream.run()
    assert stream.residency(0, 1) == [T0 | T1 | T2] * 2
    assert stream.tiers.waiting() == ()
    tier2.fault = fail
    stream.fill(1)
    stream.run()
    assert stream.tiers.waiting()[0].startswith(f"retry in {waits_s[0]} s")  # anew


@pytest.mark.shows("journal 4.6")
def test_wrong_credentials_wait(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    def fail(call: str, key: str) -> None:
        raise ObjectError("403", Reason.AUTHENTICATION, hint="mend the credentials")

    tier2.fault = fail
    stream = make_stream(AT_ONCE, tier2)
    stream.fill(2)
    stream.run()
    assert len(tier2.calls) == 1
    stream.clock.advance(7 * 86_400)
    assert stream.run() == []
    assert len(tier2.calls) == 1
    (told,) = stream.tiers.waiting()
    assert told.startswith("waits for the operator: ") and told.endswith("mend the credentials")
    tier2.fault = lambda call, key: None
    stream.reopen()
    stream.run()
    assert stream.residency(0, 1) == [T0 | T1 | T2] * 2


def test_a_damaged_segment_is_not_evicted(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=0), tier2)
    stream.fill(2)
    stream.cover()
    path = stream.dir / "segments" / f"{0:020d}.seg"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    stream.run()
    assert stream.residency(0, 1) == [T0, T2]
    assert path.read_bytes() == data
    (told,) = stream.tiers.waiting()
    assert told.startswith("waits for the operator: compress segment 0") and str(path) in told
    assert stream.journal.manifest.catalog.failures[0, ManifestType.CompressionFailed].reason == 1


def test_a_full_disk_waits(make_stream: MakeStream) -> None:
    stream = make_stream()
    stream.fill(2)
    with failing("write", "warm"):
        (line,) = stream.run()
    assert line.startswith("retry in 1 s: compress segment 0") and "No space left" in line
    assert stream.journal.manifest.catalog.failures[0, ManifestType.CompressionFailed].reason == 0
    stream.clock.advance(1)
    stream.run()
    assert stream.residency(0, 1) == [T0 | T1] * 2


def test_what_a_crash_left_and_cannot_be_recorded_stays_and_stops_nothing(
    make_stream: MakeStream,
) -> None:
    stream = make_stream()
    stream.fill(1)
    with killed_in(stream.tiers._copies, "_record_compressed"):  # its file is complete by then
        stream.run()
    stream.reopen()
    with failing("write", ".mlog"):
        assert all("No space left" in line for line in stream.run())
    assert "files that a crash left stay until the next start: " in stream.warnings[0]
    assert stream.files("warm") == [f"{0:020d}.seg.zst"]
    stream.reopen()
    stream.run()
    assert stream.residency(0) == [T0 | T1]


@pytest.mark.shows("journal 4.3")
def test_a_warm_copy_that_rotted_is_no_reason_to_evict(make_stream: MakeStream) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=0))
    stream.fill(1)
    stream.run()
    path = stream.dir / "warm" / f"{0:020d}.seg.zst"
    good = path.read_bytes()
    path.write_bytes(good[:-10])
    stream.cover()
    stream.run()
    assert stream.residency(0) == [T1]
    assert path.read_bytes() == good  # made anew from Tier 0 before that went
    assert len(stream.warnings) == 1 and "compressed again" in stream.warnings[0]
    assert stream.read() == stream.expected()


def test_a_lost_object_evicts_nothing(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    stream = make_stream(AT_ONCE, tier2)
    stream.settle(1)
    stream.tiers.run_job(TierJob(JobKind.EVICT_TIER0, stream.entry(0), "asked"))
    tier2.inner.delete(stream.entry(0).key)
    with pytest.raises(ObjectError, match="no such object"):
        stream.tiers.run_job(TierJob(JobKind.EVICT_TIER1, stream.entry(0), "asked"))
    assert stream.files("warm") == [f"{0:020d}.seg.zst"]
    assert stream.read() == stream.expected()


@pytest.mark.shows("journal 4.8")
@pytest.mark.parametrize("fault", ["missing", "truncated", "flipped", "other"])
def test_an_object_that_is_not_the_segment_is_an_error_with_a_hint(
    fault: str, make_stream: MakeStream, tier2: FaultyObjects, tmp_path: Path
) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=0), tier2)
    stream.settle(2)
    path = tmp_path / "tier2" / stream.entry(0).key
    data = path.read_bytes()
    other = (tmp_path / "tier2" / stream.entry(1).key).read_bytes()
    flipped = data[:50] + bytes([data[50] ^ 1]) + data[51:]
    for name, content in {"truncated": data[:-7], "flipped": flipped, "other": other}.items():
        if name == fault:
            path.write_bytes(content)
    if fault == "missing":
        path.unlink()
    with pytest.raises(ObjectError) as caught:
        stream.read()
    assert caught.value.reason == Reason.MISSING
    assert stream.entry(0).key in str(caught.value) and "journal move --to 0" in caught.value.hint
    assert stream.noted(0)[-2:] == ["HydrationStarted", "HydrationFailed"]
    assert stream.residency(0) == [T2]
    assert stream.files("segments") == [] == stream.files("warm")
    path.write_bytes(data)
    assert stream.read() == stream.expected()


def test_damaged_tier_1_is_read_from_2(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    stream = make_stream(AT_ONCE, tier2)
    stream.settle(1)
    stream.tiers.run_job(TierJob(JobKind.EVICT_TIER0, stream.entry(0), "asked"))
    path = stream.dir / "warm" / f"{0:020d}.seg.zst"
    path.write_bytes(path.read_bytes()[:100])
    assert stream.read() == stream.expected()
    assert len(stream.warnings) == 2  # read from another copy; and it was Tier 2


def test_hydrating_by_hand_mends_tier_0(make_stream: MakeStream) -> None:
    stream = make_stream()
    stream.fill(1)
    stream.run()
    assert stream.tiers.hydrate(0) is False
    path = stream.dir / "segments" / f"{0:020d}.seg"
    good = path.read_bytes()
    for damage in (b"", good[:-1], b"x" * len(good)):
        path.write_bytes(damage)
        assert stream.tiers.hydrate(0) is True
        assert path.read_bytes() == good
    path.unlink()
    (stream.dir / "warm" / f"{0:020d}.seg.zst").write_bytes(b"")
    with pytest.raises(FormatError):
        stream.tiers.hydrate(0)


def test_tier_2_without_a_store_is_told(make_stream: MakeStream, tier2: FaultyObjects) -> None:
    stream = make_stream(AT_ONCE._replace(local_bytes=0), tier2)
    stream.settle(1)
    noted = stream.noted(0)
    stream.objects = None
    stream.reopen()
    with pytest.raises(JournalError, match="no object store is configured") as caught:
        stream.read()
    assert "journal.objects" in caught.value.hint
    assert stream.noted(0) == noted
