"""Key files: 32 random bytes that nobody but their owner may read.

A key is taken as it stands or not at all: a file that others could read is refused and never
narrowed, for its key may be known already. Keys of stores and of signers are such files.
Source: FORMATS section 2, "ENCRYPTED".
"""

from __future__ import annotations

import os
import stat

from relay.base import fsio
from relay.base.errors import KeyFileError

KEY_BYTES = 32
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def create(path: str) -> bytes:
    """A new random key, on disk with mode 600 and synced before anything is sealed with it.

    The file is there whole or not at all. Errors: KeyFileError when something stands at
    ``path``; OSError.
    """
    key = os.urandom(KEY_BYTES)
    fresh = f"{path}.{os.getpid()}"
    fsio.write_atomic(fresh, key)
    try:
        os.link(fresh, path)
    except FileExistsError:
        raise KeyFileError(f"{path} is there already, and a key is never replaced") from None
    finally:
        os.unlink(fresh)
    fsio.sync_dir(os.path.dirname(path) or ".")
    return key


def load(path: str) -> bytes:
    """The key in a file.

    Errors: KeyFileError for a file that is missing, a link, no regular file, another user's,
    of another mode than 600 or of another size.
    """
    try:
        fd = os.open(path, _OPEN)
    except OSError as exc:
        reason = "a link" if os.path.islink(path) else str(exc.strerror)
        raise KeyFileError(f"key file {path}: {reason}") from exc
    try:
        status = os.fstat(fd)
        _check(path, status)
        key = os.read(fd, KEY_BYTES + 1)
    finally:
        os.close(fd)
    if len(key) != KEY_BYTES:
        raise KeyFileError(f"key file {path}: expected {KEY_BYTES} bytes, found {status.st_size}")
    return key


def _check(path: str, status: os.stat_result) -> None:
    """Errors: KeyFileError unless it is a regular file of this user, and of nobody else."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"key file {path}: no regular file")
    if status.st_uid != os.geteuid():
        raise KeyFileError(f"key file {path}: it belongs to user {status.st_uid}")
    if mode != fsio.FILE_MODE:
        raise KeyFileError(f"key file {path}: expected mode 0600, found {mode:04o}")
