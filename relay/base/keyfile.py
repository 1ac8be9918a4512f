"""Key files: 32 random bytes that only their owner may read.

A file that others could read is refused, and its mode is not repaired, because the key may have
leaked. Used for store encryption and for signatures.
Source: FORMATS section 2, "ENCRYPTED".
"""

from __future__ import annotations

import os
import stat

from relay.base import fsio
from relay.base.errors import KeyFileError

KEY_BYTES = 32
_OPEN_KEY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def create_key(path: str) -> bytes:
    """Create a random key, atomically, synced and with mode 600.

    Errors: KeyFileError when ``path`` exists; OSError.
    """
    key = os.urandom(KEY_BYTES)
    fresh = f"{path}.{os.getpid()}"
    fsio.write_atomic(fresh, key)
    try:
        os.link(fresh, path)
    except FileExistsError:
        raise KeyFileError(f"{path} exists, and a key is never replaced") from None
    finally:
        os.unlink(fresh)
    fsio.sync_dir(os.path.dirname(path) or ".")
    return key


def load_key(path: str) -> bytes:
    """Read a key.

    Errors: KeyFileError for a file that is missing, a link, not a regular file, another user's, or
    of another mode than 600 or of another size.
    """
    try:
        fd = os.open(path, _OPEN_KEY)
    except OSError as exc:
        reason = "a link" if os.path.islink(path) else str(exc.strerror)
        raise KeyFileError(f"key file {path}: {reason}") from exc
    try:
        status = os.fstat(fd)
        _check_key_file(path, status)
        key = os.read(fd, KEY_BYTES + 1)
    finally:
        os.close(fd)
    if len(key) != KEY_BYTES:
        raise KeyFileError(f"key file {path}: expected {KEY_BYTES} bytes, found {status.st_size}")
    return key


def _check_key_file(path: str, status: os.stat_result) -> None:
    """Errors: KeyFileError unless it is a regular file of this user with mode 600."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"key file {path}: not a regular file")
    if status.st_uid != os.geteuid():
        raise KeyFileError(f"key file {path}: it belongs to user {status.st_uid}")
    if mode != fsio.FILE_MODE:
        raise KeyFileError(f"key file {path}: expected mode 0600, found {mode:04o}")
