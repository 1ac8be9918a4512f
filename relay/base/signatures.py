"""Ed25519 signatures of messages, over sender, recipient, message id and body.

Signed is the SHA-256 of

    sender str | relay message id str | TO str | body blob

with str and blob as in the binary formats: a u32 length, then the bytes. A private key is a key
file of 32 bytes; a public key is 32 bytes that anybody may have. Source: FORMATS section 2,
"Signatures"; RFC 8032.
"""

from __future__ import annotations

import hashlib
from struct import Struct

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_ID_PREFIX = "aid_"
KEY_ID_DIGITS = 32
_LENGTH = Struct("<I")


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
