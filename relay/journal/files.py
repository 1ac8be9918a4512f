"""Complete files of the journal: written to a temporary name, and renamed when they are complete.

A file under its name is complete and durable; a crash leaves ``NAME.tmp``, which the next attempt
replaces. ``remove`` is durable when it returns.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from types import TracebackType

from relay.base import fsio
from relay.base.errors import FormatError, IntegrityError
from relay.journal.format import FOOTER, Footer, SegmentFlag, crc64

PIECE_BYTES = 1 << 20  # read and written at a time: no whole segment in memory
TEMP = ".tmp"
FETCHED = ".fetched"  # suffix of a download


class NewFile:
    """A file that appears under ``path``, complete, with ``commit``.

    A context manager: without a commit the file is removed at the end of the block.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.temp = path + TEMP
        self.size = 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temp)  # left by a crash
        self._fd = fsio.open_rw(self.temp, new=True)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd < 0:
            return
        self._close()
        # not on KeyboardInterrupt: behave like a killed process
        if error is None or isinstance(error, Exception):
            with contextlib.suppress(OSError):
                os.unlink(self.temp)

    def write(self, piece: bytes | memoryview) -> None:
        """Append a piece. Errors: OSError."""
        fsio.write_at(self._fd, piece, self.size, self.temp)
        self.size += len(piece)

    def sync(self) -> None:
        """Make the bytes durable under the temporary name, to be read back."""
        fsio.sync_data(self._fd, self.temp)

    def commit(self) -> None:
        """Rename the file, durably. Errors: OSError."""
        self.sync()
        folder = os.path.dirname(self.path)
        dir_fd = fsio.open_dir(folder)
        try:
            source, target = os.path.basename(self.temp), os.path.basename(self.path)
            fsio.rename(source, dir_fd, target, dir_fd)
        finally:
            os.close(dir_fd)
        self._close()
        fsio.sync_dir(folder)

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


class SegmentCheck:
    """Verifies that the pieces fed to it are the sealed segment in the catalog.

    ``name``: of the file, for errors, which are IntegrityError and FormatError.
    """

    def __init__(self, name: str, durable_bytes: int, segment_crc64: int) -> None:
        self.name = name
        self.durable_bytes = durable_bytes
        self.segment_crc64 = segment_crc64
        self.seen = 0
        self._crc = 0
        self._tail = b""  # the bytes after the records: the footer

    @property
    def file_bytes(self) -> int:
        """The size of the file: header, records, footer."""
        return self.durable_bytes + FOOTER.size

    def feed(self, piece: bytes | memoryview) -> None:
        """Add the next piece. Errors: FormatError as soon as there are too many bytes."""
        records = max(0, min(len(piece), self.durable_bytes - self.seen))
        if records:
            self._crc = crc64(memoryview(piece)[:records], self._crc)
        self._tail += bytes(memoryview(piece)[records:][: FOOTER.size + 1])
        self.seen += len(piece)
        if self.seen > self.file_bytes:
            raise FormatError(
                self.name, self.file_bytes, "the end", f"{self.seen - self.file_bytes} bytes more"
            )

    def verify(self, pieces: Iterable[bytes]) -> Footer:
        """The footer, after feeding all pieces. Errors: as ``done``."""
        for piece in pieces:
            self.feed(piece)
        return self.done()

    def done(self) -> Footer:
        """The footer, after all pieces were fed. Errors: FormatError, IntegrityError."""
        if self.seen != self.file_bytes:
            raise FormatError(self.name, self.seen, f"{self.file_bytes} bytes", f"{self.seen}")
        if self._crc != self.segment_crc64:
            expected = f"crc64 {self.segment_crc64:016x}"
            raise IntegrityError(self.name, 0, expected, f"{self._crc:016x}")
        footer = Footer(*FOOTER.unpack(self._tail))
        wanted = (self.durable_bytes, self.segment_crc64)
        found = (footer.durable_bytes, footer.segment_crc64)
        if found != wanted or not footer.flags & SegmentFlag.SEALED:
            raise IntegrityError(self.name, self.durable_bytes, f"footer {wanted}", found)
        return footer


def remove(path: str) -> None:
    """Remove a file, durably; a missing one is ignored. Errors: OSError."""
    folder = os.path.dirname(path)
    fsio.fault("remove", path)
    dir_fd = fsio.open_dir(folder)
    try:
        fsio.remove(os.path.basename(path), dir_fd)
    finally:
        os.close(dir_fd)
    fsio.sync_dir(folder)


def numbered_files(folder: str, suffix: str) -> list[int]:
    """The numbers of the files of 20 digits and ``suffix``, ascending; none without a folder."""
    pattern = re.compile(rf"(0[0-9]{{19}}){re.escape(suffix)}")  # below 2^64, and so is the next
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))


def pieces(path: str, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """The bytes of a file, a piece at a time."""
    fd = fsio.open_read(path)
    try:
        at = 0
        while piece := os.pread(fd, size, at):
            yield piece
            at += len(piece)
    finally:
        os.close(fd)


def crc_of(path: str) -> int:
    """The crc64 of a file's bytes."""
    crc = 0
    for piece in pieces(path):
        crc = crc64(piece, crc)
    return crc


def size_of(path: str) -> int | None:
    """The size of the file; None if it does not exist."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
