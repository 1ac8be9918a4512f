"""A store's `.acomm` file: bytes and values, reading and writing, encryption, the lock.

    header | section table | 1 channels | 2 messages | 3 subscriptions | 4 indexes
    | 5 dead letters | 6 archive | 256 engine state | 257 columns | footer

``encode`` returns the same bytes for the same values. ``decode`` returns every value of a file or
raises: a damaged file is never read in part. ``read`` and ``write`` do so with a file.

``save`` keeps the previous file as ``NAME.acomm.prev``, and ``load`` falls back to it:

    save  NAME.acomm.tmp, synced  ->  NAME.acomm becomes .prev  ->  .tmp becomes NAME.acomm
    load  NAME.acomm; damaged or missing: .prev, and the damaged file is renamed to NAME.bad

At any instant one of the two names has a whole file. Nothing is renamed unless the other is whole.

``encrypt`` and ``decrypt`` change the content of every message:

    content in an encrypted file = nonce[12] | AES-256-GCM ciphertext | tag[16]
    additional data              = message id, u64

The nonce is derived from key, id and content, so a message has the same bytes in every flush
(docs/decisions/0005-encryption.md). See docs/formats/acomm.md.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import BinaryIO, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from relay.acomm import columns, container, indexes
from relay.acomm.container import (
    FOOTER,
    HEADER,
    MAX_FILE_BYTES,
    SECTION,
    VERSION,
    FileHeader,
    Flag,
    SectionEntry,
    SectionType,
)
from relay.acomm.engine_state import StoreSnapshot
from relay.acomm.fields import U64, Reader, u64
from relay.acomm.indexes import Indexes
from relay.acomm.model import Message, StoreFile
from relay.acomm.records import ENCRYPTION_BYTES, MESSAGE
from relay.acomm.sections import (
    check_counts,
    check_size,
    decode_sections,
    encode_sections,
    read_blocks,
    split,
)
from relay.base import fsio
from relay.base.errors import (
    FormatError,
    LimitError,
    SealedStore,
    StoreLocked,
    UnsafePath,
    VersionError,
)
from relay.base.fsio import write_atomic

Warn = Callable[[str], None]

_KNOWN = frozenset(SectionType)
_HEAD_BYTES = 4096  # header and section table of the files written here
_BLOCK_HEAD_BYTES = 12  # tag, length
_warn: Warn = logging.getLogger("relay.acomm.store_file").warning
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
        sections.append(SectionEntry(kind, 0, offset, len(body)))
        offset += len(body)
    total_size = offset + FOOTER.size
    check_size(total_size)
    for field in ("created_at", "modified_at"):
        u64(field, getattr(store, field))
    header = FileHeader(
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
    return container.finish(header, sections, list(bodies.values()))


def decode(data: bytes, path: str = "<bytes>", *, warn: Warn = _warn) -> StoreFile:
    """All values in a file's bytes; ``path`` is only used in errors.

    Sections 4 and 257 are not read: they are made from the messages, and ``check.verify`` compares
    them. ``warn`` gets a sentence for each thing skipped, which a later version or another writer
    added.
    Errors: FormatError with the first fault; IntegrityError when the SHA-256 differs;
    VersionError when a file of a later version does not read as one of this.
    """
    header, table = container.open_frame(data, path)
    _warn_of_the_unknown(header, table, path, warn)
    try:
        sections = split(data, path, header, table)
        del data  # keeping it would raise the memory for opening by half
        return decode_sections(path, header, sections)
    except FormatError as exc:
        raise container.as_version_error(header, exc) from None


def read(path: str, *, warn: Warn = _warn) -> StoreFile:
    """The store in a file; the file is not changed in any way.

    Errors: those of ``decode``; OSError from ``open``; UnsafePath if it is not a regular file.
    """
    return decode(read_bytes(path), path, warn=warn)


def read_bytes(path: str) -> bytes:
    """The bytes of a file, unless it is larger than any `.acomm` may be. Errors: as ``read``."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise FormatError(path, 0, f"at most {MAX_FILE_BYTES} bytes", f"{size} bytes")
        return file.read()


def peek_header(path: str) -> FileHeader:
    """The header alone, unverified, to decide whether the file is needed.

    Errors: as ``read``, for magic, size, version and total_size.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEADER.size)
    container.refuse_other_format(head, path)
    container.check_size(size if len(head) == HEADER.size else len(head), path)
    return container.parse_header(head, path, size)


def lost_on_rewrite(path: str) -> str:
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


def read_indexes(path: str) -> tuple[Indexes, dict[int, bytes]]:
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
        return (indexes.decode(found) if found else {}), blocks
    except FormatError as exc:
        raise container.as_version_error(header, exc) from None


def read_one(path: str, number: int) -> StoreFile | None:
    """The file with one message of section 2, which its columns locate, and section 256.

    Neither another message nor another section is decoded. None when the file has no columns, or
    they do not have the message. Errors: those of ``read``.
    """
    data = read_bytes(path)
    header, table = container.open_frame(data, path)
    parts = {
        entry.kind: Reader(data, path, entry.offset, entry.offset + entry.length) for entry in table
    }
    if SectionType.COLUMNS not in parts:
        return None
    place = columns.locate(columns.Columns.open(parts[SectionType.COLUMNS]), number)
    if place is None:
        return None
    begin, end = place
    section = parts[SectionType.MESSAGES]
    if header.flags & Flag.COMPRESSED:
        section = Reader(container.unpack_begin(section, end, "section 2"), path)
    record = Reader(section.data, path, section.pos + begin, section.pos + end)
    message: Message = MESSAGE.read(record, "")
    return StoreFile(
        header.created_at,
        header.modified_at,
        messages=(message,) if message.id == number else (),
        engine_state=read_blocks(parts.get(SectionType.ENGINE_STATE)),
        encrypted=bool(header.flags & Flag.ENCRYPTED),
    )


@contextlib.contextmanager
def open_block(path: str, tag: int) -> Iterator[tuple[int, int, int]]:
    """An open file, begin and length of a block of section 256; length 0 if there is none.

    For look-ups in a large block: the file is not read, and not verified.
    Errors: as ``read``, for the header, the section table and the blocks.
    """
    with _open(path) as file:
        fd, size = file.fileno(), os.fstat(file.fileno()).st_size
        head = os.pread(fd, _HEAD_BYTES, 0)
        container.check_size(size if len(head) >= HEADER.size else len(head), path)
        table = container.parse_sections(head, path, container.parse_header(head, path, size))
        found = next((entry for entry in table if entry.kind == SectionType.ENGINE_STATE), None)
        at, end = (found.offset, found.offset + found.length) if found else (0, 0)
        while at < end:
            block = Reader(os.pread(fd, _BLOCK_HEAD_BYTES, at), path, base=at)
            kind, length = block.u32("tag of a block"), block.u64("length of a block")
            at += _BLOCK_HEAD_BYTES
            if length > end - at:
                raise FormatError(path, at, f"at most {end - at} bytes in a block", length)
            if kind == tag:
                yield fd, at, length
                return
            at += length
        yield fd, 0, 0


def write(path: str, store: StoreFile, compress: bool = True, columns: bool = False) -> None:
    """Replace the file by one with the values of ``store``, atomically by a rename.

    A crash before the rename leaves the old file, and possibly ``path.tmp``. The previous content
    of ``path`` is lost: read it first if it may be damaged or another file.
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


def _warn_of_the_unknown(
    header: FileHeader, table: list[SectionEntry], path: str, warn: Warn
) -> None:
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


NONCE_BYTES = 12
# Separates the key for nonces from the encryption key.
_NONCE_PURPOSE = b"acomm nonce"


def encrypt(file: StoreFile, key: bytes | None) -> StoreFile:
    """The store with encrypted contents; unchanged without a key."""
    if key is None:
        return file
    cipher = AESGCM(key)
    nonce_key = blake2b(key, person=_NONCE_PURPOSE, digest_size=32).digest()

    def sealed(message: Message) -> bytes:
        ident, content = U64.pack(message.id), message.content
        nonce = blake2b(ident + content, key=nonce_key, digest_size=NONCE_BYTES).digest()
        return nonce + cipher.encrypt(nonce, content, ident)

    return _with_contents(file, sealed, encrypted=True)


def decrypt(file: StoreFile, key: bytes | None, path: str) -> StoreFile:
    """The store with plain contents; unchanged if it is not encrypted.

    Errors: SealedStore when it is encrypted and ``key`` is missing or not its key; FormatError
    for a content too short to be sealed.
    """
    if not file.encrypted:
        return file
    if key is None:
        raise SealedStore(f"{path} is encrypted, and no key was given")
    cipher = AESGCM(key)

    def unsealed(message: Message) -> bytes:
        content = message.content
        if len(content) < ENCRYPTION_BYTES:
            expected = f"message {message.id} to have {ENCRYPTION_BYTES} bytes of content and more"
            raise FormatError(path, 0, expected, len(content))
        nonce, rest = content[:NONCE_BYTES], content[NONCE_BYTES:]
        try:
            return cipher.decrypt(nonce, rest, U64.pack(message.id))
        except InvalidTag:
            raise SealedStore(
                f"{path}: message {message.id} cannot be decrypted with this key"
            ) from None

    return _with_contents(file, unsealed, encrypted=False)


def _with_contents(
    file: StoreFile, content_of: Callable[[Message], bytes], *, encrypted: bool
) -> StoreFile:
    def all_of(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple([msgspec.structs.replace(m, content=content_of(m)) for m in messages])

    return msgspec.structs.replace(
        file,
        messages=all_of(file.messages),
        dead_letters=all_of(file.dead_letters),
        archive=all_of(file.archive),
        encrypted=encrypted,
    )


LATER_EVENTS_LOST = "later events are lost"  # unless a journal has them
PREVIOUS = ".prev"
SUFFIX = ".acomm"
T = TypeVar("T")
_NO_FLOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_LOCK_TEXT_BYTES = 4096


@contextlib.contextmanager
def locked(path: str, now_s: int) -> Iterator[None]:
    """Hold the lock of the store file at ``path``, ``{path}.lock``, for the block.

    The kernel's flock decides, so a killed holder frees it at once; the text in the file is for
    people. Errors: StoreLocked with that text when another process holds it, or when the file
    system does not support flock. See docs/formats/acomm.md.
    """
    lock = path + ".lock"
    with contextlib.ExitStack() as held:
        try:
            fd = held.enter_context(fsio.locked(lock))
        except BlockingIOError:
            raise StoreLocked(
                f"{path} is being written by another process ({_holder(lock)})"
            ) from None
        except OSError as exc:
            if exc.errno not in _NO_FLOCK:
                raise
            raise StoreLocked(
                f"{path} cannot be locked: its file system does not support flock ({exc.strerror})",
                hint="move the store to a local disk",
            ) from None
        text = f"PID: {os.getpid()}\nSTARTED: {now_s}\nHOSTNAME: {socket.gethostname()}\n"
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
        yield


def _holder(lock: str) -> str:
    with open(lock, "rb") as file:
        text = file.read(_LOCK_TEXT_BYTES).decode(errors="replace")
    return ", ".join(text.splitlines())


def save(
    path: str, snapshot: StoreSnapshot, compress: bool = True, key: bytes | None = None
) -> int:
    """Replace the store's file, keeping the previous one; returns the size of the new one.

    With a ``key`` every content is sealed.

    Errors: StoreCapacity, ValidationFailed before anything is touched; OSError.
    """
    data = encode(encrypt(snapshot.file(), key), compress)
    fsio.write_atomic(path, data, keep=path + PREVIOUS)
    return len(data)


def load(
    path: str,
    make: Callable[[StoreFile, str], T],
    warn: Callable[[str], object],
    *,
    read_only: bool = False,
    outcome: str = LATER_EVENTS_LOST,
) -> T | None:
    """The result of ``make`` for the file, or for the previous one; None if neither exists.
    ``make`` gets the values and the name of the file.

    ``warn`` is called when the file was damaged or missing, with the consequence. ``read_only``:
    a damaged file is not renamed. ``outcome``: the fate of later events, for the warning.
    Errors: FormatError of the file when both are damaged, or it is of another version or format,
    or intact but beyond a limit: then nothing is changed; OSError, UnsafePath.
    """
    previous = path + PREVIOUS
    try:
        return make(read(path), path)
    except FileNotFoundError:
        if not fsio.exists(previous):
            return None
        made = make(read(previous), previous)
        warn(f"{path} is missing: using {previous}; {outcome}")
        return made
    except FormatError as exc:
        if isinstance(exc, VersionError | LimitError) or not fsio.exists(previous):
            raise
        made = _make_of_previous(path, previous, make, exc)
        text = f"{exc}; using {previous}; {outcome}"
        warn(text if read_only else f"{text}, and the damaged file is now {set_aside(path)}")
        return made


def _make_of_previous(
    path: str, previous: str, make: Callable[[StoreFile, str], T], fault: FormatError
) -> T:
    """The store of the previous file. Errors: the error of the file itself if that fails, too."""
    with open(path, "rb") as file:
        container.refuse_other_format(file.read(container.HEADER.size), path)
    try:
        return make(read(previous), previous)
    except FormatError as exc:
        fault.hint = f"{previous} is also damaged ({exc}); both files were left unchanged"
        raise fault from None


def set_aside(path: str) -> str:
    """Rename a damaged file to an unused name; returns it, or "" if the file is gone."""
    if not os.path.lexists(path):
        return ""
    stem = path.removesuffix(SUFFIX) + ".bad"
    aside, number = stem, 0
    while os.path.lexists(aside):
        number += 1
        aside = f"{stem}.{number}"
    os.rename(path, aside)
    fsio.sync_dir(os.path.dirname(path) or ".")
    return aside
