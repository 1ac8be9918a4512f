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

from relay import fsio
from relay.checksums import SHA256_PREFIX
from relay.errors import UnsafePath
from relay.home import Dirs, Home
from relay.ledger import Ledger
from relay.security.incidents import IncidentKind

FOLDER = "attachments"
BAD = ".bad"
AT_ONCE_BYTES = 1 << 20  # hashed within a batch: under a millisecond
PIECE_BYTES = 1 << 20
SLICE = 200  # files looked at: a millisecond of the interpreter, which the loop may wait for
REMOVAL = 12  # and a removal counts for so many: ext4 avoids inodes freed just now
MOST_KNOWN = 10_000  # results that are remembered
_PREFIX = re.compile(r"[0-9a-f]{2}")

Version = tuple[int, int, int]  # inode, size, mtime: another file, or changed, is read again


class Wrong(NamedTuple):
    """An attachment that is not what it must be, or not there."""

    reason: str
    kind: IncidentKind | None = None  # None: it is missing, which is no incident


class Verifier:
    """Reads attachments and remembers what they are. Owned by the loop; large ones are read by a
    thread of its own, which ends when nothing is left to read."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, Version], str] = OrderedDict()  # -> the SHA-256 found
        self._reading: dict[tuple[str, Version], int] = {}  # -> the descriptor that is read
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def check(self, dirs: Dirs, reference: str) -> Wrong | bool:
        """True: it is what its name says. False: a large one is being read, ask again."""
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
        with self._lock:
            found = self._known.get(key)
            if found is None and key[1][1] > AT_ONCE_BYTES:
                self._begin(key, fd)
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

    def _begin(self, key: tuple[str, Version], fd: int) -> None:
        """Have the thread read it; the lock is held."""
        if key in self._reading:
            os.close(fd)
            return
        self._reading[key] = fd
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="attachments", daemon=True)
            self._thread.start()

    def _read_all(self) -> None:
        """The thread: one after the other, until none is left."""
        while True:
            with self._lock:
                key = next(iter(self._reading), None)
                if key is None:
                    self._thread = None
                    return
                fd = self._reading[key]
            found = ""
            with contextlib.suppress(OSError):  # a disk that fails: it is asked for again
                found = _hash(fd)
            with self._lock:
                os.close(self._reading.pop(key))
            if found:
                self._keep(key, found)

    def _keep(self, key: tuple[str, Version], found: str) -> None:
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
