"""A store's file and the one before it: ``NAME.acomm`` and ``NAME.acomm.prev``.

    write   NAME.acomm.tmp, synced  ->  NAME.acomm becomes .prev  ->  .tmp becomes NAME.acomm
    open    NAME.acomm; damaged or gone: .prev, and the damaged one is set aside as NAME.bad

At any instant one of the two names has a whole file. Nothing is set aside unless the other is
whole, and what is set aside is never written over. Source: acomm-file-format.txt, "Design Goals":
readers fall back to the last known-good state; FORMATS section 2, "Reading".
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

from relay.acomm import codec, container
from relay.acomm.encryption import encrypt
from relay.acomm.engine_state import StoreSnapshot
from relay.acomm.model import StoreFile
from relay.base import fsio
from relay.base.errors import FormatError, LimitError, StoreLocked, VersionError

LATER_EVENTS_LOST = "without what came after"  # said where no journal has it
PREVIOUS = ".prev"
SUFFIX = ".acomm"
T = TypeVar("T")
_NO_FLOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_LOCK_TEXT_BYTES = 4096


@contextlib.contextmanager
def locked(path: str, now_s: int) -> Iterator[None]:
    """Hold the lock of the store file at ``path``, ``{path}.lock``, for the block.

    The kernel's flock decides, so a killed holder frees it at once; the text in the file is for
    people. Errors: StoreLocked with that text when another process holds it, or when the file
    system does not support flock. Source: acomm-file-format.txt, "File Locking".
    """
    lock = path + ".lock"
    with contextlib.ExitStack() as held:
        try:
            fd = held.enter_context(fsio.locked(lock))
        except BlockingIOError:
            raise StoreLocked(
                f"{path} is being written by another process ({_holder(lock)})"
            ) from None
        except OSError as exc:
            if exc.errno not in _NO_FLOCK:
                raise
            raise StoreLocked(
                f"{path} cannot be locked: its file system does not support flock ({exc.strerror})",
                hint="move the store to a local disk",
            ) from None
        text = f"PID: {os.getpid()}\nSTARTED: {now_s}\nHOSTNAME: {socket.gethostname()}\n"
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
        yield


def _holder(lock: str) -> str:
    with open(lock, "rb") as file:
        text = file.read(_LOCK_TEXT_BYTES).decode(errors="replace")
    return ", ".join(text.splitlines())


def save(
    path: str, snapshot: StoreSnapshot, compress: bool = True, key: bytes | None = None
) -> int:
    """Replace the store's file, and keep the one that was there; the size of the new one.

    With a ``key`` every content is sealed.

    Errors: StoreCapacity, ValidationFailed before anything is touched; OSError.
    """
    data = codec.encode(encrypt(snapshot.file(), key), compress)
    fsio.write_atomic(path, data, keep=path + PREVIOUS)
    return len(data)


def load(
    path: str,
    make: Callable[[StoreFile, str], T],
    warn: Callable[[str], object],
    *,
    read_only: bool = False,
    outcome: str = LATER_EVENTS_LOST,
) -> T | None:
    """What ``make`` makes of the file, or of the one before it; None when neither is there.
    It is given the name as well.

    ``warn`` hears it when the file was damaged or gone, and what was lost with it. ``keep``:
    who only looks leaves a damaged file where it is. ``after``: what became of what came after.
    Errors: FormatError of the file when both are damaged, or it is of another version or format,
    or whole and beyond a limit: then nothing is touched; OSError, UnsafePath.
    """
    previous = path + PREVIOUS
    try:
        return make(codec.read(path), path)
    except FileNotFoundError:
        if not fsio.exists(previous):
            return None
        made = make(codec.read(previous), previous)
        warn(f"{path} is gone: the store is that of {previous}, {outcome}")
        return made
    except FormatError as exc:
        if isinstance(exc, VersionError | LimitError) or not fsio.exists(previous):
            raise
        made = _make_of_previous(path, previous, make, exc)
        said = f"{exc}; the store is that of {previous}, {outcome}"
        warn(said if read_only else f"{said}, and the damaged file is now {set_aside(path)}")
        return made


def _make_of_previous(
    path: str, previous: str, make: Callable[[StoreFile, str], T], fault: FormatError
) -> T:
    """The store of the file before. Errors: the fault of the file itself when that is no use."""
    with open(path, "rb") as file:
        container.refuse_other_format(file.read(container.HEADER.size), path)
    try:
        return make(codec.read(previous), previous)
    except FormatError as exc:
        fault.hint = f"{previous} is damaged as well ({exc}); both were left as they are"
        raise fault from None


def set_aside(path: str) -> str:
    """Rename a damaged file to a name that nothing has; that name, or none where it is gone."""
    if not os.path.lexists(path):
        return ""
    stem = path.removesuffix(SUFFIX) + ".bad"
    aside, number = stem, 0
    while os.path.lexists(aside):
        number += 1
        aside = f"{stem}.{number}"
    os.rename(path, aside)
    fsio.sync_dir(os.path.dirname(path) or ".")
    return aside
