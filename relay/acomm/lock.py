"""The lock of a store file: one writer, whoever it is.

The kernel's flock on ``{path}.lock`` decides, at once, and a killed holder frees it; the text in
it is for people. Where the file system has no flock the text decides: whoever makes the file has
it, and removes it. One whose process no longer runs on this host is taken over after 60 s.
Source: acomm-file-format.txt, "File Locking" and "Lock File Format".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator

from relay.base import fsio
from relay.base.errors import StoreLocked

STALE_S = 60
NO_FLOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_TEXT = re.compile(r"PID: (\d+)\nSTARTED: \d+\nHOSTNAME: (.*)\n")
_MOST = 4096  # bytes of such a text


@contextlib.contextmanager
def locked(path: str, now_s: int) -> Iterator[None]:
    """Hold a store file's lock for the block.

    Errors: StoreLocked, with the holder's own words, when another process writes it.
    """
    lock = path + ".lock"
    fd, is_new = _open(lock)
    by_text = False
    try:
        by_text = not _flock(fd, path, lock)
        if by_text and not is_new:
            os.close(fd)
            fd = -1
            fd = _take_over(path, lock, now_s)
        text = f"PID: {os.getpid()}\nSTARTED: {now_s}\nHOSTNAME: {socket.gethostname()}\n"
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
        if by_text and not _is_at(fd, lock):  # it took so long that somebody took it over
            by_text = False
            raise _refusal(path, lock)
        yield
    finally:
        if by_text and _is_at(fd, lock):
            os.unlink(lock)
        if fd >= 0:
            os.close(fd)


def _open(lock: str) -> tuple[int, bool]:
    """The lock file's descriptor, and whether it was made just now."""
    while True:
        try:
            return os.open(lock, _OPEN | os.O_CREAT | os.O_EXCL, fsio.FILE_MODE), True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # its holder was just done with it
                return os.open(lock, _OPEN), False


def _flock(fd: int, path: str, lock: str) -> bool:
    """True when the kernel gave us the lock; False where it keeps none. Errors: StoreLocked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(path, lock) from None
    except OSError as exc:
        if exc.errno not in NO_FLOCK:
            raise
        return False
    return True


def _take_over(path: str, lock: str, now_s: int) -> int:
    """A descriptor of our own lock file, in the place of a stale one. Errors: StoreLocked.

    One process at a time looks and removes, so that nobody removes what another has just made.
    """
    guard = lock + ".takeover"
    try:
        os.close(os.open(guard, _OPEN | os.O_CREAT | os.O_EXCL, fsio.FILE_MODE))
    except FileExistsError:
        raise StoreLocked(
            f"{path}: another process takes over the lock; if there is none, remove {guard}"
        ) from None
    try:
        with contextlib.suppress(FileNotFoundError):
            if not _is_stale(lock, now_s):
                raise _refusal(path, lock)
            os.unlink(lock)
        fd, is_new = _open(lock)
        if not is_new:
            os.close(fd)
            raise _refusal(path, lock)
        return fd
    finally:
        os.unlink(guard)


def _is_stale(lock: str, now_s: int) -> bool:
    """True for a lock older than 60 s whose process is no more, as far as this host can tell."""
    if now_s - os.stat(lock).st_mtime < STALE_S:
        return False
    holder = _TEXT.fullmatch(_words(lock))
    if holder is None:
        return True  # whoever made it was gone before it had written a line
    pid, host = holder.groups()
    return host == socket.gethostname() and not _runs(int(pid))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_at(fd: int, lock: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(lock))
    return False


def _refusal(path: str, lock: str) -> StoreLocked:
    holder = ", ".join(_words(lock).split("\n")).strip(", ")
    return StoreLocked(f"{path} is being written by another process ({holder})")


def _words(lock: str) -> str:
    try:
        with open(lock, "rb") as file:
            return file.read(_MOST).decode(errors="replace")
    except FileNotFoundError:
        return ""
