"""What a relay that runs says of itself, asked over its socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from typing import Any

from relay.home import Home

SOCKET = "admin.sock"
TIMEOUT_S = 2.0


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a path."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Connect to the path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)


def ask_status(home: Home, timeout_s: float = TIMEOUT_S) -> dict[str, Any] | None:
    """``/status`` of the relay that runs for this home; None where nothing answers."""
    path = home.path(SOCKET)
    if not os.path.exists(path):
        return None
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request("GET", "/status")
        status = json.loads(connection.getresponse().read())
        return status if isinstance(status, dict) else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        with contextlib.suppress(OSError):
            connection.close()
