"""Restore a whole home from a backup: `relay restore`.

The copy is verified file by file as it is written beside the home; then the two are exchanged
atomically. If killed before, the previous home is in place; if killed after, the restored one. The
previous home is kept as ``HOME.before-restore``, never removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator

from relay.base import fsio
from relay.base.errors import IntegrityError, RelayError, UnsafePath
from relay.base.home import TOP_DIRS, lock_home, looks_like_home
from relay.daemon.home_backup import (
    DAMAGED,
    MANIFEST,
    BackupManifest,
    Entry,
    copy_bytes,
    new_tree,
    read_backup,
    resolve_parent,
)

BEFORE = ".before-restore"
UNFINISHED = ".restoring"
_AT_FDCWD, _SWAP = -100, 2  # AT_FDCWD; RENAME_EXCHANGE, and RENAME_SWAP of macOS


def restore(source: str, root: str, *, force: bool = False) -> tuple[BackupManifest, str]:
    """Restore a backup to ``root``; with ``force`` an existing home is set aside.

    Returns also the path that the previous home has now; empty when there was none. Errors:
    AlreadyRunning; RelayError when the source is not a backup or a home exists; IntegrityError for
    a file that differs from the manifest; OSError. Nothing is changed then.
    """
    source, root = os.path.abspath(source), resolve_parent(root)
    manifest = read_backup(source)
    real = os.path.realpath(source)
    if os.path.commonpath([real, os.path.realpath(root)]) == real:
        raise RelayError(f"{root} is in the backup itself", hint="name another home with --home")
    with _lock_previous(root, force=force) as has_previous:
        temp = root + UNFINISHED
        with new_tree(temp):
            _write_home(source, temp, manifest)
            fsio.sync_filesystem(temp)
            aside = _swap_homes(temp, root) if has_previous else ""
            if not has_previous:
                fsio.fault("rename", root)
                os.rename(temp, root)  # an empty directory is replaced
        fsio.sync_dir(os.path.dirname(root))
    return manifest, aside


@contextlib.contextmanager
def _lock_previous(root: str, *, force: bool) -> Iterator[bool]:
    """True where there is a home already; no relay runs in it during the block."""
    if not os.path.lexists(root) or (os.path.isdir(root) and not os.listdir(root)):
        yield False
        return
    if os.path.islink(root) or not looks_like_home(root):
        raise UnsafePath(f"{root} exists and is not a relay home", hint="name another directory")
    with contextlib.ExitStack() as held:
        held.enter_context(lock_home(root))
        if not force:
            hint = f"--force keeps it as {root}{BEFORE} and puts the backup in its place"
            raise RelayError(f"there is a relay home at {root} already", hint=hint)
        yield True


def _write_home(source: str, temp: str, manifest: BackupManifest) -> None:
    """Write the home, and compare each file with the manifest."""
    for name in (*TOP_DIRS, *sorted(manifest.dirs)):
        os.makedirs(os.path.join(temp, _check_inside(name)), fsio.DIR_MODE, exist_ok=True)
    for entry in manifest.files:
        _copy_file(source, temp, entry)
    for name, mtime_ns in sorted(manifest.dirs.items(), reverse=True):
        os.utime(os.path.join(temp, name), ns=(mtime_ns, mtime_ns))


def _copy_file(source: str, temp: str, entry: Entry) -> None:
    path, target = os.path.join(source, _check_inside(entry.path)), os.path.join(temp, entry.path)
    os.makedirs(os.path.dirname(target), fsio.DIR_MODE, exist_ok=True)
    try:
        fd = fsio.open_read(path)
    except FileNotFoundError as exc:
        raise _damaged(path, 0, f"{entry.size} bytes", "no file") from exc
    try:
        size, sha256 = copy_bytes(fd, target, entry.mtime_ns)
    finally:
        os.close(fd)
    if size != entry.size:
        raise _damaged(path, min(size, entry.size), f"{entry.size} bytes", f"{size} bytes")
    if sha256 != entry.sha256:
        raise _damaged(path, 0, f"SHA-256 {entry.sha256}", sha256)


def _damaged(path: str, offset: int, expected: str, found: str) -> IntegrityError:
    """The error for a file that differs from the backup's manifest."""
    error = IntegrityError(path, offset, expected, found)
    error.hint = DAMAGED
    return error


def _check_inside(path: str) -> str:
    """Return the path if it stays below the home. Errors: UnsafePath."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        text = f"{MANIFEST} names {path!r}, which is not a path below the home"
        raise UnsafePath(text, hint=DAMAGED)
    return path


def _swap_homes(temp: str, root: str) -> str:
    """Exchange the restored home and the previous one; returns the previous one's new name."""
    aside = fsio.free_name(root + BEFORE)
    fsio.fault("rename", aside)
    os.rename(temp, aside)
    try:
        _exchange(aside, root)
    except OSError as exc:
        if exc.errno not in (errno.ENOSYS, errno.EINVAL):
            shutil.rmtree(aside, ignore_errors=True)
            raise
        os.rename(aside, temp)  # not atomic here: both have a name all the time
        os.rename(root, aside)
        os.rename(temp, root)
    return aside


def _exchange(first: str, second: str) -> None:
    """Exchange two names atomically; neither is ever missing.

    Errors: OSError; ENOSYS, EINVAL if the system or the file system does not support it.
    """
    fsio.fault("rename", second)
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if (swap := getattr(library, "renamex_np", None)) is not None:  # macOS
        failed = swap(*names, _SWAP)
    elif (swap := getattr(library, "renameat2", None)) is not None:
        failed = swap(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _SWAP)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), second)
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), first, None, second)
