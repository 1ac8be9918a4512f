"""Tier 1: a sealed segment as zstd frames of at most 64 KiB each.

One record is read by decompressing one or two frames. No index is needed: each frame's header has
its length, and walking the frames of 64 MiB takes some ten milliseconds, once per file. Each frame
has its size and a checksum. A segment counts as compressed once the file was read back and equals
the segment, byte for byte.

    warm/{segment_id:020d}.seg.zst     frame · frame · …   (`zstd -d` decompresses it)
    warm/dict-{id:010d}.zdict          of files that earlier versions made   (`zstd -d -D`)
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from relay.base import fsio
from relay.base.errors import FormatError, IntegrityError
from relay.journal.files import NewFile, SegmentCheck, pieces

if TYPE_CHECKING:
    from backports import zstd
else:
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd

FRAME_BYTES = 64 << 10  # of the segment: decompressed to read one record
LEVEL = 3
_OPTIONS = {
    int(zstd.CompressionParameter.compression_level): LEVEL,
    int(zstd.CompressionParameter.checksum_flag): 1,
}
_WINDOW_BYTES = 1 << 20  # read at a time to walk the frames
_MAX_FRAME_BYTES = FRAME_BYTES + 1024  # of an incompressible frame, with its headers


def dictionary_name(dictionary_id: int) -> str:
    """``dict-0123456789.zdict``."""
    return f"dict-{dictionary_id:010d}.zdict"


def dictionary_of(path: str) -> int:
    """The id of the dictionary that a compressed file needs, 0 for none.

    Errors: FormatError, OSError.
    """
    fd = fsio.open_read(path)
    try:
        return _walk(fd, path)[2]
    finally:
        os.close(fd)


def _load_dictionary(dictionary_id: int, needed_by: str) -> zstd.ZstdDict:
    """The dictionary of a file, from the same folder.

    Errors: FormatError when it is missing, damaged, or another one.
    """
    path = os.path.join(os.path.dirname(needed_by), dictionary_name(dictionary_id))
    try:
        loaded = zstd.ZstdDict(b"".join(pieces(path)))
    except FileNotFoundError:
        expected = f"its dictionary {dictionary_id} as {path}"
        raise FormatError(needed_by, 0, expected, "no such file") from None
    except ValueError as exc:
        raise FormatError(path, 0, "a zstd dictionary", str(exc)) from exc
    if loaded.dict_id != dictionary_id:
        raise FormatError(path, 4, f"dictionary {dictionary_id}", loaded.dict_id)
    return loaded


def compress(source: str, target: str, check: SegmentCheck) -> int:
    """Compress the sealed segment ``source`` to ``target``, durable and verified on return; the
    bytes of the new file.

    ``check`` verifies the source; the written file is read back and verified, too, before it gets
    its name. Errors: FormatError and IntegrityError when the source is damaged (with
    ``check.name``), OSError.
    """
    again = SegmentCheck(target, check.durable_bytes, check.segment_crc64)
    compressor = zstd.ZstdCompressor(options=_OPTIONS)
    with NewFile(target) as file:
        for piece in pieces(source, FRAME_BYTES):
            check.feed(piece)
            file.write(compressor.compress(piece, compressor.FLUSH_FRAME))
        check.done()
        file.sync()
        with WarmSegment(file.temp) as written:
            again.verify(written.pieces())
        file.commit()
        return file.size


class WarmSegment:
    """A segment of Tier 1, read in place; positions are those of the uncompressed file."""

    def __init__(self, path: str) -> None:
        """Open it and find its frames. Errors: FormatError, OSError."""
        self.path = path
        self._fd = fsio.open_read(path)
        try:
            self._starts, self._at, self.dictionary_id = _walk(self._fd, path)
            number = self.dictionary_id
            self._dictionary = _load_dictionary(number, path) if number else None
        except BaseException:
            os.close(self._fd)
            raise
        self._last = (-1, b"")  # the last decompressed frame, as reads are sequential

    def __enter__(self) -> WarmSegment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def size(self) -> int:
        """The size of the uncompressed file."""
        return self._starts[-1]

    def read_at(self, position: int, length: int) -> bytes:
        """``length`` bytes of the segment from ``position``, fewer at its end.

        Decompresses only the frames needed. Errors: IntegrityError.
        """
        end = min(position + length, self.size)
        if position >= end:
            return b""
        number = bisect_right(self._starts, position) - 1
        out = []
        while self._starts[number] < end:
            begin = self._starts[number]
            out.append(self._frame(number)[max(0, position - begin) : end - begin])
            number += 1
        return b"".join(out)

    def pieces(self) -> Iterator[bytes]:
        """The whole segment, a frame at a time."""
        for number in range(len(self._at) - 1):
            yield self._frame(number)

    def _frame(self, number: int) -> bytes:
        if self._last[0] == number:
            return self._last[1]
        at, end = self._at[number], self._at[number + 1]
        wanted = self._starts[number + 1] - self._starts[number]
        try:
            data = zstd.decompress(os.pread(self._fd, end - at, at), zstd_dict=self._dictionary)
        except zstd.ZstdError as exc:
            raise IntegrityError(self.path, at, "a whole zstd frame", str(exc)) from exc
        if len(data) != wanted:
            raise IntegrityError(self.path, at, f"{wanted} bytes in the frame", len(data))
        self._last = (number, data)
        return data


def _walk(fd: int, path: str) -> tuple[list[int], list[int], int]:
    """The positions of the frames in the segment and in the file, with the ends; dictionary id.

    Errors: FormatError for anything but frames with a size of at most 64 KiB.
    """
    starts, offsets, dictionaries = [0], [0], set()
    total = os.fstat(fd).st_size
    window, base = b"", 0
    while (at := offsets[-1]) < total:
        if at + _MAX_FRAME_BYTES > base + len(window):
            window, base = os.pread(fd, _WINDOW_BYTES, at), at
        rest = memoryview(window)[at - base :][:_MAX_FRAME_BYTES]
        try:
            info = zstd.get_frame_info(rest)
            length = zstd.get_frame_size(rest)
        except zstd.ZstdError as exc:
            raise FormatError(path, at, "a whole zstd frame", str(exc)) from exc
        if not info.decompressed_size or info.decompressed_size > FRAME_BYTES:
            expected = f"a frame of 1 to {FRAME_BYTES} bytes"
            raise FormatError(path, at, expected, info.decompressed_size)
        starts.append(starts[-1] + info.decompressed_size)
        offsets.append(at + length)
        dictionaries.add(info.dictionary_id)
    if len(dictionaries) > 1:
        raise FormatError(path, 0, "one dictionary for all frames", sorted(dictionaries))
    return starts, offsets, dictionaries.pop() if dictionaries else 0
