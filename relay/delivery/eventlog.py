"""The event log: store events in the journal; ``commit`` is the instant of acceptance.

    with the store's file   everything before its position
    with the journal        everything else, in order

An event is applied in memory first and kept. ``commit`` writes the kept events with one sync and
returns when they are durable: what must survive a power cut waits for it. Other events, such as
deliveries made and reads, are written at the end of the turn, so that a killed process loses none
of them, and synced with the next commit: after a power cut the inboxes tell them. See
docs/architecture.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from relay.acomm.engine_state import JournalPosition
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import RelayError
from relay.base.metrics import SECONDS, Histogram
from relay.engine import events, transitions
from relay.engine.engine import Engine
from relay.engine.events import VERSION, Checkpoint, EventCodec, EventRecord, Start
from relay.journal.format import RECORD, Record, RecordFlag
from relay.journal.journal import Append, Journal
from relay.journal.manifest_format import ARCHIVE_ROLLED

STREAM_ID = 1  # a home has one store, and one stream
LINGER_MS = 1_000  # events that nothing waits for share the sync of a commit within a second
RESERVED_BYTES = 64 << 10  # bytes kept free for answers, timers and the like beside the messages


class EventLog:
    """The journal of one store. Owned by the loop."""

    def __init__(
        self,
        journal: Journal,
        codec: EventCodec,
        store: Engine,
        boot_id: str,
        on_checkpoint: Callable[[int], object],
    ) -> None:
        self.journal = journal
        self._codec = codec
        self._store = store
        self._clock = store.clock
        self._boot_id = boot_id
        self._on_checkpoint = on_checkpoint  # gets the offset below which two store files cover it
        self._epoch = 0
        self._recorded_boot_id = boot_id  # as recorded in the journal
        self._rolled: list[events.Rolled] = []  # appended, not yet noted in the manifest
        self._since: int | None = None  # monotonic: how long the oldest fresh event waits
        self._commit_s = Histogram(SECONDS)  # its writes and syncs
        self._follower: Callable[[list[events.FreshEvent]], object] | None = None

    def begin(self, epoch: int, boot_id: str = "") -> None:
        """Record that a writer begins; the events before may lack their end.

        ``boot_id``: of the last writer, if it is another one. Until ``confirm_boot`` the next
        start must detect that, too.
        """
        self._epoch, self._recorded_boot_id = epoch, boot_id or self._boot_id
        start = Start(self._recorded_boot_id, epoch, self._clock.now_ns())
        self._append_control(EventRecord(VERSION, start=start), RecordFlag.CONTROL)
        self.commit()

    def confirm_boot(self) -> None:
        """Record this boot as the one to compare with, once recovery is durable."""
        if self._recorded_boot_id != self._boot_id:
            self.begin(self._epoch)

    def measure(self, commit_s: Histogram) -> None:
        """Observe the seconds of each commit in this histogram from now on."""
        self._commit_s = commit_s

    def follow(self, follower: Callable[[list[events.FreshEvent]], object]) -> None:
        """Call this with the events of each append from now on."""
        self._follower = follower

    def commit(self) -> None:
        """Make all events durable: one write, one sync.

        The manifest's notes of rolled archives follow; one that cannot be written is tried again
        with the next commit.
        Errors: OSError, JournalFailed; the written part is then unknown: open everything again.
        """
        self.append()
        self._since = None
        if self.journal.end > self.journal.durable:
            began = self._clock.monotonic_ns()
            self.journal.commit()
            self._commit_s.observe((self._clock.monotonic_ns() - began) / NS_PER_S)
        if self._rolled:
            with contextlib.suppress(OSError, RelayError):  # what is committed stays accepted
                while self._rolled:
                    self.journal.add_event(ARCHIVE_ROLLED, _note_of(self._rolled[0]))
                    del self._rolled[0]

    def append(self) -> int:
        """Append all events to the journal, durable with the next ``commit``; returns how many.

        Their sequence numbers end with the store's own. Errors: JournalFailed.
        """
        fresh = self._store.fresh_events
        if not fresh:
            return 0
        sequence, offset = self._store.state.sequence - len(fresh), self.journal.end
        encode, head_bytes = self._codec.encode, RECORD.size
        batch: list[Append] = []
        for event, at_ns in fresh:
            ext_id = event.message.id if type(event) is events.MessageSent else 0
            if type(event) is events.Rolled:
                self._rolled.append(event)
            payload = encode(EventRecord(VERSION, sequence, event, at_ns=at_ns), offset)
            batch.append(Append(payload, 0, ext_id))
            sequence += 1
            offset += head_bytes + len(payload)
        self.journal.append(batch)
        if self._follower is not None:
            self._follower(fresh)
        self._store.clear_events()
        return len(batch)

    def _append_control(self, frame: EventRecord, flag: RecordFlag) -> None:
        payload = self._codec.encode(frame, self.journal.end)
        self.journal.append([Append(payload, int(flag))])

    def write(self) -> None:
        """Write all events without a sync; durable within ``LINGER_MS``. Errors: as ``commit``."""
        self.append()
        self.journal.write()
        if self._since is None and self.journal.end > self.journal.durable:
            self._since = self._clock.monotonic_ns()

    def end_turn(self) -> None:
        """Write what no commit took along, and commit it in time; preallocate and roll the
        journal."""
        self.write()
        since = self._since
        if since is not None and since + LINGER_MS * NS_PER_MS <= self._clock.monotonic_ns():
            self.commit()
        self.journal.roll_if_due()
        self.journal.preallocate()  # in a backlog, too: without zeros ahead commits take far longer

    def due_ns(self) -> int | None:
        """Time at which ``end_turn`` has to commit (monotonic)."""
        return None if self._since is None else self._since + LINGER_MS * NS_PER_MS

    def reserve(self, n_bytes: int) -> None:
        """Errors: OSError when the disk has none for so many bytes of messages."""
        self.journal.reserve(n_bytes + RESERVED_BYTES)

    # -- checkpoints: what the flusher asks ------------------------------------------

    def mark(self) -> JournalPosition:
        """The position of the store, durable in the journal. Errors: as ``commit``."""
        self.commit()
        return JournalPosition(STREAM_ID, self.journal.end, self._boot_id)

    def cover(self, position: JournalPosition) -> None:
        """Record a written store file, which covers everything before ``position``."""
        below = self.journal.covered  # by the file before, too
        self.journal.note_checkpoint(position.offset)
        self._on_checkpoint(below)
        frame = EventRecord(VERSION, checkpoint=Checkpoint(position.offset, self._store.sequence))
        self._append_control(frame, RecordFlag.SNAPSHOT_BOUNDARY)

    def seal(self) -> None:
        """Commit, and seal the active segment where it holds anything. Errors: as ``commit``."""
        self.commit()
        self.journal.seal()

    def close(self) -> None:
        """Close the files; uncommitted events are lost."""
        self._store.clear_events()
        self.journal.close()


def replay(
    records: Iterator[Record],
    codec: EventCodec,
    store: Engine,
    on_record: Callable[[EventRecord, int], None],
    warn: Callable[[str], object],
) -> None:
    """Apply events that the store does not have; ``on_record`` gets every record and its offset.

    Missing events, and events that do not apply because of them, are reported to ``warn`` and
    skipped. Errors: FormatError, VersionError, SealedStore.
    """
    unfit = 0
    decode, apply, state = codec.decode, transitions.replay, store.state
    for record in records:
        decoded = decode(record.payload, record.offset)
        on_record(decoded, record.offset)
        event, sequence = decoded.event, decoded.seq
        if event is None or sequence is None or sequence < state.sequence:
            continue
        if sequence > state.sequence:
            missing = sequence - state.sequence
            warn(f"{missing} events before offset {record.offset} of the journal are missing")
        try:
            apply(state, event, sequence)
        except (LookupError, ValueError):
            unfit += 1
    if unfit:
        warn(f"{unfit} events of the journal speak of what is not there, and were passed over")


def _note_of(event: events.Rolled) -> bytes:
    """The manifest's record of a rolled archive."""
    return msgspec.msgpack.encode(
        {"name": event.note.name, "messages": event.note.messages, "bytes": event.note.size}
    )
