"""Disk: every write, rename and open below a home goes through here.

Opens are relative to a directory descriptor and never follow a link; only regular files are
read. Files are replaced by ``write_atomic`` alone: after its rename the new content is complete,
even after a power failure.

Tests let a call fail through ``fault``, which is called with the operation's name before each
effect.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import operator
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator

from relay.base.errors import ForeignOwner, HardLink, UnsafePath

DIR_MODE = 0o700
FILE_MODE = 0o600
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must not wait for its writer.
_OPEN_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OPEN_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Errors of a full or read-only disk: the work waits and is retried.
DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})

# Errors that say nothing about the file: the process, or the machine, has no more of a resource.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# Called with an operation and a name before each effect on a file: tests put kills and failures
# here. A built-in that has no effect costs nothing on the way of a message.
fault: Callable[[str, str], object] = operator.is_


def write_atomic(path: str, data: bytes | Iterable[bytes], *, keep: str = "") -> None:
    """Replace ``path`` by ``data``, or its pieces: temp file, write, fsync, rename, fsync of the
    directory, which is opened once and must not be a link.

    Committed at the rename: a crash before it leaves the old file and ``path.tmp``. On an error
    the new file is removed. ``keep``: the new name of the old file, in the same directory; at any
    instant one of the two names has a complete file.
    Errors: UnsafePath, also for a directory, device or pipe of that name; OSError.
    """
    folder, name = os.path.split(path)
    temp = name + ".tmp"
    dir_fd = open_dir(folder or ".")
    try:
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                raise UnsafePath(f"{path} is not a regular file")
        _write_temp(path, temp, data, dir_fd)
        if keep:
            fault("keep", keep)
            _keep(name, os.path.basename(keep), dir_fd)
        fault("rename", path)
        os.rename(temp, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        fault("sync", folder or ".")
        os.fsync(dir_fd)
    finally:
        os.close(dir_fd)


def _write_temp(path: str, temp: str, data: bytes | Iterable[bytes], dir_fd: int) -> None:
    """Write and sync the new content beside the old file; an error leaves nothing of it."""
    fault("create", path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temp, flags, FILE_MODE, dir_fd=dir_fd)
    except OSError as exc:
        exc.filename = path + ".tmp"  # for the error message
        raise
    try:
        fault("write", path)
        for piece in [data] if isinstance(data, bytes) else data:
            _write_all(fd, piece)
        sync_file(fd)
    except Exception as exc:
        _remove_incomplete(temp, dir_fd)
        if isinstance(exc, OSError):
            exc.filename = exc.filename or path
        raise
    finally:
        os.close(fd)


def _remove_incomplete(name: str, dir_fd: int) -> None:
    """Remove a new file that could not be filled, as far as possible."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=dir_fd)


def _keep(name: str, keep: str, dir_fd: int) -> None:
    """Give the old file a second name, replacing the file of that name."""
    temp = keep + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temp, dir_fd=dir_fd)
    try:
        os.link(name, temp, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return  # no old file
    except OSError:  # no hard links here: the old file briefly has its new name only
        os.rename(name, keep, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        return
    os.rename(temp, keep, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def sync_file(fd: int) -> None:
    """Make the file's bytes durable, as far as the system can."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:  # macOS: fsync alone leaves them in the drive's cache
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, full_sync)
            return
    os.fsync(fd)


def open_rw(path: str, *, new: bool = False) -> int:
    """Open a regular file for reading and writing in place; ``new``: create it.

    Errors: UnsafePath for a link or anything but a regular file; FileExistsError,
    FileNotFoundError.
    """
    fault("create" if new else "open", path)
    create = os.O_CREAT | os.O_EXCL if new else 0
    return _open_regular(path, os.O_RDWR | create | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def open_read(path: str) -> int:
    """Open a regular file for reading. Errors: UnsafePath, FileNotFoundError."""
    return _open_regular(path, _OPEN_READ)


def _open_regular(path: str, flags: int) -> int:
    try:
        fd = os.open(path, flags, FILE_MODE)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise UnsafePath(f"{path} is not a regular file") from exc
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafePath(f"{path} is not a regular file")
    return fd


def write_at(fd: int, data: bytes | memoryview, offset: int, name: str) -> None:
    """Write all of ``data`` at ``offset``; durable after ``sync_data``.

    ``name`` is for errors and faults. Errors: OSError, when part of it may have been written.
    """
    fault("write", name)
    view = memoryview(data)
    while view:
        try:
            written = os.pwrite(fd, view, offset)
        except OSError as exc:
            exc.filename = name  # for the error message
            raise
        view = view[written:]
        offset += written


def sync_data(fd: int, name: str) -> None:
    """Make a file's bytes and length durable, and its times only where fdatasync is missing.

    Errors: OSError, after which it is unknown which bytes are durable.
    """
    fault("sync", name)
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        sync_file(fd)


def truncate(fd: int, length: int, name: str) -> None:
    """Set a file's length; durable after ``sync_data``."""
    fault("truncate", name)
    os.ftruncate(fd, length)


def sync_dir(path: str) -> None:
    """Make the names in a directory durable."""
    fault("sync", path)
    fd = os.open(path, _OPEN_DIR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_filesystem(path: str) -> None:
    """Make everything durable that was written to the file system that ``path`` is on.

    Python has no syncfs; where the C library has none either, all file systems are synced.
    """
    import ctypes  # here: sending a file does not need it

    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    fault("syncfs", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if syncfs is None:
            os.sync()
        elif syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(fd)


def open_dir(name: str, dir_fd: int | None = None) -> int:
    """Open a directory; links are refused.

    Errors: UnsafePath for a link or something else; FileNotFoundError.
    """
    try:
        return os.open(name, _OPEN_DIR, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafePath(f"{name} is a link or not a directory") from exc
        raise


def ensure_dir(name: str, dir_fd: int | None = None) -> None:
    """Make a directory of mode 700 unless it exists; an existing one gets that mode."""
    try:
        os.mkdir(name, DIR_MODE, dir_fd=dir_fd)
    except FileExistsError as exc:
        if not stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            path = _placed(exc, dir_fd).filename
            raise UnsafePath(f"{path} exists and is not a directory") from None
        restrict(name, DIR_MODE, dir_fd)
    except OSError as exc:
        raise _placed(exc, dir_fd) from None


def _placed(exc: OSError, dir_fd: int | None) -> OSError:
    """The error with the whole path of what it names, where the system tells the directory's."""
    with contextlib.suppress(OSError):
        if exc.filename:
            exc.filename = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), exc.filename)
    return exc


def restrict(name: str, mode: int, dir_fd: int | None = None) -> bool:
    """Set a mode; True when it was different.

    Errors: UnsafePath when ``name`` is a link, ForeignOwner when it belongs to another user,
    HardLink when the file has other names, whose mode would change as well.
    """
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise UnsafePath(f"{name} is a link")
    if status.st_uid != os.geteuid():
        raise ForeignOwner(name, status.st_uid)
    if stat.S_IMODE(status.st_mode) == mode:
        return False
    if stat.S_ISREG(status.st_mode):
        _refuse_links(name, status)
    os.chmod(name, mode, dir_fd=dir_fd)
    return True


def open_regular(
    name: str, dir_fd: int | None, *, shared: bool = False, narrow: bool = True
) -> tuple[int, os.stat_result]:
    """Open a regular file for reading: its descriptor, and its status before its mode was changed.

    The mode becomes 600. Options: as ``read_regular``. Errors: UnsafePath for anything but a
    regular file, HardLink for a file with several names, ForeignOwner for another user's file; none
    of these is changed. FileNotFoundError.
    """
    try:
        fd = os.open(name, _OPEN_READ, dir_fd=dir_fd)
    except PermissionError as exc:
        if not shared and restrict(name, FILE_MODE, dir_fd):  # its mode kept its owner out
            return open_regular(name, dir_fd, narrow=narrow)
        _refuse_foreign(name, os.stat(name, dir_fd=dir_fd, follow_symlinks=False), exc)
        raise
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise UnsafePath(f"{name} is not a regular file but a link, socket or similar") from exc
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePath(f"{name} is not a regular file")
        if not shared:
            _refuse_foreign(name, status)
            _refuse_links(name, status)
        is_ours = status.st_nlink == 1 and status.st_uid == os.geteuid()
        if narrow and is_ours and stat.S_IMODE(status.st_mode) != FILE_MODE:
            os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def _refuse_links(name: str, status: os.stat_result) -> None:
    if status.st_nlink > 1:
        text = f"{name} has {status.st_nlink} hard links: it is a file elsewhere, too; use a copy"
        raise HardLink(text)


def _refuse_foreign(name: str, status: os.stat_result, cause: OSError | None = None) -> None:
    if status.st_uid != os.geteuid():
        raise ForeignOwner(name, status.st_uid) from cause


def read_regular(
    name: str, dir_fd: int | None, limit: int, *, shared: bool = False, narrow: bool = True
) -> tuple[bytes, os.stat_result]:
    """Read up to ``limit`` bytes of a regular file; returns them and its status after the read.

    A size that differs from the number of bytes read means that the file was still being written.
    ``shared``: a file with other names (a backup of hard links) or of another user is read as
    well, and not changed: for files that no agent sends. ``narrow`` False: the mode is not
    changed either, unless its owner could not open the file. Errors: as ``open_regular``.
    """
    fd, status = open_regular(name, dir_fd, shared=shared, narrow=narrow)
    try:
        return read_open(fd, status.st_size, limit)
    finally:
        os.close(fd)


def read_open(fd: int, size: int, limit: int) -> tuple[bytes, os.stat_result]:
    """Read a file of ``size`` bytes, and up to ``limit``, from its start; its status after that."""
    data = os.read(fd, min(limit, max(size, 1)))
    while len(data) < min(limit, size):
        more = os.read(fd, limit - len(data))
        if not more:
            break
        data += more
    return data, os.fstat(fd)


def create(name: str, data: bytes, dir_fd: int, *, sync: bool = False) -> None:
    """Create a file of mode 600 with ``data``. Errors: FileExistsError, OSError.

    Not synced unless ``sync``: callers sync when they commit. On a full disk the incomplete file
    is removed.
    """
    fault("create", name)
    try:
        fd = os.open(name, _OPEN_CREATE, FILE_MODE, dir_fd=dir_fd)
    except OSError as exc:
        raise _placed(exc, dir_fd) from None
    try:
        fault("write", name)
        _write_all(fd, data)
        if sync:
            sync_file(fd)
            os.fsync(dir_fd)
    except OSError as exc:
        _remove_incomplete(name, dir_fd)
        exc.filename = name
        raise _placed(exc, dir_fd) from None
    finally:
        os.close(fd)


def rename(source: str, source_fd: int, target: str, target_fd: int) -> None:
    """Move a file between two open directories, atomically, replacing the target.

    Where the system moves none (to another file system; in a sandbox of Landlock before Linux 5.19
    to any other directory) a copy is renamed there, and then the source removed: of two at once the
    second gets FileNotFoundError, as from a rename.
    """
    try:
        fault("rename", target)
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
    except OSError as exc:
        if exc.errno != errno.EXDEV:
            raise _placed(exc, source_fd) from None
        _move_copy(source, source_fd, target, target_fd)


def _move_copy(source: str, source_fd: int, target: str, target_fd: int) -> None:
    temp = f".{os.urandom(8).hex()}.tmp"
    data, _ = read_regular(source, source_fd, 1 << 31, shared=True)
    create(temp, data, target_fd, sync=True)
    os.rename(temp, target, src_dir_fd=target_fd, dst_dir_fd=target_fd)
    os.fsync(target_fd)
    os.unlink(source, dir_fd=source_fd)


def remove(name: str, dir_fd: int) -> None:
    """Remove a file if it exists."""
    fault("remove", name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


def remove_dir(name: str, dir_fd: int) -> None:
    """Remove an empty directory. Errors: OSError if it is not empty or not a directory."""
    fault("remove", name)
    os.rmdir(name, dir_fd=dir_fd)


def exists(name: str, dir_fd: int | None = None) -> bool:
    """True when that name exists in the open directory, or that path exists.

    False only when the system says that it does not exist. Errors: OSError when the directory
    cannot be read.
    """
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):  # the latter when a parent is gone
        return False
    return True


def free_name(path: str, *suffixes: str) -> str:
    """The first of ``path``, ``path.1`` … that no file has, with or without a suffix."""
    name, number = path, 0
    while any(os.path.lexists(name + suffix) for suffix in ("", *suffixes)):
        number += 1
        name = f"{path}.{number}"
    return name


@contextlib.contextmanager
def locked(path: str) -> Iterator[int]:
    """Hold the lock file ``path`` for the block; yields its descriptor.

    The kernel's flock decides, so a killed holder releases it at once. A record lock on the same
    file lets ``lock_owner`` find the holder. Errors: BlockingIOError when it is held.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # without record locks, lock_owner finds none
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
    finally:
        os.close(fd)


def take_lock(name: str, dir_fd: int) -> int | None:
    """Lock a lock file and return its descriptor; None if another process holds it.

    Processes that inherit the descriptor hold the lock as well; it is released when the last of
    them closes it or ends.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, FILE_MODE, dir_fd=dir_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_append(name: str, dir_fd: int) -> int:
    """Open a file for appending; it is created with mode 600 if needed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, FILE_MODE, dir_fd=dir_fd)


def lock_owner(path: str) -> int | None:
    """The pid of the process that holds the lock of ``path``; None if no process does.

    0 if it is in a PID namespace that is not visible from this one.
    It neither takes the lock nor writes, so it works on a read-only disk.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if sys.platform == "darwin":  # start, length, pid, type, whence
            question = struct.pack("qqihh", 0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
            _, _, pid, kind, _ = struct.unpack("qqihh", fcntl.fcntl(fd, fcntl.F_GETLK, question))
        else:  # type, whence, start, length, pid
            question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, question))
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else int(pid)


def _write_all(fd: int, data: bytes) -> None:
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])
