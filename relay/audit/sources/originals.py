"""The files that agents sent, as the archive of a home has them: a row each.

    archive/{date}/{agent}/[rejected/|duplicates/]ID.msg     one row each
    archive/{date}.tar.zst                                   one row for each file in it

A folder's files may be packed while it is read: what has gone from it is looked for in its day's
pack, so that a file is seen once or twice, never not at all. An unreadable file is a row with the
reason, and does not stop others.

Packs are read here and not by ``tarfile``, which gives 19,000 members a second where a year has
millions; this gives ten times as many. It knows what the relay writes, files by ustar headers with
pax records for long names, and refuses anything else: ``tar --zstd -t`` can still read that.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import sys
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from relay.acomm.model import Priority
from relay.base import archive_pack
from relay.base.clock import duration_ms
from relay.base.errors import FormatError, MessageError, RelayError
from relay.base.home import REJECTED
from relay.base.message import (
    DEFAULT_MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    heading,
    max_file_bytes,
    parse,
    split,
)
from relay.base.names import MSG_SUFFIX, sha256_hex, shown, uuid4_of
from relay.delivery.file_ops import DUPLICATES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd
FOLDER = "archive"
MOST_BYTES = max_file_bytes(DEFAULT_MAX_BODY_BYTES)  # a refused file may have any size
_KINDS = {REJECTED: "rejected", DUPLICATES: "duplicate"}
_NO_HEADING = ("", "", "", None, None, None)
_NOT_REGULAR = "not a regular file"
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ArchiveUnit(NamedTuple):
    """A folder of one agent and day, or a pack."""

    day: str
    agent: str  # empty: the day's pack
    pack: str  # the day's pack when this was planned; empty: none


class Original(NamedTuple):
    """One row, in the order of its columns in the lake."""

    path: str
    message_id: str | None
    kind: str
    day: str
    agent: str | None
    pack: str | None
    size: int | None = None
    checksum: str | None = None
    sha256: str | None = None
    target: str | None = None
    message_type: str | None = None
    priority: str | None = None
    ttl_s: int | None = None
    topic: str | None = None
    thread: str | None = None
    changed_at: int | None = None  # Unix microseconds
    problem: str | None = None


def plan(home: str) -> dict[str, list[ArchiveUnit]]:
    """List the folders and packs to read, by the path of the day's, in order.

    Errors: RelayError when they cannot be listed.
    """
    root = os.path.join(home, FOLDER)
    units: dict[str, list[ArchiveUnit]] = {}
    try:
        for name in sorted(os.listdir(root)):
            day = name.removesuffix(archive_pack.SUFFIX)
            if not archive_pack.is_day(day):
                continue
            pack = _pack_stamp(root, day)
            if day != name:
                units[f"{FOLDER}/{name}"] = [ArchiveUnit(day, "", pack)]
            elif agents := _agents(os.path.join(root, name)):
                units[f"{FOLDER}/{name}"] = [ArchiveUnit(day, agent, pack) for agent in agents]
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise RelayError(f"{root} cannot be listed: {exc.strerror}") from exc
    return units


def _agents(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def read_unit(home: str, unit: ArchiveUnit) -> Iterator[Original]:
    """Read the rows of a folder or pack. An unreadable file has a ``problem``."""
    if not unit.agent:
        yield from _read_pack(home, unit.day, "", set())
        return
    prefix = f"{FOLDER}/{unit.day}/{unit.agent}/"
    seen: set[str] = set()
    for row in _read_folder(home, prefix, unit):
        seen.add(row.path)
        yield row
    # Packed since it was planned: read files that had left the folder before it was listed.
    if _pack_stamp(os.path.join(home, FOLDER), unit.day) != unit.pack:
        yield from _read_pack(home, unit.day, prefix, seen)


def _read_folder(home: str, prefix: str, unit: ArchiveUnit) -> Iterator[Original]:
    folder = os.path.join(home, prefix)
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except OSError as exc:
        yield Original(prefix, None, "original", unit.day, unit.agent, None, problem=_reason(exc))
        return
    for name in names:
        if name.startswith("."):
            continue  # a copy without its secrets that is being made
        if name in _KINDS and os.path.isdir(os.path.join(folder, name)):
            yield from _read_folder(home, f"{prefix}{name}/", unit)
            continue
        with contextlib.suppress(FileNotFoundError):  # packed, or pruned, just now
            yield _read_file(home, prefix + name, unit.day)


def _read_file(home: str, path: str, day: str) -> Original:
    """Errors: FileNotFoundError alone."""
    size: int | None = None
    changed_at: int | None = None
    data: bytes | None = None
    problem: str | None = None
    try:
        fd = os.open(f"{home}/{path}", _FLAGS)
    except FileNotFoundError:
        raise
    except OSError as exc:
        is_link = exc.errno in (errno.ELOOP, errno.ENXIO)
        return _row(path, day, problem=_NOT_REGULAR if is_link else _reason(exc))
    try:
        status = os.fstat(fd)
        changed_at = status.st_ctime_ns // 1000
        if not stat.S_ISREG(status.st_mode):
            problem = _NOT_REGULAR
        else:
            size = status.st_size
            data = _all_of(fd, size) if size <= MOST_BYTES else None
    except OSError as exc:
        problem = _reason(exc)
    finally:
        os.close(fd)
    return _row(path, day, None, data, size, changed_at, problem)


def _all_of(fd: int, size: int) -> bytes:
    data = os.read(fd, size + 1)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def _read_pack(home: str, day: str, prefix: str, seen: set[str]) -> Iterator[Original]:
    """The files of a day's pack below ``prefix`` that were not ``seen``."""
    name = f"{FOLDER}/{day}{archive_pack.SUFFIX}"
    try:
        with open(os.path.join(home, name), "rb") as file:
            for path, data in pack_members(file, name):
                if path.startswith(prefix) and path not in seen:
                    is_read = len(data) <= MOST_BYTES
                    yield _row(path, day, name, data if is_read else None, len(data))
    except FileNotFoundError:
        return  # pruned just now
    except (OSError, FormatError) as exc:
        yield Original(name, None, "pack", day, None, name, problem=_reason(exc))


def _row(
    path: str,
    day: str,
    pack: str | None = None,
    data: bytes | None = None,
    size: int | None = None,
    changed_at: int | None = None,
    problem: str | None = None,
) -> Original:
    """Make a row; without ``data`` from the path alone."""
    folder, _, name = path.rpartition("/")
    kind, agent = _kind_and_agent(folder)
    stem, suffix, _ = name.rpartition(MSG_SUFFIX)  # a number may follow it
    message_id = _text(stem) if suffix else None
    named = (_text(path), message_id, kind, day, agent, pack, size)
    if data is None:
        return Original(*named, changed_at=changed_at, problem=problem)
    head, body = split(data)
    said = _heading(head) if len(head) <= MAX_HEADER_BYTES else _NO_HEADING
    checksum = sha256_hex(body) if body else _replaced(data)
    return Original(*named, checksum, sha256_hex(data), *said, changed_at, problem)


@functools.lru_cache  # files of a folder follow one another
def _kind_and_agent(folder: str) -> tuple[str, str | None]:
    parts = folder.split("/")
    agent = parts[2] if len(parts) > 2 else ""
    return _KINDS.get(parts[3], "original") if len(parts) > 3 else "original", _text(agent) or None


def _text(name: str) -> str:
    return name if name.isprintable() else shown(name)  # which takes ten times as long


@functools.lru_cache(maxsize=4096)  # many messages have the very same header
def _heading(head: bytes) -> tuple[str, str, str, int | None, str | None, str | None]:
    try:
        found = heading(head)
    except MessageError:
        return _NO_HEADING
    others = found.others
    thread = others.get("THREAD")
    return (
        found.to,
        str(found.kind),
        Priority(found.priority).label,
        _ttl_s(others.get("TTL", "")),
        others.get("TOPIC"),
        None if thread is None else uuid4_of(thread),
    )


def _ttl_s(text: str) -> int | None:
    try:
        return duration_ms(text, least_ms=1000) // 1000
    except ValueError:
        return None


def _replaced(data: bytes) -> str | None:
    """The SHA-256 of what replaces an empty body, the KIND's word; None for an invalid message."""
    try:
        return sha256_hex(parse(data).content)
    except MessageError:
        return None


def _pack_stamp(folder: str, day: str) -> str:
    """Identify the current pack of a day; empty without one."""
    try:
        status = os.stat(os.path.join(folder, day + archive_pack.SUFFIX), follow_symlinks=False)
    except OSError:
        return ""
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _reason(exc: OSError | FormatError) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


BLOCK = 512
PIECE_BYTES = 1 << 20
_EXPECTED = "a tar packed with zstd"
_FILE, _PAX = (b"0", b"\0"), b"x"
_BLANKS = 8 * ord(" ")  # a header's sum is made with blanks in the place of the sum


def pack_members(file: BinaryIO, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and bytes of each file in an open pack. Errors: FormatError naming ``path``.

    A truncated pack, or a damaged header, is an error once that place is reached.
    """
    source = _PackReader(file, path)
    long_name = ""
    while True:
        head = source.take(BLOCK)
        if not head.strip(b"\0"):
            source.drain()  # two empty blocks end it; what is behind them is filling
            return
        size = _size_of(head, path, source.at)
        data = source.take(size + -size % BLOCK)[:size]
        kind = head[156:157]
        if kind == _PAX:
            long_name = _pax_path(data, path, source.at)
        elif kind in _FILE:
            yield long_name or _name_of(head), data
            long_name = ""
        else:
            raise FormatError(path, source.at, "files alone", f"a member of type {kind!r}")


class _PackReader:
    """The plain bytes of a pack."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._plain = zstd.ZstdFile(file)
        self._path = path
        self._piece, self._begin = b"", 0
        self.at = 0  # bytes taken

    def take(self, count: int) -> bytes:
        """Return the next bytes. Errors: FormatError when there are fewer."""
        end = self._begin + count
        if end > len(self._piece):
            self._fill(count)
            end = count
        begin, self._begin = self._begin, end
        self.at += count
        return self._piece[begin:end]

    def drain(self) -> None:
        """Read on to the checksum at the end. Errors: FormatError."""
        try:
            while self._plain.read(PIECE_BYTES):
                pass
        except (zstd.ZstdError, EOFError) as exc:
            raise FormatError(self._path, self.at, _EXPECTED, exc) from exc

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
    """Return the member's size, from a header with the right checksum."""
    try:
        expected = int(head[148:156].rstrip(b"\0 "), 8)
        size = int(head[124:136].rstrip(b"\0 ") or b"0", 8)
    except ValueError as exc:
        raise FormatError(path, at - BLOCK, _EXPECTED, f"an invalid header: {exc}") from exc
    found = sum(head.translate(None, b"\0")) - sum(head[148:156]) + _BLANKS  # most are zeros
    if expected != found or size < 0:
        raise FormatError(path, at - BLOCK, f"a header of sum {expected}", found)
    return size


def _name_of(head: bytes) -> str:
    name, prefix = head[:100].rstrip(b"\0"), head[345:500].rstrip(b"\0")
    whole = prefix + b"/" + name if prefix else name
    return whole.decode(errors="surrogateescape")


def _pax_path(data: bytes, path: str, at: int) -> str:
    """Return the path in pax records, ``length key=value`` a line; empty without one."""
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
