"""The relay's log: one JSON object per line with a sentence and its facts; rotated by size.

    relay.log      current
    relay.log.1    previous, and so on; the oldest is removed

One process writes: the daemon, which holds the home's lock. Any of its threads may.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from relay.base import fsio
from relay.base.text import visible

LogCall = Callable[..., object]  # log(sentence, action=..., level="info", **facts)
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MIB = 1 << 20
_OWN = {"timestamp", "level", "event", "action", "exception"}  # no facts of the sentence
TRY_AGAIN_BYTES = 64 << 10  # a rotation that failed is tried again after so many more


class Log:
    """Called as ``log(sentence, action=..., level="info", **facts)``."""

    def __init__(self, level: str, lines: _Lines, *, for_people: bool = False) -> None:
        import structlog  # commands that name the type of a log do not write one

        self._lines = lines
        self._render = _render_for_people if for_people else structlog.processors.JSONRenderer()
        self._set_level(level)

    def __call__(self, event: str, *, level: str = "info", **facts: object) -> None:
        """Write a line, unless its level is below the log's."""
        getattr(self._logger, level)(event, **facts)

    def set(self, level: str, max_mib: int, keep_files: int) -> None:
        """Apply other settings; existing lines stay."""
        self._lines.set(max_mib * MIB, keep_files)
        self._set_level(level)

    def _set_level(self, level: str) -> None:
        import structlog

        self._logger = structlog.wrap_logger(
            self._lines,
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.add_log_level,
                structlog.processors.format_exc_info,
                self._render,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        )


def make_log(level: str, path: str | None, *, max_mib: int = 16, keep_files: int = 5) -> Log:
    """A log of JSON lines, to a file or to stderr; the file is rotated, stderr is not.

    On a terminal, stderr gets lines for people.
    """
    for_people = path is None and sys.stderr.isatty()
    return Log(level, _Lines(path, max_mib * MIB, keep_files), for_people=for_people)


def line_for_people(fields: Mapping[str, Any]) -> str:
    """A line of the log as text: local time, the level unless it is info, the sentence, its facts.

    The stack of an error follows on lines of its own.
    """
    at = datetime.fromisoformat(str(fields["timestamp"])).astimezone()
    level = "" if fields["level"] == "info" else f"{fields['level']}: "
    facts = ", ".join(
        f"{name} {value}"
        for name, value in fields.items()
        if name not in _OWN and not isinstance(value, list | dict)
    )
    stack = f"\n{fields['exception']}" if fields.get("exception") else ""
    line = f"{at:%Y-%m-%d %H:%M:%S}  {level}{fields['event']}{f' ({facts})' if facts else ''}"
    return visible(f"{line}{stack}", keep="\n")


def _render_for_people(_logger: object, _method: str, fields: Mapping[str, Any]) -> str:
    return line_for_people(fields)


def where(error: BaseException) -> list[str]:
    """The stack of an error, outermost call first, as ``file:line function`` without content."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]


class _Lines:
    """Writes lines to a descriptor. Lines are dropped on a full disk: a failing log must not stop
    the relay."""

    def __init__(self, path: str | None, max_bytes: int, keep_files: int) -> None:
        self._path = path
        self._descriptor = os.open(path, _APPEND, 0o600) if path else sys.stderr.fileno()
        self._size = os.fstat(self._descriptor).st_size if path else 0
        self._is_torn = False
        self._lock = threading.Lock()
        self.set(max_bytes, keep_files)

    def set(self, max_bytes: int, keep_files: int) -> None:
        """Rotate by these from now on."""
        self._max_bytes = self._rotates_at = max_bytes
        self._keep_files = keep_files

    def msg(self, line: str) -> None:
        """Write one line, on a new line after one that was cut short."""
        with self._lock:
            data = f"{chr(10) * self._is_torn}{line}\n".encode(errors="backslashreplace")
            if self._path and self._size and self._size + len(data) > self._rotates_at:
                self._rotate(self._path)
            try:
                written = os.write(self._descriptor, data)
            except OSError:
                return
            self._size += written
            self._is_torn = written < len(data)

    debug = info = warning = error = msg

    def _rotate(self, path: str) -> None:
        """Continue in a new file; if that fails, in the old one, and try again later."""
        try:
            rotate(path, self._keep_files)
            fresh = os.open(path, _APPEND, 0o600)
        except OSError:
            self._rotates_at = self._size + TRY_AGAIN_BYTES
            return
        os.close(self._descriptor)
        self._descriptor, self._size, self._is_torn = fresh, 0, False
        self._rotates_at = self._max_bytes


def rotate(path: str, keep_files: int) -> None:
    """Rename ``path`` to ``path.1``, ``path.1`` to ``path.2``, and so on; the oldest is replaced.

    The oldest first: a crash in between leaves a gap in the numbers and loses no file.
    Errors: OSError.
    """
    for number in range(keep_files, 0, -1):
        source = f"{path}.{number - 1}" if number > 1 else path
        fsio.fault("rename", source)
        with contextlib.suppress(FileNotFoundError):
            os.replace(source, f"{path}.{number}")
