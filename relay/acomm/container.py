"""The frame of an `.acomm` file: header, section table, footer, and the gzip envelope of sections.

    0   header, 96 bytes
    96  section table, 24 bytes an entry
        sections, at the offsets in the table
    -40 footer: SHA-256 of every byte before it, magic

The order of the checks is fixed: another format, size, footer magic, SHA-256, header magic,
version, total_size, section table. Each failure is a FormatError that names file, offset, the
expected and the actual value. A new version gets its own number and reader; this one stays
as long as files of version 1 may exist.

Sections 2, 5 and 6 of a COMPRESSED file are in an envelope: uncompressed_size u64, then one gzip
stream (level 6, mtime 0, no file name: equal bytes give equal envelopes). Reading never holds more
than uncompressed_size bytes of output plus one. A large stream with a high ratio is first inflated
piece by piece, so a bomb without records is refused before memory is allocated for it. See
docs/formats/acomm.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum, IntFlag
from itertools import pairwise
from struct import Struct

import deflate
import msgspec
from isal import igzip_lib

from relay.acomm.fields import U64, Reader, shown
from relay.base.errors import FormatError, IntegrityError, VersionError

MAGIC = b"ACOMM001"
FOOTER_MAGIC = b"ACEND001"
# Another format that shares four letters; its fifth byte is a version number.
OTHER_MAGIC = b"ACOM"
VERSION = 1
MAX_FILE_BYTES = 2_147_483_648

# magic, version, flags, section_count, channel_count, message_count, subscription_count,
# dead_letter_count, created_at, modified_at, total_size, reserved
HEADER = Struct("<8sHIHQQQQQQQ24s")
assert HEADER.size == 96
# type, flags, offset, length
SECTION = Struct("<IIQQ")
assert SECTION.size == 24
# SHA-256, magic
FOOTER = Struct("<32s8s")
assert FOOTER.size == 40

VERSION_AT, SECTION_COUNT_AT, TOTAL_SIZE_AT = 8, 14, 64


class Flag(IntFlag):
    """Bits of the header's flags; the others are reserved."""

    COMPRESSED = 1  # sections 2, 5 and 6 are gzip streams
    INDEXED = 2  # section 4 has the indexes
    HAS_DEAD_LETTERS = 4
    HAS_SIGNATURES = 8
    HAS_METADATA = 16
    ENCRYPTED = 32  # the content of every message is sealed


class SectionType(IntEnum):
    """Known sections; 7-255 are reserved for the format's owners, 256 and above are ours."""

    CHANNELS = 1
    MESSAGES = 2
    SUBSCRIPTIONS = 3
    INDEXES = 4
    DEAD_LETTERS = 5
    ARCHIVE = 6
    ENGINE_STATE = 256
    COLUMNS = 257


class FileHeader(msgspec.Struct, frozen=True):
    """The first 96 bytes, without the magic and the reserved bytes."""

    version: int
    flags: int
    section_count: int
    channel_count: int
    message_count: int  # sections 2 and 6 together
    subscription_count: int
    dead_letter_count: int
    created_at: int  # Unix seconds
    modified_at: int  # Unix seconds
    total_size: int  # of the file, footer included


class SectionEntry(msgspec.Struct, frozen=True):
    """One entry of the section table."""

    kind: int
    flags: int
    offset: int
    length: int


def finish(header: FileHeader, sections: Iterable[SectionEntry], bodies: Sequence[bytes]) -> bytes:
    """A whole file: header, table, the bodies, footer.

    Offsets and total_size must be correct.
    """
    head = [HEADER.pack(MAGIC, *msgspec.structs.astuple(header), b"")]
    head += [SECTION.pack(*msgspec.structs.astuple(section)) for section in sections]
    digest = hashlib.sha256()
    for part in (*head, *bodies):
        digest.update(part)
    return b"".join((*head, *bodies, FOOTER.pack(digest.digest(), FOOTER_MAGIC)))


def open_frame(data: bytes, path: str) -> tuple[FileHeader, list[SectionEntry]]:
    """Header and section table of a whole file whose checksum was verified.

    Errors: FormatError; IntegrityError when the SHA-256 differs; VersionError.
    """
    refuse_other_format(data, path)
    check_size(len(data), path)
    body = len(data) - FOOTER.size
    expected, magic = FOOTER.unpack_from(data, body)
    if magic != FOOTER_MAGIC:
        where = body + len(expected)
        raise FormatError(path, where, f"footer magic {FOOTER_MAGIC.decode()}", shown(magic))
    found = hashlib.sha256(memoryview(data)[:body]).digest()
    if found != expected:
        raise IntegrityError(path, body, f"SHA-256 {expected.hex()}", f"{found.hex()}")
    header = parse_header(data, path, len(data))
    return header, parse_sections(data, path, header)


def refuse_other_format(data: bytes, path: str) -> None:
    """Errors: FormatError for a file of the AgenticComm crate's own format."""
    if data.startswith(OTHER_MAGIC) and not data.startswith(MAGIC[:5]):
        found = f"magic ACOM of another format, AgenticComm's own ({shown(data[:8])})"
        raise FormatError(path, 0, f"magic {MAGIC.decode()}", found)


def check_size(size: int, path: str) -> None:
    """Errors: FormatError for a size outside the limits of the format."""
    smallest = HEADER.size + FOOTER.size
    if size < smallest:
        raise FormatError(path, 0, f"at least {smallest} bytes", f"{size} bytes")
    if size > MAX_FILE_BYTES:
        raise FormatError(path, 0, f"at most {MAX_FILE_BYTES} bytes", f"{size} bytes")


def parse_header(head: bytes, path: str, size: int) -> FileHeader:
    """The header of a file of ``size`` bytes, from its first bytes.

    Errors: FormatError; VersionError for version 0, and for a header of a later version that
    does not read as one of version 1.
    """
    magic, *fields, _reserved = HEADER.unpack_from(head)
    if magic != MAGIC:
        raise FormatError(path, 0, f"magic {MAGIC.decode()}", shown(magic))
    header = FileHeader(*fields)
    if header.version < VERSION:
        raise VersionError(path, VERSION_AT, f"version {VERSION}", header.version)
    if header.total_size != size:
        fault = FormatError(path, TOTAL_SIZE_AT, f"total_size {size}", header.total_size)
        raise as_version_error(header, fault)
    return header


def parse_sections(head: bytes, path: str, header: FileHeader) -> list[SectionEntry]:
    """The section table, from the file's first bytes: types distinct, no overlap, all in the file.

    Errors: FormatError; VersionError instead in a file of a later version.
    """
    room = (header.total_size - HEADER.size - FOOTER.size) // SECTION.size
    if header.section_count > room:
        expected = f"section_count of at most {room}, as many as fit"
        fault = FormatError(path, SECTION_COUNT_AT, expected, header.section_count)
        raise as_version_error(header, fault)
    table_end = HEADER.size + header.section_count * SECTION.size
    table = [SectionEntry(*entry) for entry in SECTION.iter_unpack(head[HEADER.size : table_end])]
    try:
        _check_sections(table, path, table_end, header.total_size - FOOTER.size)
    except FormatError as exc:
        raise as_version_error(header, exc) from None
    return table


def as_version_error(header: FileHeader, fault: FormatError) -> FormatError:
    """The fault itself, or the VersionError that it is in a file of a later version."""
    if header.version <= VERSION or isinstance(fault, VersionError):
        return fault
    expected = f"{fault.expected} (version {header.version}, read as {VERSION})"
    return VersionError(fault.path, fault.offset, expected, fault.found)


def _check_sections(table: list[SectionEntry], path: str, first: int, end: int) -> None:
    seen: set[int] = set()
    filled = []
    for number, section in enumerate(table):
        at = HEADER.size + number * SECTION.size
        name = f"section {section.kind}"
        if section.kind in seen:
            raise FormatError(path, at, f"section type {section.kind} once", "it twice")
        seen.add(section.kind)
        if section.length == 0 and section.offset <= end:
            continue  # an empty section may be anywhere
        if section.offset < first:
            raise FormatError(path, at + 8, f"{name} at {first} or later", section.offset)
        if section.offset + section.length > end:
            found = f"its end at {section.offset + section.length}"
            raise FormatError(path, at + 16, f"{name} to end by {end}", found)
        filled.append((section.offset, at, section))
    filled.sort(key=lambda entry: entry[0])
    for (_, _, last), (_, at, other) in pairwise(filled):
        if other.offset < last.offset + last.length:
            expected = f"section {other.kind} at {last.offset + last.length} or later"
            found = f"{other.offset}: sections {last.kind} and {other.kind} overlap"
            raise FormatError(path, at + 8, expected, found)


GZIP_LEVEL = 6
# Maximum ratio of a DEFLATE stream: a 258-byte match takes at least two bits.
MAX_RATIO = 1032
# Text compresses to a tenth; larger streams with a higher ratio are checked before inflating.
LARGE_BYTES = 64 << 20
LARGE_RATIO = 32
FIRST_FEED_BYTES = 4096
MAX_FEED_BYTES = 1_048_576

# Its stubs declare it as a value.
_IsalError: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]


def pack_envelope(raw: bytes) -> bytes:
    """The envelope around ``raw``."""
    return U64.pack(len(raw)) + bytes(deflate.gzip_compress(raw, GZIP_LEVEL))


CheckPieces = Callable[[Iterator[bytes], str], None]  # the pieces, and of what they are


def unpack_envelope(reader: Reader, name: str, check: CheckPieces | None = None) -> Reader:
    """A reader of an envelope's content; offsets of faults are in the uncompressed bytes.

    Several gzip members in a row are one stream. For a large stream with a suspiciously high ratio
    ``check`` is called with its pieces before it is inflated whole; its exceptions propagate.
    Errors: FormatError for an impossible or wrong size, one that does not fit in memory, and for
    bytes that are not gzip.
    """
    start = reader.pos
    size = reader.u64("uncompressed_size")
    most = min(MAX_FILE_BYTES, (reader.end - reader.pos) * MAX_RATIO)
    if size > most:
        raise reader.fault(start, f"uncompressed_size of at most {most} in {name}", size)
    where = f" in {name}, offset in its uncompressed bytes"
    if size > LARGE_BYTES and size > LARGE_RATIO * (reader.end - reader.pos):
        _check_room(reader, start, size, name)
        if check is not None:
            check(_pieces(Reader(reader.data, reader.path, reader.pos, reader.end), name), where)
    raw = _gunzip(reader, size, name)
    if len(raw) != size:
        found = "more bytes" if len(raw) > size else f"{len(raw)} bytes"
        raise reader.fault(start, f"uncompressed_size {size} of {name}", f"{found} come out")
    return Reader(raw, reader.path, where=where)


def unpack_begin(reader: Reader, size: int, name: str) -> bytes:
    """The first ``size`` bytes of an envelope's content, one more at most. Errors: FormatError."""
    reader.u64("uncompressed_size")
    return _gunzip(reader, size, name)


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
            return  # reported when it is inflated whole
        reader.pos -= len(stream.unused_data)


def _gunzip(reader: Reader, size: int, name: str) -> bytes:
    """The output of the gzip members, cut off at ``size`` + 1 bytes."""
    whole = bytearray()
    # Nearly always there is one member: it gets all input, so its bytes are not copied.
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
    # Small pieces: the rest after a member's end is copied, and there may be many members.
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
