"""A stream with sealed segments, its tiers, and an object store that can be told to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relay.base.clock import NS_PER_MS
from relay.journal import tier_plan
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.journal import Append, Journal
from relay.journal.manifest_format import ManifestType
from relay.journal.manifest_reader import read_manifest
from relay.journal.objects import DirectoryObjects, ObjectFacts, ObjectStore
from relay.journal.segment import SegmentPolicy
from relay.journal.tier_plan import TierJob, TierPolicy
from relay.journal.tiers import Tiers
from tests.fakes import FakeClock
from tests.journal.payloads import payload

SMALL = SegmentPolicy(segment_bytes=1 << 20, slice_bytes=1 << 16)
AT_ONCE = TierPolicy(compress_after_s=0)


class FaultyObjects:
    """A directory as the store; ``fault`` is called before each call, and may raise."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.inner = DirectoryObjects(str(root))
        self.url = self.inner.url
        self.calls: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], None] = lambda call, key: None

    def _call(self, call: str, key: str, *more: Any) -> Any:
        self.calls.append((call, key))
        self.fault(call, key)
        return getattr(self.inner, call)(key, *more)

    def head(self, key: str) -> ObjectFacts | None:
        return self._call("head", key)

    def put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        return self._call("put", key, path, metadata)

    def get(self, key: str) -> tuple[ObjectFacts, Iterator[bytes]]:
        return self._call("get", key)

    def delete(self, key: str) -> None:
        self._call("delete", key)


class Stream:
    """A journal and its tiers in one place, opened and opened again."""

    def __init__(
        self, root: Path, policy: TierPolicy = AT_ONCE, objects: ObjectStore | None = None
    ) -> None:
        self.dir = root / "journal" / f"{1:020d}"
        self.dir.parent.mkdir(parents=True, exist_ok=True)
        self.clock = FakeClock()
        self.policy = policy
        self.objects = objects
        self.warnings: list[str] = []
        self.wrote: list[tuple[int, bytes]] = []  # everything committed
        self.open()

    def open(self) -> None:
        """Open both, as a start does."""
        warn = self.warnings.append
        self.journal = Journal.open(str(self.dir), 1, self.clock, SMALL, warn)
        self.tiers = Tiers(self.journal.manifest, 1, self.policy, self.clock, warn, self.objects)

    def close(self) -> None:
        """As a stop, or after a kill: what is open is let go of."""
        self.journal.close()

    def reopen(self) -> None:
        """Stop and start."""
        self.close()
        self.open()

    def fill(self, segments: int, records: int = 100) -> None:
        """So many sealed segments more."""
        for _ in range(segments):
            payloads = [payload(len(self.wrote) + n) for n in range(records)]
            offsets = self.journal.append([Append(item) for item in payloads])
            self.journal.commit()
            self.wrote += zip(offsets, payloads, strict=True)
            self.clock.advance(1)
            self.journal.seal()

    def cover(self) -> None:
        """Two checkpoints cover everything there is."""
        self.tiers.set_safe_offset(self.journal.durable)

    def run(self) -> list[str]:
        """Steps until nothing is due."""
        done = []
        while (line := self.tiers.run_next()) is not None:
            done.append(line)
            assert len(done) < 1000, done[-5:]
        return done

    def prunes(self) -> list[TierJob]:
        """What retention would remove now."""
        now_ms, below = self.clock.now_ns() // NS_PER_MS, self.tiers.safe_offset
        return list(tier_plan.prunes(self.tiers.entries(), self.tiers.policy, now_ms, below))

    def settle(self, segments: int) -> None:
        """So many segments more, covered, and whatever is due done."""
        self.fill(segments)
        self.cover()
        self.run()

    def first(self) -> int:
        """Where the stream begins: what retention is taking out of Tier 2 is gone already."""
        catalog = self.journal.manifest.catalog
        return next(
            entry.base_offset
            for entry in self.journal.manifest.entries()
            if entry.segment_id not in catalog.deleting or entry.residency != Residency.TIER2
        )

    def read(self) -> list[tuple[int, bytes]]:
        """What the journal gives, from the first record that is kept."""
        first = self.first()
        return [
            (record.offset, record.payload) for record in self.journal.read(first, self.tiers.fetch)
        ]

    def expected(self) -> list[tuple[int, bytes]]:
        """What it has to give."""
        first = self.first()
        return [(offset, data) for offset, data in self.wrote if offset >= first]

    def entry(self, segment_id: int) -> SegmentEntry:
        """Of the catalog."""
        return self.journal.manifest.catalog.entries[segment_id]

    def residency(self, *segment_ids: int) -> list[Residency]:
        """Where they are."""
        return [self.entry(number).residency for number in segment_ids]

    def files(self, folder: str) -> list[str]:
        """What lies in segments/ or warm/, the active segment aside."""
        active = f"{max(self.journal.manifest.catalog.entries):020d}.seg"
        return sorted(p.name for p in (self.dir / folder).iterdir() if p.name != active)

    def noted(self, segment_id: int) -> list[str]:
        """What the manifest has of a segment, behind its seal."""
        records = read_manifest(str(self.dir), lambda line: None).records
        kinds = (ManifestType.SegmentOpened, ManifestType.SealSegment)
        return [r.name for r in records if r.segment_id == segment_id and r.type not in kinds]


MakeStream = Callable[..., Stream]
