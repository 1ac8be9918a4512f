"""Client of a running relay's status, and the path of its socket.

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
from typing import Any, NamedTuple

from relay.base import process_info
from relay.base.home import Home, tag_of

SOCKET = "admin.sock"
MOST_PATH_BYTES = 103 if sys.platform == "darwin" else 107  # of an AF_UNIX address
RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
RUNTIME_FOLDER = "agent-relay"  # in the user's runtime directory: sockets of homes with long paths
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
                self.sock.connect(self._path)
                return
            except BlockingIOError as exc:  # its queue of connections is full
                if time.monotonic() > deadline:
                    raise TimeoutError from exc
                time.sleep(POLL_S)


def socket_path(root: str) -> str:
    """The path of the socket of the relay of the home at ``root``.

    It is ``admin.sock`` in the home. If that path is too long for a socket, it is a file named
    after the home in the user's runtime directory; without such a directory, the path that is
    too long.
    """
    path = os.path.join(root, SOCKET)
    if len(os.fsencode(path)) <= MOST_PATH_BYTES:
        return path
    runtime = _runtime_dir()
    if runtime is None:
        return path
    return os.path.join(runtime, RUNTIME_FOLDER, f"{tag_of(root)}.sock")


def _runtime_dir() -> str | None:
    """``$XDG_RUNTIME_DIR``, or its usual path: cron does not set the variable."""
    given = os.environ.get(RUNTIME_VARIABLE) or f"/run/user/{os.geteuid()}"
    with contextlib.suppress(OSError):
        if os.path.isabs(given) and os.stat(given).st_uid == os.geteuid():
            return given
    return None


def ask(home: Home, timeout_s: float = TIMEOUT_S) -> StatusReply:
    """Request ``/status`` of the relay of this home."""
    connection = _UnixConnection(socket_path(home.root), timeout_s)
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


def ask_status(home: Home, timeout_s: float = TIMEOUT_S) -> dict[str, Any] | None:
    """Request ``/status`` of the relay of this home; None without a reply."""
    return ask(home, timeout_s).status


def silence(pid: int) -> tuple[str, str]:
    """Describe a relay that does not answer, and the remedy."""
    what = f"does not answer within {TIMEOUT_S:g} s"
    if process_info.is_stopped(pid):
        return f"{what}: it is stopped", f"`kill -CONT {pid}` lets it continue"
    remedy = f"if it stays so, `kill -9 {pid}` loses nothing; then `relay up`"
    return f"{what}: it hangs, or the machine is overloaded", remedy
