"""Journals for the audits' tests: written by relay.journal as the relay writes them."""

from __future__ import annotations

from pathlib import Path

from relay.acomm.model import DeliveryState, Message, MessageType, Origin
from relay.engine import events
from relay.engine.events import VERSION, Checkpoint, Event, EventCodec, EventRecord, Start
from relay.journal.format import RecordFlag
from relay.journal.journal import Append, Journal
from relay.journal.segment import SegmentPolicy
from relay.journal.tier_plan import JobKind, TierJob, TierPolicy
from relay.journal.tiers import Tiers
from tests.audit.home_builder import START_NS, START_S
from tests.fakes import FakeClock

SMALL = SegmentPolicy(segment_bytes=1 << 20, segment_age_s=3600, slice_bytes=1 << 16)


def sent(number: int, body: bytes = b"hello", *, to: str = "bob", sender: str = "alice") -> Event:
    """A message that came through the relay is accepted."""
    relay_id = f"1-{number}"
    origin = Origin(
        sender, f"agents/{sender}/outbox/{relay_id}.msg", 100, 1, 7, "ab", "text", to, START_NS
    )
    message = Message(
        number,
        MessageType.TEXT,
        sender,
        1,
        body,
        correlation_id="c-1",
        metadata={"relay_id": relay_id, "to": to, "created_ns": START_NS},
        created_at=START_S,
    )
    return events.MessageSent(message, (to,), origin=origin)


def delivered(number: int, to: str = "bob") -> Event:
    """It stands in an inbox."""
    return events.DeliveriesMoved(number, (to,), DeliveryState.DELIVERED, START_S)


class JournalBuilder:
    """A home's journal, its tiers and nothing else of the home."""

    def __init__(
        self,
        root: Path,
        *,
        key: bytes | None = None,
        policy: SegmentPolicy = SMALL,
        objects: str = "",
        at_least: int = 0,
    ) -> None:
        self.root = root
        self.dir = root / "journal" / f"{1:020d}"
        self.dir.parent.mkdir(parents=True, exist_ok=True)
        self.clock = FakeClock(START_NS)
        self.warnings: list[str] = []
        self.codec = EventCodec(key)
        self.sequence = 0
        warn = self.warnings.append
        self.journal = Journal.open(str(self.dir), 1, self.clock, policy, warn, at_least=at_least)
        self.tiers = Tiers(self.journal.manifest, 1, TierPolicy(objects=objects), self.clock, warn)

    @property
    def path(self) -> str:
        """The stream, as the format takes it."""
        return str(self.dir)

    def say(self, *more: Event) -> list[int]:
        """Events in one commit; where their records begin."""
        return self.put(*(self._frame(event) for event in more))

    def _frame(self, event: Event) -> EventRecord:
        self.sequence += 1
        return EventRecord(VERSION, self.sequence - 1, event)

    def start(self, epoch: int = 1) -> None:
        """Its writer begins."""
        self.put(
            EventRecord(VERSION, start=Start("boot-1", epoch, START_NS)), flag=RecordFlag.CONTROL
        )

    def checkpoint(self) -> None:
        """A store file covers what there is."""
        frame = EventRecord(VERSION, checkpoint=Checkpoint(self.journal.end, self.sequence))
        self.put(frame, flag=RecordFlag.SNAPSHOT_BOUNDARY)
        self.tiers.set_safe_offset(self.journal.end)

    def put(self, *frames: EventRecord, flag: int = 0) -> list[int]:
        """Frames in one commit; where their records begin."""
        offsets: list[int] = []
        for frame in frames:
            payload = self.codec.encode(frame, self.journal.end)
            offsets += self.journal.append([Append(payload, int(flag))])
        self.journal.commit()
        return offsets

    def segment(self, *more: Event) -> list[int]:
        """Events that are a segment of their own, sealed."""
        offsets = self.say(*more)
        self.journal.seal()
        return offsets

    def move(self, segment_id: int, *kinds: JobKind) -> None:
        """One segment through the tiers: what an operator would ask for."""
        for kind in kinds:
            entry = self.journal.manifest.catalog.entries[segment_id]
            self.tiers.run_job(TierJob(kind, entry, "asked for"))

    def files(self) -> list[str]:
        """What lies in the stream's folders for segments."""
        return sorted(
            f"{folder}/{path.name}"
            for folder in ("segments", "warm")
            if (self.dir / folder).is_dir()
            for path in (self.dir / folder).iterdir()
        )

    def close(self) -> None:
        """Let the files go."""
        self.journal.close()
