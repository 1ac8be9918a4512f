"""Disk: every write, rename and open below a home goes through here.

Opens are relative to a directory descriptor and never follow a link; only regular files are
read. ``write_atomic`` is the one way to replace a file: after its rename the new content is
there, whole, even if the power goes.

``fault`` is the one place where tests let a call fail: it is called with the name of the
operation before each effect.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator

from relay.base import owners
from relay.base.errors import HardLink, UnsafePath

DIR_MODE = 0o700
FILE_MODE = 0o600
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must not wait for its writer.
_OPEN_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OPEN_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# What a full or read-only disk answers: the work waits and is tried again.
DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})

# What says nothing of the file that was looked at: the process, or the machine, has no more.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def _no_fault(operation: str, name: str) -> None:
    """In production nothing fails on purpose."""


fault: Callable[[str, str], None] = _no_fault


def write_atomic(path: str, data: bytes, *, keep: str = "") -> None:
    """Replace ``path`` by ``data``: temp file, write, fsync, rename, fsync of the directory.

    Committed at the rename: a crash before it leaves the old file and ``path.tmp``. On a full
    disk the piece written is removed again. ``keep``: the name that the old file has afterwards,
    in the same directory; at any instant one of the two names has a whole file. The directory is
    opened once, as one and no link: one that is replaced meanwhile is not written through.
    Errors: UnsafePath, OSError.
    """
    folder, name = os.path.split(path)
    temp = name + ".tmp"
    dir_fd = open_dir(folder or ".")
    try:
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


def _write_temp(path: str, temp: str, data: bytes, dir_fd: int) -> None:
    """The new content, synced, beside what it is to replace; or nothing of it."""
    fault("create", path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temp, flags, FILE_MODE, dir_fd=dir_fd)
    except OSError as exc:
        exc.filename = path + ".tmp"  # people want to know where
        raise
    try:
        fault("write", path)
        _write_all(fd, data)
        sync_file(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temp, dir_fd=dir_fd)
        raise
    finally:
        os.close(fd)


def _keep(name: str, keep: str, dir_fd: int) -> None:
    """Give the file that is to be replaced another name, in the place of what has that."""
    temp = keep + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temp, dir_fd=dir_fd)
    try:
        os.link(name, temp, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return  # there is none yet
    except OSError:  # no hard links here: for an instant the old file has its new name alone
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
    """A descriptor of a regular file for reading and writing in place; ``new``: it must not be.

    Errors: UnsafePath for a link or anything but a regular file; FileExistsError,
    FileNotFoundError.
    """
    fault("create" if new else "open", path)
    create = os.O_CREAT | os.O_EXCL if new else 0
    return _open_regular(path, os.O_RDWR | create | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def open_read(path: str) -> int:
    """A descriptor of a regular file for reading. Errors: UnsafePath, FileNotFoundError."""
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
    """Write all of ``data`` at ``offset``; durable after ``sync_data``. Errors: OSError, and
    some of it may stand there. ``name`` is for the tests' faults."""
    fault("write", name)
    view = memoryview(data)
    while view:
        try:
            written = os.pwrite(fd, view, offset)
        except OSError as exc:
            exc.filename = name  # a full disk: of several, people want to know which
            raise
        view = view[written:]
        offset += written


def sync_data(fd: int, name: str) -> None:
    """Make a file's bytes and its length durable, its times not; where there is no such call, all.

    Errors: OSError, and then nobody knows which bytes are: see the callers.
    """
    fault("sync", name)
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        sync_file(fd)


def truncate(fd: int, length: int, name: str) -> None:
    """Cut a file, or lengthen it; durable after ``sync_data``."""
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

    Python has no call for it; where the C library has none, either, everything is synced.
    """
    import ctypes  # here: who only sends a file does without

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
    """A descriptor of a directory, which must be one and no link.

    Errors: UnsafePath for a link or something else; FileNotFoundError.
    """
    try:
        return os.open(name, _OPEN_DIR, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafePath(f"{name} is a link or no directory") from exc
        raise


def ensure_dir(name: str, dir_fd: int | None = None) -> None:
    """Make a directory of mode 700, or take the one that is there."""
    try:
        os.mkdir(name, DIR_MODE, dir_fd=dir_fd)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            raise UnsafePath(f"{name} exists and is not a directory") from None
        restrict(name, DIR_MODE, dir_fd)


def restrict(name: str, mode: int, dir_fd: int | None = None) -> bool:
    """Set a mode; True when it was another. Links are refused.

    Errors: UnsafePath when ``name`` is a link, ForeignOwner when it is somebody else's, HardLink
    when a change would be another name's, too.
    """
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise UnsafePath(f"{name} is a link")
    if status.st_uid != os.geteuid():
        raise owners.foreign(name, status)
    if stat.S_IMODE(status.st_mode) == mode:
        return False
    if stat.S_ISREG(status.st_mode):
        _refuse_links(name, status)  # its mode is the other name's, too
    os.chmod(name, mode, dir_fd=dir_fd)
    return True


def open_own(name: str, dir_fd: int | None) -> int:
    """A descriptor for reading a regular file that is ours alone; its mode is 600 afterwards.

    Errors: UnsafePath for anything but a regular file, HardLink for one of several names,
    ForeignOwner for another user's: nothing was changed then; FileNotFoundError.
    """
    return _open_own(name, dir_fd, False)[0]


def open_shared(name: str, dir_fd: int | None) -> int:
    """A descriptor for reading a regular file, whoever's it is; nothing of it is changed.

    Errors: UnsafePath for anything else; FileNotFoundError.
    """
    return _open_own(name, dir_fd, True, False)[0]


def _open_own(
    name: str, dir_fd: int | None, shared: bool, narrow: bool = True
) -> tuple[int, os.stat_result]:
    try:
        fd = os.open(name, _OPEN_READ, dir_fd=dir_fd)
    except PermissionError as exc:
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
        raise owners.foreign(name, status) from cause


def read_regular(
    name: str, dir_fd: int | None, limit: int, *, shared: bool = False, narrow: bool = True
) -> tuple[bytes, os.stat_result]:
    """Up to ``limit`` bytes of a regular file, and what fstat said once they were read.

    The stat comes after the read: a size that differs from the bytes read means that
    somebody was still writing. ``shared``: one that has other names (a backup of hard links), or
    is another user's, is read all the same, and stays as it is: for what no agent
    sends. ``narrow`` False: the mode of one that is ours stays as it is, too.
    Errors: as ``open_own``.
    """
    fd, status = _open_own(name, dir_fd, shared, narrow)
    size = status.st_size
    try:
        data = os.read(fd, min(limit, max(size, 1)))
        while len(data) < min(limit, size):
            more = os.read(fd, limit - len(data))
            if not more:
                break
            data += more
        return data, os.fstat(fd)
    finally:
        os.close(fd)


def create(name: str, data: bytes, dir_fd: int, *, sync: bool = False) -> None:
    """A new file of mode 600 with ``data`` in it; one of that name must not be there.

    Not synced unless ``sync``: durability is the business of whoever commits. On a full disk the
    piece written is removed again.
    """
    fault("create", name)
    fd = os.open(name, _OPEN_CREATE, FILE_MODE, dir_fd=dir_fd)
    try:
        fault("write", name)
        _write_all(fd, data)
        if sync:
            sync_file(fd)
            os.fsync(dir_fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=dir_fd)
        raise
    finally:
        os.close(fd)


def rename(source: str, source_fd: int, target: str, target_fd: int) -> None:
    """Move a file between two open directories; atomic, and replaces the target."""
    fault("rename", target)
    os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def move(source: str, source_fd: int, target: str, target_fd: int) -> None:
    """Like ``rename``, and across file systems by copy; the source is there until the copy is."""
    try:
        rename(source, source_fd, target, target_fd)
    except OSError as exc:
        if exc.errno != errno.EXDEV:
            raise
        data, _ = read_regular(source, source_fd, 1 << 31, shared=True)
        remove(target, target_fd)
        create(target, data, target_fd)
        os.unlink(source, dir_fd=source_fd)


def rotate(path: str, keep_files: int) -> None:
    """Let ``path`` become ``path.1``, that one ``path.2``, and so on; the oldest goes.

    From the oldest on: a crash in between leaves a gap in the numbers and loses none.
    Errors: OSError.
    """
    for number in range(keep_files, 0, -1):
        source = f"{path}.{number - 1}" if number > 1 else path
        fault("rename", source)
        with contextlib.suppress(FileNotFoundError):
            os.replace(source, f"{path}.{number}")


def remove(name: str, dir_fd: int) -> None:
    """Remove a file; one that is gone already is fine."""
    fault("remove", name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


def remove_dir(name: str, dir_fd: int) -> None:
    """Remove a directory that is empty. Errors: OSError for one that is not, or is none."""
    fault("remove", name)
    os.rmdir(name, dir_fd=dir_fd)


def exists(name: str, dir_fd: int | None = None) -> bool:
    """True when something of that name is in the open directory, or at that path.

    False on the one evidence there is: the system says that there is no such name. Errors:
    OSError when nobody can look.
    """
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):  # the latter of a path, whose folder is gone
        return False
    return True


def free_name(path: str, *suffixes: str) -> str:
    """``path``, or ``path.1`` …: the first such that no file has it, with or without a suffix."""
    name, number = path, 0
    while any(os.path.lexists(name + suffix) for suffix in ("", *suffixes)):
        number += 1
        name = f"{path}.{number}"
    return name


@contextlib.contextmanager
def locked(path: str) -> Iterator[int]:
    """Hold the lock file ``path`` for the block; yields its descriptor.

    The kernel's flock decides: a killed holder frees it at once. A record lock beside it lets
    ``lock_owner`` ask who it is. Errors: BlockingIOError when somebody has it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # where there is none, nobody can ask
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
    finally:
        os.close(fd)


def take_lock(name: str, dir_fd: int) -> int | None:
    """The descriptor of a lock file that is locked now, or None while somebody has it.

    Whoever inherits the descriptor holds the lock as well, until the last of them closes it or
    ends: the kernel knows, whatever became of who took it.
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
    """A descriptor that writes at a file's end wherever that is; the file is made, mode 600."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, FILE_MODE, dir_fd=dir_fd)


def lock_owner(path: str) -> int | None:
    """The pid of the process that holds ``path``'s lock; asking takes nothing. None: nobody.

    It writes nothing, either: a home on a read-only disk can be asked about.
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
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
