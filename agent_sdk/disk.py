"""Writing a file that is there whole or not at all, and patience with a full disk.

    create TEMP → fsync → rename to NAME → fsync of NAME's directory
                          ^ committed here; before it, TEMP is removed whatever goes wrong

All of it goes through ``relay.base.fsio``, relative to directory descriptors.
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
FIRST_PAUSE_S = 0.1  # doubled each time: room on a disk is made by people and by pruning

_sleep = time.sleep  # tests put a clock of their own here
_Result = TypeVar("_Result")


def install(data: bytes, temp: str, temp_fd: int, name: str, fd: int) -> None:
    """Write ``data`` as ``temp``, sync it, and rename it to ``name`` in the directory ``fd``.

    Committed at the rename. When this raises, neither name holds anything of ``data``.
    The rename itself is durable once the caller has synced ``fd``. Whoever was held up for so
    long (a laptop asleep, a disk that hangs) that the relay took the file for an orphan's
    writes it once more.
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
    """Whatever ends the block but success, a signal included, leaves no ``temp`` behind."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            fsio.remove(temp, temp_fd)
        raise


def sync_name(name: str, dir_fd: int) -> None:
    """Make a file's bytes durable by its name, as ``sync FILE`` does."""
    fsio.fault("sync", name)
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        fsio.sync_file(fd)
    finally:
        os.close(fd)


def retry_on_enospc(work: Callable[[], _Result], limit_s: float) -> _Result:
    """Do ``work``; while the disk or quota is full, again after 0.1, 0.2, 0.4 … seconds.

    The pauses add up to ``limit_s`` at most. Errors: the last OSError then, and any other
    at once. Source: relay-file-system.txt 6.2.
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
