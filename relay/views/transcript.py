"""The steps of an agent CLI's session, from the transcript that its hooks told of.

Claude Code and Codex write JSON lines, of which these are known [doc, obs 2026-11]; what else a
line says is left out, and a line that is not understood is passed over.

    claude   {"type": "user"|"assistant", "timestamp", "message": {"content": TEXT | [BLOCK …]}}
             BLOCK: {"type": "text", "text"} | {"type": "tool_use", "name", "input"}
                    | {"type": "tool_result", "content", "is_error"}
    codex    {"type": "response_item", "timestamp", "payload": PAYLOAD}
             PAYLOAD: {"type": "message", "role", "content"} | {"type": "function_call", "name",
                      "arguments"} | {"type": "custom_tool_call", "name", "input"}
                      | {"type": "local_shell_call", "action": {"command": […]}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from relay.base.clock import parse_time
from relay.base.home import Home

MOST_READ = 8 << 20  # of a transcript, in one call
MOST_BEFORE = 256 << 10  # of what it has at the beginning
MOST_TEXT = 500  # characters of one step
# What a tool is told, the most telling first.
TELLING = ("command", "file_path", "notebook_path", "path", "pattern", "query", "url", "prompt")


class Step(NamedTuple):
    """One thing that a session did."""

    at: int | None  # Unix ns; None: its line does not say
    what: str  # prompt, says, tool, failed
    text: str  # one line, as the session wrote it


class Transcript:
    """Reads a transcript as it grows, from near its end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._offset: int | None = None

    def read(self) -> list[Step]:
        """The steps since the last call, whole lines only; none while there is no such file."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                size = os.fstat(fd).st_size
                if self._offset is None:
                    self._offset = max(0, size - MOST_BEFORE)
                    is_cut = self._offset > 0
                else:
                    is_cut = False
                    self._offset = self._offset if size >= self._offset else 0  # it was replaced
                file.seek(self._offset)
                data = file.read(MOST_READ)
        except OSError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:
            if len(data) == MOST_READ:  # a line of 8 MiB is nobody's to read
                self._offset += len(data)
            return []
        self._offset += len(whole) + 1
        lines = whole.split(b"\n")
        return [step for line in lines[is_cut:] for step in steps(line)]


def steps(line: bytes) -> Iterator[Step]:
    """The steps that one line of a transcript tells; none for a line of another form."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return
    if not isinstance(entry, dict):
        return
    at = _at(entry.get("timestamp"))
    payload = entry.get("payload")
    if isinstance(payload, dict):
        found = _of_payload(payload)
    else:
        found = _of_message(entry.get("type"), entry.get("message"))
    for what, text in found:
        if shown := " ".join(text.split())[:MOST_TEXT]:
            yield Step(at, what, shown)


def _of_payload(payload: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line of Codex."""
    kind = payload.get("type")
    if kind == "message":
        yield from _of_message(payload.get("role"), payload)
    elif kind in ("function_call", "custom_tool_call"):
        arguments = payload.get("arguments", payload.get("input"))
        yield "tool", _call(payload.get("name"), arguments)
    elif kind == "local_shell_call":
        yield "tool", _call("shell", payload.get("action"))


def _of_message(who: object, message: object) -> Iterator[tuple[str, str]]:
    """A message of the person or of the model."""
    content = message.get("content") if isinstance(message, dict) else None
    what = {"user": "prompt", "assistant": "says"}.get(str(who))
    if what is None:
        return
    if isinstance(content, str):
        yield what, content
    for block in content if isinstance(content, list) else ():
        if not isinstance(block, dict):
            continue
        kind = block.get("type")
        if kind in ("text", "input_text", "output_text"):
            yield what, str(block.get("text", ""))
        elif kind == "tool_use":
            yield "tool", _call(block.get("name"), block.get("input"))
        elif kind == "tool_result" and block.get("is_error"):
            yield "failed", _text_of(block.get("content"))


def _call(name: object, arguments: object) -> str:
    """A call of a tool: its name, and what tells most of what it was told."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"{name}: {arguments}"
    if isinstance(arguments, dict):
        for key in TELLING:
            if value := arguments.get(key):
                words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                return f"{name}: {words}"
        arguments = json.dumps(arguments, ensure_ascii=False) if arguments else None
    return str(name) if arguments is None else f"{name}: {arguments}"


def _text_of(content: object) -> str:
    if isinstance(content, list):
        parts = [str(part.get("text", "")) for part in content if isinstance(part, dict)]
        return " ".join(parts)
    return str(content or "")


def _at(text: object) -> int | None:
    try:
        return parse_time(text) if isinstance(text, str) else None
    except ValueError:
        return None


def transcript_of(home: Home, name: str) -> str:
    """The transcript of the agent's session: one that lives, else the one seen last; or empty."""
    from relay.reach.session import load_sessions

    known = [
        session
        for session in load_sessions(home.root)
        if session.agent == name and session.transcript
    ]
    best = max(known, key=lambda session: (session.is_live, session.seen_at), default=None)
    return best.transcript if best else ""
