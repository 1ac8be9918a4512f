"""An agent's inbox as evidence: what it shows of a file that is not in it any more.

    taken      the file is in ``inbox/.read``
    removed    it is gone otherwise, and the inbox is the one that it was written to
    vanished   the inbox is another one, or older than what is missing from it: nobody read that

An inbox that was removed and made again may have the inode of the one before, so the time of its
birth tells them apart, where the file system keeps it. Whoever removes a file sets the mtime of
the inbox to that instant: one that is older was put back from a copy. Reads only.
Source: DESIGN, "Read needs evidence".
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Callable, Mapping
from enum import Enum, auto

from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.home import PENDING, READ, Dirs
from relay.base.names import MSG_SUFFIX

# The kernel sets times by a clock that it moves on every few milliseconds.
COARSE_NS = 50 * NS_PER_MS


class FileFate(Enum):
    """The fate of a file that was written into an inbox."""

    STANDS = auto()  # it is there
    TAKEN = auto()  # it is in .read
    REMOVED = auto()  # somebody removed it
    VANISHED = auto()  # its inbox went with it


def identity(dirs: Dirs, agent: str) -> str:
    """An identity of the inbox that no other one in its place has. Errors: as ``judge``."""
    return _identity(dirs.get("agents", agent, "inbox"))


def born_ns(known: str | None) -> int:
    """When an inbox of that identity was made (Unix ns); 0: not known."""
    return int(known.partition(":")[2]) if known else 0


def was_taken(dirs: Dirs, agent: str, message_id: str) -> bool:
    """True when the file is in ``.read``. Errors: OSError, UnsafePath."""
    try:
        return fsio.exists(message_id + MSG_SUFFIX, dirs.get("agents", agent, "inbox", READ))
    except FileNotFoundError:
        return False


def file_fates(
    dirs: Dirs, agent: str, known: str | None, missing: Mapping[str, int]
) -> dict[str, FileFate]:
    """The fate of each of ``missing``: message id -> when it was written (Unix ns).

    ``known``: the identity of the inbox that was delivered to; None: not known.
    Errors: FileNotFoundError while there is no inbox; OSError, UnsafePath where it cannot be
    looked into, which shows nothing.
    """
    inbox = dirs.get("agents", agent, "inbox")
    is_other = known is not None and _identity(inbox) != known
    changed_at = os.fstat(inbox).st_mtime_ns + COARSE_NS
    is_whole = fsio.exists(PENDING, inbox) or fsio.exists(READ, inbox)
    found: dict[str, FileFate] = {}
    for message_id, written_at in missing.items():
        if was_taken(dirs, agent, message_id):
            found[message_id] = FileFate.TAKEN
        elif fsio.exists(message_id + MSG_SUFFIX, inbox):
            found[message_id] = FileFate.STANDS
        elif is_other or changed_at < written_at:
            found[message_id] = FileFate.VANISHED
        elif is_whole:  # else somebody may be removing all of it just now
            found[message_id] = FileFate.REMOVED
    return found


def _identity(fd: int) -> str:
    """Inode and birth (Unix ns; 0 where the file system does not keep it)."""
    status = os.fstat(fd)
    if sys.platform == "darwin":
        return f"{status.st_ino}:{int(status.st_birthtime * NS_PER_S)}"
    return f"{status.st_ino}:{_born_ns(fd)}"


_STATX_BTIME, _AT_EMPTY_PATH = 0x800, 0x1000  # linux/stat.h, fcntl.h
_MASK, _BTIME = struct.Struct("<I"), struct.Struct("<qI")  # of struct statx
_BTIME_AT, _STATX_BYTES = 80, 256


def _born_ns(fd: int) -> int:
    """When a file was made, which ``os.stat`` does not say on Linux."""
    statx = _statx()
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, answer) != 0:
        return 0
    if not _MASK.unpack_from(answer)[0] & _STATX_BTIME:
        return 0
    seconds, nanoseconds = _BTIME.unpack_from(answer, _BTIME_AT)
    return int(seconds * NS_PER_S + nanoseconds)


@functools.cache
def _statx() -> Callable[..., int] | None:
    """The C library's function; None in one that is too old for it."""
    return getattr(ctypes.CDLL(None), "statx", None)


def describe_vanished(agent: str, number: int) -> str:
    """So many messages that nobody read went with this agent's mailbox."""
    what = "message" if number == 1 else "messages"
    return f"{number} unread {what} vanished with the mailbox of {agent}"
