"""The attachment store: ``attachments/{2 hex}/{sha256}``, addressed by content.

    attachments/{2 hex}/{sha256}       content whose SHA-256 is its name
    attachments/{2 hex}/{sha256}.bad   other content, or not a regular file: set aside

Senders store files there before they refer to them; a message is accepted once the relay has
verified the SHA-256 of each. Attachments that no message refers to for a while are removed. See
docs/formats/msg.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum

from relay.base import fsio
from relay.base.config import LimitSettings
from relay.base.errors import UnsafePath
from relay.base.finding import Finding
from relay.base.home import Dirs, Home
from relay.base.incidents import IncidentKind, Refusal, RefusalCode
from relay.base.names import SHA256_PREFIX
from relay.ledger.ledger import Ledger

FOLDER = "attachments"
BAD = ".bad"
AT_ONCE_BYTES = 1 << 20  # hashed by the loop: under a millisecond
BATCH_BYTES = 16 << 20  # of all that are, in one batch: some twenty milliseconds
PIECE_BYTES = 1 << 20
TURN_PIECES = 8  # before the next agent's turn: some ten milliseconds
MOST_OPEN = 4  # files of one agent that are read at a time
REFERENCES = 200  # to attachments, looked at in one slice of the loop
MOST_KNOWN = 10_000  # results in the cache

Version = tuple[int, int, int]  # inode, size, mtime: a changed file is read again
Key = tuple[str, Version]  # its SHA-256 by name, and the version of the file


Fault = tuple[IncidentKind | None, Refusal]  # None where it is only missing or too large


def _fault(reason: str, kind: IncidentKind | None = None) -> Fault:
    return kind, Refusal(RefusalCode.ATTACHMENT, reason)


class _LargeFile:
    """A large file that is read piece by piece."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.total = hashlib.sha256()
        self.offset = 0

    def read_slice(self) -> bool:
        """Read for one turn; True at the end of the file. Hashing releases the GIL."""
        for _ in range(TURN_PIECES):
            piece = os.pread(self.fd, PIECE_BYTES, self.offset)
            if not piece:
                return True
            self.total.update(piece)
            self.offset += len(piece)
        return False


class AttachmentState(Enum):
    """The progress of an attachment's verification."""

    VERIFIED = "verified"
    READING = "reading"  # a large one, beside the loop: ask again
    LATER = "later"  # this batch may read no more: ask again in another


class AttachmentVerifier:
    """Verifies attachments and caches the results. Owned by the loop; a thread of its own reads
    large ones, and ends when nothing is left. Agents that wait take turns there, so that one with
    many gigabytes does not delay the others."""

    def __init__(self, limits: LimitSettings) -> None:
        self._most_mib = limits.max_attachment_mib
        self._known: OrderedDict[Key, str] = OrderedDict()  # -> the SHA-256 found
        # that the loop may still hash in its batch; the thread reads what is more
        self.left_bytes = 0
        self._reading: dict[Key, _LargeFile] = {}
        # agent -> attachments that it waits for, oldest first
        self._turns: dict[str, dict[Key, None]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def check(self, dirs: Dirs, reference: str, agent: str) -> AttachmentState | Fault:
        """Verify it, or have the thread do so; its state, or why it is invalid. Errors: OSError.

        ``agent``: the sender that refers to it, and waits.
        """
        digest = reference.removeprefix(SHA256_PREFIX)
        try:
            fd, _ = fsio.open_regular(digest, dirs.get(FOLDER, digest[:2]))
        except FileNotFoundError:
            return _fault(f"ATTACHMENT {reference} is not in the attachment store: store it first")
        except UnsafePath as exc:
            return _fault(f"ATTACHMENT {reference}: {exc}", IncidentKind.ATTACHMENT_UNSAFE)
        key = (digest, _version(fd))
        size = key[1][1]
        if size > self._most_mib << 20:
            os.close(fd)
            return _fault(
                f"ATTACHMENT {reference} is {-(-size >> 20)} MiB, at most {self._most_mib} "
                "(limits.max_attachment_mib): send it in parts, or send its location"
            )
        with self._lock:
            found = self._known.get(key)
            if found is None and self.left_bytes < size <= AT_ONCE_BYTES:
                os.close(fd)
                return AttachmentState.LATER
            if found is None and size > AT_ONCE_BYTES:
                self._begin(key, fd, agent)
                return AttachmentState.READING
        try:
            if found is None:
                self.left_bytes -= size
                found = _hash(fd)
                self._keep(key, found)
        finally:
            os.close(fd)
        if found == digest:
            return AttachmentState.VERIFIED
        return _fault(
            f"ATTACHMENT {reference}: the stored file has the SHA-256 {found}; "
            "it was set aside, store the right one and send again",
            IncidentKind.ATTACHMENT_MISMATCH,
        )

    def _begin(self, key: Key, fd: int, agent: str) -> None:
        """Have the thread read it, in the turns of this agent; called with the lock held.

        An agent that has MOST_OPEN files open asks again: descriptors are shared by all.
        """
        mine = self._turns.setdefault(agent, {})
        if key in self._reading or len(mine) >= MOST_OPEN:
            os.close(fd)
        else:
            self._reading[key] = _LargeFile(fd)
        if key in self._reading:
            mine[key] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="attachments", daemon=True)
            self._thread.start()

    def _next(self) -> Key | None:
        """Pop the attachment to read next; its agent goes to the end. Called with the lock held."""
        while self._turns:
            agent = next(iter(self._turns))
            waiting = self._turns.pop(agent)
            for key in [key for key in waiting if key not in self._reading]:
                del waiting[key]  # it was read in another agent's turn
            if waiting:
                self._turns[agent] = waiting
                return next(iter(waiting))
        return None

    def _read_all(self) -> None:
        """Run the thread: one turn after another, until nothing is left."""
        while True:
            with self._lock:
                key = self._next()
                if key is None:
                    self._thread = None
                    return
                reading = self._reading[key]
            found = ""
            try:
                if not reading.read_slice():
                    continue
                found = reading.total.hexdigest()
            except OSError:
                pass  # a failing disk: the loop asks again
            with self._lock:
                os.close(self._reading.pop(key).fd)
            if found:
                self._keep(key, found)

    def _keep(self, key: Key, found: str) -> None:
        with self._lock:
            self._known[key] = found
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)


def check_file(path: str) -> Iterator[Finding]:
    """Check that an attachment has the checksum in its name. Errors: FileNotFoundError."""
    advice = "restore it from a backup, or ask the sender for a new copy"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = _hash(fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as exc:
        yield Finding.of_error("attachments", exc, path, advice)
        return
    if found != (expected := os.path.basename(path)):
        yield Finding("attachments", path, found, advice, expected=f"SHA-256 {expected}")


def set_aside(dirs: Dirs, reference: str) -> None:
    """Rename an attachment whose content does not match; idempotent. Errors: OSError."""
    digest = reference.removeprefix(SHA256_PREFIX)
    with contextlib.suppress(FileNotFoundError):
        folder = dirs.get(FOLDER, digest[:2])
        aside, number = digest + BAD, 0
        while fsio.exists(aside, folder):
            number += 1
            aside = f"{digest}{BAD}.{number}"
        fsio.rename(digest, folder, aside, folder)


def remove_references(home: Home, ledger: Ledger, older_than_ns: int) -> Iterator[None]:
    """Remove references to attachments that are gone; yields after each slice, a transaction.

    A reference that is younger, or of an undelivered or unread message, stays.
    """
    agents, after = ledger.agents, ""
    while known := agents.references(after, REFERENCES):
        after = max(known)
        stale = [
            name
            for name, at in known.items()
            if at < older_than_ns
            and not os.path.lexists(home.path(FOLDER, name[:2], name))
            and not agents.needs_attachment(name, older_than_ns)
        ]
        if stale:
            with ledger.transaction():
                agents.remove_references(stale)
        yield


def _version(fd: int) -> Version:
    status = os.fstat(fd)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _hash(fd: int) -> str:
    """The SHA-256 of a whole file; hashing releases the GIL."""
    total, offset = hashlib.sha256(), 0
    while piece := os.pread(fd, PIECE_BYTES, offset):
        total.update(piece)
        offset += len(piece)
    return total.hexdigest()
