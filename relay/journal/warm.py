"""Tier 1: a sealed segment as zstd frames of at most 64 KiB each, and their dictionaries.

One record is read by decompressing one or two frames. No index is needed: each frame's header has
its length, and walking the frames of 64 MiB takes some ten milliseconds, once per file. Each frame
has its size and a checksum. A segment counts as compressed once the file was read back and equals
the segment, byte for byte.

    warm/{segment_id:020d}.seg.zst     frame · frame · …   (`zstd -d` decompresses it)
    warm/dict-{id:010d}.zdict          where one makes the files smaller   (`zstd -d -D`)

A dictionary is trained from one segment, never changed or overwritten, and kept while a segment
needs it; its id is in each frame that was compressed with it.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
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

DICTIONARY_BYTES = 64 << 10  # a larger one has no measurable gain on frames of 64 KiB
SAMPLE_BYTES = 4 << 10  # of records as they are in the segment, headers included
MIN_GAIN = 0.03  # of the file's size, to justify one more file

_NAME = re.compile(r"dict-([0-9]{10})\.zdict")


def dictionary_name(dictionary_id: int) -> str:
    """``dict-0123456789.zdict``."""
    return f"dict-{dictionary_id:010d}.zdict"


class Dictionaries:
    """The dictionaries of one ``warm`` folder, loaded on first use."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._loaded: dict[int, zstd.ZstdDict] = {}

    def path(self, dictionary_id: int) -> str:
        """The path of a dictionary."""
        return os.path.join(self.folder, dictionary_name(dictionary_id))

    def ids(self) -> list[int]:
        """The ids of the existing dictionaries; the newest last."""
        with os.scandir(self.folder) as entries:
            found = [
                (entry.stat().st_mtime_ns, int(match[1]))
                for entry in entries
                if (match := _NAME.fullmatch(entry.name))
            ]
        return [dictionary_id for _, dictionary_id in sorted(found)]

    def get(self, dictionary_id: int, needed_by: str) -> zstd.ZstdDict:
        """Load a dictionary; ``needed_by``: the file that refers to it.

        Errors: FormatError when it is missing, damaged, or another one.
        """
        known = self._loaded.get(dictionary_id)
        if known is not None:
            return known
        path = self.path(dictionary_id)
        try:
            content = b"".join(pieces(path))
        except FileNotFoundError:
            expected = f"its dictionary {dictionary_id} as {path}"
            raise FormatError(needed_by, 0, expected, "no such file") from None
        loaded = decode_dictionary(content, path)
        if loaded.dict_id != dictionary_id:
            raise FormatError(path, 4, f"dictionary {dictionary_id}", loaded.dict_id)
        self._loaded[dictionary_id] = loaded
        return loaded

    def add(self, dictionary: zstd.ZstdDict) -> None:
        """Store a new dictionary, durably, before a segment uses it."""
        if dictionary.dict_id not in self._loaded:
            with NewFile(self.path(dictionary.dict_id)) as file:
                file.write(dictionary.dict_content)
                file.commit()
            self._loaded[dictionary.dict_id] = dictionary

    def newest(self) -> zstd.ZstdDict | None:
        """The newest dictionary, which most likely fits the next segment.

        None if there is none, or it is damaged, which its users will report.
        """
        ids = self.ids()
        try:
            return self.get(ids[-1], self.folder) if ids else None
        except FormatError:
            return None


def decode_dictionary(content: bytes, path: str) -> zstd.ZstdDict:
    """Decode the bytes of a dictionary's file. Errors: FormatError."""
    try:
        return zstd.ZstdDict(content)
    except ValueError as exc:
        raise FormatError(path, 0, "a zstd dictionary", str(exc)) from exc


def train_dictionary(samples: Sequence[bytes]) -> zstd.ZstdDict | None:
    """Train a dictionary with the samples; None if they are too few."""
    try:
        return zstd.train_dict(samples, DICTIONARY_BYTES)
    except (zstd.ZstdError, ValueError):
        return None


FRAME_BYTES = 64 << 10  # of the segment: decompressed to read one record
LEVEL = 3
_OPTIONS = {
    int(zstd.CompressionParameter.compression_level): LEVEL,
    int(zstd.CompressionParameter.checksum_flag): 1,
}
_WINDOW_BYTES = 1 << 20  # read at a time to walk the frames
_MAX_FRAME_BYTES = FRAME_BYTES + 1024  # of an incompressible frame, with its headers
_PROBES = 64  # frames sampled to decide about a dictionary
_MIN_BYTES = 1 << 20  # a smaller segment is not worth a dictionary


def compress(source: str, target: str, check: SegmentCheck, known: Dictionaries) -> tuple[int, int]:
    """Compress the sealed segment ``source`` to ``target``; durable and verified on return.

    Returns the bytes of the file, and the id of its dictionary; 0: none.
    ``check`` verifies the source; the written file is read back and verified, too, before it gets
    its name. Errors: FormatError and IntegrityError when the source is damaged (with
    ``check.name``), OSError.
    """
    dictionary = _choose_dictionary(source, known)
    again = SegmentCheck(target, check.durable_bytes, check.segment_crc64)
    with NewFile(target) as file:
        for frame in _frames(source, check, dictionary):
            file.write(frame)
        check.done()
        file.sync()
        with WarmSegment(file.temp, known) as written:
            again.verify(written.pieces())
        file.commit()
        return file.size, dictionary.dict_id if dictionary else 0


class WarmSegment:
    """A segment of Tier 1, read in place; positions are those of the uncompressed file."""

    def __init__(self, path: str, known: Dictionaries) -> None:
        """Open it and find its frames. Errors: FormatError, OSError."""
        self.path = path
        self._fd = fsio.open_read(path)
        try:
            self._starts, self._at, self.dictionary_id = _walk(self._fd, path)
            self._dictionary = known.get(self.dictionary_id, path) if self.dictionary_id else None
        except BaseException:
            os.close(self._fd)
            raise
        self._last = (-1, b"")  # the last decompressed frame, as reads are sequential

    @staticmethod
    def dictionary_of(path: str) -> int:
        """The id of the dictionary that a file needs, 0 for none.

        Errors: FormatError, OSError.
        """
        fd = fsio.open_read(path)
        try:
            return _walk(fd, path)[2]
        finally:
            os.close(fd)

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


def _frames(source: str, check: SegmentCheck, dictionary: zstd.ZstdDict | None) -> Iterator[bytes]:
    """The segment's bytes as frames, each checked before it is compressed."""
    compressor = _compressor(dictionary)
    for piece in pieces(source, FRAME_BYTES):
        check.feed(piece)
        yield compressor.compress(piece, compressor.FLUSH_FRAME)


def _compressor(dictionary: zstd.ZstdDict | None) -> zstd.ZstdCompressor:
    if dictionary is None:
        return zstd.ZstdCompressor(options=_OPTIONS)
    return zstd.ZstdCompressor(options=_OPTIONS, zstd_dict=dictionary.as_digested_dict)


def _choose_dictionary(source: str, known: Dictionaries) -> zstd.ZstdDict | None:
    """The dictionary that saves space: the newest one, which costs nothing, else a new one.

    Decided on sampled frames, so that the segment is compressed only once.
    """
    fd = fsio.open_read(source)
    try:
        size = os.fstat(fd).st_size
        if size < _MIN_BYTES:
            return None
        step = max(FRAME_BYTES, size // _PROBES)
        probes = [os.pread(fd, FRAME_BYTES, at) for at in range(0, size, step)]
    finally:
        os.close(fd)
    plain = _total(probes, None)
    newest = known.newest()
    if newest is not None and _total(probes, newest) <= plain * (1 - MIN_GAIN):
        return newest
    learned = train_dictionary([s for probe in probes for s in _samples(probe)])
    if learned is None:
        return None
    scale = size / sum(map(len, probes))
    saved = (plain - _total(probes, learned)) * scale - len(learned.dict_content)
    if saved < plain * scale * MIN_GAIN:
        return None
    known.add(learned)
    return learned


def _samples(probe: bytes) -> Iterator[bytes]:
    """A quarter of a frame for training; the rest tests the dictionary on other data."""
    for at in range(0, len(probe), 4 * SAMPLE_BYTES):
        yield probe[at : at + SAMPLE_BYTES]


def _total(probes: list[bytes], dictionary: zstd.ZstdDict | None) -> int:
    compressor = _compressor(dictionary)
    return sum(len(compressor.compress(probe, compressor.FLUSH_FRAME)) for probe in probes)


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
