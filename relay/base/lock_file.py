"""The home's lock file: is a relay running, why is it not serving, how did the last one end.

The first line is the pid, the second the reason why no session runs; a clean stop empties the file.
Written by the daemon, read by commands without loading the daemon.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from relay.base import fsio
from relay.base.clock import iso_time
from relay.base.errors import UnsafePath
from relay.base.home import LEDGER, LOCK, Home

LOG = "logs/relay.log"
TROUBLE_CHARACTERS = 500
LAST_WRITTEN = (LOCK, LOG, LEDGER + "-wal")  # by a relay alone, while it runs


def write_trouble(lock_fd: int, trouble: str) -> None:
    """Write the pid of this process and its trouble in one line; ignored on a full disk."""
    data = f"{os.getpid()}\n{trouble}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        os.ftruncate(lock_fd, os.pwrite(lock_fd, data, 0))


def lock_holder(home: Home) -> int | None:
    """The pid of the relay running for this home, by the kernel's lock; None if there is none."""
    return fsio.lock_owner(home.path(LOCK))


def running_trouble(home: Home) -> str:
    """The reason why the running relay is not serving; empty while it serves."""
    with contextlib.suppress(OSError):
        data, _ = fsio.read_regular(home.path(LOCK), None, 4 * TROUBLE_CHARACTERS, shared=True)
        return "".join(data.decode(errors="replace").splitlines()[1:2])
    return ""


class UncleanStop(NamedTuple):
    """A relay that did not stop cleanly: killed, crashed, or the machine went down."""

    pid: int
    last_sign_ns: int  # Unix time of the last that it is known to have written

    def __str__(self) -> str:
        at = iso_time(self.last_sign_ns)[:19]
        return f"pid {self.pid}, did not stop by itself; its last sign of life was at {at}Z"


def unclean_stop(home: Home) -> UncleanStop | None:
    """The last relay if it did not stop cleanly; None if it did, or if one is running.

    Evidence: its pid in the lock's file, which a stop empties.
    """
    if lock_holder(home) is not None:
        return None
    try:
        data, _ = fsio.read_regular(home.path(LOCK), None, 4 * TROUBLE_CHARACTERS, shared=True)
    except (OSError, UnsafePath):
        return None
    word = data.partition(b"\n")[0]
    if not word.isdigit():
        return None
    seen = [0]
    for name in LAST_WRITTEN:
        with contextlib.suppress(OSError):
            seen.append(os.lstat(home.path(name)).st_mtime_ns)
    return UncleanStop(int(word), max(seen))
