"""Events as a journal keeps them: msgpack maps with a version, readable by any msgpack library.

    {"v": 1, "seq": n, "event": {"type": "MessageSent", ...}}    an event; the store's n-th
    {"v": 1, "start": {"boot_id": ..., "epoch": ..., "at": ...}}     control: its writer began
    {"v": 1, "checkpoint": {"offset": ..., "sequence": ...}}         snapshot boundary
    {"v": 1, "sealed": nonce | ciphertext | tag}                     one of these, encrypted

``seq`` makes replaying harmless: what a store has had already is passed over. Sealed with the
key of the store, additional data = the record's logical offset, u64: a record that was moved does
not open. Nonces are random: the same offset may be written twice, after a torn tail.

A change of an event's fields: a new field gets a default, and old records go on being read. What
old readers must not read as they know it is a new version, and the old decoder stays.
"""

from __future__ import annotations

import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from relay.acomm.encryption import NONCE_BYTES
from relay.acomm.reader import U64
from relay.base.errors import FormatError, SealedStore, VersionError
from relay.engine.events import Event

VERSION = 1


class Start(msgspec.Struct, frozen=True):
    """Its writer began: a record in between says that what came before may lack its last bytes."""

    boot_id: str  # of the machine: another one means that it was switched off in between
    epoch: int
    at: int  # Unix nanoseconds


class Checkpoint(msgspec.Struct, frozen=True):
    """A store file covers everything before ``offset``."""

    offset: int
    sequence: int


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of one record; exactly one of the last four is there."""

    v: int
    seq: int | None = None  # events of the store before this one
    event: Event | None = None
    start: Start | None = None
    checkpoint: Checkpoint | None = None
    sealed: bytes | None = None


class EventCodec:
    """Encodes and decodes payloads. ``key``: 32 bytes that seal them; None: they are plain."""

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = None if key is None else AESGCM(key)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Frame).decode

    def encode_event(self, seq: int, event: Event, offset: int) -> bytes:
        """The payload of an event's record at ``offset``."""
        return self.encode(Frame(VERSION, seq, event), offset)

    def encode(self, frame: Frame, offset: int) -> bytes:
        """The payload of a record at ``offset``."""
        plain = self._encode(frame)
        if self._cipher is None:
            return plain
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, plain, U64.pack(offset))
        return self._encode(Frame(VERSION, sealed=sealed))

    def decode(self, payload: bytes, offset: int, path: str = "journal") -> Frame:
        """What a record says. Errors: FormatError, VersionError naming its offset; SealedStore."""
        try:
            frame = self._decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise FormatError(path, offset, "an event of version 1", exc) from exc
        if frame.v != VERSION:
            raise VersionError(path, offset, f"events of version {VERSION}", frame.v)
        if frame.sealed is None:
            return frame
        return EventCodec().decode(self.unseal(frame.sealed, offset, path), offset, path)

    def unseal(self, sealed: bytes, offset: int, path: str = "journal") -> bytes:
        """The payload that a record at ``offset`` has sealed. Errors: SealedStore."""
        if self._cipher is None:
            raise SealedStore(f"{path} at {offset} is encrypted, and no key was given")
        nonce, rest = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, rest, U64.pack(offset))
        except (InvalidTag, ValueError):
            raise SealedStore(f"{path} at {offset} does not open with this key") from None
