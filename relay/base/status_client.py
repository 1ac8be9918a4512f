"""Client of a running relay's status, and the address of its socket.

No relay, a relay without a socket, and a relay that hangs are different: ``ask`` detects the last,
``relay.base.home.lock_holder`` the first.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from relay.base import process_info
from relay.base.home import Home

SOCKET = "admin.sock"
MOST_PATH_BYTES = 103 if sys.platform == "darwin" else 107  # of an AF_UNIX address
DESCRIPTORS = "/proc/self/fd"  # Linux: each is a directory entry
TIMEOUT_S = 3.0
POLL_S = 0.05


class StatusReply(NamedTuple):
    """The reply to a status request."""

    status: dict[str, Any] | None  # None: no valid reply
    is_silent: bool = False  # a process has the socket, but did not reply in time


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Connect to the path. Errors: TimeoutError, also while its queue is full."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                with socket_address(self._path) as address:
                    self.sock.connect(address)
                return
            except BlockingIOError as exc:  # its queue of connections is full
                if time.monotonic() > deadline:
                    raise TimeoutError from exc
                time.sleep(POLL_S)


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """The address to which a socket at ``path`` is bound or connected; valid in the block.

    A path that is too long for one is reached through a descriptor of its directory, on Linux.
    Errors: OSError.
    """
    if len(os.fsencode(path)) <= MOST_PATH_BYTES or not os.path.isdir(DESCRIPTORS):
        yield path
        return
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"{DESCRIPTORS}/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def ask(home: Home, timeout_s: float = TIMEOUT_S) -> StatusReply:
    """Request ``/status`` of the relay of this home."""
    connection = _UnixConnection(home.path(SOCKET), timeout_s)
    try:
        connection.request("GET", "/status")
        status = json.loads(connection.getresponse().read())
        return StatusReply(status if isinstance(status, dict) else None)
    except TimeoutError:
        return StatusReply(None, is_silent=True)
    except (OSError, ValueError, http.client.HTTPException):
        return StatusReply(None)
    finally:
        with contextlib.suppress(OSError):
            connection.close()


def ask_status(home: Home) -> dict[str, Any] | None:
    """Request ``/status`` of the relay of this home; None without a reply."""
    return ask(home).status


def silence(pid: int) -> tuple[str, str]:
    """Describe a relay that does not answer, and the remedy."""
    what = f"does not answer within {TIMEOUT_S:g} s"
    if not pid:
        return f"{what}: it is stopped or hangs", "look at it where it was started"
    if process_info.is_stopped(pid):
        return f"{what}: it is stopped", f"`kill -CONT {pid}` lets it continue"
    remedy = f"if it stays so, `kill -9 {pid}` loses nothing; then `relay up`"
    return f"{what}: it hangs, or the machine is overloaded", remedy
