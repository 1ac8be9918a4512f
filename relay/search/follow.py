"""The follower: fills the index from the store's newest checkpoint, then from the journal.

The checkpoint comes first, because the journal may have lost its beginning: its archives, each
once and for all, then its messages in one transaction with its position. From there on every
event of the journal that adds, removes or archives a message is followed. Before a batch the
record that ended the last one is read again; where the journal has another one there, or none,
the home has another history by now, and the index is filled anew. So it is where the next records
cannot be read here: a checkpoint may cover them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import NamedTuple

from relay.acomm.model import ArchiveInfo, Message, MessageType
from relay.base.errors import IntegrityError, JournalError, SegmentAway
from relay.engine import events
from relay.engine.archive_files import Archived
from relay.engine.events import Event, EventCodec
from relay.engine.state import State
from relay.journal.format import Record
from relay.journal.journal import JournalReader
from relay.search.index import Entry, Index, Position, SearchIndexDamaged, entry_of

BATCH = 200  # messages of one slice
RECORDS = 1_000  # of the journal, of one slice
BYTES = 4 << 20  # of their payloads
MOST_COUNTED = 5_000  # records; more that the index lacks are not counted


class Source(NamedTuple):
    """The places that an index is filled from."""

    stream_dir: str
    codec: EventCodec
    load: Callable[[], State]  # the newest checkpoint
    archived: Callable[[ArchiveInfo], Iterator[Archived]]
    kinds: Mapping[MessageType, str]  # the default kind of each type


class Progress(NamedTuple):
    """One slice of the work."""

    messages: int  # added
    is_done: bool  # nothing is left


class Follower:
    """Fills an index in slices of some milliseconds. Used in one thread."""

    def __init__(self, index: Index, source: Source) -> None:
        self._index = index
        self._source = source
        self._reader = JournalReader(source.stream_dir)
        self._base: Iterator[int] | None = None
        self._begun_again = False

    def step(self, until: int | None = None) -> Progress:
        """Do one slice; ``until``: offset of the journal where to stop, else its end.

        Errors: SearchIndexError; those of reading store and journal.
        """
        position = self._index.position()
        if position is None:
            return self._fill_slice()
        try:
            records = self._next_records(position, until)
        except (_OtherJournal, SegmentAway, IntegrityError):
            if self._begun_again:  # the checkpoint does not help
                raise
            self._begin_again()
            return Progress(0, False)
        if not records:
            return Progress(0, True)
        with self._index.batch(position) as is_next:
            added = self._follow(records) if is_next else 0
        return Progress(added, False)

    def run(self, seconds: float, until: int | None = None) -> bool:
        """Do slices for a time; True when nothing is left. Errors: as ``step``."""
        end = time.monotonic() + seconds
        while not self.step(until).is_done:
            if time.monotonic() > end:
                return False
        return True

    # -- from the journal --------------------------------------------------------------

    def _next_records(self, position: Position, until: int | None) -> list[Record]:
        """The next records, without those of the index. Errors: those of the reader."""
        found: list[Record] = []
        n_bytes = 0
        for record in records_after(self._reader, position):
            if until is not None and record.end > until:
                break
            found.append(record)
            n_bytes += len(record.payload)
            if len(found) >= RECORDS or n_bytes >= BYTES:
                break
        return found

    def _follow(self, records: list[Record]) -> int:
        added = 0
        fresh: list[Entry] = []
        decode = self._source.codec.decode
        for record in records:
            event = decode(record.payload, record.offset).event
            if type(event) is events.MessageSent:
                fresh.append(self._entry(event.message, event.recipients))
            elif event is not None and type(event) in _FOLLOWED:
                added += self._add(fresh)
                fresh = []
                self._apply(event)
        added += self._add(fresh)
        last = records[-1]
        self._index.set_position(Position(last.end, last.offset, digest(last)))
        return added

    def _apply(self, event: Event) -> None:
        index = self._index
        match event:
            case events.ChannelCreated(channel):
                index.add_channel(channel.id, channel.name)
            case events.DeliveriesAdded(recipient, message_ids):
                index.add_recipient(recipient, message_ids)
            case events.DeadLetterDiscarded(message_id):
                index.remove([message_id])
            case events.ArchiveDropped(message_ids):
                index.remove(message_ids)
            case events.MessagesArchived(message_ids):
                index.archive(message_ids)

    def _entry(self, message: Message, recipients: tuple[str, ...]) -> Entry:
        return entry_of(message, recipients, self._source.kinds[message.message_type])

    def _add(self, entries: list[Entry]) -> int:
        return self._index.add(entries) if entries else 0

    # -- from the store ----------------------------------------------------------------

    def _begin_again(self) -> None:
        self._base, self._begun_again = None, True
        self._index.begin_again()

    def _fill_slice(self) -> Progress:
        self._base = self._base or self._fill()
        added = next(self._base, None)
        if added is None:
            self._base = None
            if self._index.position() is None:
                raise SearchIndexDamaged(f"{self._index.path}: it was removed meanwhile")
            return Progress(0, False)
        return Progress(added, False)

    def _fill(self) -> Iterator[int]:
        """Fill the index from the newest checkpoint; yields the messages of each slice."""
        state = self._source.load()
        with self._index.batch(None) as is_mine:
            if not is_mine:
                return
            for channel in state.channels.values():
                self._index.add_channel(channel.id, channel.name)
        for note in state.archives:
            if not self._index.has_archive(note.name):
                yield from self._fill_archive(note)
        yield from self._fill_live(state)

    def _fill_archive(self, note: ArchiveInfo) -> Iterator[int]:
        entries: list[Entry] = []
        for message, deliveries in self._source.archived(note):
            entries.append(self._entry(message, tuple(deliveries)))
            if len(entries) == BATCH:
                with self._index.batch(None) as is_mine:
                    added = self._add(entries) if is_mine else 0
                yield added
                entries = []
        with self._index.batch(None) as is_mine:
            if is_mine:
                self._add(entries)
                self._index.note_archive(note.name)
        yield len(entries)

    def _fill_live(self, state: State) -> Iterator[int]:
        """The messages that later events may remove: all of them in one transaction with the
        position, so that a fill that begins again never has one of an earlier checkpoint."""
        found = [*state.messages.values(), *state.dead_letters.values(), *state.archive.values()]
        offset = state.journal.offset if state.journal else 0
        with self._index.batch(None) as is_mine:
            for begin in range(0, len(found) if is_mine else 0, BATCH):
                entries = [
                    self._entry(message, tuple(state.deliveries.get(message.id, ())))
                    for message in found[begin : begin + BATCH]
                ]
                yield self._add(entries)
            if is_mine:
                self._index.note_order()
                self._index.set_position(Position(offset, -1, ""))


_FOLLOWED = frozenset(
    {
        events.ChannelCreated,
        events.DeliveriesAdded,
        events.DeadLetterDiscarded,
        events.ArchiveDropped,
        events.MessagesArchived,
    }
)


class _OtherJournal(JournalError):
    """The journal does not have the record that the index ends with."""


def digest(record: Record) -> str:
    """Tell a record from any other of its offset."""
    return sha256(record.payload).hexdigest()[:16]


def records_after(reader: JournalReader, position: Position) -> Iterator[Record]:
    """The records after a position. Errors: _OtherJournal when the journal is another one."""
    records = reader.read(position.begin)
    if position.last >= 0:
        first = next(records, None)
        if first is None or first.offset != position.last or digest(first) != position.digest:
            raise _OtherJournal(f"the journal has another record at {position.last}")
    yield from records


class Behind(NamedTuple):
    """The part of the journal that an index lacks."""

    messages: int
    since_ms: int | None  # Unix ms of the first record
    is_more: bool  # there are more: not all were counted


def behind(index: Index, source: Source) -> Behind | None:
    """Count the messages that the index lacks; None while it is being filled, or filled anew.

    Errors: SearchIndexError; those of reading the journal.
    """
    position = index.position()
    if position is None:
        return None
    messages, since_ms, decode = 0, None, source.codec.decode
    records = records_after(JournalReader(source.stream_dir), position)
    try:
        for number, record in enumerate(records):
            if number >= MOST_COUNTED:
                return Behind(messages, since_ms, True)
            if type(decode(record.payload, record.offset).event) is events.MessageSent:
                messages += 1
                since_ms = since_ms or record.at_ms
    except _OtherJournal:
        return None
    return Behind(messages, since_ms, False)
