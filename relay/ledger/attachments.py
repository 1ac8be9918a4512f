"""The attachment store: ``attachments/{2 hex}/{sha256}``, addressed by content.

    attachments/{2 hex}/{sha256}       content whose SHA-256 is its name
    attachments/{2 hex}/{sha256}.bad   what had other content, or was no file of ours: set aside

Senders put files there before they name them; a message is taken once the relay has read each of
them and found that it is what its name says. What no message names for a while is collected.
Source: relay-file-system.txt 3.4, FORMATS 1, header ATTACHMENT.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from relay.base import fsio
from relay.base.checksums import SHA256_PREFIX
from relay.base.config import LimitSettings
from relay.base.errors import UnsafePath
from relay.base.home import Dirs, Home
from relay.base.incidents import IncidentKind
from relay.ledger import Ledger

FOLDER = "attachments"
BAD = ".bad"
AT_ONCE_BYTES = 1 << 20  # hashed within a batch: under a millisecond
PIECE_BYTES = 1 << 20
TURN_PIECES = 8  # then it is the next agent's turn: some ten milliseconds
MOST_OPEN = 4  # of one agent, being read
SLICE = 200  # files looked at: a millisecond of the interpreter, which the loop may wait for
REMOVAL = 12  # and a removal counts for so many: ext4 avoids inodes freed just now
MOST_KNOWN = 10_000  # results that are remembered
_PREFIX = re.compile(r"[0-9a-f]{2}")

Version = tuple[int, int, int]  # inode, size, mtime: another file, or changed, is read again
Key = tuple[str, Version]  # its name, and which file of that name


class Wrong(NamedTuple):
    """An attachment that is not what it must be, or not there."""

    reason: str
    kind: IncidentKind | None = None  # None: it is missing, which is no incident


class _Reading:
    """A large file that is read piece by piece."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.total = hashlib.sha256()
        self.offset = 0

    def go_on(self) -> bool:
        """Read on for one turn; True at the end. The lock of the interpreter is free meanwhile."""
        for _ in range(TURN_PIECES):
            piece = os.pread(self.fd, PIECE_BYTES, self.offset)
            if not piece:
                return True
            self.total.update(piece)
            self.offset += len(piece)
        return False


class Verifier:
    """Reads attachments and remembers what they are. Owned by the loop; large ones are read by a
    thread of its own, which ends when nothing is left to read. There the agents that wait take
    turns: one that names many gigabytes does not hold up the others."""

    def __init__(self, limits: LimitSettings) -> None:
        self._most_mib = limits.max_attachment_mib
        self._known: OrderedDict[Key, str] = OrderedDict()  # -> the SHA-256 found
        self._reading: dict[Key, _Reading] = {}
        self._turns: dict[str, dict[Key, None]] = {}  # agent -> what it waits for, oldest first
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def check(self, dirs: Dirs, reference: str, agent: str) -> Wrong | bool:
        """True: it is what its name says. False: a large one is being read, ask again.

        ``agent``: who named it, and waits.
        """
        digest = reference.removeprefix(SHA256_PREFIX)
        try:
            fd = fsio.open_own(digest, dirs.get(FOLDER, digest[:2]))
        except FileNotFoundError:
            return Wrong(
                f"ATTACHMENT {reference} is not in the attachment store: put it there first"
            )
        except UnsafePath as exc:
            return Wrong(f"ATTACHMENT {reference}: {exc}", IncidentKind.ATTACHMENT_UNSAFE)
        key = (digest, _version(fd))
        size = key[1][1]
        if size > self._most_mib << 20:
            os.close(fd)
            return Wrong(
                f"ATTACHMENT {reference} is {size >> 20} MiB, at most {self._most_mib} "
                "(limits.max_attachment_mib): send it in parts, or say where it is"
            )
        with self._lock:
            found = self._known.get(key)
            if found is None and size > AT_ONCE_BYTES:
                self._begin(key, fd, agent)
                return False
        try:
            if found is None:
                found = _hash(fd)
                self._keep(key, found)
        finally:
            os.close(fd)
        if found == digest:
            return True
        return Wrong(
            f"ATTACHMENT {reference}: what is stored there has the SHA-256 {found}; "
            "it was set aside, put the right one there and send again",
            IncidentKind.ATTACHMENT_MISMATCH,
        )

    def _begin(self, key: Key, fd: int, agent: str) -> None:
        """Have the thread read it, in the turns of this agent; the lock is held.

        An agent that has enough open asks again: descriptors are everybody's.
        """
        mine = self._turns.setdefault(agent, {})
        if key in self._reading or len(mine) >= MOST_OPEN:
            os.close(fd)
        else:
            self._reading[key] = _Reading(fd)
        if key in self._reading:
            mine[key] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="attachments", daemon=True)
            self._thread.start()

    def _next(self) -> Key | None:
        """Pop the attachment to read next; its agent goes to the end. The lock is held."""
        while self._turns:
            agent = next(iter(self._turns))
            waiting = self._turns.pop(agent)
            for key in [key for key in waiting if key not in self._reading]:
                del waiting[key]  # it was read in the turns of another
            if waiting:
                self._turns[agent] = waiting
                return next(iter(waiting))
        return None

    def _read_all(self) -> None:
        """The thread: a turn after the other, until nothing is left."""
        while True:
            with self._lock:
                key = self._next()
                if key is None:
                    self._thread = None
                    return
                reading = self._reading[key]
            found = ""
            try:
                if not reading.go_on():
                    continue
                found = reading.total.hexdigest()
            except OSError:
                pass  # a disk that fails: it is asked for again
            with self._lock:
                os.close(self._reading.pop(key).fd)
            if found:
                self._keep(key, found)

    def _keep(self, key: Key, found: str) -> None:
        with self._lock:
            self._known[key] = found
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)


def set_aside(dirs: Dirs, reference: str) -> None:
    """Rename what is not what its name says; done again it changes nothing. Errors: OSError."""
    digest = reference.removeprefix(SHA256_PREFIX)
    with contextlib.suppress(FileNotFoundError):
        folder = dirs.get(FOLDER, digest[:2])
        aside, number = digest + BAD, 0
        while fsio.exists(aside, folder):
            number += 1
            aside = f"{digest}{BAD}.{number}"
        fsio.rename(digest, folder, aside, folder)


def collecting(
    home: Home, ledger: Ledger, older_than_ns: int, *, dry_run: bool = False
) -> Iterator[str | None]:
    """Remove what nobody needs any more; each path, relative to the home, and now and then None,
    so that the caller can pause.

    That is a file last written, and last named by a message, before ``older_than_ns`` (Unix ns):
    who attaches what is there already writes its time anew. What a message names that somebody is
    still to get or to read stays. Killed in between, the next call goes on. ``dry_run``: nothing
    is removed. Errors: OSError.
    """
    needed = ledger.registry.needs_attachment
    kept: set[str] = set()
    cost = 0
    with home.dirs() as dirs:
        for prefix in sorted(filter(_PREFIX.fullmatch, os.listdir(dirs.get(FOLDER)))):
            for name in _old(dirs, prefix, older_than_ns, kept):
                cost += 1
                if name and needed(name, older_than_ns):
                    kept.add(name)
                elif name:
                    cost += REMOVAL
                    if not dry_run:
                        fsio.remove(name, dirs.get(FOLDER, prefix))
                    yield f"{FOLDER}/{prefix}/{name}"
                if cost >= SLICE:
                    yield None
                    cost = 0
    # also of files that were gone before: killed here, the next one finds them so
    if not dry_run:
        named = ledger.registry.last_references()
        stale = [name for name, at in named.items() if at < older_than_ns and name not in kept]
        gone = [name for name in stale if not needed(name, older_than_ns)]
        if gone:
            with ledger.transaction():
                ledger.registry.forget_references(gone)


def _old(dirs: Dirs, prefix: str, older_than_ns: int, kept: set[str]) -> Iterator[str]:
    """Names of the old files of a folder, "" for each other; those are ``kept``."""
    try:
        names = sorted(os.listdir(dirs.get(FOLDER, prefix)))
    except UnsafePath:
        return  # a link, or no directory: nothing of ours is behind it
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # set aside just now
            status = os.stat(name, dir_fd=dirs.get(FOLDER, prefix), follow_symlinks=False)
            if status.st_mtime_ns >= older_than_ns or stat.S_ISDIR(status.st_mode):
                kept.add(name)
                yield ""
            else:
                yield name


def _version(fd: int) -> Version:
    status = os.fstat(fd)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _hash(fd: int) -> str:
    """The SHA-256 of a whole file; the lock of the interpreter is free meanwhile."""
    total, offset = hashlib.sha256(), 0
    while piece := os.pread(fd, PIECE_BYTES, offset):
        total.update(piece)
        offset += len(piece)
    return total.hexdigest()
