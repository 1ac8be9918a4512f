"""The gzip envelope of sections 2, 5 and 6: uncompressed_size u64, then one gzip stream.

Same bytes in, same bytes out: level 6, mtime 0, no file name. Reading never holds more than
uncompressed_size bytes of output and one, whatever the stream would make of itself. Where that is
much more than the stream, what comes out is looked at piece by piece first: a bomb that holds no
records is refused before there is room made for it, and one that the memory has no room for, too.
Source: FORMATS section 2, "Envelope".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import deflate
from isal import igzip_lib

from relay.acomm.container import MAX_FILE_BYTES
from relay.acomm.reader import U64, Reader

GZIP_LEVEL = 6
# No DEFLATE stream grows by more: a 258 byte match takes at least two bits.
MAX_RATIO = 1032
# Text becomes a tenth; what is larger and becomes less is looked at before it is inflated whole.
LARGE_BYTES = 64 << 20
LARGE_RATIO = 32
FIRST_FEED_BYTES = 4096
MAX_FEED_BYTES = 1_048_576

# Its stubs declare it as a value.
_IsalError: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]


def pack(raw: bytes) -> bytes:
    """The envelope around ``raw``."""
    return U64.pack(len(raw)) + bytes(deflate.gzip_compress(raw, GZIP_LEVEL))


Walk = Callable[[Iterator[bytes], str], None]  # the pieces, and of what they are


def unpack(reader: Reader, name: str, walk: Walk | None = None) -> Reader:
    """A reader of what the envelope holds; its faults count offsets in the uncompressed bytes.

    Several gzip members back to back are one stream. ``walk`` is given the pieces of a large one
    that is suspiciously small, before it is inflated whole; what it raises is the answer.
    Errors: FormatError for a size that the stream cannot have or has not, or that the memory has
    no room for, and for bytes that are no gzip.
    """
    start = reader.pos
    size = reader.u64("uncompressed_size")
    most = min(MAX_FILE_BYTES, (reader.end - reader.pos) * MAX_RATIO)
    if size > most:
        raise reader.fault(start, f"uncompressed_size of at most {most} in {name}", size)
    where = f" in {name}, offset in its uncompressed bytes"
    if size > LARGE_BYTES and size > LARGE_RATIO * (reader.end - reader.pos):
        _check_room(reader, start, size, name)
        if walk is not None:
            walk(_pieces(Reader(reader.data, reader.path, reader.pos, reader.end), name), where)
    raw = _gunzip(reader, size, name)
    if len(raw) != size:
        found = "more bytes" if len(raw) > size else f"{len(raw)} bytes"
        raise reader.fault(start, f"uncompressed_size {size} of {name}", f"{found} come out")
    return Reader(raw, reader.path, where=where)


def _check_room(reader: Reader, start: int, size: int, name: str) -> None:
    import psutil  # here: no ordinary store needs it

    available = psutil.virtual_memory().available
    if size > available:
        expected = f"uncompressed_size of at most {available} in {name}, which memory has room for"
        raise reader.fault(start, expected, size)


def _pieces(reader: Reader, name: str) -> Iterator[bytes]:
    """Inflate in pieces of at most ``MAX_FEED_BYTES``; none is kept."""
    view = memoryview(reader.data)
    while reader.pos < reader.end:
        start = reader.pos
        stream = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        while not stream.eof and (reader.pos < reader.end or not stream.needs_input):
            piece = view[reader.pos : min(reader.pos + FIRST_FEED_BYTES, reader.end)]
            if not stream.needs_input:
                piece = view[:0]
            try:
                part = stream.decompress(piece, MAX_FEED_BYTES)
            except _IsalError as exc:
                raise reader.fault(start, f"a gzip stream in {name}", exc) from None
            reader.pos += len(piece)
            if part:
                yield part
        if not stream.eof:
            return  # whoever inflates it whole says so
        reader.pos -= len(stream.unused_data)


def _gunzip(reader: Reader, size: int, name: str) -> bytes:
    """What the gzip members give, cut off at ``size`` + 1 bytes."""
    whole = bytearray()
    # Nearly always there is one member: it is given everything, and its bytes are not copied.
    feed = reader.end - reader.pos
    while reader.pos < reader.end and len(whole) <= size:
        start = reader.pos
        try:
            part, ended = _gunzip_member(reader, size + 1 - len(whole), feed)
        except _IsalError as exc:
            raise reader.fault(start, f"a gzip stream in {name}", exc) from None
        if not ended and len(whole) + len(part) <= size:
            raise reader.fault(reader.end, f"the end of the gzip stream in {name}", "nothing")
        if not whole and reader.pos == reader.end:
            return part
        whole += part
        feed = FIRST_FEED_BYTES
    return bytes(whole)


def _gunzip_member(reader: Reader, limit: int, feed: int) -> tuple[bytes, bool]:
    """One member's bytes, up to ``limit``; True when its end was reached."""
    stream = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    view = memoryview(reader.data)
    parts: list[bytes] = []
    # Small pieces: what lies behind a member's end is copied, and members may be many.
    while reader.pos < reader.end and limit:
        piece = view[reader.pos : min(reader.pos + feed, reader.end)]
        parts.append(stream.decompress(piece, limit))
        limit -= len(parts[-1])
        reader.pos += len(piece)
        if stream.eof:
            reader.pos -= len(stream.unused_data)
            break
        feed = min(feed * 2, MAX_FEED_BYTES)
    return parts[0] if len(parts) == 1 else b"".join(parts), stream.eof
