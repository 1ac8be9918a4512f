"""Days of the archive packed into one file each: `archive/{date}.tar.zst`.

    archive/{date}.tar.zst.tmp   written, synced, read back and compared file by file
    archive/{date}.tar.zst       renamed into place, durable; only then
    archive/{date}/              removed in slices, each file compared with its copy

Killed anywhere, every file is in the folder or in the pack, and the next run continues. Files that
enter the folder of a packed day later are added to the pack. The ledger keeps the path a file had:
``read`` finds it in either place. Any tar with zstd reads a pack: `tar --zstd -tf`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tarfile
from collections.abc import Generator, Iterator
from datetime import date
from typing import IO, NamedTuple

from relay.base import fsio
from relay.base.clock import iso_date
from relay.base.errors import FormatError, UnsafePath
from relay.base.finding import Finding
from relay.base.home import Dirs, Home

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUFFIX = ".tar.zst"
PRUNED = "pruned"
_PARAMETER = zstd.CompressionParameter
_OPTIONS = {
    int(_PARAMETER.compression_level): 9,  # text to a fifth; 30 MB/s, at low priority
    int(_PARAMETER.checksum_flag): 1,  # a flipped byte that still inflates is an error, too
}
SLICE_FILES = 16  # files between pauses: two milliseconds, which the loop may wait for
SLICE_NAMES = 200  # the same, when files are only listed
DAY_NS = 86_400 * 10**9
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_MOST_FILE = 64 << 20  # a larger file is not a message and is not packed


class PackedDay(NamedTuple):
    """The result of packing one day."""

    day: str
    files: int
    n_bytes: int  # of the files
    packed_bytes: int  # of the pack


def days(home: Home) -> list[str]:
    """The days that have a folder in the archive, oldest first."""
    try:
        names = os.listdir(home.path("archive"))
    except FileNotFoundError:
        return []
    folders = [n for n in names if is_day(n) and os.path.isdir(home.path("archive", n))]
    return sorted(folders)


def is_day(name: str) -> bool:
    """True for the name of a day's folder."""
    with contextlib.suppress(ValueError):  # somebody's 2026-02-30
        return _DAY.fullmatch(name) is not None and bool(date.fromisoformat(name))
    return False


def before_yesterday(now_ns: int) -> str:
    """The first day that is never packed: yesterday, whose messages may still be underway."""
    return iso_date(now_ns - DAY_NS)


def pack(home: Home, day: str) -> Iterator[PackedDay | None]:
    """Pack one day; yields None after each slice, so that the caller can pause, then the result.

    The caller holds the home's lock. Errors: FormatError when the pack is not read back as it was
    written, and nothing is removed; UnsafePath, OSError.
    """
    target = home.path("archive", day + SUFFIX)
    n_bytes = 0
    with home.dirs() as dirs:
        files: list[str] = []
        for path in _files(dirs, day):
            files.append(path)
            if len(files) % SLICE_NAMES == 0:
                yield None
        same = yield from _same(dirs, target, files)
        if len(same) < len(files):
            yield from _write(dirs, target, files)
        for number, path in enumerate(files):
            *folder, name = path.split("/")
            n_bytes += os.stat(name, dir_fd=dirs.get(*folder), follow_symlinks=False).st_size
            fsio.remove(name, dirs.get(*folder))
            if number % SLICE_FILES == SLICE_FILES - 1:
                yield None
    remove_empty(home, "archive", day)
    yield PackedDay(day, len(files), n_bytes, os.path.getsize(target) if files else 0)


def read(dirs: Dirs, path: str) -> bytes | None:
    """The bytes of an archived file, by its path in the archive, from the pack of its day.

    None if there is no such pack or no such file in it. Reads the pack up to the file.
    Errors: FormatError for a damaged pack; OSError, UnsafePath for an unreadable one.
    """
    parts = path.split("/")
    if len(parts) < 3 or parts[0] != "archive" or not is_day(parts[1]):
        return None
    try:
        fd = os.open(
            parts[1] + SUFFIX,
            os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC,
            dir_fd=dirs.get("archive"),
        )
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        for name, data, _ in _walk(file, f"archive/{parts[1]}{SUFFIX}"):
            if name == path:
                return data
    return None


def check_file(path: str) -> Iterator[Finding]:
    """Check that a packed day can be read to its end. Errors: OSError."""
    try:
        with contextlib.ExitStack() as stack:
            for _ in members(stack, path):
                pass
    except FormatError as exc:
        advice = "restore it from a backup; the store and its archives have the messages' text"
        yield Finding.of_error("files", exc, path, advice)


def locate(home: Home, path: str) -> str:
    """The location of an archived file: its own path, its pack, or "pruned" if it is in neither."""
    with home.dirs() as dirs:
        pack_path = "/".join(path.split("/")[:2]) + SUFFIX
        try:
            if fsio.exists(home.path(*path.split("/"))):
                return path
            return pack_path if read(dirs, path) is not None else PRUNED
        except FormatError:
            return f"{pack_path}, damaged"
        except (OSError, UnsafePath) as exc:
            return f"{path}, or {pack_path}, which cannot be read: {exc}"


def _files(dirs: Dirs, day: str) -> Iterator[str]:
    """Paths of the regular files below a day's folder, in order."""

    def walk(*parts: str) -> Iterator[str]:
        with os.scandir(dirs.get(*parts)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from walk(*parts, entry.name)
            elif (
                entry.is_file(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_size <= _MOST_FILE
            ):
                yield "/".join([*parts, entry.name])

    yield from walk("archive", day)


def _read_file(dirs: Dirs, path: str) -> bytes:
    *folder, name = path.split("/")
    return fsio.read_regular(name, dirs.get(*folder), _MOST_FILE)[0]


def _write(dirs: Dirs, target: str, files: list[str]) -> Iterator[None]:
    """Write a pack with the files of the previous one and these, verify it, rename it."""
    temp = target + ".tmp"
    fsio.fault("create", temp)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temp)
    fd = fsio.open_rw(temp, new=True)
    try:
        with os.fdopen(fd, "wb", closefd=False) as raw:
            with create(raw) as packed:
                with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                    yield from _fill(dirs, tar, target, files)
        fsio.sync_data(fd, temp)
        yield from _verify_pack(dirs, temp, files)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    finally:
        os.close(fd)
    fsio.fault("rename", target)
    os.rename(temp, target)
    fsio.sync_dir(os.path.dirname(target))


def _fill(dirs: Dirs, tar: tarfile.TarFile, target: str, files: list[str]) -> Iterator[None]:
    own = set(files)
    with contextlib.ExitStack() as stack:
        for name, data, at_s in members(stack, target):
            if name not in own:
                add(tar, name, data, at_s)
    for number, path in enumerate(files):
        fsio.fault("write", target + ".tmp")
        *folder, name = path.split("/")
        data, status = fsio.read_regular(name, dirs.get(*folder), _MOST_FILE)
        add(tar, path, data, int(status.st_mtime))
        if number % SLICE_FILES == SLICE_FILES - 1:
            yield


def create(raw: IO[bytes]) -> zstd.ZstdFile:
    """The stream that packs a tar, with a checksum of the whole at its end."""
    return zstd.ZstdFile(raw, "w", options=_OPTIONS)


def add(tar: tarfile.TarFile, name: str, data: bytes, at_s: int) -> None:
    """Add a file to an open pack: its path below the home, mode 600."""
    facts = tarfile.TarInfo(name)
    facts.size, facts.mtime, facts.mode = len(data), at_s, fsio.FILE_MODE
    tar.addfile(facts, io.BytesIO(data))


def _verify_pack(dirs: Dirs, temp: str, files: list[str]) -> Iterator[None]:
    """Verify that every file is in the pack. Errors: FormatError."""
    same = yield from _same(dirs, temp, files)
    missing = set(files) - same
    if missing:
        expected = f"{min(missing)} as it was written"
        raise FormatError(temp, 0, expected, "other content, or no such file")


def _same(dirs: Dirs, path: str, files: list[str]) -> Generator[None, None, set[str]]:
    """Those of these files that are in the pack with the same bytes; yields None after slices."""
    wanted, same = set(files), set[str]()
    if not wanted:
        return same
    with contextlib.ExitStack() as stack:
        for number, (name, data, _) in enumerate(members(stack, path)):
            if name in wanted and _read_file(dirs, name) == data:
                same.add(name)
            if number % SLICE_FILES == SLICE_FILES - 1:
                yield
    return same


def members(stack: contextlib.ExitStack, path: str) -> Iterator[tuple[str, bytes, int]]:
    """(name, bytes, mtime in seconds) of each file in a pack, in order; none if it is missing.

    Errors: FormatError for a damaged one, OSError.
    """
    try:
        file = stack.enter_context(open(path, "rb"))
    except FileNotFoundError:
        return
    yield from _walk(file, path)


def _walk(file: io.BufferedReader, path: str) -> Iterator[tuple[str, bytes, int]]:
    try:
        with zstd.ZstdFile(file) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
            for facts in tar:
                content = tar.extractfile(facts)
                if content is not None:
                    yield facts.name, content.read(), int(facts.mtime)
            while plain.read(1 << 20):  # to the checksum at the end
                pass
    except (zstd.ZstdError, tarfile.TarError, EOFError) as exc:
        raise FormatError(path, 0, "a tar packed with zstd", exc) from exc


def remove_empty(home: Home, *parts: str) -> None:
    """Remove a folder of the archive and its subfolders, as far as they are empty."""
    with home.dirs() as dirs, contextlib.suppress(OSError, UnsafePath):
        with os.scandir(dirs.get(*parts)) as found:
            names = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        for name in names:
            remove_empty(home, *parts, name)
        fsio.remove_dir(parts[-1], dirs.get(*parts[:-1]))
