"""Between the local tiers and the object store: up, down, and out of it.

An object carries what proves it: size, the crc64 of its bytes, that of the segment in it, and the
count of its records. It is looked for before it is sent (an upload that a crash cut off after the
object was there is not done again), and looked at afterwards, and only then the manifest says so.

    {stream_id:020d}/{segment_id:020d}.seg.zst           the Tier 1 file
    {stream_id:020d}/dict-{id:010d}.zdict                 before the first segment that needs it;
                                                          never deleted: objects name it, nobody
                                                          keeps count of them, and it is small
    {stream_id:020d}/manifest/{chunk_index:020d}.mlog     sealed, and before two snapshots
"""

from __future__ import annotations

import os

from relay.base.errors import FormatError, ObjectConflict, ObjectError, ObjectMissing
from relay.journal import chunk as chunks
from relay.journal.catalog import SegmentEntry
from relay.journal.copies import LocalCopies
from relay.journal.dictionaries import decode_dictionary, dictionary_name
from relay.journal.files import FETCHED, NewFile, pieces, remove, size_of
from relay.journal.format import MAX_ETAG_BYTES, Footer, ManifestType, Reason, crc64
from relay.journal.objects import ObjectFacts, ObjectStore
from relay.journal.warm import WarmSegment, warm_name

CRC = "crc64"  # of the object's bytes; names of metadata
SEGMENT_CRC = "segment-crc64"
RECORDS = "records"


class RemoteCopies:
    """Tier 2 of one stream. Used by one thread at a time: see Tiers."""

    def __init__(self, copies: LocalCopies, objects: ObjectStore, stream_id: int) -> None:
        self.objects = objects
        self._copies = copies
        self._prefix = f"{stream_id:020d}"

    def key(self, entry: SegmentEntry) -> str:
        """Where the segment's object is, or would be."""
        return entry.key or f"{self._prefix}/{warm_name(entry.segment_id)}"

    def upload(self, entry: SegmentEntry) -> None:
        """Tier 2 has the compressed segment, as far as the store can tell, when this returns.

        Errors: ObjectError (noted with its reason), FormatError when the Tier 1 file is damaged,
        OSError; both noted as transient.
        """
        key, copies = self.key(entry), self._copies
        copies.record(ManifestType.UploadStarted, entry, key=key)
        try:
            footer = copies.verify_warm(entry)
            if entry.dictionary_id:
                path = copies.dictionaries.path(entry.dictionary_id)
                self._put(self._dictionary_key(entry.dictionary_id), path, {})
            etag = self._put(key, copies.tier1(entry), _proofs(entry, footer))
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
        """Ask the store whether it has the object that was uploaded. Errors: ObjectError."""
        key = self.key(entry)
        facts = self.objects.head(key)
        if facts is None:
            raise self._missing(key)
        expected = {SEGMENT_CRC: f"{entry.segment_crc64:016x}", "etag": entry.etag}
        found = {SEGMENT_CRC: facts.metadata.get(SEGMENT_CRC), "etag": _etag(facts)}
        if expected != found:
            raise self._wrong(key, expected, found)

    def hydrate(self, entry: SegmentEntry) -> None:
        """Download the segment into Tier 0, proved. The manifest is told by the caller.

        Errors: ObjectError, Reason.MISSING when the object is not there or not the segment;
        FormatError, OSError.
        """
        path = self.download(entry)
        try:
            self._copies.restore(entry, path)
        except FormatError as exc:
            raise self._wrong(self.key(entry), "the segment", str(exc)) from exc
        finally:
            remove(path)

    def download(self, entry: SegmentEntry) -> str:
        """The object as a file, its checksum proved, and the dictionary that it needs: its path.

        Errors: as ``hydrate``.
        """
        path = self._copies.tier1(entry) + FETCHED
        self._get(self.key(entry), path)
        try:
            needed = WarmSegment.dictionary_of(path)
            if needed:
                self._get_dictionary(needed)
        except FormatError as exc:
            raise self._wrong(self.key(entry), "zstd frames", str(exc)) from exc
        return path

    def delete(self, entry: SegmentEntry) -> None:
        """Remove the segment's object: queued in the manifest first, and done there afterwards."""
        key = self.key(entry)
        if self._copies.manifest.catalog.deleting.get(entry.segment_id) != key:
            self._copies.record(ManifestType.Tier2DeleteQueued, entry, key=key)
        self.objects.delete(key)
        self._copies.record(ManifestType.Tier2Deleted, entry, key=key)

    def chunks_to_upload(self) -> list[int]:
        """Manifest chunks that no replay needs and Tier 2 has not."""
        manifest = self._copies.manifest
        return [
            i for i in manifest.redundant_chunks() if not chunks.is_chunk_uploaded(self._dir, i)
        ]

    def upload_chunk(self, index: int) -> None:
        """Tier 2 has a chunk of the manifest, and its header says so. Errors: as ``upload``."""
        path = chunks.chunk_path(self._dir, index)
        self._put(f"{self._prefix}/manifest/{index:020d}.mlog", path, {})
        self._copies.manifest.mark_uploaded(index)

    @property
    def _dir(self) -> str:
        return self._copies.stream_dir

    def _dictionary_key(self, dictionary_id: int) -> str:
        return f"{self._prefix}/{dictionary_name(dictionary_id)}"

    def _put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        """Send a file unless it is there; the ETag. Errors: ObjectConflict for other content."""
        size, crc = size_of(path) or 0, 0
        for piece in pieces(path):
            crc = crc64(piece, crc)
        metadata = metadata | {CRC: f"{crc:016x}"}
        facts = self.objects.head(key)
        if facts is None:
            try:
                self.objects.put(key, path, metadata)
            except ObjectConflict:
                pass  # an answer that was lost on its way: who is it?
            facts = self.objects.head(key)
        if facts is None:
            raise ObjectError(f"{self.objects.url}/{key}: put, and not there", Reason.TRANSIENT)
        found = {name: facts.metadata.get(name) for name in metadata} | {"size": facts.size}
        if found != metadata | {"size": size}:
            expected = metadata | {"size": size}
            raise ObjectConflict(
                f"{self.objects.url}/{key}: expected {_words(expected)}, found {_words(found)}",
                Reason.AUTHENTICATION,  # the one code that says: an operator has to act
            )
        return _etag(facts)

    def _get(self, key: str, path: str) -> None:
        """Download an object to ``path`` whole, its size and checksum as its metadata say."""
        download = self.objects.get(key)
        with NewFile(path) as file:
            crc = 0
            for piece in download.pieces:
                file.write(piece)
                crc = crc64(piece, crc)
            expected = {"size": download.facts.size, CRC: download.facts.metadata.get(CRC)}
            found = {"size": file.size, CRC: f"{crc:016x}"}
            if found != expected:
                raise self._wrong(key, expected, found)
            file.commit()

    def _get_dictionary(self, dictionary_id: int) -> None:
        path = self._copies.dictionaries.path(dictionary_id)
        if os.path.exists(path):
            return
        fetched = path + FETCHED
        self._get(self._dictionary_key(dictionary_id), fetched)
        try:
            self._copies.dictionaries.add(decode_dictionary(b"".join(pieces(fetched)), fetched))
        finally:
            remove(fetched)

    def _missing(self, key: str) -> ObjectError:
        return ObjectMissing(f"{self.objects.url}/{key}: no such object", Reason.MISSING)

    def _wrong(self, key: str, expected: object, found: object) -> ObjectError:
        text = f"{self.objects.url}/{key}: expected {_words(expected)}, found {_words(found)}"
        return ObjectMissing(text, Reason.MISSING)


def _proofs(entry: SegmentEntry, footer: Footer) -> dict[str, str]:
    return {SEGMENT_CRC: f"{entry.segment_crc64:016x}", RECORDS: str(footer.record_count)}


def _etag(facts: ObjectFacts) -> str:
    """What the manifest has room for."""
    return facts.etag.encode()[:MAX_ETAG_BYTES].decode(errors="ignore")


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {told}" for name, told in value.items())
    return str(value)
