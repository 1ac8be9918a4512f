"""The relay's log: JSON lines, a sentence each and its facts."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import structlog

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def make_log(level: str, path: str | None) -> Callable[..., object]:
    """A log of JSON lines, to a file or to stderr.

    Called as ``log(sentence, action=..., level="info", **facts)``.
    """
    descriptor = os.open(path, _APPEND, 0o600) if path else sys.stderr.fileno()
    numbers = {"debug": 10, "info": 20, "warning": 30, "error": 40}
    logger = structlog.wrap_logger(
        _Lines(descriptor),
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numbers[level]),
    )

    def log(event: str, *, level: str = "info", **facts: object) -> None:
        getattr(logger, level)(event, **facts)

    return log


def where(error: BaseException) -> list[str]:
    """The calls that led to an error, outermost first: ``file:line function``, and no content."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{os.path.basename(one.filename)}:{one.lineno} {one.name}" for one in frames]


class _Lines:
    """Writes lines to a descriptor. One that a full disk does not take is dropped: what it told of
    must not stop the relay, and a log that fails is no reason to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_torn = False

    def msg(self, line: str) -> None:
        """One line; what follows one that was cut short begins on a line of its own."""
        data = f"{chr(10) * self._is_torn}{line}\n".encode(errors="backslashreplace")
        try:
            written = os.write(self._descriptor, data)
        except OSError:
            return
        self._is_torn = written < len(data)

    debug = info = warning = error = msg
