"""Copies of a segment: the local ones (Tier 0 and Tier 1), and the objects of Tier 2.

A copy is durable and verified before the manifest says so, and the manifest forgets a copy before
its file is removed. So a crash leaves an extra file at most, never one too few; ``clean_up`` adds
it to the catalog again or removes it.

An object carries the data to verify it: size, the crc64 of its bytes and of the segment in it, and
the number of its records. Before an upload the store is asked for it (a crash may have come after
the object was complete), afterwards it is verified, and only then is it recorded.

    {stream_id:020d}/{segment_id:020d}.seg.zst           the Tier 1 file
    {stream_id:020d}/dict-{id:010d}.zdict                 of files that earlier versions made
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from relay.base import fsio
from relay.base.errors import FormatError, JournalError, ObjectConflict, ObjectError, ObjectMissing
from relay.journal import warm
from relay.journal.catalog import Residency, SegmentEntry
from relay.journal.files import (
    FETCHED,
    TEMP,
    NewFile,
    SegmentCheck,
    crc_of,
    numbered_files,
    pieces,
    remove,
    size_of,
)
from relay.journal.format import Footer, crc64
from relay.journal.manifest import Manifest
from relay.journal.manifest_format import MAX_ETAG_BYTES, Field, ManifestType, Reason
from relay.journal.objects import ObjectFacts, ObjectStore
from relay.journal.segment import (
    SEGMENT_SUFFIX,
    WARM,
    WARM_SUFFIX,
    FileSource,
    read_records,
    segment_path,
    warm_name,
    warm_path,
)
from relay.journal.warm import WarmSegment, dictionary_name, dictionary_of


class LocalCopies:
    """Tier 0 and Tier 1 of one stream. Used by one thread at a time, see Tiers."""

    def __init__(self, stream_dir: str, manifest: Manifest, warn: Callable[[str], object]) -> None:
        self.stream_dir = stream_dir
        self.manifest = manifest
        self.warn = warn
        self.folder = os.path.join(stream_dir, WARM)
        if not os.path.isdir(self.folder):
            fsio.ensure_dir(self.folder)
            fsio.sync_dir(stream_dir)

    def tier0(self, entry: SegmentEntry) -> str:
        """The path of the segment in Tier 0."""
        return segment_path(self.stream_dir, entry.segment_id)

    def tier1(self, entry: SegmentEntry) -> str:
        """The path of the compressed copy in Tier 1."""
        return warm_path(self.stream_dir, entry.segment_id)

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
        """Record a failure; if even that cannot be written, report the failure itself."""
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
            size = warm.compress(path, self.tier1(entry), segment_check(entry, path))
        except FileNotFoundError as exc:
            self.record_failure(failed, entry, reason_code=Reason.CODEC)
            raise FormatError(path, 0, f"{entry.file_bytes} bytes", "no such file") from exc
        except FormatError:
            self.record_failure(failed, entry, reason_code=Reason.CODEC)
            raise
        except OSError:
            self.record_failure(failed, entry, reason_code=Reason.TRANSIENT)
            raise
        self._record_compressed(entry, size)

    def _record_compressed(self, entry: SegmentEntry, size: int, dictionary_id: int = 0) -> None:
        kind = ManifestType.CompressionDone
        self.record(kind, entry, compressed_bytes=size, dictionary_id=dictionary_id)

    def verify_warm(self, entry: SegmentEntry) -> Footer:
        """Decompress the copy in Tier 1 and compare it with the catalog; the segment's footer.

        Errors: FormatError, IntegrityError, FileNotFoundError.
        """
        path = self.tier1(entry)
        with WarmSegment(path) as opened:
            return segment_check(entry, path).verify(opened.pieces())

    def restore(self, entry: SegmentEntry, source: str = "") -> None:
        """Write and verify Tier 0 from a compressed copy; nothing is recorded.

        Errors: FormatError, IntegrityError, FileNotFoundError, OSError.
        """
        source, target = source or self.tier1(entry), self.tier0(entry)
        check = segment_check(entry, source)
        with WarmSegment(source) as opened, NewFile(target) as file:
            for piece in opened.pieces():
                check.feed(piece)
                file.write(piece)
            check.done()
            file.sync()
            _read_all(entry, file.temp)
            file.commit()

    def evict(self, entry: SegmentEntry, tier: Residency) -> int:
        """Record the eviction of a local copy, then remove its file; its size.

        The caller has verified another copy.
        """
        path = self.tier0(entry) if tier is Residency.TIER0 else self.tier1(entry)
        size = entry.file_bytes if tier is Residency.TIER0 else entry.compressed_bytes
        self.record(ManifestType.LocalEvicted, entry, reclaimed_bytes=size)
        remove(path)
        return size

    def clean_up(self) -> None:
        """Handle files that a crash left and the manifest does not have.

        A good copy of a segment in the catalog is added again, a file of a pruned segment is
        removed, and any other file stays, with a warning.
        """
        entries = {entry.segment_id: entry for entry in self.manifest.entries()}
        oldest = min(entries, default=0)
        for path_of, suffix, tier in (
            (segment_path, SEGMENT_SUFFIX, Residency.TIER0),
            (warm_path, WARM_SUFFIX, Residency.TIER1),
        ):
            folder = os.path.dirname(path_of(self.stream_dir, 0))
            for name in os.listdir(folder):
                if name.endswith((TEMP, FETCHED)):  # left by a process that ended
                    remove(os.path.join(folder, name))
            for number in numbered_files(folder, suffix):
                path = path_of(self.stream_dir, number)
                entry = entries.get(number)
                if entry is None and number < oldest:
                    remove(path)
                elif entry is not None and entry.sealed and not entry.residency & tier:
                    self._adopt(entry, tier, path)

    def _adopt(self, entry: SegmentEntry, tier: Residency, path: str) -> None:
        try:
            if tier is Residency.TIER1:
                self.verify_warm(entry)
                with WarmSegment(path) as opened:
                    dictionary_id = opened.dictionary_id
                self._record_compressed(entry, size_of(path) or 0, dictionary_id)
            else:
                self._check_file(entry, path)
                self.record(ManifestType.HydrationDone, entry, resident_bytes=entry.file_bytes)
        except (FormatError, FileNotFoundError) as exc:
            self.warn(
                f"{exc}: not a copy of segment {entry.segment_id} as its name says; left unchanged"
            )

    def is_resident(self, entry: SegmentEntry) -> bool:
        """True if Tier 0 has the complete segment."""
        try:
            self._check_file(entry, self.tier0(entry))
        except (FormatError, FileNotFoundError):
            return False
        return True

    def _check_file(self, entry: SegmentEntry, path: str) -> None:
        segment_check(entry, path).verify(pieces(path))


def _read_all(entry: SegmentEntry, path: str) -> None:
    """Verify the crc of each record. Errors: IntegrityError."""
    source = FileSource(path)
    try:
        for _ in read_records(source, entry.base_offset, entry.base_offset, entry.end_offset):
            pass
    finally:
        source.close()


def segment_check(entry: SegmentEntry, name: str) -> SegmentCheck:
    """A check for the bytes of a sealed segment; ``name``: of the file they are read from."""
    return SegmentCheck(name, entry.durable_bytes, entry.segment_crc64)


CRC = "crc64"  # of the object's bytes; keys of its metadata
SEGMENT_CRC = "segment-crc64"
RECORDS = "records"


class RemoteCopies:
    """Tier 2 of one stream. Used by one thread at a time, see Tiers."""

    def __init__(self, copies: LocalCopies, objects: ObjectStore, stream_id: int) -> None:
        self.objects = objects
        self._copies = copies
        self._prefix = f"{stream_id:020d}"

    def key(self, entry: SegmentEntry) -> str:
        """The key of the segment's object."""
        return entry.key or f"{self._prefix}/{warm_name(entry.segment_id)}"

    def upload(self, entry: SegmentEntry) -> None:
        """Upload the compressed segment, and verify it by the store's metadata.

        Errors: ObjectError (recorded with its reason), FormatError when the Tier 1 file is
        damaged, OSError; both recorded as transient.
        """
        key, copies = self.key(entry), self._copies
        copies.record(ManifestType.UploadStarted, entry, key=key)
        try:
            footer = copies.verify_warm(entry)
            if entry.dictionary_id:
                self._put(*self._dictionary(entry.dictionary_id), {})
            etag = self._put(key, copies.tier1(entry), _metadata(entry, footer))
        except ObjectError as exc:
            kind = ManifestType.UploadFailed
            copies.record_failure(kind, entry, key=key, reason_code=exc.reason)
            raise
        except (FormatError, OSError):
            kind = ManifestType.UploadFailed
            copies.record_failure(kind, entry, key=key, reason_code=Reason.TRANSIENT)
            raise
        copies.record(ManifestType.UploadDone, entry, key=key, etag=etag)

    def verify(self, entry: SegmentEntry) -> None:
        """Verify that the store has the uploaded object. Errors: ObjectError."""
        key = self.key(entry)
        facts = self.objects.head(key)
        if facts is None:
            raise ObjectMissing(f"{self.objects.url}/{key}: no such object", Reason.MISSING)
        expected = {SEGMENT_CRC: f"{entry.segment_crc64:016x}", "etag": entry.etag}
        found = {SEGMENT_CRC: facts.metadata.get(SEGMENT_CRC), "etag": _etag(facts)}
        if expected != found:
            raise self._wrong(key, expected, found)

    def hydrate(self, entry: SegmentEntry) -> None:
        """Download the segment into Tier 0, and verify it. The caller records it.

        Errors: ObjectError, Reason.MISSING when the object is missing or another one; FormatError,
        OSError.
        """
        path = self.download(entry)
        try:
            self._copies.restore(entry, path)
        except FormatError as exc:
            raise self._wrong(self.key(entry), "the segment", str(exc)) from exc
        finally:
            remove(path)

    def download(self, entry: SegmentEntry) -> str:
        """Download the object and its dictionary, and verify its checksum; the path of the file.

        Errors: as ``hydrate``.
        """
        path = self._copies.tier1(entry) + FETCHED
        self._get(self.key(entry), path)
        try:
            needed = dictionary_of(path)
        except FormatError as exc:
            raise self._wrong(self.key(entry), "zstd frames", str(exc)) from exc
        if needed:
            key, dictionary = self._dictionary(needed)
            if not os.path.exists(dictionary):
                self._get(key, dictionary)
        return path

    def delete(self, entry: SegmentEntry) -> None:
        """Delete the segment's object; queued in the manifest before, recorded afterwards."""
        key = self.key(entry)
        if self._copies.manifest.catalog.deleting.get(entry.segment_id) != key:
            self._copies.record(ManifestType.Tier2DeleteQueued, entry, key=key)
        self.objects.delete(key)
        self._copies.record(ManifestType.Tier2Deleted, entry, key=key)

    def _dictionary(self, dictionary_id: int) -> tuple[str, str]:
        """Key and path of a dictionary that an earlier version compressed segments with."""
        name = dictionary_name(dictionary_id)
        return f"{self._prefix}/{name}", os.path.join(self._copies.folder, name)

    def _put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        """Upload a file unless it exists; the ETag. Errors: ObjectConflict for other content."""
        size = size_of(path) or 0
        metadata = metadata | {CRC: f"{crc_of(path):016x}"}
        facts = self.objects.head(key)
        if facts is None:
            try:
                self.objects.put(key, path, metadata)
            except ObjectConflict:
                pass  # an earlier attempt's object, or another one
            facts = self.objects.head(key)
        if facts is None:
            raise ObjectError(
                f"{self.objects.url}/{key}: uploaded, but HEAD does not find it", Reason.TRANSIENT
            )
        found = {name: facts.metadata.get(name) for name in metadata} | {"size": facts.size}
        if found != metadata | {"size": size}:
            expected = metadata | {"size": size}
            raise ObjectConflict(
                f"{self.objects.url}/{key}: expected {_text(expected)}, found {_text(found)}",
                Reason.AUTHENTICATION,  # the code for: the operator must act
            )
        return _etag(facts)

    def _get(self, key: str, path: str) -> None:
        """Download an object to ``path``, and verify size and checksum by its metadata."""
        facts, received = self.objects.get(key)
        with NewFile(path) as file:
            crc = 0
            for piece in received:
                file.write(piece)
                crc = crc64(piece, crc)
            expected = {"size": facts.size, CRC: facts.metadata.get(CRC)}
            found = {"size": file.size, CRC: f"{crc:016x}"}
            if found != expected:
                raise self._wrong(key, expected, found)
            file.commit()

    def _wrong(self, key: str, expected: object, found: object) -> ObjectError:
        text = f"{self.objects.url}/{key}: expected {_text(expected)}, found {_text(found)}"
        return ObjectMissing(text, Reason.MISSING)


def _metadata(entry: SegmentEntry, footer: Footer) -> dict[str, str]:
    return {SEGMENT_CRC: f"{entry.segment_crc64:016x}", RECORDS: str(footer.record_count)}


def _etag(facts: ObjectFacts) -> str:
    """The ETag, cut to what a snapshot has room for."""
    return facts.etag.encode()[:MAX_ETAG_BYTES].decode(errors="ignore")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return str(value)
