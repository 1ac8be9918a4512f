"""Tier 2: an object store, as far as the tiers need one, and the one that is a directory.

An object is put once and never changed: ``put`` fails where there is one already. Its metadata
(checksum, record count) lie beside it and tell, without reading it, whether it is the right one.

    ROOT/{key}             the object, as it was uploaded
    ROOT/{key}.meta.json   its metadata and ETag; written first, so an object has always got one
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from relay import fsio
from relay.aof2.files import NewFile, pieces, remove, size_of
from relay.aof2.format import Reason, crc64
from relay.errors import ObjectConflict, ObjectError, ObjectMissing

_META = ".meta.json"


class ObjectFacts(NamedTuple):
    """What a store says of an object without sending it."""

    size: int
    etag: str
    metadata: dict[str, str]


class Download(NamedTuple):
    """An object that is being read."""

    facts: ObjectFacts
    pieces: Iterator[bytes]  # errors while reading: ObjectError


class ObjectStore(Protocol):
    """Where Tier 2 lies. Every error is an ObjectError with its Reason; calls do not retry."""

    url: str  # for messages, without credentials

    def head(self, key: str) -> ObjectFacts | None:
        """What is known of an object; None when there is none."""

    def put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        """Store the file ``path``, durably; its ETag. Errors: ObjectConflict when the key is
        taken, ObjectError."""

    def get(self, key: str) -> Download:
        """Read an object. Errors: ObjectError; Reason.MISSING when there is none."""

    def delete(self, key: str) -> None:
        """Remove an object, durably; one that is gone already is fine."""


def open_objects(url: str) -> ObjectStore:
    """The store that a setting names: a directory's path, or ``s3://bucket/prefix``.

    Errors: RelayError when S3 is asked for and not installed.
    """
    if url.startswith("s3://"):
        from relay.aof2.s3 import S3Objects  # obstore takes 60 ms to load, and may not be there

        return S3Objects(url)
    return DirectoryObjects(url.removeprefix("file://"))


class DirectoryObjects:
    """Objects as files below a directory, synced. The directory is never made: where a disk is
    not mounted, nothing is to be written under its mount point."""

    def __init__(self, root: str) -> None:
        self.url = os.path.abspath(root)

    def head(self, key: str) -> ObjectFacts | None:
        """Size by the file, ETag and metadata by what lies beside it."""
        path = self._path(key)
        with self._failing(key):
            size = size_of(path)
            return None if size is None else self._facts(path, size)

    def put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        """Copy the file; the ETag is the crc64 of what was written, read back."""
        target = self._path(key)
        with self._failing(key):
            self._make_folders(key)
            if size_of(target) is not None:
                raise ObjectConflict(f"{target} is there already", Reason.AUTHENTICATION)
            with NewFile(target) as file:
                sent = 0
                for piece in pieces(path):
                    file.write(piece)
                    sent = crc64(piece, sent)
                file.sync()
                self._expect(_crc_of(file.temp), sent, target)
                etag = f"{sent:016x}"
                meta = json.dumps({"etag": etag, "metadata": metadata}, sort_keys=True)
                fsio.write_atomic(target + _META, meta.encode())
                file.commit()
            return etag

    def get(self, key: str) -> Download:
        """The file's bytes; whether they are the right ones is the caller's to check."""
        facts = self.head(key)
        if facts is None:
            raise ObjectMissing(f"{self.url}/{key}: no such object", Reason.MISSING)
        return Download(facts, self._read(key))

    def delete(self, key: str) -> None:
        """The object first: metadata without one are no object."""
        path = self._path(key)
        with self._failing(key):
            if os.path.isdir(os.path.dirname(path)):
                remove(path)
                remove(path + _META)

    def _path(self, key: str) -> str:
        """Where the object of that key is. Errors: ObjectError for a key that leads elsewhere."""
        parts = key.split("/")
        if "\0" in key or not {"", ".", ".."}.isdisjoint(parts):
            raise ObjectError(f"{self.url}: {key!r} is no key of an object", Reason.AUTHENTICATION)
        return os.path.join(self.url, *parts)

    def _read(self, key: str) -> Iterator[bytes]:
        with self._failing(key):
            yield from pieces(self._path(key))

    def _facts(self, path: str, size: int) -> ObjectFacts:
        try:
            told = json.loads(b"".join(pieces(path + _META)))
            return ObjectFacts(size, str(told["etag"]), dict(told["metadata"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ObjectFacts(size, "", {})  # so it is not taken for ours

    def _make_folders(self, key: str) -> None:
        folder = self.url
        for name in os.path.dirname(key).split("/"):
            above, folder = folder, os.path.join(folder, name)
            if not os.path.isdir(folder):
                fsio.ensure_dir(folder)
                fsio.sync_dir(above)

    def _expect(self, found: int, sent: int, target: str) -> None:
        if found != sent:
            raise ObjectError(
                f"{target}: wrote crc64 {sent:016x}, read back {found:016x}", Reason.TRANSIENT
            )

    def _failing(self, key: str) -> AbstractContextManager[None]:
        return _failing(self.url, key)


@contextmanager
def _failing(root: str, key: str) -> Iterator[None]:
    """What the system refuses becomes an ObjectError with its reason."""
    if not os.path.isdir(root):
        hint = "mount it, or make the directory"
        raise ObjectError(f"{root}: no such directory", Reason.UNAVAILABLE, hint=hint)
    try:
        yield
    except OSError as exc:
        denied = exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        reason = Reason.AUTHENTICATION if denied else Reason.TRANSIENT
        raise ObjectError(f"{root}/{key}: {exc.strerror or exc}", reason) from exc


def _crc_of(path: str) -> int:
    crc = 0
    for piece in pieces(path):
        crc = crc64(piece, crc)
    return crc
