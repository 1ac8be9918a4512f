"""The local copies of a segment: made, proved, given up. Each step is a manifest record.

The order is what makes a crash harmless: a copy is durable before the manifest says so, and the
manifest has forgotten a copy before its file is removed. What a crash leaves is a file too many,
never one too few; ``sweep`` takes it in again or removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

from relay.base import fsio
from relay.base.errors import FormatError, JournalError
from relay.journal import warm
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.dictionaries import Dictionaries
from relay.journal.files import FETCHED, TEMP, NewFile, SegmentCheck, pieces, remove, size_of
from relay.journal.format import Field, Footer, ManifestType, Reason
from relay.journal.manifest import Manifest
from relay.journal.segment import FileSource, read_records, segment_path
from relay.journal.warm import WarmSegment, warm_name

WARM = "warm"
_SEGMENT_FILE = re.compile(r"(0[0-9]{19})\.seg")
_WARM_FILE = re.compile(r"(0[0-9]{19})\.seg\.zst")


class LocalCopies:
    """Tier 0 and Tier 1 of one stream. Used by one thread at a time: see Tiers."""

    def __init__(self, stream_dir: str, manifest: Manifest, warn: Callable[[str], object]) -> None:
        self.stream_dir = stream_dir
        self.manifest = manifest
        self.warn = warn
        self.folder = os.path.join(stream_dir, WARM)
        if not os.path.isdir(self.folder):
            fsio.ensure_dir(self.folder)
            fsio.sync_dir(stream_dir)
        self.dictionaries = Dictionaries(self.folder)

    def tier0(self, entry: SegmentEntry) -> str:
        """Where the segment lies, or would, as it was written."""
        return segment_path(self.stream_dir, entry.segment_id)

    def tier1(self, entry: SegmentEntry) -> str:
        """Where its compressed copy lies, or would."""
        return os.path.join(self.folder, warm_name(entry.segment_id))

    def entry(self, segment_id: int) -> SegmentEntry:
        """As the manifest has it now. Errors: JournalError when it has left the stream."""
        found = self.manifest.catalog.entries.get(segment_id)
        if found is None:
            raise JournalError(f"segment {segment_id}: not in {self.stream_dir}")
        return found

    def record(self, kind: ManifestType, entry: SegmentEntry, **fields: Field) -> None:
        """Commit what was done to the manifest."""
        self.manifest.record(kind, entry.segment_id, entry.base_offset, **fields)

    def record_failure(self, kind: ManifestType, entry: SegmentEntry, **fields: Field) -> None:
        """The same of a failure; where the disk takes not even that, the failure itself is told."""
        with contextlib.suppress(OSError):
            self.record(kind, entry, **fields)

    def compress(self, entry: SegmentEntry) -> None:
        """Tier 1 has the segment, proved, when this returns.

        Errors: FormatError when the segment is damaged (noted as a permanent codec error),
        OSError (noted as transient).
        """
        path = self.tier0(entry)
        job_id = self.manifest.catalog.next_job_id
        self.record(ManifestType.CompressionStarted, entry, job_id=job_id)
        failed = ManifestType.CompressionFailed
        try:
            done = warm.compress(
                path, self.tier1(entry), segment_check(entry, path), self.dictionaries
            )
        except FileNotFoundError as exc:
            self.record_failure(failed, entry, reason_code=Reason.CODEC)
            raise FormatError(path, 0, f"{entry.file_bytes} bytes", "no such file") from exc
        except FormatError:
            self.record_failure(failed, entry, reason_code=Reason.CODEC)
            raise
        except OSError:
            self.record_failure(failed, entry, reason_code=Reason.TRANSIENT)
            raise
        self._record_compressed(entry, done.size, done.dictionary_id)

    def _record_compressed(self, entry: SegmentEntry, size: int, dictionary_id: int) -> None:
        kind = ManifestType.CompressionDone
        self.record(kind, entry, compressed_bytes=size, dictionary_id=dictionary_id)

    def verify_warm(self, entry: SegmentEntry) -> Footer:
        """Inflate the compressed copy whole: it is the segment. Its footer.

        Errors: FormatError, IntegrityError, FileNotFoundError.
        """
        path = self.tier1(entry)
        check = segment_check(entry, path)
        with WarmSegment(path, self.dictionaries) as opened:
            for piece in opened.pieces():
                check.feed(piece)
        return check.done()

    def restore(self, entry: SegmentEntry, source: str = "") -> None:
        """Write Tier 0 from a compressed copy, proved; the manifest is not told.

        Errors: FormatError, IntegrityError, FileNotFoundError, OSError.
        """
        source, target = source or self.tier1(entry), self.tier0(entry)
        check = segment_check(entry, source)
        with WarmSegment(source, self.dictionaries) as opened, NewFile(target) as file:
            for piece in opened.pieces():
                check.feed(piece)
                file.write(piece)
            check.done()
            file.sync()
            _read_all(entry, file.temp)
            file.commit()

    def evict(self, entry: SegmentEntry, tier: Residency) -> int:
        """Forget a local copy, then remove its file; its bytes. The proof is the caller's."""
        path = self.tier0(entry) if tier is Residency.TIER0 else self.tier1(entry)
        size = entry.file_bytes if tier is Residency.TIER0 else entry.compressed_bytes
        self.record(ManifestType.LocalEvicted, entry, reclaimed_bytes=size)
        remove(path)
        return size

    def clean_up(self) -> None:
        """Put right what a crash left: files that the manifest does not know of.

        A good copy of a segment that it knows is taken in again, and leaves as any other does;
        a file of a segment that was pruned is removed; what is neither stays, and is named.
        """
        entries = {entry.segment_id: entry for entry in self.manifest.entries()}
        oldest = min(entries, default=0)
        for folder, pattern, tier in (
            (os.path.dirname(segment_path(self.stream_dir, 0)), _SEGMENT_FILE, Residency.TIER0),
            (self.folder, _WARM_FILE, Residency.TIER1),
        ):
            for name in sorted(os.listdir(folder)):
                path = os.path.join(folder, name)
                if name.endswith((TEMP, FETCHED)):  # begun by a process that ended
                    remove(path)
                    continue
                match = pattern.fullmatch(name)
                entry = entries.get(int(match[1])) if match else None
                if match and entry is None and int(match[1]) < oldest:
                    remove(path)
                elif entry is not None and entry.sealed and not entry.residency & tier:
                    self._adopt(entry, tier, path)
        self.remove_unused_dictionaries()

    def _adopt(self, entry: SegmentEntry, tier: Residency, path: str) -> None:
        try:
            if tier is Residency.TIER1:
                self.verify_warm(entry)
                with WarmSegment(path, self.dictionaries) as opened:
                    dictionary_id = opened.dictionary_id
                self._record_compressed(entry, size_of(path) or 0, dictionary_id)
            else:
                self._check_file(entry, path)
                self.record(ManifestType.HydrationDone, entry, resident_bytes=entry.file_bytes)
        except (FormatError, FileNotFoundError) as exc:
            self.warn(f"{exc}: not the copy of segment {entry.segment_id} it is named for; left")

    def is_resident(self, entry: SegmentEntry) -> bool:
        """Whether Tier 0 has the segment, whole."""
        try:
            self._check_file(entry, self.tier0(entry))
        except (FormatError, FileNotFoundError):
            return False
        return True

    def _check_file(self, entry: SegmentEntry, path: str) -> None:
        check = segment_check(entry, path)
        for piece in pieces(path):
            check.feed(piece)
        check.done()

    def remove_unused_dictionaries(self) -> None:
        """Remove the dictionaries that no segment needs; the newest may serve the next."""
        needed = {entry.dictionary_id for entry in self.manifest.entries()}
        for dictionary_id in self.dictionaries.ids()[:-1]:
            if dictionary_id not in needed:
                remove(self.dictionaries.path(dictionary_id))


def _read_all(entry: SegmentEntry, path: str) -> None:
    """Look at each record's own crc. Errors: IntegrityError."""
    source = FileSource(path)
    try:
        for _ in read_records(source, entry.base_offset, entry.base_offset, entry.end_offset):
            pass
    finally:
        source.close()


def segment_check(entry: SegmentEntry, name: str) -> SegmentCheck:
    """What the bytes of a sealed segment have to be; ``name``: of what they are read from."""
    return SegmentCheck(name, entry.durable_bytes, entry.segment_crc64)
