"""Intake: from hints to messages. It decides which files are complete, and reads them.

A file renamed into an outbox is complete when seen. One written in place (closed after
writing, or found by a scan with a fresh mtime) waits until it has been still for
``settle_ms``; one that does not parse may still be growing and is malformed only when it has
been still for ``malformed_after_s``. Source: relay-file-system.txt 2.2, 2.3, 6.1; FORMATS 1.

Time still: the larger of the file's age by its mtime and the time since we first saw it with this
size and mtime, so that a clock that jumps holds nothing up.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from relay import fsio
from relay.checksums import SHA256_PREFIX, sha256_hex
from relay.clock import NS_PER_MS, NS_PER_S, Clock
from relay.config import Detection, Limits
from relay.errors import MessageError, UnsafePath
from relay.home import PENDING, Dirs
from relay.message import MAX_HEADER_BYTES, MessageFile, parse
from relay.names import MSG_SUFFIX, message_id_of


class Found(NamedTuple):
    """One file in an outbox, and what fstat said of it."""

    agent: str
    file_name: str
    message_id: str | None  # None: the name is none of ours
    size: int
    mtime_ns: int
    inode: int

    @property
    def path(self) -> str:
        """Relative to the home."""
        return f"agents/{self.agent}/outbox/{self.file_name}"


class Accepted(NamedTuple):
    """A whole, well-formed message."""

    found: Found
    message: MessageFile
    checksum: str  # SHA-256 of the content, hex


class Malformed(NamedTuple):
    """A file that will never be a message, and why."""

    found: Found
    reason: str
    unsafe: bool = False  # no regular file: a link, FIFO, directory, device


Look = Accepted | Malformed


class _Waiting(NamedTuple):
    """A file that is looked at again."""

    agent: str
    file_name: str
    renamed: bool
    due_ns: int  # monotonic
    seen: tuple[int, int] | None = None  # size and mtime when first seen so
    seen_at_ns: int = 0  # monotonic


class Intake:
    """The files that wait to be looked at, in order of discovery. Owned by the loop."""

    def __init__(
        self,
        detection: Detection,
        limits: Limits,
        clock: Clock,
        log: Callable[..., object] = lambda *_, **__: None,
    ) -> None:
        self._settle_ns = detection.settle_ms * NS_PER_MS
        self._malformed_ns = detection.malformed_after_s * NS_PER_S
        self._orphan_ns = detection.orphan_after_s * NS_PER_S
        self._max_body = limits.max_body_bytes
        self._clock = clock
        self._log = log
        self._ready: deque[tuple[str, str]] = deque()
        self._known: dict[tuple[str, str], _Waiting] = {}  # ready or waiting

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def backlog(self) -> int:
        """Files known and not yet taken, waiting ones included."""
        return len(self._known)

    def add(self, agent: str, file_name: str, *, renamed: bool) -> None:
        """A hint: look at this file. A rename outranks an earlier hint that it is being written."""
        if not file_name.endswith(MSG_SUFFIX) or file_name.startswith("."):
            return
        key = (agent, file_name)
        known = self._known.get(key)
        if known is None or (renamed and not known.renamed) or known.due_ns:
            self._known[key] = _Waiting(agent, file_name, renamed, 0, *(known[4:] if known else ()))
            if known is None or known.due_ns:
                self._ready.append(key)

    def retry(self, agent: str, file_name: str, due_ns: int) -> None:
        """Look again at ``due_ns`` (monotonic): a passing error held the message up."""
        self._known[(agent, file_name)] = _Waiting(agent, file_name, True, due_ns)

    def scan(self, dirs: Dirs, agent: str) -> None:
        """List an agent's outbox; remove what lost its writer in ``.pending``."""
        outbox = dirs.get("agents", agent, "outbox")
        for name in sorted(os.listdir(outbox)):
            self.add(agent, name, renamed=False)
        self._remove_orphans(dirs.get("agents", agent, "outbox", PENDING), agent)

    def take(self, dirs: Dirs, limit: int) -> list[Look]:
        """Look at up to ``limit`` files; those that must wait stay, those that are gone go."""
        self._wake_due()
        looks: list[Look] = []
        while self._ready and len(looks) < limit:
            key = self._ready.popleft()
            waiting = self._known.pop(key)
            try:
                look = self._look(dirs, waiting)
            except FileNotFoundError:
                continue  # taken back by its writer, or its agent is gone
            if isinstance(look, _Waiting):
                self._known[key] = look
            else:
                looks.append(look)
        return looks

    def due_ns(self) -> int | None:
        """When the next file is to be looked at (monotonic); 0: now."""
        if self._ready:
            return 0
        return min((waiting.due_ns for waiting in self._known.values()), default=None)

    def _wake_due(self) -> None:
        now = self._clock.monotonic_ns()
        for key, waiting in self._known.items():
            if waiting.due_ns and waiting.due_ns <= now:
                self._known[key] = waiting._replace(due_ns=0)
                self._ready.append(key)

    def _look(self, dirs: Dirs, waiting: _Waiting) -> Look | _Waiting:
        agent, name = waiting.agent, waiting.file_name
        outbox = dirs.get("agents", agent, "outbox")
        try:
            data, status = fsio.read_regular(name, outbox, self._max_body + MAX_HEADER_BYTES + 2)
        except UnsafePath as exc:
            status = os.stat(name, dir_fd=outbox, follow_symlinks=False)
            return Malformed(_found(agent, name, status), str(exc), unsafe=True)
        found = _found(agent, name, status)
        now = self._clock.monotonic_ns()
        seen = (status.st_size, status.st_mtime_ns)
        if waiting.seen != seen:
            waiting = waiting._replace(seen=seen, seen_at_ns=now)
        still_ns = max(self._clock.now_ns() - status.st_mtime_ns, now - waiting.seen_at_ns)
        changing = len(data) != found.size and found.size <= self._max_body + MAX_HEADER_BYTES
        if changing or not waiting.renamed:
            if (
                changing
                or still_ns < self._settle_ns
                or fsio.exists(name, dirs.get("agents", agent, "outbox", PENDING))
            ):
                return waiting._replace(due_ns=now + max(self._settle_ns, NS_PER_MS))
        look = self._read(found, data)
        if isinstance(look, Malformed) and not waiting.renamed and still_ns < self._malformed_ns:
            return waiting._replace(due_ns=now + max(self._settle_ns, NS_PER_MS))
        return look

    def _read(self, found: Found, data: bytes) -> Look:
        """Parse what was read; every rule that it breaks is a reason."""
        if found.message_id is None:
            return Malformed(
                found,
                f"{found.file_name} is no name of a message: "
                "{timestamp_ns}-{hex}.msg, 10 to 20 digits, -, up to 32 of 0-9a-f",
            )
        limit = self._max_body + MAX_HEADER_BYTES
        if found.size > limit:
            return Malformed(
                found,
                f"{found.file_name} is {found.size} bytes, too large: the body may be "
                f"{self._max_body}; put large data into an attachment",
            )
        try:
            message = parse(data, file=found.file_name, max_body_bytes=self._max_body)
        except MessageError as exc:
            return Malformed(found, str(exc))
        declared = message.headers.get("CHECKSUM")
        if declared and message.body:  # parse has compared it with the body's
            return Accepted(found, message, declared.removeprefix(SHA256_PREFIX))
        return Accepted(found, message, sha256_hex(message.content))

    def _remove_orphans(self, pending: int, agent: str) -> None:
        """A file in ``.pending`` untouched for 30 s has lost its writer. Source: 6.1."""
        oldest_ns = self._clock.now_ns() - self._orphan_ns
        with os.scandir(pending) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode) and status.st_mtime_ns < oldest_ns:
                    fsio.remove(entry.name, pending)
                    self._log(
                        "Removed a file that its writer left in .pending",
                        action="remove_orphan",
                        agent=agent,
                        file=entry.name,
                    )


def _found(agent: str, name: str, status: os.stat_result) -> Found:
    return Found(
        agent, name, message_id_of(name), status.st_size, status.st_mtime_ns, status.st_ino
    )
