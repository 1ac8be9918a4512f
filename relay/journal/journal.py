"""The journal of one stream: append, commit, read; one writer.

What ``commit`` returned is on the disk, whatever happens then. What was appended after that may be
there after a crash or not, whole records of it in order; nothing else ever is. A segment is rolled
when it is full or old: its footer is written, the manifest told, the next one made.

    append → (memory) → commit: pwrite, fdatasync → roll: footer, SealSegment, next, SegmentOpened
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import JournalFailed, RelayError
from relay.journal.format import CHECKPOINT_WRITTEN, FOOTER, RECORD, ManifestType, RecordFlag
from relay.journal.manifest import Manifest
from relay.journal.reader import Fetch, read_sealed
from relay.journal.records import HeaderCrcs, Record, encode_records
from relay.journal.recover import Recovery
from relay.journal.segment import FIRST_RECORD, SEGMENTS, ActiveSegment, FileSource, read_records
from relay.journal.segments import SegmentPolicy, Stream, seal_segment, start_segment

__all__ = ["Append", "Journal", "Record", "SegmentPolicy"]

Warn = Callable[[str], object]


class Append(NamedTuple):
    """What is to be appended."""

    payload: bytes
    flags: int = 0  # of RecordFlag
    ext_id: int = 0  # the message it is about; the highest stands in the segment's footer


_EXT_ID = itemgetter(2)  # of an Append: as quick as a batch of hundreds needs


class _PendingWrites:
    """What is appended and not written, of one segment."""

    __slots__ = ("count", "ext_id", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []  # headers and payloads, joined when they are written
        self.count = 0
        self.ext_id = 0

    def take(self, pieces: list[bytes], batch: Sequence[Append]) -> None:
        """Encoded records, and what they were made of."""
        self.pieces += pieces
        self.count += len(batch)
        self.ext_id = max(self.ext_id, max(map(_EXT_ID, batch), default=0))


class Journal:
    """One stream and its only writer. Owns the active segment and the manifest; one thread (the
    loop's) calls it, but for ``manifest``, which is safe for others.

    After an error of ``commit``, ``seal`` or ``roll_if_due`` it refuses everything that writes
    with JournalFailed: it has to be opened anew. ``fetch`` is set by who runs the tiers.
    """

    def __init__(self, stream: Stream, active: ActiveSegment, covered: int, warn: Warn) -> None:
        self.manifest = stream.manifest
        self.fetch: Fetch | None = None
        self.covered = covered  # a checkpoint has the stream up to here
        self._stream = stream
        self._active = active
        self._warn = warn
        self._end = self._durable = active.end
        self._groups = [_PendingWrites()]  # one for each segment that the appended records need
        self._room = stream.policy.segment_bytes - FOOTER.size - active.position
        self._failure: BaseException | None = None
        self._starts = HeaderCrcs()
        self._reported_gaps: set[int] = set()  # where the gaps begin that were warned of

    @classmethod
    def open(
        cls,
        stream_dir: str,
        stream_id: int,
        clock: Clock,
        policy: SegmentPolicy,
        warn: Warn,
        *,
        epoch: int = 0,
        at_least: int = 0,
        covered: int = 0,
    ) -> Journal:
        """Open the stream for writing, making good what a crash left; a new one is made.

        ``at_least``: the stream was that long. ``covered``: a checkpoint has it up to there. A
        stream that ends before either goes on there, in a new segment, and that is warned of.
        Everything found is durable when this returns.

        Errors: OSError; FormatError for files that are not of this stream.
        """
        manifest = Manifest.open(stream_dir, stream_id, clock, warn)
        stream = Stream(stream_dir, stream_id, clock, policy, manifest, epoch)
        try:
            _make_folder(stream_dir)
            needed = max(at_least, covered)
            active, end = Recovery(stream, needed, warn).run()
            if end < needed:
                warn(
                    f"{stream_dir}: the stream ends at {end} and was {needed} long;"
                    f" the records of offsets [{end}, {needed}) are lost"
                )
                if active is not None:
                    seal_segment(stream, active, covered)
                active, end = None, needed
            return cls(stream, active or start_segment(stream, end), covered, warn)
        except BaseException:
            manifest.close()
            raise

    @property
    def end(self) -> int:
        """The offset behind the last record appended."""
        return self._end

    @property
    def durable(self) -> int:
        """The offset behind the last record committed."""
        return self._durable

    @property
    def first(self) -> int:
        """The offset of the first record that is left: what was before it was pruned."""
        return min((entry.base_offset for entry in self.manifest.entries()), default=self._end)

    def append(self, batch: Sequence[Append]) -> list[int]:
        """Take records in, in memory; their offsets. Durable after ``commit``.

        Errors: JournalFailed.
        """
        self._check()
        at_ms = self._stream.clock.now_ns() // NS_PER_MS
        begin = self._end
        pieces, offsets, self._end = encode_records(
            batch, begin, at_ms, self._starts, is_joined=begin > self._durable
        )
        if self._end - begin <= self._room:
            self._room -= self._end - begin
            self._groups[-1].take(pieces, batch)
        else:
            self._split(pieces, batch)
        return offsets

    def _split(self, pieces: list[bytes], batch: Sequence[Append]) -> None:
        """Hand out records to this segment and those that come: none spans two."""
        group = self._groups[-1]
        for number, one in enumerate(batch):
            size = RECORD.size + len(one.payload)
            if size > self._room and not self._is_fresh(group):
                group = self._next_group()
            self._room -= size
            group.take(pieces[3 * number : 3 * number + 3], (one,))

    def _is_fresh(self, group: _PendingWrites) -> bool:
        """Nothing is in the segment that comes: a record that is too long for any has its own."""
        return not group.count and (len(self._groups) > 1 or not self._active.count)

    def _next_group(self) -> _PendingWrites:
        self._groups.append(_PendingWrites())
        self._room = self._stream.policy.segment_bytes - FOOTER.size - FIRST_RECORD
        return self._groups[-1]

    def commit(self) -> int:
        """Make everything appended durable: one write and one sync, and a roll where a segment
        is full. Returns ``durable``.

        Errors: OSError, RelayError: what was not committed may be there or not, and the journal
        takes nothing more.
        """
        self._check()
        if self._durable == self._end:
            return self._durable
        groups, self._groups = self._groups, [_PendingWrites()]
        with self._failing():
            for number, group in enumerate(groups):
                if number:
                    self._roll()
                if group.count:
                    self._write(group)
            self._active.sync()
        self._durable = self._end
        return self._durable

    def _write(self, group: _PendingWrites) -> None:
        active = self._active
        if not active.count:
            active.first_ms = self._stream.clock.now_ns() // NS_PER_MS
        active.write(b"".join(group.pieces), group.count)
        active.ext_id = max(active.ext_id, group.ext_id)

    def reserve(self, n_bytes: int) -> None:
        """Make sure that the disk takes ``n_bytes`` more before anything is promised.

        At most ``ahead_bytes`` are written ahead; who has more to say says it in parts.
        Errors: OSError (ENOSPC …), harmless: the journal is as it was, and takes no more disk.
        """
        self._check()
        active, policy = self._active, self._stream.policy
        end = active.position + (self._end - self._durable)
        before = active.zeroed
        if end + n_bytes > before:
            try:
                active.extend(end + min(n_bytes + policy.slice_bytes, policy.ahead_bytes))
            except OSError:
                with contextlib.suppress(OSError):
                    active.cut(before)
                raise

    def preallocate(self) -> bool:
        """Write a slice of zeros ahead when less than one is left; True when it did.

        For idle moments: it costs a sync, which the next commit then does not. A full disk is
        not told of here; ``reserve`` does. Errors: OSError of the sync, as ``commit``.
        """
        self._check()
        active, policy = self._active, self._stream.policy
        ahead = active.zeroed - active.position
        if ahead >= policy.slice_bytes or active.zeroed >= policy.segment_bytes:
            return False
        try:
            active.extend(min(active.zeroed + policy.slice_bytes, policy.segment_bytes))
        except OSError:
            return False
        with self._failing():
            active.sync()
        return True

    def roll_if_due(self) -> bool:
        """Seal the active segment when it is full or old, and holds anything; True when it did.

        Errors: as ``commit``.
        """
        self._check()
        active, policy = self._active, self._stream.policy
        if not active.count or self._durable != self._end:
            return False
        age_ms = self._stream.clock.now_ns() // NS_PER_MS - active.first_ms
        is_full = self._room < RECORD.size
        if not is_full and age_ms * NS_PER_MS < policy.segment_age_s * NS_PER_S:
            return False
        self.seal()
        return True

    def seal(self) -> None:
        """Commit, then seal the active segment and begin the next; an empty one goes on.

        Errors: as ``commit``.
        """
        self.commit()
        if not self._active.count:
            return
        with self._failing():
            self._roll()
        self._room = self._stream.policy.segment_bytes - FOOTER.size - FIRST_RECORD

    def _roll(self) -> None:
        base = self._active.end
        seal_segment(self._stream, self._active, self.covered)
        self._active = start_segment(self._stream, base)

    def note_checkpoint(self, offset: int) -> None:
        """A checkpoint is written that has the stream up to ``offset``. Errors: OSError,
        RelayError of the manifest; the journal itself goes on."""
        self.covered = max(self.covered, offset)
        self.add_event(CHECKPOINT_WRITTEN, msgspec.msgpack.encode({"offset": offset}))

    def add_event(self, schema_id: int, blob: bytes) -> None:
        """Leave a CustomEvent in the manifest. Errors: as ``cover``."""
        active = self._active
        self.manifest.record(
            ManifestType.CustomEvent,
            active.header.segment_id,
            active.base,
            schema_id=schema_id,
            blob=blob,
        )

    def raise_ext_id(self, ext_id: int) -> None:
        """The active segment's highest id is at least this: a record does not carry it, so who
        replays the stream says it after an open."""
        self._active.ext_id = max(self._active.ext_id, ext_id)

    def read(self, start: int = 0) -> Iterator[Record]:
        """The committed records from ``start`` on, up to ``durable`` as it is now.

        What was pruned is stepped over in silence: ``first`` says where the stream begins. Records
        that damage took are stepped over, too; each gap is warned of once.
        Errors: SegmentAway, where ``fetch`` is needed and not given.
        """
        base, end, path = self._active.base, self._durable, self._active.path
        at = max(start, self.first)
        for entry in self.manifest.entries():
            if not entry.sealed or entry.end_offset <= at or entry.base_offset >= end:
                continue
            at = self._skip_gap(at, entry.base_offset)
            found = read_sealed(self._stream.folder, entry, at, self.fetch, self._report_gap)
            yield from self._without_gaps(found)
            at = entry.end_offset
        at = self._skip_gap(at, base)
        if at >= end:
            return
        source = FileSource(path)
        try:
            yield from self._without_gaps(read_records(source, base, at, end, self._report_gap))
        finally:
            source.close()

    def _without_gaps(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            if record.flags & RecordFlag.GAP:
                self._report_gap(record.offset, record.end, "salvaged")
            else:
                yield record

    def _skip_gap(self, at: int, to: int) -> int:
        """The stream goes on at ``to``: what is missing before it is warned of."""
        if at < to:
            self._report_gap(at, to, "no segment has them")
        return max(at, to)

    def _report_gap(self, begin: int, end: int, why: object) -> None:
        if begin not in self._reported_gaps:
            self._reported_gaps.add(begin)
            folder = self._stream.folder
            self._warn(f"{folder}: the records of offsets [{begin}, {end}) are lost: {why}")

    def close(self) -> None:
        """Let go of the files; a second time is harmless. What was not committed is gone."""
        self._active.close()
        self.manifest.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise JournalFailed(f"{self._stream.folder}: the journal failed: {self._failure}")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error in the block is the journal's last."""
        known = self._active, self._active.position
        try:
            yield
        except (OSError, RelayError) as exc:
            self._failure = exc
            active, position = known
            if active is not self._active:
                active, position = self._active, FIRST_RECORD
            active.mark_unsynced(position)
            raise


def _make_folder(stream_dir: str) -> None:
    folder = os.path.join(stream_dir, SEGMENTS)
    if not os.path.isdir(folder):
        fsio.ensure_dir(folder)
        fsio.sync_dir(stream_dir)
