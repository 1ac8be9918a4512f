"""The tiers, killed at every call that touches a disk or the object store: nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.base import fsio
from relay.journal.catalog import Residency
from tests.disk import killed_before
from tests.journal.tiers_support import AT_ONCE, FaultyObjects, Stream

EVERYTHING = AT_ONCE._replace(local_bytes=0)
T0, T1, T2 = Residency
WAYS = {  # by which policy, and where the segments that are left lie in the end
    "compress": (AT_ONCE, [T0 | T1] * 2),
    "evict": (EVERYTHING, [T1] * 2),
    "upload": (AT_ONCE, [T0 | T1 | T2] * 2),
    "upload and evict": (EVERYTHING, [T2] * 2),
    "hydrate": (EVERYTHING, [T2] * 2),
    "prune": (EVERYTHING._replace(keep_bytes=15_000), [T2]),
    "prune local copies": (AT_ONCE._replace(keep_bytes=15_000), [T0 | T1]),
}


LOCAL = ("compress", "evict", "prune local copies")  # without an object store
PARTS = 4  # of the calls, so that no test takes long


def run_killed(stream: Stream, store: FaultyObjects, at: int, *, read: bool) -> bool:
    """Run the tiers, or read, until the n-th call; False when it was done before it."""
    with killed_before(at + 1) as calls:
        store.fault = fsio.fault
        if read:
            list(stream.journal.read(0, stream.tiers.fetch))
        else:
            stream.run()
    store.fault = lambda call, key: None
    return len(calls) > at


@pytest.mark.shows("journal 4.9")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_every_call_nothing_is_lost(way: str, part: int, tmp_path: Path) -> None:
    policy, end = WAYS[way]
    at, killed = part, True
    while killed:
        root = tmp_path / str(at)
        root.mkdir()
        store = FaultyObjects(root / "tier2")
        stream = Stream(root, policy, None if way in LOCAL else store)
        stream.fill(2, records=60)
        stream.cover()
        if way == "hydrate":
            stream.run()
        killed = run_killed(stream, store, at, read=way == "hydrate")
        stream.reopen()
        assert stream.read() == stream.expected(), f"killed at call {at}"
        stream.cover()
        stream.run()
        assert stream.read() == stream.expected(), f"went on after a kill at call {at}"
        stream.run()
        stands_clean(stream, store)
        assert [e.residency for e in stream.journal.manifest.entries() if e.sealed] == end
        assert [line for line in stream.warnings if "torn tail" not in line] == []
        stream.close()
        at += PARTS
    assert at > 10


def stands_clean(stream: Stream, store: FaultyObjects) -> None:
    """The files there are are those that the manifest names: no copy too many, none too few."""
    sealed = [entry for entry in stream.journal.manifest.entries() if entry.sealed]
    for folder, tier, end in (
        ("segments", Residency.TIER0, ".seg"),
        ("warm", Residency.TIER1, ".seg.zst"),
    ):
        named = [f"{e.segment_id:020d}{end}" for e in sealed if e.residency & tier]
        assert stream.files(folder) == named
    there = sorted(path.name for path in Path(store.url).rglob("*.zst"))
    assert there == [
        f"{e.segment_id:020d}.seg.zst" for e in sealed if e.residency & Residency.TIER2
    ]
    assert not list(Path(store.url).rglob("*.tmp"))
