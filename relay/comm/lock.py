"""The lock of a store file: one writer, whoever it is.

The kernel's flock on ``{path}.lock`` decides, at once, and a killed holder frees it. The text in
it is for people. Source: acomm-file-format.txt, "File Locking".
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from relay import fsio
from relay.errors import StoreLocked


@contextlib.contextmanager
def locked(path: str, now_s: int) -> Iterator[None]:
    """Hold a store file's lock for the block.

    Errors: StoreLocked, with the holder's own words, when another process writes it.
    """
    lock = path + ".lock"
    try:
        with fsio.locked(lock) as fd:
            text = f"PID: {os.getpid()}\nSTARTED: {now_s}\nHOSTNAME: {socket.gethostname()}\n"
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
            yield
    except BlockingIOError:
        with open(lock, errors="replace") as file:
            holder = ", ".join(file.read().split("\n")).strip(", ")
        raise StoreLocked(f"{path} is being written by another process ({holder})") from None
