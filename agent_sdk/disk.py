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
from collections.abc import Callable, Iterator
from typing import TypeVar

from relay.base import fsio

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
FIRST_PAUSE_S = 0.1  # doubled each time

_sleep = time.sleep  # replaced by tests
_Result = TypeVar("_Result")


def install(data: bytes, temp: str, temp_fd: int, name: str, fd: int) -> None:
    """Write ``data`` as ``temp``, sync it, and rename it to ``name`` in the directory ``fd``.

    Committed by the rename. On an error neither name has any of ``data``. The rename is durable
    once the caller has synced ``fd``. After a long delay (a sleeping laptop, a hanging disk) the
    relay may have removed ``temp`` as an orphan; then it is written again.
    """
    try:
        _install(data, temp, temp_fd, name, fd)
    except FileNotFoundError:
        _install(data, temp, temp_fd, name, fd)


def _install(data: bytes, temp: str, temp_fd: int, name: str, fd: int) -> None:
    with cleanup_on_error(temp, temp_fd):
        fsio.create(temp, data, temp_fd)
        sync_name(temp, temp_fd)
        fsio.rename(temp, temp_fd, name, fd)


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

    The pauses add up to at most ``limit_s``. Errors: then the last OSError; any other OSError at
    once. Source: relay-file-system.txt 6.2.
    """
    pause_s, left_s = FIRST_PAUSE_S, limit_s
    while True:
        try:
            return work()
        except OSError as exc:
            if exc.errno not in FULL_ERRNOS or left_s <= 0:
                raise
        pause_s = min(pause_s, left_s)
        _sleep(pause_s)
        left_s -= pause_s
        pause_s *= 2
