"""Claude Code's inbox of a session: a socket that takes a line with the token, then frames."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

MAX_FRAME = 1 << 20


def as_hooks_see_it(text: str, origin: str) -> str:
    """A prompt for the hooks of prompts: one from the inbox is in an envelope."""
    envelope = '<cross-session-message from="relay">\n{}\n</cross-session-message>'
    return envelope.format(text) if origin == "inbox" else text


class Inbox:
    """Its texts become prompts of the session; it says nothing of them."""

    def __init__(self, prompts: queue.Queue[Any]) -> None:
        self._prompts, self.token = prompts, uuid.uuid4().hex
        self._folder = tempfile.mkdtemp(prefix="fake-claude-")
        self.path = str(Path(self._folder, "inbox.sock"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        from tests.fakes.harness.session import Prompt

        with contextlib.suppress(OSError, ValueError), peer, peer.makefile("rb") as lines:
            if json.loads(lines.readline(MAX_FRAME)) != {"type": "auth", "token": self.token}:
                return
            while line := lines.readline(MAX_FRAME):
                frame = json.loads(line)
                if frame["type"] == "user" and frame["msgV"] == 1:
                    self._prompts.put(Prompt(frame["message"]["content"], "inbox"))

    def close(self) -> None:
        """Stop to listen, and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        shutil.rmtree(self._folder, ignore_errors=True)
