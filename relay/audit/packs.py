"""The files in a packed day of the archive, read at the speed of the rest of an audit.

``tarfile`` gives 19,000 members a second and a year has millions; this gives ten times as many of
the same. It knows what the relay writes, files by ustar headers with pax records for long names,
and refuses what it does not know: ``tar --zstd -t`` can still read that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import BinaryIO

from relay.base.errors import FormatError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 512
PIECE_BYTES = 1 << 20
_EXPECTED = "a tar packed with zstd"
_FILE, _PAX = (b"0", b"\0"), b"x"
_BLANKS = 8 * ord(" ")  # a header's sum is made with blanks in the place of the sum


def members(file: BinaryIO, path: str) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of each file in an open pack, in order. Errors: FormatError naming ``path``.

    A pack that is cut short, or of which any header is not as it was written, is an error once
    that place is reached.
    """
    source = _Source(file, path)
    long_name = ""
    while True:
        head = source.take(BLOCK)
        if not head.strip(b"\0"):
            return  # two empty blocks end it; what is behind them is filling
        size = _size_of(head, path, source.at)
        data = source.take(size)
        source.take(-size % BLOCK)
        kind = head[156:157]
        if kind == _PAX:
            long_name = _pax_path(data, path, source.at)
        elif kind in _FILE:
            yield long_name or _name_of(head), data
            long_name = ""
        else:
            raise FormatError(path, source.at, "files alone", f"a member of type {kind!r}")


class _Source:
    """The plain bytes of a pack."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._plain = zstd.ZstdFile(file)
        self._path = path
        self._piece, self._begin = b"", 0
        self.at = 0  # bytes taken

    def take(self, count: int) -> bytes:
        """The next so many. Errors: FormatError when there are fewer."""
        end = self._begin + count
        if end > len(self._piece):
            self._fill(count)
            end = count
        begin, self._begin = self._begin, end
        self.at += count
        return self._piece[begin:end]

    def _fill(self, count: int) -> None:
        pieces = [self._piece[self._begin :]]
        have = len(pieces[0])
        try:
            while have < count:
                more = self._plain.read(max(PIECE_BYTES, count - have))
                if not more:
                    raise FormatError(self._path, self.at + have, _EXPECTED, "its end")
                pieces.append(more)
                have += len(more)
        except (zstd.ZstdError, EOFError) as exc:
            raise FormatError(self._path, self.at + have, _EXPECTED, exc) from exc
        self._piece, self._begin = b"".join(pieces), 0


def _size_of(head: bytes, path: str, at: int) -> int:
    """The member's bytes, by a header that is as it was written."""
    try:
        told = int(head[148:156].rstrip(b"\0 "), 8)
        size = int(head[124:136].rstrip(b"\0 ") or b"0", 8)
    except ValueError as exc:
        raise FormatError(path, at - BLOCK, _EXPECTED, f"a header that is none: {exc}") from exc
    found = sum(head) - sum(head[148:156]) + _BLANKS
    if told != found or size < 0:
        raise FormatError(path, at - BLOCK, f"a header of sum {told}", found)
    return size


def _name_of(head: bytes) -> str:
    name, prefix = head[:100].rstrip(b"\0"), head[345:500].rstrip(b"\0")
    whole = prefix + b"/" + name if prefix else name
    return whole.decode(errors="surrogateescape")


def _pax_path(data: bytes, path: str, at: int) -> str:
    """The path in pax records, ``length key=value`` a line; empty where there is none."""
    begin = 0
    while begin < len(data):
        length, blank, _ = data[begin : begin + 20].partition(b" ")
        if not blank or not length.isdigit() or int(length) <= len(length) + 1:
            raise FormatError(path, at, "a pax record", data[begin : begin + 20])
        key, _, value = data[begin + len(length) + 1 : begin + int(length) - 1].partition(b"=")
        if key == b"path":
            return value.decode(errors="surrogateescape")
        begin += int(length)
    return ""
