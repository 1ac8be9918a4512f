"""Sockets of a session: Claude Code's inbox, and the one behind ``codex queue``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.harness.session import Harness

QUEUED = 50  # texts that wait for the session at most
MAX_FRAME = 1 << 20
THREADS = "FAKE_CODEX_THREADS"  # the folder in which loaded threads are found


def as_hooks_see_it(text: str, origin: str) -> str:
    """A prompt for the hooks of prompts: one from the inbox is in an envelope."""
    envelope = '<cross-session-message from="relay">\n{}\n</cross-session-message>'
    return envelope.format(text) if origin == "inbox" else text


class _Server:
    """A socket with a thread for each connection."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(QUEUED)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer, peer.makefile("rb") as lines:
            self.serve(peer, lines)

    def serve(self, peer: socket.socket, lines: Any) -> None:
        """Talk to one that has connected."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop to listen, and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class Inbox(_Server):
    """Claude Code's inbox: a line with the token, then frames.

    Modes: ``deliver`` (silently), ``delivered`` (says so), ``held``, ``denied``, ``expired``: that
    answer, and no delivery. While a permission is asked for, texts are held.
    """

    def __init__(self, session: Harness, mode: str) -> None:
        self.session, self.mode, self.token = session, mode, uuid.uuid4().hex
        self.folder = tempfile.mkdtemp(prefix="fake-claude-")
        super().__init__(str(Path(self.folder, "inbox.sock")))

    def serve(self, peer: socket.socket, lines: Any) -> None:
        """Take frames from one connection."""
        first = _parse(lines.readline(MAX_FRAME))
        if first.get("type") != "auth" or first.get("token") != self.token:
            self.session.note("refused", why="the token is wrong")
            return
        while line := lines.readline(MAX_FRAME):
            frame = _parse(line)
            content = (frame.get("message") or {}).get("content")
            if (
                frame.get("type") != "user"
                or frame.get("msgV") != 1
                or not isinstance(content, str)
            ):
                self.session.note("refused", why="not a frame", frame=frame)
                return
            status = self._take(content)
            self.session.note("frame", text=content, status=status, msg_id=frame.get("msg_id"))
            if status != "deliver":
                answer = {"type": "control", "action": "peer_message_status", "status": status}
                answer["orig_msg_id"] = frame.get("msg_id")
                peer.sendall(json.dumps(answer).encode() + b"\n")

    def _take(self, content: str) -> str:
        from tests.fakes.harness.session import Prompt

        if self.mode not in ("deliver", "delivered"):
            return self.mode
        if self.session.is_asking:
            return "held"
        if self.session.prompts.qsize() >= QUEUED:
            return "dropped"
        self.session.prompts.put(Prompt(content, "inbox"))
        return self.mode

    def close(self) -> None:
        """Remove the folder as well."""
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)


class QueueSocket(_Server):
    """A thread of Codex that is loaded in a TUI: ``codex queue`` reaches it."""

    def __init__(self, session: Harness) -> None:
        self.session = session
        self.folder = session.env.get(THREADS) or tempfile.mkdtemp(prefix="fake-codex-")
        session.env[THREADS] = self.folder
        super().__init__(str(Path(self.folder, f"{session.session_id[:64]}.sock")))

    def serve(self, peer: socket.socket, lines: Any) -> None:
        """Take one text; it becomes the person's next words when the turn is over."""
        from tests.fakes.harness.session import Prompt

        text = str(_parse(lines.readline(MAX_FRAME)).get("message", ""))
        queued = uuid.uuid4().hex
        self.session.note("queued", text=text, id=queued)
        self.session.prompts.put(Prompt(text, "queue"))
        peer.sendall(json.dumps({"id": queued}).encode() + b"\n")


def _parse(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    return {}


def queue_message(folder: str, thread: str, text: str) -> str:
    """Queue a text for a loaded thread; its queue id. Errors: OSError without such a thread."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(Path(folder, f"{thread[:64]}.sock")))
        peer.sendall(json.dumps({"message": text}).encode() + b"\n")
        with peer.makefile("rb") as lines:
            return str(_parse(lines.readline()).get("id", ""))
