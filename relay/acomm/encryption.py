"""Encryption at rest: the content of every message sealed for the file, and opened again.

    sealed content = nonce[12] | AES-256-GCM ciphertext | tag[16]
    additional data = message id, u64

In memory content is plain; ``seal`` is the last step before the codec and ``unseal`` the first
behind it, values to values. The nonce is made from key, id and content, so the same message has
the same bytes in every flush, and no nonce meets two contents: docs/decisions/0005-encryption.md.
Source: FORMATS section 2, "ENCRYPTED".
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from relay.acomm.message_record import SEAL_BYTES
from relay.acomm.model import Message, StoreFile
from relay.acomm.reader import U64
from relay.base.errors import FormatError, SealedStore

NONCE_BYTES = 12
# Keeps the key that makes nonces apart from the one that encrypts.
_NONCE_PURPOSE = b"acomm nonce"


def seal(file: StoreFile, key: bytes | None) -> StoreFile:
    """The store as its file shall hold it: every content sealed, or as it is without a key."""
    if key is None:
        return file
    cipher = AESGCM(key)
    nonce_key = blake2b(key, person=_NONCE_PURPOSE, digest_size=32).digest()

    def sealed(message: Message) -> bytes:
        ident, content = U64.pack(message.id), message.content
        nonce = blake2b(ident + content, key=nonce_key, digest_size=NONCE_BYTES).digest()
        return nonce + cipher.encrypt(nonce, content, ident)

    return _with_contents(file, sealed, encrypted=True)


def unseal(file: StoreFile, key: bytes | None, path: str) -> StoreFile:
    """The store with plain contents; one that is not encrypted as it is, with a key or without.

    Errors: SealedStore when it is encrypted and there is no key, or not its key; FormatError
    for a content too short to be sealed.
    """
    if not file.encrypted:
        return file
    if key is None:
        raise SealedStore(f"{path} is encrypted, and no key was given")
    cipher = AESGCM(key)

    def unsealed(message: Message) -> bytes:
        content = message.content
        if len(content) < SEAL_BYTES:
            expected = f"message {message.id} to have {SEAL_BYTES} bytes of content and more"
            raise FormatError(path, 0, expected, len(content))
        nonce, rest = content[:NONCE_BYTES], content[NONCE_BYTES:]
        try:
            return cipher.decrypt(nonce, rest, U64.pack(message.id))
        except InvalidTag:
            raise SealedStore(f"{path}: message {message.id} does not open with this key") from None

    return _with_contents(file, unsealed, encrypted=False)


def _with_contents(
    file: StoreFile, content_of: Callable[[Message], bytes], *, encrypted: bool
) -> StoreFile:
    def all_of(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple([msgspec.structs.replace(m, content=content_of(m)) for m in messages])

    return msgspec.structs.replace(
        file,
        messages=all_of(file.messages),
        dead_letters=all_of(file.dead_letters),
        archive=all_of(file.archive),
        encrypted=encrypted,
    )
