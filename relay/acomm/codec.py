"""`.acomm` files, version 1: a store's values to bytes and back, and to a file and back.

``encode`` gives the same bytes for the same values, always. ``decode`` gives every value of a
file or raises: a file that is damaged anywhere is never read in part. Nothing here changes a
file but ``write``, which replaces it whole.

    header | section table | 1 channels | 2 messages | 3 subscriptions | 4 indexes
    | 5 dead letters | 6 archive | 256 engine state | 257 columns | footer

Sections 2, 5 and 6 lie in a gzip envelope when the file is COMPRESSED.
Source: FORMATS section 2; acomm-file-format.txt; docs/formats/acomm.md has the tables.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from typing import BinaryIO

from relay.acomm import container, indexes
from relay.acomm.container import (
    FOOTER,
    HEADER,
    MAX_FILE_BYTES,
    SECTION,
    VERSION,
    Flag,
    Header,
    Section,
    SectionType,
)
from relay.acomm.indexes import Indexes
from relay.acomm.model import StoreFile
from relay.acomm.reader import Reader
from relay.acomm.sections import (
    check_counts,
    check_size,
    decode_sections,
    encode_sections,
    read_blocks,
    split,
)
from relay.acomm.writer import u64
from relay.base.errors import FormatError, UnsafePath
from relay.base.fsio import write_atomic

Warn = Callable[[str], None]

_KNOWN = frozenset(SectionType)
_warn: Warn = logging.getLogger("relay.acomm.codec").warning
# Opening a FIFO must not wait for its writer.
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def encode(store: StoreFile, compress: bool = True, columns: bool = False) -> bytes:
    """The bytes of a store's file. Equal stores give equal bytes.

    Records are put into the order that the format wants: channels and subscriptions by id,
    messages by created_at and id. Section 4 is made from the messages, and with ``columns``
    section 257, which lets audits read a few fields of many messages.
    Errors: StoreCapacity when a limit of the file is passed, ValidationFailed for a field
    that its record cannot hold.
    """
    check_counts(store)
    bodies = encode_sections(store, compress, columns)
    offset = HEADER.size + len(bodies) * SECTION.size
    sections = []
    for kind, body in bodies.items():
        sections.append(Section(kind, 0, offset, len(body)))
        offset += len(body)
    total_size = offset + FOOTER.size
    check_size(total_size)
    for field in ("created_at", "modified_at"):
        u64(field, getattr(store, field))
    header = Header(
        version=VERSION,
        flags=_flags(store, compress),
        section_count=len(sections),
        channel_count=len(store.channels),
        message_count=len(store.messages) + len(store.archive),
        subscription_count=len(store.subscriptions),
        dead_letter_count=len(store.dead_letters),
        created_at=store.created_at,
        modified_at=store.modified_at,
        total_size=total_size,
    )
    return container.seal(header, sections, list(bodies.values()))


def decode(data: bytes, path: str = "<bytes>", *, warn: Warn = _warn) -> StoreFile:
    """Everything that a file's bytes hold; ``path`` is for errors alone.

    Sections 4 and 257 are not read: they are made from the messages, and verify.py compares them.
    What is skipped, because a later version or another writer added it, goes to ``warn``, a
    sentence each.
    Errors: FormatError with the first fault; IntegrityError when the SHA-256 differs;
    VersionError when a file of a later version does not read as one of this.
    """
    header, table = container.open_frame(data, path)
    _warn_of_the_unknown(header, table, path, warn)
    try:
        sections = split(data, path, header, table)
        del data  # held twice, a store would need half as much memory again to open
        return decode_sections(path, header, sections)
    except FormatError as exc:
        raise container.of_version(header, exc) from None


def read(path: str, *, warn: Warn = _warn) -> StoreFile:
    """The store in a file; the file is not changed in any way.

    Errors: those of ``decode``; OSError as ``open`` gives it; UnsafePath for what is no
    regular file.
    """
    return decode(read_bytes(path), path, warn=warn)


def read_bytes(path: str) -> bytes:
    """The bytes of a file, unless it is larger than any `.acomm` may be. Errors: as ``read``."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise FormatError(path, 0, f"at most {MAX_FILE_BYTES} bytes", f"{size} bytes")
        return file.read()


def peek_header(path: str) -> Header:
    """The header alone, to decide whether the file is needed; nothing vouches for it.

    Errors: as ``read``, for magic, size, version and total_size.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEADER.size)
    container.refuse_other_format(head, path)
    container.check_size(size if len(head) == HEADER.size else len(head), path)
    return container.parse_header(head, path, size)


def unwritable(path: str) -> str:
    """A description of what a file holds that writing it again would drop; empty: nothing.

    Errors: as ``read``, for the header and the section table.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEADER.size)
        header = container.parse_header(head, path, size)
        head += file.read(header.section_count * SECTION.size)
    table = container.parse_sections(head, path, header)
    unknown = [str(entry.kind) for entry in table if entry.kind not in _KNOWN]
    lost = [f"version {header.version}"] if header.version > VERSION else []
    if unknown:
        lost.append(f"the unknown section{'s' * (len(unknown) > 1)} {', '.join(unknown)}")
    return " and ".join(lost)


def read_aids(path: str) -> tuple[Indexes, dict[int, bytes]]:
    """The indexes and the blocks of section 256 of a file that was verified; no message is read.

    Errors: those of ``read``.
    """
    data = read_bytes(path)
    header, table = container.open_frame(data, path)
    aids: dict[int, Reader] = {
        entry.kind: Reader(data, path, entry.offset, entry.offset + entry.length) for entry in table
    }
    found = aids.get(SectionType.INDEXES)
    try:
        blocks = read_blocks(aids.get(SectionType.ENGINE_STATE))
        return (indexes.decode(found) if found else Indexes()), blocks
    except FormatError as exc:
        raise container.of_version(header, exc) from None


def write(path: str, store: StoreFile, compress: bool = True, columns: bool = False) -> None:
    """Replace the file by one that holds ``store``; after the rename inside, it does.

    A crash before that leaves the old file, and perhaps ``path.tmp``. Whatever stood at
    ``path`` is gone: read it first if it may be damaged, or no store at all.
    Errors: those of ``encode``, before anything is touched; OSError.
    """
    write_atomic(path, encode(store, compress, columns))


def _flags(store: StoreFile, compress: bool) -> Flag:
    flags = Flag.INDEXED
    messages = (*store.messages, *store.dead_letters, *store.archive)
    for flag, is_set in (
        (Flag.COMPRESSED, compress),
        (Flag.HAS_DEAD_LETTERS, bool(store.dead_letters)),
        (Flag.HAS_SIGNATURES, any(message.signature is not None for message in messages)),
        (Flag.HAS_METADATA, any(message.metadata is not None for message in messages)),
        (Flag.ENCRYPTED, store.encrypted),
    ):
        if is_set:
            flags |= flag
    return flags


def _warn_of_the_unknown(header: Header, table: list[Section], path: str, warn: Warn) -> None:
    if header.version > VERSION:
        warn(f"{path}: version {header.version} is read as version {VERSION}")
    if unknown := header.flags & ~sum(Flag):
        warn(f"{path}: flags {unknown:#x} are not known and were ignored")
    for entry in table:
        if entry.kind not in _KNOWN:
            warn(f"{path}: section {entry.kind}, {entry.length} bytes, is not known: skipped")
        elif entry.flags:
            warn(f"{path}: flags {entry.flags:#x} of section {entry.kind} were ignored")


def _open(path: str) -> BinaryIO:
    fd = os.open(path, _OPEN)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafePath(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")
