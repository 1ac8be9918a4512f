"""A disk that loses its power: what is synced of each file and directory, and what a cut leaves.

``Power`` listens to every call of ``relay.base.fsio`` and keeps what was durable at each sync: of a
file its bytes, of a directory its names. ``cut`` builds the tree as it may be found afterwards.
Between two syncs a disk may have written any sector of what was written meanwhile, in any order, so
sectors are taken from the old content or from the new one, by the dice given.
"""

from __future__ import annotations

import os
import random
import stat
from enum import Enum
from pathlib import Path
from typing import NamedTuple

SECTOR_BYTES = 512


class Cut(Enum):
    """What becomes of what was not synced."""

    OLD = "old"  # none of it was written: neither bytes nor names
    NEW_NAMES = "new names"  # the names were, the bytes were not
    NEW = "new"  # all of it was: what a killed process leaves
    SECTORS = "sectors"  # names were or not; of the bytes some sectors, of the length some
    LONG = "long"  # names and lengths were, and the new bytes are zeros


class Durable(NamedTuple):
    """The synced state, as of one instant."""

    contents: dict[int, bytes]  # by inode
    names: dict[str, dict[str, int]]  # directory -> name -> inode; of directories inode 0
    now: dict[str, dict[str, int]]
    bytes_now: dict[int, bytes]


class Power:
    """Given to ``fsio.fault``; watches one tree."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._held: dict[int, int] = {}  # inode -> descriptor, so that its number stays its own
        self._contents: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int]] = {}
        self.sync_all()

    def sync_all(self) -> None:
        """All of it is durable now."""
        for folder, _, files in os.walk(self.root):
            for name in files:
                self._sync_file(os.path.join(folder, name))
            self._sync_folder(folder)

    def __call__(self, operation: str, name: str) -> None:
        """One call of fsio; a sync counts from the next call on, for it may fail."""
        if operation == "sync" and name.startswith(self.root):
            if os.path.isdir(name):
                self._sync_folder(name)
            else:
                self._sync_file(name)
        elif operation == "rename" and os.path.exists(name + ".tmp"):
            self._sync_file(name + ".tmp")  # write_atomic syncs it just before

    def close(self) -> None:
        """Let the files go."""
        for fd in self._held.values():
            os.close(fd)

    def _sync_file(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        inode = os.fstat(fd).st_ino
        self._contents[inode] = _content(fd)
        if inode in self._held:
            os.close(fd)
        else:
            self._held[inode] = fd

    def _sync_folder(self, folder: str) -> None:
        self._names[folder] = _listing(folder)

    def state(self) -> Durable:
        """What is durable, and what is there now."""
        now = {folder: _listing(folder) for folder, _, _ in os.walk(self.root)}
        current = {}
        for folder, names in now.items():
            for name, inode in names.items():
                if inode:
                    current[inode] = Path(folder, name).read_bytes()
        for inode, fd in self._held.items():
            current.setdefault(inode, _content(fd))
        names = {folder: dict(held) for folder, held in self._names.items()}
        return Durable(dict(self._contents), names, now, current)

    def cut(self, target: Path, mode: Cut, dice: random.Random) -> Path:
        """Build the tree as it is found after the power went now."""
        return build(self.state(), self.root, target, mode, dice)


def build(state: Durable, root: str, target: Path, mode: Cut, dice: random.Random) -> Path:
    """Build what a cut at ``state`` leaves of ``root``."""
    contents: dict[int, bytes] = {}  # one inode has one content, whatever its names
    pending = [root]  # in the order of names: the same dice fall the same way
    target.mkdir(parents=True)
    while pending:
        folder = pending.pop()
        for name, inode in sorted(_names_after(state, folder, mode, dice).items()):
            path = os.path.join(folder, name)
            place = target / os.path.relpath(path, root)
            if not inode:
                place.mkdir()
                pending.append(path)
                continue
            if inode not in contents:
                old = state.contents.get(inode, b"")
                new = state.bytes_now.get(inode, old)
                contents[inode] = _content_after(old, new, mode, dice)
            place.write_bytes(contents[inode])
            place.chmod(0o600)
    return target


def _names_after(state: Durable, folder: str, mode: Cut, dice: random.Random) -> dict[str, int]:
    old, new = state.names.get(folder, {}), state.now.get(folder, {})
    if mode is Cut.OLD:
        return old
    if mode is not Cut.SECTORS:
        return new
    return old if dice.random() < 0.5 else new


def _content_after(old: bytes, new: bytes, mode: Cut, dice: random.Random) -> bytes:
    if mode in (Cut.OLD, Cut.NEW_NAMES):
        return old
    if mode is Cut.NEW:
        return new
    length = len(new) if mode is Cut.LONG else dice.choice((len(old), len(new)))
    before, after = old.ljust(length, b"\0")[:length], new.ljust(length, b"\0")[:length]
    if mode is Cut.LONG:
        return before
    pieces = []
    for at in range(0, length, SECTOR_BYTES):
        chosen = after if dice.random() < 0.5 else before
        pieces.append(chosen[at : at + SECTOR_BYTES])
    return b"".join(pieces)


def _listing(folder: str) -> dict[str, int]:
    found = {}
    for entry in os.scandir(folder):
        status = entry.stat(follow_symlinks=False)
        found[entry.name] = 0 if stat.S_ISDIR(status.st_mode) else status.st_ino
    return found


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)
