"""Key files, and Ed25519 signatures of messages.

A key file has 32 random bytes that only its owner may read. One that others could read is refused,
and its mode is not repaired, because the key may have leaked. Keys are used for signatures and for
the encryption of store files.

A signature covers sender, recipient, message id and body. Signed is the SHA-256 of

    sender str | relay message id str | TO str | body blob

with str and blob as in the binary formats: a u32 length, then the bytes. A private key is a key
file; a public key has 32 bytes and may be published. See docs/formats/acomm.md, RFC 8032.
"""

from __future__ import annotations

import hashlib
import os
import stat
from struct import Struct

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from relay.base import fsio
from relay.base.errors import KeyFileError

KEY_BYTES = 32
KEY_ID_PREFIX = "aid_"
KEY_ID_DIGITS = 32
_LENGTH = Struct("<I")
_OPEN_KEY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def create_key(path: str) -> bytes:
    """Create a random key, atomically, synced and with mode 600.

    Errors: KeyFileError when ``path`` exists; OSError.
    """
    key = os.urandom(KEY_BYTES)
    fresh = f"{path}.{os.getpid()}.tmp"  # by that ending `relay doctor` finds what a kill leaves
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


def public_key(private_key: bytes) -> bytes:
    """The public half of a private key, 32 bytes."""
    return Ed25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def key_id(public: bytes) -> str:
    """A public key's name, ``aid_`` and 32 hex digits: the ``identity_id`` of a participant."""
    return KEY_ID_PREFIX + hashlib.sha256(public).hexdigest()[:KEY_ID_DIGITS]


def sign(private_key: bytes, sender: str, relay_id: str, to: str, body: bytes) -> bytes:
    """The signature of a message, 64 bytes; the same each time."""
    key = Ed25519PrivateKey.from_private_bytes(private_key)
    return key.sign(signed_digest(sender, relay_id, to, body))


def verify(
    public: bytes, signature: bytes, sender: str, relay_id: str, to: str, body: bytes
) -> bool:
    """True when the owner of the public key signed exactly this."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public)
        key.verify(signature, signed_digest(sender, relay_id, to, body))
    except (InvalidSignature, ValueError):  # ValueError: 32 bytes that are not a curve point
        return False
    return True


def signed_digest(sender: str, relay_id: str, to: str, body: bytes) -> bytes:
    """SHA-256 of the four fields, each preceded by its length: the bytes that are signed."""
    digest = hashlib.sha256()
    for field in (sender.encode(), relay_id.encode(), to.encode(), body):
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()
