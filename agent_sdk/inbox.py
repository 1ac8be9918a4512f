"""An agent's inbox: the oldest message first, each to one taker.

    inbox/{id}.msg → rename → inbox/.read/{id}.msg → read, parsed, given out
                     ^ the evidence that it was read; of two processes one succeeds

What is not asked for stays where it is. Source: DESIGN, "Read".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

from agent_sdk.wait import Wake, open_wake
from relay import fsio
from relay.checksums import SHA256_PREFIX, sha256_hex
from relay.errors import MessageError, RelayError, UnsafePath
from relay.home import READ, Dirs, Home
from relay.message import Kind, MessageFile, parse_delivered
from relay.names import MSG_SUFFIX

MAX_FILE_BYTES = 1 << 30  # the relay's own limit is far below; what it delivers is taken
# Of a listing one name in 64 is used before the next: taking one of 100,000 must not cost a
# listing of them all, and one of a few is always the oldest that there is.
NAMES_PER_LISTING = 64

_Found = TypeVar("_Found")


class Received(NamedTuple):
    """A message as its recipient has it.

    ``headers`` holds every header but TO, KIND and ATTACHMENT, by upper-case name. ``sent_at``
    is when the relay discovered it, ISO 8601 in UTC. ``path`` is where the file lies now.
    ``attempt`` is above 1 when the relay delivered it again.
    """

    id: str
    sender: str
    to: str
    kind: Kind
    body: str
    headers: dict[str, str]
    sent_at: str
    thread: str | None
    re: str | None
    channel: str | None
    attempt: int
    attachments: tuple[str, ...]
    path: str


class Inbox:
    """Takes messages out of one inbox. Used from one thread; processes may share an inbox."""

    def __init__(self, home: Home, agent: str) -> None:
        self._home = home
        self._agent = agent
        self._listed: list[str] = []  # of the last listing, the oldest last
        self._wake: Wake | None = None

    def close(self) -> None:
        """Give the watch back, if one was made."""
        if self._wake is not None:
            self._wake.close()
            self._wake = None

    def names(self) -> set[str]:
        """The file names of the messages that wait."""
        with self._home.dirs() as dirs:
            return set(self._list(dirs))

    def take_oldest(self) -> Received | None:
        """The first message by name, now in ``.read``; None when there is none.

        Errors: MessageError for a file that is no message; it is in ``.read`` all the same.
        """
        with self._home.dirs() as dirs:
            while True:
                if not self._listed:
                    names = sorted(self._list(dirs))
                    if not names:
                        return None
                    self._listed = names[: 1 + len(names) // NAMES_PER_LISTING][::-1]
                taken = self._take(dirs, self._listed.pop())
                if taken is not None:
                    return taken

    def take_answer(self, re: str, kinds: Collection[Kind], seen: set[str]) -> Received | None:
        """The message of one of ``kinds`` that answers ``re``; all others stay.

        Names in ``seen`` are not looked at, and those looked at in vain are added.
        """
        with self._home.dirs() as dirs:
            for name in sorted(set(self._list(dirs)) - seen):
                seen.add(name)
                if self._answers(dirs, name, re, kinds):
                    taken = self._take(dirs, name)
                    if taken is not None:
                        return taken
        return None

    def until(self, look: Callable[[], _Found | None], timeout_s: float | None) -> _Found | None:
        """What ``look`` finds, asked again whenever something came; None when the time is up.

        ``timeout_s`` None waits forever, 0 looks once.
        """
        found = look()
        if found is not None or (timeout_s is not None and timeout_s <= 0):
            return found
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        if self._wake is None:
            self._wake = open_wake(self._home.path("agents", self._agent, "inbox"))
        while True:
            found = look()  # after the watch was made: nothing falls between the two
            if found is not None:
                return found
            left_s = 3600.0 if ends_at is None else ends_at - time.monotonic()
            if left_s <= 0:
                return None
            self._wake.wait(left_s)

    def _list(self, dirs: Dirs) -> list[str]:
        try:
            names = os.listdir(dirs.get("agents", self._agent, "inbox"))
        except FileNotFoundError as exc:
            raise RelayError(f"agent {self._agent} has no inbox any more") from exc
        return [name for name in names if name.endswith(MSG_SUFFIX) and name[0] != "."]

    def _take(self, dirs: Dirs, name: str) -> Received | None:
        """Move a file to ``.read`` and read it; None when another process was faster."""
        inbox = dirs.get("agents", self._agent, "inbox")
        done = dirs.ensure("agents", self._agent, "inbox", READ)
        try:
            fsio.rename(name, inbox, name, done)
        except FileNotFoundError:
            return None
        path = self._home.path("agents", self._agent, "inbox", READ, name)
        try:
            data, _ = fsio.read_regular(name, done, MAX_FILE_BYTES, shared=True)
        except UnsafePath as exc:
            raise MessageError("it is no regular file", file=path) from exc
        return _received(data, path, name.removesuffix(MSG_SUFFIX))

    def _answers(self, dirs: Dirs, name: str, re: str, kinds: Collection[Kind]) -> bool:
        inbox = dirs.get("agents", self._agent, "inbox")
        try:
            data, _ = fsio.read_regular(name, inbox, MAX_FILE_BYTES, shared=True)
            message = parse_delivered(data)
        except (FileNotFoundError, UnsafePath, MessageError):
            return False  # taken by another, or for receive() to complain of
        return message.headers.get("RE") == re and message.kind in kinds


def _received(data: bytes, path: str, stem: str) -> Received:
    message = parse_delivered(data, file=path)
    _check_sum(message, path)
    headers = message.headers
    attempt = headers.get("ATTEMPT", "1")
    if not (attempt.isascii() and attempt.isdigit()):
        raise MessageError(f"{attempt!r} is no number", file=path, header="ATTEMPT")
    return Received(
        id=headers.get("ID", stem),
        sender=headers.get("FROM", ""),
        to=message.to,
        kind=message.kind,
        body=message.body.decode(),
        headers=headers,
        sent_at=headers.get("SENT", ""),
        thread=headers.get("THREAD"),
        re=headers.get("RE"),
        channel=headers.get("CHANNEL"),
        attempt=int(attempt),
        attachments=message.attachments,
        path=path,
    )


def _check_sum(message: MessageFile, path: str) -> None:
    """A damaged body is an error here, not a surprise later."""
    declared = message.headers.get("CHECKSUM")
    # Of an empty body the relay sums the KIND's word, which the ledger keeps as its content.
    sums = {SHA256_PREFIX + sha256_hex(data) for data in (message.body, message.content)}
    if declared is not None and declared not in sums:
        raise MessageError(f"the body does not match {declared}", file=path, header="CHECKSUM")
