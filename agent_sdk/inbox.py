"""An agent's inbox: messages by priority, then age, each taken by one process.

    inbox/{id}.msg → rename → inbox/.read/{id}.msg → read, parsed, given out
                     ^ marks it as read; of two processes one succeeds

Waiting uses inotify where it works, else a check every 50 ms. The watch is set up before the
directory is listed, so that no message is missed in between.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Collection
from time import monotonic
from typing import NamedTuple, Protocol, TypeVar

from relay.base import fsio
from relay.base.errors import MessageError, RelayError, UnsafePath
from relay.base.home import READ, Dirs, Home
from relay.base.message import ANSWERS, Kind, MessageFile, parse_delivered
from relay.base.names import (
    MSG_SUFFIX,
    ORCHESTRATOR,
    SHA256_PREFIX,
    Attachment,
    attachments_of,
    message_id_of,
    sha256_hex,
)

MAX_FILE_BYTES = 1 << 30  # far above the relay's own limit
# A listing is used for one name in 64 before the next listing: taking one message of 100,000 must
# not list them all each time. It expires after 16 times the time it took, so that a slow reader
# sees new urgent messages.
NAMES_PER_LISTING = 64
LISTING_LIFETIME = 16
HEAD_BYTES = 16_384  # more than the header of any delivered message
NORMAL = 2
SHORT_ID = re.compile(r"[0-9a-f]{4,32}")  # as in tables
REFUSALS = frozenset({Kind.NACK, Kind.ERROR})
NOT_FOR_SOME = b" did not get "  # in a nack: some of the recipients are gone

# The file may be anything: follow no link, and do not wait for the writer of a FIFO.
_OPEN_HEAD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PRIORITIES = frozenset((b"0", b"1", b"2", b"3", b"4"))
_Found = TypeVar("_Found")


POLL_S = 0.05
# inotify misses changes by other machines on a network file system, and a replaced directory: the
# inbox is also listed at this interval.
RELIST_S = 5.0


class Received(NamedTuple):
    """A received message.

    ``headers`` has every header but TO, KIND and ATTACHMENT, by upper-case name. ``sent_at`` is
    when the relay discovered it, ISO 8601 in UTC. ``path`` is the present path of its file.
    ``attempt`` is greater than 1 for a repeated delivery. ``attachments`` are references, each with
    the ``name`` of the file; no two have the same name.
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
    attachments: tuple[Attachment, ...]
    path: str


Wanted = Callable[[MessageFile], bool]


class Inbox:
    """Takes messages from one inbox. For one thread; processes may share an inbox."""

    def __init__(self, home: Home, agent: str) -> None:
        self._home = home
        self._agent = agent
        self._listed: list[str] = []  # rest of the last listing, in reverse order
        self._listed_until = 0.0  # monotonic: expiry of the listing
        self._priorities: dict[str, int] = {}  # by name, of the last listing
        self._waiter: InboxWaiter | None = None

    def close(self) -> None:
        """Close the watch, if any."""
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None

    def names(self) -> set[str]:
        """Return the file names of the waiting messages."""
        with self._home.dirs() as dirs:
            return set(self._list(dirs))

    def id_of(self, text: str) -> str:
        """Return a message's id, given as such or by the beginning of its part after the ``-``.

        The beginning may name what the agent has, had or is sending. Errors: MessageError.
        """
        if not SHORT_ID.fullmatch(text):
            return text  # an id, or refused with its header
        found: set[str] = set()
        with self._home.dirs() as dirs:
            for place in ("inbox", f"inbox/{READ}", "outbox"):
                with contextlib.suppress(FileNotFoundError):
                    names = os.listdir(dirs.get("agents", self._agent, *place.split("/")))
                    found |= set(filter(None, map(message_id_of, names)))
        found = {
            message_id for message_id in found if message_id.partition("-")[2].startswith(text)
        }
        if len(found) == 1:
            return found.pop()
        what = "names several messages" if found else "is not the id of a message"
        rule = f"{text!r} {what} that {self._agent} has; give the whole id"
        raise MessageError(rule, header="RE")

    def take_next(self, leave: Wanted | None = None) -> Received | None:
        """Take the first message by priority, then name, into ``.read``; None if there is none.

        Messages that ``leave`` matches stay.
        Errors: MessageError for a file that is not a message; it is in ``.read`` as well.
        """
        left: set[str] = set()
        with self._home.dirs() as dirs:
            while True:
                if not self._listed or monotonic() > self._listed_until:
                    began = monotonic()
                    names = [name for name in self._in_order(dirs) if name not in left]
                    if not names:
                        return None
                    self._listed = names[: 1 + len(names) // NAMES_PER_LISTING][::-1]
                    self._listed_until = monotonic() + LISTING_LIFETIME * (monotonic() - began)
                name = self._listed.pop()
                if leave is not None and self._is_wanted(dirs, name, leave):
                    left.add(name)
                elif (taken := self._take(dirs, name)) is not None:
                    return taken

    def take_answer(self, wanted: Wanted, seen: set[str]) -> Received | None:
        """Take the first message that is ``wanted``; all others stay.

        Names in ``seen`` are skipped; names checked without success are added to it.
        """
        with self._home.dirs() as dirs:
            for name in sorted(set(self._list(dirs)) - seen):
                seen.add(name)
                if self._is_wanted(dirs, name, wanted):
                    taken = self._take(dirs, name)
                    if taken is not None:
                        return taken
        return None

    def until(self, look: Callable[[], _Found | None], timeout_s: float | None) -> _Found | None:
        """Call ``look`` until it finds something, whenever a file arrives; None after the timeout.

        ``timeout_s`` None waits forever, 0 checks once.
        """
        found = look()
        if found is not None or (timeout_s is not None and timeout_s <= 0):
            return found
        ends_at = None if timeout_s is None else monotonic() + timeout_s
        while True:
            if self._waiter is None or self._waiter.is_inherited():
                self.close()
                self._waiter = open_waiter(self._home.path("agents", self._agent, "inbox"))
            found = look()  # after the watch was set up, so that nothing is missed
            if found is not None:
                return found
            left_s = 3600.0 if ends_at is None else ends_at - monotonic()
            if left_s <= 0:
                return None
            if self._waiter is not None:  # else the home was replaced
                self._waiter.wait(left_s)

    def _list(self, dirs: Dirs) -> list[str]:
        try:
            names = os.listdir(dirs.get("agents", self._agent, "inbox"))
        except FileNotFoundError as exc:
            raise RelayError(f"the inbox of agent {self._agent} no longer exists") from exc
        return [name for name in names if name.endswith(MSG_SUFFIX) and name[0] != "."]

    def _in_order(self, dirs: Dirs) -> list[str]:
        """List all names by priority, then age. Each file's header is read once."""
        names, known = self._list(dirs), self._priorities
        inbox = dirs.get("agents", self._agent, "inbox")
        self._priorities = {
            name: known[name] if name in known else priority_in(name, inbox) for name in names
        }
        return sorted(self._priorities, key=lambda name: (self._priorities[name], name))

    def _take(self, dirs: Dirs, name: str) -> Received | None:
        """Move a file to ``.read`` and parse it; None if another process was faster.

        Read first: what no descriptor or memory is left for stays in the inbox, unread.
        """
        inbox = dirs.get("agents", self._agent, "inbox")
        done = dirs.ensure("agents", self._agent, "inbox", READ)
        path = self._home.path("agents", self._agent, "inbox", READ, name)
        found: bytes | OSError | MessageError
        try:
            found, _ = fsio.read_regular(name, inbox, MAX_FILE_BYTES, shared=True)
        except UnsafePath:
            found = MessageError("it is not a regular file", file=path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno in fsio.EXHAUSTED:
                raise
            found = exc
        try:
            fsio.rename(name, inbox, name, done)
        except FileNotFoundError:
            return None
        if not isinstance(found, bytes):
            raise found
        return _received(found, path, name.removesuffix(MSG_SUFFIX))

    def _is_wanted(self, dirs: Dirs, name: str, wanted: Wanted) -> bool:
        inbox = dirs.get("agents", self._agent, "inbox")
        try:
            data, _ = fsio.read_regular(name, inbox, MAX_FILE_BYTES, shared=True)
            return wanted(parse_delivered(data))
        except (FileNotFoundError, UnsafePath, MessageError):
            return False  # taken by another process, or reported by receive()


def priority_in(name: str, dir_fd: int) -> int:
    """Read the PRIORITY in a delivered message's header; normal if there is none.

    It is used for the order only; an invalid file is reported when it is taken.
    """
    try:
        fd = os.open(name, _OPEN_HEAD, dir_fd=dir_fd)
        try:
            head = os.read(fd, HEAD_BYTES)
        finally:
            os.close(fd)
    except OSError:
        return NORMAL
    for line in head.splitlines():
        field, _, value = line.partition(b":")
        if not field.strip():
            break
        if field.upper() == b"PRIORITY":
            value = value.strip()
            return int(value) if value in _PRIORITIES else NORMAL
    return NORMAL


def _received(data: bytes, path: str, stem: str) -> Received:
    message = parse_delivered(data, file=path)
    _check_sum(message, path)
    headers = message.headers
    attempt = headers.get("ATTEMPT", "1")
    if not (attempt.isascii() and attempt.isdigit()):
        raise MessageError(f"expected a number, got {attempt!r}", file=path, header="ATTEMPT")
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
        attachments=attachments_of(headers, message.attachments),
        path=path,
    )


def _check_sum(message: MessageFile, path: str) -> None:
    """Verify the CHECKSUM. Errors: MessageError."""
    declared = message.headers.get("CHECKSUM")
    # For an empty body the relay uses the KIND's word, which is stored as its content.
    sums = {SHA256_PREFIX + sha256_hex(data) for data in (message.body, message.content)}
    if declared is not None and declared not in sums:
        raise MessageError(f"the body does not match {declared}", file=path, header="CHECKSUM")


def answers_to(sent: str, kinds: Collection[Kind], was_asked: Callable[[str, str], bool]) -> Wanted:
    """Match the answers of ``kinds`` to a message, and its refusals.

    The relay delivers an ack, a nack or a response only of an agent that got the message. Any agent
    may name it in a message of another kind: ``was_asked`` tells, by its id and the sender.
    """
    kinds = REFUSALS.union(kinds)

    def is_answer(message: MessageFile) -> bool:
        if message.headers.get("RE") != sent or message.kind not in kinds:
            return False
        return message.kind in ANSWERS or was_asked(sent, message.headers.get("FROM", ""))

    return is_answer


def refusal_of(sent: str, to: str) -> Wanted:
    """Match the relay's nack of a message that nobody gets.

    One that only some of several recipients did not get is not refused: others have it.
    """
    is_group = to.startswith(("*", "#"))

    def is_refusal(message: MessageFile) -> bool:
        return (
            message.headers.get("RE") == sent
            and message.kind is Kind.NACK
            and message.headers.get("FROM") == ORCHESTRATOR
            and not (is_group and NOT_FOR_SOME in message.body)
        )

    return is_refusal


class InboxWaiter(Protocol):
    """A way to wait for new files in a directory, for one thread."""

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when ``wait`` would end; None: poll."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until a file may have arrived, or the time is up."""

    def is_inherited(self) -> bool:
        """True in a fork, which would take the events of its parent: both have one queue."""

    def close(self) -> None:
        """Close all descriptors."""


def open_waiter(path: str) -> InboxWaiter:
    """Watch the directory ``path``: files renamed into it from now on end a wait."""
    try:
        return InotifyWaiter(path)
    except Exception:  # no inotify, no watches left, not readable: polling always works
        return PollWaiter()


class PollWaiter:
    """Polling: every wait is a short sleep."""

    def fileno(self) -> None:
        """Return None."""

    def wait(self, timeout_s: float) -> None:
        """Sleep at most 50 ms."""
        time.sleep(min(timeout_s, POLL_S))

    def is_inherited(self) -> bool:
        """False: it has nothing that a fork could share."""
        return False

    def close(self) -> None:
        """Do nothing."""


class InotifyWaiter:
    """A private inotify descriptor of watchdog with one watch, read in the caller's thread.

    watchdog takes 30 ms to import and is therefore imported only when a call has to wait.
    Errors: any, for example ImportError and OSError.
    """

    def __init__(self, path: str) -> None:
        from watchdog.observers import inotify_c

        bits = inotify_c.InotifyConstants
        mask = bits.IN_MOVED_TO | bits.IN_CLOSE_WRITE | bits.IN_ONLYDIR | bits.IN_DONT_FOLLOW
        self._inotify, self._pid = inotify_c.InotifyFD(), os.getpid()
        try:
            fd: int = self._inotify._inotify_fd
            os.set_inheritable(fd, False)
            watch = self._inotify.add_callback(os.fsencode(path), mask, self, 0)  # type: ignore[arg-type]
            if watch < 0:  # watchdog does not report an unreadable directory
                raise PermissionError(path)
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the inotify descriptor."""
        return self._inotify._inotify_fd

    def wait(self, timeout_s: float) -> None:
        """Sleep until a file is renamed in or closed after writing."""
        if self._poll.poll(min(timeout_s, RELIST_S) * 1000):
            self._inotify.read_events()  # drain the queue; the listing decides

    def is_inherited(self) -> bool:
        """True in a fork of the process that opened it."""
        return self._pid != os.getpid()

    def close(self) -> None:
        """Close the descriptors; the kernel drops the watch with the last of them."""
        if self.is_inherited():  # watchdog would take the watch from the parent
            self._inotify._close_resources()
            return
        # Before the first read, watchdog's close() leaves the descriptors to a reader thread, which
        # does not exist here.
        never_read = self._inotify._is_reading
        self._inotify.close()
        if never_read:
            self._inotify._close_resources()

    # watchdog's callback interface; on close it calls the second method.
    def on_event(self, event: object) -> None:
        """Unused."""

    def on_watch_deleted(self, wd: int) -> None:
        """Unused."""

    def on_queue_overflow(self) -> None:
        """Unused."""
