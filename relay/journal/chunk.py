"""Chunks of the manifest: files of at most 256 KiB with a header that says what is committed.

A record counts once the header says so. The header's 64 bytes lie in one sector, which a disk
writes whole or not at all; the records may lie in other pages, and the pages of one sync reach
the disk in any order. So an append syncs twice, the records first: were the header to get there
alone, its crc would condemn the records that were committed before. Files are not zero-filled
ahead: a chunk ends with what was written last.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from relay.base import fsio
from relay.base.errors import FormatError, IntegrityError
from relay.journal.format import (
    CHUNK_CAPACITY,
    CHUNK_HEADER,
    MANIFEST_RECORD,
    ChunkFlag,
    ChunkHeader,
    ManifestRecord,
    crc64,
    decode_chunk_header,
    decode_manifest_record,
)

MANIFEST = "manifest"
FIRST_MANIFEST_RECORD = CHUNK_HEADER.size
ROOM = CHUNK_CAPACITY - FIRST_MANIFEST_RECORD
_NAME = re.compile(r"(0[0-9]{19})\.mlog")  # below 2^64, and so is the next
_MAX_BYTES = 64 << 20  # another writer's chunks may be larger than ours


class ManifestChunk(NamedTuple):
    """A chunk as it was read and verified."""

    header: ChunkHeader
    records: list[ManifestRecord]
    ends: list[int]  # where each record ends, from the start of the file
    torn_bytes: int  # behind committed_len, not all zero: an append that never returned


def chunk_path(stream_dir: str, index: int) -> str:
    """Where the chunk of that index is."""
    return os.path.join(stream_dir, MANIFEST, f"{index:020d}.mlog")


def chunk_indexes(stream_dir: str) -> list[int]:
    """The indexes of the chunks that are there, ascending; good or not."""
    try:
        names = os.listdir(os.path.join(stream_dir, MANIFEST))
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def load_chunk(path: str) -> bytes:
    """A chunk's bytes. Errors: OSError, UnsafePath."""
    return fsio.read_regular(path, None, _MAX_BYTES, shared=True)[0]


def decode_chunk(
    data: bytes, path: str, index: int, base_record: int | None = None
) -> ManifestChunk:
    """What a chunk's bytes say: header, index, base_record, chunk crc, and then each record.

    ``index``: what its name says; ``base_record``: what must stand in it, None for any.
    Errors: FormatError, VersionError, IntegrityError; then nothing of it may be used but what
    ``salvage`` gives.
    """
    header = decode_chunk_header(data, path)
    if header.chunk_index != index:
        raise FormatError(path, 16, f"chunk_index {index}", header.chunk_index)
    if base_record is not None and header.base_record != base_record:
        raise FormatError(path, 24, f"base_record {base_record}", header.base_record)
    end = header.committed_len
    if not FIRST_MANIFEST_RECORD <= end <= len(data):
        raise FormatError(
            path, 40, f"committed_len from {FIRST_MANIFEST_RECORD} to {len(data)}", end
        )
    if header.tail_offset < end:
        raise FormatError(path, 32, f"tail_offset of {end} and more", header.tail_offset)
    found = crc64(memoryview(data)[FIRST_MANIFEST_RECORD:end])
    if found != header.chunk_crc64:
        raise IntegrityError(path, 48, f"chunk crc64 {header.chunk_crc64:016x}", f"{found:016x}")
    records, ends, fault = _walk(data, end, path)
    if fault is not None:
        raise fault
    torn = len(data) - end if any(memoryview(data)[end:]) else 0
    return ManifestChunk(header, records, ends, torn)


def salvage_chunk(data: bytes, path: str) -> tuple[list[ManifestRecord], list[int]]:
    """The good records in front of the fault of a damaged chunk, and where each ends.

    A record's crc covers its payload; its header is covered by the chunk's crc alone. So where
    no record is bad by itself, the fault is in some header, nobody knows which, and none counts.
    """
    try:
        end = decode_chunk_header(data, path).committed_len
    except FormatError:
        return [], []
    end = end if FIRST_MANIFEST_RECORD <= end <= len(data) else len(data)
    records, ends, fault = _walk(data, end, path)
    return (records, ends) if fault is not None else ([], [])


def _walk(
    data: bytes, end: int, path: str
) -> tuple[list[ManifestRecord], list[int], FormatError | None]:
    """The records up to ``end`` or to the first fault."""
    records: list[ManifestRecord] = []
    ends: list[int] = []
    at = FIRST_MANIFEST_RECORD
    try:
        while at < end:
            record, at = decode_manifest_record(data, at, end, path)
            records.append(record)
            ends.append(at)
    except FormatError as exc:
        return records, ends, exc
    return records, ends, None


class ChunkFile:
    """The chunk that is being written. One owner; not safe for threads by itself.

    ``broken`` after a failed sync, or a failed write of the header: nobody knows what is on disk
    until the chunk is read again.
    """

    def __init__(self, path: str, header: ChunkHeader, records: int) -> None:
        self.path = path
        self.header = header
        self.next_record = header.base_record + records  # ordinal of the next
        self.broken = False
        self._fd = fsio.open_rw(path)

    @classmethod
    def create(cls, stream_dir: str, index: int, base_record: int) -> ChunkFile:
        """A new chunk without records; its file is there, whole, with its name durable."""
        path = chunk_path(stream_dir, index)
        header = ChunkHeader(
            index, base_record, FIRST_MANIFEST_RECORD, FIRST_MANIFEST_RECORD, crc64(b""), 0
        )
        fsio.write_atomic(path, header.encode())
        return cls(path, header, 0)

    @classmethod
    def resume(cls, stream_dir: str, chunk: ManifestChunk) -> ChunkFile:
        """Go on with a chunk that was read. What was torn behind committed_len goes: its append
        never returned. Another writer's tail may stand ahead of it: records follow what counts."""
        path = chunk_path(stream_dir, chunk.header.chunk_index)
        header = chunk.header._replace(tail_offset=chunk.header.committed_len)
        file = cls(path, header, len(chunk.records))
        if chunk.torn_bytes:
            fsio.truncate(file._fd, chunk.header.committed_len, path)
        return file

    @property
    def tail(self) -> int:
        """The first unwritten byte, from the start of the file."""
        return self.header.tail_offset

    @property
    def room(self) -> int:
        """Bytes that it can still take."""
        return 0 if self.header.flags & ChunkFlag.SEALED else CHUNK_CAPACITY - self.tail

    def append(self, data: bytes, records: int) -> None:
        """Commit ``records`` encoded records: when this returns, they are replayed.

        Errors: OSError; when it was the writing of the records, the chunk is as it was.
        """
        assert not self.broken and len(data) <= self.room
        fsio.write_at(self._fd, data, self.tail, self.path)
        end = self.tail + len(data)
        crc = crc64(data, self.header.chunk_crc64)
        self.broken = True
        fsio.sync_data(self._fd, self.path)
        self._write_header(
            self.header._replace(tail_offset=end, committed_len=end, chunk_crc64=crc)
        )
        self.next_record += records

    def seal(self) -> None:
        """Say in the header that no record follows. Errors: OSError, and then it is broken."""
        self._write_header(self.header._replace(flags=self.header.flags | ChunkFlag.SEALED))

    def _write_header(self, header: ChunkHeader) -> None:
        self.broken = True
        fsio.write_at(self._fd, header.encode(), 0, self.path)
        fsio.sync_data(self._fd, self.path)
        self.header = header
        self.broken = False

    def close(self) -> None:
        """Let go of the file. Everything that was appended is durable already."""
        os.close(self._fd)


def is_chunk_uploaded(stream_dir: str, index: int) -> bool:
    """Whether a chunk's header says that Tier 2 has it. Errors: OSError, FormatError."""
    path = chunk_path(stream_dir, index)
    return bool(decode_chunk_header(load_chunk(path), path).flags & ChunkFlag.UPLOADED)


def mark_chunk_uploaded(stream_dir: str, index: int) -> None:
    """Note in a sealed chunk's header that Tier 2 has it; durable on return.

    Errors: OSError, FormatError when the chunk is not a good sealed one.
    """
    path = chunk_path(stream_dir, index)
    header = decode_chunk(load_chunk(path), path, index).header
    if not header.flags & ChunkFlag.SEALED:
        raise FormatError(path, 56, "a sealed chunk", f"flags {header.flags}")
    fd = fsio.open_rw(path)
    try:
        flags = header.flags | ChunkFlag.UPLOADED
        fsio.write_at(fd, header._replace(flags=flags).encode(), 0, path)
        fsio.sync_data(fd, path)
    finally:
        os.close(fd)


assert ROOM > MANIFEST_RECORD.size + 2 * 0xFFFF + 4  # the largest record fits an empty chunk
