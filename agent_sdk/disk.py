"""Atomic writing of files, with retries while the disk is full.

    create TEMP → fsync → rename to NAME → fsync of NAME's directory
                          ^ committed here; on any earlier error TEMP is removed

Uses ``relay.base.fsio``, relative to directory descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from relay.base import fsio
from relay.base.errors import RelayWarning
from relay.base.names import MSG_SUFFIX

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
FIRST_PAUSE_S = 0.1  # doubled each time

_sleep = time.sleep  # replaced by tests
_Result = TypeVar("_Result")


def install(data: bytes, temp: str, temp_fd: int, name: str, fd: int, *, sync: bool = True) -> None:
    """Write ``data`` as ``temp``, ``sync`` it, and rename it to ``name`` in the directory ``fd``.

    Committed by the rename. On an error neither name has any of ``data``. The rename is durable
    once the caller has synced ``fd``. After a long delay (a sleeping laptop, a hanging disk) the
    relay may have removed ``temp`` as an orphan; then it is written again.
    """
    try:
        _install(data, temp, temp_fd, name, fd, sync)
    except FileNotFoundError:
        _install(data, temp, temp_fd, name, fd, sync)


def _install(data: bytes, temp: str, temp_fd: int, name: str, fd: int, sync: bool) -> None:
    with cleanup_on_error(temp, temp_fd):
        fsio.create(temp, data, temp_fd)
        if sync:
            sync_name(temp, temp_fd)
        fsio.rename(temp, temp_fd, name, fd)


def install_many(
    files: Sequence[tuple[str, bytes]], temp_fd: int, fd: int, path: str, retry_s: float
) -> None:
    """Write all files (name, data), sync them at once, and rename each into the directory ``fd``.

    ``path`` is on their file system. A full disk is waited for up to ``retry_s`` in all. An error
    before the first rename leaves none of them; after it, its notes name those that were renamed.
    """
    renamed: list[str] = []
    left = list(reversed(files))

    def write() -> None:
        while left:
            fsio.create(*left[-1], temp_fd)
            left.pop()
        fsio.sync_filesystem(path)

    try:
        retry_on_enospc(write, retry_s)
        for name, data in files:
            try:
                fsio.rename(name, temp_fd, name, fd)
            except FileNotFoundError:  # removed as an orphan; see ``install``
                _install(data, name, temp_fd, name, fd, True)
            renamed.append(name.removesuffix(MSG_SUFFIX))
    except BaseException as exc:
        for name, _ in files:
            with contextlib.suppress(OSError):
                fsio.remove(name, temp_fd)
        add_sent_note(exc, renamed)
        raise


def add_sent_note(exc: BaseException, ids: Sequence[str]) -> None:
    """Add to an error which messages have been sent nevertheless."""
    if len(ids) == 1:
        exc.add_note(f"message {ids[0]} has been sent: do not send it again")
    elif ids:
        exc.add_note(
            f"{len(ids)} messages, {ids[0]} to {ids[-1]}, have been sent: do not send them again"
        )


@contextlib.contextmanager
def cleanup_on_error(temp: str, temp_fd: int) -> Iterator[None]:
    """Remove ``temp`` if the block ends with an exception, even one raised by a signal."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            fsio.remove(temp, temp_fd)
        raise


def sync_name(name: str, dir_fd: int) -> None:
    """Sync a file by name, like ``sync FILE``."""
    fsio.fault("sync", name)
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        fsio.sync_file(fd)
    finally:
        os.close(fd)


def retry_on_enospc(work: Callable[[], _Result], limit_s: float) -> _Result:
    """Do ``work``, retrying after 0.1, 0.2, 0.4 … seconds while the disk or quota is full.

    The pauses add up to at most ``limit_s``; a RelayWarning says so before the first. Errors: then
    the last OSError; any other OSError at once.
    """
    pause_s, left_s = FIRST_PAUSE_S, limit_s
    while True:
        try:
            return work()
        except OSError as exc:
            if exc.errno not in FULL_ERRNOS or left_s <= 0:
                raise
        if left_s == limit_s:
            warnings.warn(f"disk full, trying for {limit_s:g} s", RelayWarning, stacklevel=2)
        pause_s = min(pause_s, left_s)
        _sleep(pause_s)
        left_s -= pause_s
        pause_s *= 2
