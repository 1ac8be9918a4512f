"""The journal of one stream: append, commit and read, by one writer and any number of readers.

Records are durable when ``commit`` returns. Records appended after that may or may not survive a
crash; those that do are whole and in order. A segment is rolled when it is full or old:

    append → (memory) → write: pwrite → commit: fdatasync → roll: footer, SealSegment, next segment

A ``JournalReader`` in another process needs no lock: it returns whole records up to the first
incomplete one, and continues there when called again. It may see a batch that is not synced yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.disk import measure_disk
from relay.base.errors import IntegrityError, JournalFailed, RelayError
from relay.journal.catalog import SegmentEntry
from relay.journal.format import FOOTER, RECORD, HeaderCrcs, Record, RecordFlag, encode_records
from relay.journal.manifest import Manifest
from relay.journal.manifest_format import CHECKPOINT_WRITTEN, ManifestType
from relay.journal.manifest_reader import read_manifest
from relay.journal.recover import Recovery
from relay.journal.segment import (
    FIRST_RECORD,
    SEGMENTS,
    ActiveSegment,
    Fetch,
    FileSource,
    SegmentPolicy,
    Stream,
    read_footer,
    read_records,
    read_sealed,
    seal_segment,
    segment_ids,
    segment_path,
    start_segment,
)

Warn = Callable[[str], object]


class Append(NamedTuple):
    """A record to be appended."""

    payload: bytes
    flags: int = 0  # of RecordFlag
    ext_id: int = 0  # message id; the highest is in the segment's footer


_GAP = int(RecordFlag.GAP)  # combining plain numbers is ten times as fast
_EXT_ID = itemgetter(2)  # of an Append; faster than attribute access


class _PendingWrites:
    """Appended records that are not written yet, of one segment."""

    __slots__ = ("count", "ext_id", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []  # headers and payloads, joined when they are written
        self.count = 0
        self.ext_id = 0

    def take(self, pieces: list[bytes], batch: Sequence[Append]) -> None:
        """Add encoded records, and the batch they were made of."""
        self.pieces += pieces
        self.count += len(batch)
        self.ext_id = max(self.ext_id, max(map(_EXT_ID, batch), default=0))


class _Gaps:
    """Warns once of each gap: a range of offsets whose records were lost to damage."""

    def __init__(self, folder: str, warn: Warn) -> None:
        self._folder = folder
        self._warn = warn
        self._reported: set[int] = set()  # where the reported gaps begin

    def report(self, begin: int, end: int, why: object) -> None:
        """Warn of the gap [begin, end)."""
        if begin not in self._reported:
            self._reported.add(begin)
            text = f"the records of offsets [{begin}, {end}) are lost: {why}"
            self._warn(f"{self._folder}: {text}")

    def skip(self, at: int, to: int) -> int:
        """Report the gap if the stream continues at ``to`` and not at ``at``; the greater one."""
        if at < to:
            self.report(at, to, "no segment has them")
        return max(at, to)

    def drop(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records without those that mark a gap, which is reported."""
        for record in records:
            if record.flags & _GAP:
                self.report(record.offset, record.end, "salvaged")
            else:
                yield record


class Journal:
    """The only writer of a stream. Owns the active segment and the manifest; used by one thread
    (the loop's), except for ``manifest``, which is thread-safe.

    After an error of ``commit``, ``seal`` or ``roll_if_due`` every method that writes raises
    JournalFailed: open the journal again.
    """

    def __init__(self, stream: Stream, active: ActiveSegment, covered: int, warn: Warn) -> None:
        self.manifest = stream.manifest
        self.covered = covered  # a checkpoint has the stream up to here
        self._stream = stream
        self._active = active
        self._warn = warn
        self._end = self._written = self._durable = active.end
        self._groups = [_PendingWrites()]  # one per segment that the appended records need
        self._room = stream.policy.segment_bytes - FOOTER.size - active.position
        self._failure: BaseException | None = None
        self._starts = HeaderCrcs()
        self._gaps = _Gaps(stream.folder, warn)

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
        """Open a stream for writing, after recovery; create it if it does not exist.

        ``at_least``: known length of the stream. ``covered``: the offset that a checkpoint covers.
        A stream that ends before one of them continues there, in a new segment, with a warning.
        All records found are durable when this returns.

        Errors: OSError; FormatError for files of another stream.
        """
        manifest = Manifest.open(stream_dir, stream_id, clock, warn)
        stream = Stream(stream_dir, stream_id, clock, policy, manifest, epoch)
        try:
            fsio.ensure_dir(os.path.join(stream_dir, SEGMENTS))
            fsio.sync_dir(stream_dir)
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
        """The offset after the last appended record."""
        return self._end

    @property
    def durable(self) -> int:
        """The offset after the last committed record."""
        return self._durable

    @property
    def first(self) -> int:
        """The offset of the first record: earlier ones were pruned."""
        return min((entry.base_offset for entry in self.manifest.entries()), default=self._end)

    def append(self, batch: Sequence[Append]) -> list[int]:
        """Append records in memory, to be written; their offsets. Errors: JournalFailed."""
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
        """Distribute records to this and further segments: none spans two."""
        group = self._groups[-1]
        for number, record in enumerate(batch):
            size = RECORD.size + len(record.payload)
            if size > self._room and not self._is_fresh(group):
                group = self._next_group()
            self._room -= size
            group.take(pieces[3 * number : 3 * number + 3], (record,))

    def _is_fresh(self, group: _PendingWrites) -> bool:
        """True for an empty segment, which takes a record of any length."""
        return not group.count and (len(self._groups) > 1 or not self._active.count)

    def _next_group(self) -> _PendingWrites:
        self._groups.append(_PendingWrites())
        self._room = self._stream.policy.segment_bytes - FOOTER.size - FIRST_RECORD
        return self._groups[-1]

    def write(self) -> None:
        """Write all appended records without a sync: a killed process loses none of them; a power
        cut may, until the next ``commit``. Errors: as ``commit``.
        """
        if self._written == self._end:
            return
        self._check()
        self._attempt(self._write_groups)
        self._written = self._end

    def commit(self) -> int:
        """Make all appended records durable: one write and one sync, and a roll if a segment is
        full. Returns ``durable``.

        Errors: OSError, RelayError: uncommitted records may or may not survive, and the journal
        accepts no more.
        """
        self.write()
        if self._durable < self._end:
            self._check()
            self._attempt(self._active.sync)
            self._durable = self._end
        return self._durable

    def _write_groups(self) -> None:
        groups, self._groups = self._groups, [_PendingWrites()]
        for number, group in enumerate(groups):
            if number:
                self._roll()
            if group.count:
                self._write(group)

    def _write(self, group: _PendingWrites) -> None:
        active = self._active
        if not active.count:
            active.first_ms = self._stream.clock.now_ns() // NS_PER_MS
        active.write(b"".join(group.pieces), group.count)
        active.ext_id = max(active.ext_id, group.ext_id)

    def reserve(self, n_bytes: int) -> None:
        """Allocate disk space for ``n_bytes`` more, ``ahead_bytes`` at most.

        Errors: OSError (ENOSPC …), harmless: the journal is unchanged and uses no more space.
        """
        self._check()
        active, policy = self._active, self._stream.policy
        end = active.position + (self._end - self._written)
        before = active.zeroed
        if end + n_bytes > before:
            try:
                active.extend(end + min(n_bytes + policy.slice_bytes, policy.ahead_bytes))
            except OSError:
                with contextlib.suppress(OSError):
                    active.cut(before)
                raise

    def preallocate(self) -> bool:
        """Write a slice of zeros ahead if less than one is left; True if it did.

        For idle moments: it costs a sync that the next commit then saves. A full disk is not an
        error here, but in ``reserve``. Errors: OSError of the sync, as ``commit``.
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
        self._attempt(active.sync)
        return True

    def roll_if_due(self) -> bool:
        """Seal the active segment if it is full or old, and not empty; True if it did.

        One that is only old stays while the disk has no room for the next. Errors: as ``commit``.
        """
        self._check()
        active, policy = self._active, self._stream.policy
        if not active.count or self._durable != self._end:
            return False
        age_ms = self._stream.clock.now_ns() // NS_PER_MS - active.first_ms
        if self._room >= RECORD.size:
            is_old = age_ms * NS_PER_MS >= policy.segment_age_s * NS_PER_S
            if not is_old or measure_disk(self._stream.folder)[2] < 2 * policy.slice_bytes:
                return False
        self.seal()
        return True

    def seal(self) -> None:
        """Commit, then seal the active segment and start the next, unless it is empty.

        Errors: as ``commit``.
        """
        self.commit()
        if not self._active.count:
            return
        self._attempt(self._roll)
        self._room = self._stream.policy.segment_bytes - FOOTER.size - FIRST_RECORD

    def _roll(self) -> None:
        base = self._active.end
        seal_segment(self._stream, self._active, self.covered)
        self._active = start_segment(self._stream, base)

    def note_checkpoint(self, offset: int) -> None:
        """Record that a checkpoint covers the stream up to ``offset``. Errors: OSError, RelayError
        of the manifest; the journal itself stays usable."""
        self.covered = max(self.covered, offset)
        self.add_event(CHECKPOINT_WRITTEN, msgspec.msgpack.encode({"offset": offset}))

    def add_event(self, schema_id: int, blob: bytes) -> None:
        """Append a CustomEvent to the manifest. Errors: as ``note_checkpoint``."""
        active = self._active
        self.manifest.record(
            ManifestType.CustomEvent,
            active.header.segment_id,
            active.base,
            schema_id=schema_id,
            blob=blob,
        )

    def raise_ext_id(self, ext_id: int) -> None:
        """Raise the active segment's highest message id, which records do not contain; called
        by the replay after an open."""
        self._active.ext_id = max(self._active.ext_id, ext_id)

    def read(self, start: int = 0, fetch: Fetch | None = None) -> Iterator[Record]:
        """The committed records from ``start`` on, up to ``durable`` as it is now.

        Pruned records are skipped silently (see ``first``), lost ones with one warning a gap.
        ``fetch`` opens segments that are in other tiers.
        Errors: SegmentAway, if ``fetch`` is needed and not given.
        """
        base, end, path = self._active.base, self._durable, self._active.path
        at = max(start, self.first)
        for entry in self.manifest.entries():
            if not entry.sealed or entry.end_offset <= at or entry.base_offset >= end:
                continue
            at = self._gaps.skip(at, entry.base_offset)
            found = read_sealed(self._stream.folder, entry, at, fetch, self._gaps.report)
            yield from self._gaps.drop(found)
            at = entry.end_offset
        at = self._gaps.skip(at, base)
        if at >= end:
            return
        source = FileSource(path)
        try:
            yield from self._gaps.drop(read_records(source, base, at, end, self._gaps.report))
        finally:
            source.close()

    def close(self) -> None:
        """Close the files; idempotent. Records that were not written are lost."""
        self._active.close()
        self.manifest.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise JournalFailed(f"{self._stream.folder}: the journal failed: {self._failure}")

    def _attempt(self, work: Callable[[], object]) -> None:
        """After an error in ``work`` the journal refuses to write."""
        active, position = self._active, self._active.position - (self._written - self._durable)
        try:
            work()
        except (OSError, RelayError) as exc:
            self._failure = exc
            unsynced = position if active is self._active else 0
            self._active.mark_unsynced(max(unsynced, FIRST_RECORD))
            raise


class JournalReader:
    """Reads a stream in any process, while its writer runs or not.

    ``warn`` is called once for each gap. A damaged record in a sealed segment raises
    IntegrityError. Not thread-safe.
    """

    def __init__(self, stream_dir: str, *, warn: Warn = lambda line: None) -> None:
        self._dir = stream_dir
        self._warn = warn
        self._gaps = _Gaps(stream_dir, warn)
        self._entries: list[SegmentEntry] = []

    def read(self, start: int = 0) -> Iterator[Record]:
        """The records from offset ``start`` on, up to the first incomplete one; those before the
        stream's first record were pruned.

        To follow, read again from the last record's ``end``. Errors: IntegrityError, SegmentAway.
        """
        if not self._is_at_tail(start):
            self._load()
        begins = (entry.base_offset for entry in self._entries)
        at, last = max(start, min(begins, default=0)), -1
        for entry in self._entries:
            if not entry.sealed:
                break
            last = entry.segment_id
            if entry.end_offset > at:
                at = self._gaps.skip(at, entry.base_offset)
                found = read_sealed(self._dir, entry, at, None, None)
                yield from self._gaps.drop(found)
                at = entry.end_offset
        yield from self._read_unsealed(last, at)

    def first(self) -> int:
        """The offset of the first record; 0 for an empty stream, or if the manifest is damaged
        until its writer opens it. Errors: OSError, UnsafePath."""
        view = read_manifest(self._dir, self._warn)
        begins = (entry.base_offset for entry in view.catalog.entries.values())
        return 0 if view.damaged else min(begins, default=0)

    def _load(self) -> None:
        self._entries = list(read_manifest(self._dir, self._warn).catalog.entries.values())

    def _is_at_tail(self, start: int) -> bool:
        """True if the catalog need not be read again: ``start`` is after the last sealed segment,
        and the file of the next one still exists. So following does not read the manifest."""
        sealed = [entry for entry in self._entries if entry.sealed]
        if not sealed or start < sealed[-1].end_offset:
            return False
        return os.path.exists(segment_path(self._dir, sealed[-1].segment_id + 1))

    def _read_unsealed(self, last: int, at: int) -> Iterator[Record]:
        """Read the segments that are not sealed in the manifest, by their files."""
        for number in segment_ids(self._dir):
            if number <= last:
                continue
            if number > last + 1 and self._were_evicted(last, number):
                return  # the next call reads them
            try:
                source = FileSource(segment_path(self._dir, number))
            except FileNotFoundError:
                return
            try:
                at = yield from self._read_open(source, at)
            finally:
                source.close()
            if at < 0:
                return
            last = number

    def _were_evicted(self, last: int, number: int) -> bool:
        """True if segments between these two were sealed and evicted meanwhile."""
        self._load()
        return any(last < entry.segment_id < number and entry.sealed for entry in self._entries)

    def _read_open(self, source: FileSource, at: int) -> Generator[Record, None, int]:
        """Read one segment that may be being written; the offset after it, or -1 at the end."""
        while True:
            footer = read_footer(source, source.size())  # first: a later one is seen next time
            first = source.read_at(FIRST_RECORD, RECORD.size)
            if len(first) < RECORD.size or not first.strip(b"\0"):
                return -1
            if footer is not None and not footer.record_count:
                return at
            base = int(RECORD.unpack(first)[2])
            size = footer.durable_bytes if footer else source.size()
            before = at
            try:
                for record in read_records(source, base, max(at, base), base + size - FIRST_RECORD):
                    at = self._gaps.skip(at, record.offset)
                    yield from self._gaps.drop((record,))
                    at = record.end
            except IntegrityError:
                if footer is not None:
                    raise
            if footer is not None:
                return max(at, base + size - FIRST_RECORD)
            if at == before:
                return -1
